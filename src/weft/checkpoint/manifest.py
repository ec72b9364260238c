"""Owns reading a manifest and checking all that it can tell by itself: checksum, format, lengths, places. Pure: no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from operator import le, lt
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.checkpoint.format import DIGEST, FORMAT, MANIFEST, Manifest, Piece, Stored, digest_text
from weft.errors import CheckpointError, Fault


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, after every check that needs no byte of a tensor.

    Raises:
        CheckpointError: not a checkpoint, a flipped bit, unreadable, of a newer format, or data files missing or cut short.
    """
    text = _checked_bytes(path)
    manifest = _parsed(path, text)
    if faults := tuple(_place_faults(path, manifest)) or tuple(_length_faults(path, manifest)):
        raise CheckpointError(*faults)
    return manifest


def _checked_bytes(path: Path) -> bytes:
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_no_checkpoint(path)) from None
    except OSError as error:
        raise CheckpointError(Fault(str(path / MANIFEST), f"cannot be read: {error.strerror}")) from None
    try:
        digest = (path / DIGEST).read_bytes()
    except OSError as error:
        what = f"the manifest's checksum cannot be read: {error.strerror}"
        raise CheckpointError(Fault(str(path / DIGEST), what, fix=OTHER)) from None
    if digest != (need := digest_text(text).encode()):
        got, want = (repr(line[:12].decode(errors="replace")) for line in (digest, need))
        what = f"{MANIFEST} and its checksum do not agree: one of the two is damaged"
        raise CheckpointError(Fault(str(path / MANIFEST), what, f"checksum {got} in {DIGEST}", want, OTHER))
    return text


OTHER = "take an older checkpoint, or resume = auto"


def _no_checkpoint(path: Path) -> Fault:
    inside = [*path.glob(f"step-*/{MANIFEST}"), *path.glob(f"ckpt/step-*/{MANIFEST}")]
    newest = max((entry.parent for entry in inside), default=None, key=lambda entry: (len(entry.name), entry.name))
    fix = f"give one of the checkpoints in it: {newest}" if newest else "give OUT/ckpt/step-NNNNNN of a run"
    if not path.exists():
        return Fault(str(path), "no such checkpoint", fix=fix)
    what = f"no {MANIFEST} in it" if path.is_dir() else "it is no folder"
    return Fault(str(path), f"not a checkpoint: {what}", fix=fix)


def _parsed(path: Path, text: bytes) -> Manifest:
    where = str(path / MANIFEST)
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise CheckpointError(Fault(where, f"no JSON: {error}", fix=OTHER)) from None
    found = data.get("format") if isinstance(data, dict) else None
    if not isinstance(found, int):
        raise CheckpointError(Fault(where, "not a checkpoint of weft: the manifest names no format"))
    if found > FORMAT:
        need, fix = f"{FORMAT} or older", "use the newer weft that wrote it"
        raise CheckpointError(Fault(where, "a newer format", f"format {found}{_writer(data)}", need, fix))
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(Fault(where, f"{key}: {first['msg']}", fix=OTHER)) from None


def _writer(data: dict[str, Any]) -> str:
    versions = data.get("versions")
    return f" of weft {versions['weft']}" if isinstance(versions, dict) and "weft" in versions else ""


def _place_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    """Pieces lie behind the header one by one, and every byte of a file belongs to one."""
    ends: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, stored in manifest.tensors.items():
        for piece in stored.pieces:
            num_bytes = stored.num_bytes(piece)
            if what := _piece_fault(manifest, stored, piece, num_bytes=num_bytes):
                yield Fault(str(path / MANIFEST), f"tensor {name!r} in {piece.file}: {what}", fix=OTHER)
                return
            ends[piece.file].append((piece.at, piece.at + num_bytes))
    for name, file in manifest.files.items():
        at = file.header_bytes
        for start, stop in sorted(ends[name]):
            at = stop if start == at else -1
        if at != file.num_bytes:
            yield Fault(str(path / MANIFEST), f"the pieces in {name} do not fill it", fix=OTHER)


def _piece_fault(manifest: Manifest, stored: Stored, piece: Piece, *, num_bytes: int) -> str | None:
    if not len(piece.lo) == len(piece.hi) == len(stored.shape):
        return f"a piece with {len(piece.lo)} and {len(piece.hi)} dims of a tensor with {len(stored.shape)}"
    if not (all(map(lt, piece.lo, piece.hi)) and all(map(le, piece.hi, stored.shape))):
        return f"a piece outside the tensor, {piece.lo} to {piece.hi} of {stored.shape}"
    if piece.file not in manifest.files:
        return "a file that the manifest does not list"
    if len(piece.crc32) != -(-num_bytes // manifest.block_bytes):
        return f"{len(piece.crc32)} checksums for {num_bytes} bytes"
    return None


def _length_faults(path: Path, manifest: Manifest) -> Iterator[Fault]:
    for name, file in sorted(manifest.files.items()):
        try:
            length = (path / name).stat().st_size
        except OSError as error:
            what = f"missing: {error.strerror}; it holds {_first_tensor(manifest, name)}"
            yield Fault(str(path / name), what, fix=OTHER)
            continue
        if length != file.num_bytes:
            what = "cut short" if length < file.num_bytes else "longer than it was written"
            what = f"{what}; it holds {_first_tensor(manifest, name)}"
            yield Fault(str(path / name), what, f"{length} bytes", f"{file.num_bytes}", OTHER)


def _first_tensor(manifest: Manifest, file: str) -> str:
    names = sorted(
        name for name, stored in manifest.tensors.items() if any(piece.file == file for piece in stored.pieces)
    )
    return (
        f"{names[0]!r} and {len(names) - 1} more tensors" if len(names) > 1 else repr(names[0]) if names else "nothing"
    )
