"""What a data file holds, by its name and its first bytes: text, rows of JSON, CSV or parquet, tokens; compressed or not."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from weft.data.files import (
    COMPRESSED_SUFFIXES,
    KEY,
    READ_ERRORS,
    ROW_SUFFIXES,
    STDLIB,
    TOKEN_SUFFIX,
    Compression,
    inner_name,
    left_out,
    read_fault,
)
from weft.errors import DataError, Fault, counted
from weft.small_files import UnreadableFile, open_regular

Kind = Literal["text", "json_lines", "json_array", "csv", "tsv", "parquet", "tar", "tokens"]
BYTE_ORDER_MARK = codecs.BOM_UTF8
HEAD_BYTES = 2**13
"""Bytes at the start of a file, decompressed, that say what it holds."""
MAX_CONTROL_SHARE = 0.1
"""Control characters in text, of all; more of them are binary data."""
CONTROLS = bytes(number for number in range(32) if number not in b"\t\n\v\f\r\b\x1a\x1b")
MAX_LEFT_OUT = 4
"""Suffixes of files that are left out, which a line names."""

LABELS: Mapping[Kind, tuple[str, str]] = {
    "text": ("text file", "text files"),
    "json_lines": ("JSONL", "JSONL"),
    "json_array": ("JSON array", "JSON arrays"),
    "csv": ("CSV", "CSV"),
    "tsv": ("TSV", "TSV"),
    "parquet": ("parquet", "parquet"),
    "tar": ("tar of samples", "tars of samples"),
    "tokens": ("token file", "token files"),
}
MAGIC: Mapping[bytes, Compression] = {
    b"\x1f\x8b": "gz",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zst",
}
"""First bytes of compressed files (RFC 1952, the xz format, bzip2, RFC 8878)."""
PARQUET_MAGIC = b"PAR1"
BINARY: Sequence[tuple[int, bytes, str]] = (
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"%PDF-", "a PDF"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"7z\xbc\xaf", "a 7z archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"SQLite format 3\0", "a SQLite database"),
    (0, b"ARROW1\0", "an Arrow file"),
    (0, b"Obj\x01", "an Avro file"),
    (0, b"\x7fELF", "a program"),
    (0, codecs.BOM_UTF32_LE, "UTF-32 text"),
    (0, codecs.BOM_UTF16_LE, "UTF-16 text"),
    (0, codecs.BOM_UTF16_BE, "UTF-16 text"),
    (0, codecs.BOM_UTF32_BE, "UTF-32 text"),
    (0, PARQUET_MAGIC, "a compressed parquet file"),
)
"""(place, bytes there, name) of files that hold no text as UTF-8."""


@dataclass(frozen=True)
class FileFormat:
    """What a file holds.

    Attributes:
        has_mark: whether a UTF-8 byte-order mark stands before the content, which is skipped.
        is_utf8: False for text whose first bytes are none; only the tokenizer `bytes` reads it.
    """

    kind: Kind
    compression: Compression | None = None
    has_mark: bool = False
    is_utf8: bool = True

    @property
    def remark(self) -> str:
        """What is said of it beside its kind: ` (zst)`, ` (not UTF-8)`."""
        remarks = [self.compression or "", "" if self.is_utf8 else "not UTF-8"]
        text = ", ".join(filter(None, remarks))
        return f" ({text})" if text else ""

    @property
    def is_plain_text(self) -> bool:
        """Whether the bytes of the file, after its byte-order mark, are its text."""
        return self.kind == "text" and self.compression is None

    @property
    def num_mark_bytes(self) -> int:
        """Bytes before the content."""
        return len(BYTE_ORDER_MARK) if self.has_mark else 0


def formats_of(source: str, files: Sequence[Path]) -> tuple[FileFormat, ...]:
    """What the files of a source hold; Python's own sources are text in UTF-8 (PEP 3120).

    Raises:
        DataError: as `format_of`.
    """
    if source == STDLIB:
        return (FileFormat("text"),) * len(files)
    return tuple(map(format_of, files))


def format_of(file: Path) -> FileFormat:
    """What a file holds.

    Raises:
        DataError: it cannot be read, or is binary data.
    """
    name = inner_name(file)
    if file.suffix.lower() == TOKEN_SUFFIX:
        return FileFormat("tokens")
    with guarded_read(file), open_regular(file) as raw:
        start = raw.read(HEAD_BYTES)
        raw.seek(0)
        compression = compression_of(file, start)
        if compression is None:
            head = start
        else:
            # the name says no more than the compression: what is inside decides how rows are read
            head = _decompressed(raw, compression).read(HEAD_BYTES)
    has_mark = head.startswith(BYTE_ORDER_MARK)
    kind = ROW_SUFFIXES.get(Path(name).suffix, "text")
    if compression is None and (kind == "parquet" or head.startswith(PARQUET_MAGIC)):
        return FileFormat("parquet")
    what = binary_kind(head)
    if kind == "tar" and "tar" in what:
        return FileFormat("tar", compression)
    if what:
        raise DataError(_binary_fault(file, what))
    if kind == "json_lines":
        content = head.removeprefix(BYTE_ORDER_MARK).lstrip()
        kind = "json_array" if content.startswith(b"[") else "json_lines"
    is_utf8 = kind != "text" or _is_utf8(head)
    return FileFormat(cast(Kind, kind), compression, has_mark, is_utf8)


def _is_utf8(head: bytes) -> bool:
    """Whether the bytes begin a text in UTF-8; its last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def compression_of(file: Path, start: bytes) -> Compression | None:
    """How a file is compressed: as its name says, else as its first bytes do."""
    by_name = COMPRESSED_SUFFIXES.get(file.suffix.lower())
    by_magic = (name for magic, name in MAGIC.items() if start.startswith(magic))
    return by_name or next(by_magic, None)


