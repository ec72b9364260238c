"""Read a manifest and check all that needs no tensor bytes: checksum, format, file lengths, offsets. Pure: no torch."""

from __future__ import annotations

import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.checkpoint.format import DIGEST, FORMAT, MANIFEST, Manifest, Piece, Stored, digest_text
from weft.errors import CheckpointError, Fault
from weft.small_files import MIB, UnreadableFile, parse_json, read_bytes

FIX_USE_ANOTHER = "take an older checkpoint, or resume = auto"
MAX_MANIFEST_BYTES = 256 * MIB
MAX_DIGEST_BYTES = 4096


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, after every check that needs no tensor bytes.

    Raises:
        CheckpointError: not a checkpoint, a flipped bit, unreadable, of a newer format, or data
            files missing or cut short.
    """
    manifest = verified_manifest(path, *_stored_bytes(path))
    faults = tuple(_length_faults(path, manifest))
    if faults:
        raise CheckpointError(*faults)
    return manifest


def verified_manifest(path: Path, text: bytes, digest: bytes) -> Manifest:
    """The manifest of a checkpoint from its bytes and those of its checksum file, without a look at
    the data files.

    Args:
        path: of the checkpoint, for errors.

    Raises:
        CheckpointError: as `read_manifest`.
    """
    _check_digest(path, text, digest)
    manifest = _parse(path, text)
    faults = tuple(_offset_faults(path, manifest))
    if faults:
        raise CheckpointError(*faults)
    return manifest


def _stored_bytes(path: Path) -> tuple[bytes, bytes]:
    """The bytes of the manifest, and of its checksum file."""
    digest_path = path / DIGEST
    try:
        text = read_bytes(path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES, within=path)
    except UnreadableFile as error:
        if error.is_missing:
            fault = _not_a_checkpoint(path)
        else:
            fault = error.fault()
        raise CheckpointError(fault) from None
    try:
        digest = read_bytes(digest_path, max_bytes=MAX_DIGEST_BYTES, within=path)
    except UnreadableFile as error:
        what = f"the manifest's checksum cannot be read: {error.what}"
        raise CheckpointError(
            Fault(str(digest_path), what, got=error.got, fix=FIX_USE_ANOTHER)
        ) from None
    return text, digest


def _check_digest(path: Path, text: bytes, digest: bytes) -> None:
    need = digest_text(text).encode()
    if digest != need:
        what = f"{MANIFEST} and its checksum do not agree: one of the two is damaged"
        got = f"checksum {_shortened(digest)} in {DIGEST}"
        raise CheckpointError(
            Fault(str(path / MANIFEST), what, got=got, need=_shortened(need), fix=FIX_USE_ANOTHER)
        )


def _shortened(digest: bytes) -> str:
    return repr(digest[:12].decode(errors="replace"))


def _not_a_checkpoint(path: Path) -> Fault:
    """A fault that names the newest checkpoint below `path`, if there is one."""
    manifests = [*path.glob(f"step-*/{MANIFEST}"), *path.glob(f"ckpt/step-*/{MANIFEST}")]
    folders = [manifest.parent for manifest in manifests]
    newest = max(folders, default=None, key=lambda folder: (len(folder.name), folder.name))
    fix = (
        f"give one of the checkpoints in it: {newest}"
        if newest
        else "give OUT/ckpt/step-NNNNNN of a run"
    )
    if not path.exists():
        return Fault(str(path), "no such checkpoint", fix=fix)
    reason = f"it contains no {MANIFEST}" if path.is_dir() else "it is not a folder"
    return Fault(str(path), f"not a checkpoint: {reason}", fix=fix)


def _parse(path: Path, text: bytes) -> Manifest:
    where = str(path / MANIFEST)
    try:
        data: Any = parse_json(text)
    except ValueError as error:
        raise CheckpointError(Fault(where, f"is not JSON: {error}", fix=FIX_USE_ANOTHER)) from None
    if isinstance(data, dict):
        found = data.get("format")
    else:
        found = None
    if not isinstance(found, int):
        raise CheckpointError(
            Fault(
                where,
                "not a checkpoint of weft: the manifest names no format",
                fix="name a folder RUN/ckpt/step-...",
            )
        )
    if found > FORMAT:
        got = f"format {found}{_writer_version(data)}"
        fix = "use the newer weft that wrote it"
        raise CheckpointError(
            Fault(where, "a newer format", got=got, need=f"{FORMAT} or older", fix=fix)
        )
    try:
        return Manifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(Fault(where, f"{key}: {first['msg']}", fix=FIX_USE_ANOTHER)) from None


def _writer_version(data: dict[str, Any]) -> str:
    versions = data.get("versions")
    if isinstance(versions, dict) and "weft" in versions:
        return f" of weft {versions['weft']}"
    return ""


def _offset_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    """Pieces must follow the header without gaps, and every byte of a file must belong to one
    piece.
    """
    where = str(path / MANIFEST)
    ranges_of_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, stored in manifest.tensors.items():
        for piece in stored.pieces:
            num_bytes = stored.num_bytes(piece)
            problem = _piece_problem(manifest, stored, piece, num_bytes=num_bytes)
            if problem is not None:
                yield Fault(
                    where, f"tensor {name!r} in {piece.file}: {problem}", fix=FIX_USE_ANOTHER
                )
                return
            ranges_of_file[piece.file].append((piece.at, piece.at + num_bytes))
        num_entries = sum(piece.box.size for piece in stored.pieces)
        if num_entries < math.prod(stored.shape):
            what = f"the pieces of tensor {name!r} do not cover it"
            yield Fault(where, what, fix=FIX_USE_ANOTHER)
            return
    for name, file in manifest.files.items():
        end = file.header_bytes
        for start, stop in sorted(ranges_of_file[name]):
            end = stop if start == end else -1
        if end != file.num_bytes:
            yield Fault(where, f"the pieces in {name} do not fill it", fix=FIX_USE_ANOTHER)


def _piece_problem(
    manifest: Manifest, stored: Stored, piece: Piece, *, num_bytes: int
) -> str | None:
    num_dims = len(stored.shape)
    if not len(piece.lo) == len(piece.hi) == num_dims:
        return f"a piece with {len(piece.lo)} and {len(piece.hi)} dims of a tensor with {num_dims}"
    for lo, hi, length in zip(piece.lo, piece.hi, stored.shape, strict=True):
        if not lo < hi <= length:
            return f"a piece outside the tensor, {piece.lo} to {piece.hi} of {stored.shape}"
    if piece.file not in manifest.files:
        return "the manifest does not list this file"
    num_blocks = -(-num_bytes // manifest.block_bytes)
    if len(piece.crc32) != num_blocks:
        return f"{len(piece.crc32)} checksums for {num_bytes} bytes"
    return None


def _length_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    """Data files that are missing or have another length than the manifest says."""
    for name, file in sorted(manifest.files.items()):
        try:
            status = (path / name).stat()
            length = status.st_size
        except OSError as error:
            what = f"missing: {error.strerror}; it holds {_content(manifest, name)}"
            yield Fault(str(path / name), what, fix=FIX_USE_ANOTHER)
            continue
        if os.path.islink(path / name) or not stat.S_ISREG(status.st_mode):
            yield Fault(str(path / name), "is no regular file", fix=FIX_USE_ANOTHER)
        elif length != file.num_bytes:
            difference = "cut short" if length < file.num_bytes else "longer than it was written"
            what = f"{difference}; it holds {_content(manifest, name)}"
            yield Fault(
                str(path / name),
                what,
                got=f"{length} bytes",
                need=f"{file.num_bytes}",
                fix=FIX_USE_ANOTHER,
            )


def _content(manifest: Manifest, file: str) -> str:
    """What a data file holds: the first tensor's name and the number of others."""
    names = []
    for name, stored in sorted(manifest.tensors.items()):
        if any(piece.file == file for piece in stored.pieces):
            names.append(name)
    if not names:
        return "nothing"
    if len(names) == 1:
        return repr(names[0])
    return f"{names[0]!r} and {len(names) - 1} more tensors"
