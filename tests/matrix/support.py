"""Writes docs/support.md from the results of `make matrix` and from the messages of config validation.

PYTHONPATH=. .venv/bin/python -m tests.matrix.support runs/matrix.jsonl
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.layouts import CLIP, NUM_STEPS, Case
from tests.matrix.sweep import every_case
from tests.one_device import TOLERANCE
from tests.small_models import TEXT_FAMILIES
from weft.config.load import try_load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.models import FAMILIES
from weft.schedule.catalog import SCHEDULES

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
REJECTIONS = "## Rejected layouts"


@dataclass(frozen=True)
class Result:
    """The result of one layout's test; `relative` is the largest difference of its `compared`
    numbers and tensors.
    """

    case: Case
    passed: bool
    commit: str
    relative: float = 0.0
    compared: int = 0


def read_results(path: Path) -> tuple[Result, ...]:
    """The last result of every layout in a file that the matrix has written."""
    last: dict[Case, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        case = Case(**found["case"])
        passed = found["outcome"] == "passed"
        last[case] = Result(
            case, passed, found["commit"], found.get("relative", 0.0), found.get("compared", 0)
        )
    return tuple(last.values())


Has = Callable[[Case], bool]


def _axis(name: str) -> Has:
    return lambda case: case.grid.degree(name) > 1


def _is(name: str, value: object) -> Has:
    return lambda case: getattr(case, name) == value


def _context(way: str) -> Has:
    return lambda case: case.grid.degree("cp") > 1 and case.context == way


LAYOUT: Mapping[str, Has] = {
    **{axis: _axis(axis) for axis in ("pp", "dp", "ep", "cp", "tp")},
    "sp": _is("sequence", True),
    **{f"zero {stage}": _is("zero", stage) for stage in (1, 2, 3)},
    "select": _is("recompute", "selective"),
    "full": _is("recompute", "full"),
    **{way: _context(way) for way in ("ring", "allgather", "ulysses")},
    "docs": _is("documents", True),
}
"""Columns of the table of pairs; `select` and `full` are recomputation, `docs` packed documents."""


def _ungrouped(family: str) -> Has:
    return lambda case: case.family == family and not case.grouped


def _accumulates(case: Case) -> bool:
    return case.microbatches > 1


def _clips_otherwise(case: Case) -> bool:
    return case.clip != CLIP


def _nests_otherwise(case: Case) -> bool:
    """The mesh lists its axes in another order than the table."""
    usual = [name for name in LAYOUT if _axis(name)(case)]
    return [axis for axis, _ in case.grid.axes] != usual


def _has_many_ranks(case: Case) -> bool:
    return case.grid.size >= 16


UNGROUPED = ("gpt2", "llama3")
FEATURES: Mapping[str, Has] = {
    **{name: _ungrouped(name) for name in UNGROUPED},
    "llama3, tied, grouped": _is("grouped", True),
    **{name: _is("family", name) for name in TEXT_FAMILIES if name not in UNGROUPED},
    **{name: _is("schedule", name) for name in SCHEDULES},
    **LAYOUT,
    "1 micro-batch": _is("microbatches", 1),
    "accumulation": _accumulates,
    "no clipping": _clips_otherwise,
    "other nesting": _nests_otherwise,
    "16 to 32 ranks": _has_many_ranks,
}

REJECTED = (
    '--mesh tp3',
    '--mesh tp8',
    '--model.name gpt2 --mesh "dp2 tp3"',
    '--model.name deepseek --mesh ep3 --batch.global_size 24',
    '--mesh ep2',
    '--mesh fsdp2',
    '--mesh cp3',
    '--mesh cp4 --data.seq_len 100',
    '--mesh tp2 --parallel.sequence True --data.seq_len 33',
    '--mesh "cp2 tp2" --parallel.sequence True --data.seq_len 66',
    '--mesh tp2 --parallel.tp_overlap True',
    '--mesh tp2 --parallel.sequence True --parallel.tp_overlap True --precision.linears fp8',
    '--mesh "pp2 tp2" --parallel.sequence True --parallel.tp_overlap True --pipeline.schedule zero_bubble',
    '--mesh cp8 --parallel.context ulysses',
    '--mesh "cp4 tp2" --parallel.context ulysses',
    '--model.name mnist --mesh cp2',
    '--model.name mnist --mesh tp2 --parallel.sequence True',
    '--model.name mnist --mesh ep2',
    '--mesh pp8',
    '--mesh pp4 --pipeline.schedule zbv',
    '--mesh pp2 --pipeline.schedule zbv --pipeline.chunks 1',
    '--mesh pp4 --pipeline.schedule dual_pipe_v --pipeline.chunks 3',
    '--mesh pp2 --pipeline.schedule zero_bubble --pipeline.chunks 2',
    '--mesh pp2 --pipeline.schedule interleaved --batch.global_size 6',
    '--mesh pp2 --pipeline.split 1 2',
    '--mesh pp3 --pipeline.split 2 0 2',
    '--mesh pp2 --parallel.recompute none/full/none',
    '--mesh dp3',
    '--mesh dp2 --batch.statistics_size 4',
    '--batch.global_size 7',
    '--model.name gpt2 --data.seq_len 999',
    '--model.vocab 99',
    '--precision.params bfloat16',
    '--precision.params float16 --precision.compute float16',
    '--precision.compute float16 --precision.reduce bfloat16',
    '--precision.fp8_exclude q',
    '--precision.linears fp8 --model.name mnist',
)  # fmt: skip
"""One example of each error; a test checks that every check is covered."""


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    lines = [*_head(results), *_features(results), *_pairs(results), *rejections()]
    return "\n".join(lines)


def _head(results: Sequence[Result]) -> Iterator[str]:
    passed = [result for result in results if result.passed]
    whole = len(every_case())
    commits = ", ".join(sorted({result.commit for result in results}))
    yield "# Supported layouts"
    yield ""
    yield "Written by `make matrix` (`tests/matrix/support.py`) from its results; do not edit."
    yield ""
    yield f"Of the {whole:,} layouts of the sweep {len(results):,} were run (at {commits}) and {len(passed):,} passed: in float64"
    yield f"every loss, gradient norm, gradient and updated parameter of {NUM_STEPS} steps equals that of one device within"
    num_compared = sum(result.compared for result in passed)
    yield f"{TOLERANCE:.0e}. {num_compared:,} numbers and tensors were compared; the largest relative"
    yield f"difference was {max((result.relative for result in passed), default=0.0):.0e}. All runs mask targets unevenly."
    yield ""
    yield "The sweep: layouts with every valid combination of three options (`tests/matrix/cover.py`), and every mesh of up to"
    yield "16 ranks over pp, dp, cp and tp with every schedule (`tests/matrix/sweep.py`). 16-bit types have separate tests:"
    yield "[precision](precision.md)."
    yield ""
    if failed := [f"- FAILED: {result.case}" for result in results if not result.passed]:
        yield from (*failed, "")


def _features(results: Sequence[Result]) -> Iterator[str]:
    yield "## Features"
    yield ""
    yield "| | layouts that passed | failed | largest difference |"
    yield "|---|---|---|---|"
    for name, has in FEATURES.items():
        mine = [result for result in results if has(result.case)]
        passed = [result for result in mine if result.passed]
        largest = f"{max(result.relative for result in passed):.0e}" if passed else ""
        yield f"| {name} | {len(passed)} | {len(mine) - len(passed)} | {largest} |"
    yield ""


def _pairs(results: Sequence[Result]) -> Iterator[str]:
    width = max(map(len, FEATURES)) + 2
    yield "## Pairs"
    yield ""
    yield "Layouts with both features that passed; `-`: the two cannot be combined, or the combination was not run."
    yield ""
    yield "```"
    yield " " * width + "".join(f"{name:>10}" for name in LAYOUT)
    passed = [result.case for result in results if result.passed]
    for name, has in FEATURES.items():
        counts = []
        for other in LAYOUT.values():
            counts.append(sum(has(case) and other(case) for case in passed))
        cells = [f"{count or '-':>10}" for count in counts]
        yield f"{name:<{width}}" + "".join(cells)
    yield "```"
    yield ""


def rejections() -> Iterator[str]:
    """Error messages of invalid layouts, with the nearest valid ones."""
    yield REJECTIONS
    yield ""
    yield "All other layouts run. One example of each error, as `weft train` reports it before any rank starts; each fix was"
    yield "tried and passes validation (`config/rules/checks.py`)."
    yield ""
    yield "```"
    for words in REJECTED:
        yield f"$ weft train {words}"
        yield from (f"error: {line}" for line in messages(shlex.split(words)))
    yield "```"
    yield ""


def messages(words: Iterable[str]) -> list[str]:
    """The faults of a config, one line each."""
    loaded = try_load(list(words), FAMILIES)
    return [str(fault) for fault in run_checks(loaded.run, config_checks, known=loaded.faults)]


if __name__ == "__main__":
    PAGE.write_text(page(read_results(Path(sys.argv[1]))), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
