"""Restore a training state from stored tensors: each rank reads its own entries, whichever layout wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from weft.checkpoint.folder import FoundCheckpoint, checkpoints
from weft.checkpoint.format import Manifest
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.checkpoint.restored_digests import check_digests
from weft.checkpoint.resume import find_checkpoint, run_folder_of
from weft.checkpoint.site_sections import inner_section, is_of_sites, stored_section
from weft.checkpoint.source import Source
from weft.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    OUTER_SECTIONS,
    ParamState,
    TrainState,
    param_states,
    param_values,
)
from weft.checkpoint.transfer import distribute
from weft.checkpoint.write_item import dtype_name
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text, raise_on_all_ranks
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault
from weft.parallel.model.parallelize import ParallelModel

MAX_NAMES_SHOWN = 3
NO_CHECKPOINT = -1
"""Stands for the step of a checkpoint on a rank that sees none."""


class OpenCheckpoint(Protocol):
    """An opened checkpoint."""

    @property
    def manifest(self) -> Manifest: ...
    def section(self, name: str) -> Source: ...


def restore(state: TrainState, checkpoint: OpenCheckpoint) -> None:
    """Load parameters and optimizer state from a checkpoint of any layout; every rank must call it.

    Each rank reads the entries that it holds.

    Raises:
        CheckpointError: on all ranks, if one finds a tensor that is damaged, missing, of another
            shape or dtype, or if no rank needs a stored tensor. The state may then be partly
            overwritten: restore another checkpoint.
    """
    comm = state.model.comm
    manifest = checkpoint.manifest
    sections = frozenset(manifest.sections)
    if state.local_updates is not None:
        has_exchange = OUTER_SECTIONS["exchange"] in sections
        state.local_updates.prepare_restore(manifest.facts.step, has_exchange=has_exchange)
    raise_on_all_ranks(comm, lambda: _check_optimizer(state, manifest))
    raise_on_all_ranks(comm, lambda: _check_dtypes(state, manifest))
    _check_unexpected_names(state, manifest)
    found = _FoundSections(checkpoint, sections)
    raise_on_all_ranks(comm, lambda: load_entries(found.of(param_states(state)), found.section))
    # Before anything is gathered from what was loaded.
    check_digests(found.of(param_states(state)), manifest, comm)
    # Blocks compute with gathered or cast copies, which still have the values from before.
    state.grads.after_optimizer_step()


@dataclass(frozen=True)
class _FoundSections:
    """The sections of a checkpoint, by the names that a state has for them."""

    checkpoint: OpenCheckpoint
    stored: frozenset[str]

    def of(self, states: Iterable[ParamState]) -> Iterator[ParamState]:
        """The states without sections that the checkpoint has nothing for."""
        for local in states:
            found = {
                name: tensor
                for name, tensor in local.tensors.items()
                if stored_section(name, self.stored) is not None
            }
            yield replace(local, tensors=found)

    def section(self, name: str) -> Source:
        """The stored tensors that a section of the state is read from."""
        return self.checkpoint.section(stored_section(name, self.stored) or name)


def restore_parameters(state: TrainState, checkpoint: OpenCheckpoint) -> None:
    """Load the parameters of a checkpoint, without optimizer state; every rank must call it.

    Raises:
        CheckpointError: as `restore`.
    """
    _load_parameters(state, checkpoint.section)
    loaded = param_values(state.model, state.grads)
    check_digests(loaded, checkpoint.manifest, state.model.comm)


def load_parameters(state: TrainState, source: Source) -> None:
    """Load parameters only, for example of an import; every rank must call it. With local updates
    they become the outer parameters.

    Raises:
        CheckpointError: as `restore`, but `source` may hold more tensors than are needed.
    """
    _load_parameters(state, lambda _: source)


def _load_parameters(state: TrainState, section: Callable[[str], Source]) -> None:
    params = param_values(state.model, state.grads)
    raise_on_all_ranks(state.model.comm, lambda: load_entries(params, section))
    if state.local_updates is not None:
        state.local_updates.reset()
    state.grads.after_optimizer_step()


def has_optimizer_state(state: TrainState, manifest: Manifest) -> bool:
    """Whether a checkpoint holds exactly the state that this optimizer keeps, on all ranks; every
    rank must call it.
    """
    comm = state.model.comm
    # The answer has to be one for all ranks: they go on to other collectives with it.
    num_wrong = torch.zeros(1, dtype=torch.int64, device=comm.device)
    try:
        _check_optimizer(state, manifest)
    except CheckpointError:
        num_wrong.fill_(1)
    return not comm.sum_world(num_wrong).item()


def load_model(model: ParallelModel, source: Source) -> None:
    """Load the parameters of a model that is not trained, converted to their dtype here. Every rank
    must call it.

    Raises:
        CheckpointError: as `load_parameters`.
    """
    raise_on_all_ranks(model.comm, lambda: load_entries(param_values(model), lambda _: source))


@torch.no_grad()
def load_entries(params: Iterable[ParamState], section: Callable[[str], Source]) -> None:
    """Read the entries of these tensors on this rank, section by section."""
    opened: dict[str, _OpenSection] = {}

    def opened_section(name: str) -> _OpenSection:
        if name not in opened:
            opened[name] = _OpenSection(name, section(name))
        return opened[name]

    for local in params:
        owner = local.param.owner
        for name in (*local.tensors, *local.of_blocks, *local.whole):
            opened_section(name)
        for name, tensor in local.tensors.items():
            source = opened_section(name)
            source.check_shape(owner, local.param.shape)
            entries = source.read_boxes(owner, local.boxes)
            # In place: optimizers, flat memory and hooks hold this tensor.
            tensor.copy_(entries.view(tensor.shape))
        for name, tensor in local.of_blocks.items():
            source = opened_section(name)
            source.check_shape(owner, local.shape_of_blocks)
            for _, box, values in local.views_of_blocks(tensor):
                values.copy_(source.source.read(owner, box))
        for name, tensor in local.whole.items():
            source = opened_section(name)
            shape = tuple(tensor.shape)
            source.check_shape(owner, shape)
            tensor.copy_(source.source.read(owner, Box.whole(shape)))


class _OpenSection:
    """A section of a checkpoint, with its shapes read once."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.shapes = source.shapes

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Reject a stored tensor that is missing or has another shape."""
        stored_name = f"{self.name}/{name}"
        if name not in self.shapes:
            fix = "resume with the model and the optimizer that wrote it"
            raise CheckpointError(Fault(stored_name, "is not in the checkpoint", fix=fix))
        stored_shape = tuple(self.shapes[name])
        if stored_shape != shape:
            raise CheckpointError(
                Fault(
                    stored_name,
                    "is stored with another shape",
                    got=str(stored_shape),
                    need=str(shape),
                )
            )

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> Tensor:
        """The entries of all boxes, flat, in order."""
        parts = []
        for box in boxes:
            entries = self.source.read(name, box)
            parts.append(entries.reshape(-1))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)


def _check_dtypes(state: TrainState, manifest: Manifest) -> None:
    """Stored dtypes must equal those here: a conversion would change the numbers of the run."""
    sections = frozenset(manifest.sections)
    for local in param_states(state):
        tensors = {**local.tensors, **local.of_blocks, **local.whole}
        for section, tensor in tensors.items():
            name = f"{stored_section(section, sections)}/{local.param.owner}"
            stored = manifest.tensors.get(name)
            dtype = dtype_name(tensor.dtype)
            if stored and stored.dtype != dtype:
                is_frozen = local.param.name in state.model.frozen
                kind = "compute" if is_frozen else "params"
                fix = f"--precision.{kind} {stored.dtype}"
                raise CheckpointError(
                    Fault(name, "is stored in another dtype", got=stored.dtype, need=dtype, fix=fix)
                )


def _check_unexpected_names(state: TrainState, manifest: Manifest) -> None:
    """Raise if the checkpoint holds tensors that no rank needs."""
    comm = state.model.comm
    stored = sorted(name for name in manifest.tensors if not is_of_sites(name))
    sections = frozenset(manifest.sections)
    needed_here = set()
    for needed_name in state.stored_names():
        section, _, owner = needed_name.rpartition("/")
        needed_here.add(f"{stored_section(section, sections)}/{owner}")
    is_needed = torch.tensor(
        [name in needed_here for name in stored], dtype=torch.int64, device=comm.device
    )
    num_users = comm.sum_world(is_needed).tolist()
    unexpected = [name for name, count in zip(stored, num_users, strict=True) if not count]
    if unexpected:
        what = "the checkpoint holds tensors that this model and optimizer do not have"
        raise CheckpointError(Fault(unexpected[0], what, got=_some_names(unexpected)))


def _check_optimizer(state: TrainState, manifest: Manifest) -> None:
    """The checkpoint must hold exactly the state that this optimizer keeps of each parameter."""
    stored = _stored_keys(manifest)
    for name, needed in state.optimizer_keys.items():
        owner = state.model.shards[name].owner
        found = stored.get(owner, set())
        is_stored = f"{MODEL}/{owner}" in manifest.tensors
        if is_stored and found != needed:
            what = f"{owner} has another optimizer in the checkpoint, with other state"
            fix = (
                "resume with the optimizer, options and groups that wrote it, "
                "or --optim.on_change fresh"
            )
            got = _key_list(found)
            need = _key_list(needed)
            raise CheckpointError(Fault("optim", what, got=got, need=need, fix=fix))


def _stored_keys(manifest: Manifest) -> dict[str, set[str]]:
    """Parameter -> keys of its optimizer state in a checkpoint."""
    found: dict[str, set[str]] = {}
    for stored_name in manifest.tensors:
        section, _, name = stored_name.rpartition("/")
        kind, _, key = inner_section(section).partition("/")
        if kind == OPTIMIZER:
            keys = found.setdefault(name, set())
            keys.add(key)
    return found


def _key_list(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _some_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    num_hidden = len(names) - MAX_NAMES_SHOWN
    if num_hidden > 0:
        return f"{shown} and {num_hidden} more"
    return shown


def open_newest_valid(
    resume: str, out: str | None, comm: Comm
) -> tuple[Checkpoint | None, tuple[Fault, ...]]:
    """The newest checkpoint that `resume` means whose every byte is verified, and the faults of
    newer ones.

    Every rank must call it; ranks share the verification. None, without faults, if there is no
    checkpoint at all.

    Raises:
        CheckpointError: on all ranks, if there are checkpoints and none is valid.
    """
    faults: list[Fault] = []
    below: int | None = None
    while True:
        root = _rank_with_newest(resume, out, comm, below=below)
        found = _find_on_rank(root, resume, out, comm, below=below)
        faults += found.faults
        if found.path is None and faults:
            raise CheckpointError(*faults)
        if found.path is None:
            return None, ()
        try:
            return open_verified(found.path, comm, root=root), tuple(faults)
        except CheckpointError as error:
            faults += error.faults
            # Only this rank surely has the folder.
            below = _step_on_rank(root, found.path, comm)


def _rank_with_newest(resume: str, out: str | None, comm: Comm, *, below: int | None) -> int:
    """The first rank that sees the newest checkpoint: 0 with a shared folder; without one the host
    of rank 0 may have changed since the save.
    """
    newest = NO_CHECKPOINT
    folder = run_folder_of(resume, out)
    if folder is not None:
        for step, _ in checkpoints(folder):
            if below is None or step < below:
                newest = max(newest, step)
    newest_of_ranks = [int(text) for text in all_gather_text(comm, str(newest))]
    return newest_of_ranks.index(max(newest_of_ranks))


def _step_on_rank(root: int, path: Path, comm: Comm) -> int:
    """The step of a checkpoint that rank `root` has; other hosts may have none."""
    if comm.rank == root:
        step = str(read_manifest(path).facts.step)
    else:
        step = ""
    return int(all_gather_text(comm, step)[root])


def _find_on_rank(
    root: int, resume: str, out: str | None, comm: Comm, *, below: int | None
) -> FoundCheckpoint:
    """What rank `root` finds, on every rank (without the manifest)."""
    found = FoundCheckpoint(path=None, manifest=None, faults=())

    def find() -> None:
        nonlocal found
        if comm.rank == root:
            found = find_checkpoint(resume, out, below=below)

    raise_on_all_ranks(comm, find)
    local = {"path": str(found.path or ""), "faults": [asdict(fault) for fault in found.faults]}
    shared = json.loads(all_gather_text(comm, json.dumps(local))[root])
    if shared["path"]:
        path = Path(shared["path"])
    else:
        path = None
    faults = tuple(Fault(**fault) for fault in shared["faults"])
    return FoundCheckpoint(path=path, manifest=None, faults=faults)


def open_verified(path: Path, comm: Comm, *, root: int) -> Checkpoint:
    """The checkpoint that rank `root` has, of which each rank has verified its share of all bytes; every
    rank must call it.

    Raises:
        CheckpointError: on all ranks, if it is missing or damaged.
    """
    opened: list[Checkpoint] = []
    distribute(comm, path, root=root)

    def verify() -> None:
        checkpoint = open_checkpoint(path)
        checkpoint.verify(comm.rank, comm.mesh.size)
        opened.append(checkpoint)

    raise_on_all_ranks(comm, verify)
    return opened[0]
