"""States of the parameters of one group in 8 bits: their values for an update, and codes of what the update has made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.zero.param_entries import ParamEntries
from weft.parallel.zero.state_codes import ABSMAX, SIGNED, UNSIGNED, StateBlocks, join_cut_blocks
from weft.train.optimizers.contract import Optimizer, State

MOST_ENTRIES = 2**24
"""Entries of a rank whose states have their values at once."""


@dataclass(frozen=True)
class StatesIn8Bits:
    """Codes of the states of some parameters, of a rule that changes an entry by its own states.

    An update is made of values, and the parameter is changed by the new ones before they are
    rounded; see Note [Codes of states] in `state_codes`.

    Attributes:
        entries: of each parameter, the same names on all ranks that share one.
        length: entries of a block.
    """

    rule: Optimizer
    entries: Mapping[str, ParamEntries]
    length: int
    comm: Comm | None

    @cached_property
    def blocks(self) -> Mapping[str, StateBlocks]:
        """The blocks of each parameter."""
        return {name: StateBlocks.of(each, self.length) for name, each in self.entries.items()}

    def keys(self, name: str) -> tuple[str, ...]:
        """The states of a parameter that have codes."""
        axes = self.rule.state_axes(len(self.entries[name].shape))
        return tuple(key for key, of_key in axes.items() if of_key == "entries")

    def state_keys(self, name: str) -> frozenset[str]:
        """All keys of the state of a parameter."""
        largest = (key + ABSMAX for key in self.keys(name))
        return frozenset((*self.rule.state_axes(len(self.entries[name].shape)), *largest))

    def fresh(self, name: str, param: Tensor) -> State:
        """State before the first step: codes of zeros."""
        state = self.rule.fresh_state(param, self.entries[name].shape)
        for key in self.keys(name):
            dtype = UNSIGNED if key in self.rule.nonnegative else SIGNED
            state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            size = self.blocks[name].num_blocks
            state[key + ABSMAX] = torch.zeros(size, dtype=torch.float32, device=param.device)
        return state

    def parts(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """The names in parts, whose values are held at once: spread over the same axes, and the same
        parts on every rank, for each has a collective.
        """
        by_axes: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            by_axes.setdefault(self.entries[name].axes, []).append(name)
        for members in by_axes.values():
            part: list[str] = []
            size = 0
            for name in members:
                entries = self.entries[name]
                # An average, and not the entries of this rank: all ranks have to divide the names alike.
                own = math.prod(entries.shape) // entries.num_holders
                if part and size + own > MOST_ENTRIES:
                    yield tuple(part)
                    part, size = [], 0
                part.append(name)
                size += own
            yield tuple(part)

    def values(self, name: str, state: State, *, dtype: torch.dtype) -> State:
        """The state of a parameter with values in place of codes."""
        found = {key: tensor for key, tensor in state.items() if not key.endswith(ABSMAX)}
        blocks = self.blocks[name]
        for key in self.keys(name):
            found[key] = blocks.decode(state[key], state[key + ABSMAX], dtype=dtype)
        return found

    def store(
        self, part: Sequence[str], states: Mapping[str, State], values: Mapping[str, State]
    ) -> None:
        """Write codes of the values into the states; a collective over the axes of the part if any
        block is cut, so every rank must call it.

        Args:
            states, values: of those parameters that this rank holds entries of.
        """
        largest: dict[tuple[str, str], Tensor] = {}
        for name in values:
            for key in self.keys(name):
                largest[name, key] = self.blocks[name].absmax(values[name][key])
        keys = [(name, key) for name in part for key in self.keys(name)]
        join_cut_blocks(
            [self.blocks[name] for name, _ in keys],
            [largest.get(key) for key in keys],
            comm=self.comm,
            axes=self.entries[part[0]].axes,
        )
        for (name, key), absmax in largest.items():
            state = states[name]
            state[key + ABSMAX].copy_(absmax)
            self.blocks[name].encode(values[name][key], absmax, state[key])
