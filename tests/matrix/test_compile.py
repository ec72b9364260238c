"""Compiled blocks == one device that compiles nothing: every gradient, moment and parameter, in float64 within 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError

from tests.matrix.layouts import LR, Case, make_step, own_micro_batches, subject_of
from tests.one_device import PATIENCE_S, check_records, one_device, records_of
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.config.rules.config_checks import config_checks
from weft.config.run import plan_of
from weft.core.attention_choice import AttentionDevice
from weft.core.entry_places import ShardingRank
from weft.errors import PlanError
from weft.layout.compilation import NOT_COMPILED
from weft.layout.explain import explain
from weft.models.common import attention, compiler, head_output
from weft.models.common.batch import token_batch
from weft.models.common.dropout_mode import may_drop
from weft.parallel.model.compiled_block import CompiledBlock, compiled_block
from weft.parallel.model.dropout_blocks import DropoutShards, dropping_block
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import measure_rank
from weft.planner.measure.step_traffic import step_traffic
from weft.testing import run_ranks
from weft_selftest.mutants.effect import write_texts
from weft_selftest.mutants.fault import CollectiveFault, Mutant, MutantLayout
from weft_selftest.mutants.sightings import seen_in_first_step
from weft_selftest.mutants.trial import MutantTrials

pytestmark = [
    pytest.mark.timeout(PATIENCE_S),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor"
    ),  # of the compiler's own code
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not"),
]

slow = pytest.mark.slow
MOST_GRAPHS = 20
LAYOUT = MutantLayout("tp2", options="--compile blocks")
CHUNKED = {"parallel.logits": "chunked"}
COMPILED = {"compile": "blocks"}
CASES = [
    Case("dp2", zero=3, documents=True, seq_len=256, layers=2, microbatches=1),
    Case("pp2", schedule="1f1b", recompute="full", microbatches=2),
    Case("tp2", sequence=True, recompute="selective", layers=2, microbatches=1),
    Case("cp2", layers=2, microbatches=1),
    *(
        pytest.param(case, marks=slow)
        for case in (
            Case("", family="gpt2"),
            Case("dp2", zero=3, microbatches=2),
            Case("dp2", family="gpt2", documents=True),
            Case("dp2", zero=1, family="deepseek"),
            Case("dp2", zero=2, family="gemma3"),
            Case("dp2", zero=3, family="qwen3-moe", recompute="full"),
            Case("pp2", schedule="interleaved", chunks=2, layers=4),
            Case("pp2 dp2", schedule="gpipe", zero=1, grouped=True),
            Case("fsdp2", zero=3),
            Case("dp2 fsdp2", zero=3, recompute="full"),
            Case("tp2", family="gpt2", sequence=True),
            Case("tp4", grouped=True, microbatches=2),
            Case("tp8", grouped=True, layers=2, microbatches=1),
            Case("tp2", family="gemma3", microbatches=2),
            Case("tp2", family="deepseek", microbatches=2),
            Case("tp2", family="qwen3-moe", sequence=True, recompute="full", microbatches=2),
            Case("tp2 dp2", zero=3, sequence=True, recompute="selective"),
            Case("pp2 tp2", recompute="full", microbatches=2),
            Case("", family="gpt2", recompute="selective"),
            Case("dp2", zero=2, family="qwen3", recompute="selective", documents=True),
            Case("ep2", family="qwen3-moe", microbatches=2),
            Case("ep2 tp2", family="deepseek", sequence=True, microbatches=1),
            Case("cp2", context="ulysses", documents=True, microbatches=2),
            Case("cp2", context="allgather", family="gemma3", microbatches=2),
            Case("cp2 tp2", recompute="selective", sequence=True, microbatches=1),
            Case("ep2 cp2", family="qwen3-moe", microbatches=1),
        )
    ),
]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """Blocks are traced and differentiated as always; the graphs run as they are, without new kernels. The
    device of a tensor is asked outside of them: on a GPU the question would end a graph.

    Returns the graphs, each once: rank threads that come to a function at the same time each trace it.
    """
    torch._dynamo.reset()
    head_output._compiled.cache_clear()
    counters.clear()
    graphs: set[object] = set()
    run_as_it_is = lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Any:
        graphs.add((graph.code, tuple(x.shape for x in inputs if isinstance(x, torch.Tensor))))
        return run_as_it_is(graph, inputs)

    monkeypatch.setattr(compiler, "BACKEND", backend)
    asked = attention.attention_device

    def ask(x: torch.Tensor) -> AttentionDevice:
        torch._dynamo.graph_break()
        return asked(x)

    monkeypatch.setattr(attention, "attention_device", ask)
    return graphs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_blocks_compute_what_one_device_computes(case: Case, traced: set[object]) -> None:
    is_mixture = case.family in ("deepseek", "qwen3-moe")
    subject = subject_of(case, num_steps=2, values=COMPILED | CHUNKED)
    assert not any(check.fails() for check in config_checks(subject.run))
    records = records_of(subject)
    assert counters["frames"]["ok"] > 0, "nothing was compiled"
    runs_in_parts = is_mixture or case.documents or case.grid.degree("cp") > 1
    assert runs_in_parts or not counters["graph_break"]
    assert len(traced) <= MOST_GRAPHS, "one for each batch?"
    check_records(subject, records, one_device(subject_of(case, num_steps=2, values=CHUNKED)))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "case",
    [
        Case("tp2", recompute="full", layers=2, microbatches=1),
        *(
            pytest.param(case, marks=slow)
            for case in (
                Case("tp2", sequence=True, layers=2, microbatches=1),
                Case("tp2 dp2", family="gpt2", zero=3, layers=2, recompute="selective"),
                Case("cp2", recompute="full", microbatches=1),
            )
        ),
    ],
    ids=str,
)
def test_compiled_blocks_send_what_plans_say(case: Case) -> None:
    run = case.run.with_values(COMPILED)
    predicted = step_traffic(measure_rank(MeasuredRun.of(run), 0), 0)

    def rank(comm: Comm) -> object:
        step = make_step(case, comm, plan=plan_of(run))
        comm.observers = (counter := Counter(),)
        step(own_micro_batches(case, comm), lr=LR)
        return counter.traffic

    assert run_ranks(case.mesh, rank)[0] == predicted
    assert counters["frames"]["ok"] > 0, "nothing was compiled"


@pytest.mark.usefixtures("traced")
def test_the_first_step_shows_a_sum_that_compiled_code_leaves_out(tmp_path: Path) -> None:
    """Planted in the operator of compiled code; a reduced proof, which compiles nothing, is equal."""
    write_texts(tmp_path)
    case = MutantTrials(tmp_path).run_as_started(LAYOUT)
    fault = CollectiveFault("_all_reduce", "skip", op="all_reduce", axis="tp")
    seen = seen_in_first_step(Mutant("unsummed", "no sum in layers", LAYOUT, (fault,)), case)
    assert seen.block == "layer0"
    assert "is different" in seen.message
    assert not seen_in_first_step(Mutant("healthy", "nothing goes wrong", LAYOUT, ()), case).is_seen


@slow
@pytest.mark.parametrize(
    "case",
    [
        Case("dp2", zero=3, microbatches=2),
        Case("tp2", sequence=True, recompute="selective", microbatches=2),
    ],
    ids=str,
)
def test_kernels_of_the_compiler_compute_what_one_device_computes(case: Case) -> None:
    subject = subject_of(case, num_steps=2, values=COMPILED)
    records = records_of(subject, transport="processes")
    check_records(subject, records, one_device(subject_of(case, num_steps=2)))


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        (Case("pp2", schedule="zero_bubble"), "--pipeline.schedule 1f1b or interleaved"),
        (Case("pp2", schedule="zbv", chunks=2), "--pipeline.schedule 1f1b or interleaved"),
    ],
    ids=str,
)
def test_schedules_that_split_the_backward_are_not_compiled(case: Case, fix: str) -> None:
    plan = case.plan.model_copy(update=COMPILED)
    (fault,) = plan.compile_faults()
    assert fault.key == "compile"
    assert fault.fix == f"--compile off, or {fix}"
    run = case.run.with_values(COMPILED)
    found = [fault for check in config_checks(run) for fault in check.find()]
    assert [each.key for each in found] == ["compile"]
    automatic = plan.model_copy(update={"compile": "auto"})
    assert not automatic.compiles_blocks("cuda")


def test_auto_compiles_on_gpus_alone() -> None:
    plan = Case("dp2", zero=3).plan
    assert not plan.compiles_blocks("cuda")
    automatic = plan.model_copy(update={"compile": "auto"})
    assert automatic.compiles_blocks("cuda")
    assert not automatic.compiles_blocks("cpu")


def test_explain_says_what_is_compiled() -> None:
    plan = Case("cp2 tp2").plan
    assert "torch.compile" not in explain(plan)
    lines = explain(plan.model_copy(update=COMPILED)).splitlines()
    start = lines.index("torch.compile: the blocks between embedding and head")
    assert lines[start + 1 : start + 3] == [
        "  attention along cp runs between compiled parts",
        "  sums along tp in their backward are hidden behind nothing",
    ]


class Scaled(nn.Module):
    """A block that looks at what runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor, batch: object) -> torch.Tensor:
        return x * self.scale * (3 if torch.compiler.is_compiling() else 1)


