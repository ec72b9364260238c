"""Owns writing a Hugging Face folder tensor by tensor: no more than a slab of one is in memory.

The folder gets its name when all of it is on the disk: nobody finds half a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from weft.checkpoint.disk import new_folder, write_whole
from weft.checkpoint.source import Source
from weft.config.hf.describe import CONFIG
from weft.config.hf.files import DTYPES, INDEX, WHOLE
from weft.core.axes import Box
from weft.hf.folder import slabs
from weft.hf.target import Target
from weft.hf.written import refuse_filled

NAMES: Mapping[torch.dtype, str] = {getattr(torch, name): stored for stored, (name, _) in DTYPES.items()}
"""torch's type -> safetensors' name."""
ALIGNMENT = 8


@dataclass(frozen=True)
class Planned:
    """One tensor with its type in the file."""

    target: Target
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return Box.whole(self.target.shape).size * self.dtype.itemsize


def plan(targets: Sequence[Target], source: Source, *, dtype: torch.dtype | None) -> tuple[Planned, ...]:
    """Types of all tensors: `dtype`, or as they are stored; a wide tensor stays wide."""
    return tuple(Planned(target, _dtype(target, source.dtype(target.users[0].ours), dtype)) for target in targets)


def _dtype(target: Target, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is None or (target.is_wide and stored.itemsize < 4):
        return stored
    return torch.promote_types(asked, torch.float32) if target.is_wide else asked


def shards(planned: Sequence[Planned], *, max_bytes: int) -> list[list[Planned]]:
    """Cut into files of at most so many bytes, in order; a tensor that is larger has one of its own."""
    found: list[list[Planned]] = [[]]
    filled = 0
    for tensor in planned:
        if found[-1] and filled + tensor.num_bytes > max_bytes:
            found.append([])
            filled = 0
        found[-1].append(tensor)
        filled += tensor.num_bytes
    return found


def write_folder(
    folder: Path,
    planned: Sequence[Planned],
    source: Source,
    *,
    max_shard_bytes: int,
    texts: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Write `folder`, which is not there yet or empty.

    Args:
        texts: name -> content of further small files.
        config: content of config.json.

    Raises:
        CheckpointError: the folder is not empty, or the disk refuses; what was written is gone then.
    """
    refuse_filled(folder)
    with new_folder(folder, need_bytes=sum(tensor.num_bytes for tensor in planned)) as beside:
        _write_weights(beside, planned, source, max_shard_bytes=max_shard_bytes)
        for name, text in (*texts.items(), (CONFIG, json.dumps(config, indent=2) + "\n")):
            write_whole(beside / name, text.encode())


def _write_weights(folder: Path, planned: Sequence[Planned], source: Source, *, max_shard_bytes: int) -> None:
    files = shards(planned, max_bytes=max_shard_bytes)
    where: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        where |= {tensor.target.name: name for tensor in tensors}
        with (folder / name).open("xb") as file:
            _write_file(file, tensors, source)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        total = sum(tensor.num_bytes for tensor in planned)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _write_file(file: BinaryIO, tensors: Sequence[Planned], source: Source) -> None:
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # so that each lies at a multiple of its width
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in ordered:
        offsets = [start, start + tensor.num_bytes]
        header[tensor.target.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.target.shape),
            "data_offsets": offsets,
        }
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in ordered:
        for box in slabs(tensor.target.shape):
            made = made_of(tensor.target, source, box).to(tensor.dtype).contiguous()
            file.write(made.view(-1).view(torch.uint8).numpy().data)


def made_of(target: Target, source: Source, box: Box) -> Tensor:
    """A box of their tensor, in the type in which ours is stored."""
    made = torch.empty(box.shape, dtype=source.dtype(target.users[0].ours))
    for fill in target.fills(box):
        own = source.read(fill.ours, fill.box)
        made[fill.at] = (own.T if fill.transposed else own).reshape(made[fill.at].shape)
    return made
