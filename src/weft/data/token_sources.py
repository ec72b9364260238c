"""Sources of tokens: a prepared folder, .bin files, text files as bytes, and small texts tokenized in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from weft.config.rules.sections import vocabulary_holds
from weft.config.schema import DataConfig
from weft.data.document_bounds import Ints
from weft.data.documents import ReadOptions, TextChunk, read_documents
from weft.data.files import KEY, STDLIB, TOKEN_SUFFIX, is_token_file
from weft.data.formats import formats_of, read_as
from weft.data.prepared import (
    PREPARE_AGAIN,
    SPLITS,
    Prepared,
    Split,
    agreed_tokenizer,
    prepare_command,
    prepared_of,
)
from weft.data.round_trip import RoundTrip, changed_texts
from weft.data.streams import source_files
from weft.data.tokenizer import BYTES, FILE, Tokenizer, open_tokenizer
from weft.data.tokens import TokenStream, empty_error, open_stream
from weft.errors import DataError, Fault

MAX_CHARS_IN_MEMORY = 2 * 2**20
"""Characters that are tokenized at the start of a run, on every rank; larger texts are prepared
once.
"""


def open_source(
    source: str, data: DataConfig, *, vocab: int, split: Split = "train"
) -> TokenStream:
    """The tokens of a source, for a model with `vocab` ids.

    Args:
        split: part of a prepared folder.

    Raises:
        DataError: missing, empty, broken, too large to be tokenized in memory, or outside the
            vocabulary.
    """
    prepared = prepared_of(source)
    if prepared is not None:
        return _open_prepared_source(source, prepared, data, vocab=vocab, split=split)
    files = source_files(source)
    formats = formats_of(source, files)
    as_read = read_as(source, formats)
    if not is_token_file(files[0]):
        tokenizer = open_tokenizer(data.tokenizer)
        check_vocab(tokenizer, vocab)
        if tokenizer.name != BYTES or not all(each.is_plain_text for each in formats):
            stream = _tokenize_in_memory(source, files, data, tokenizer=tokenizer, vocab=vocab)
            return replace(stream, read_as=as_read)
    skipped = tuple(each.num_mark_bytes for each in formats)
    opened = _open_once if source == STDLIB else open_stream
    return opened(
        files, token_dtype=data.token_dtype, vocab=vocab, skipped=skipped, read_as=as_read
    )


_open_once = lru_cache(maxsize=2)(open_stream)
"""Python's own sources do not change while a process runs: all ranks of it read them once."""


def has_documents(stream: TokenStream) -> bool:
    """Whether it is known where documents begin."""
    return stream.documents is not None or not is_token_file(stream.files[0])


def _open_prepared_source(
    source: str, prepared: Prepared, data: DataConfig, *, vocab: int, split: Split
) -> TokenStream:
    check_vocab(agreed_tokenizer(prepared, data), vocab)
    check_round_trip(prepared, data)
    stream = prepared.stream(split_of(source, split), vocab=vocab)
    if not len(stream):
        raise DataError(
            Fault(
                KEY,
                "is empty",
                got=f"0 tokens in {stream.files[0]}",
                need="some documents",
                fix=PREPARE_AGAIN,
            )
        )
    return stream


def check_round_trip(prepared: Prepared, data: DataConfig) -> None:
    """Check that the tokenizer of a prepared folder reproduces its texts.

    Raises:
        DataError: it does not, and `data.round_trip` demands it.
    """
    meta = prepared.meta
    if meta.num_changed and data.round_trip == "exact":
        raise DataError(
            changed_texts(f"{prepared.folder}/{FILE}", meta.num_changed, meta.first_changed)
        )


def split_of(source: str, default: Split) -> Split:
    """The split that a source names by its file, train.bin or valid.bin; else the default."""
    if source.endswith(TOKEN_SUFFIX):
        for name in SPLITS:
            if name == Path(source).stem:
                return name
    return default


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Check that a model has an id for each token.

    Raises:
        DataError: it has not.
    """
    faults = tuple(vocabulary_holds(tokenizer.name, tokenizer.vocab, vocab=vocab))
    if faults:
        raise DataError(*faults)


def _tokenize_in_memory(
    source: str, files: tuple[Path, ...], data: DataConfig, *, tokenizer: Tokenizer, vocab: int
) -> TokenStream:
    options = ReadOptions(text_field=data.text_field, allow_any_bytes=tokenizer.name == BYTES)
    chunks = list(_small_documents(files, options, fix=prepare_command(source, data)))
    ids: list[int] = []
    lengths = []
    round_trip = RoundTrip(tokenizer)
    number = 0
    for chunk in chunks:
        # not as a batch: no threads may start before ranks are forked
        tokens = tokenizer.encode(chunk.text)
        if data.round_trip == "exact":
            round_trip.check(chunk.text, tokens, document=number)
        number += chunk.ends
        if chunk.ends and tokenizer.end is not None:
            tokens = [*tokens, tokenizer.end]
        ids.extend(tokens)
        lengths.append(len(tokens))
    round_trip.reject()
    if not ids:
        raise empty_error("no text", files)
    tokens_in_memory = np.array(ids, dtype=np.uint32)
    return TokenStream(
        files=tuple(files),
        parts=(tokens_in_memory,),
        vocab=vocab,
        documents=_document_bounds(chunks, lengths),
    )


def _document_bounds(chunks: Sequence[TextChunk], lengths: Sequence[int]) -> Ints:
    """0, and where the last chunk of each document ends."""
    bounds = [0]
    end = 0
    for chunk, length in zip(chunks, lengths, strict=True):
        end += length
        if chunk.ends:
            bounds.append(end)
    return np.array(bounds, dtype=np.int64)


def _small_documents(
    files: Iterable[Path], options: ReadOptions, *, fix: str
) -> Iterator[TextChunk]:
    """The chunks of files that are small together.

    Raises:
        DataError: they are not.
    """
    num_chars = 0
    for file in files:
        for chunk in read_documents(file, options):
            num_chars += len(chunk.text)
            if num_chars > MAX_CHARS_IN_MEMORY:
                raise DataError(
                    Fault(
                        KEY,
                        "is too large to be tokenized at every start",
                        got=f"more than {MAX_CHARS_IN_MEMORY:,} characters",
                        need="less, or a prepared folder",
                        fix=fix,
                    )
                )
            yield chunk
