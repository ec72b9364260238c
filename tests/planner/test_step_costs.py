"""Memory, FLOPs and traffic that are measured on the meta device equal those of a real step, to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from weft.comm.comm import Comm
from weft.comm.observe import Counter as TrafficCounter
from weft.comm.transport import MetaTransport
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.models.common.moe import Choice, MoE, Router
from weft.parallel.expert.dispatch import even_load, first_rank_load
from weft.planner.measure import played_actions, rank_step
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank, record_step
from weft.planner.measure.step_memory import step_memory
from weft.planner.measure.step_traffic import step_traffic
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.step import TrainStep

LAYOUTS = {
    "one rank": "",
    "dp2": "--mesh dp2 --batch.global_size 4",
    "dp2 zero1": "--mesh dp2 --parallel.zero 1",
    "dp2 zero2": "--mesh dp2 --parallel.zero 2",
    "dp2 zero3": "--mesh dp2 --parallel.zero 3",
    "tp2 sequence": "--mesh tp2 --parallel.sequence True",
    "tp2 in chunks": "--mesh tp2 --parallel.sequence True --parallel.tp_overlap True",
    "dp2 tp4 zero3 in chunks, full recompute": (
        "--mesh dp2,tp4 --parallel.zero 3 --parallel.sequence True --parallel.tp_overlap True"
        " --parallel.recompute full --model.kv_heads 4 --batch.micro_size 2"
    ),
    "cp2": "--mesh cp2",
    "cp2 allgather": "--mesh cp2 --parallel.context allgather",
    "cp2 ulysses": "--mesh cp2 --parallel.context ulysses",
    "pp2 dp2 zero2 interleaved": (
        "--mesh pp2,dp2 --parallel.zero 2 --pipeline.schedule interleaved --pipeline.chunks 2"
        " --model.layers 8"
    ),
    "dp2 deterministic": "--mesh dp2 --deterministic True --batch.global_size 14",
    "pp2 dp2 zero2 deterministic": "--mesh pp2,dp2 --deterministic True --parallel.zero 2 --batch.global_size 12",
    "dp2 fsdp2 zero2 deterministic": (
        "--mesh dp2,fsdp2 --deterministic True --parallel.zero 2 --batch.global_size 12"
    ),
    "dp2 fsdp2 zero1 deterministic": (
        "--mesh dp2,fsdp2 --deterministic True --parallel.zero 1 --batch.global_size 4"
    ),
    "dp2 fsdp2 zero3": "--mesh dp2,fsdp2 --parallel.zero 3 --batch.global_size 4",
    "dp2 documents": "--mesh dp2 --data.packing documents --parallel.zero 2 --batch.global_size 4",
    "cp2 documents": "--mesh cp2 --data.packing documents --batch.global_size 2",
    "preference pairs": "--loss dpo --data.format preference --batch.global_size 2",
    "pp2 cp2 preference pairs": "--mesh pp2,cp2 --loss dpo --data.format preference --batch.global_size 4",
    "kto": "--loss dpo --dpo.loss_type kto --data.format unpaired --batch.global_size 4",
    "dp2 zero3 kto": (
        "--mesh dp2 --parallel.zero 3 --loss dpo --dpo.loss_type kto --data.format unpaired"
        " --batch.global_size 4"
    ),
    "dp2 zero1 kto": (
        "--mesh dp2 --parallel.zero 1 --loss dpo --dpo.loss_type kto --data.format unpaired"
        " --batch.global_size 4"
    ),
    "pp2 cp2 interleaved kto": (
        "--mesh pp2,cp2 --loss dpo --dpo.loss_type kto --data.format unpaired --batch.global_size 4"
        " --pipeline.schedule interleaved --pipeline.chunks 2"
    ),
    "pp2 zbv kto": (
        "--mesh pp2 --loss dpo --dpo.loss_type kto --data.format unpaired --batch.global_size 4"
        " --pipeline.schedule zbv"
    ),
    "pp2 interleaved, 2 chunks": "--mesh pp2 --pipeline.schedule interleaved --pipeline.chunks 2 --batch.global_size 4",
    "pp2 1f1b": "--mesh pp2 --batch.global_size 6",
    "pp2 zbv": "--mesh pp2 --pipeline.schedule zbv --batch.global_size 4",
    "pp2 dp2 zero1": "--mesh pp2,dp2 --parallel.zero 1",
    "pp2 tp2 full recompute": "--mesh pp2,tp2 --parallel.recompute full",
    "dp2 tp2 zero1 fp8": "--mesh dp2,tp2 --parallel.zero 1 --precision.linears fp8",
    "dp2 zero3 fp8 full recompute": "--mesh dp2 --parallel.zero 3 --precision.linears fp8 --parallel.recompute full",
    "pp2 zero bubble fp8": "--mesh pp2 --pipeline.schedule zero_bubble --precision.linears fp8",
    "window in blocks": "--model.name mistral --model.window 64 --data.seq_len 512 --batch.global_size 2",
    "dp2 zero3 selective bfloat16": "--mesh dp2 --parallel.zero 3 --parallel.recompute selective --precision.compute bfloat16",
}
SMALL = (
    "--model.layers 4 --model.dim 32 --model.heads 4 --model.kv_heads 2 --model.ffn 48 --data.seq_len 16"
    " --batch.micro_size 1 --device cpu"
)


MIXTURE = "--model.name deepseek --model.layers 2 --model.dim 32 --data.seq_len 16 --batch.micro_size 1 --device cpu"
MIXTURES = {
    "ep2": "--mesh ep2 --batch.global_size 4",
    "ep2 bfloat16": "--mesh ep2 --batch.global_size 4 --precision.compute bfloat16",
    "pp2 ep2 tp2 zero2": "--mesh pp2,ep2,tp2 --parallel.zero 2 --batch.global_size 4",
    "ep2 cp2 full recompute": "--mesh ep2,cp2 --parallel.recompute full --batch.global_size 4",
}

ACTIONS = slice(1, -1)
"""Levels of the actions and the reduction. Before them numbers of every micro-batch are stacked;
after the update a few numbers of the report are freed now or later.
"""


def run_of(flags: str) -> Run:
    words: list[str] = []
    for word in flags.split():
        words.append(word.replace(",", " "))
    sizes = MIXTURE if flags in MIXTURES.values() else SMALL
    if "--batch.global_size" not in words:
        words += ["--batch.global_size", "8"]
    given = [word for word in words if word.startswith("--")]
    defaults = [word for word in _pairs(sizes) if word[0] not in given]
    for pair in defaults:
        words = [*words, *pair]
    return load(words, FAMILIES)


def _pairs(flags: str) -> Iterator[tuple[str, str]]:
    words = flags.split()
    return zip(words[::2], words[1::2], strict=True)


def real_batches(run: Run, comm: Comm) -> list[Batch]:
    on_meta = rank_step.example_batch(MeasuredRun.of(run), comm)
    batch = on_meta.map(lambda x: torch.ones(x.shape, dtype=x.dtype))
    if batch.documents is not None:  # both documents are in all chunks: no block is left out
        batch = replace(batch, documents=_alternating(batch.documents))
    if batch.whole_documents is not None:
        batch = replace(batch, whole_documents=_alternating(batch.whole_documents))
    return [batch] * plan_of(run).microbatches


def _alternating(documents_BS: Tensor) -> Tensor:
    """0 and 1 in turns."""
    return documents_BS.cumsum(1) % 2


@dataclass(frozen=True)
class RoundRobin(Choice):
    """Slot after slot goes to the next of the first `num_used` experts, whatever the scores are."""

    num_used: int = 0

    def experts(self, scores: Tensor) -> Tensor:
        num_slots = scores[..., : self.top_k].numel()
        slots = torch.arange(num_slots, device=scores.device)
        return (slots % self.num_used).view(*scores.shape[:-1], self.top_k)


def force_routing(step: TrainStep, *, num_used: int) -> None:
    for block in step.model.blocks.values():
        for module in block.modules():
            if isinstance(module, Router):
                fields = {**vars(module.choice), "num_used": num_used}
                module.choice = RoundRobin(**fields)


def real_steps(run: Run, *, num_used: int = 0) -> Sequence[tuple[RankStep, TrafficCounter]]:
    """Steps of all ranks on the CPU, of which `num_used` experts are used, if there are any."""

    def rank(comm: Comm) -> tuple[RankStep, TrafficCounter]:
        step = build_step(run, comm)
        force_routing(step, num_used=num_used)
        batches = real_batches(run, comm)
        recorded = record_step(step, batches, table=plan_of(run).table)
        counter = TrafficCounter()
        comm.observers = (counter,)
        step(batches, lr=1.0)
        return recorded, counter

    return run_ranks(run.mesh, rank)


def slow_but(*names: str) -> list[Any]:
    """All layouts; those that are not named are marked slow."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS
    ]


