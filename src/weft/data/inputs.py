"""Inputs of a preparation: files, and data sets of the Hugging Face hub, found by name and read as documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from weft.data.documents import ReadOptions, TextChunk, documents_of_rows, read_documents
from weft.data.files import KEY, find_files, is_token_file
from weft.data.formats import format_of, read_as
from weft.data.given_rows import GivenRows
from weft.data.hub import SCHEME, HubDataset
from weft.data.streams import RemoteFile, is_url, make_room, remote_files
from weft.errors import DataError, Fault, counted

Input = Path | HubDataset | GivenRows | RemoteFile


def find_inputs(sources: Sequence[str]) -> tuple[Input, ...]:
    """All files and data sets that the sources name, each once, in their order.

    Raises:
        DataError: a source that names none, or token files.
    """
    inputs: dict[Input, None] = {}
    for source in sources:
        if source.startswith(SCHEME) and not is_url(source):
            inputs[HubDataset.parse(source)] = None
            continue
        if is_url(source):
            inputs.update(dict.fromkeys(remote_files(source)))
            continue
        files = find_files(source)
        inputs.update(dict.fromkeys(files))
    for file in inputs:
        path = file.path if isinstance(file, RemoteFile) else file
        if isinstance(path, Path) and is_token_file(path):
            raise DataError(
                Fault(
                    KEY,
                    "holds tokens already",
                    got=str(file),
                    need="text, JSON, CSV, TSV or parquet",
                    fix="leave it out, or name the texts that it was made from",
                )
            )
    return tuple(inputs)


def read_all(inputs: Iterable[Input], options: ReadOptions) -> Iterator[TextChunk]:
    """The chunks of all inputs; `at` counts from the beginning of the first."""
    bytes_before = 0
    for source in inputs:
        with ExitStack() as stack:
            match source:
                case HubDataset():
                    chunks = source.documents(options)
                case GivenRows():
                    chunks = documents_of_rows(source.rows(), options)
                case _:
                    path = stack.enter_context(local_file(source))
                    chunks = read_documents(path, options)
            for chunk in chunks:
                at = bytes_before + chunk.at
                yield replace(chunk, at=at)
        bytes_before += num_bytes_of(source)


@contextmanager
def local_file(source: Path | RemoteFile) -> Iterator[Path]:
    """The file itself; of a URL the one in the cache, in which older ones make room for it. It stays
    there inside the block.
    """
    if isinstance(source, Path):
        yield source
        return
    with source.in_use() as path:
        make_room(keep=frozenset((path,)))
        yield path


def inputs_read_as(sources: Sequence[str], inputs: Sequence[Input]) -> str:
    """What the sources are read as, and what is left out."""
    given = [f"rows of {source}" for source in inputs if isinstance(source, GivenRows)]
    if given:
        return "; ".join(given)
    by_source = []
    for source in sources:
        if source.startswith(SCHEME) and not is_url(source):
            by_source.append(f"rows of {source}")
        elif is_url(source):
            by_source.append(counted(len(remote_files(source)), "file"))
        else:
            by_source.append(read_as(source, map(format_of, find_files(source))))
    return "; ".join(by_source)


def num_bytes_of(source: Input) -> int:
    """Size of an input, for the progress."""
    return source.stat().st_size if isinstance(source, Path) else source.num_bytes
