"""A small part of a run's data for proofs: its first documents or records, shortened, with ids inside a smaller vocabulary.

Note [Excerpts]
    The first documents of every source are read, in turn. A text is cut into a few documents, a record
    is thinned: tokens from all of it, those at the borders of answers first. Lengths differ, so that
    most sequences hold several documents, some documents are longer than a sequence, and every other
    sequence ends where a document does. Ids are taken modulo the vocabulary of the reduced model;
    every fourth document has drawn ids, from all of the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice, pairwise, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import SCORED, DataConfig
from weft.data.conversations import PAIR, Conversations, ConversationSamples
from weft.data.documents import ReadOptions, read_documents
from weft.data.files import is_token_file
from weft.data.formats import format_of, formats_of
from weft.data.order import Ints, hash_numbers
from weft.data.prepared import Prepared, prepared_of, sources_of
from weft.data.record_sources import GROUPED, encode_records, holds_records, make_reader
from weft.data.samples import SequenceSamples
from weft.data.streams import source_files
from weft.data.token_sources import split_of
from weft.data.tokenizer import BYTES, open_tokenizer
from weft.data.tokens import TokenStream, empty_error, open_tokens

NUM_DOCUMENTS = 32
"""Documents or records that are read of each source."""
MAX_DOCUMENT_TOKENS = 2**14
MAX_CHARS = 2**15
NUM_WINDOWS = 32
"""Sequences of an excerpt, where no number is asked for; records that are packed into rows."""
LENGTHS = (1 / 4, 3 / 2, 1 / 8, 1 / 2)
"""Of texts, as shares of a sequence, in turn."""
RECORD_LENGTHS = (3 / 8, 5 / 8, 1 / 4, 1.0)
"""The same of records, or pairs of them, which are not longer than a sequence."""
DRAWN_EVERY = 4
"""Every such document has drawn ids."""
MOST_PARTS = 4
"""Documents that a long text is cut into; the last one is its end."""
SEED = 0x657863
ANY_ID = 2**32

Mask = NDArray[np.uint8]


@dataclass(frozen=True)
class Document:
    """A text or record.

    Attributes:
        mask: which tokens are of answers; None: all are targets.
        group: documents that stay together, 2 in preference pairs.
    """

    ids: Ints
    mask: Mask | None = None
    group: int = 1


@dataclass(frozen=True)
class Excerpt:
    """The first documents of a run's data.

    Attributes:
        data: of the run, with the length of sequences that is compared.
        vocab: ids are below this.
    """

    data: DataConfig
    documents: tuple[Document, ...]
    vocab: int

    @staticmethod
    def of(data: DataConfig, *, vocab: int) -> Excerpt:
        """Read the first documents of every source.

        Raises:
            DataError: missing, empty or broken.
        """
        by_source = [_first_documents(data, source) for source in sources_of(data)]
        in_turn = chain.from_iterable(zip_longest(*by_source))
        return Excerpt(data, tuple(each for each in in_turn if each is not None), vocab)

    @property
    def has_records(self) -> bool:
        """Whether the documents are records with answers."""
        return self.documents[0].mask is not None

    @property
    def group(self) -> int:
        """Documents that stay together."""
        return self.documents[0].group

    def samples(self, num_samples: int) -> SequenceSamples | ConversationSamples:
        """The sequences: this many, except of records; 0: `NUM_WINDOWS`."""
        if self.has_records:
            return self._records()
        seq_len = self.data.seq_len
        num_tokens = (num_samples or NUM_WINDOWS) * seq_len + 1
        stream = self._stream(_packed(self._pieces(LENGTHS), seq_len, num_tokens))
        return SequenceSamples(
            stream,
            seq_len,
            self.data.source,
            packing="documents" if self.data.packing == "documents" else "stream",
        )

    def _records(self) -> ConversationSamples:
        shares = [share / self.group for share in RECORD_LENGTHS for _ in range(self.group)]
        number = max(len(self.documents), NUM_WINDOWS)
        pieces = list(islice(self._pieces(shares), number))
        masks = [each.mask for each in pieces if each.mask is not None]
        stream = self._stream(pieces)
        known = self.data.format if self.data.format in SCORED else ""
        conversations = Conversations(stream, np.concatenate(masks), group=self.group, format=known)
        return ConversationSamples(
            conversations,
            self.data.seq_len,
            self.data.source,
            packing="single" if self.data.packing == "single" else "documents",
        )

    def _pieces(self, shares: Sequence[float]) -> Iterator[Document]:
        """The documents, shortened, over and over; after the first time with drawn ids.

        Args:
            shares: of a sequence that documents are long, in turn.
        """
        lengths = cycle(max(int(share * self.data.seq_len), 2) for share in shares)
        parts = chain.from_iterable(_parts(each, lengths) for each in self.documents)
        for number in count():
            is_drawn = number // self.group % DRAWN_EVERY == DRAWN_EVERY - 1
            document = None if is_drawn else next(parts, None)
            if document is None:
                yield _drawn(next(lengths), self.vocab, number=number, has_mask=self.has_records)
            else:
                yield Document(document.ids % self.vocab, document.mask)

    def _stream(self, pieces: Iterable[Document]) -> TokenStream:
        ids = [each.ids for each in pieces]
        return TokenStream(
            files=(Path(self.data.source),),
            parts=(np.concatenate(ids).astype(np.uint32),),
            vocab=self.vocab,
            documents=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        )

    @property
    def sha256(self) -> str:
        """The hash of all that samples are made of."""
        digest = hashlib.sha256()
        for document in self.documents:
            for array in (document.ids, document.mask):
                if array is not None:
                    digest.update(array.astype("<i8").tobytes())
            digest.update(b";")
        return digest.hexdigest()


def _parts(document: Document, lengths: Iterator[int]) -> Iterator[Document]:
    """A record, thinned; or the first parts of a text, and its end."""
    if document.mask is not None:
        yield _thinned(document.ids, document.mask, next(lengths))
        return
    number = len(document.ids)
    start = 0
    for part in range(MOST_PARTS):
        length = next(lengths)
        if part == MOST_PARTS - 1:
            start = max(start, number - length)
        yield Document(document.ids[start : start + length])
        start += length
        if start >= number:
            return


def _thinned(ids: Ints, mask: Mask, length: int) -> Document:
    """Tokens from all of a record, those at borders of its mask first."""
    (borders,) = np.nonzero(np.diff(mask))
    spread = np.arange(length) * len(ids) // length
    by_importance = np.concatenate(([0], borders, borders + 1, spread))
    _, first = np.unique(by_importance, return_index=True)
    kept = np.sort(by_importance[np.sort(first)][:length])
    return Document(ids[kept], mask[kept])


def _drawn(length: int, vocab: int, *, number: int, has_mask: bool) -> Document:
    """Drawn ids; the second half of a record is its answer."""
    generator = np.random.default_rng(hash_numbers(SEED, number))
    ids = generator.integers(0, vocab, length, dtype=np.int64)
    is_answer = np.arange(length) >= length // 2
    return Document(ids, is_answer.astype(np.uint8) if has_mask else None)


def _packed(pieces: Iterator[Document], seq_len: int, num_tokens: int) -> Iterator[Document]:
    """Documents up to a number of tokens; one ends at the end of every other sequence."""
    place = 0
    while place < num_tokens:
        piece = next(pieces)
        window, used = divmod(place, seq_len)
        if window % 2 == 0 and used + len(piece.ids) > seq_len:
            piece = Document(piece.ids[: seq_len - used])
        place += len(piece.ids)
        yield piece


# reading


def _first_documents(data: DataConfig, source: str) -> tuple[Document, ...]:
    """The first documents of a source.

    Raises:
        DataError: missing, empty or broken.
    """
    prepared = prepared_of(source)
    if prepared is not None:
        documents = _of_prepared(prepared, source, has_masks=holds_records(source, data))
    else:
        files = source_files(source)
        if holds_records(source, data):
            documents = _of_records(data, files)
        elif is_token_file(files[0]):
            documents = _of_files(files, np.dtype(data.token_dtype).newbyteorder("<"))
        elif data.tokenizer == BYTES and all(
            each.is_plain_text for each in formats_of(source, files)
        ):
            documents = _of_files(files, np.dtype(np.uint8))
        else:
            documents = _of_texts(data, files)
    found = tuple(islice((each for each in documents if len(each.ids)), NUM_DOCUMENTS))
    if not found:
        raise empty_error("no text", (Path(source),))
    return found


def _of_prepared(prepared: Prepared, source: str, *, has_masks: bool) -> Iterator[Document]:
    part = split_of(source, "train")
    group = PAIR if prepared.meta.record_format in GROUPED else 1
    stream = prepared.stream(part, vocab=ANY_ID)
    bounds = stream.document_bounds[: NUM_DOCUMENTS + 1].tolist()
    for start, end in pairwise(bounds):
        stop = min(end, start + MAX_DOCUMENT_TOKENS)
        if start < stop:
            mask = prepared.mask(part)[start:stop] if has_masks else None
            yield Document(stream.read(start, stop), mask, group)


def _of_files(files: Iterable[Path], dtype: np.dtype[np.unsignedinteger]) -> Iterator[Document]:
    """The beginnings of files: bytes of text, or ids."""
    for file in files:
        tokens = open_tokens(file, dtype, skipped=format_of(file).num_mark_bytes)
        yield Document(tokens[:MAX_DOCUMENT_TOKENS].astype(np.int64))


def _of_texts(data: DataConfig, files: Iterable[Path]) -> Iterator[Document]:
    tokenizer = open_tokenizer(data.tokenizer)
    options = ReadOptions(text_field=data.text_field, allow_any_bytes=tokenizer.name == BYTES)
    chunks = chain.from_iterable(read_documents(file, options) for file in files)
    for chunk in chunks:
        ids = tokenizer.encode(chunk.text[:MAX_CHARS])
        end = [tokenizer.end] if chunk.ends and tokenizer.end is not None else []
        yield Document(np.array([*ids, *end], dtype=np.int64))


def _of_records(data: DataConfig, files: tuple[Path, ...]) -> Iterator[Document]:
    tokenizer = open_tokenizer(data.tokenizer)
    reader = make_reader(data.format, data.chat_template, tokenizer, classes=data.classes)
    for record in encode_records(files, reader, tokenizer):
        for document in record.documents:
            ids = np.array(document.ids, dtype=np.int64)
            yield Document(ids, document.mask, len(record.documents))
