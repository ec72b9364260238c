"""`weft replay`: which step of a recorded run to repeat, from which checkpoint, on which batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from weft.checkpoint.folder import checkpoints
from weft.checkpoint.manifest import read_manifest
from weft.commands.console import print_result, show_help, wants_help
from weft.config.command_options import read_options
from weft.config.run import Run
from weft.config.schema import ConfigSection, ParallelConfig, PipelineConfig
from weft.core.axes import local_update_axis
from weft.core.mesh import Mesh
from weft.data.order import batch_of_step
from weft.errors import EXIT_FAILED, EXIT_OK, CheckpointError, DataError, Fault, UserError
from weft.small_files import UnreadableFile
from weft.start.checked_run import load_checked_run, set_openmp_policy
from weft.train.event_lines import read_run_events, step_history
from weft.train.event_log import EVENTS
from weft.train.guard_records import GuardState, StepToRepeat, left_out_batches, read_records

NAME = "weft replay"
USAGE = 'RUN [--step N] [--layout "dp2"]'
LINE = "repeat one step of a run on one device and compare it"
RUN_FILE = "run.toml"


class ReplayOptions(ConfigSection):
    """What to repeat, and where."""

    step: int = Field(
        0, ge=0, description="the step; 0: the last one that failed, else the last one"
    )
    layout: str = Field(
        "", description='mesh to repeat it on, ranks as threads: "dp2 tp2"; empty: one device'
    )


def replay(words: Sequence[str]) -> int:
    """Repeat a step and compare it with the recorded one; exit code 1 where they differ."""
    if wants_help(words):
        return show_help(ReplayOptions(), f"{NAME} {USAGE}", LINE)
    options, places = read_options(words, ReplayOptions)
    if len(places) != 1:
        got = " ".join(places) or "nothing"
        raise UserError(Fault(NAME, "takes one run folder", got=got, fix=f"{NAME} runs/x --step 8"))
    folder = Path(places[0])
    step = step_to_repeat(folder, options.step)
    resume = str(step.checkpoint) if step.checkpoint else None
    run = run_to_repeat(folder, options.layout).with_values({"resume": resume})
    set_openmp_policy()
    # late: they import torch, after all checks
    from weft.commands.repeat_step import RepeatLayout, Repetition
    from weft.train.build_training import build_run_steps

    layout = RepeatLayout(
        mesh=run.device_mesh, dtype=run.precision.compute, build=partial(build_run_steps, run)
    )
    repetition = Repetition(folder, step, layout=layout)
    for line in repetition.lines():
        print_result(line)
    return EXIT_OK if repetition.is_equal else EXIT_FAILED


def run_to_repeat(folder: Path, layout: str) -> Run:
    """The config of the run, on another layout: one device, or a mesh with the run's options."""
    file = str(folder / RUN_FILE)
    run = load_checked_run([file])
    _check_sites(run.device_mesh, layout)
    if layout:
        run = load_checked_run([file, "--mesh", layout])
    else:
        one_device = {"mesh": "", "parallel": ParallelConfig(), "pipeline": PipelineConfig()}
        run = run.model_copy(update=one_device)
    without_folder = {"nproc": None, "sample": 0, "sample_every": 0, "out": None, "resume": None}
    return run.model_copy(update=without_folder)


def _check_sites(mesh: Mesh, layout: str) -> None:
    """Sites that train apart are repeated on as many sites.

    Raises:
        UserError: the layout has another number of them.
    """
    axis = local_update_axis(mesh)
    wanted = Mesh.parse(layout)
    if axis is None:
        return
    if local_update_axis(wanted) == axis and wanted.degree(axis) == mesh.degree(axis):
        return
    what = "sites train apart: one device does not compute their steps"
    fix = f'--layout "{mesh.text}"'
    raise UserError(
        Fault(
            "layout", what, got=layout or "one device", need=f"{axis}{mesh.degree(axis)}", fix=fix
        )
    )


