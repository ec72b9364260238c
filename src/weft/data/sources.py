"""Owns opening what a source names as a stream of tokens: a prepared folder, .bin files, text as bytes, little else in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.config.schema import DataConfig
from weft.data.documents import Piece, Reading, read_documents
from weft.data.files import KEY, TOKEN_SUFFIX, find_files, is_plain_text
from weft.data.prepared import SPLITS, Split, agreed_tokenizer, prepared_of
from weft.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from weft.data.tokens import TokenStream, names, open_stream
from weft.errors import DataError, Fault

MOST_IN_MEMORY = 2 * 2**20
"""Characters that are made into tokens whenever a run starts, on every rank; more is prepared once."""


def open_source(source: str, data: DataConfig, *, vocab: int, split: Split = "train") -> TokenStream:
    """The tokens of a source, for a model with `vocab` ids; `split` says which part of a prepared folder.

    Raises:
        DataError: missing, empty, broken, too large to be read as it is, or beyond the vocabulary.
    """
    prepared = prepared_of(source)
    if prepared is not None:
        _check_vocab(agreed_tokenizer(prepared, data), vocab)
        stem = Path(source).stem
        named = next((name for name in SPLITS if source.endswith(TOKEN_SUFFIX) and name == stem), split)
        stream = prepared.stream(named, vocab=vocab)
        if not len(stream):
            raise DataError(Fault(KEY, "is empty", f"0 tokens in {stream.files[0]}", "some documents"))
        return stream
    files = find_files(source)
    if files[0].suffix == TOKEN_SUFFIX:
        return open_stream(files, token_dtype=data.token_dtype, vocab=vocab)
    tokenizer = open_tokenizer(data.tokenizer)
    _check_vocab(tokenizer, vocab)
    if tokenizer.name == BYTES and all(map(is_plain_text, files)):
        return open_stream(files, token_dtype=data.token_dtype, vocab=vocab)
    return _tokenized(files, data, tokenizer, vocab=vocab)


def has_documents(stream: TokenStream) -> bool:
    """Whether it is known where documents begin."""
    return stream.documents is not None or stream.files[0].suffix != TOKEN_SUFFIX


def _check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    if tokenizer.vocab > vocab:
        need = f"at least {tokenizer.vocab} for {tokenizer.name}"
        fix = f"--model.vocab {tokenizer.vocab}"
        raise DataError(Fault("model.vocab", "is smaller than the tokenizer's", str(vocab), need, fix))


def _tokenized(files: tuple[Path, ...], data: DataConfig, tokenizer: Tokenizer, *, vocab: int) -> TokenStream:
    """Documents made into tokens here and now."""
    reading = Reading(text_field=data.text_field, takes_any_bytes=tokenizer.name == BYTES)
    pieces = list(_few(files, reading))
    tokens = [tokenizer.encode(piece.text) for piece in pieces]  # not as a batch: no threads before ranks are forked
    ends = [[tokenizer.end] if piece.ends and tokenizer.end is not None else [] for piece in pieces]
    ids = np.array([id for own, end in zip(tokens, ends, strict=True) for id in (*own, *end)], dtype=np.uint32)
    if not len(ids):
        raise DataError(Fault(KEY, "is empty", f"no text in {names(files)}", "some text or tokens"))
    bounds = _bounds(pieces, [len(own) + len(end) for own, end in zip(tokens, ends, strict=True)])
    return TokenStream(files[:1], (ids,), vocab, documents=bounds)


def _bounds(pieces: Sequence[Piece], lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    stops = np.cumsum(lengths, dtype=np.int64)
    return np.concatenate(([0], stops[[piece.ends for piece in pieces]]))


def _few(files: Iterable[Path], reading: Reading) -> Iterator[Piece]:
    """The pieces of files that are small together.

    Raises:
        DataError: they are not.
    """
    total = 0
    for file in files:
        for piece in read_documents(file, reading):
            total += len(piece.text)
            if total > MOST_IN_MEMORY:
                what = "is too large to be made into tokens at every start"
                got, need = f"more than {MOST_IN_MEMORY:,} characters", "less, or a prepared folder"
                fix = f"weft data prepare {file} --out FOLDER, then --data.source FOLDER"
                raise DataError(Fault(KEY, what, got, need, fix))
            yield piece
