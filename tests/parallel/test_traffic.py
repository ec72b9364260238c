"""Bytes that a rank sends in one step, by mesh axis, counted by Comm, equal the formulas: alone and in mixed layouts."""

from __future__ import annotations

from collections import Counter as Sum
from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import LR, SEED, Case, adamw, batches, on_one_device
from tests.matrix.plain import MIXED, Dtypes
from tests.matrix.sweep import CONTEXTS
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.comm.world_stages import world_stages
from weft.core.axes import data_axes, span
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward
from weft.models.common.moe import Router
from weft.parallel.model.parallelize import ParallelModel
from weft.prove.layout import micro_batches
from weft.prove.oracle import plain_model
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.optim import matrices
from weft.train.step import TrainStep
from weft.train.step_stats import NUM_FLAGS

DOUBLE = Dtypes("float64", "float64", "float64")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
WHOLE = 2**30
"""Bytes of a bucket that holds all gradients of a stage and group."""


def ring(whole: int, degree: int) -> int:
    """Sent by each rank for one reduce-scatter or one all-gather of `whole` bytes; an all-reduce is
    both.
    """
    assert whole * (degree - 1) % degree == 0, "padded so that shards are even"
    return whole * (degree - 1) // degree


def reduce_once(whole: int, degree: int) -> int:
    """Sent by each rank for one all-reduce."""
    return 2 * (degree - 1) * whole // degree


