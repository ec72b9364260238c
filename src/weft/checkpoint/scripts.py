"""`weft.save` and `weft.load`: a module, its optimizer and values of a plain script, in weft's checkpoint format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.commit import commit, discard
from weft.checkpoint.folder import temporary_path
from weft.checkpoint.format import Facts, Manifest, Stored
from weft.checkpoint.json_values import from_json, to_json
from weft.checkpoint.read import torch_dtype
from weft.checkpoint.restore import load_entries, open_verified
from weft.checkpoint.restored_digests import check_digests
from weft.checkpoint.script_tensors import (
    Held,
    comm_of,
    held_by,
    model_states,
    name_of,
    names_of,
    optimizer_state,
    optimizer_tensors,
    updated_tensor,
    with_entries,
)
from weft.checkpoint.state import MODEL, OPTIMIZER, ParamState, digests_of_states
from weft.checkpoint.transfer import collect, ranks_without_folder
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem, dtype_name
from weft.comm.comm import Comm, script_comm
from weft.comm.text import all_gather_text, raise_on_all_ranks
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault
from weft.parallel.dp import AXIS as DP
from weft.parallel.zero.sharded_optimizer import replaced_states
from weft.parallel.zero.sharded_tensor import ShardedTensor

StateKey = tuple[str, str]
"""Name of a parameter, and key of its state."""
StateValue = tuple[Tensor, Any]
"""The parameter, and the state."""
SAVE, LOAD = "weft.save", "weft.load"
FAMILY = "script"
"""Stands in the manifest for the model family of a run."""
MAX_NAMES = 3
NOT_STORED = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)
"""Of a group: its parameters, and settings that say how it is computed."""


@torch.no_grad()
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    comm: Comm | None = None,
) -> None:
    """Save a module and its optimizer as the checkpoint `folder`; every rank calls it, and writes what it
    holds.

        weft.save(f"ckpt/{step}", net, optimizer, values={"step": step, "scheduler": scheduler.state_dict()})

    The checkpoint has the names and shapes of the unwrapped module, so `weft.load` reads it into any
    wrapper on any number of ranks, and into a plain module. It appears under its name once it is
    complete and on the disk; nothing is overwritten. See docs/checkpoints.md.

    Args:
        folder: does not exist yet.
        model: a plain module, one of weft's wrappers or a module that contains some, sharded layers
            (`weft.parallelize`), or a pipeline.
        optimizer: any that updates parameters of the model.
        values: what else a script needs to go on, as rank 0 has it: numbers, texts, lists, dicts and
            small tensors, such as `scheduler.state_dict()` and `torch.get_rng_state()`.
        comm: communication with the other ranks, of a model that has none of its own; None: the world
            of torch.distributed, or this process alone.

    Raises:
        CheckpointError: on all ranks: the folder exists or cannot be written, or a state or value
            cannot be stored, or the optimizer updates other parameters.
    """
    final = Path(folder)
    comm = comm or comm_of(model, optimizer) or script_comm(DP)
    tmp = temporary_path(final)
    states: list[ParamState] = []
    own: dict[str, Any] = {}

    def prepare() -> None:
        held = held_by(model)
        states.extend(model_states(held, comm))
        states.extend(_optimizer_states(optimizer, held, comm))
        own.update(values=to_json(dict(values or {}), where="values"))
        own.update(optimizer=_own_groups(optimizer, held))
        if comm.rank == 0:
            _make_room(final, tmp)

    raise_on_all_ranks(comm, prepare, key=SAVE)
    optimizer_facts = _of_all_ranks(own["optimizer"], comm)
    separate = ranks_without_folder(comm, final.parent)

    def write() -> None:
        items = list(_write_items(states))
        start_write(tmp, comm.rank, items, digests=digests_of_states(states)).wait()

    def publish() -> None:
        if comm.rank == 0:
            facts = _facts(own["values"], optimizer_facts)
            commit(tmp, final, facts, ranks=comm.mesh.size)

    try:
        raise_on_all_ranks(comm, write, key=SAVE)
        collect(comm, tmp, separate)
    except CheckpointError:
        discard(tmp)
        raise
    raise_on_all_ranks(comm, publish, key=SAVE)


@torch.no_grad()
def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    comm: Comm | None = None,
) -> dict[str, Any]:
    """Load what `save` wrote, whatever wrappers and number of ranks it had there; every rank calls it, and
    reads what it holds. Values and optimizer states are equal bit by bit. Returns `values`.

        step = weft.load("ckpt/100", net, optimizer)["step"]

    Args:
        folder: a checkpoint of `save`; without `optimizer` that of a run, too.
        model: as `save` takes it.
        optimizer: as `save` takes it, with the groups that it had.
        comm: as `save` takes it.

    Raises:
        CheckpointError: on all ranks: the checkpoint is missing or damaged, or of other parameters,
            shapes, dtypes or groups, or the optimizer updates other parameters. The model may then be partly overwritten.
    """
    comm = comm or comm_of(model, optimizer) or script_comm(DP)
    checkpoint = open_verified(Path(folder), comm, root=0)
    manifest = checkpoint.manifest
    states: list[ParamState] = []
    new_states: dict[StateKey, StateValue] = {}
    own: dict[str, Any] = {}

    def prepare() -> None:
        held = held_by(model)
        states.extend(model_states(held, comm))
        own.update(names=list(held.tensors), optimizer=_own_groups(optimizer, held))
        if optimizer is None:
            return
        _check_has_optimizer(Path(folder), manifest)
        shapes = {state.param.name: state.param.shape for state in states}
        new_states.update(_new_states(optimizer, held, manifest, shapes))
        for (name, key), (param, value) in new_states.items():
            if isinstance(value, Tensor):
                found = optimizer_state(name, key, value, param=param, held=held, comm=comm)
                states.append(found)

    raise_on_all_ranks(comm, prepare, key=LOAD)
    _check_names(own["names"], manifest, comm)
    if optimizer is not None:
        _check_groups(_of_all_ranks(own["optimizer"], comm), manifest)
    here = with_entries(states)

    def read() -> None:
        _check_dtypes(here, manifest)
        load_entries(here, checkpoint.section)

    raise_on_all_ranks(comm, read, key=LOAD)
    check_digests(here, manifest, comm)
    if optimizer is not None:
        _set_optimizer(optimizer, new_states, manifest.facts.optimizer)
    found: dict[str, Any] = from_json(manifest.facts.run.get("values", {}))
    return found


def _make_room(final: Path, tmp: Path) -> None:
    """Remove what an earlier process left while it was writing; `final` may not be there yet."""
    if final.exists():
        what = "a checkpoint is there already, and it is not overwritten"
        fix = "save into another folder, such as one with the number of the step"
        raise CheckpointError(Fault(str(final), what, fix=fix))
    discard(tmp)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(Fault(str(final), f"cannot be made: {error.strerror}")) from None


def _facts(values: Mapping[str, Any], optimizer: dict[str, Any]) -> Facts:
    step = values.get("step")
    return Facts(
        step=step if isinstance(step, int) and step >= 0 else 0,
        seed=0,
        family=FAMILY,
        architecture={},
        plan={},
        run={"values": values},
        optimizer=optimizer,
    )


def _write_items(states: Iterable[ParamState]) -> Iterator[WriteItem]:
    """What this rank writes, tensors without entries included."""
    for state in states:
        yield from state.write_items()
        shape = state.param.shape
        if 0 in shape and state.replica == 0:
            for section, tensor in state.tensors.items():
                box = Box.whole(shape)
                yield WriteItem(f"{section}/{state.param.name}", shape, box, tensor.view(shape))


def _optimizer_states(optimizer: Optimizer | None, held: Held, comm: Comm) -> Iterator[ParamState]:
    """The tensors that an optimizer keeps on this rank."""
    if optimizer is None:
        return
    for name, param, state in optimizer_tensors(optimizer, names_of(held)):
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield optimizer_state(name, key, value, param=param, held=held, comm=comm)


def _own_groups(optimizer: Optimizer | None, held: Held) -> dict[str, Any]:
    """The groups of an optimizer, and its states that are no tensors, as JSON."""
    if optimizer is None:
        return {}
    names = names_of(held)
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: each for key, each in group.items() if key not in NOT_STORED}
        members = [name_of(names, param) for param in group["params"]]
        where = f"optimizer group {number}"
        groups.append({"params": members, "settings": to_json(settings, where=where)})
    states: dict[str, Any] = {}
    for name, _, state in optimizer_tensors(optimizer, names):
        plain = {key: each for key, each in state.items() if not isinstance(each, Tensor)}
        if plain:
            states[name] = to_json(plain, where=f"optimizer state of {name}")
    return {"groups": groups, "states": states}


def _of_all_ranks(own: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """What `_own_groups` returns, of the parameters of all ranks: each stage of a pipeline has its own; a
    collective.
    """
    if not own:
        return {}
    first, *others = map(json.loads, all_gather_text(comm, json.dumps(own)))
    for other in others:
        first["states"].update(other["states"])
        for group, more in zip(first["groups"], other["groups"], strict=True):
            group["params"] = list(dict.fromkeys((*group["params"], *more["params"])))
    found: dict[str, Any] = first
    return found


def _check_names(own: Iterable[str], manifest: Manifest, comm: Comm) -> None:
    """Reject a checkpoint of another model; every rank must call it."""
    stored = manifest.section(MODEL)
    texts = all_gather_text(comm, "\n".join(own))
    here = {name for text in texts for name in text.split("\n") if name}
    missing = sorted(here - stored.keys())
    unexpected = sorted(stored.keys() - here)
    if missing or unexpected:
        names = missing or unexpected
        what = (
            "is not in the checkpoint" if missing else "is in the checkpoint, and not in the model"
        )
        shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        fix = "load it into the module that was saved, wrapped or not"
        raise CheckpointError(Fault(f"{MODEL}/{names[0]}", what, got=shown, fix=fix))


def _check_has_optimizer(folder: Path, manifest: Manifest) -> None:
    if manifest.facts.family == FAMILY and manifest.facts.optimizer:
        return
    what = "has no optimizer of a script"
    raise CheckpointError(Fault(str(folder), what, fix="weft.load(folder, model)"))


def _check_groups(groups: Mapping[str, Any], manifest: Manifest) -> None:
    """Reject an optimizer whose groups have other parameters than the stored one's."""
    stored = [set(group["params"]) for group in manifest.facts.optimizer["groups"]]
    here = [set(group["params"]) for group in groups["groups"]]
    if stored != here:
        fault = Fault(
            "optimizer",
            "its groups have other parameters than in the checkpoint",
            got=f"{len(here)} groups of {sum(map(len, here))} parameters",
            need=f"{len(stored)} groups of {sum(map(len, stored))}",
            fix="make the optimizer with the groups that it had",
        )
        raise CheckpointError(fault)


