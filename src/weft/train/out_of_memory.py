"""What a rank held when its device ran out of memory, largest part first, and what would need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.errors import Fault, WeftError
from weft.train.step import TrainStep

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the text of a failed allocation on the CPU."""
ACTIVATIONS = "activations and temporary tensors"
FIXES = {
    "parameters": "parallel.zero 3, or tensor parallelism such as tp2, shards them",
    "gradients": "parallel.zero 2 shards them",
    "optimizer states": "parallel.zero 1 shards them",
    ACTIVATIONS: "a smaller batch.micro_size, parallel.recompute full, or a cp or tp axis",
    "unused parts of segments": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
}
"""Part of the memory -> what makes it smaller."""


@dataclass(frozen=True)
class AllocatedMemory:
    """Bytes of a GPU; on the CPU those that the process holds, and the memory of the machine.

    Attributes:
        allocated: of tensors.
        reserved: taken from the device by torch, with the unused parts of its segments.
        total: of the device.
    """

    allocated: int
    reserved: int
    total: int

    @staticmethod
    def of(device: torch.device) -> AllocatedMemory:
        """The memory that is allocated now."""
        if device.type == "cpu":
            resident = psutil.Process().memory_info().rss
            return AllocatedMemory(resident, resident, psutil.virtual_memory().total)
        return AllocatedMemory(
            allocated=torch.cuda.memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            total=torch.cuda.get_device_properties(device).total_memory,
        )


def held_bytes(step: TrainStep) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states of this rank; memory that several share
    counts once, as the first of them.
    """
    grads = step.grads
    params: list[Tensor] = list(step.model.params.values())
    gradients = [param.grad for param in params if param.grad is not None]
    for group in grads.groups:
        params += group.held
        held = (group.unsharded_grad, group.sharded_grad)
        gradients += [grad for grad in held if grad is not None]
    states: list[Tensor] = []
    for named in getattr(step.optimizer, "state", {}).values():
        states += [state for state in named.values() if isinstance(state, Tensor)]
    seen: set[int] = set()
    return {
        "parameters": _new_bytes(params, seen),
        "gradients": _new_bytes(gradients, seen),
        "optimizer states": _new_bytes(states, seen),
    }


def _new_bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Bytes of storages that were not `seen`."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def out_of_memory_fault(where: str, memory: AllocatedMemory, held: dict[str, int]) -> Fault:
    """The fault of a rank that ran out of memory.

    Args:
        where: rank, coordinates and device.
        held: as `held_bytes`.
    """
    parts = dict(held)
    parts[ACTIVATIONS] = max(0, memory.allocated - sum(held.values()))
    parts["unused parts of segments"] = max(0, memory.reserved - memory.allocated)
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in largest_first if size)
    largest, _ = largest_first[0]
    return Fault(
        "memory",
        f"{where} is out of memory",
        got=f"{_gib(memory.reserved)} of {_gib(memory.total)} reserved: {listed}",
        fix=f"{FIXES[largest]}; the same words after `weft explain` show what a layout needs",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation of torch has failed, on a GPU or on the CPU, which has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


@contextmanager
def named_out_of_memory(comm: Comm, held: Callable[[], dict[str, int]]) -> Iterator[None]:
    """Have an error of a device that is out of memory say what its rank held.

    Args:
        held: `held_bytes` of the step; nothing before it is built.

    Raises:
        WeftError: the device of this rank is out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        where = f"{_place(comm.mesh, comm.rank)} on {comm.device}"
        fault = out_of_memory_fault(where, AllocatedMemory.of(comm.device), held())
        raise WeftError(fault) from error


def _place(mesh: Mesh, rank: int) -> str:
    coordinates = " ".join(f"{axis}{mesh.index(rank, (axis,))}" for axis in mesh.wide_axes)
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"
