"""The identity of a run's data files: taken once they are verified, compared before every start of ranks.

Inode, size and time of the last change are compared first; the checksum of blocks (see
`weft.data.verify`) is only computed again for a file of which one of them has changed, so that a file
that was touched or copied back passes, and one with other content does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.data.arrays import array_files
from weft.data.chat_template import BUILT_IN, TOKENIZER_CONFIG
from weft.data.chat_template import FILE as TEMPLATE_FILE
from weft.data.files import KEY
from weft.data.images import find_pair
from weft.data.prepared import META, SPLITS, prepared_of, sources_of
from weft.data.streams import source_files
from weft.data.tokenizer import BYTES, FILE, open_tokenizer
from weft.data.tokens import VERIFIED_BYTES
from weft.data.verify import block_checksums
from weft.errors import DataError, Fault

MAX_CHECKSUM_BYTES = 8 * VERIFIED_BYTES
"""Bytes of all files whose checksums are taken at the start; of files beyond, a change of inode, size
or time is a change.
"""
NO_FILES = ("stdlib", "digits")
SUFFIXES = ("bin", "idx", "mask")


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from another one in its place.

    Attributes:
        stat: device, inode, bytes, and time of the last change, ns; empty where there is no file.
        checksums: CRC-32 of blocks; None where they were not taken.
    """

    file: Path
    stat: tuple[int, ...]
    checksums: tuple[int, ...] | None

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.stat[2] if self.stat else 0

    def change(self) -> str:
        """How the file differs now; "" where it holds what it did."""
        stat = _stat(self.file)
        # inode and time alike: nothing of it is read, as before most starts
        if stat == self.stat:
            return ""
        if not stat:
            return "it is gone"
        if stat[2] != self.num_bytes:
            return f"{stat[2]:,} bytes, not {self.num_bytes:,}"
        if self.checksums is None:
            return "another inode or time of change"
        try:
            return "" if block_checksums(self.file) == self.checksums else "another content"
        except OSError as error:
            return error.strerror or str(error)


@dataclass(frozen=True)
class DataIdentity:
    """The files that a run reads."""

    files: tuple[FileIdentity, ...]

    @staticmethod
    def of(
        data: DataConfig, *, model: ModelConfig, evaluated_on: str | None = None
    ) -> DataIdentity:
        """The identity of the files of a run's data, as they are now.

        Args:
            model: that reads the data.
            evaluated_on: `eval.source`.

        Raises:
            DataError: as `find_files`.
        """
        sources = [*sources_of(data), *([evaluated_on] if evaluated_on else [])]
        files = [file for source in sources for file in _files_of(source, model)]
        if data.tokenizer != BYTES:
            tokenizer = Path(open_tokenizer(data.tokenizer).name)
            beside = (tokenizer.with_name(name) for name in (TEMPLATE_FILE, TOKENIZER_CONFIG))
            files += [tokenizer, *(file for file in beside if file.exists())]
        if data.chat_template and data.chat_template not in BUILT_IN:
            files.append(Path(data.chat_template).expanduser())
        return DataIdentity(tuple(_identities(dict.fromkeys(files))))

    def check(self) -> None:
        """Check that no file has changed.

        Raises:
            DataError: with every file that has.
        """
        changes = ((each.file, each.change()) for each in self.files)
        faults = [
            Fault(
                KEY,
                f"{file} has changed since the run started",
                got=change,
                fix="put the file back and resume, or start a new run",
            )
            for file, change in changes
            if change
        ]
        if faults:
            raise DataError(*faults)


def _files_of(source: str, model: ModelConfig) -> Iterator[Path]:
    """The files that are read of a source; none of what comes with Python and its packages."""
    if model.kind == "arrays":
        yield from array_files(source, model.input_specs())
        return
    if source in NO_FILES:
        return
    prepared = prepared_of(source)
    if prepared is not None:
        names = [META, FILE, *(f"{split}.{each}" for split in SPLITS for each in SUFFIXES)]
        files = (prepared.folder / name for name in names)
        yield from (file for file in files if file.exists())
    elif model.kind == "images":
        yield from find_pair(Path(source).expanduser())
    else:
        yield from source_files(source)


def _identities(files: Iterable[Path]) -> Iterator[FileIdentity]:
    num_left = MAX_CHECKSUM_BYTES
    for file in files:
        stat = _stat(file)
        num_read = min(stat[2], VERIFIED_BYTES) if stat else 0
        # the first files are checked by content, whichever size the others have: a start takes bounded time
        num_left -= num_read
        checksums = block_checksums(file) if stat and num_left >= 0 else None
        yield FileIdentity(file, stat, checksums)


def _stat(file: Path) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
