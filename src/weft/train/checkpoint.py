"""Owns the way between a training step and stored tensors: what this rank writes, and how any rank takes in what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch

from weft.checkpoint.format import Manifest
from weft.checkpoint.held import Held, dtype_name
from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault
from weft.parallel.model.parallelize import ParallelModel
from weft.train.agree import agree
from weft.train.state import Part, named, names_of_step, parts_of_model, parts_of_step
from weft.train.step import TrainStep

SHOWN = 3
"""Names that are told of many."""


class Stored(Protocol):
    """An opened checkpoint."""

    @property
    def manifest(self) -> Manifest: ...
    def section(self, name: str) -> Source: ...


def held(step: TrainStep) -> tuple[Held, ...]:
    """What this rank is to write, so that over all ranks each entry is written once; ranks with copies share the work.

    The tensors are those that training goes on with: take a snapshot before it does.
    """
    return tuple(piece for part in parts_of_step(step) for piece in _held_of(part))


def _held_of(part: Part) -> Iterator[Held]:
    owner, (start, stop) = part.piece.owner, part.share
    for section, tensor in part.tensors.items():
        flat = tensor.detach().reshape(-1)[start - part.lo : stop - part.lo]
        at = 0
        for box in part.piece.shard.boxes_of_range(start, stop):
            yield Held(f"{section}/{owner}", part.piece.shape, box, flat[at : at + box.size].view(box.shape))
            at += box.size
    if part.writes_numbers:
        for section, number in part.numbers.items():
            yield Held(f"{section}/{owner}", (), Box((), ()), number.detach())


def restore(step: TrainStep, checkpoint: Stored) -> None:
    """Take in parameters, optimizer state and loss scale, whatever layout wrote them; every rank must call it.

    Each rank reads what it holds and nothing else.

    Raises:
        CheckpointError: the same on all ranks, when one of them finds something damaged, missing, of another shape or type,
            or when a stored tensor belongs to nobody. The step may then have taken in some of it: restore another one.
    """
    manifest = checkpoint.manifest
    agree(step.model.comm, lambda: _check_optimizer(step, manifest))
    agree(step.model.comm, lambda: _check_types(step, manifest))
    _refuse_strangers(step, manifest)
    agree(step.model.comm, lambda: _take_in(parts_of_step(step), checkpoint.section))
    scale = manifest.facts.loss_scale
    if scale and step.loss_scale.is_dynamic:
        step.loss_scale = type(step.loss_scale)(scale["value"], is_dynamic=True, good_steps=scale["good_steps"])
    step.grads.after_optimizer_step()


def load_parameters(step: TrainStep, source: Source) -> None:
    """Take in parameters alone: a start from elsewhere. Every rank must call it.

    Raises:
        CheckpointError: as `restore`, but that `source` may hold more.
    """
    agree(step.model.comm, lambda: _take_in(parts_of_model(step.model, step.grads), lambda _: source))
    step.grads.after_optimizer_step()


def load_model(model: ParallelModel, source: Source) -> None:
    """Take in the parameters of a model that nobody trains, in whatever type they have here. Every rank must call it.

    Raises:
        CheckpointError: as `load_parameters`.
    """
    agree(model.comm, lambda: _take_in(parts_of_model(model), lambda _: source))


@torch.no_grad()
def _take_in(parts: Iterable[Part], section: Callable[[str], Source]) -> None:
    opened = cache(lambda name: _Opened(name, section(name)))
    for part in parts:
        owner, boxes = part.piece.owner, part.boxes
        for name, tensor in part.tensors.items():
            source = opened(name)
            source.check_shape(owner, part.piece.shape)
            entries = [source.source.read(owner, box).reshape(-1) for box in boxes]
            tensor.copy_((entries[0] if len(entries) == 1 else torch.cat(entries)).view(tensor.shape))
        for name, number in part.numbers.items():
            opened(name).check_shape(owner, ())
            number.copy_(opened(name).source.read(owner, Box((), ())))


class _Opened:
    """A section, its shapes looked up once."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source, self.shapes = name, source, source.shapes

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a stored tensor that is missing or is not the one at hand."""
        if name not in self.shapes:
            fix = "resume with the model and the optimizer that wrote it"
            raise CheckpointError(Fault(f"{self.name}/{name}", "is not in the checkpoint", fix=fix))
        if (got := tuple(self.shapes[name])) != shape:
            raise CheckpointError(Fault(f"{self.name}/{name}", "is stored with another shape", str(got), str(shape)))


def _check_types(step: TrainStep, manifest: Manifest) -> None:
    """Values are taken in as they are: rounding them, or widening what was rounded, would be another run."""
    for part in parts_of_step(step):
        for section, tensor in {**part.tensors, **part.numbers}.items():
            stored = manifest.tensors.get(f"{section}/{part.piece.owner}")
            if stored and stored.dtype != dtype_name(tensor.dtype):
                what, name = "is stored in another type", f"{section}/{part.piece.owner}"
                fix = f"--precision.params {stored.dtype}"
                raise CheckpointError(Fault(name, what, stored.dtype, dtype_name(tensor.dtype), fix))


def _refuse_strangers(step: TrainStep, manifest: Manifest) -> None:
    """Every stored tensor has somebody who took it in."""
    stored, mine = sorted(manifest.tensors), names_of_step(step)
    comm = step.model.comm
    used = torch.tensor([name in mine for name in stored], dtype=torch.int64, device=comm.device)
    users = comm.all_reduce(used, tuple(name for name, _ in comm.mesh.axes)).tolist()
    if strangers := [name for name, count in zip(stored, users, strict=True) if not count]:
        what = "the checkpoint holds what this model and optimizer do not have"
        raise CheckpointError(Fault(strangers[0], what, _few(strangers)))


def _check_optimizer(step: TrainStep, manifest: Manifest) -> None:
    """The optimizer remembers what the checkpoint has, no less and no more."""
    kinds = {section.partition("/")[2] for section in manifest.sections if section.startswith("optim/")}
    mine = set(named(step.optimizer).fresh_state(torch.empty(1)))
    if kinds != mine:
        got, need = (", ".join(sorted(keys)) or "nothing" for keys in (kinds, mine))
        what = "the checkpoint is of an optimizer that remembers other things"
        raise CheckpointError(Fault("optim", what, got, need, "the optimizer (and sgd's momentum) that wrote it"))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