def gradients_and_values(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """What ZeRO's formulas say: e_g of gradients, e_p of gathered values, m micro-batches, each
    unit padded to its ranks.

    0: 2 e_g     1: e_g + e_p     2: m e_g + e_p     3: m (2 e_p + e_g)        times (d-1)/d N
    """
    e_g, e_p, m, sent = BYTES[dtypes.reduce], BYTES[dtypes.compute], case.microbatches, Sum[str]()
    far = {link.name for link in model.cross_stage_ties}

    def group(name: str) -> tuple[int, str, tuple[str, ...], str]:
        block = "" if case.zero == 0 else name.partition(".")[0]
        return (
            model.stage_of[name],
            block,
            model.shards[name].reduce_axes,
            name if block and name in far else "",
        )

    for (_, _, axes, _), members in groupby(sorted(model.params, key=group), key=group):
        degree, entries = (
            model.comm.degree(axes),
            sum(model.shards[name].box.size for name in members),
        )
        padded = -(-entries // degree) * degree
        both = {1: e_g + e_p, 2: m * e_g + e_p, 3: m * (2 * e_p + e_g)}
        sent["+".join(axes)] += (
            reduce_once(entries * e_g, degree)
            if case.zero == 0
            else ring(padded * both[case.zero], degree)
        )
    return sent


def activations(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """4 all-reduces of s b h / c a layer and micro-batch over tp, or gathers and scatters; s b h /
    c a boundary over pp.
    """
    comm, plan, config = model.comm, model.plan, case.config
    tp, sent, tokens = (
        comm.degree("tp"),
        Sum[str](),
        plan.seq_len * plan.micro_size // comm.degree("cp"),
    )
    width = tokens * config.dim * BYTES[dtypes.compute]
    names = [name for blocks in model.stages.values() for name in blocks]
    if tp > 1:
        per_micro = 4 * num_layers(model) * reduce_once(width, tp)
        per_micro += ("embed" in names) * (
            ring(width, tp) if case.sequence else reduce_once(width, tp)
        )
        per_micro += ("embed" in names and case.sequence) * ring(
            width, tp
        )  # its gradient is gathered
        per_micro += ("head" in names) * reduce_once(
            width, tp
        )  # its input's gradient; gather and scatter under sp
        wide = tokens * max(4, BYTES[dtypes.compute])
        per_micro += ("loss" in names) * (reduce_once(wide, tp) + reduce_once(2 * wide, tp))
        sent["tp"] += case.microbatches * per_micro
    if (pp := comm.degree("pp")) > 1:
        stages, home = len(plan.stages), plan.table.stage_to_rank
        crossed = [stage for stage in range(stages - 1) if home[stage] != home[stage + 1]]
        forward = sum(home[stage] == comm.index("pp") for stage in crossed)
        backward = sum(home[stage + 1] == comm.index("pp") for stage in crossed)
        sent["pp"] += (
            case.microbatches * (forward + backward) * width // (tp if case.sequence else 1)
        )
        assert pp <= stages
    return sent


def num_layers(model: ParallelModel) -> int:
    return sum(name.startswith("layer") for name in model.blocks)


def attention(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """A layer: ring and allgather (c-1) (s/c) b 2kv and twice that back; ulysses (c-1)/c (s/c) b
    (2h + 2kv) each way.
    """
    comm, plan, config = model.comm, model.plan, case.config
    c, tokens = comm.degree("cp"), plan.seq_len * plan.micro_size // comm.degree("cp")
    sizes = config.axis_sizes()
    h, kv = (
        sizes[axis] * config.dim // sizes["heads"] // comm.degree("tp")
        for axis in ("heads", "kv_heads")
    )
    ways = {
        "ring": 3 * (c - 1) * tokens * 2 * kv,
        "ulysses": 2 * (c - 1) * tokens * (2 * h + 2 * kv) // c,
    }
    entries = (ways | {"allgather": ways["ring"]})[case.context]
    return (
        Sum({"cp": case.microbatches * num_layers(model) * entries * BYTES[dtypes.compute]})
        if c > 1
        else Sum()
    )


def mixtures(model: ParallelModel, case: Case) -> Sum[str]:
    """4 all-to-alls a mixture and micro-batch, each of the T k tokens' choices whose experts live
    elsewhere, h wide.

    So (e-1)/e T k h where routing is even. What a rank brings leaves it twice (tokens, gradients of
    what came back), and so does what it serves. Besides: the counts of all ranks, the counts of
    whole sequences over cp, the loads of a step.
    """
    comm, plan, config, sent = model.comm, model.plan, case.config, Sum[str]()
    if "experts" not in config.axis_sizes():
        return sent
    e, num_experts, layers = comm.degree("ep"), config.axis_sizes()["experts"], num_layers(model)
    group = comm.mesh.group(comm.rank, "ep")
    mine = range(*span(num_experts, e, comm.index("ep")))
    for name, chosen in routing(on_one_device(case)).items():
        if name not in model.blocks:
            continue
        crossing = 0
        for rank in group:
            for micro in micro_batches(Batch(chosen, chosen, chosen), plan, rank):
                is_mine = torch.isin(micro.inputs, torch.tensor(mine))
                crossing += int((~is_mine if rank == comm.rank else is_mine).sum())
        sent["ep"] += 2 * crossing * config.dim * 8
    if e > 1:
        sent["ep"] += case.microbatches * layers * (e - 1) * num_experts * 8
    counts = plan.micro_size * (num_experts + 1) * 8
    sent["cp"] += (
        (comm.index("tp") == 0)
        * case.microbatches
        * layers
        * reduce_once(counts, comm.degree("cp"))
    )
    data = data_axes(comm.mesh)
    sent["+".join(data)] += reduce_once(layers * num_experts * 8, comm.degree(data)) if data else 0
    return sent


@cache
def routing(alone: Case) -> dict[str, Tensor]:
    """Block -> experts_BSK that each token of the first step visits on one device."""
    blocks = plain_model(FAMILIES[alone.family], alone.config, seed=SEED, dtype=torch.float64)
    chosen: dict[str, Tensor] = {}
    for name, block in blocks.items():
        for router in (module for module in block.modules() if isinstance(module, Router)):
            router.register_forward_hook(
                lambda _, args, out, name=name: chosen.update({name: out.experts})
            )
    forward(blocks, batches(alone)[0])
    return chosen


def totals(comm: Comm) -> Sum[str]:
    """Target tokens are counted over the data ranks; loss, norm, memory, expert load and a word are
    gathered from all.
    """
    data = [name for name, degree in comm.mesh.axes if name in ("dp", "cp", "ep") and degree > 1]
    columns = 3 + NUM_FLAGS + comm.degree("pp")  # loss, squared norm, expert load; flags; memory
    sent = Sum()
    for stage in world_stages(comm.rank, comm.mesh.size, checked=False):
        sent[stage.axis] += (stage.degree - 1) * columns * 8
    sent["+".join(data)] += reduce_once(8, comm.degree(tuple(data))) if data else 0
    return sent


def counted_and_expected(case: Case, dtypes: Dtypes) -> list[tuple[dict[str, int], dict[str, int]]]:
    def rank(comm: Comm) -> tuple[dict[str, int], dict[str, int]]:
        plan = case.plan.model_copy(update=vars(dtypes))
        model = build_model(FAMILIES[case.family], case.config, plan, comm, seed=SEED)
        step = TrainStep(
            model, make_optimizer=lambda tensors: adamw(tensors, matrices(model.params)), clip=1.0
        )
        comm.observers = (counter := Counter(),)
        step(micro_batches(batches(case)[0], plan, comm.rank), lr=LR)
        counted: Sum[str] = Sum()
        for (axis, _), traffic in counter.traffic.items():
            counted[axis] += traffic.sent_bytes
        right = (
            gradients_and_values(model, case, dtypes)
            + activations(model, case, dtypes)
            + totals(comm)
        )
        right += attention(model, case, dtypes) + mixtures(model, case)
        right.pop("", None)  # along no axis nothing is sent
        return {key: n for key, n in counted.items() if n}, {
            key: n for key, n in right.items() if n
        }

    return run_ranks(case.mesh, rank)


ALONE = (
    *(Case(mesh, zero=zero, microbatches=2) for mesh in ("dp2", "dp3") for zero in (0, 1, 2, 3)),
    Case("tp2", microbatches=3),
    Case("tp2", microbatches=3, sequence=True),
    Case("tp4", microbatches=1, sequence=True, zero=1),
    Case("pp2", microbatches=3),
    Case("pp2", microbatches=4, schedule="interleaved", chunks=2),
    Case("pp2", microbatches=4, schedule="zbv", chunks=2),
    *(Case("cp2", grouped=True, microbatches=2, context=context) for context in CONTEXTS),
    *(Case("cp4", microbatches=1, context=context) for context in CONTEXTS),
    Case("ep2", family="qwen3-moe", microbatches=2),
    Case("ep4", family="qwen3-moe", microbatches=1),
)
TOGETHER = (
    Case("dp2 tp2", microbatches=2, sequence=True, zero=2),
    Case("pp2 dp2", microbatches=4, zero=3),
    Case("pp2 dp2 tp2", microbatches=2, sequence=True, zero=1),
    Case("pp2 dp2 tp2", microbatches=2),
    Case("cp2 tp2", microbatches=2, sequence=True, grouped=True),
    Case("pp2 dp2 cp2", microbatches=2, zero=1, context="allgather"),
    Case("cp2 tp2 dp2", microbatches=1, zero=3, context="ulysses", documents=True),
    Case("ep2 tp2", family="qwen3-moe", microbatches=2, sequence=True),
    Case("dp2 ep2 cp2", family="qwen3-moe", microbatches=2, zero=2),
    Case("pp2 ep2 tp2", family="qwen3-moe", microbatches=2, layers=4),
)


@pytest.mark.parametrize("case", [*ALONE, *TOGETHER], ids=str)
def test_bytes_of_a_step_are_those_of_the_formulas(case: Case) -> None:
    for counted, right in counted_and_expected(replace(case, bucket_bytes=WHOLE), DOUBLE):
        assert counted == right


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_mixed_precision_gathers_in_compute_and_reduces_in_reduce(zero: int) -> None:
    for case in (
        Case("dp2", microbatches=2, zero=zero),
        Case("dp2 tp2", microbatches=2, sequence=True, zero=zero),
    ):
        for counted, right in counted_and_expected(case, MIXED):
            assert counted == right


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gathers_no_parameter_once_more(recompute: str) -> None:
    for counted, right in counted_and_expected(
        Case("dp3", microbatches=2, zero=3, recompute=recompute), DOUBLE
    ):
        assert counted == right
