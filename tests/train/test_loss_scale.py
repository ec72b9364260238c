"""Precision: which types go together, masters, loss scaling that all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import CLIP, LR, Case, adamw, batches, build_case
from tests.matrix.plain import HALF, MIXED, PURE, Dtypes
from tests.one_device import micro_batches
from weft.comm.comm import Comm
from weft.core.precision import REPRESENTS, Dtype, dtype_faults
from weft.errors import PlanError, WeftError
from weft.layout.plan import Plan
from weft.parallel.zero.grad_norm import squares_of
from weft.parallel.zero.param_group import ParamGroup
from weft.testing import run_ranks
from weft.train import loss_scale
from weft.train.loss_scale import FLOOR, GROW_EVERY, START, LossScale
from weft.train.optim import matrices
from weft.train.step import StepReport, TrainStep

DYNAMIC = LossScale(START, is_dynamic=True)


def has_all_numbers_of(wide: str, narrow: str) -> bool:
    few = torch.finfo(getattr(torch, narrow))
    many = torch.finfo(getattr(torch, wide))
    is_as_fine = many.eps <= few.eps
    is_as_large = many.max >= few.max
    is_as_small = many.smallest_normal <= few.smallest_normal
    return is_as_fine and is_as_large and is_as_small


@pytest.mark.parametrize("params", get_args(Dtype))
@pytest.mark.parametrize("compute", get_args(Dtype))
@pytest.mark.parametrize("reduce", get_args(Dtype))
def test_types_go_together_where_nothing_is_kept_or_summed_with_fewer_digits_than_computed(
    params: Dtype, compute: Dtype, reduce: Dtype
) -> None:
    faults = dtype_faults(params=params, compute=compute, reduce=reduce)
    keys = {fault.key for fault in faults}
    reduces_all = has_all_numbers_of(reduce, compute)
    keeps_all = has_all_numbers_of(params, compute) and params != "float16"
    assert ("precision.reduce" in keys) == (not reduces_all)
    assert ("precision.params" in keys) == (not keeps_all)


def test_the_table_of_types_is_what_their_numbers_say() -> None:
    for wide, represented in REPRESENTS.items():
        for narrow in REPRESENTS:
            assert (narrow in represented) == has_all_numbers_of(wide, narrow)


def test_a_plan_with_types_that_do_not_go_together_is_rejected() -> None:
    plan = Case("").plan.model_copy(update=vars(Dtypes("bfloat16", "float32", "float32")))
    with pytest.raises(
        PlanError, match=r"precision\.params: does not represent every number of the float32"
    ):
        plan.check()


def test_the_scale_halves_on_overflow_and_doubles_after_so_many_good_steps() -> None:
    halved = DYNAMIC.after(is_finite=False)
    assert halved.value == START / 2
    assert halved.good_steps == 0
    scale = halved
    for _ in range(GROW_EVERY - 1):
        scale = scale.after(is_finite=True)
    assert scale.value == START / 2
    assert scale.after(is_finite=True) == replace(DYNAMIC, good_steps=0)
    assert scale.after(is_finite=False).good_steps == 0, "an overflow starts the count anew"


def test_the_scale_is_1_and_nothing_is_skipped_but_in_float16() -> None:
    case = Case("")
    for dtypes in (MIXED, PURE, Dtypes("float64", "float64", "float64")):
        scale = LossScale.of(plan_of(case, dtypes))
        assert scale == LossScale(1.0)
        assert scale.after(is_finite=False) == scale
        assert not scale.skips(is_finite=False)
    assert LossScale.of(plan_of(case, HALF)) == DYNAMIC


def test_gradients_that_are_not_finite_at_any_scale_end_the_run_and_say_what_to_do() -> None:
    with pytest.raises(WeftError, match=r"precision\.compute bfloat16"):
        LossScale(FLOOR, is_dynamic=True).after(is_finite=False)


def plan_of(case: Case, dtypes: Dtypes) -> Plan:
    return case.plan.model_copy(update=vars(dtypes))


def sgd_step(case: Case, dtypes: Dtypes, comm: Comm, *, clip: float) -> TrainStep:
    """A step whose updates are the gradients times the learning rate."""
    plan = plan_of(case, dtypes)
    model = build_case(case, comm, plan=plan)
    return TrainStep(
        model, make_optimizer=lambda tensors: torch.optim.SGD(tensors.values(), lr=1.0), clip=clip
    )


def train(
    case: Case, dtypes: Dtypes, comm: Comm, *, num_steps: int = 3, clip: float = CLIP
) -> tuple[list[StepReport], dict[str, Tensor]]:
    """Reports of some steps, and the values after them."""
    plan = case.plan.model_copy(update=vars(dtypes))
    model = build_case(case, comm, plan=plan)
    decayed = matrices(model.params)
    step = TrainStep(model, make_optimizer=lambda tensors: adamw(tensors, decayed), clip=clip)
    reports = []
    for batch in batches(case)[:num_steps]:
        reports.append(step(micro_batches(batch, plan, comm.rank), lr=LR))
    return reports, step.grads.full_parameters()


LAYOUTS = (
    Case("dp2", microbatches=2),
    Case("pp2 tp2", family="gpt2"),
    Case("dp2 tp2", microbatches=2, zero=3),
)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_float16_logs_the_norm_and_loss_of_the_model_not_of_its_scaled_gradients(
    case: Case,
) -> None:
    half = run_ranks(case.mesh, lambda comm: train(case, HALF, comm, num_steps=1)[0])
    mixed = run_ranks(case.mesh, lambda comm: train(case, MIXED, comm, num_steps=1)[0])
    (exact,) = mixed[0]
    for (report,) in half:
        assert report.loss_scale == START
        assert report.skipped is False
        assert report.loss == pytest.approx(exact.loss, rel=1e-2)
        assert report.grad_norm == pytest.approx(exact.grad_norm, rel=1e-2)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ParamGroup.start_reduce
    struck = set[int]()

    def overflow_once(self: ParamGroup) -> None:
        if self.comm.rank == 1 and not struck and self.unsharded_grad is not None:
            struck.add(1)
            self.unsharded_grad[0] = torch.inf
        right(self)

    monkeypatch.setattr(ParamGroup, "start_reduce", overflow_once)
    for reports, _ in run_ranks(case.mesh, lambda comm: train(case, HALF, comm)):
        assert [report.skipped for report in reports] == [True, False, False]
        loss_scales = [report.loss_scale for report in reports]
        assert loss_scales == [START, START / 2, START / 2]
        assert not math.isfinite(reports[0].grad_norm)
        for report in reports[1:]:
            assert math.isfinite(report.grad_norm)


def test_a_skipped_step_leaves_values_and_optimizer_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("dp2", microbatches=2)
    monkeypatch.setattr(loss_scale, "START", 2.0**60)
    before = run_ranks(case.mesh, lambda comm: train(case, HALF, comm, num_steps=0)[1])
    ranks = run_ranks(case.mesh, lambda comm: train(case, HALF, comm))
    for (reports, after), values in zip(ranks, before, strict=True):
        for report in reports:
            assert report.skipped
        for name, value in values.items():
            assert torch.equal(after[name], value)


def test_a_scale_that_had_to_be_found_trains_bit_for_bit_as_the_right_one_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("", microbatches=2)

    def first_good_values(start: float) -> tuple[int, dict[str, Tensor]]:
        monkeypatch.setattr(loss_scale, "START", start)

        def rank(comm: Comm) -> tuple[int, dict[str, Tensor]]:
            plan = case.plan.model_copy(update=vars(HALF))
            model = build_case(case, comm, plan=plan)
            step = TrainStep(model, make_optimizer=lambda tensors: adamw(tensors, ()), clip=CLIP)
            batch = batches(case)[0]
            skipped = 0
            while step(micro_batches(batch, plan, comm.rank), lr=LR).skipped:
                skipped += 1
            return skipped, step.grads.full_parameters()

        return run_ranks("", rank)[0]

    skipped, found = first_good_values(2.0**26)
    none, right = first_good_values(2.0**26 / 2**skipped)
    assert (skipped > 0) is True
    assert none == 0
    for name, value in right.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_sgd_updates_by_gradients_without_the_loss_scale(clip: float) -> None:
    """AdamW divides by its second moment and so hides a factor in the gradients; plain SGD does
    not.
    """
    case = Case("dp2", microbatches=2)

    def updates(dtypes: Dtypes) -> dict[str, Tensor]:
        def rank(comm: Comm) -> dict[str, Tensor]:
            step = sgd_step(case, dtypes, comm, clip=clip)
            before = {}
            for name, value in step.grads.full_parameters().items():
                before[name] = value.clone()
            batch = batches(case)[0]
            report = step(micro_batches(batch, step.model.plan, comm.rank), lr=1.0)
            assert not report.skipped
            after = step.grads.full_parameters()
            return {name: value - before[name] for name, value in after.items()}

        return run_ranks(case.mesh, rank)[0]

    scaled = updates(HALF)
    unscaled = updates(Dtypes("float32", "float32", "float32"))
    for name, expected in unscaled.items():
        error = (scaled[name] - expected).norm()
        size = expected.norm()
        assert error.item() <= 0.03 * size.item() + 1e-6, name


@pytest.mark.parametrize(
    "dtypes", [MIXED, HALF, Dtypes("float32", "bfloat16", "bfloat16")], ids=str
)
def test_every_zero_stage_trains_the_same_masters(dtypes: Dtypes) -> None:
    """One micro-batch: sums of two numbers, in any order the same. Nothing is clipped: kernels add the
    squares of a norm in an order that depends on the shards, and on some CPUs to other last bits.
    """

    def losses(zero: Any) -> list[float]:
        case = Case("dp2", microbatches=1, zero=zero)
        reports, values = run_ranks(case.mesh, lambda comm: train(case, dtypes, comm, clip=0.0))[0]
        for value in values.values():
            assert value.dtype == torch.float32
        return [report.loss for report in reports]

    plain = losses(0)
    for zero in (1, 2, 3):
        assert losses(zero) == plain


def test_masters_keep_steps_that_the_type_of_compute_would_round_away() -> None:
    case = Case("", microbatches=2)

    def moved(dtypes: Dtypes) -> float:
        """Share of the entries of norms that some steps change."""

        def rank(comm: Comm) -> float:
            step = sgd_step(case, dtypes, comm, clip=0.0)
            before = {}
            for name, value in step.grads.full_parameters().items():
                if "norm" in name:
                    before[name] = value.float()
            for batch in batches(case):
                step(micro_batches(batch, step.model.plan, comm.rank), lr=1e-2)
            after = step.grads.full_parameters()
            changed = []
            for name, value in before.items():
                has_changed = after[name].float() != value
                changed.append(has_changed.float().mean())
            return float(torch.stack(changed).mean())

        return run_ranks("", rank)[0]

    assert moved(PURE) == 0.0, "steps of 1e-4: 1 + 1e-4 is 1 in bfloat16"
    assert moved(MIXED) > 0.9


def test_bfloat16_gradients_are_normed_in_float32() -> None:
    """A bfloat16 norm is off by up to 4e-3."""
    case = Case("", microbatches=2)
    ((pure,),) = run_ranks("", lambda comm: train(case, PURE, comm, num_steps=1)[0])
    ((mixed,),) = run_ranks("", lambda comm: train(case, MIXED, comm, num_steps=1)[0])
    assert pure.grad_norm == pytest.approx(mixed.grad_norm, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_large_gradient_does_not_depend_on_how_it_is_sharded(
    dtype: torch.dtype,
) -> None:
    """One sum in float32 over all entries is off by 17e-6 on the CPU, sums of rows by 7e-7."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.rand(2**20 + 100, generator=generator).to(dtype)
    right = gradient.double().square().sum()
    vector = gradient[:7]
    whole, first = squares_of([gradient, vector])
    halves = squares_of(list(gradient.chunk(2)))
    assert whole.item() == pytest.approx(right.item(), rel=2e-6)
    assert halves.sum().item() == pytest.approx(right.item(), rel=2e-6)
    assert first.item() == pytest.approx(vector.double().square().sum().item(), rel=1e-6)
