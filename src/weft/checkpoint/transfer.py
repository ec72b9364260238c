"""Files of checkpoints between hosts that share no folder: collect them on the host of rank 0, distribute them to all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.disk import sync_folder
from weft.checkpoint.folder import temporary_path
from weft.checkpoint.format import DIGEST, MANIFEST, data_file_name, rank_manifest_name
from weft.checkpoint.manifest import read_manifest
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text, broadcast_text, raise_on_all_ranks
from weft.errors import CheckpointError, Fault

CHUNK_BYTES = 4 * 2**20
MAX_GATHERED_BYTES = 256 * 2**20
"""Memory for one chunk of every rank."""

# Note [Hosts without a shared folder]
#     save     every rank writes its file to its own disk; those that rank 0 does not see are sent to it in chunks, then
#              rank 0 commits as usual: the only checkpoint is on its host
#     resume   the host with the newest checkpoint selects it; the others get a copy in the same place, and every rank reads
#              what it needs, on any layout
# An all-gather brings the chunks to rank 0. It takes as long as a gather: the link of rank 0 is the limit of both.


def ranks_without_folder(comm: Comm, folder: Path) -> tuple[int, ...]:
    """Ranks that do not see the files that rank 0 writes into `folder`; none if it cannot write
    there, which a save reports. Every rank must call it.
    """
    name = broadcast_text(comm, f".probe-{secrets.token_hex(8)}")
    probe = folder / name
    if comm.rank == 0:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    comm.barrier_world()
    is_seen = _has_file(probe)
    texts = all_gather_text(comm, "y" if is_seen else "n")
    if texts[0] == "n":
        return ()
    if comm.rank == 0:
        # Behind the gather: until then every rank has looked.
        probe.unlink(missing_ok=True)
    return tuple(rank for rank, text in enumerate(texts) if text == "n")


def collect(comm: Comm, tmp: Path, ranks: Sequence[int]) -> None:
    """Send the files of `ranks` in `tmp` to rank 0, and remove them there; every rank must call it.

    Raises:
        CheckpointError: on all ranks, if one cannot read or write a file.
    """
    makers = (data_file_name, rank_manifest_name)
    for make_name in makers:
        if comm.rank in ranks:
            own = tmp / make_name(comm.rank)
        else:
            own = None
        if comm.rank == 0:
            targets = {rank: tmp / make_name(rank) for rank in ranks}
        else:
            targets = {}
        _collect_files(comm, own, targets)
    if comm.rank in ranks:
        for make_name in makers:
            with suppress(OSError):
                (tmp / make_name(comm.rank)).unlink()
        with suppress(OSError):
            tmp.rmdir()


def _collect_files(comm: Comm, own: Path | None, targets: dict[int, Path]) -> None:
    """One file of each sending rank, chunk by chunk."""
    sizes: list[int] = []

    def measure() -> None:
        with file_errors(own):
            num_bytes = 0
            if own is not None:
                num_bytes = own.stat().st_size
            sizes.append(num_bytes)

    raise_on_all_ranks(comm, measure)
    own_size = str(sizes[0])
    lengths = [int(text) for text in all_gather_text(comm, own_size)]
    longest = max(lengths)
    most_a_rank = MAX_GATHERED_BYTES // comm.mesh.size
    chunk = max(1, min(CHUNK_BYTES, most_a_rank))
    for start in range(0, longest, chunk):
        size = min(chunk, longest - start)
        row = read_on_all_ranks(comm, own, start, size)
        own_rows = row.unsqueeze(0).to(comm.device)
        rows = comm.all_gather_world(own_rows).cpu()
        append = partial(_append, rows, targets, lengths, start)
        raise_on_all_ranks(comm, append)


def _append(rows: Tensor, targets: dict[int, Path], lengths: Sequence[int], start: int) -> None:
    for rank, path in targets.items():
        num_bytes = min(rows.shape[1], lengths[rank] - start)
        if num_bytes <= 0:
            continue
        with file_errors(path), path.open("xb" if start == 0 else "ab") as file:
            file.write(rows[rank, :num_bytes].numpy().data)
            if start + num_bytes == lengths[rank]:
                file.flush()
                os.fsync(file.fileno())


def distribute(comm: Comm, path: Path, *, root: int = 0) -> None:
    """Copy the checkpoint of rank `root` to every host that does not have it; every rank must call
    it.

    Raises:
        CheckpointError: on all ranks, if it cannot be read or a copy cannot be written.
    """
    digests = all_gather_text(comm, _digest(path))
    missing = [digest != digests[root] for digest in digests]
    if not any(missing):
        return
    names: list[str] = []

    def list_files() -> None:
        if comm.rank == root:
            names.extend([*read_manifest(path).files, MANIFEST, DIGEST])

    raise_on_all_ranks(comm, list_files)
    name_list = all_gather_text(comm, "\n".join(names))[root].split("\n")
    # A name that no leftover has: of the ranks of a host the one that makes the folder writes it.
    nonce = broadcast_text(comm, secrets.token_hex(8))
    copy = temporary_path(path).with_name(f"{temporary_path(path).name}-{nonce}")
    receives: list[bool] = []

    def make_folder() -> None:
        with file_errors(copy):
            receives.append(missing[comm.rank] and _is_first(copy))

    raise_on_all_ranks(comm, make_folder)
    is_receiver = receives[0]
    for name in name_list:
        target = copy / name if is_receiver else None
        distribute_file(comm, path / name, target, root=root)

    def publish() -> None:
        if is_receiver:
            with file_errors(path):
                sync_folder(copy)
                if path.exists():
                    shutil.rmtree(path)  # another one of this name, of an earlier run of this host
                copy.rename(path)

    raise_on_all_ranks(comm, publish)
    # Ranks that wrote nothing read the folder next.
    comm.barrier_world()


def _is_first(copy: Path) -> bool:
    """Whether this rank is the first that writes into this folder."""
    try:
        copy.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def distribute_file(comm: Comm, source: Path, target: Path | None, *, root: int) -> None:
    """One file of rank `root` to all ranks that have a target, chunk by chunk."""
    sizes: list[int] = []

    def measure() -> None:
        with file_errors(source):
            sizes.append(source.stat().st_size if comm.rank == root else 0)

    raise_on_all_ranks(comm, measure)
    size = int(all_gather_text(comm, str(sizes[0]))[root])
    coord = comm.mesh.coord(root)
    for start in range(0, size, CHUNK_BYTES):
        num_bytes = min(CHUNK_BYTES, size - start)
        own = source if comm.rank == root else None
        # All ranks call the broadcasts, with zeros in place of what they do not have.
        chunk = read_on_all_ranks(comm, own, start, num_bytes).to(comm.device)
        for axis in comm.mesh.wide_axes:
            comm.broadcast_(chunk, axis, root=coord[axis])  # at the end all have that of `root`
        raise_on_all_ranks(comm, partial(_write_chunk, chunk.cpu(), target))


def _write_chunk(chunk: Tensor, target: Path | None) -> None:
    if target is not None:
        with file_errors(target), target.open("ab") as file:
            file.write(chunk.numpy().data)
            file.flush()
            os.fsync(file.fileno())


def read_on_all_ranks(comm: Comm, path: Path | None, start: int, num_bytes: int) -> Tensor:
    """A part of a file, filled up with zeros; only zeros without a file. Every rank must call it.

    Raises:
        CheckpointError: on all ranks, before one waits for another's part, if one cannot read its own.
    """
    chunk = torch.zeros(num_bytes, dtype=torch.uint8)

    def read() -> None:
        if path is not None:
            with file_errors(path), path.open("rb") as file:
                file.seek(start)
                file.readinto(chunk.numpy().data)

    raise_on_all_ranks(comm, read)
    return chunk


def _digest(path: Path) -> str:
    """The text that identifies a checkpoint; "" if there is none."""
    try:
        return (path / DIGEST).read_text(encoding="utf-8")
    except OSError:
        return ""


def _has_file(path: Path) -> bool:
    """Whether a file is there, asking a network file system for the names and not a cache."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


@contextmanager
def file_errors(path: Path | None) -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        got = error.strerror or str(error)
        raise CheckpointError(Fault(str(path), "cannot be sent between hosts", got=got)) from error
