"""The sweep of layouts that are compared with one device: a grid over four axes, covering rows, every family."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from tests.matrix.cover import LIST, read_rows
from tests.matrix.layouts import SEQ_LEN, Case, fits
from tests.small_models import TEXT_FAMILIES
from weft.core.mesh import Mesh
from weft.core.sequence import Context
from weft.schedule.catalog import SCHEDULES

CONTEXTS: tuple[Context, ...] = ("ring", "allgather", "ulysses")
GRID_FAMILIES = ("gpt2", "llama3")
WHOLE = (
    Case("pp2 dp2 ep2 cp2 tp2", family="deepseek", sequence=True, microbatches=2),
    Case(
        "pp2 dp2 ep2 cp2 tp2",
        family="qwen3-moe",
        microbatches=2,
        zero=3,
        schedule="zbv",
        chunks=2,
        layers=4,
    ),
    Case(
        "tp2 cp2 ep2 dp2 pp2",
        family="qwen3-moe",
        microbatches=2,
        zero=2,
        context="ulysses",
        schedule="zero_bubble",
    ),
)
"""All five dimensions at once."""

EVERY_FAMILY = (
    Case("tp2"),
    Case("tp2", sequence=True),
    Case("cp2"),
    Case("cp2", context="allgather", documents=True),
    Case("cp2", context="ulysses"),
    Case("pp2"),
    Case("pp2", schedule="zbv", chunks=2),
    Case("dp2", zero=1, recompute="selective"),
    Case("dp2", zero=2, recompute="full"),
    Case("dp2", zero=3),
    Case("cp2 tp2", sequence=True, documents=True),
    Case("pp2 dp2 tp2", sequence=True, zero=3),
)
"""Layouts that each discovered family is held to."""


def family_cases() -> Iterator[Case]:
    """Every discovered family under each of these layouts that it supports."""
    for family, layout in itertools.product(TEXT_FAMILIES, EVERY_FAMILY):
        case = replace(layout, family=family)
        if fits(case):
            yield case


BESIDE = (
    Case(""),
    Case("tp2", sequence=True),
    Case("pp2 dp2", zero=1),
    Case("dp2", zero=3),
    Case("cp2 tp2"),
)
"""Layouts that each discovered dimension is added to."""


def dimension_cases(axis: str) -> Iterator[Case]:
    """Layouts with two ranks along `axis`, each of a small dense family, else of the first that
    supports it.
    """
    families = (*GRID_FAMILIES, *TEXT_FAMILIES)
    for layout in BESIDE:
        mesh = f"{axis}2 {layout.mesh}".strip()
        if layout.grid.degree(axis) == 1:
            cases = (replace(layout, mesh=mesh, family=family) for family in families)
            yield from itertools.islice(filter(fits, cases), 1)


def all_meshes(most_ranks: int, axes: Sequence[str]) -> Iterator[Mesh]:
    """Every mesh of up to `most_ranks` ranks over `axes` in the given nesting, degree-1 axes left
    out.
    """
    for degrees in itertools.product(range(1, most_ranks + 1), repeat=len(axes)):
        if math.prod(degrees) <= most_ranks:
            named = zip(axes, degrees, strict=True)
            longer = [(name, degree) for name, degree in named if degree > 1]
            yield Mesh(tuple(longer))


MOST_RANKS = 16
"""Of the grid's meshes."""


@cache
def candidates() -> tuple[Case, ...]:
    """Every mesh of up to `MOST_RANKS` ranks over pp, dp, cp and tp, with and without sequence
    parallelism, by every schedule; config validation may reject some.

    The ways across cp take turns, and so do sequences of one document and of several.
    """
    found: list[Case] = []
    meshes = all_meshes(MOST_RANKS, ("pp", "dp", "cp", "tp"))
    turns = itertools.count()
    schedules = [(name, schedule.default_chunks) for name, schedule in SCHEDULES.items()]
    for mesh, family, (schedule, chunks), sequence in itertools.product(
        meshes, GRID_FAMILIES, schedules, (False, True)
    ):
        pp = mesh.degree("pp")
        cp = mesh.degree("cp")
        turn = next(turns)
        case = Case(
            mesh.text,
            family=family,
            schedule=schedule,
            chunks=chunks,
            sequence=sequence,
            microbatches=pp * (2 if pp < 3 else 1) if schedule == "interleaved" else 3,
            context=CONTEXTS[turn % 3] if cp > 1 else "ring",
            documents=cp > 1 and turn // 2 % 2 == 0,
            seq_len=12 if cp == 3 else SEQ_LEN,
        )
        grouped = replace(case, grouped=True)
        found.extend(each for each in (case, grouped) if acts(each))
    return tuple(found)


def acts(case: Case) -> bool:
    """Whether every choice of the case makes a difference, so that the grid holds no layout twice."""
    pp = case.grid.degree("pp")
    tp = case.grid.degree("tp")
    return (
        (not case.grouped or case.family == "llama3")
        and (not case.sequence or tp > 1)
        and (pp > 1 or case.schedule in ("gpipe", "1f1b", "zero_bubble"))
    )


@cache
def grid() -> tuple[Case, ...]:
    """The layouts among the candidates that config validation accepts."""
    return tuple(case for case in candidates() if fits(case))


@cache
def every_case() -> tuple[Case, ...]:
    """The whole sweep, each layout once."""
    cases = [*WHOLE, *read_rows(LIST), *grid(), *family_cases()]
    return tuple(dict.fromkeys(cases))


def sample(number: int, *, seed: int, most_ranks: int = 32) -> tuple[Case, ...]:
    """A seeded sample: half of the covering rows, half of the grid, of meshes of up to
    `most_ranks`.
    """
    dice = random.Random(seed)
    chosen: dict[Case, None] = {}
    for cases in (read_rows(LIST), candidates()):
        small = [case for case in cases if case.grid.size <= most_ranks]
        dice.shuffle(small)
        fitting = (case for case in small if fits(case))  # few are checked, which costs
        chosen.update(dict.fromkeys(itertools.islice(fitting, number // 2)))
    return tuple(chosen)
