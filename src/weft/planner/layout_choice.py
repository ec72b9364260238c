"""A layout as the search chooses it: the mesh, the searched keys of a run, and the text that names both. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.schedule.catalog import SCHEDULES

SEARCHED = {
    "mesh",
    "batch.micro_size",
    "parallel.zero",
    "parallel.recompute",
    "parallel.sequence",
    "parallel.context",
    "pipeline.schedule",
    "pipeline.chunks",
    "pipeline.split",
}
"""Keys that a search chooses, unless they are given."""
DEFAULT_SCHEDULE = "1f1b"
DEFAULT_CONTEXT = "ring"
SPLIT = "split-"
"""Begins the word of a layout that names the layers of every stage: `split-3-4-4-3`."""


@dataclass(frozen=True)
class Layout:
    """A layout: the mesh and what else a search chooses.

    Attributes:
        degrees: of every axis with more than one rank, outermost first.
        sequence: sequence parallelism.
    """

    degrees: tuple[tuple[str, int], ...]
    zero: int = 0
    recompute: str = "none"
    sequence: bool = False
    context: str = DEFAULT_CONTEXT
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 1
    micro_size: int = 1
    split: tuple[int, ...] = ()

    @property
    def mesh(self) -> str:
        """The text of its mesh."""
        return " ".join(f"{axis}{degree}" for axis, degree in self.degrees)

    def degree(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return dict(self.degrees).get(axis, 1)

    @property
    def values(self) -> dict[str, Any]:
        """Its keys of the run config."""
        return {
            "mesh": self.mesh,
            "batch.micro_size": self.micro_size,
            "parallel.zero": self.zero,
            "parallel.recompute": self.recompute,
            "parallel.sequence": self.sequence,
            "parallel.context": self.context,
            "pipeline.schedule": self.schedule,
            "pipeline.chunks": self.chunks,
            "pipeline.split": self.split,
        }

    def applied_to(self, run: Run) -> Run:
        """The run with this layout."""
        return run.with_values(self.values)

    @property
    def text(self) -> str:
        """`pp4 dp8 tp8 zero1 sequence 1f1b micro1`: what differs from the defaults."""
        words = [self.mesh or "1 rank"]
        if self.zero:
            words.append(f"zero{self.zero}")
        if self.sequence:
            words.append("sequence")
        if self.recompute != "none":
            words.append(f"recompute-{self.recompute}")
        if self.degree(CP) > 1:
            words.append(self.context)
        if self.degree(PP) > 1:
            chunks = f"x{self.chunks}" if self.chunks > 1 else ""
            words.append(f"{self.schedule}{chunks}")
        if self.split:
            layers = "-".join(map(str, self.split))
            words.append(f"{SPLIT}{layers}")
        words.append(f"micro{self.micro_size}")
        return " ".join(words)

    @property
    def sharding(self) -> Layout:
        """The layout on one pipeline and data rank: what the costs of its blocks depend on."""
        degrees = [(axis, self.degree(axis)) for axis in (EP, CP, TP)]
        inner = tuple(item for item in degrees if item[1] > 1)
        context = self.context if self.degree(CP) > 1 else DEFAULT_CONTEXT
        return Layout(
            inner,
            recompute=self.recompute,
            sequence=self.sequence,
            context=context,
            micro_size=self.micro_size,
        )

    @property
    def strides(self) -> tuple[tuple[str, int], ...]:
        """Distance of neighbouring ranks along the axes of sequences and experts."""
        found = []
        stride = 1
        for axis, degree in reversed(self.degrees):
            if axis in (EP, CP):
                found.append((axis, stride))
            stride *= degree
        return tuple(sorted(found))

    @property
    def data_group(self) -> tuple[int, ...]:
        """The first ranks of the world that share the gradients of dense parameters."""
        return _data_group(self.degrees)

    @property
    def num_data(self) -> int:
        """Number of ranks that share the gradients of dense parameters."""
        return math.prod(degree for axis, degree in self.degrees if axis in (DP, EP, CP))

    def num_micro(self, global_size: int) -> int:
        """Micro-batches of a step of so many sequences."""
        data_ranks = self.degree(DP) * self.degree(EP)
        return global_size // (data_ranks * self.micro_size)

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts layouts of equal cost: fewer options first."""
        return (
            len(self.degrees),
            self.zero,
            self.recompute,
            self.sequence,
            self.chunks,
            self.schedule != DEFAULT_SCHEDULE,
            self.text,
        )


@cache
def _data_group(degrees: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """`Layout.data_group` of a mesh; thousands of layouts have the same one."""
    ranks = [0]
    stride = 1
    for axis, degree in reversed(degrees):
        if axis in (DP, EP, CP):
            outer = range(0, degree * stride, stride)
            ranks = [rank + offset for offset in outer for rank in ranks]
        stride *= degree
    return tuple(ranks)


def read_layout(text: str, run: Run) -> Layout:
    """The layout that `tp8 pp4 dp8 zero1 recompute-full` names; what it leaves out is the run's.

    Raises:
        ConfigError: a word is no part of a layout.
    """
    parallel = run.parallel
    layout = Layout(
        degrees=(),
        zero=parallel.zero,
        recompute=parallel.recompute,
        sequence=parallel.sequence,
        context=parallel.context,
        schedule=run.pipeline.schedule,
        chunks=run.pipeline.chunks,
        micro_size=run.batch.micro_size,
    )
    axes: list[str] = []
    for word in text.replace(",", " ").split():
        changed = _with_word(layout, word)
        if changed is None:
            axes.append(word)
        else:
            layout = changed
    mesh = Mesh.parse(" ".join(axes))
    return replace(layout, degrees=tuple((axis, n) for axis, n in mesh.axes if n > 1))


def _with_word(layout: Layout, word: str) -> Layout | None:
    """The layout with what a word says; None if it is an axis of the mesh."""
    name, _, value = word.partition("-")
    if word in ("zero0", "zero1", "zero2", "zero3"):
        return replace(layout, zero=int(word[-1]))
    if word == "sequence":
        return replace(layout, sequence=True)
    if name == "recompute" and value in ("none", "selective", "full"):
        return replace(layout, recompute=value)
    if word in ("ring", "allgather", "ulysses"):
        return replace(layout, context=word)
    if word.startswith("micro") and word[5:].isdecimal() and int(word[5:]):
        return replace(layout, micro_size=int(word[5:]))
    counts = value.split("-")
    if name == "split" and all(part.isdecimal() for part in counts):
        return replace(layout, split=tuple(map(int, counts)))
    schedule, _, chunks = word.rpartition("x")
    if word in SCHEDULES:
        return replace(layout, schedule=word, chunks=SCHEDULES[word].default_chunks)
    if schedule in SCHEDULES and chunks.isdecimal() and int(chunks):
        return replace(layout, schedule=schedule, chunks=int(chunks))
    return None