def _check_dtypes(states: Iterable[ParamState], manifest: Manifest) -> None:
    """Reject tensors that would be converted."""
    for state in states:
        for section, tensor in state.tensors.items():
            name = f"{section}/{state.param.name}"
            stored = manifest.tensors.get(name)
            dtype = dtype_name(tensor.dtype)
            if stored is not None and stored.dtype != dtype:
                fix = f"model.to(torch.{stored.dtype}) before loading"
                what = "is stored in another dtype"
                raise CheckpointError(Fault(name, what, got=stored.dtype, need=dtype, fix=fix))


def _new_states(
    optimizer: Optimizer, held: Held, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[StateKey, StateValue]]:
    """Each stored state of this rank's parameters; tensors are without their values yet."""
    names = names_of(held)
    keys: dict[str, list[str]] = {}
    for stored_name in manifest.tensors:
        section, _, name = stored_name.rpartition("/")
        kind, _, key = section.partition("/")
        if kind == OPTIMIZER:
            keys.setdefault(name, []).append(key)
    plain = manifest.facts.optimizer["states"]
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = name_of(names, param)
            target = updated_tensor(optimizer, param)
            for key in keys.get(name, ()):
                stored = manifest.tensors[f"{OPTIMIZER}/{key}/{name}"]
                value = _empty(stored, key, shape=shapes[name], target=target, group=group)
                yield (name, key), (param, value)
            for key, value in from_json(plain.get(name, {})).items():
                yield (name, key), (param, value)


