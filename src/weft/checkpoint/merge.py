"""Owns making one manifest out of what every rank says of its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from weft import __version__
from weft.checkpoint.cover import first_flaw
from weft.checkpoint.format import Facts, Manifest, Part, Stored, Versions, part_name
from weft.checkpoint.shard import BLOCK_BYTES
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


def merged(tmp: Path, facts: Facts, *, ranks: int) -> Manifest:
    """The manifest of what `ranks` ranks have written below `tmp`.

    Raises:
        CheckpointError: a rank's file is missing or short, or the pieces do not make up whole tensors.
    """
    parts = [_part(tmp, rank) for rank in range(ranks)]
    tensors: dict[str, Stored] = {}
    for part in parts:
        for name, stored in part.tensors.items():
            tensors[name] = joined(name, tensors.get(name), stored)
    _check_whole(tensors)
    return Manifest(
        versions=Versions(weft=__version__, torch=torch.__version__),
        facts=facts,
        block_bytes=BLOCK_BYTES,
        files={name: file for part in parts for name, file in part.files.items()},
        tensors=tensors,
    )


def _part(tmp: Path, rank: int) -> Part:
    try:
        part = Part.model_validate_json((tmp / part_name(rank)).read_bytes())
        for name, file in part.files.items():
            if (length := (tmp / name).stat().st_size) != file.num_bytes:
                raise CheckpointError(Fault(str(tmp / name), "shorter than what was written", str(length)))
    except FileNotFoundError as error:
        what = f"rank {rank} has written nothing here"
        fix = "all ranks need the same out folder: on several hosts, one that they share"
        raise CheckpointError(Fault(str(tmp), what, need=Path(str(error.filename)).name, fix=fix)) from None
    return part


def joined(name: str, known: Stored | None, more: Stored) -> Stored:
    """Pieces of one tensor from two places."""
    if known is None:
        return more
    if (known.shape, known.dtype) != (more.shape, more.dtype):
        got, need = (f"{stored.dtype} of shape {stored.shape}" for stored in (more, known))
        raise CheckpointError(Fault(name, "pieces of different tensors under one name", got, need))
    return known.model_copy(update={"pieces": (*known.pieces, *more.pieces)})


def _check_whole(tensors: Mapping[str, Stored]) -> None:
    faults = []
    for name, stored in tensors.items():
        if flaw := first_flaw(Box.whole(stored.shape), [piece.box for piece in stored.pieces]):
            faults.append(Fault(name, f"the pieces of all ranks are not the tensor: {flaw}"))
    if faults:
        raise CheckpointError(*faults)
