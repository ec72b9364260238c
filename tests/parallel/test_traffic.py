"""Bytes that a rank sends in one step, by mesh axis, counted by Comm, equal the formulas: alone and in mixed layouts."""

from __future__ import annotations

from collections import Counter as Sum
from dataclasses import replace
from itertools import groupby

import pytest

from tests.matrix.layouts import LR, SEED, Case, adamw, batches
from tests.matrix.plain import MIXED, Dtypes
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.models import FAMILIES
from weft.parallel.model import ParallelModel
from weft.prove.layout import micro_batches
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.optim import matrices
from weft.train.step import TrainStep

DOUBLE = Dtypes("float64", "float64", "float64")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
WHOLE = 2**30
"""Bytes of a bucket that holds all gradients of a stage and group."""


def ring(whole: int, degree: int) -> int:
    """Sent by each rank for one reduce-scatter or one all-gather of `whole` bytes; an all-reduce is both."""
    assert whole * (degree - 1) % degree == 0, "padded so that shards are even"
    return whole * (degree - 1) // degree


def reduce_once(whole: int, degree: int) -> int:
    """Sent by each rank for one all-reduce."""
    return 2 * (degree - 1) * whole // degree


def gradients_and_values(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """What ZeRO's formulas say: e_g of gradients, e_p of gathered values, m micro-batches, each unit padded to its ranks.

    0: 2 e_g     1: e_g + e_p     2: m e_g + e_p     3: m (2 e_p + e_g)        times (d-1)/d N
    """
    e_g, e_p, m, sent = BYTES[dtypes.reduce], BYTES[dtypes.compute], case.microbatches, Sum[str]()
    far = {link.name for link in model.far_ties}

    def group(name: str) -> tuple[int, str, tuple[str, ...], str]:
        block = "" if case.zero == 0 and dtypes == DOUBLE else name.partition(".")[0]
        return model.stage_of[name], block, model.pieces[name].reduce, name if block and name in far else ""

    for (_, _, axes, _), members in groupby(sorted(model.params, key=group), key=group):
        degree, entries = model.comm.degree(axes), sum(model.pieces[name].box.size for name in members)
        padded = -(-entries // degree) * degree
        both = {1: e_g + e_p, 2: m * e_g + e_p, 3: m * (2 * e_p + e_g)}
        sent["+".join(axes)] += (
            reduce_once(entries * e_g, degree) if case.zero == 0 else ring(padded * both[case.zero], degree)
        )
    return sent


def activations(model: ParallelModel, case: Case, dtypes: Dtypes) -> Sum[str]:
    """4 all-reduces of s b h a layer and micro-batch over tp, or as many gathers and scatters; s b h a boundary over pp."""
    comm, plan, config = model.comm, model.plan, case.config
    tp, sent, tokens = comm.degree("tp"), Sum[str](), plan.seq_len * plan.micro_size
    width = tokens * config.dim * BYTES[dtypes.compute]
    if tp > 1:
        names = [name for blocks in model.stages.values() for name in blocks]
        per_micro = 4 * sum(name.startswith("layer") for name in names) * reduce_once(width, tp)
        per_micro += ("embed" in names) * (ring(width, tp) if case.sequence else reduce_once(width, tp))
        per_micro += ("embed" in names and case.sequence) * ring(width, tp)  # its gradient is gathered
        per_micro += ("head" in names) * reduce_once(width, tp)  # its input's gradient; gather and scatter under sp
        wide = tokens * max(4, BYTES[dtypes.compute])
        per_micro += ("loss" in names) * (reduce_once(wide, tp) + reduce_once(2 * wide, tp))
        sent["tp"] += case.microbatches * per_micro
    if (pp := comm.degree("pp")) > 1:
        stages, home = len(plan.stages), plan.table.home
        crossed = [stage for stage in range(stages - 1) if home[stage] != home[stage + 1]]
        forward = sum(home[stage] == comm.index("pp") for stage in crossed)
        backward = sum(home[stage + 1] == comm.index("pp") for stage in crossed)
        sent["pp"] += case.microbatches * (forward + backward) * width // (tp if case.sequence else 1)
        assert pp <= stages
    return sent


def totals(comm: Comm) -> Sum[str]:
    """Target tokens are counted over the data ranks; loss, norm, memory and expert load are gathered from all."""
    data = [name for name, degree in comm.mesh.axes if name in ("dp", "cp", "ep") and degree > 1]
    every = [name for name, degree in comm.mesh.axes if degree > 1]
    sent = Sum({"+".join(every): (comm.mesh.size - 1) * 4 * 8})
    sent["+".join(data)] += reduce_once(8, comm.degree(tuple(data))) if data else 0
    return sent


def counted_and_expected(case: Case, dtypes: Dtypes) -> list[tuple[dict[str, int], dict[str, int]]]:
    def rank(comm: Comm) -> tuple[dict[str, int], dict[str, int]]:
        plan = case.plan.model_copy(update=vars(dtypes))
        model = build_model(FAMILIES[case.family], case.config, plan, comm, seed=SEED)
        step = TrainStep(model, make_optimizer=lambda tensors: adamw(tensors, matrices(model.params)), clip=1.0)
        comm.observers = (counter := Counter(),)
        step(micro_batches(batches(case)[0], plan, comm.rank), lr=LR)
        counted: Sum[str] = Sum()
        for (axis, _), traffic in counter.traffic.items():
            counted[axis] += traffic.sent_bytes
        right = gradients_and_values(model, case, dtypes) + activations(model, case, dtypes) + totals(comm)
        right.pop("", None)  # along no axis nothing is sent
        return {key: n for key, n in counted.items() if n}, {key: n for key, n in right.items() if n}

    return run_ranks(case.mesh, rank)


ALONE = (
    *(Case(mesh, zero=zero, microbatches=2) for mesh in ("dp2", "dp3") for zero in (0, 1, 2, 3)),
    Case("tp2", microbatches=3),
    Case("tp2", microbatches=3, sequence=True),
    Case("tp4", microbatches=1, sequence=True, zero=1),
    Case("pp2", microbatches=3),
    Case("pp2", microbatches=4, schedule="interleaved", chunks=2),
    Case("pp2", microbatches=4, schedule="zbv", chunks=2),
)
TOGETHER = (
    Case("dp2 tp2", microbatches=2, sequence=True, zero=2),
    Case("pp2 dp2", microbatches=4, zero=3),
    Case("pp2 dp2 tp2", microbatches=2, sequence=True, zero=1),
    Case("pp2 dp2 tp2", microbatches=2),
)


@pytest.mark.parametrize("case", [*ALONE, *TOGETHER], ids=str)
def test_bytes_of_a_step_are_those_of_the_formulas(case: Case) -> None:
    for counted, right in counted_and_expected(replace(case, bucket_bytes=WHOLE), DOUBLE):
        assert counted == right


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_mixed_precision_gathers_in_compute_and_reduces_in_reduce(zero: int) -> None:
    for case in (Case("dp2", microbatches=2, zero=zero), Case("dp2 tp2", microbatches=2, sequence=True, zero=zero)):
        for counted, right in counted_and_expected(case, MIXED):
            assert counted == right


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gathers_no_parameter_once_more(recompute: str) -> None:
    for counted, right in counted_and_expected(Case("dp3", microbatches=2, zero=3, recompute=recompute), DOUBLE):
        assert counted == right