@pytest.mark.parametrize(
    "name",
    slow_but(
        "one rank",
        "dp2 deterministic",
        "preference pairs",
        "pp2 zbv",
        "pp2 dp2 zero1",
        "window in blocks",
        "dp2 zero3 selective bfloat16",
    ),
)
def test_the_meta_device_shows_what_a_real_step_does(name: str) -> None:
    """Live bytes after and during every action, the number and bytes of all operations, and FLOPs.

    Real bytes are those of the storages that operations of the step allocate, until they are freed.
    """
    run = run_of(LAYOUTS[name])
    for rank, (real, counter) in enumerate(real_steps(run)):
        is_split = run.pipeline.schedule in (
            "zbv",
            "zero_bubble",
        )  # a split backward has a scalar on the host
        assert_equal_steps(
            measure_rank(MeasuredRun.of(run), rank), real, counter, tolerance=64 if is_split else 0
        )


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES])
@pytest.mark.parametrize("routing", ["expected", "worst"])
def test_both_routings_are_those_of_real_steps_with_forced_routers(name: str, routing: str) -> None:
    assert_forced_routing(name, is_worst=routing == "worst")


def test_the_worst_routing_is_that_of_a_real_step_with_forced_routers() -> None:
    assert_forced_routing("ep2", is_worst=True)


