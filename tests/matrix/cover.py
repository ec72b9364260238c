"""Covering rows: few layouts that contain every feasible combination of any three choices at least once.

The full product of the choices below has some hundred million layouts. Faults of composed
parallelism need two dimensions, seldom three, to meet; so every three choices that can meet do meet
in some row of covering_rows.txt (a covering array of strength 3). The first rows of it hold every
two.

    PYTHONPATH=. .venv/bin/python -m tests.matrix.cover      finds the rows anew and writes the list (a minute)
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tests.matrix.layouts import CLIP, SEQ_LEN, Case, fits
from weft.core.dimension import exact_axes
from weft.core.mesh import Mesh
from weft.core.sequence import length_unit

LIST = Path(__file__).with_name("covering_rows.txt")
SEED, TRIES, PATIENCE = 2026, 24, 1600
MOST_RANKS, MOST_SEQUENCES = 32, 48

CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt2", "llama3", "llama3 grouped", "qwen3", "qwen3-moe", "deepseek"),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3),
    "fsdp": (1, 2, 3),
    "ep": (1, 2, 4),
    "cp": (1, 2, 3, 4),
    "tp": (1, 2, 4),
    "nesting": ("pp dp fsdp ep cp tp", "tp cp ep fsdp dp pp", "dp tp pp cp fsdp ep"),
    "schedule": (
        "gpipe 1", "1f1b 1", "interleaved 2", "interleaved 3",
        "zero_bubble 1", "zero_bubble_h2 1", "zbv 2", "dual_pipe_v 2",
    ),
    "microbatches": (1, 2, 3, 4, 6),
    "micro_size": (1, 2),
    "sequence": (False, True),
    "context": ("ring", "allgather", "ulysses"),
    "documents": (False, True),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "clip": (CLIP, 0.0),
    "bucket_bytes": (512, 4096, 2**20),
}  # fmt: skip
NAMES = tuple(CHOICES)
EXPERT_MODELS = ("qwen3-moe", "deepseek")
Row = Mapping[str, Any]
Part = tuple[tuple[str, Any], ...]
"""Some choices of a row, in the order of `CHOICES`."""


def case_of(row: Row) -> Case:
    """The layout that a row stands for: layers for every stage, the shortest sequences that its
    ranks divide.
    """
    axes = [axis for axis in row["nesting"].split() if row[axis] > 1]
    words = " ".join(f"{axis}{row[axis]}" for axis in axes)
    mesh = Mesh.parse(words)
    schedule, chunks = row["schedule"].split()
    family = row["model"].partition(" ")[0]
    grouped = "grouped" in row["model"]
    plain = Case(words, family=family, grouped=grouped)
    stages = row["pp"] * int(chunks)
    unit = length_unit(mesh, sequence_parallel=row["sequence"])
    return Case(
        words,
        family=family,
        grouped=grouped,
        schedule=schedule,
        chunks=int(chunks),
        seq_len=-(-SEQ_LEN // unit) * unit,
        layers=stages if stages > plain.config.layers else 0,  # type: ignore[attr-defined]
        **{name: row[name] for name in NAMES[NAMES.index("microbatches") :]},
    )


def acts(row: Row) -> bool:
    """Whether the row is small enough, and no choice of it stands for nothing: one row, one layout."""
    nesting = row["nesting"].split()
    axes = [axis for axis in nesting if row[axis] > 1]
    mesh = Mesh(tuple((axis, row[axis]) for axis in axes))
    data_ranks = row["dp"] * row["fsdp"] * row["ep"]
    num_sequences = data_ranks * row["microbatches"] * row["micro_size"]
    is_small = mesh.size <= MOST_RANKS and num_sequences <= MOST_SEQUENCES
    conditions = (
        is_small,
        row["tp"] > 1 or not row["sequence"],
        row["cp"] > 1 or row["context"] == "ring",
        len(axes) > 1 or row["nesting"] == CHOICES["nesting"][0],
        row["ep"] == 1 or row["model"] in EXPERT_MODELS,
    )
    return all(conditions)


def is_valid(row: Row) -> bool:
    """Whether config validation accepts the row's layout."""
    return acts(row) and _fits(case_of(row))


@cache
def _fits(case: Case) -> bool:
    return fits(case)


def parts(row: Row, strength: int) -> Iterator[Part]:
    """Every combination of `strength` choices of a row."""
    return itertools.combinations(((name, row[name]) for name in NAMES), strength)


def every_part(strength: int) -> Iterator[Part]:
    """Every combination of `strength` choices of different dimensions."""
    for names in itertools.combinations(NAMES, strength):
        for values in itertools.product(*(CHOICES[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def complete(part: Part, dice: random.Random, tries: int) -> Iterator[Row]:
    """Valid rows that contain these choices, the others drawn; small meshes more often than large
    ones.
    """
    for _ in range(tries):
        row = {name: dice.choice(CHOICES[name]) for name in NAMES}
        for axis in exact_axes():
            if dice.random() < 0.4:
                row[axis] = 1
        if row["tp"] == 1:
            row["sequence"] = False
        if row["cp"] == 1:
            row["context"] = "ring"
        if row["model"] not in EXPERT_MODELS:
            row["ep"] = 1
        if sum(row[axis] > 1 for axis in exact_axes()) <= 1:
            row["nesting"] = CHOICES["nesting"][0]
        row.update(part)
        if is_valid(row):
            yield row


def cost(row: Row) -> float:
    """What a row costs to run, roughly: ranks, and the layers and sequences that they share."""
    ranks = math.prod(row[axis] for axis in exact_axes())
    weight = 2 if row["model"] in EXPERT_MODELS else 1
    return 8 + ranks * (row["microbatches"] + 3) * weight / 2


def find_rows(strength: int, dice: random.Random, known: tuple[Row, ...] = ()) -> Iterator[Row]:
    """Rows until every feasible combination of `strength` choices is held by `known` or by them;
    greedy.
    """
    held = {part for row in known for part in parts(row, strength)}
    left = dict.fromkeys(part for part in every_part(strength) if part not in held)
    while left:
        if len(left) < 4000:
            wanted = dice.choice(list(left))
        else:
            wanted = next(iter(left))
        rows = list(itertools.islice(complete(wanted, dice, PATIENCE), TRIES))
        if not rows:
            del left[wanted]  # infeasible: no valid layout contains it
            continue

        def new_per_cost(row: Row) -> float:
            return _num_new(row, strength, left) / cost(row)

        best = max(rows, key=new_per_cost)
        for part in parts(best, strength):
            left.pop(part, None)
        yield best


def _num_new(row: Row, strength: int, left: Mapping[Part, None]) -> int:
    """How many combinations that are still missing the row contains."""
    return sum(part in left for part in parts(row, strength))


def write_rows(path: Path) -> int:
    """Find the rows and write them, one JSON object a line; those that hold all pairs come first."""
    dice = random.Random(SEED)
    pairs = tuple(find_rows(2, dice))
    rows = (*pairs, *find_rows(3, dice, pairs))
    default = asdict(Case(""))
    lines = []
    for row in rows:
        fields = asdict(case_of(row))
        changed = {name: value for name, value in fields.items() if value != default[name]}
        lines.append(json.dumps(changed) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


@cache
def read_rows(path: Path) -> tuple[Case, ...]:
    """The layouts of a list that `write_rows` wrote."""
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = {"mesh": "", **json.loads(line)}
        cases.append(Case(**fields))
    return tuple(cases)


if __name__ == "__main__":
    print(f"{write_rows(LIST)} rows in {LIST.name}")  # noqa: T201 - a command
