"""The player: any table, unsplit and split backwards, extra losses and loads, against one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.layouts import Case, check, shallow
from tests.sampling import sampled
from tests.schedule.random_table import random_table
from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, Stage
from weft.models.common.batch import Batch, Extra, forward
from weft.parallel.model.parallelize import parallelize
from weft.parallel.pipeline.player import Player, PlayResult
from weft.parallel.zero.buckets import bucket_reducer
from weft.parallel.zero.param_group import ParamGroup
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.validate_table import validate
from weft.testing import run_ranks
from weft_plan.schedule_search.table_search import SearchRequest, search

SPLIT = (
    Case(
        "pp2", family="gpt2", schedule="zbv", chunks=2, microbatches=5
    ),  # tied: first and last stage on one rank
    Case("pp2 tp2", family="gpt2", schedule="zbv", chunks=2, sequence=True),
    Case("pp2 dp2", grouped=True, schedule="dual_pipe_v", chunks=2, microbatches=5),
    Case("pp2 dp2 tp2", schedule="dual_pipe_v", chunks=2, sequence=True, zero=3),
    Case("pp2 cp2 tp2", schedule="zbv", chunks=2, microbatches=3, sequence=True, documents=True),
    Case("pp2 ep2", family="deepseek", schedule="zero_bubble", microbatches=3),
    Case("pp2 ep2", family="qwen3-moe", schedule="zero_bubble_h2"),
    Case("pp5", family="gpt2", schedule="zero_bubble", microbatches=7),
    Case("dp3", schedule="zero_bubble", zero=2),
    Case("dp2", family="gpt2", schedule="zbv", chunks=2, microbatches=2),
)
MORE_SPLIT = (
    Case("pp3 dp2", schedule="zero_bubble", microbatches=5, zero=1),
    Case("pp4 tp2", grouped=True, schedule="zero_bubble_h2", sequence=True, microbatches=9),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_SPLIT, ids=str)
def test_more_split_schedules_compute_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", sampled(shallow(case) for case in SPLIT), ids=str)
def test_split_schedules_compute_what_one_device_computes(case: Case) -> None:
    check(case)


def saved(table: Table, path: Path) -> str:
    validate(table)
    path.write_text(table.text, encoding="utf-8")
    return str(path)


def random_tables() -> Iterator[Table]:
    """Two stages on each of two ranks, in any order; unsplit and split backwards mixed, in any
    order.
    """
    for seed in range(100):
        table = random_table(random.Random(seed), ranks=2, stages=4, microbatches=3)
        if all(len(table.stages(rank)) == 2 for rank in range(2)):
            yield table


@pytest.mark.parametrize("index", range(4))
def test_any_table_computes_what_one_device_computes(index: int, tmp_path: Path) -> None:
    table = list(random_tables())[index]
    schedule = saved(table, tmp_path / "table.txt")
    case = Case("pp2 dp2", family="gpt2", schedule=schedule, chunks=2, microbatches=3)
    check(shallow(case))


@pytest.mark.parametrize(
    ("mesh", "chunks"), [("pp2", 1), pytest.param("pp2 dp2", 2, marks=pytest.mark.slow)]
)
def test_a_searched_table_computes_what_one_device_computes(
    mesh: str, chunks: int, tmp_path: Path
) -> None:
    """Less memory than any built-in table: every row differs from theirs."""
    if chunks == 2:
        limits = (Fraction(3, 2), Fraction(3, 2))
    else:
        limits = (Fraction(1), Fraction(2))
    request = SearchRequest(ranks=2, microbatches=4, limits=limits, chunks=(chunks,), seconds=2)
    table = search(request).best.table
    for act in table.actions:
        assert act.kind != "B"
    schedule = saved(table, tmp_path / "searched.schedule")
    check(shallow(Case(mesh, family="gpt2", schedule=schedule, chunks=chunks, microbatches=4)))


def with_late_last_stage() -> Table:
    """A V on which rank 0 is done with stage 0 first and computes all weight gradients of the last
    stage after that.
    """
    table = make_table("zbv", ranks=2, microbatches=3)
    late = [act for act in table.rows[0] if act.kind == "W" and act.stage == 3]
    return Table(
        (tuple(act for act in table.rows[0] if act not in late) + tuple(late), table.rows[1]),
        table.stage_to_rank,
        3,
    )


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_parameter_is_reduced_when_the_later_of_its_two_stages_is_done(
    zero: int, tmp_path: Path
) -> None:
    schedule = saved(with_late_last_stage(), tmp_path / "table.txt")
    case = Case("pp2 dp2", family="gpt2", schedule=schedule, chunks=2, microbatches=3, zero=zero)
    check(shallow(case))


# models of this file: extra losses, loads, the order of callbacks


class Layer(nn.Module):
    """A residual MLP that may return an extra loss and an expert load."""

    def __init__(self, *, extra: str = "") -> None:
        super().__init__()
        self.extra = extra
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor, batch: Batch) -> Tensor | Extra:
        y = x + self.down(torch.tanh(self.up(x)))
        if not self.extra:
            return y
        penalty = torch.tensor(3.0)
        if self.extra == "penalty":
            penalty = (self.up(x) ** 2).sum()
        load = torch.stack([(y > 0).sum(), (y <= 0).sum()])
        return Extra(y, loss=penalty, load=load)


class Squares(nn.Module):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return ((x - batch.targets) ** 2).sum()


def chain_of_layers(kinds: tuple[str, ...]) -> dict[str, nn.Module]:
    torch.manual_seed(2)
    layers = {}
    for index, kind in enumerate(kinds):
        layers[f"layer{index}"] = Layer(extra=kind)
    return {**layers, "loss": Squares()}


def micro_batches(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(6)
    pairs = torch.randn(number, 2, 3, 4, dtype=torch.float64, generator=generator)
    return [Batch(x, y, torch.zeros(0)) for x, y in pairs]


def plan_of(schedule: str, mesh: str, microbatches: int, layers: int) -> Plan:
    ranks = Mesh.parse(mesh).degree("pp")
    chunks = SCHEDULES[schedule].default_chunks
    each = layers // (ranks * chunks)
    names = []
    for at in range(0, layers, each):
        names.append(tuple(f"layer{layer}" for layer in range(at, at + each)))
    stages = [Stage(blocks=run, out=(3, 4), flops=1.0) for run in names]
    stages[-1] = Stage(blocks=(*names[-1], "loss"), out=(), flops=1.0)
    return Plan(
        mesh=Mesh.parse(mesh),
        family="custom",
        architecture="{}",
        stages=tuple(stages),
        schedule=schedule,
        chunks=chunks,
        microbatches=microbatches,
        params="float64",
        compute="float64",
        reduce="float64",
    )


KINDS = ("penalty", "", "constant", "penalty")
SCHEDULE_NAMES = ("1f1b", "zero_bubble", "zbv", "dual_pipe_v")


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_extra_losses_of_any_stage_count_and_loads_are_summed_over_the_step(schedule: str) -> None:
    start = chain_of_layers(KINDS)
    batches = micro_batches(5)
    whole = copy.deepcopy(start)
    total = sum(forward(whole, batch) for batch in batches)
    (total * 0.25).backward()
    modules = nn.ModuleDict(whole)
    right = {name: param.grad for name, param in modules.named_parameters()}

    def rank(comm: Comm) -> tuple[PlayResult, dict[str, Tensor | None]]:
        plan = plan_of(schedule, "pp2", 5, layers=4)
        model = parallelize(copy.deepcopy(start), plan, comm)
        player = Player(model, before_last_backward=lambda stage: None)
        result = player.play(batches, torch.tensor(0.25))
        gradients = {name: param.grad for name, param in model.params.items()}
        return result, gradients

    loss = 0.0
    loads: dict[str, Tensor] = {}
    ours: dict[str, Tensor | None] = {}
    for result, gradients in run_ranks("pp2", rank):
        loss += result.loss.item()
        loads.update(result.loads)
        ours.update(gradients)
    assert loss == pytest.approx(total.item(), rel=1e-13)
    assert set(loads) == {"layer0", "layer2", "layer3"}
    for load in loads.values():
        assert load.sum() == 5 * 12
    assert set(ours) == set(right)
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_before_last_backward_is_called_once_right_before_the_last_b_or_w_of_a_stage(
    schedule: str,
) -> None:
    batches = micro_batches(4)

    def rank(comm: Comm) -> list[Act | int]:
        model = parallelize(chain_of_layers(("",) * 4), plan_of(schedule, "pp2", 4, layers=4), comm)
        events: list[Act | int] = []
        player = Player(
            model, before_last_backward=events.append, on_action=lambda act: events.append(act)
        )
        player.play(batches, torch.tensor(1.0))
        return events

    table = make_table(schedule, ranks=2, microbatches=4)
    for index, events in enumerate(run_ranks("pp2", rank)):
        actual = tuple(act for act in events if isinstance(act, Act))
        assert actual == table.rows[index]
        for stage in table.stages(index):
            acts = [
                act for act in table.rows[index] if act.stage == stage and act.kind in ("B", "W")
            ]
            assert events.count(stage) == 1
            assert events[events.index(stage) + 1] == acts[-1]


def test_buckets_are_reduced_during_the_last_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket starts when its last gradient arrives: the first one before the last parameter
    has its own.
    """
    batches = micro_batches(3)

    def rank(comm: Comm) -> list[str]:
        model = parallelize(
            chain_of_layers(("",) * 2), plan_of("zero_bubble", "dp2", 3, layers=2), comm
        )
        events: list[str] = []
        reducer = bucket_reducer(
            model.params, comm, reduce_axes=dict.fromkeys(model.params, ("dp",)), bucket_bytes=1
        )
        for group in reducer.groups:
            events_of[id(group)] = events
        player = Player(
            model,
            before_last_backward=lambda stage: (
                events.append("last"),
                reducer.set_requires_gradient_sync(stage),
            ),
            on_action=lambda act: events.append(str(act)),
        )
        player.play(copy.deepcopy(batches), torch.tensor(1.0))
        reducer.finish()
        return events

    def log_and_start(group: ParamGroup) -> None:
        (name,) = group.params
        events_of[id(group)].append(f"reduce {name}")
        start_reduce(group)

    events_of: dict[int, list[str]] = {}
    start_reduce = ParamGroup.start_reduce
    monkeypatch.setattr(ParamGroup, "start_reduce", log_and_start)
    for events in run_ranks("dp2", rank):
        last = events.index("last")
        done = events.index("W0.2")
        inside = events[last + 1 : done]
        expected = [f"reduce layer{layer}.{leaf}" for layer in (1, 0) for leaf in LEAVES]
        assert inside == expected
        for event in events[:last]:
            assert not event.startswith("reduce")


LEAVES = ("down.bias", "down.weight", "up.bias", "up.weight")
