"""Predicted against published step times: one set of constants a device and software, fitted to half of the rows.

PYTHONPATH=src python benchmarks/published_times.py FACTS [--only vtrain,bloom] [--cache rows.pkl] [--write folder]

FACTS has `perf_rows.json` (one row a published measurement) and `vtrain_single.csv` (720 steps on one node of A100).
Rows go to the fitted or the tested half by a hash of their text. Each row is expressed as a run of weft and measured on
meta tensors; of equal layers in a stage two or three are measured, and the third is repeated. Megatron's attention of that
time is not fused: its scores move through memory, which is a constant of the set. Besides the constants of its set, each
source but the first of a set has one free scale. A row that weft cannot express is listed with the reason.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import pickle
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.errors import WeftError
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.planner.calibrate import (
    MeasuredStep,
    Residual,
    compare,
    fit,
    quantile,
    ratio_range,
)
from weft.planner.measure import RoleCosts, measure
from weft.planner.recorder import Ended, Event, RecordedRegion, Started

VOCAB = 50257
SHORT, LONG = 2, 3
"""Layers a stage that are measured of more."""
MOST_FITTED = 40
"""Rows of a source that are fitted: more change little."""
MOST_ACTIONS = 12_000
"""Actions of the schedule of a row that is fitted."""
SCHEDULES = {
    "1f1b": "1f1b",
    "none": "1f1b",
    "None": "1f1b",
    "zb-1p": "zero_bubble",
    "zb-2p": "zero_bubble_h2",
    "zb-v": "zbv",
    "interleaved-1f1b": "interleaved",
}
RECOMPUTE = {"none": "none", "full": "full", "selective(attn core)": "selective"}
COMPUTE = ("bf16", "fp16", "amp_bf16", "bf16 (fp32 grad accum)", "fp16/bf16 (not printed)")
UNFUSED = Efficiency(gemm_half=1e6, score_bytes=15.0, overlap_slowdown=0.5, source="")
FUSED = Efficiency(gemm_half=1e6, overlap_slowdown=0.5, source="")


class InexpressibleError(Exception):
    """The row is no run of weft; says why."""


class Stack(NamedTuple):
    """Rows with one set of constants: a device and the software on it.

    Attributes:
        hardware: name in the table.
        start: constants to start from.
    """

    name: str
    hardware: str
    start: Efficiency


MEGATRON = Stack("A100, Megatron with unfused attention", "a100", UNFUSED)
STACKS = {
    "vTrain single node": MEGATRON,
    "vTrain measured data (MICRO 2024)": MEGATRON,
    "BLOOM chronicles (Jean Zay A100)": MEGATRON,
    "Zero Bubble PP (arXiv 2401.10241)": MEGATRON,
    "Korthikanti et al. 2022 (arXiv 2205.05198)": MEGATRON,
    "Narayanan et al. SC'21 (arXiv 2104.04473)": MEGATRON,
    "ScaleTorch README": Stack("910B, ScaleTorch", "910b", FUSED),
}
MOSAIC = "MosaicML llm-foundry benchmarks"


class Published(NamedTuple):
    """A published measurement as a run.

    Attributes:
        key: what decides its half.
        words: of the run, as on a command line.
        layers: of each stage.
    """

    key: str
    source: str
    stack: Stack
    words: tuple[str, ...]
    layers: tuple[int, ...]
    seconds: float
    group: str = ""

    @property
    def total(self) -> int:
        """Sequences a step."""
        return int(self.words[self.words.index("--batch.global_size") + 1])

    @property
    def num_micro(self) -> int:
        """Micro-batches of a data rank."""
        words = self.words
        micro = int(words[words.index("--batch.micro_size") + 1])
        mesh = words[words.index("--mesh") + 1].split()
        data = [int(axis[2:]) for axis in mesh if axis.startswith("dp")]
        num_micro, rest = divmod(self.total, micro * (data or [1])[0])
        if rest or not num_micro:
            raise InexpressibleError(f"a batch of {self.total} in micro-batches of {micro}")
        return num_micro

    @property
    def is_fitted(self) -> bool:
        """Whether the row belongs to the half that is fitted."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return digest[0] % 2 == 0


# -- rows as runs -----------------------------------------------------------------------------