def assert_forced_routing(name: str, *, is_worst: bool) -> None:
    run = run_of(MIXTURES[name])
    num_ranks = run.device_mesh.degree("ep")
    num_experts = run.model.model_dump()["experts"]
    used = num_experts // num_ranks if is_worst else num_experts
    load = first_rank_load(num_ranks) if is_worst else even_load
    for rank, (real, counter) in enumerate(real_steps(run, num_used=used)):
        predicted = measure_rank(MeasuredRun.of(run), rank, load=load)
        assert_equal_steps(predicted, real, counter)


def test_a_dispatch_without_an_assumed_load_is_rejected() -> None:
    """It would be measured with an even load where the worst routing was asked for."""
    run = run_of(MIXTURES["ep2"])
    comm = Comm(run.device_mesh, 0, MetaTransport(2, 0))
    step = build_step(run, comm)
    [mixture, *_] = [
        module
        for block in step.model.blocks.values()
        for module in block.modules()
        if isinstance(module, MoE)
    ]
    loaded = nn.Module()
    loaded.meta_load = even_load  # type: ignore[assignment]
    mixture.dispatch = loaded  # type: ignore[assignment]
    assert loaded in list(rank_step.dispatches(step))
    mixture.dispatch = nn.Module()  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"layer1\.mlp\.dispatch: Module has no `meta_load`"):
        list(rank_step.dispatches(step))


def assert_equal_steps(
    predicted: RankStep, real: RankStep, counter: TrafficCounter, *, tolerance: int = 0
) -> None:
    row = real.row
    assert predicted.kept == real.kept
    levels = step_memory(predicted, row).levels[ACTIONS]
    real_levels = step_memory(real, row).levels[ACTIONS]
    names = [level.name for level in levels]
    assert names == [level.name for level in real_levels]
    for level, real_level in zip(levels, real_levels, strict=True):
        assert level.held == pytest.approx(real_level.held, abs=tolerance), level.name
        assert level.most == pytest.approx(real_level.most, abs=tolerance), level.name
    assert step_traffic(predicted, row) == counter.traffic
    for key, region in real.actions.items():
        if key in predicted.actions:
            assert predicted.actions[key].flops == region.flops, key


