"""docs/architectures.md from the results of `make architectures`: a row for each decoder, and why others are rejected."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
COLUMNS = (
    "one device", "dp2 zero 3", "tp2", "tp2 sequence", "cp2", "pp2", "ep2", "generation", "export",
)  # fmt: skip
MARKS = {"rejected": "rejected", "wrong": "WRONG", "failed": "FAILED", "none": "-"}
HEAD = """# Decoders of transformers

Written by `make architectures`; [huggingface.md](huggingface.md) says how they are trained. transformers {version} has
{total} classes for causal language models. {equal} are equal on all that applies; {partly} on a part, the rest of their
layouts is rejected; {unfinished} on one device, and their layouts have not all been run (empty cells); {rejected} are
rejected in one line, {wrong} are wrong, {failed} end in another way.

The first column is the largest difference of the loss and of all gradients to transformers' own class on one device, in
float64 and at tiny sizes; the others are the largest relative difference of all tensors of a step (batches,
activations, gradients, moments, parameters) to one device. `-`: the model has no experts. pp2 is with tied embeddings
where a config can tie them. Under cp, what mixes tokens, or counts positions, by code of its own works on whole
sequences.
"""
OUTCOMES = ("equal", "rejected", "none", "wrong", "failed")

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Rejected layouts": ("partly", "unfinished"),
    "Rejected architectures": ("rejected",),
    "Wrong, or without an end": ("wrong", "failed"),
}
"""Title of a list of reasons -> the kinds of rows that it is of."""


def write_page(results: Path, names: Mapping[str, str]) -> None:
    """Write the page from the last result of each column, and keep these results alone."""
    found = last_results(results)
    last = {name: found[name] for name in names if name in found}
    PAGE.write_text("\n".join(_lines(last, names)) + "\n", encoding="utf-8")
    records = ({"model_type": name, "outcomes": outcomes} for name, outcomes in last.items())
    results.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def last_results(results: Path) -> dict[str, dict[str, Any]]:
    """Architecture -> column -> its last outcome; no file yet is no outcome."""
    last: dict[str, dict[str, Any]] = {}
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    for record in map(json.loads, lines):
        of_model = last.setdefault(record["model_type"], {})
        of_model.pop("end", None)
        of_model.update(record["outcomes"])
    return last


def kind_of(outcomes: Mapping[str, Any]) -> str:
    """The word for a whole row."""
    words = [outcome["word"] for outcome in outcomes.values()]
    for word in ("wrong", "failed"):
        if word in words:
            return word
    if outcomes["one device"]["word"] != "equal":
        return "rejected"
    if not outcomes.keys() >= set(COLUMNS):
        return "unfinished"
    return "partly" if "rejected" in words else "equal"


def _lines(last: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[str]:
    from transformers import __version__ as version

    kinds = {name: kind_of(outcomes) for name, outcomes in last.items()}
    counts = dict.fromkeys(("equal", "partly", "unfinished", "rejected", "wrong", "failed"), 0)
    for kind in kinds.values():
        counts[kind] += 1
    yield HEAD.format(version=version, total=len(names), **counts)
    yield f"| | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for word in OUTCOMES:
        counted = Counter(
            column
            for outcomes in last.values()
            for column in COLUMNS
            if outcomes.get(column, {}).get("word") == word
        )
        if counted:
            name = MARKS["none"] if word == "none" else word
            yield f"| {name} | {' | '.join(str(counted[column]) for column in COLUMNS)} |"
    yield ""
    yield f"| `--model.name` | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for name, outcomes in last.items():
        if kinds[name] in ("equal", "partly", "unfinished"):
            cells = (_cell(outcomes.get(column)) for column in COLUMNS)
            yield f"| hf:{name} | {' | '.join(cells)} |"
    for title, of in SECTIONS.items():
        names = [name for name, kind in kinds.items() if kind in of]
        if names:
            yield ""
            yield f"## {title}"
            yield ""
            yield from _reasons(last, names.__contains__)


def _cell(outcome: Mapping[str, str] | None) -> str:
    if outcome is None:
        return ""
    return MARKS.get(outcome["word"], outcome["text"])


def _reasons(last: Mapping[str, Mapping[str, Any]], chosen: Any) -> Iterator[str]:
    """Each line, and the names that it rejects; what names parts of a model is merged."""
    found: dict[str, dict[str, None]] = {}
    for name, outcomes in last.items():
        if not chosen(name):
            continue
        for column, outcome in outcomes.items():
            if outcome["word"] not in ("equal", "none"):
                reason = outcome["text"].partition(" Fix: ")[0].removeprefix("model.name: ")
                key = f"{column}: {' '.join(reason.split())}".replace(f"hf:{name}", "hf:NAME")
                found.setdefault(key.replace("|", "/"), {})[name] = None
    for reason, names in found.items():
        yield from textwrap.wrap(", ".join(names), 110, initial_indent="- ", subsequent_indent="  ")
        yield from textwrap.wrap(reason, 110, initial_indent="    - ", subsequent_indent="      ")