def stack_of(row: Mapping[str, Any]) -> Stack:
    source = row["source"]
    gpu = str(row["hardware"].get("gpu", "")).lower()
    if source == MOSAIC:
        name = "h100" if gpu.startswith("h100") else "a100"
        return Stack(f"{name.upper()}, llm-foundry (FSDP)", name, FUSED)
    if source not in STACKS:
        raise InexpressibleError(f"too few rows of {source} for a set of constants")
    return STACKS[source]


def seconds_of(row: Mapping[str, Any]) -> float:
    values = {**row["derived"], **row["measured"]}
    if "iteration_s" in values:
        return float(values["iteration_s"])
    speed = values.get("tokens_per_s_per_gpu")
    if not (speed and row.get("global_batch") and row["hardware"].get("count")):
        raise InexpressibleError("no time of a step")
    tokens = row["global_batch"] * row["model"]["seq"]
    return float(tokens / speed / row["hardware"]["count"])


def model_words(model: Mapping[str, Any], *, tp: int, layers: int) -> list[str]:
    arch = str(model.get("arch", ""))
    fields = {
        "layers": layers,
        "dim": model["hidden"],
        "heads": model["heads"],
        "ffn": model["ffn"],
        "max_seq_len": model["seq"],
        "vocab": padded(model.get("vocab", VOCAB), 128 * tp),
    }
    if arch.startswith(("gpt", "mpt")):
        name = "gpt2"
    elif arch.startswith("qwen3 (") and "experts" not in model:
        name = "qwen3"
        fields |= {"kv_heads": model["kv_heads"], "head_size": model["head_dim"]}
    else:
        raise InexpressibleError(f"model {arch or 'not stated'}")
    words = ["--model.name", name]
    for key, value in fields.items():
        words += [f"--model.{key}", str(value)]
    return words