def allocated_peak(run: Run) -> int:
    """Most bytes that torch's CPU allocator held during the second step of rank 0 above those at
    its begin: the sum of the allocations and frees that torch.profiler reports.

    Collectives give zeros, so one rank is enough.
    """
    mesh = run.device_mesh
    transport = MetaTransport(mesh.size, 0, device="cpu")
    comm = Comm(mesh, 0, transport)
    step = build_step(run, comm)
    batches = real_batches(run, comm)
    step(batches, lr=1.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(batches, lr=1.0)
    level = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@pytest.mark.parametrize("name", slow_but("one rank", "pp2 zbv"))
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    """Within 32 bytes in float32; with KTO 16 more, z0 and its mean of the step before, whose end the
    profiler does not see. Kernels of the CPU in bfloat16 have buffers of their own, of
    32 KiB here: less than 5% of a model twice as wide.
    """
    is_bfloat16 = "bfloat16" in name
    wider = " --model.dim 64 --model.ffn 96" if is_bfloat16 else ""
    run = run_of(LAYOUTS[name] + wider)
    memory = step_memory(measure_rank(MeasuredRun.of(run), 0), 0)
    measured = memory.kept.total + allocated_peak(run)
    is_wide = run.precision.compute == "float32"
    scalars = 48 if "kto" in name else 32
    assert memory.peak == pytest.approx(measured, abs=scalars, rel=1e-12 if is_wide else 0.05)


@pytest.mark.parametrize(
    "name",
    ["pp2 1f1b", "pp2 dp2 zero2 interleaved", pytest.param("dp2 zero3", marks=pytest.mark.slow)],
)
def test_three_micro_batches_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of eight micro-batches, of which three are played, has the levels and traffic of all
    eight. With several stages a rank, reductions of ZeRO 2 that are under way when an action begins
    depend on the stage of the one before it.
    """
    flags = LAYOUTS[name].replace("--batch.global_size 6", "")
    run = run_of(f"{flags} --batch.global_size 16")
    for rank in range(run.device_mesh.size):
        short = measure_rank(MeasuredRun.of(run), rank)
        monkeypatch.setattr(played_actions, "MOST_PLAYED", 99)
        whole = measure_rank(MeasuredRun.of(run), rank)
        monkeypatch.undo()
        assert (
            step_memory(short, short.row).levels[ACTIONS]
            == step_memory(whole, whole.row).levels[ACTIONS]
        )
        assert step_traffic(short, short.row) == step_traffic(whole, whole.row)


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_in_a_fixed_order_grow_with_the_micro_batches(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 37 micro-batches the first 16 and the last are played: the levels are those of all. Three
    stood for all before, and the sums that are held at once were too few.
    """
    flags = f"--mesh dp2 --deterministic True --parallel.zero {zero} --batch.global_size 74"
    run = run_of(f"{flags} --model.layers 1 --model.dim 16 --model.ffn 16 --data.seq_len 4")
    short = measure_rank(MeasuredRun.of(run), 0)
    levels = step_memory(short, 0).levels[ACTIONS]
    monkeypatch.setattr(played_actions, "MOST_IN_FIXED_ORDER", 99)
    whole = measure_rank(MeasuredRun.of(run), 0)
    assert short.played.microbatches == 17
    assert whole.played.microbatches == 37
    whole_levels = step_memory(whole, 0).levels[ACTIONS]
    assert [level.held for level in levels] == [level.held for level in whole_levels]
    for level, of_whole in zip(levels, whole_levels, strict=True):
        if zero < 3 or level.name != "reduce":  # it adds other sums: 5% more here
            assert level.most == pytest.approx(of_whole.most, abs=64), level.name


def test_operations_have_the_communicator_of_the_real_call() -> None:
    """Reductions of parameters that ZeRO 3 shards have one of their own."""
    for zero, expected in ((2, {"group"}), (3, {"reductions"})):
        run = run_of(f"--mesh dp2 --parallel.zero {zero} --model.layers 1")
        step = measure_rank(MeasuredRun.of(run), 0)
        by_kind: dict[str, set[str]] = {}
        for region in step.actions.values():
            for op in region.operations:
                by_kind.setdefault(op.op, set()).add(op.communicator)
        assert by_kind["reduce_scatter"] == expected
        assert by_kind.get("all_gather", {"group"}) == {"group"}


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ("", "efficient (no mask; flash attention does not take float32 here)"),
        ("--precision.compute bfloat16", "flash (no mask, 16 bits)"),
        ("--data.packing documents", "blocks (documents; no kernel of documents and windows takes float32)"),
        ("--model.name mistral --model.window 64", "blocks (window; no kernel of documents and windows takes float32)"),
    ],
)  # fmt: skip
def test_attention_of_a_gpu_holds_no_scores(options: str, kernel: str) -> None:
    """Key heads are shared by two query heads. More than all scores of one head do not exist."""
    length = 4096
    run = run_of(f"--hardware h100 --data.seq_len {length} --batch.global_size 2 {options}")
    step = measure_rank(MeasuredRun.of(run), 0)
    assert step.attention == (kernel,)
    scores = 4 * length**2
    assert max(region.workspace for region in step.actions.values()) < scores


NORMED = "--model.name weft_selftest.mutants.normed_model --model.layers 3 --data.seq_len 16 --device cpu"


@pytest.mark.parametrize(
    "layout", ["--mesh dp2 --batch.micro_size 1", "--mesh pp2,dp2 --batch.micro_size 1"]
)
def test_micro_batches_that_are_played_stand_for_all_that_update_buffers(layout: str) -> None:
    """Before, the records of micro-batches that are not played were missed, and nothing was explained."""
    words = [word.replace(",", " ") for word in f"{NORMED} --batch.global_size 16 {layout}".split()]
    run = load(words, FAMILIES)
    assert plan_of(run).microbatches == 8
    for rank, (real, counter) in enumerate(real_steps(run)):
        predicted = measure_rank(MeasuredRun.of(run), rank)
        assert predicted.played.microbatches < 8
        assert step_traffic(predicted, real.row) == counter.traffic
