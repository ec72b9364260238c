"""Work of published rows as measured steps: each kind of stage is measured once, for all rows that share it.

A stage's work depends on the model's sizes, the sharding, the micro-batch, and on whether it is the first, a middle or the
last one; not on the number of stages, of micro-batches or (without ZeRO) of data ranks. So the stages of a row are put
together from pipelines of at most three stages and two data ranks, and of more than three layers the third is repeated. Measured
work is kept in a file, with a digest of the sources that it depends on.

Note [One process group]
    weft's ZeRO 3 reduces on a communicator of its own. The software of the rows has one for gathers
    and reductions, whose kernels run one after the other: FSDP of llm-foundry passes its process
    group to both (torch/distributed/fsdp, _flat_param.py and _runtime_utils.py); a second one can be
    had with FSDP2 alone (`set_separate_reduce_scatter_group`). So operations of rows are put on the
    group's communicator.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published_rows import InexpressibleError, Published

import weft
from weft.comm.observe import Operation
from weft.config.load import load
from weft.config.run import plan_of
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.played_actions import ActionKey, action_keys
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.recorder import Ended, Event, RecordedRegion, Started
from weft.planner.measure.roles import RoleCosts, measure
from weft_plan.calibration.condensed import Condenser

SHORT, LONG = 2, 3
"""Layers of a stage that are measured of more."""
MOST_STAGES = 3
MICROBATCHES = 4
SOURCES = (
    "models",
    "parallel",
    "train/build.py",
    "train/step.py",
    "planner/measure/rank_step.py",
    "planner/measure/recorder.py",
    "planner/measure/kernels.py",
    "comm/observe.py",
)
NODE = 8
SPLIT_SCHEDULE, WHOLE_SCHEDULE = "zero_bubble", "1f1b"


def digest_of_sources() -> str:
    """Of the sources that measured work depends on."""
    root = Path(weft.__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        place = root / name
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for path in files:
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class StageSet:
    """Rows with the same kinds of stages: one measured pipeline for each number of layers.

    Attributes:
        words: of the run, without the layers.
        stages: of the measured pipeline.
    """

    words: tuple[str, ...]
    stages: int

    def with_layers(self, layers: int) -> tuple[str, ...]:
        """The words of the measured run with so many layers a stage; of none, in the first and the
        last one.
        """
        split = [layers] * self.stages
        if layers == 0:
            split = [0] + [1] * (self.stages - 2) + [0]
        words = (*self.words, "--model.layers", str(sum(split)))
        if self.stages == 1:
            return words
        return (*words, "--pipeline.split", *map(str, split))


def stage_set(row: Published, schedule: str) -> StageSet:
    """The measured pipeline of a row's stages."""
    values = row.values
    degrees = row.degrees
    stages = min(len(row.layers), MOST_STAGES)
    zero = int(values.get("--parallel.zero", 0))
    data = degrees.get("dp", 1) if zero else min(degrees.get("dp", 1), 2)
    sizes = {**degrees, "pp": stages, "dp": data}
    axes = [f"{name}{sizes[name]}" for name in ("pp", "dp", "cp", "tp") if sizes.get(name, 1) > 1]
    total = data * MICROBATCHES * int(values["--batch.micro_size"])
    own = {**values, "--mesh": " ".join(axes), "--batch.global_size": str(total)}
    for name in ("--model.layers", "--pipeline.chunks", "--pipeline.schedule"):
        own.pop(name, None)
    if stages > 1:
        own["--pipeline.schedule"] = schedule
    words = [word for pair in sorted(own.items()) for word in pair]
    return StageSet(tuple(words), stages)


