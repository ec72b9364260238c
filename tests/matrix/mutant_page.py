"""Writes the table of mutants in docs/proof-tests.md from the results of `weft prove --mutants --checks each --json`.

PYTHONPATH=. .venv/bin/python -m tests.matrix.mutant_page runs/mutants.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "proof-tests.md"
START = "<!-- mutants: written by tests/matrix/mutant_page.py -->\n"
END = "<!-- end of mutants -->\n"
CHECKS: Mapping[str, str] = {
    "proof": "proof at reduced size (`weft prove`, before a run)",
    "first_step": "comparison of the first step (in `weft train`)",
    "types": "types of the step (`weft explain`, no values)",
}
SHORT_NAMES: Mapping[str, str] = {"proof": "proof", "first_step": "first step", "types": "types"}


def page_with(results: Mapping[str, Any], page: str) -> str:
    """The page with the table of these results."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return "".join((before, START, "\n".join(_lines(results)), "\n", END, after))


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    planted = results["planted"]
    detected = results["detected"]
    share = results["attributed"] / max(planted, 1)
    yield ""
    yield f"Detected {detected} of {planted}; attributed to the right block and axis: {results['attributed']} ({share:.0%})."
    yield f"Not detected: {_names(results['survivors'])}."
    yield f"Detected, but not at its block and axis: {_names(results['wrong_place'])}."
    yield ""
    yield from _counts_of_checks(results["results"])
    yield "| fault | layout | weft's first difference | block and axis | seen alone by | published |"
    yield "|---|---|---|---|---|---|"
    for result in results["results"]:
        yield f"| {' | '.join(_cells(result))} |"
    yield ""


def _counts_of_checks(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How many faults each check sees alone, of those that it looked at."""
    yield "| check | looked at | sees alone | nothing else sees |"
    yield "|---|---|---|---|"
    for key, title in CHECKS.items():
        looked_at = [result for result in results if result.get(key) is not None]
        seen = [result for result in looked_at if result[key]]
        others = [other for other in CHECKS if other != key]
        only = [result for result in seen if not any(result.get(other) for other in others)]
        yield f"| {title} | {len(looked_at)} | {len(seen)} | {len(only)} |"
    yield ""


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    is_right = result["right_axis"] and result["right_block"]
    place = "right" if is_right else "another"
    if not result["detected"]:
        place = "**not detected**"
    message = result["message"].replace("|", "\\|")
    what = f"`{result['mutant']}`: {result['what']}"
    checks = ", ".join(short for key, short in SHORT_NAMES.items() if result.get(key)) or "none"
    return what, result["layout"], message, place, checks, _reference(result["reference"])


def _reference(reference: str) -> str:
    """A link with the system and the number, or the text."""
    if not reference.startswith("https://"):
        return reference
    system, _, number = reference.split("/")[4:]
    return f"[{system} {number}]({reference})"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(page_with(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