def _empty(
    stored: Stored, key: str, *, shape: tuple[int, ...], target: Tensor, group: Mapping[str, Any]
) -> Tensor:
    """Memory for a stored state: for the target's entries, where it has the shape of the parameter.

    Args:
        shape: of the whole parameter.
        target: what the optimizer updates for the parameter.
    """
    dtype = torch_dtype(stored)
    if key == "step" or stored.shape != shape:
        is_on_device = key != "step" or group.get("capturable") or group.get("fused")
        device = target.device if is_on_device else torch.device("cpu")
        return torch.empty(stored.shape, dtype=dtype, device=device)
    dtype = target.dtype if target.is_complex() else dtype
    if isinstance(target, ShardedTensor):
        return target.with_local(torch.empty_like(target.local.detach(), dtype=dtype))
    return torch.empty_like(target.detach(), dtype=dtype)


def _set_optimizer(
    optimizer: Optimizer, new_states: Mapping[StateKey, StateValue], stored: Mapping[str, Any]
) -> None:
    """Give the optimizer the loaded states and the settings of its groups; every rank must call it."""
    with replaced_states(optimizer) as state:
        state.clear()
        for (_, key), (param, value) in new_states.items():
            state.setdefault(updated_tensor(optimizer, param), {})[key] = value
    for group, stored_group in zip(optimizer.param_groups, stored["groups"], strict=True):
        for key, value in from_json(stored_group["settings"]).items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value
