"""Bytes that a rank sends in one step, by mesh axis, equal the formulas: one dimension alone, and mixed layouts."""

from __future__ import annotations

from collections import Counter as Sum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import (
    LR,
    SEED,
    Case,
    batches,
    make_step,
    on_one_device,
    own_micro_batches,
)
from tests.matrix.plain import MIXED, Dtypes
from tests.matrix.sweep import CONTEXTS
from tests.one_device import micro_batches, plain_model
from tests.sampling import sampled
from weft.comm.comm import Comm
from weft.comm.group import world_stages
from weft.comm.observe import Counter
from weft.core.axes import data_axes, span
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward
from weft.models.common.moe import Router, Routing
from weft.parallel.model.parallelize import ParallelModel
from weft.testing import run_ranks
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


@dataclass(frozen=True, order=True)
class Unit:
    """Parameters that are reduced together: a stage without ZeRO, otherwise a block.

    A parameter that is tied to another stage is a unit of its own.
    """

    stage: int
    block: str
    axes: tuple[str, ...]
    tied: str


def unit_of(model: ParallelModel, case: Case) -> Callable[[str], Unit]:
    tied_to_other_stage = {link.name for link in model.cross_stage_ties}

    def unit(name: str) -> Unit:
        block = name.partition(".")[0] if case.zero else ""
        tied = name if block and name in tied_to_other_stage else ""
        return Unit(model.stage_of[name], block, model.shards[name].reduce_axes, tied)

    return unit


def sent_by_axis(counter: Counter) -> Sum[str]:
    """Bytes that a rank sent along each mesh axis."""
    sent = Sum[str]()
    for (axis, _), traffic in counter.traffic.items():
        sent[axis] += traffic.sent_bytes
    return sent


def operations_by_name(counter: Counter) -> dict[str, int]:
    """How many operations of each kind a rank called, over all mesh axes."""
    operations: dict[str, int] = {}
    for (_, name), traffic in counter.traffic.items():
        operations[name] = operations.get(name, 0) + traffic.operations
    return operations


