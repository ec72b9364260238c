"""docs/programs.md from the results of `make programs`: a row for each program, and the lines that reject a layout.

`python -m tests.programs_of_others.page` writes it from the last result of each column.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.programs_of_others.outcomes import (
    COLUMNS,
    FOLDER,
    LAYOUTS,
    MARKER,
    OWN,
    PROGRAMS,
    RESULTS,
)

PAGE = FOLDER.parents[1] / "docs" / "programs.md"
BY_BOUND = "dp2 bfloat16"
"""The column whose differences are those of rounding to 16 bits."""
HEAD = """# Programs of other people

{count} public programs, rewritten at small size in their way of writing (`tests/programs_of_others/`): their modules,
names, masks, initial values and losses. What makes each one a model of weft stands below `# weft` in its file (the
chain of blocks, axes and inputs; [your-model.md](your-model.md)), and lines of the program that were changed end with
`# weft`: sizes of heads by -1 instead of a number, `weft.Attend` where `cp` is to work, positions of the batch.

Each column is proved against one device in float64: every batch, activation, gradient, moment and parameter of a step.
Before that, in "own loss", the loss and all gradients of the program's own forward equal those of the chain of blocks.
"varied" has other settings (head counts, tied or not, frozen parts, odd vocabularies) on pp2 dp2 with ZeRO 1; "dropout"
has it on, on pp2 dp2. In bfloat16 the bounds are those of rounding, and its difference is not in the column.
`make programs` runs all (half an hour on two cores) and writes this page.

The columns: {columns}.

| program | lines | changed | below | equal (largest difference) | rejected | not run |
|---|---|---|---|---|---|---|"""


def write_page(results: Path = RESULTS) -> None:
    """Write the page, and keep the last result of each column alone."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["program"], {})[record["column"]] = record
    PAGE.write_text("\n".join(_lines(found)) + "\n", encoding="utf-8")
    last = [columns[key] for columns in found.values() for key in COLUMNS if key in columns]
    results.write_text("".join(f"{json.dumps(one)}\n" for one in last), encoding="utf-8")


def counts_of(name: str) -> tuple[int, int, int]:
    """Lines of a program that are not empty, those of them that were changed, and those below the marker."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    own, _, added = text.partition(f"\n{MARKER}\n")
    lines = [line for line in own.splitlines() if line.strip()]
    return len(lines), sum(MARKER in line for line in lines), sum(map(bool, added.split("\n")))


def _lines(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Iterator[str]:
    names = [name for name in PROGRAMS if name in found]
    yield HEAD.format(count=len(names), columns="\n".join(textwrap.wrap(", ".join(LAYOUTS), 105)))
    for name in names:
        columns = {key: found[name][key] for key in COLUMNS if key in found[name]}
        equal = [key for key, one in columns.items() if one["word"] == "equal"]
        exact = [float(columns[key]["text"]) for key in equal if key != BY_BOUND]
        cells = [
            PROGRAMS[name].title,
            *map(str, counts_of(name)),
            f"{sum(key != OWN for key in equal)} ({max(exact, default=0.0):.0e})",
            ", ".join(key for key, one in columns.items() if one["word"] == "rejected") or "-",
            str(len(set(COLUMNS) - set(columns))),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## The lines"
    yield ""
    yield from _reasons(found, "rejected")
    others = [word for word in ("wrong", "failed") if any(True for _ in _reasons(found, word))]
    if others:
        yield ""
        yield "## What is not equal, and not rejected"
        yield ""
        for word in others:
            yield from _reasons(found, word)


def _reasons(found: Mapping[str, Mapping[str, Mapping[str, str]]], word: str) -> Iterator[str]:
    """Each line of this outcome, and the programs and columns that it is of."""
    places: dict[str, list[str]] = {}
    for name in PROGRAMS:
        for column, one in found.get(name, {}).items():
            if one["word"] == word and column in COLUMNS:
                line = re.sub(r"^[^:]*\d[\w.]*: ", "BLOCK: ", one["text"].replace(name, "MODEL"))
                reason = " ".join(line.replace("|", "/").partition(" Fix: ")[0].split())
                places.setdefault(reason, []).append(f"{PROGRAMS[name].title} ({column})")
    for reason, of in places.items():
        yield from textwrap.wrap(", ".join(of), 110, initial_indent="- ", subsequent_indent="  ")
        yield from textwrap.wrap(reason, 110, initial_indent="    - ", subsequent_indent="      ")


if __name__ == "__main__":
    write_page()
