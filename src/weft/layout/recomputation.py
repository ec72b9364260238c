"""Which layers recompute or offload activations: a policy for each layer of each stage, and its text. Pure functions.

full                       every layer
full:12                    the first 12 layers of every stage; the others save all
full:2+selective           the first 2 layers of every stage, the others selectively
full:2+selective/none      so in the first stage; nothing in the second
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal, get_args

from weft.errors import Fault, counted

KEY = "parallel.recompute"
RecomputeMode = Literal["none", "selective", "full", "offload"]
MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
AUTO = "auto"
"""A choice by the memory of the devices, made at the start."""
CHOSEN = f"{AUTO}:"
"""Begins the record of such a choice."""
NO_LAYERS = ("embed", "head", "loss")
"""Blocks whose results are used at once, or that save next to nothing: they never recompute."""
NEED = f"{', '.join(MODES)}, of the first layers of a stage alone as full:12, or {AUTO}"
LAYERS = re.compile(r"([a-z]+)(?::([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class FirstLayers:
    """What the next layers of a stage do; `count`: how many, None: all that are left."""

    mode: RecomputeMode
    count: int | None = None

    @property
    def text(self) -> str:
        """`full:12`."""
        return self.mode if self.count is None else f"{self.mode}:{self.count}"


@dataclass(frozen=True)
class RecomputePolicy:
    """What each layer of each stage recomputes.

    Attributes:
        stages: one for all stages, or one a stage. Layers that nothing is said of save everything.
    """

    stages: tuple[tuple[FirstLayers, ...], ...]

    @staticmethod
    def of_modes(modes: Sequence[Sequence[RecomputeMode]]) -> RecomputePolicy:
        """The policy with these modes of the layers of every stage."""
        stages = []
        for of_stage in modes:
            runs = [FirstLayers(mode, len(list(same))) for mode, same in groupby(of_stage)]
            runs = runs or [FirstLayers("none")]
            stages.append((*runs[:-1], FirstLayers(runs[-1].mode)))
        return RecomputePolicy(tuple(stages if len(set(stages)) > 1 else stages[:1]))

    @property
    def text(self) -> str:
        """As `read_policy` reads it."""
        return "/".join("+".join(run.text for run in stage) for stage in self.stages)

    @property
    def modes(self) -> frozenset[RecomputeMode]:
        """Modes that some layers may have."""
        used: set[RecomputeMode] = set()
        for stage in self.stages:
            used.update(run.mode for run in stage)
            if stage[-1].count is not None:
                used.add("none")
        return frozenset(used)

    @property
    def uniform(self) -> RecomputeMode | None:
        """The mode of all layers; None where they differ."""
        modes = self.modes
        return next(iter(modes)) if len(modes) == 1 else None

    def of_layers(self, stage: int, num_layers: int) -> tuple[RecomputeMode, ...]:
        """The modes of the layers of a stage, in order."""
        runs = self.stages[stage if len(self.stages) > 1 else 0]
        modes: list[RecomputeMode] = []
        for run in runs:
            count = num_layers if run.count is None else run.count
            modes.extend([run.mode] * count)
        modes.extend(["none"] * num_layers)
        return tuple(modes[:num_layers])

    def of_blocks(self, stage: int, blocks: Sequence[str]) -> dict[str, RecomputeMode]:
        """The modes of the blocks of a stage, by name."""
        layers = layers_of(blocks)
        modes = dict.fromkeys(blocks, MODES[0])
        modes.update(zip(layers, self.of_layers(stage, len(layers)), strict=True))
        return modes

    def faults(self, num_stages: int) -> Iterator[Fault]:
        """A policy for each stage names as many as there are."""
        if len(self.stages) not in (1, num_stages):
            stages = counted(num_stages, "stage")
            need = f"one policy for all, or {num_stages} between slashes"
            what = f"the layout has {stages}"
            fix = f"--{KEY} full or --{KEY} {AUTO}"
            yield Fault(KEY, what, got=f"{len(self.stages)} policies", need=need, fix=fix)


def layers_of(blocks: Sequence[str]) -> tuple[str, ...]:
    """The blocks of a stage that a policy counts."""
    return tuple(name for name in blocks if name not in NO_LAYERS)


@cache
def read_policy(text: str) -> RecomputePolicy:
    """The policy that `full:2+selective/none` names.

    Raises:
        ValueError: the text is no policy.
    """
    stages = []
    for of_stage in text.split("/"):
        runs = [_read_layers(word) for word in of_stage.split("+")]
        if any(run.count is None for run in runs[:-1]):
            raise ValueError(f"{of_stage!r}: layers follow after all that are left")
        stages.append(tuple(runs))
    return RecomputePolicy(tuple(stages))


def _read_layers(word: str) -> FirstLayers:
    found = LAYERS.fullmatch(word)
    mode = next((mode for mode in MODES if found is not None and found[1] == mode), None)
    if found is None or mode is None:
        raise ValueError(f"{word!r} is no mode of layers")
    return FirstLayers(mode, int(found[2]) if found[2] else None)


def read_key(text: str) -> str:
    """A value of `parallel.recompute`, checked.

    Raises:
        ValueError: it is none.
    """
    if text != AUTO:
        read_policy(text.removeprefix(CHOSEN))
    return text


def is_chosen_by_memory(text: str) -> bool:
    """Whether a value of `parallel.recompute` asks for a choice, or records one."""
    return text == AUTO or text.startswith(CHOSEN)


def known_policy(text: str, num_stages: int) -> RecomputePolicy | None:
    """The policy of a value of `parallel.recompute`; None: it is to be chosen, as nothing was
    recorded, or for another number of stages.
    """
    if text == AUTO:
        return None
    policy = read_policy(text.removeprefix(CHOSEN))
    if text.startswith(CHOSEN) and any(policy.faults(num_stages)):
        return None
    return policy
