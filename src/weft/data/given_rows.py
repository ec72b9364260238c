"""Rows that are no files: those of a script's dataset and of the library `datasets`, as inputs of a preparation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.conversations import MaskedTokens
from weft.data.record_sources import EncodedRecord
from weft.data.rows import Row
from weft.data.samples import IGNORE
from weft.errors import DataError, Fault

KEY = "data"
IDS, LABELS, ATTENTION = "input_ids", "labels", "attention_mask"
"""Fields of a row of tokens, as tokenizers of transformers name them."""


@dataclass(frozen=True)
class GivenRows:
    """Rows of a script, which are read once.

    Attributes:
        name: of what the script gives, for messages.
    """

    fields: Iterator[Mapping[str, Any]]
    name: str
    num_bytes: int = 0

    def __str__(self) -> str:
        return self.name

    def rows(self) -> Iterator[Row]:
        """The rows, with their numbers from 0."""
        for number, fields in enumerate(self.fields):
            yield Row(fields=fields, where=f"{self.name}[{number}]", at=0)


def encoded_rows(rows: Iterator[Row], *, vocab: int) -> Iterator[EncodedRecord]:
    """Rows of tokens as records: what attends is kept, what has a label is a target.

    Args:
        vocab: ids of the model.

    Raises:
        DataError: a row is none of tokens; an id is not below `vocab`; a label is another token than
            the row's own.
    """
    for row in rows:
        ids = _whole_numbers(row, IDS)
        labels = _whole_numbers(row, LABELS, like=ids) if LABELS in row.fields else ids
        if ATTENTION in row.fields:
            (kept,) = np.nonzero(_whole_numbers(row, ATTENTION, like=ids))
            if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
                what = f"{row.where}: {ATTENTION} leaves out tokens in the middle"
                raise DataError(Fault(KEY, what, fix="pad at an end of the row"))
            ids, labels = ids[kept], labels[kept]
        if not len(ids):
            raise DataError(Fault(KEY, f"{row.where} has no token", fix="leave it out"))
        if ids.min() < 0 or ids.max() >= vocab:
            got, need = f"{ids.min()} to {ids.max()}", f"0 to {vocab - 1}"
            what = f"{row.where}: {IDS} are outside the model's vocabulary"
            raise DataError(Fault(KEY, what, got=got, need=need, fix="--model.vocab, or repair it"))
        counts = labels != IGNORE
        (other,) = np.nonzero(counts & (labels != ids))
        if len(other):
            what = f"{row.where}: the label at place {other[0]} is another token"
            got, need = str(labels[other[0]]), f"{ids[other[0]]}, the token there, or {IGNORE}"
            fix = "the loss moves labels by one place; name targets of your own in INPUTS of the model"
            raise DataError(Fault(KEY, what, got=got, need=need, fix=fix))
        document = MaskedTokens(ids.tolist(), counts.astype(np.uint8), has_shared_token=False)
        yield EncodedRecord((document,), texts=(), where=row.where, at=row.at, num_chars=0)


def _whole_numbers(row: Row, name: str, *, like: Any = None) -> Any:
    """A field as whole numbers in one dimension, as many as `like` has."""
    value = row.fields.get(name)
    array = np.asarray([] if value is None else value)
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    is_row = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not is_row or (like is not None and len(array) != len(like)):
        need = "whole numbers in one dimension" + (
            f", as many as {IDS}" if like is not None else ""
        )
        got = f"{array.dtype} {list(array.shape)}"
        raise DataError(Fault(KEY, f"{row.where}: {name} is no row of tokens", got=got, need=need))
    return array.astype(np.int64)