def gradients_and_values(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """What ZeRO's formulas say: e_g of gradients, e_p of gathered values, m micro-batches, each
    unit padded to its ranks.

    0: 2 e_g     1: e_g + e_p     2: m e_g + e_p     3: m (2 e_p + e_g)        times (d-1)/d N
    """
    e_g = BYTES[dtypes.reduce]
    e_p = BYTES[dtypes.compute]
    m = case.microbatches
    bytes_per_entry = {1: e_g + e_p, 2: m * e_g + e_p, 3: m * (2 * e_p + e_g)}
    sent = Sum[str]()
    key = unit_of(model, case)
    for unit, members in groupby(sorted(model.params, key=key), key=key):
        axes = unit.axes
        degree = model.comm.degree(axes)
        entries = sum(model.shards[name].box.size for name in members)
        padded = -(-entries // degree) * degree
        if case.zero == 0:
            num_bytes = reduce_once(entries * e_g, degree)
        else:
            whole = padded * bytes_per_entry[case.zero]
            num_bytes = ring(whole, degree)
        sent["+".join(axes)] += num_bytes
    return sent


def activations(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """Bytes of activations over tp and pp."""
    plan = model.plan
    tokens = plan.seq_len * plan.micro_size // model.comm.degree("cp")
    entry_bytes = BYTES[dtypes.compute]
    sent = Sum[str]()
    if model.comm.degree("tp") > 1:
        sent["tp"] += case.microbatches * tensor_parallel_bytes(model, case, tokens, entry_bytes)
    if model.comm.degree("pp") > 1:
        boundary = tokens * case.config.dim * entry_bytes
        if case.sequence:
            boundary //= model.comm.degree("tp")
        sent["pp"] += case.microbatches * num_messages(model) * boundary
    return sent


def tensor_parallel_bytes(model: ParallelModel, case: Case, tokens: int, entry_bytes: int) -> int:
    """Of one micro-batch: 4 all-reduces of s b h / c a layer, or as many gathers and scatters."""
    tp = model.comm.degree("tp")
    width = tokens * case.config.dim * entry_bytes
    names = [name for blocks in model.stages.values() for name in blocks]
    sent = 4 * num_layers(model) * reduce_once(width, tp)
    if "embed" in names and case.sequence:
        sent += 2 * ring(width, tp)  # the output is scattered, its gradient gathered
    elif "embed" in names:
        sent += reduce_once(width, tp)
    if "head" in names:
        # the gradient of its input; under sequence parallelism gather and scatter
        sent += reduce_once(width, tp)
    if "loss" in names:
        one_per_token = tokens * max(4, entry_bytes)
        sent += reduce_once(one_per_token, tp) + reduce_once(2 * one_per_token, tp)
    return sent


def num_messages(model: ParallelModel) -> int:
    """What a rank sends for one micro-batch: outputs forward, their gradients backward."""
    owners = model.plan.table.stage_to_rank
    own = model.comm.index("pp")
    messages = 0
    for sender, receiver in pairwise(owners):
        if sender != receiver:
            messages += (sender == own) + (receiver == own)
    return messages


def num_layers(model: ParallelModel) -> int:
    return sum(name.startswith("layer") for name in model.blocks)


def attention(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """A layer: ring and allgather (c-1) (s/c) b 2kv and twice that back; ulysses (c-1)/c (s/c) b
    (2h + 2kv) each way.
    """
    comm = model.comm
    plan = model.plan
    c = comm.degree("cp")
    if c == 1:
        return Sum()
    tokens = plan.seq_len * plan.micro_size // c
    sizes = case.config.axis_sizes()
    head_size = case.config.dim // sizes["heads"]
    h = sizes["heads"] * head_size // comm.degree("tp")
    kv = sizes["kv_heads"] * head_size // comm.degree("tp")
    if case.context == "ulysses":
        entries = 2 * (c - 1) * tokens * (2 * h + 2 * kv) // c
    else:
        entries = 3 * (c - 1) * tokens * 2 * kv
    of_layer = entries * BYTES[dtypes.compute]
    return Sum({"cp": case.microbatches * num_layers(model) * of_layer})


def mixtures(model: ParallelModel, case: Case) -> Sum[str]:
    """4 all-to-alls a mixture and micro-batch, each of the T k tokens' choices whose experts live
    elsewhere, h wide.

    So (e-1)/e T k h where routing is even. What a rank sends leaves it twice (tokens, gradients of
    what came back), and so does what it computes for others. Besides: the counts of all ranks, the
    counts of whole sequences over cp, the loads of a step.
    """
    comm = model.comm
    sent = Sum[str]()
    if "experts" not in case.config.axis_sizes():
        return sent
    num_experts = case.config.axis_sizes()["experts"]
    num_mixtures = num_layers(model) * case.microbatches
    e = comm.degree("ep")
    for name, chosen in routing(on_one_device(case)).items():
        if name in model.blocks:
            sent["ep"] += 2 * crossing_choices(model, chosen, num_experts) * case.config.dim * 8
    if e > 1:
        sent["ep"] += num_mixtures * (e - 1) * num_experts * 8
    if comm.index("tp") == 0:
        counts_bytes = model.plan.micro_size * (num_experts + 1) * 8
        sent["cp"] += num_mixtures * reduce_once(counts_bytes, comm.degree("cp"))
    data = data_axes(comm.mesh)
    if data:
        loads_bytes = num_layers(model) * num_experts * 8
        sent["+".join(data)] += reduce_once(loads_bytes, comm.degree(data))
    return sent


def crossing_choices(model: ParallelModel, chosen: Tensor, num_experts: int) -> int:
    """How many choices of experts of one block this rank sends to others or receives from them."""
    comm = model.comm
    first, stop = span(num_experts, comm.degree("ep"), comm.index("ep"))
    own_experts = torch.arange(first, stop)
    crossing = 0
    for rank in comm.mesh.group(comm.rank, "ep"):
        for micro in micro_batches(Batch(chosen, chosen, chosen), model.plan, rank):
            is_own = torch.isin(micro.inputs, own_experts)
            crosses = ~is_own if rank == comm.rank else is_own
            crossing += int(crosses.sum())
    return crossing


@cache
def routing(alone: Case) -> dict[str, Tensor]:
    """Block -> experts_BSK that each token of the first step visits on one device."""
    blocks = plain_model(FAMILIES[alone.family], alone.config, seed=SEED, dtype=torch.float64)
    chosen: dict[str, Tensor] = {}

    def record(block_name: str, router: Router) -> None:
        def after_forward(_: object, args: object, out: Routing) -> None:
            chosen[block_name] = out.experts

        router.register_forward_hook(after_forward)

    for name, block in blocks.items():
        for module in block.modules():
            if isinstance(module, Router):
                record(name, module)
    forward(blocks, batches(alone)[0])
    return chosen


def totals(comm: Comm) -> Sum[str]:
    """Target tokens are counted over the data ranks; loss, norm, memory, expert load and flags are
    gathered from all.
    """
    columns = 3 + NUM_FLAGS + comm.degree("pp")  # loss, squared norm, expert load; flags; memory
    sent = Sum()
    for stage in world_stages(comm.rank, comm.mesh.size, checked=False):
        sent[stage.axis] += (stage.degree - 1) * columns * 8
    data = data_axes(comm.mesh)
    if data:
        sent["+".join(data)] += reduce_once(8, comm.degree(data))
    return sent


def counted_and_expected(case: Case, dtypes: Dtypes) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Bytes by axis that each rank sends in one step: counted, and by the formulas."""

    def rank(comm: Comm) -> tuple[dict[str, int], dict[str, int]]:
        plan = case.plan.model_copy(update=vars(dtypes))
        step = make_step(case, comm, plan=plan, clip=1.0)
        model = step.model
        counter = Counter()
        comm.observers = (counter,)
        step(own_micro_batches(case, comm), lr=LR)
        expected = gradients_and_values(model, case, dtypes)
        expected += activations(model, case, dtypes)
        expected += totals(comm)
        expected += attention(model, case, dtypes)
        expected += mixtures(model, case)
        expected.pop("", None)  # along no axis nothing is sent
        return without_zeros(sent_by_axis(counter)), without_zeros(expected)

    return run_ranks(case.mesh, rank)


def without_zeros(sent: Sum[str]) -> dict[str, int]:
    return {axis: num_bytes for axis, num_bytes in sent.items() if num_bytes}


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


@pytest.mark.parametrize("case", sampled([*ALONE, *TOGETHER]), ids=str)
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
