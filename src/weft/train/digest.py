"""Digests of the training state: replicas must agree bit by bit, and nothing may change between two updates.

    step n     update, digests, comparison of replicas (one all-gather of a few integers), then the save
    step n+1   forward, backward, digests again: each rank compares with its own of step n; the result
               travels with the numbers that every step gathers

The first comparison finds a replica that differs, the second a bit that flipped in memory, also in
sharded state that no other rank holds. Parameters, optimizer state, buffers, and the gathered or
cast copies that modules compute with are covered.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.state import TrainState, param_states
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text
from weft.core.dimension import local_update_axes, pipeline_axis
from weft.core.mesh import Mesh

WORD_BYTES = 8
ROW = 2**16
"""Words that are weighted with the same table of odd numbers."""
CPU_SLAB = 2**16
DEVICE_SLAB = 2**24
"""Words hashed by one call: what a CPU's cache holds; enough to fill a GPU."""
ODD = 0x9E3779B97F4A7C15 - 2**64
SEED = 20
MAX_TENSORS_SHOWN = 3


@dataclass(frozen=True)
class ReplicatedTensor:
    """A tensor of this rank's training state.

    Attributes:
        name: `model/layer0.attn.q.weight`, `optim/exp_avg/...`, `compute/...`, `buffer/...`.
        axes: mesh axes along which all ranks hold the same values.
    """

    name: str
    axes: tuple[str, ...]
    tensor: Tensor


@dataclass(frozen=True)
class StateFault:
    """Tensors whose values are wrong on one rank, or differ between ranks.

    Attributes:
        ranks: those that hold wrong values; of two replicas that differ, both.
        tensors: names, in the order of the state.
        text: for the reader.
    """

    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    text: str


def digest_weights(device: torch.device) -> Tensor:
    """Odd numbers that look random, int64 [ROW]."""
    words = torch.arange(SEED, SEED + ROW, dtype=torch.int64, device=device)
    for shift in (30, 27, 31):  # the rounds of SplitMix64, with a signed shift
        shifted = words >> shift
        words = (words ^ shifted) * ODD
    return words | 1