class MeasuredStages:
    """Measured pipelines by their words, kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.digest = digest_of_sources()
        self.known: dict[tuple[str, ...], tuple[RoleCosts, ...]] = {}
        self.num_new = 0
        self._deep: dict[object, RecordedRegion] = {}
        self._condenser = Condenser()
        if path is not None and path.exists():
            digest, known = pickle.loads(path.read_bytes())  # noqa: S301  # written by this program
            if digest == self.digest:
                self.known = known

    def save(self) -> None:
        """Write what was measured."""
        if self.path is not None and self.num_new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(pickle.dumps((self.digest, self.known)))
            self.num_new = 0

    def roles(self, words: tuple[str, ...]) -> tuple[RoleCosts, ...]:
        """The measured roles of a run."""
        if words not in self.known:
            run = load(list(words), FAMILIES)
            self.known[words] = measure(MeasuredRun.of(run))
            self.num_new += 1
        return self.known[words]

    def roles_of(self, row: Published) -> tuple[RoleCosts, ...]:
        """The work of a row, of its whole schedule."""
        words = row.words
        if len(row.layers) > 1:
            words = (*words, "--pipeline.split", *map(str, row.layers))
        run = load(list(words), FAMILIES)
        batch, each = run.batch.global_size, run.batch.micro_size * run.num_data_ranks
        if batch % each:
            raise InexpressibleError(f"a batch of {batch} in parts of {each}")
        plan = plan_of(run)
        schedules = [WHOLE_SCHEDULE]
        if plan.table.splits:
            schedules = [SPLIT_SCHEDULE, WHOLE_SCHEDULE]
        sets = [stage_set(row, schedule) for schedule in schedules]
        places = range(plan.pipeline_size)
        return tuple(self._role(plan, place, row.layers, sets) for place in places)

    def _role(
        self, plan: Plan, place: int, layers: Sequence[int], sets: Sequence[StageSet]
    ) -> RoleCosts:
        stages = plan.table.stages(place)
        most = plan.table.num_stages - 1
        actions: dict[ActionKey, RecordedRegion] = {}
        for key in set(action_keys(plan.table, place).values()):
            stage = stages[key.chunk]
            kind = measured_place(stage, most, sets[0].stages)
            region = self._action(sets, kind, key, layers[stage])
            actions[key] = self._resized(region, plan, place)
        own = [measured_place(stage, most, sets[0].stages) for stage in stages]
        end = max(own) if 0 not in own else own[0]
        total = sum(layers[stage] for stage in stages)
        measured = self.roles(sets[0].with_layers(min(total, LONG)))[end]
        phases = {}
        for name in measured.step.phases:
            region = self._phase(sets[0], end, name, total)
            phases[name] = self._resized(region, plan, place)
        step = replace(
            measured.step,
            plan=plan,
            rank=plan.mesh.rank(pp=place),
            row=place,
            actions=actions,
            phases=phases,
            regions=(),
        )
        return replace(measured, row=place, step=step)

    def _action(
        self, sets: Sequence[StageSet], kind: int, key: ActionKey, layers: int
    ) -> RecordedRegion:
        """The region of an action: of the first pipeline that has such an action."""
        for each in sets:
            wanted = replace(key, chunk=0)
            has_it = wanted in self._step(each, kind, min(layers, LONG)).actions
            if not has_it:
                continue
            name = each, kind, wanted, layers
            if name not in self._deep:
                long = self._step(each, kind, min(layers, LONG)).actions[wanted]
                if layers > LONG:
                    short = self._step(each, kind, SHORT).actions[wanted]
                    long = repeated(short, long, layers - LONG)
                self._deep[name] = self._condenser.region(long)
            return self._deep[name]
        raise KeyError(f"no measured pipeline has {key}")

    def _phase(self, each: StageSet, kind: int, name: str, layers: int) -> RecordedRegion:
        key = each, kind, name, layers
        if key not in self._deep:
            long = self._step(each, kind, min(layers, LONG)).phases[name]
            if layers > LONG:
                short = self._step(each, kind, SHORT).phases[name]
                long = grown(short, long, layers - LONG)
            self._deep[key] = self._condenser.region(long)
        return self._deep[key]

    def _step(self, each: StageSet, kind: int, layers: int) -> RankStep:
        return self.roles(each.with_layers(layers))[kind].step

    def _resized(self, region: RecordedRegion, plan: Plan, place: int) -> RecordedRegion:
        """The region with the groups of the row's mesh, in which rings over more ranks send more."""
        if not region.operations:
            return region
        ranks = [plan.mesh.rank(pp=other) for other in range(plan.pipeline_size)]
        alike = [rank for rank in ranks if rank % NODE == ranks[place] % NODE]
        rank = alike[0]  # its groups span as many nodes
        key = id(region), plan.mesh, rank
        if key not in self._deep:
            self._deep[key] = on_mesh(region, plan, rank)
        return self._deep[key]


def measured_place(stage: int, last: int, stages: int) -> int:
    """Place in the measured pipeline of a stage's kind: first, middle or last."""
    if stage == 0:
        return 0
    return stages - 1 if stage == last else 1


def on_mesh(region: RecordedRegion, plan: Plan, rank: int) -> RecordedRegion:
    made: dict[int, Operation] = {}
    events: list[Event] = []
    for event in region.events:
        if not isinstance(event, Started | Ended):
            events.append(event)
            continue
        op = event.op
        if id(op) not in made:
            made[id(op)] = operation_on_mesh(op, plan, rank)
        events.append(type(event)(made[id(op)]))
    return replace(region, events=events)


