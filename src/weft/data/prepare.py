"""`weft data prepare`: documents are read, tokenized, split into training and validation, and written as token files.

Note [Streaming]
    Chunks of documents come from the files, a batch of about a million characters is encoded at
    once (the tokenizer uses all cores), and its tokens are appended to train.bin or valid.bin.
    Nothing else is kept, so memory does not depend on the amount of text. Everything is written
    into a temporary folder, which is renamed at the end: the result is complete or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from weft.config.schema import DataFormat, RecordFormat
from weft.data.chat_template import FILE as TEMPLATE_FILE
from weft.data.chat_template import TOKENIZER_CONFIG
from weft.data.documents import ReadOptions, SplitOn, TextChunk
from weft.data.files import KEY
from weft.data.given_rows import GivenRows, encoded_rows
from weft.data.inputs import Input, find_inputs, inputs_read_as, local_file, num_bytes_of, read_all
from weft.data.order import uniform_draws
from weft.data.prepared import (
    FORMAT,
    META,
    RECORDS_FORMAT,
    SPLITS,
    TEXT,
    TOKENS,
    PreparedMeta,
    Split,
    TokenDtype,
)
from weft.data.record_sources import AUTO, EncodedRecord, check_record, encode_record, make_reader
from weft.data.records import RecordReader, RenderedRecord
from weft.data.round_trip import RoundTrip
from weft.data.streams import RemoteFile
from weft.data.token_writer import TokenWriter
from weft.data.tokenizer import BYTES, FILE, ByteTokenizer, Tokenizer, open_tokenizer, train_bpe
from weft.data.verify import block_checksums
from weft.errors import DataError, Fault, counted

TRAIN = "train"
BATCH_CHARS = 2**20
MAX_TRAINING_CHARS = 2**26
"""Characters at most that a BPE is trained on, sampled uniformly from all of them."""
UINT16_IDS = 2**16

Progress = Callable[[str, int, int], None]
"""Called with the name of the activity, bytes done, and bytes in total."""


def no_progress(activity: str, done_bytes: int, total_bytes: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class PrepareOptions:
    """What is prepared, and how.

    Attributes:
        inputs: files, folders, globs, stdlib, or data sets (`hf:PATH[,CONFIG][:SPLIT]`).
        tokenizer: `bytes`, a tokenizer.json, or `train` for a BPE of `vocab` ids trained on the
            inputs.
        valid: share of the documents that are kept for validation, 0 to 1.
        seed: of the choice of those documents.
        format: `text`, `auto`, or of fine-tuning records; `tokens`: rows of a script, whose ids are
            below `vocab`.
        chat_template: a built-in template or a file; None: the tokenizer's own.
        max_tokens: of training documents, after which nothing more is read; None: all.
    """

    inputs: tuple[str, ...]
    tokenizer: str = BYTES
    vocab: int = 8192
    text_field: str = "text"
    split_on: SplitOn = "file"
    valid: float = 0.01
    seed: int = 1
    format: DataFormat | Literal["tokens"] = "text"
    classes: tuple[str, ...] = ()
    chat_template: str | None = None
    max_tokens: int | None = None

    def is_enough(self, writer: TokenWriter) -> bool:
        """Whether the training split has all tokens that are wanted."""
        return self.max_tokens is not None and writer.num_tokens >= self.max_tokens


def prepare(
    options: PrepareOptions,
    out: Path,
    progress: Progress = no_progress,
    *,
    given: GivenRows | None = None,
) -> PreparedMeta:
    """Write the folder `out`; returns its metadata.

    Args:
        given: rows that are read in place of the inputs of the options, which name them.

    Raises:
        DataError: an input that cannot be read, no text in any of them, or `out` exists.
    """
    # also a broken link: a rename onto it would replace it
    if os.path.lexists(out):
        raise DataError(
            Fault(
                "out",
                "exists already",
                got=repr(str(out)),
                need="a new folder",
                fix="choose another --out",
            )
        )
    inputs = find_inputs(options.inputs) if given is None else (given,)
    # beside `out`: a rename into its place must not cross file systems
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        got = f"{str(out)!r}: {error.strerror}"
        raise DataError(
            Fault(
                "out",
                "the folder cannot be created",
                got=got,
                need="a folder",
                fix="choose another --out",
            )
        ) from None
    try:
        meta = _write_folder(temporary, options, inputs, progress)
        # all files are synced by now; from here on the folder is whole for everyone
        temporary.rename(out)
    except OSError as error:
        got = f"{str(out)!r}: {error.strerror}"
        raise DataError(Fault("out", "cannot be written", got=got, fix="make room")) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def is_valid(numbers: Iterable[int], *, share: float, seed: int) -> list[bool]:
    """Whether the documents with these numbers are kept for validation; number 0 never is, so that
    training has some.
    """
    array = np.fromiter(numbers, np.int64)
    draws = uniform_draws(array, seed=seed)
    is_kept = (draws < share) & (array > 0)
    kept: list[bool] = is_kept.tolist()
    return kept


def _write_folder(
    folder: Path, options: PrepareOptions, inputs: Sequence[Input], progress: Progress
) -> PreparedMeta:
    tokenizer = _make_tokenizer(folder, options, inputs, progress)
    round_trip = RoundTrip(tokenizer)
    num_ids = max(tokenizer.vocab, options.vocab if options.format == TOKENS else 0)
    dtype: TokenDtype = "uint16" if num_ids <= UINT16_IDS else "uint32"
    reader: RecordReader | None = None
    if options.format != TEXT:
        reader = make_reader(
            AUTO if options.format == TOKENS else options.format,
            options.chat_template,
            tokenizer,
            folder=_tokenizer_folder(options.tokenizer),
            classes=options.classes,
        )
    total_bytes = sum(num_bytes_of(source) for source in inputs)

    def report(done_bytes: int) -> None:
        progress("tokens", done_bytes, total_bytes)

    num_shared = 0
    with ExitStack() as stack:
        writers: dict[Split, TokenWriter] = {}
        for split in SPLITS:
            writer = TokenWriter(folder / split, np.dtype(dtype), has_mask=reader is not None)
            writers[split] = stack.enter_context(writer)
        if reader is None:
            _encode_text(inputs, writers, round_trip, options=options, report=report)
        else:
            num_shared = _encode_records(
                inputs, reader, writers, round_trip, options=options, report=report
            )
    _check_has_tokens(writers["train"], inputs)
    record_format: RecordFormat | Literal["tokens"] | None = None
    if reader is not None:
        _store_template(folder, reader)
        record_format = "tokens" if options.format == TOKENS else reader.format
    meta = PreparedMeta(
        format=FORMAT if reader is None else RECORDS_FORMAT,
        dtype=dtype,
        tokenizer=BYTES if tokenizer.name == BYTES else FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab=tokenizer.vocab,
        end=tokenizer.end,
        inputs=options.inputs,
        files=len(inputs),
        input_bytes=total_bytes,
        text_field=options.text_field,
        split_on=options.split_on,
        valid=options.valid,
        seed=options.seed,
        splits={split: writer.info() for split, writer in writers.items()},
        record_format=cast(Any, record_format or TEXT),  # AUTO is none of a reader
        classes=options.classes,
        num_shared=num_shared,
        num_changed=round_trip.num_different,
        first_changed=round_trip.first,
        read_as=inputs_read_as(options.inputs, inputs)
        + (reader.unread if reader is not None else ""),
        blocks=_all_block_checksums(folder),
    )
    text = meta.model_dump_json(indent=1)
    _write_synced(folder / META, f"{text}\n".encode())
    return meta


def _check_has_tokens(writer: TokenWriter, inputs: Sequence[Input]) -> None:
    if writer.num_tokens:
        return
    files = counted(len(inputs), "file")
    raise DataError(
        Fault(
            KEY, "is empty", got=f"no text in {files}", need="some text", fix="name files with text"
        )
    )


def _tokenizer_folder(name: str) -> Path | None:
    """The folder that a tokenizer comes from; None where there is none."""
    if name in (BYTES, TRAIN):
        return None
    return Path(open_tokenizer(name).name).parent


def _store_template(folder: Path, reader: RecordReader) -> None:
    """Store what rendered the records, where `find_template` finds it beside the tokenizer."""
    if reader.template is None:
        return
    _write_synced(folder / TEMPLATE_FILE, reader.template.text.encode())
    special = json.dumps(dict(reader.template.special_tokens), indent=1, ensure_ascii=False)
    _write_synced(folder / TOKENIZER_CONFIG, f"{special}\n".encode())


def _encode_records(
    inputs: Iterable[Input],
    reader: RecordReader,
    writers: Mapping[Split, TokenWriter],
    round_trip: RoundTrip,
    *,
    options: PrepareOptions,
    report: Callable[[int], None],
) -> int:
    """Write the tokens and masks of all records; returns how many texts have a token that is of
    prompt and answer.
    """
    tokenizer = round_trip.tokenizer
    bytes_before = 0
    num_records = 0
    num_shared = 0
    for source in inputs:
        for encoded in _encoded(source, reader, tokenizer, options=options):
            (is_kept,) = is_valid([num_records], share=options.valid, seed=options.seed)
            writer = writers["valid" if is_kept else "train"]
            for document in encoded.documents:
                writer.add_masked(document.ids, document.mask)
                num_shared += document.has_shared_token
            if encoded.texts:
                check_record(round_trip, encoded, document=num_records)
            num_records += 1
            report(bytes_before + encoded.at)
            if options.is_enough(writers["train"]):
                return num_shared
        bytes_before += num_bytes_of(source)
    return num_shared


def _encoded(
    source: Input, reader: RecordReader, tokenizer: Tokenizer, *, options: PrepareOptions
) -> Iterator[EncodedRecord]:
    """The records of an input."""
    if options.format == TOKENS and isinstance(source, GivenRows):
        return encoded_rows(source.rows(), vocab=options.vocab)
    return (encode_record(record, tokenizer) for record in _records(source, reader))


def _records(source: Input, reader: RecordReader) -> Iterator[RenderedRecord]:
    if isinstance(source, (Path, RemoteFile)):
        with local_file(source) as path:
            yield from reader.read(path)
    else:
        yield from reader.read_rows(source.rows())


def _all_block_checksums(folder: Path) -> dict[str, tuple[int, ...]]:
    """File name -> checksums of its blocks, of all files that were written."""
    checksums = {}
    for split in SPLITS:
        for suffix in (".bin", ".idx", ".mask"):
            file = folder / f"{split}{suffix}"
            if file.exists():
                checksums[file.name] = block_checksums(file)
    return checksums


def _encode_text(
    inputs: Iterable[Input],
    writers: Mapping[Split, TokenWriter],
    round_trip: RoundTrip,
    *,
    options: PrepareOptions,
    report: Callable[[int], None],
) -> None:
    """Write the tokens of all documents."""
    tokenizer = round_trip.tokenizer
    read_options = ReadOptions(
        text_field=options.text_field,
        split_on=options.split_on,
        allow_any_bytes=isinstance(tokenizer, ByteTokenizer),
    )
    if tokenizer.end is None:
        end_tokens = []
    else:
        end_tokens = [tokenizer.end]
    num_documents = 0
    for batch in _batches(read_all(inputs, read_options)):
        texts = [chunk.text for chunk in batch]
        encoded = tokenizer.encode_batch(texts)
        numbers = []
        for chunk in batch:
            # the number that the document has: its chunks may be of several batches, and all must go to one split
            numbers.append(num_documents)
            num_documents += chunk.ends
        kept_for_validation = is_valid(numbers, share=options.valid, seed=options.seed)
        round_trip.check_batch(texts, encoded, documents=numbers)
        for chunk, tokens, is_kept in zip(batch, encoded, kept_for_validation, strict=True):
            writer = writers["valid" if is_kept else "train"]
            writer.add(tokens)
            if chunk.ends:
                writer.add(end_tokens)
                writer.end_document()
        report(batch[-1].at)
        if options.is_enough(writers["train"]):
            # the batch may end inside a document, whose rest is not read
            for writer in writers.values():
                writer.end_document()
            return


def _batches(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    num_chars = 0
    for chunk in chunks:
        batch.append(chunk)
        num_chars += len(chunk.text) + 1
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _make_tokenizer(
    folder: Path, options: PrepareOptions, inputs: Sequence[Input], progress: Progress
) -> Tokenizer:
    """The tokenizer of the options, trained if they say so; its file is stored in the folder."""
    if options.tokenizer == BYTES:
        return open_tokenizer(BYTES)
    if options.tokenizer == TRAIN:
        texts = _training_texts(options, inputs, progress)
        content = train_bpe(texts, vocab=options.vocab).encode()
    else:
        content = Path(open_tokenizer(options.tokenizer).name).read_bytes()
    _write_synced(folder / FILE, content)
    return open_tokenizer(str(folder / FILE))


def _training_texts(
    options: PrepareOptions, inputs: Sequence[Input], progress: Progress
) -> Iterator[str]:
    """Every chunk, or a uniform sample of them where there are many; a function of the options."""
    total_bytes = max(sum(num_bytes_of(source) for source in inputs), 1)
    share = MAX_TRAINING_CHARS / total_bytes
    for number, chunk in enumerate(_chunks_to_train_on(options, inputs)):
        draw = 0.0
        if share < 1:
            (draw,) = uniform_draws(np.array([number]), seed=options.seed)
        if draw < share:
            progress("text for the tokenizer", chunk.at, total_bytes)
            yield chunk.text


def _chunks_to_train_on(options: PrepareOptions, inputs: Sequence[Input]) -> Iterator[TextChunk]:
    """The texts that a tokenizer is trained on: of documents, or of the rendered records."""
    if options.format == TEXT:
        yield from read_all(inputs, ReadOptions(options.text_field, options.split_on))
        return
    reader = make_reader(
        options.format, options.chat_template, open_tokenizer(BYTES), classes=options.classes
    )
    for source in inputs:
        for record in _records(source, reader):
            for text in record.texts:
                yield TextChunk(text.text, ends=True, at=record.at)


def _write_synced(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