def digest(tensor: Tensor, weights: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, int64 scalar on its device; equal for equal bits.

    Args:
        weights: `digest_weights` on the same device.

    Words of 8 bytes are summed with odd weights that depend on their place, modulo 2^64: a change
    of any number of bits in one word always changes the sum, and the order of summation never does.
    """
    flat = tensor.detach().reshape(-1)
    entries_per_word = WORD_BYTES // flat.element_size()
    num_rest = flat.numel() % entries_per_word
    num_whole = flat.numel() - num_rest
    whole = flat[:num_whole]
    # Eight bytes are read as a word, which has to begin at a multiple of eight.
    is_aligned = flat.storage_offset() % entries_per_word == 0
    if not is_aligned:
        whole = whole.clone()
    rest = torch.zeros(entries_per_word, dtype=flat.dtype, device=flat.device)
    rest[:num_rest] = flat[num_whole:]
    sums = _row_sums(whole.view(torch.int64), weights)
    last_word = rest.view(torch.int64).sum()
    words = _weighted(sums) * ODD
    rest_word = last_word * ODD
    return words + rest_word + flat.numel()


def _row_sums(words: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each `ROW` words."""
    if words.device.type == "cpu":
        slab = CPU_SLAB
    else:
        slab = DEVICE_SLAB
    sums = []
    num_whole = len(words) // ROW * ROW
    for start in range(0, num_whole, slab):
        stop = min(start + slab, num_whole)
        rows = words[start:stop].view(-1, ROW)
        weighted = rows * weights
        sums.append(weighted.sum(1))
    rest = words[num_whole:]
    weighted_rest = rest * weights[: len(rest)]
    sums.append(weighted_rest.sum().unsqueeze(0))
    return torch.cat(sums)


def _weighted(sums: Tensor) -> Tensor:
    places = torch.arange(len(sums), dtype=torch.int64, device=sums.device)
    return (sums * (2 * (places * ODD) + 1)).sum()


class StateDigests:
    """Digests of one rank's training state.

    Args:
        state: the training state, live.
        every: steps between comparisons.
    """

    def __init__(self, state: TrainState, *, every: int) -> None:
        self.state = state
        self.every = every
        self.comm: Comm = state.model.comm
        self._weights = digest_weights(self.comm.device)
        self._classes = _replica_classes(self.comm.mesh)
        self._leaders = first_ranks(self.comm.mesh, self._classes)
        self._stored: Tensor | None = None
        self._changed: tuple[str, ...] = ()

    def is_due(self, step: int) -> bool:
        """Whether replicas are compared after step `step` (the first is 1)."""
        return step % self.every == 0

    def forget(self) -> None:
        """Expect a change of the state from outside, such as a rollback."""
        self._stored = None

    def compare(self, step: int) -> StateFault | None:
        """Compare replicas after an update, and keep the digests; every rank must call it.

        Returns the first fault, the same on every rank.
        """
        tensors = tuple(self._tensors())
        digests = self._digests(tensors)
        self._stored = digests
        row = self._class_digests(tensors, digests)
        if not len(row):
            return None
        table = self.comm.all_gather_world(row.unsqueeze(0)).cpu()
        if bool((table == table.gather(0, self._leaders)).all()):
            return None
        return self._find_fault(step, tensors, digests)

    def has_changed(self) -> bool:
        """Whether this rank's state differs from that of the last comparison, before the next
        update; answers once.
        """
        # Once: the update that follows changes the state.
        stored, self._stored = self._stored, None
        if stored is None:
            return False
        tensors = tuple(self._tensors())
        is_other = stored != self._digests(tensors)
        changed: list[str] = []
        for each, is_changed in zip(tensors, is_other.tolist(), strict=True):
            if is_changed:
                changed.append(each.name)
        self._changed = tuple(changed)
        return bool(changed)

    def changed_fault(self, step: int) -> StateFault:
        """The fault of the ranks on which `has_changed`; every rank must call it."""
        local = json.dumps(self._changed)
        reports = [json.loads(text) for text in all_gather_text(self.comm, local)]
        ranks = tuple(rank for rank, found in enumerate(reports) if found)
        found = tuple(dict.fromkeys(name for report in reports for name in report))
        where = _ranks_text(ranks, self.comm.mesh)
        text = (
            f"step {step}: {where}: {_tensors_text(found)} changed between two updates: "
            f"a bit flipped in memory"
        )
        return StateFault(ranks=ranks, tensors=found, text=text)

    def _tensors(self) -> Iterator[ReplicatedTensor]:
        model = self.state.model
        for local in param_states(self.state):
            tensors = {**local.tensors, **local.of_blocks, **local.whole}
            for section, tensor in tensors.items():
                name = f"{section}/{local.param.name}"
                yield ReplicatedTensor(name=name, axes=local.replica_axes, tensor=tensor)
        plan = model.plan
        holds_copies = plan.zero in (1, 2) or plan.params != plan.compute
        if holds_copies and plan.zero < 3:
            for name, param in model.params.items():
                if name in model.quantized:  # freed between uses
                    continue
                axes = self._axes_without(model.shards[name].shard_axes)
                yield ReplicatedTensor(name=f"compute/{name}", axes=axes, tensor=param)
        sharded = {axis for shard in model.shards.values() for axis in shard.shard_axes}
        axes = self._axes_without(tuple(sharded))
        stored = set(map(id, model.buffer_records.buffers().values()))
        for block_name, block in model.blocks.items():
            for path, buffer in block.named_buffers():
                if id(buffer) not in stored:
                    name = f"buffer/{block_name}.{path}"
                    yield ReplicatedTensor(name=name, axes=axes, tensor=buffer)

    def _axes_without(self, axes: Sequence[str]) -> tuple[str, ...]:
        excluded = (pipeline_axis(), *local_update_axes(), *axes)
        return tuple(name for name, _ in self.comm.mesh.axes if name not in excluded)

    def _digests(self, tensors: Sequence[ReplicatedTensor]) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=torch.int64, device=self.comm.device)
        digests = [digest(each.tensor, self._weights) for each in tensors]
        return torch.stack(digests)

    def _class_digests(self, tensors: Sequence[ReplicatedTensor], digests: Tensor) -> Tensor:
        """One number for all tensors that have replicas along the same axes."""
        row = torch.zeros(len(self._classes), dtype=torch.int64, device=self.comm.device)
        places = {axes: place for place, axes in enumerate(self._classes)}
        for each, value in zip(tensors, digests, strict=True):
            place = places.get(_present(each.axes, self.comm.mesh))
            if place is not None:
                weight = 2 * zlib.crc32(each.name.encode()) + 1
                row[place] += value * weight
        return row

    def _find_fault(
        self, step: int, tensors: Sequence[ReplicatedTensor], digests: Tensor
    ) -> StateFault:
        """Exchange the digests of all tensors; the first group of replicas that differs, by rank."""
        local: dict[str, Any] = {}
        for each, value in zip(tensors, digests.tolist(), strict=True):
            axes = _present(each.axes, self.comm.mesh)
            local[each.name] = [value, list(axes)]
        texts = all_gather_text(self.comm, json.dumps(local))
        reports = [json.loads(text) for text in texts]
        wrong: dict[tuple[int, ...], list[str]] = {}
        mesh = self.comm.mesh
        for rank, report in enumerate(reports):
            for name, (_, axes) in report.items():
                group = mesh.group(rank, tuple(axes))
                # The first rank of each group stands for it.
                if group[0] != rank:
                    continue
                values = {member: reports[member][name][0] for member in group}
                culprits = _minority(values)
                if culprits:
                    wrong.setdefault(culprits, []).append(name)
        ranks, names = next(iter(wrong.items()))
        where = _ranks_text(ranks, mesh)
        is_known = len(ranks) == 1
        verb = "differs from its replicas" if is_known else "differ, and one of them is wrong"
        text = f"step {step}: {where} {verb}: {_tensors_text(names)}"
        return StateFault(ranks=ranks, tensors=tuple(names), text=text)