def test_forwards_that_are_not_differentiated_run_as_written(traced: set[object]) -> None:
    batch = token_batch(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    block = compiled_block("layer0", Scaled(), drops_out=False)
    x = torch.ones(2)
    assert block(x, batch).tolist() == [6, 6]
    with torch.no_grad():
        assert block(x, batch).tolist() == [2, 2]
    assert len(traced) == 1


@pytest.mark.usefixtures("traced")
def test_equal_blocks_have_one_graph_and_keep_their_hooks() -> None:
    batch = token_batch(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    x = torch.ones(2)
    for number in range(4):
        block = Scaled()
        block.register_forward_pre_hook(lambda module, args: (10 * args[0], args[1]))
        compiled = compiled_block(f"layer{number}", block, drops_out=False)
        assert compiled(x, batch).tolist() == [60, 60]
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_with_losses_and_tables_are_left_out() -> None:
    for name in NOT_COMPILED:
        assert isinstance(compiled_block(name, Scaled(), drops_out=True), Scaled)
    assert isinstance(compiled_block("layer0", Scaled(), drops_out=False), CompiledBlock)


def test_a_block_that_drops_out_is_rejected_unless_the_choice_is_left_to_weft() -> None:
    block = Scaled()
    assert compiled_block("layer0", block, drops_out=True, mode="auto") is block
    with pytest.raises(PlanError, match="layer0 drops out, which compiled blocks do not") as error:
        compiled_block("layer0", Scaled(), drops_out=True)
    assert error.value.faults[0].fix == "--compile off, or dropout 0"


def test_the_first_forward_of_others_code_is_compiled_as_later_ones_are() -> None:
    """No mode looks for dropout in it: below one a block runs as it is written."""
    compiled = compiled_block("layer0", Scaled(), drops_out=False)
    assert may_drop(Scaled())
    assert dropping_block("layer0", compiled, DropoutShards(), ShardingRank()) is compiled


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_kernel_that_has_errors_is_an_error_of_its_block(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the backward, too: torch compiles that when it runs, outside of all blocks."""

    def no_kernel(graph: object, inputs: object) -> object:
        raise CppCompileError(["g++", "kernel.cpp"], "kernel.cpp:7: error: no such type")

    def kernel(graph: torch.fx.GraphModule, inputs: object) -> object:
        return make_boxed_func(graph.forward)

    compilers = {"fw_compiler": kernel, "bw_compiler": kernel}
    compilers[f"{part[0]}w_compiler"] = no_kernel
    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "BACKEND", aot_autograd(**compilers))
    block = compiled_block("layer3", Scaled(), drops_out=False)
    batch = token_batch(*torch.zeros(2, 1, 1, dtype=torch.int64))
    with pytest.raises(
        PlanError, match=r"layer3 cannot be compiled: CppCompileError: C\+\+ compile error"
    ):
        block(torch.ones(2), batch)


def test_a_block_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(graph: object, inputs: object) -> object:
        raise OSError("no C++ compiler")

    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "BACKEND", no_compiler)
    block = compiled_block("layer3", Scaled(), drops_out=False)
    with pytest.raises(PlanError, match=r"layer3 cannot be compiled: OSError: no C\+\+ compiler"):
        block(torch.ones(2), token_batch(*torch.zeros(2, 1, 1, dtype=torch.int64)))