def padded(number: int, multiple: int) -> int:
    """Megatron pads the vocabulary to whole shards."""
    return -(-number // multiple) * multiple


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, or first and last ones with a layer less (for embedding and head)."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    raise InexpressibleError(f"{layers} layers on {stages} stages")


def run_of_row(row: Mapping[str, Any]) -> Published:
    model, layout = row["model"], row["layout"]
    missing = [name for name in ("hidden", "heads", "ffn", "seq", "layers") if not model.get(name)]
    if missing:
        raise InexpressibleError(f"sizes not printed: {', '.join(missing)}")
    if row["dtype"] not in COMPUTE:
        raise InexpressibleError(f"number type {row['dtype']}")
    schedule = SCHEDULES.get(str(layout.get("schedule")))
    recompute = RECOMPUTE.get(str(layout.get("recompute")))
    if schedule is None or recompute is None:
        raise InexpressibleError(f"{layout.get('schedule')}, recompute {layout.get('recompute')}")
    if layout.get("ep", 1) > 1 or layout.get("sp"):
        raise InexpressibleError("experts or sequence parallelism")
    micro, total = row.get("micro_batch"), row.get("global_batch")
    if not (micro and total):
        raise InexpressibleError("batch not printed")
    degrees = {name: layout.get(name) or 1 for name in ("pp", "dp", "cp", "tp")}
    chunks = layout.get("vpp") or 1
    if schedule == "zbv":
        chunks = 2
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved"
    layers = stage_layers(model["layers"], degrees["pp"] * chunks)
    words = [
        *model_words(model, tp=degrees["tp"], layers=model["layers"]),
        *layout_words(degrees, micro, total),
        *["--data.seq_len", str(model["seq"])],
        *["--parallel.recompute", recompute, "--parallel.zero", str(layout.get("zero") or 0)],
    ]
    if degrees["pp"] > 1:
        words += ["--pipeline.schedule", schedule, "--pipeline.chunks", str(chunks)]
    reduce = "float32" if "fp32" in row["dtype"] else "bfloat16"
    words += ["--precision.reduce", reduce]
    return Published(
        key=row["id"],
        source=row["source"],
        stack=stack_of(row),
        words=tuple(words),
        layers=layers,
        seconds=seconds_of(row),
    )


def layout_words(degrees: Mapping[str, int], micro: int, total: int) -> list[str]:
    axes = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return [
        *["--mesh", " ".join(axes), "--precision.compute", "bfloat16"],
        *["--batch.micro_size", str(micro), "--batch.global_size", str(total)],
        *["--data.tokenizer", "bytes"],
    ]


def run_of_csv(values: Sequence[str]) -> Published:
    _, total, micro, hidden, heads, layers, seq, tp, dp, pp = map(int, values[:10])
    model = {"hidden": hidden, "heads": heads, "ffn": 4 * hidden, "seq": seq, "arch": "gpt"}
    words = [
        *model_words(model, tp=tp, layers=layers),
        *layout_words({"pp": pp, "dp": dp, "tp": tp}, micro, total),
        *["--data.seq_len", str(seq), "--precision.reduce", "bfloat16"],
    ]
    return Published(
        key=",".join(values[:10]),
        source="vTrain single node",
        stack=MEGATRON,
        words=tuple(words),
        layers=stage_layers(layers, pp),
        seconds=float(values[10]) / 1e3,
        group=",".join((*values[:2], *values[3:7])),
    )


def read_rows(facts: Path) -> tuple[list[Published], Counter[str]]:
    """The rows that are runs of weft, and reasons of the others with their number."""
    found: list[Published] = []
    with (facts / "vtrain_single.csv").open() as file:
        found += [run_of_csv(values) for values in list(csv.reader(file))[1:]]
    reasons: Counter[str] = Counter()
    for row in json.loads((facts / "perf_rows.json").read_text()):
        if row["kind"] != "train_step":
            continue
        try:
            found.append(run_of_row(row))
        except InexpressibleError as reason:
            reasons[f"{row['source']}: {reason}"] += 1
    return found, reasons


# -- work of a row from a few of its layers ----------------------------------------------------


class Shallow:
    """Measured runs with few layers a stage, by their words."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: dict[tuple[str, ...], Run] = {}
        self.known: dict[tuple[str, ...], tuple[RoleCosts, ...]] = {}
        if path is not None and path.exists():
            self.known = pickle.loads(path.read_bytes())  # noqa: S301  # written by this program

    def run(self, words: Sequence[str]) -> Run:
        key = tuple(words)
        if key not in self.runs:
            self.runs[key] = load(list(words), FAMILIES)
        return self.runs[key]

    def roles(self, words: Sequence[str]) -> tuple[RoleCosts, ...]:
        key = tuple(words)
        if key not in self.known:
            self.known[key] = measure(self.run(words))
        return self.known[key]

    def save(self) -> None:
        if self.path is not None:
            self.path.write_bytes(pickle.dumps(self.known))


def with_layers(row: Published, most: int) -> list[str]:
    """The words of a run with at most so many layers a stage, and few micro-batches."""
    layers = [min(count, most) for count in row.layers]
    words = with_value(row.words, "--model.layers", str(sum(layers)))
    num_micro = min(row.num_micro, max(4, len(layers)))
    total = num_micro * row.total // row.num_micro
    words = with_value(words, "--batch.global_size", str(total))
    return [*words, *split_words(layers)]


def with_value(words: Sequence[str], key: str, value: str) -> list[str]:
    changed = list(words)
    changed[changed.index(key) + 1] = value
    return changed


def split_words(layers: Sequence[int]) -> list[str]:
    return ["--pipeline.split", *map(str, layers)] if len(layers) > 1 else []


def roles_of(row: Published, shallow: Shallow) -> tuple[RoleCosts, ...]:
    """The work of a row: of its whole schedule, with the third layer of a stage repeated."""
    shallow_run = shallow.run(with_layers(row, SHORT))
    values: dict[str, Any] = {
        "model.layers": sum(row.layers),
        "batch.global_size": row.total,
        "pipeline.split": row.layers if len(row.layers) > 1 else (),
    }
    plan = plan_of(shallow_run.with_values(values))
    short = shallow.roles(with_layers(row, SHORT))
    long = shallow.roles(with_layers(row, LONG))
    return tuple(deepened(a, b, plan, row.layers) for a, b in zip(short, long, strict=True))


def deepened(short: RoleCosts, long: RoleCosts, plan: Plan, layers: Sequence[int]) -> RoleCosts:
    """A role with the layers of `layers`, from two measured ones with fewer."""
    stages = plan.table.stages(long.row)
    missing = [max(0, layers[stage] - LONG) for stage in stages]
    actions = {
        key: repeated(short.step.actions[key], region, missing[key.chunk])
        for key, region in long.step.actions.items()
    }
    phases = {
        name: grown(short.step.phases[name], region, sum(missing) / len(missing))
        for name, region in long.step.phases.items()
    }
    step = replace(long.step, plan=plan, actions=actions, phases=phases)
    return replace(long, step=step)


def repeated(short: RecordedRegion, long: RecordedRegion, times: int) -> RecordedRegion:
    """The region with the events of its additional layer repeated."""
    extra = len(long.events) - len(short.events)
    if not times or not extra:
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
    events: list[Event] = [*(list(kernels.elements()) * times), *long.events]
    grown_ops: dict[int, Operation] = {}
    for event in reversed(long.events):
        if isinstance(event, Started) and sent.get(event.op.axis, 0) > 0:
            more = sent.pop(event.op.axis)
            grown_ops[id(event.op)] = replace(event.op, sent_bytes=event.op.sent_bytes + more)
    changed: list[Event] = []
    for event in events:
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


def grown(short: RecordedRegion, long: RecordedRegion, times: float) -> RecordedRegion:
    """A phase with the work of more layers: its kernels are few and grow in size."""
    if not times or len(short.events) != len(long.events):
        return long
    events: list[Event] = []
    for a, b in zip(short.events, long.events, strict=True):
        if isinstance(b, Started) and isinstance(a, Started):
            more = int(times * (b.op.sent_bytes - a.op.sent_bytes))
            events.append(Started(replace(b.op, sent_bytes=b.op.sent_bytes + more)))
        elif isinstance(b, Started | Ended) or isinstance(a, Started | Ended):
            events.append(b)
        else:
            more = int(times * (b.num_bytes - a.num_bytes))
            events.append(replace(b, num_bytes=b.num_bytes + more))
    return replace(long, events=events)


# -- fit, test, report -------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """A row with its work."""

    row: Published
    step: MeasuredStep


def account_of(row: Published, shallow: Shallow, *, first_source: str) -> Account:
    group = "" if row.source == first_source else row.source
    step = MeasuredStep(row.key, roles_of(row, shallow), row.seconds, group=group)
    return Account(row, step)


def fitted_rows(accounts: Sequence[Account]) -> list[Account]:
    """Rows of the fitted half: of each source the first ones by their hash."""
    by_source: dict[str, list[Account]] = defaultdict(list)
    for account in accounts:
        plan = account.step.roles[0].step.plan
        if account.row.is_fitted and sum(map(len, plan.table.rows)) <= MOST_ACTIONS:
            by_source[account.row.source].append(account)
    found = []
    for members in by_source.values():
        members.sort(key=lambda account: hashlib.sha256(account.row.key.encode()).hexdigest())
        found += members[:MOST_FITTED]
    return found


def error_line(name: str, residuals: Sequence[Residual]) -> str:
    errors = [abs(residual.error) for residual in residuals]
    within = sum(error <= 0.1 for error in errors) / len(errors)
    return (
        f"  {name:<44} {len(errors):>4} rows  median {100 * statistics.median(errors):5.1f}%"
        f"  p90 {100 * quantile(errors, 0.9):5.1f}%  within 10%: {100 * within:3.0f}%"
    )


def report_stack(stack: Stack, accounts: Sequence[Account], folder: Path | None) -> None:
    hardware = find_hardware(stack.hardware)
    training = fitted_rows(accounts)
    names = sorted({account.row.source for account in training})
    source = f"fitted to {len(training)} published steps: {'; '.join(names)}"
    begin = time.process_time()
    found = fit([a.step for a in training], hardware, source=source, start=stack.start)
    print(f"\n{stack.name}: fit of {len(training)} rows, {time.process_time() - begin:.0f} CPU-s")
    for name, error in found.uncertainty.items():
        print(f"  {name:<18} {getattr(found.efficiency, name):.4g}  +- {100 * error:.0f}%")
    for group, scale in found.scales.items():
        print(f"  scale of {group}: {scale:.3f}")
    residuals = dict(
        zip(
            [a.row.key for a in accounts],
            compare([a.step for a in accounts], hardware, found.efficiency, scales=found.scales),
            strict=True,
        )
    )
    used = {account.row.key for account in training}
    spare = [residuals[a.row.key] for a in accounts if a.row.is_fitted and a.row.key not in used]
    low, high = ratio_range(spare) if len(spare) >= 20 else found.range
    print(f"  range of 80% of measured/predicted: {low:.3f} to {high:.3f}")
    for name in sorted({account.row.source for account in accounts}):
        for is_fitted in (True, False):
            chosen = [a for a in accounts if a.row.source == name and a.row.is_fitted == is_fitted]
            if chosen:
                half = "fitted half" if is_fitted else "TEST half"
                print(error_line(f"{name[:30]} {half}", [residuals[a.row.key] for a in chosen]))
    test = [residuals[a.row.key] for a in accounts if not a.row.is_fitted]
    if test:
        print(error_line("all sources TEST half", test))
        covered = sum(low <= residual.ratio <= high for residual in test) / len(test)
        print(f"  the range holds {100 * covered:.0f}% of the test half (80% is the aim)")
    report_choice(accounts, residuals)
    if folder is not None:
        constants = replace(found.efficiency, low=low, high=high)
        (folder / f"{stack.hardware}-{stack.name.split()[1]}.json").write_text(
            json.dumps(
                {k: getattr(constants, k) for k in constants.__dataclass_fields__ if k[0] != "_"}
            )
        )


def report_choice(accounts: Sequence[Account], residuals: Mapping[str, Residual]) -> None:
    """What the layout that is predicted to be the fastest costs, beside the one that is."""
    groups: dict[str, list[Residual]] = defaultdict(list)
    for account in accounts:
        if account.row.group:
            groups[account.row.group].append(residuals[account.row.key])
    choices = [members for members in groups.values() if len(members) > 1]
    if not choices:
        return
    excess = []
    for members in choices:
        chosen = min(members, key=lambda residual: residual.predicted_s)
        best = min(residual.measured_s for residual in members)
        excess.append(chosen.measured_s / best - 1)
    mean = 100 * statistics.mean(excess)
    right = sum(not each for each in excess)
    print(
        f"  layout chosen in {len(choices)} cases of 2 to {max(map(len, choices))} layouts: "
        f"{mean:.1f}% over the best on average, {100 * max(excess):.0f}% at most, best in {right}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--only", default="", help="beginnings of sources, comma-separated")
    parser.add_argument("--most", type=int, default=0, help="rows of a source")
    parser.add_argument("--cache", type=Path, help="file for the measured work")
    parser.add_argument("--write", type=Path, help="folder for the fitted constants")
    args = parser.parse_args()
    rows, reasons = read_rows(args.facts)
    only = tuple(args.only.split(",")) if args.only else ("",)
    rows = [row for row in rows if row.source.lower().startswith(tuple(map(str.lower, only)))]
    shallow = Shallow(args.cache)
    first_of = {
        stack: "vTrain single node" if stack == MEGATRON else ""
        for stack in {row.stack for row in rows}
    }
    stacks: dict[Stack, list[Account]] = defaultdict(list)
    counts: Counter[str] = Counter()
    begin = time.process_time()
    for row in rows:
        counts[row.source] += 1
        if sum(counts.values()) % 50 == 0:
            print(f"  row {sum(counts.values())} of {len(rows)}", flush=True)
        if args.most and counts[row.source] > args.most:
            continue
        first = first_of[row.stack] or row.source
        try:
            stacks[row.stack].append(account_of(row, shallow, first_source=first))
        except (InexpressibleError, WeftError) as reason:
            text = str(reason).splitlines()[0][:90]
            reasons[f"{row.source}: {text}"] += 1
    shallow.save()
    print(
        f"measured {sum(map(len, stacks.values()))} rows: {time.process_time() - begin:.0f} CPU-s"
    )
    for stack, accounts in stacks.items():
        report_stack(stack, accounts, args.write)
    print("\nnot expressed:")
    for text, number in sorted(reasons.items()):
        print(f"  {number:>4} x {text}")


if __name__ == "__main__":
    main()