def _minority(values: dict[int, int]) -> tuple[int, ...]:
    """Ranks whose value is not that of more than half of them; all ranks where no value is."""
    counts = Counter(values.values())
    if len(counts) == 1:
        return ()
    ((value, count),) = counts.most_common(1)
    if 2 * count <= len(values):
        return tuple(values)
    others = [rank for rank, own in values.items() if own != value]
    return tuple(others)


def _present(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Those of `axes` along which the mesh has more than one rank, in mesh order."""
    return tuple(name for name, degree in mesh.axes if name in axes and degree > 1)


def _replica_classes(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """All sets of mesh axes along which a tensor may have replicas."""
    names: list[str] = []
    for name, degree in mesh.axes:
        if degree > 1 and name != pipeline_axis():
            names.append(name)
    classes: list[tuple[str, ...]] = []
    for size in range(1, len(names) + 1):
        classes.extend(combinations(names, size))
    return tuple(classes)


def first_ranks(mesh: Mesh, classes: Sequence[tuple[str, ...]]) -> Tensor:
    """leaders_RC: the first rank of each rank's group along each set of axes."""
    ranks = torch.arange(mesh.size, dtype=torch.int64)
    leaders = torch.empty((mesh.size, len(classes)), dtype=torch.int64)
    for column, axes in enumerate(classes):
        leader = ranks.clone()
        stride = 1
        for name, degree in reversed(mesh.axes):
            if name in axes:
                index = ranks // stride % degree
                leader -= index * stride
            stride *= degree
        leaders[:, column] = leader
    return leaders


def _ranks_text(ranks: Sequence[int], mesh: Mesh) -> str:
    """`rank 1 (dp1)`, or `rank 0 (dp0) and rank 1 (dp1)`."""
    places = [f"rank {rank} ({mesh.coord_text(rank)})" for rank in ranks]
    return " and ".join(places)


def _tensors_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_TENSORS_SHOWN])
    num_hidden = len(names) - MAX_TENSORS_SHOWN
    if num_hidden > 0:
        return f"{shown} and {num_hidden} more"
    return shown