def binary_kind(head: bytes) -> str:
    """What a file with these first bytes is, if it is no text; "" for text in any 8-bit encoding."""
    for place, magic, name in BINARY:
        if head.startswith(magic, place):
            return name
    zeros = sorted((head[::2].count(0), head[1::2].count(0)))
    if zeros[0] == 0 and zeros[1] > len(head) // 4:
        return "UTF-16 text without a byte-order mark"
    num_controls = len(head) - len(head.translate(None, CONTROLS))
    if 0 in head or num_controls > MAX_CONTROL_SHARE * len(head):
        return "binary data"
    return ""


def _binary_fault(file: Path, what: str) -> Fault:
    fix = "leave it out, or name a file that holds text"
    if "UTF-" in what:
        encoding = what.partition(" ")[0]
        new = file.with_name(f"utf8-{file.name}")
        fix = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(file))} > {shlex.quote(str(new))}"
    elif "archive" in what:
        fix = "unpack it, and name the files in it; tars of samples end in .tar"
    elif "parquet" in what:
        fix = "decompress it: parquet files are compressed inside"
    need = "text (UTF-8), JSON lines, a JSON array, CSV, TSV or parquet"
    return Fault(KEY, f"{file} is no text", got=what, need=need, fix=fix)


@contextmanager
def open_content(file: Path) -> Iterator[OpenContent]:
    """Open the content of a file: decompressed, without a byte-order mark.

    Raises:
        UnreadableFile: as `open_regular`.
        DataError: it is compressed by a library that is not installed.
    """
    with open_regular(file) as raw:
        start = raw.read(HEAD_BYTES)
        raw.seek(0)
        compression = compression_of(file, start)
        source = raw if compression is None else _decompressed(raw, compression)
        content = io.BufferedReader(cast(Any, source))
        if content.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            content.read(len(BYTE_ORDER_MARK))
        yield OpenContent(content, raw)


@dataclass(frozen=True)
class OpenContent:
    """The content of an open file, and the file as it is stored."""

    content: IO[bytes]
    raw: IO[bytes]

    @property
    def at(self) -> int:
        """Bytes of the file read so far."""
        return self.raw.tell()


def _decompressed(raw: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "zst":
        return cast(IO[bytes], _import_pyarrow().CompressedInputStream(raw, "zstd"))
    openers: Mapping[str, Callable[[IO[bytes]], Any]] = {
        "gz": gzip.open,
        "xz": lzma.open,
        "bz2": bz2.open,
    }
    return cast(IO[bytes], openers[compression](raw))


def _import_pyarrow() -> Any:
    try:
        import pyarrow  # an extra, and 100 ms to import
    except ImportError:
        fix = "pip install 'weft-train[data]', or decompress them: unzstd FILE"
        what = ".zst files need pyarrow, which is not installed"
        raise DataError(Fault(KEY, what, fix=fix)) from None
    return pyarrow


@contextmanager
def guarded_read(file: Path) -> Iterator[None]:
    """Raise what reading a file raises as the fault of that file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        yield
    except UnreadableFile as error:
        why = f"{error.what}: {error.got}" if error.got else error.what
        is_special = file.exists() and not file.is_file()
        fix = f"{why}: {'copy its content into a file' if is_special else 'check it'}"
        fault = Fault(KEY, "cannot read the file", got=repr(str(file)), fix=fix)
        raise DataError(fault) from None
    except READ_ERRORS as error:
        raise DataError(read_fault(file, error)) from None


def read_as(source: str, formats: Iterable[FileFormat]) -> str:
    """What the files of a source were read as, and which of its folder are left out: `3 text files,
    1 JSONL (zst); left out: 1 png`.
    """
    numbers = Counter((each.kind, each.remark) for each in formats)
    text = ", ".join(
        f"{number:,} {LABELS[kind][number > 1]}{remark}"
        for (kind, remark), number in numbers.items()
    )
    suffixes = sorted(Counter(left_out(source)).items(), key=lambda item: (-item[1], item[0]))
    if not suffixes:
        return text
    named = [f"{number:,} {suffix}" for suffix, number in suffixes[:MAX_LEFT_OUT]]
    num_others = sum(number for _, number in suffixes[MAX_LEFT_OUT:])
    if num_others:
        named.append(counted(num_others, "other"))
    return f"{text}; left out: {', '.join(named)}"
