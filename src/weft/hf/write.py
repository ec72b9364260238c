"""Writes a Hugging Face folder tensor by tensor, with one slab of a tensor in memory.

The folder gets its name when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from weft.checkpoint.disk import new_folder, write_whole
from weft.checkpoint.source import Source
from weft.config.hf.read_config import CONFIG
from weft.config.hf.safetensors_files import INDEX, SINGLE_FILE, STORED_DTYPES
from weft.core.axes import Box
from weft.hf.folder import slabs
from weft.hf.placement import HFTensor
from weft.hf.sidecar import reject_existing

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, name): stored for stored, (name, _) in STORED_DTYPES.items()
}
"""torch's type -> safetensors' name."""
ALIGNMENT = 8


@dataclass(frozen=True)
class TypedTensor:
    """One tensor with its type in the file."""

    tensor: HFTensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the tensor takes in a file."""
        return Box.whole(self.tensor.shape).size * self.dtype.itemsize


def choose_dtypes(
    tensors: Sequence[HFTensor], source: Source, *, dtype: torch.dtype | None
) -> tuple[TypedTensor, ...]:
    """Types of all tensors: `dtype`, or as they are stored; `keep_float32` tensors keep 32 bits."""
    typed = []
    for tensor in tensors:
        stored = source.dtype(tensor.placements[0].param)
        typed.append(TypedTensor(tensor=tensor, dtype=_file_dtype(tensor, stored, dtype)))
    return tuple(typed)


def _file_dtype(tensor: HFTensor, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if tensor.is_integer:
        return torch.int64
    if asked is None:
        return stored
    if not tensor.keep_float32:
        return asked
    is_narrow_already = stored.itemsize < 4
    if is_narrow_already:
        return stored
    return torch.promote_types(asked, torch.float32)


def main_dtype(typed: Sequence[TypedTensor]) -> str:
    """torch's name of the type that most bytes have."""
    num_bytes: Counter[torch.dtype] = Counter()
    for tensor in typed:
        num_bytes[tensor.dtype] += tensor.num_bytes
    ((dtype, _),) = num_bytes.most_common(1)
    return str(dtype).removeprefix("torch.")


def split_files(typed: Sequence[TypedTensor], *, max_bytes: int) -> list[list[TypedTensor]]:
    """Tensors by file, in order, at most so many bytes each; a tensor that is larger has a file of
    its own.
    """
    files: list[list[TypedTensor]] = [[]]
    filled = 0
    for tensor in typed:
        if files[-1] and filled + tensor.num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.num_bytes
    return files


def write_folder(
    folder: Path,
    typed: Sequence[TypedTensor],
    source: Source,
    *,
    max_shard_bytes: int,
    texts: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Write `folder`, which does not exist yet or is empty.

    Args:
        texts: name -> content of further small files.
        config: content of config.json.

    Raises:
        CheckpointError: the folder is not empty, or a disk error occurs; what was written is removed
            then.
    """
    reject_existing(folder)
    with new_folder(folder, need_bytes=sum(tensor.num_bytes for tensor in typed)) as unfinished:
        _write_weights(unfinished, typed, source, max_shard_bytes=max_shard_bytes)
        for name, text in texts.items():
            write_whole(unfinished / name, text.encode())
        write_whole(unfinished / CONFIG, _json_bytes(config))


def _write_weights(
    folder: Path, typed: Sequence[TypedTensor], source: Source, *, max_shard_bytes: int
) -> None:
    files = split_files(typed, max_bytes=max_shard_bytes)
    file_of: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        if len(files) == 1:
            name = SINGLE_FILE
        else:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for each in tensors:
            file_of[each.tensor.name] = name
        with (folder / name).open("xb") as file:
            _write_file(file, tensors, source)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        total = sum(tensor.num_bytes for tensor in typed)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        write_whole(folder / INDEX, _json_bytes(index))


def _write_file(file: BinaryIO, tensors: Sequence[TypedTensor], source: Source) -> None:
    ordered = sorted(
        tensors, key=lambda each: -each.dtype.itemsize
    )  # so that each lies at a multiple of its width
    file.write(_header(ordered))
    for each in ordered:
        for box in slabs(each.tensor.shape):
            slab = assemble(each.tensor, source, box)
            typed = slab.to(each.dtype).contiguous()
            raw = typed.view(-1).view(torch.uint8)
            file.write(raw.numpy().data)


def _header(tensors: Sequence[TypedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for each in tensors:
        stop = start + each.num_bytes
        header[each.tensor.name] = {
            "dtype": DTYPE_NAMES[each.dtype],
            "shape": list(each.tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    num_spaces = -len(text) % ALIGNMENT
    padded = text + b" " * num_spaces
    length = len(padded).to_bytes(8, "little")
    return length + padded


def assemble(tensor: HFTensor, source: Source, box: Box) -> Tensor:
    """A box of an HF tensor, copied from the parameters, in their stored type."""
    first = tensor.placements[0]
    assembled = torch.empty(box.shape, dtype=source.dtype(first.param))
    for copy in tensor.copies(box):
        values = source.read(copy.source, copy.box)
        if copy.transposed:
            values = values.T
        target = assembled[copy.at]
        target.copy_(values.reshape(target.shape))
    return assembled


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