def operation_on_mesh(op: Operation, plan: Plan, rank: int) -> Operation:
    """The operation over the group of a rank; see Note [One process group]."""
    axes = op.axis.split("+")
    if "pp" in axes:  # tied parameters of the first and the last stage, messages
        return op
    group = plan.mesh.group(rank, tuple(axes))
    share_before = share_sent(len(op.group))
    share_now = share_sent(len(group))
    sent = op.sent_bytes * share_now / share_before
    return replace(
        op,
        group=tuple(group),
        rank=rank,
        sent_bytes=round(sent),
        communicator="group",
    )


def share_sent(members: int) -> float:
    """Of a large tensor, by each member of a ring."""
    return (members - 1) / members


# -- deeper stages ------------------------------------------------------------------------------


def repeated(short: RecordedRegion, long: RecordedRegion, times: int) -> RecordedRegion:
    """The region with the events of its additional layer repeated."""
    extra = len(long.events) - len(short.events)
    if not extra:
        return long
    a, b = list(map(shape, short.events)), list(map(shape, long.events))
    start = 0
    while start < len(a) and a[start] == b[start]:
        start += 1
    if b[start + extra :] != a[start:]:
        return with_more_work(short, long, times)
    chunk = long.events[start : start + extra]
    events = [*long.events[: start + extra], *(chunk * times), *long.events[start + extra :]]
    return replace(long, events=repaired(events))


def with_more_work(short: RecordedRegion, long: RecordedRegion, times: int) -> RecordedRegion:
    """The region with the kernels and bytes of its additional layer, where the layers do not follow
    one another (buckets of gradients hold several).
    """
    kernels = long.kernels - short.kernels
    sent: dict[str, int] = defaultdict(int)
    for region, sign in ((long, times), (short, -times)):
        for op in region.operations:
            sent[op.axis] += sign * op.sent_bytes
    grown_ops: dict[int, Operation] = {}
    for event in reversed(long.events):
        if isinstance(event, Started) and sent.get(event.op.axis, 0) > 0:
            more = sent.pop(event.op.axis)
            grown_ops[id(event.op)] = replace(event.op, sent_bytes=event.op.sent_bytes + more)
    changed: list[Event] = list(kernels.elements()) * times
    for event in long.events:
        if isinstance(event, Started | Ended):
            changed.append(type(event)(grown_ops.get(id(event.op), event.op)))
        else:
            changed.append(event)
    return replace(long, events=changed)


def shape(event: Event) -> object:
    """What makes two events equal."""
    if isinstance(event, Started | Ended):
        return type(event).__name__, event.op
    return event


def repaired(events: Iterable[Event]) -> list[Event]:
    """The events with an operation of its own for each start; ends belong to the oldest start of
    the same kind that has not ended.
    """
    open_ops: dict[object, list[Operation]] = defaultdict(list)
    found: list[Event] = []
    for event in events:
        if isinstance(event, Started):
            op = replace(event.op)
            open_ops[event.op].append(op)
            found.append(Started(op))
        elif isinstance(event, Ended) and open_ops[event.op]:
            found.append(Ended(open_ops[event.op].pop(0)))
        else:
            found.append(event)
    return found


def grown(short: RecordedRegion, long: RecordedRegion, times: int) -> RecordedRegion:
    """A phase with the work of more layers: its kernels are few and grow in size."""
    if len(short.events) != len(long.events):
        return long
    events: list[Event] = []
    for a, b in zip(short.events, long.events, strict=True):
        if isinstance(b, Started) and isinstance(a, Started):
            more = times * (b.op.sent_bytes - a.op.sent_bytes)
            events.append(Started(replace(b.op, sent_bytes=b.op.sent_bytes + more)))
        elif isinstance(b, Started | Ended) or isinstance(a, Started | Ended):
            events.append(b)
        else:
            more = times * (b.num_bytes - a.num_bytes)
            events.append(replace(b, num_bytes=b.num_bytes + more))
    return replace(long, events=events)


def stages_of(rows: Sequence[Published]) -> Mapping[str, int]:
    """Number of measured pipelines of each source."""
    found: dict[str, set[StageSet]] = defaultdict(set)
    for row in rows:
        found[row.source].add(stage_set(row, WHOLE_SCHEDULE))
    return {source: len(sets) for source, sets in found.items()}
