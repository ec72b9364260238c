"""Rows of conversations and preference pairs by their definition, token by token; see Note [Masks] in data/conversations.py.

Which records are in a row is taken from the samples, as their order is; lengths, targets, positions,
documents and marks are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.data.conversations import PAIR, UNDESIRED, ConversationSamples
from weft.models.common.batch import IGNORE, Batch


@dataclass(frozen=True)
class _Token:
    """A token of a document, and whether it is of an answer."""

    id: int
    is_answer: bool


@dataclass
class _RawRow:
    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    pairs: list[bool] = field(default_factory=list)

    def add(self, token: int, *, target: int, position: int, document: int, marks: bool) -> None:
        self.inputs.append(token)
        self.targets.append(target)
        self.positions.append(position)
        self.documents.append(document)
        self.pairs.append(marks)


def rows_of(samples: ConversationSamples, numbers: list[int]) -> Batch:
    """The batch of these rows."""
    rows = [_row(samples, number) for number in numbers]
    pairs = None
    if samples.has_pairs:
        pairs = torch.tensor([row.pairs for row in rows], dtype=torch.bool)
    return Batch(
        inputs=_tensor([row.inputs for row in rows]),
        targets=_tensor([row.targets for row in rows]),
        positions=_tensor([row.positions for row in rows]),
        documents=_tensor([row.documents for row in rows]),
        pairs=pairs,
    )


def _row(samples: ConversationSamples, number: int) -> _RawRow:
    row = _RawRow()
    document = 0
    for record in samples.table.rows[number].tolist():
        texts = list(_texts(samples, record))
        for place, text in enumerate(texts):
            is_marked = samples.has_pairs and place == _marked(samples, record)
            if samples.is_scored:
                label = _label(samples, samples.data.group * record + place)
                _add_scored(row, text, document=document, label=label, is_marked=is_marked)
            else:
                _add_document(row, text, document=document, is_marked=is_marked)
            document += 1
    for position in range(samples.seq_len - len(row.inputs)):
        row.add(0, target=IGNORE, position=position, document=document, marks=False)
    return row


def _marked(samples: ConversationSamples, record: int) -> int:
    """Which document of a record is marked: the second one of an answer that is not desired."""
    bounds = samples.data.stream.document_bounds
    first = samples.data.group * record
    mask = samples.data.mask[int(bounds[first]) : int(bounds[first + 1])]
    return int(UNDESIRED in mask.tolist())


def _texts(samples: ConversationSamples, record: int) -> Iterator[list[_Token]]:
    """The documents of a record, cut to what a sequence has room for."""
    group = samples.data.group
    texts = [_text(samples, record * group + place) for place in range(group)]
    if group != PAIR:
        yield texts[0][: samples.seq_len]
        return
    chosen, rejected = texts
    most = samples.seq_len
    # the longer text is cut first, down to half a sequence
    if len(chosen) + len(rejected) > most:
        chosen = chosen[: max(most // 2, most - len(rejected))]
    yield chosen
    yield rejected[: most - len(chosen)]


def _text(samples: ConversationSamples, document: int) -> list[_Token]:
    bounds = samples.data.stream.document_bounds
    start = int(bounds[document])
    stop = int(bounds[document + 1])
    ids = samples.data.stream.read(start, stop).tolist()
    mask = samples.data.mask[start:stop].tolist()
    return [_Token(token, bool(answers)) for token, answers in zip(ids, mask, strict=True)]


def _add_document(row: _RawRow, text: list[_Token], *, document: int, is_marked: bool) -> None:
    """Add the tokens of a document; each one's target is the next one, if that is of an answer. The
    first target of a chosen answer marks its pair.
    """
    for position, token in enumerate(text):
        target = IGNORE
        if position + 1 < len(text) and text[position + 1].is_answer:
            target = text[position + 1].id
        marks = is_marked and target != IGNORE
        row.add(token.id, target=target, position=position, document=document, marks=marks)
        is_marked = is_marked and not marks


def _label(samples: ConversationSamples, document: int) -> int:
    """The class of a document, which its mask tells at its first token; 0 of answers of a pair."""
    if samples.has_pairs:
        return 0
    first = int(samples.data.stream.document_bounds[document])
    marked = int(samples.data.mask[first : first + 1][0])
    return marked - 1 if marked else 0


def _add_scored(
    row: _RawRow, text: list[_Token], *, document: int, label: int, is_marked: bool
) -> None:
    """Add the tokens of a document that is scored as a whole: its last token has the only target,
    and marks a pair.
    """
    last = len(text) - 1
    for position, token in enumerate(text):
        row.add(
            token.id,
            target=label if position == last else IGNORE,
            position=position,
            document=document,
            marks=is_marked and position == last,
        )


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)
