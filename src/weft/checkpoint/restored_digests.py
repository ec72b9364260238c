"""Compare a restored state with the digests in the manifest: what training held when it was saved, on any layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weft.checkpoint.format import Manifest
from weft.checkpoint.manifest import FIX_USE_ANOTHER
from weft.checkpoint.site_sections import stored_section
from weft.checkpoint.state import ParamState
from weft.checkpoint.tensor_digest import MODULUS
from weft.checkpoint.write_item import dtype_name
from weft.comm.comm import Comm
from weft.errors import CheckpointError, Fault


def check_digests(states: Iterable[ParamState], manifest: Manifest, comm: Comm) -> None:
    """Reject tensors that differ from those that were saved; every rank must call it. Tensors
    without a stored digest, or converted to another dtype, are not compared.

    Raises:
        CheckpointError: on all ranks, one fault for each tensor that differs.
    """
    names = sorted(manifest.digests)
    if not names:
        return
    restored = _digests_here(states, manifest)
    sums = torch.zeros(len(names), 2, dtype=torch.int64)
    for row, name in zip(sums, names, strict=True):
        if name in restored:
            row[0] = restored[name].num_entries
            row[1] = restored[name].digest
    every_axis = tuple(axis for axis, _ in comm.mesh.axes)
    totals = comm.all_reduce(sums.to(comm.device), every_axis).tolist()
    faults = []
    for name, (num_entries, digest) in zip(names, totals, strict=True):
        # Several sites may have read the tensor; a rank may have converted it, then none counts it.
        num_readers, rest = divmod(num_entries, manifest.tensors[name].num_entries)
        need = num_readers * manifest.digests[name] % MODULUS
        if rest or digest % MODULUS != need:
            faults.append(_fault(name, got=digest % MODULUS, need=need))
    if faults:
        raise CheckpointError(*faults)


@dataclass(frozen=True)
class _Digest:
    num_entries: int
    digest: int


def _digests_here(states: Iterable[ParamState], manifest: Manifest) -> dict[str, _Digest]:
    """Stored name -> digest of what this rank has restored of it."""
    sections = frozenset(manifest.sections)
    found: dict[str, _Digest] = {}
    for local in states:
        for part in local.digests():
            section, _, owner = part.name.rpartition("/")
            name = f"{stored_section(section, sections)}/{owner}"
            stored = manifest.tensors.get(name)
            if stored is None or stored.dtype != dtype_name(part.dtype):
                continue
            before = found.get(name, _Digest(0, 0))
            found[name] = _Digest(
                before.num_entries + part.num_entries, (before.digest + int(part.digest)) % MODULUS
            )
    return found


def _fault(name: str, *, got: int, need: int) -> Fault:
    what = "what was loaded differs from what training held when it was saved"
    return Fault(name, what, got=f"{got:08x}", need=f"{need:08x}", fix=FIX_USE_ANOTHER)
