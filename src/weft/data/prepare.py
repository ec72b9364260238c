"""Owns making token files out of documents: read, encoded, dealt to training and validation and written, a little at a time.

Note [As a stream]
    Pieces of documents come from the files, a batch of about a million characters is encoded at once (the tokenizer uses
    all cores), and its tokens are appended to train.bin or valid.bin. Nothing else is kept, so memory does not depend on
    how much there is. Everything is written into a folder beside the one that is asked for, which takes its name at the
    end: it is there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.bpe import train_bpe
from weft.data.documents import Piece, Reading, SplitOn, read_documents
from weft.data.files import KEY, TOKEN_SUFFIX, find_files
from weft.data.hub import SCHEME, HubSet
from weft.data.order import draws
from weft.data.prepared import FORMAT, META, SPLITS, Meta, Part, Split, TokenDtype
from weft.data.split_file import SplitFile
from weft.data.tokenizer import BYTES, FILE, ByteTokenizer, Tokenizer, open_tokenizer
from weft.errors import DataError, Fault

TRAIN = "train"
BATCH_CHARS = 2**20
LEARNT_CHARS = 2**26
"""Characters at most that a BPE is trained on, taken evenly from all of them."""

Input = Path | HubSet
Progress = Callable[[str, int, int], None]
"""Called with what is done, and bytes done of all bytes."""


@dataclass(frozen=True)
class Recipe:
    """What is made of what.

    Attributes:
        inputs: files, folders, globs, stdlib, or data sets (`hf:PATH[,CONFIG][:SPLIT]`).
        tokenizer: `bytes`, a tokenizer.json, or `train` for a BPE of `vocab` ids trained on the inputs.
        valid: share of the documents that are kept for validation, 0 to 1.
        seed: which ones those are.
    """

    inputs: tuple[str, ...]
    tokenizer: str = BYTES
    vocab: int = 8192
    text_field: str = "text"
    split_on: SplitOn = "file"
    valid: float = 0.01
    seed: int = 1


def prepare(recipe: Recipe, out: Path, progress: Progress = lambda what, done, total: None) -> Meta:
    """Make the folder `out`; what meta.json says of it.

    Raises:
        DataError: an input that cannot be read, nothing in it, or `out` is there already.
    """
    if os.path.lexists(out):
        raise DataError(Fault("out", "is there already", repr(str(out)), "a new folder", "choose another --out"))
    files = input_files(recipe.inputs)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise DataError(Fault("out", "cannot be made", f"{str(out)!r}: {error.strerror}", "a folder")) from None
    try:
        meta = _fill(beside, recipe, files, progress)
        beside.rename(out)
    except OSError as error:
        raise DataError(Fault("out", "cannot be written", f"{str(out)!r}: {error.strerror}", fix="make room")) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return meta


def input_files(inputs: Sequence[str]) -> tuple[Input, ...]:
    """All files and data sets that the inputs name, each once, in their order.

    Raises:
        DataError: an input that names none, or token files.
    """
    files = tuple(dict.fromkeys(file for source in inputs for file in _inputs_of(source)))
    if tokens := [file for file in files if isinstance(file, Path) and file.suffix == TOKEN_SUFFIX]:
        raise DataError(Fault(KEY, "holds tokens already", str(tokens[0]), "text, JSONL or parquet"))
    return files


def _inputs_of(source: str) -> tuple[Input, ...]:
    return (HubSet.parse(source),) if source.startswith(SCHEME) else find_files(source)


def _num_bytes(file: Input) -> int:
    return file.num_bytes if isinstance(file, HubSet) else file.stat().st_size


def is_valid(numbers: Iterable[int], *, share: float, seed: int) -> list[bool]:
    """Whether the documents of these numbers are kept for validation; number 0 never is, so that there is some training."""
    found = np.fromiter(numbers, np.int64)
    return [bool(drawn) for drawn in (draws(found, seed=seed) < share) & (found > 0)]


def _fill(folder: Path, recipe: Recipe, files: Sequence[Input], progress: Progress) -> Meta:
    total = sum(map(_num_bytes, files))
    tokenizer = _tokenizer(folder, recipe, files, progress)
    reading = Reading(recipe.text_field, recipe.split_on, takes_any_bytes=isinstance(tokenizer, ByteTokenizer))
    dtype: TokenDtype = "uint16" if tokenizer.vocab <= 2**16 else "uint32"
    with ExitStack() as opened:
        out = {split: opened.enter_context(SplitFile(folder / split, np.dtype(dtype))) for split in SPLITS}
        _encode(read_all(files, reading), tokenizer, out, recipe=recipe, tell=lambda at: progress("tokens", at, total))
    splits: dict[str, Part] = {split: out[split].part() for split in SPLITS}
    if not splits["train"].tokens:
        raise DataError(Fault(KEY, "is empty", f"no text in {len(files)} file{'s' * (len(files) > 1)}", "some text"))
    meta = Meta(
        format=FORMAT,
        dtype=dtype,
        tokenizer=BYTES if tokenizer.name == BYTES else FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab=tokenizer.vocab,
        end=tokenizer.end,
        inputs=recipe.inputs,
        files=len(files),
        input_bytes=total,
        text_field=recipe.text_field,
        split_on=recipe.split_on,
        valid=recipe.valid,
        seed=recipe.seed,
        splits=splits,
    )
    _write(folder / META, (meta.model_dump_json(indent=1) + "\n").encode())
    return meta


def read_all(files: Iterable[Input], reading: Reading) -> Iterator[Piece]:
    """The pieces of all files; `at` counts from the beginning of the first."""
    before = 0
    for file in files:
        for piece in file.documents(reading) if isinstance(file, HubSet) else read_documents(file, reading):
            yield Piece(piece.text, piece.ends, before + piece.at)
        before += _num_bytes(file)


def _encode(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    out: dict[Split, SplitFile],
    *,
    recipe: Recipe,
    tell: Callable[[int], None],
) -> None:
    end = [] if tokenizer.end is None else [tokenizer.end]
    number = 0
    for batch in _batches(pieces):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        numbers = number + np.cumsum([0, *(piece.ends for piece in batch)])
        valid = is_valid(numbers, share=recipe.valid, seed=recipe.seed)
        for piece, tokens, is_kept in zip(batch, encoded, valid, strict=False):
            split = out["valid" if is_kept else "train"]
            split.add(tokens)
            if piece.ends:
                split.add(end)
                split.end_document()
        number = int(numbers[-1])
        tell(batch[-1].at)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenizer(folder: Path, recipe: Recipe, files: Sequence[Input], progress: Progress) -> Tokenizer:
    """The tokenizer of the recipe, trained if it says so, and a copy of its file in the folder."""
    if recipe.tokenizer == BYTES:
        return open_tokenizer(BYTES)
    if recipe.tokenizer != TRAIN:
        source = open_tokenizer(recipe.tokenizer)
        _write(folder / FILE, Path(source.name).read_bytes())
    else:
        _write(folder / FILE, train_bpe(_sample(recipe, files, progress), vocab=recipe.vocab).encode())
    return open_tokenizer(str(folder / FILE))


def _sample(recipe: Recipe, files: Sequence[Input], progress: Progress) -> Iterator[str]:
    """Every piece, or an even choice of them where they are many; a function of the recipe."""
    total = max(sum(map(_num_bytes, files)), 1)
    share = LEARNT_CHARS / total
    for number, piece in enumerate(read_all(files, Reading(recipe.text_field, recipe.split_on))):
        if share >= 1 or draws(np.array([number]), seed=recipe.seed)[0] < share:
            progress("text for the tokenizer", piece.at, total)
            yield piece.text


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
