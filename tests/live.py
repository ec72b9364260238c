"""Memory of live tensors, including those that only autograd holds: exact, by storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """While it is active, the storages that operations of this thread yield are noted; `num_bytes`
    are those that are alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made.setdefault(
                    storage._cdata, StorageWeakRef(storage)
                )  # no other object gets its id while it is held
        return out

    def num_bytes(self, *, but: Iterable[Tensor] = ()) -> int:
        """Bytes of the noted storages that are alive now, without those of `but`."""
        left_out = {tensor.untyped_storage()._cdata for tensor in but}
        total = 0
        for place, storage in self._made.items():
            if place not in left_out:
                total += _size(storage)
        return total


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    num_bytes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        num_bytes[storage._cdata] = storage.nbytes()
    return sum(num_bytes.values())


def _size(storage: StorageWeakRef) -> int:
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if found is None:
        return 0
    return found.nbytes()
