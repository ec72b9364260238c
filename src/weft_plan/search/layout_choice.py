"""A layout as the search chooses it: the mesh, the searched keys of a run, and the text that names both. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from weft.config.layout_keys import LayoutKeys
from weft.core.mesh import Mesh
from weft.core.sequence import DEFAULT_CONTEXT
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.fsdp import AXIS as FSDP
from weft.parallel.pp import AXIS as PP
from weft.parallel.site import AXIS as SITE
from weft.parallel.tp import AXIS as TP
from weft.schedule.catalog import DEFAULT_SCHEDULE, SCHEDULES

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
        """The layout as values of config keys."""
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
            words.append(self._schedule_word)
        if self.split:
            layers = "-".join(str(count) for count in self.split)
            words.append(f"{SPLIT}{layers}")
        words.append(f"micro{self.micro_size}")
        return " ".join(words)

    @property
    def _schedule_word(self) -> str:
        if self.chunks == 1:
            return self.schedule
        return f"{self.schedule}x{self.chunks}"

    @property
    def sharding(self) -> Layout:
        """The layout on one pipeline and data rank: what the costs of its blocks depend on."""
        has_context = self.degree(CP) > 1
        return Layout(
            self._wide(EP, CP, TP),
            recompute=self.recompute,
            sequence=self.sequence,
            context=self.context if has_context else DEFAULT_CONTEXT,
            micro_size=self.micro_size,
        )

    def _wide(self, *axes: str) -> tuple[tuple[str, int], ...]:
        """Of these axes, those with more than one rank, with their degrees."""
        found = []
        for axis in axes:
            degree = self.degree(axis)
            if degree > 1:
                found.append((axis, degree))
        return tuple(found)

    @property
    def block_degrees(self) -> tuple[tuple[str, int], ...]:
        """The axes that shard the parameters of a block, with their degrees."""
        return self._wide(EP, TP)

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
    def has_copies(self) -> bool:
        """Whether states are sharded over an axis of their own, and copies along the data axis."""
        return self.degree(FSDP) > 1

    @property
    def _sharding_axis(self) -> str:
        """The data axis over which states are sharded."""
        return FSDP if self.has_copies else DP

    @property
    def data_group(self) -> tuple[int, ...]:
        """The first ranks of the world that share the states of dense parameters."""
        return _data_group(self.degrees, (self._sharding_axis, EP, CP))

    @property
    def expert_group(self) -> tuple[int, ...]:
        """The first ranks of the world that share the states of the experts of a rank."""
        return _data_group(self.degrees, (self._sharding_axis, CP))

    @property
    def copies_group(self) -> tuple[int, ...]:
        """The first ranks of the world that have copies of the same shards; one without copies."""
        return _data_group(self.degrees, (DP,) if self.has_copies else ())

    @property
    def num_data(self) -> int:
        """Number of ranks that share the states of dense parameters."""
        return len(self.data_group)

    def num_micro(self, global_size: int) -> int:
        """Micro-batches of a step of so many sequences."""
        data_ranks = math.prod(self.degree(axis) for axis in (SITE, DP, FSDP, EP))
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
def _data_group(degrees: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks along axes of a mesh, from rank 0 on; thousands of layouts have the same ones."""
    ranks = [0]
    stride = 1
    for axis, degree in reversed(degrees):
        if axis in axes:
            outer = range(0, degree * stride, stride)
            ranks = [rank + offset for offset in outer for rank in ranks]
        stride *= degree
    return tuple(ranks)


def read_layout(text: str, keys: LayoutKeys) -> Layout:
    """The layout that `tp8 pp4 dp8 zero1 recompute-full` names; what it leaves out is that of the keys.

    Raises:
        ConfigError: a word is no part of a layout.
    """
    parallel = keys.parallel
    layout = Layout(
        degrees=(),
        zero=parallel.zero,
        recompute=parallel.recompute,
        sequence=parallel.sequence,
        context=parallel.context,
        schedule=keys.pipeline.schedule,
        chunks=keys.pipeline.chunks,
        micro_size=keys.batch.micro_size,
    )
    axes: list[str] = []
    for word in text.replace(",", " ").split():
        values = _values_of_word(word)
        if values is None:
            axes.append(word)
        else:
            layout = replace(layout, **values)
    mesh = Mesh.parse(" ".join(axes))
    wide = [(axis, degree) for axis, degree in mesh.axes if degree > 1]
    return replace(layout, degrees=tuple(wide))


WORDS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "sequence": {"sequence": True},
    "recompute-none": {"recompute": "none"},
    "recompute-selective": {"recompute": "selective"},
    "recompute-full": {"recompute": "full"},
    "ring": {"context": "ring"},
    "allgather": {"context": "allgather"},
    "ulysses": {"context": "ulysses"},
}


MICRO = "micro"


def _values_of_word(word: str) -> dict[str, Any] | None:
    """The fields of a layout that a word names; None if it is an axis of the mesh."""
    if word in WORDS:
        return WORDS[word]
    micro_size = word.removeprefix(MICRO)
    if micro_size != word and _is_positive(micro_size):
        return {"micro_size": int(micro_size)}
    layers = word.removeprefix(SPLIT).split("-")
    if word.startswith(SPLIT) and all(count.isdecimal() for count in layers):
        return {"split": tuple(int(count) for count in layers)}
    if word in SCHEDULES:
        return {"schedule": word, "chunks": SCHEDULES[word].default_chunks}
    schedule, _, chunks = word.rpartition("x")
    if schedule in SCHEDULES and _is_positive(chunks):
        return {"schedule": schedule, "chunks": int(chunks)}
    return None


def _is_positive(text: str) -> bool:
    """Whether a text is a decimal number of at least 1."""
    return text.isdecimal() and int(text) > 0
