"""What `weft trace` says: sentences and tables for the terminal and the page, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from weft.errors import counted
from weft.profiler.critical_path import work_on_path
from weft.profiler.measured_steps import StepAccount
from weft.report.figures import losses_text
from weft.view.quantity import short_time
from weft.view.text_table import TextTable
from weft_plan.tracing.compared_steps import SLOW_FACTOR, SlowRank, Trace

MOST_DIFFERENCES = 8
MOST_WORK = 4
"""Kinds of work that a line about a critical path names."""
MOST_LOSSES = 12
"""Steps whose losses are listed; --json has all."""
MOST_RANKS = 32
"""Ranks of which the terminal shows a row; the page and --json have all."""
LEAST_DIFFERENCE = 0.005
"""Share of a step below which work that differs from its prediction is not listed."""


def title_of(trace: Trace) -> str:
    """`steps 10 to 12 of runs/first (pp2 dp2, 4 ranks), profile 1`."""
    numbers = trace.numbers
    steps = f"step {numbers[0]}"
    if len(numbers) > 1:
        steps = f"steps {numbers[0]} to {numbers[-1]}"
    run = trace.profile.folder.parent.parent
    mesh = str(trace.plan.mesh) or "one rank"
    ranks = counted(trace.num_ranks, "rank")
    return f"{steps} of {run} ({mesh}, {ranks}), profile {trace.profile.number}"


def sentences(trace: Trace) -> Iterator[str]:
    """What stands out, one sentence each."""
    measured, predicted = short_time(trace.step_s), short_time(trace.prediction.step_s)
    yield f"a step takes {measured} (measured), {predicted} (predicted: {trace.prediction.source})"
    if trace.bubble is not None and trace.prediction.bubble is not None:
        yield (
            f"bubble of the pipeline: {trace.bubble:.1%} (measured),"
            f" {trace.prediction.bubble:.1%} (predicted)"
        )
    yield from (_slow_text(trace, slow) for slow in trace.slow_ranks)
    yield _path_text(trace)
    if trace.losses:
        yield losses_text(trace.losses)
    if trace.profile.num_left_out:
        left = counted(trace.profile.num_left_out, "record")
        yield f"the memory for records was full: {left} are left out, record fewer steps"
    if trace.profile.clock_error_s:
        error = short_time(trace.profile.clock_error_s)
        yield f"the clocks of the hosts are compared to within {error}"


def _rank_text(trace: Trace, rank: int) -> str:
    return f"rank {rank} ({trace.plan.mesh.coord_text(rank)})"


def _slow_text(trace: Trace, slow: SlowRank) -> str:
    return (
        f"slow: {_rank_text(trace, slow.rank)} takes {slow.factor:.1f} times as long for its actions as"
        f" the other ranks for the same work, {short_time(slow.excess_s)} a step; others wait"
        f" {short_time(slow.waited_s)} a step for it, and it computes on {slow.path_share:.0%} of the"
        " critical path"
    )


def _path_text(trace: Trace) -> str:
    """The critical path of the drawn step."""
    path = trace.paths[trace.numbers.index(trace.drawn)]
    ranks = [f"rank {rank} {_share(s, path.length)}" for rank, s in path.by_rank.items()]
    called = path.length - sum(path.by_rank.values())
    ranks = [*ranks[:MOST_WORK], f"communication {_share(called, path.length)}"]
    work = work_on_path(trace.steps, path).items()
    most = [f"{name} {short_time(seconds)}" for name, seconds in list(work)[:MOST_WORK]]
    length = short_time(path.length)
    return (
        f"critical path of step {trace.drawn} ({length}): {', '.join(ranks)};"
        f" most of it {', '.join(most)}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def tables(trace: Trace) -> tuple[TextTable, ...]:
    """The tables of the report, in order."""
    found = (
        rank_table(trace),
        step_table(trace),
        exposure_table(trace),
        difference_table(trace),
        loss_table(trace),
    )
    return tuple(table for table in found if table.rows)


def rank_table(trace: Trace) -> TextTable:
    """Busy, waiting and communication time of each rank, seconds a step."""
    rows = []
    for rank in range(trace.num_ranks):
        waited = trace.waited_for[rank]
        most = next(iter(waited), None)
        cells = (
            f"{rank} ({trace.plan.mesh.coord_text(rank)})" if trace.num_ranks > 1 else str(rank),
            short_time(trace.mean(rank, lambda account: account.length)),
            short_time(trace.mean(rank, lambda account: account.busy_s)),
            short_time(trace.mean(rank, lambda account: account.waiting_s)),
            short_time(trace.mean(rank, lambda account: account.communication_s)),
            "-" if most is None else f"rank {most}, {short_time(waited[most])}",
            f"{trace.path_share(rank):.0%}",
        )
        rows.append(cells)
    return TextTable(
        title="each rank, a step (measured, mean)",
        columns=("rank", "step", "busy", "waiting", "communication", "waits most for", "critical"),
        rows=tuple(rows),
        note="busy + waiting + communication = step; critical: its share of the critical path",
    )


def step_table(trace: Trace) -> TextTable:
    """The steps, one by one; none of a single one."""
    rows = []
    for number, path in zip(trace.numbers, trace.paths, strict=True):
        accounts = [trace.steps.account(rank, number) for rank in range(trace.num_ranks)]
        bubble = trace.steps.bubble(number)
        first = next(iter(path.by_rank), 0)
        cells = (
            str(number),
            short_time(trace.steps.step_s(number)),
            *(short_time(_mean(accounts, name)) for name in PARTS),
            "-" if bubble is None else f"{bubble:.1%}",
            f"rank {first}, {_share(path.by_rank.get(first, 0.0), path.length)}",
        )
        rows.append(cells)
    return TextTable(
        title="each step (measured, mean of the ranks)",
        columns=("step", "length", "busy", "waiting", "communication", "bubble", "most critical"),
        rows=tuple(rows) if len(rows) > 1 else (),
    )


PARTS = ("busy_s", "waiting_s", "communication_s")


def _mean(accounts: list[StepAccount], name: str) -> float:
    values = [float(getattr(account, name)) for account in accounts]
    return sum(values) / len(values)


def exposure_table(trace: Trace) -> TextTable:
    """Exposed communication by axis."""
    rows = tuple(
        (
            each.axis,
            short_time(each.waiting),
            short_time(each.communication),
            short_time(each.in_actions),
            "-" if each.predicted is None else short_time(each.predicted),
        )
        for each in trace.exposures
    )
    note = "of the rank with the most; predicted: of collectives, during actions"
    if trace.prediction.exposed_s is None:
        note += ", with --hardware"
    return TextTable(
        title="exposed communication by axis, a step",
        columns=("axis", "waiting", "communication", "during actions", "predicted"),
        rows=rows,
        note=note,
    )


def difference_table(trace: Trace) -> TextTable:
    """Work that differs most from its prediction."""
    least = LEAST_DIFFERENCE * trace.step_s
    rows = tuple(
        (
            each.name,
            f"{each.times:g}",
            short_time(each.measured_s),
            short_time(each.predicted_s),
            f"{each.measured_s / each.predicted_s:.2f}" if each.predicted_s else "-",
            f"{'+' if each.step_s > 0 else '-'}{short_time(abs(each.step_s))}",
        )
        for each in trace.differences[:MOST_DIFFERENCES]
        if abs(each.step_s) >= least
    )
    return TextTable(
        title="where measured and predicted differ most",
        columns=("work", "times", "measured", "predicted", "ratio", "a step"),
        rows=rows,
        note="F, B, I, W: forward, backward, input and weight gradients; the number is the stage",
    )


def loss_table(trace: Trace) -> TextTable:
    """The losses of the run beside those of one device, of some steps of many."""
    losses = trace.losses
    most = min(MOST_LOSSES, len(losses))
    chosen = (losses[number * (len(losses) - 1) // max(1, most - 1)] for number in range(most))
    rows = tuple(
        (
            str(each.step),
            f"{each.recorded:.9g}",
            f"{each.alone:.9g}",
            f"{each.relative:.1e}",
            f"{each.bound:.1e}",
        )
        for each in chosen
    )
    return TextTable(
        title="the loss beside one device",
        columns=("step", "this layout", "one device", "difference", "rounding explains"),
        rows=rows,
        note="differences are shares of the loss",
    )


def trace_json(trace: Trace) -> dict[str, object]:
    """Everything as JSON; times in seconds."""
    prediction = trace.prediction
    return {
        "run": str(trace.profile.folder.parent.parent),
        "profile": trace.profile.number,
        "mesh": trace.plan.mesh.text,
        "steps": list(trace.numbers),
        "drawn_step": trace.drawn,
        "step_s": trace.step_s,
        "bubble": trace.bubble,
        "clock_error_s": trace.profile.clock_error_s,
        "records_left_out": trace.profile.num_left_out,
        "predicted": {
            "source": prediction.source,
            "step_s": prediction.step_s,
            "bubble": prediction.bubble,
            "exposed_s": prediction.exposed_s,
            "timeline": json.loads(prediction.timeline.to_json()),
        },
        "ranks": [
            _account_json(trace, account)
            for rank in range(trace.num_ranks)
            for account in trace.accounts(rank)
        ],
        "exposed": [each._asdict() for each in trace.exposures],
        "differences": [{**each._asdict(), "step_s": each.step_s} for each in trace.differences],
        "losses": [{**asdict(each), "relative": each.relative} for each in trace.losses],
        "slow_ranks": {
            "factor": SLOW_FACTOR,
            "ranks": [each._asdict() for each in trace.slow_ranks],
        },
        "critical_paths": [
            {
                "step": path.step,
                "length_s": path.length,
                "by_rank": path.by_rank,
                "by_work": work_on_path(trace.steps, path),
                "pieces": [piece._asdict() for piece in path.pieces],
            }
            for path in trace.paths
        ],
    }


def _account_json(trace: Trace, account: StepAccount) -> dict[str, object]:
    return {
        **asdict(account),
        "coordinates": trace.plan.mesh.coord_text(account.rank),
        "length_s": account.length,
        "busy_s": account.busy_s,
        "waiting_s": account.waiting_s,
        "communication_s": account.communication_s,
    }
