"""Commit a checkpoint: merge the manifests of all ranks, check coverage, flush, and rename the temporary folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError

from weft import __version__
from weft.checkpoint.coverage import coverage_flaw
from weft.checkpoint.data_file import BLOCK_BYTES
from weft.checkpoint.disk import disk_error, free_bytes, sync_folder, write_whole
from weft.checkpoint.format import (
    DIGEST,
    MANIFEST,
    DataFile,
    Facts,
    Manifest,
    RankManifest,
    Stored,
    Versions,
    digest_text,
    rank_manifest_name,
)
from weft.checkpoint.kept import kept_folder_of
from weft.checkpoint.tensor_digest import MODULUS
from weft.checkpoint.write import merge_stored
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault


def commit(tmp: Path, final: Path, facts: Facts, *, ranks: int) -> Manifest:
    """Turn the files of `ranks` ranks in `tmp` into the checkpoint `final`; one rank calls it when
    all have written.

    Raises:
        CheckpointError: `final` exists, a rank's file is missing, the pieces do not cover the
            tensors, or a disk error occurs. Only `tmp` has been changed, and it is removed.
    """
    try:
        _check_absent(final)
        manifest = _merged_manifest(tmp, facts, ranks=ranks)
        text = manifest.to_json().encode()
        free = free_bytes(tmp)
        try:
            _publish(tmp, final, text, ranks=ranks)
        except OSError as error:
            raise disk_error(error, final, need_bytes=len(text), free=free) from error
    except BaseException:
        discard(tmp)
        raise
    return manifest


def discard(tmp: Path) -> None:
    """Remove the files of a checkpoint that is not committed."""
    shutil.rmtree(tmp, ignore_errors=True)


def _check_absent(final: Path) -> None:
    if final.exists() and kept_folder_of(final) is None:
        what = "a checkpoint is there already, and it is not overwritten"
        raise CheckpointError(Fault(str(final), what, fix="choose another out, or move it away"))


def _merged_manifest(tmp: Path, facts: Facts, *, ranks: int) -> Manifest:
    tensors: dict[str, Stored] = {}
    files: dict[str, DataFile] = {}
    digests: dict[str, int] = {}
    for rank in range(ranks):
        local = _read_rank_manifest(tmp, rank)
        files.update(local.files)
        for name, stored in local.tensors.items():
            tensors[name] = merge_stored(name, tensors.get(name), stored)
        for name, digest in local.digests.items():
            digests[name] = (digests.get(name, 0) + digest) % MODULUS
    _check_coverage(tensors)
    return Manifest(
        versions=Versions(weft=__version__, torch=torch.__version__),
        facts=facts,
        block_bytes=BLOCK_BYTES,
        files=files,
        tensors=tensors,
        digests=digests,
    )


def _read_rank_manifest(tmp: Path, rank: int) -> RankManifest:
    try:
        manifest = RankManifest.model_validate_json((tmp / rank_manifest_name(rank)).read_bytes())
        for name, file in manifest.files.items():
            length = (tmp / name).stat().st_size
            if length != file.num_bytes:
                raise CheckpointError(
                    Fault(str(tmp / name), "shorter than what was written", got=str(length))
                )
    except FileNotFoundError as error:
        what = f"rank {rank} has written no file here"
        missing = Path(str(error.filename)).name
        fix = "all ranks need the same out folder: on several hosts, a shared one"
        raise CheckpointError(Fault(str(tmp), what, need=missing, fix=fix)) from None
    except OSError as error:
        what = f"what rank {rank} has written cannot be read"
        raise CheckpointError(Fault(str(tmp), what, got=error.strerror or str(error))) from error
    except ValidationError as error:
        what = f"what rank {rank} has written is damaged"
        got = error.errors()[0]["msg"]
        raise CheckpointError(Fault(str(tmp / rank_manifest_name(rank)), what, got=got)) from error
    return manifest


def _check_coverage(tensors: Mapping[str, Stored]) -> None:
    faults = []
    for name, stored in tensors.items():
        boxes = [piece.box for piece in stored.pieces]
        flaw = coverage_flaw(Box.whole(stored.shape), boxes)
        if flaw is not None:
            faults.append(Fault(name, f"the pieces of all ranks do not cover the tensor: {flaw}"))
    if faults:
        raise CheckpointError(*faults)


def _publish(tmp: Path, final: Path, text: bytes, *, ranks: int) -> None:
    """Flush everything in `tmp` to the disk, then rename it: the rename is the commit."""
    for rank in range(ranks):
        (tmp / rank_manifest_name(rank)).unlink()
    write_whole(tmp / MANIFEST, text)
    write_whole(tmp / DIGEST, digest_text(text).encode())
    # Names and contents are on the disk before the rename makes them a checkpoint.
    sync_folder(tmp)
    if kept_folder_of(final) is not None:
        final.unlink()  # the link to a state in memory gives way to the one on the disk
    tmp.rename(final)  # fails if a non-empty folder of this name has appeared meanwhile
    sync_folder(final.parent)
    sync_folder(final.parent.parent)
