"""Fine-tuning records as tokens with a mask of answers, and the samples made of them: rows of whole conversations or pairs.

Note [Masks]
    A mask has one entry for each token: whether it is of an answer. A token is a target where it is
    of an answer and not the first one of its document, so in a row each token's target is the next
    token of the same document if that is of an answer:

        tokens    <user> H i <assistant> Y o <end>     S = 9, a second conversation "a b" with answer "b"
        mask      0      0 0 0           1 1 1
        inputs    <user> H i <assistant> Y o <end> a b
        targets   -      - - Y           o <end> - b -

    Texts that are scored as a whole (`reward`, `classify`) have one target, at the last token that is
    kept: the number of their class, 0 of answers that are compared. The mask of a labelled text is
    that number + 1 at its first token.

    A completion that is not desired (`unpaired`) has the mask 2 in place of 1, as has the other
    completion behind its prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import SCORED
from weft.data.document_bounds import Bounds
from weft.data.files import KEY
from weft.data.order import Ints, Order, epoch_order
from weft.data.packing import Rows, pack_rows, single_rows
from weft.data.records import UNPAIRED, AnswerText
from weft.data.samples import HASH_DIGITS, IGNORE, SampleArrays
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import BLOCK_TOKENS, Tokens, TokenStream, verified_part
from weft.errors import DataError, Fault, counted

PAIR = 2
"""Documents of a preference pair: chosen, rejected; or of a completion with a label: it, another one."""
UNDESIRED = 2
"""Entry of the mask of a completion that is not desired."""
Unit = Literal["pairs", "answers", "texts", "conversations"]
UNITS: tuple[Unit, ...] = get_args(Unit)
NUM_HASHED = 2**22
"""Entries of a mask that are hashed at once."""


@dataclass(frozen=True)
class MaskedTokens:
    """A document: its tokens, which of them are of answers, and whether a token is of both prompt
    and answer.
    """

    ids: Sequence[int]
    mask: NDArray[np.uint8]
    has_shared_token: bool


def encode_answers(answer: AnswerText, tokenizer: Tokenizer) -> MaskedTokens:
    """The tokens of a text and the mask of its answers.

    An answer behind a prompt begins at the first token that is not the prompt's, as in TRL. Elsewhere
    a token counts where any of its characters is of an answer.
    """
    encoded = tokenizer.encode_chars(answer.text, adds_special=answer.adds_special)
    ids = encoded.ids
    mask = np.zeros(len(ids), dtype=np.uint8)
    if answer.label is not None:
        mask[:1] = answer.label + 1
        return MaskedTokens(ids=ids, mask=mask, has_shared_token=False)
    if answer.prompt is not None:
        prompt = tokenizer.encode_chars(answer.prompt, adds_special=answer.adds_special).ids
        equal = takewhile(lambda both: both[0] == both[1], zip(prompt, ids, strict=False))
        length = sum(1 for _ in equal)
        mask[length:] = 1 if answer.is_desired else UNDESIRED
        return MaskedTokens(ids=ids, mask=mask, has_shared_token=length < len(prompt))
    offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
    starts = offsets[:, 0]
    stops = offsets[:, 1]
    for start, stop in answer.answers:
        overlaps = (starts < stop) & (stops > start)
        (overlapping,) = np.nonzero(overlaps)
        if len(overlapping):
            first = overlapping[0]
            last = overlapping[-1]
            mask[first : last + 1] = 1
    return MaskedTokens(ids=ids, mask=mask, has_shared_token=False)


def begin_together(answers: Sequence[MaskedTokens]) -> None:
    """Let answers behind one prompt begin at the same token, the first at which any of them begins."""
    first = min(len(answer.mask) - np.count_nonzero(answer.mask) for answer in answers)
    for answer in answers:
        answer.mask[first:] = 1


@dataclass(frozen=True)
class Conversations:
    """Documents with masks; see Note [Masks].

    Attributes:
        stream: the tokens, with the bounds of the documents.
        mask: mask_T uint8, of all tokens.
        group: documents that stay together in a row: 1, or 2 for preference pairs.
        num_shared: documents in which a token is of both prompt and answer.
        format: of their records, a value of `data.format`; "" where they are drawn.
    """

    stream: TokenStream
    mask: Tokens
    group: int = 1
    num_shared: int = 0
    format: str = ""


@dataclass(frozen=True)
class RowTable:
    """The conversations that are trained on, as rows.

    Attributes:
        lengths: tokens of each document that are kept.
        rows: which groups of documents are in which row.
        first_targets: index of the first target of each document.
        num_cut, cut_tokens: documents that are longer than a sequence, and their tokens behind it.
        num_without_target: groups that are left out because no target of theirs is kept.
        targets: number of targets that are kept.
    """

    lengths: Ints
    rows: Rows
    first_targets: Ints
    num_cut: int
    cut_tokens: int
    num_without_target: int
    targets: int


@dataclass(frozen=True)
class _RowArrays:
    """The arrays of one row of S tokens."""

    inputs: Ints
    targets: Ints
    positions: Ints
    documents: Ints
    pairs: NDArray[np.bool_]

    @classmethod
    def empty(cls, seq_len: int) -> _RowArrays:
        """Tokens 0 without targets."""
        return cls(
            inputs=np.zeros(seq_len, dtype=np.int64),
            targets=np.full(seq_len, IGNORE, dtype=np.int64),
            positions=np.zeros(seq_len, dtype=np.int64),
            documents=np.zeros(seq_len, dtype=np.int64),
            pairs=np.zeros(seq_len, dtype=np.bool_),
        )

    def put(
        self, place: int, number: int, tokens: Ints, mask: NDArray[np.uint8], *, label: int | None
    ) -> None:
        """Put a document at a place; its last token has no target, or the label of the whole."""
        stop = place + len(tokens)
        following = tokens[1:]
        is_answer = mask[1:] > 0
        self.inputs[place:stop] = tokens
        if label is None:
            self.targets[place : stop - 1] = np.where(is_answer, following, IGNORE)
        else:
            self.targets[stop - 1] = label
        self.positions[place:stop] = np.arange(len(tokens))
        self.documents[place:stop] = number

    def pad(self, place: int, number: int) -> None:
        """Let the rest from a place on be a document without targets."""
        length = len(self.inputs) - place
        self.positions[place:] = np.arange(length)
        self.documents[place:] = number


@dataclass(frozen=True)
class ConversationSamples:
    """Sample i is row i: whole conversations (or pairs), padded to S tokens.

    Attributes:
        packing: `documents`: several in a row, `single`: one.
    """

    data: Conversations
    seq_len: int
    source: str
    packing: Literal["documents", "single"] = "documents"
    order: Order = "shuffled"

    @property
    def has_pairs(self) -> bool:
        """Whether the records are preference pairs, or completions with labels and others beside them."""
        return self.data.group == PAIR

    @property
    def unit(self) -> Unit:
        """What its records are, for facts and messages."""
        if self.has_pairs:
            return "answers" if self.data.format == UNPAIRED else "pairs"
        return "texts" if self.is_scored else "conversations"

    @property
    def is_scored(self) -> bool:
        """Whether each document has one target, at its last token."""
        return self.data.format in SCORED

    def label_of(self, mask: NDArray[np.uint8]) -> int | None:
        """The target of a whole document; None where its tokens have targets."""
        if not self.is_scored:
            return None
        return 0 if self.has_pairs else max(int(mask[0]) - 1, 0)

    @cached_property
    def table(self) -> RowTable:
        """The table of rows that documents were packed into.

        Raises:
            DataError: no conversation has a target.
        """
        bounds: Bounds = self.data.stream.document_bounds
        all_bounds = bounds[: len(bounds)]
        full_lengths = np.diff(all_bounds)
        group = self.data.group
        lengths = _kept_lengths(full_lengths.reshape(-1, group), self.seq_len)
        if self.is_scored:
            num_targets, first_targets = np.ones_like(full_lengths), lengths.ravel() - 1
        else:
            num_targets, first_targets = _count_targets(self.data.mask, all_bounds, lengths.ravel())
        has_targets = (num_targets.reshape(-1, group) > 0).all(axis=1)
        (kept_groups,) = np.nonzero(has_targets)
        if not len(kept_groups):
            got = f"0 targets in the first {self.seq_len} tokens of {len(lengths)} records"
            what = f"{self.source} has nothing to train on: no target is left"
            fix = "raise data.seq_len, or repair the answers"
            raise DataError(Fault(KEY, what, got=got, need="one answer at least", fix=fix))
        group_lengths = lengths.sum(axis=1)
        if self.packing == "single":
            rows = single_rows(len(kept_groups))
        else:
            rows = pack_rows(group_lengths[kept_groups], self.seq_len)
        cut = full_lengths - lengths.ravel()
        return RowTable(
            lengths=lengths.ravel(),
            rows=replace(rows, items=kept_groups[rows.items]),
            first_targets=first_targets,
            num_cut=int((cut > 0).sum()),
            cut_tokens=int(cut.sum()),
            num_without_target=len(lengths) - len(kept_groups),
            targets=int(num_targets.reshape(-1, group)[kept_groups].sum()),
        )

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return len(self.table.rows)

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return epoch_order(places, self.num_samples, seed=seed, order=self.order)

    def documents(self, sample: int) -> Iterator[int]:
        """Numbers of the documents in a row, in order."""
        group = self.data.group
        groups = self.table.rows[sample]
        for number in groups.tolist():
            first = group * number
            yield from range(first, first + group)

    def read(self, samples: Ints) -> SampleArrays:
        """Rows with these numbers, flattened to one batch dimension."""
        numbers = samples.ravel().tolist()
        rows = [self._row(number) for number in numbers]
        pairs = None
        if self.has_pairs:
            pairs = np.stack([row.pairs for row in rows])
        return SampleArrays(
            inputs=np.stack([row.inputs for row in rows]),
            targets=np.stack([row.targets for row in rows]),
            positions=np.stack([row.positions for row in rows]),
            documents=np.stack([row.documents for row in rows]),
            pairs=pairs,
        )

    def _row(self, sample: int) -> _RowArrays:
        """The arrays of one row; padding is a document of its own."""
        row = _RowArrays.empty(self.seq_len)
        bounds = self.data.stream.document_bounds
        place = 0
        number = 0
        for document in self.documents(sample):
            length = int(self.table.lengths[document])
            start = int(bounds[document])
            stop = start + length
            tokens = self.data.stream.read(start, stop)
            mask = self.data.mask[start:stop]
            row.put(place, number, tokens, mask, label=self.label_of(mask))
            marked = bool(
                (mask == UNDESIRED).any()
            )  # the second document of a pair, else the first
            if self.has_pairs and document % PAIR == marked:
                row.pairs[place + int(self.table.first_targets[document])] = True
            place += length
            number += 1
        # padding sees itself alone, and no position is beyond the sequence
        row.pad(place, number)
        return row

    def place(self, sample: int) -> dict[str, object]:
        """The numbers of its records in the source."""
        return {
            "sample": sample,
            "source": self.source,
            "records": self.table.rows[sample].tolist(),
        }

    def facts(self) -> dict[str, object]:
        """Source, sizes, what is cut or left out, and a hash of tokens, masks and rows."""
        stream = self.data.stream
        table = self.table
        num_documents = len(stream.document_bounds) - 1
        facts: dict[str, object] = {
            "source": self.source,
            "files": len(stream.files),
            "bytes": stream.num_bytes,
            "tokens": len(stream),
            self.unit: num_documents // self.data.group,
            "format": self.data.format,
            "targets": table.targets,
            **{name: number for name, number in self._losses().items() if number},
            "samples": self.num_samples,
            **stream.read_as_fact(),
            "sha256": self._sha256[:HASH_DIGITS],
        }
        if stream.known_sha256 is not None:
            facts["verified"] = verified_part(stream.num_bytes)
        return facts

    def _losses(self) -> dict[str, int]:
        """What is cut or left out."""
        return {
            "cut": self.table.num_cut,
            "cut_tokens": self.table.cut_tokens,
            "without_target": self.table.num_without_target,
            "shared_tokens": self.data.num_shared,
        }

    @cached_property
    def _sha256(self) -> str:
        """The hash of the tokens, their mask and the rows."""
        digest = hashlib.sha256(self.data.stream.sha256.encode())
        mask = self.data.mask
        for start in range(0, len(mask), NUM_HASHED):
            block = mask[start : start + NUM_HASHED]
            digest.update(block.tobytes())
        table = self.table
        for array in (table.lengths, table.rows.items, table.rows.bounds):
            little_endian = np.ascontiguousarray(array, dtype="<i8")
            # the rows too: a run is not continued where another version packs the records differently
            digest.update(little_endian.tobytes())
        return digest.hexdigest()


def truncation_note(facts: Mapping[str, object], *, seq_len: int) -> str | None:
    """What of the conversations is cut or left out; None for other data, and where nothing is."""
    num_cut = facts.get("cut")
    num_without_target = facts.get("without_target")
    num_shared = facts.get("shared_tokens")
    parts = []
    if num_cut:
        documents = counted(int(str(num_cut)), "text")
        tokens = counted(int(str(facts["cut_tokens"])), "token", spec=",")
        parts.append(f"{documents} cut at data.seq_len {seq_len}, {tokens} lost")
    if num_without_target:
        parts.append(f"{num_without_target} without a target left are left out")
    if num_shared:
        parts.append(f"{num_shared} where a token is of prompt and answer")
    if not parts:
        return None
    (name, *_) = (name for name in UNITS if name in facts)
    return f"of {facts[name]} {name}: {'; '.join(parts)}"


def _kept_lengths(lengths: Ints, seq_len: int) -> Ints:
    """lengths_GD of the documents of each group, cut so that a group fits into a sequence.

    Of a pair that is too long the longer text is cut first, at half a sequence at the least.
    """
    group = lengths.shape[1]
    if group == 1:
        return lengths.clip(max=seq_len)
    chosen = lengths[:, 0]
    rejected = lengths[:, 1]
    half = seq_len // PAIR
    room_for_chosen = np.maximum(half, seq_len - rejected)
    kept_chosen = np.minimum(chosen, room_for_chosen)
    room_for_rejected = seq_len - kept_chosen
    kept_rejected = np.minimum(rejected, room_for_rejected)
    return np.stack((kept_chosen, kept_rejected), axis=1)


def _count_targets(mask: Tokens, bounds: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """num_targets_N of each document within its kept length, and the index of the first target; the
    mask is read in parts.
    """
    num_targets = np.zeros(len(lengths), dtype=np.int64)
    first_targets = np.zeros(len(lengths), dtype=np.int64)
    first = 0
    while first < len(lengths):
        stop_token = bounds[first] + BLOCK_TOKENS
        last = int(np.searchsorted(bounds, stop_token, side="right")) - 1
        # a document longer than a part is a part of its own
        last = max(last, first + 1)
        part = slice(first, last)
        own_bounds = bounds[first : last + 1]
        start_token = int(own_bounds[0])
        end_token = int(own_bounds[-1])
        own_mask = mask[start_token:end_token]
        bounds_of_part = own_bounds - own_bounds[0]
        counts, firsts = _targets_of_part(own_mask, bounds_of_part, lengths[part])
        num_targets[part] = counts
        first_targets[part] = firsts
        first = last
    return num_targets, first_targets


def _targets_of_part(mask: NDArray[np.uint8], bounds: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The targets of consecutive documents, counted as in `_count_targets`."""
    starts = bounds[:-1]
    num_documents = len(starts)
    document_of_token = np.repeat(np.arange(num_documents), np.diff(bounds))
    index = np.arange(len(mask)) - starts[document_of_token]
    is_answer = mask > 0
    has_context = index > 0
    is_kept = index < lengths[document_of_token]
    is_target = is_answer & has_context & is_kept
    counts = np.add.reduceat(is_target.astype(np.int64), starts)
    (target_places,) = np.nonzero(is_target)
    documents, first_of_document = np.unique(document_of_token[target_places], return_index=True)
    first_places = target_places[first_of_document]
    first_targets = np.zeros_like(starts)
    first_targets[documents] = index[first_places] - 1
    return counts, first_targets