def step_to_repeat(folder: Path, number: int) -> StepToRepeat:
    """Step `number` of the run in `folder`, or the last one that failed, or the last one.

    Raises:
        DataError: the folder holds no run, the run has no such step, or it started elsewhere.
    """
    events = _events(folder)
    steps = {event["step"]: event for event in step_history(events)}
    records = read_records(folder)
    number = number or _default_step(folder, steps, records)
    record = _record_of(records, number)
    failed_steps = [record["step"] for record in records]
    last = max([0, *steps, *failed_steps])
    if record is None and number not in steps:
        got = f"step {number}"
        need = f"1 to {last}"
        raise DataError(
            Fault("step", f"{folder} has no record of it", got=got, need=need, fix=f"--step {last}")
        )
    if record is None:
        skipped = None
    else:
        skipped = tuple(record.get("skipped_batches", ()))
    before = events if record is None else _events_before(events, record)
    after = events[len(before) :]
    gone_back_to = [event["step"] for event in after if event["event"] in ("resume", "restart")]
    start = _start(
        folder,
        number,
        events=events,
        records=records,
        skipped=skipped,
        newest=min(gone_back_to, default=number),
    )
    result = record or steps[number]
    trained = step_history(before)
    return StepToRepeat(
        number=number,
        loss=_number(result.get("loss")),
        grad_norm=_number(result.get("grad_norm")),
        record=record,
        checkpoint=start.checkpoint,
        num_done=start.num_done,
        skipped_batches=start.skipped_batches,
        lrs={event["step"]: event["lr"] for event in trained if _number(event.get("lr"))},
        not_updated=_skipped_steps(before),
        has_started_again=any(event["event"] == "run" for event in after),
    )


def _events(folder: Path) -> list[dict[str, Any]]:
    for name in (RUN_FILE, EVENTS):
        if not (folder / name).is_file():
            got = f"{str(folder)!r} without {name}"
            raise DataError(Fault(NAME, "no run in this folder", got=got, fix="name a run folder"))
    try:
        return list(read_run_events(folder / EVENTS))
    except (UnreadableFile, ValueError) as error:
        raise DataError(Fault(NAME, str(error))) from None


def _default_step(
    folder: Path, steps: Mapping[int, Any], records: Sequence[Mapping[str, Any]]
) -> int:
    if records:
        return int(records[-1]["step"])
    if not steps:
        raise DataError(
            Fault(
                NAME,
                f"{folder} has no record of a step",
                fix="name a run that has trained at least one step",
            )
        )
    return max(steps)


def _record_of(records: Sequence[Mapping[str, Any]], number: int) -> Mapping[str, Any] | None:
    """The first record of a step; later ones are of the same step on other samples."""
    found = [record for record in records if record["step"] == number]
    return min(found, key=lambda record: len(record.get("skipped_batches", ())), default=None)


def _events_before(
    events: Sequence[dict[str, Any]], record: Mapping[str, Any]
) -> Sequence[dict[str, Any]]:
    """The events up to the failure that a record is of: later ones may train its steps again, with
    other learning rates.
    """
    for index, event in enumerate(events):
        places = (event.get("step"), event.get("batch"))
        if event["event"] == "guard" and places == (record["step"], record["batch"]):
            return events[: index + 1]
    return events


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    return None


def _skipped_steps(events: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Steps whose update a guard skipped; those of an overflow in float16 change the loss scale."""
    skipped = set()
    for event in events:
        if event["event"] == "guard" and event.get("action") == "skip":
            skipped.add(int(event.get("step", 0)))
    return frozenset(skipped)


@dataclass(frozen=True)
class _ReplayStart:
    """A checkpoint before a step (None: initial parameters), and the batches to leave out."""

    checkpoint: Path | None
    num_done: int
    skipped_batches: tuple[int, ...]


def _start(
    folder: Path,
    number: int,
    *,
    events: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    skipped: tuple[int, ...] | None,
    newest: int,
) -> _ReplayStart:
    """The newest checkpoint before step `number` that was trained on the same batches.

    Args:
        newest: checkpoints of more steps were written after the run had gone back.
        skipped: the batches that were left out when the step failed; None: those of today.
    """
    for step, path in checkpoints(folder):
        if step >= number or step > newest:
            continue
        try:
            position = read_manifest(path).facts.position
        except CheckpointError:
            continue
        state = GuardState.of_position(position)
        next_batch = batch_of_step(step, state.skipped_batches)
        left_out = skipped
        if left_out is None:
            later = left_out_batches(records, first=next_batch)
            left_out = state.without_batches(later).skipped_batches
        if _below(left_out, next_batch) == _below(state.skipped_batches, next_batch):
            return _ReplayStart(checkpoint=path, num_done=step, skipped_batches=left_out)
    first = next((event for event in events if event["event"] == "run"), {})
    if first.get("start_step", 0):
        what = f"the run starts after step {first['start_step']}, and no checkpoint before step {number} is left"
        raise DataError(Fault("step", what, fix="name a later step"))
    if skipped is None:
        skipped = left_out_batches(records, first=0)
    return _ReplayStart(checkpoint=None, num_done=0, skipped_batches=skipped)


def _below(batches: Sequence[int], bound: int) -> list[int]:
    return [batch for batch in batches if batch < bound]
