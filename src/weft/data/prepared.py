"""Owns the folder that `weft data prepare` leaves: its files, what meta.json says of them, and opening it.

DIR/meta.json        what is in the others
DIR/train.bin        tokens of the documents one after the other, uint16 or uint32, little-endian
DIR/train.idx        place of every document's first token, and at the end the number of tokens; int64, little-endian
DIR/valid.bin .idx   the same for the documents that are not trained on
DIR/tokenizer.json   unless every byte is a token
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, ValidationError

from weft.config.schema import ConfigSection, DataConfig
from weft.data.bounds import BOUND, BoundsFile
from weft.data.files import KEY, TOKEN_SUFFIX
from weft.data.tokenizer import BYTES, FILE, Tokenizer, open_tokenizer
from weft.data.tokenizer import KEY as TOKENIZER_KEY
from weft.data.tokens import BLOCK_TOKENS, TokenStream, open_tokens
from weft.errors import DataError, Fault

META = "meta.json"
FORMAT = 1
Split = Literal["train", "valid"]
TokenDtype = Literal["uint16", "uint32"]
SPLITS: tuple[Split, Split] = ("train", "valid")
PREPARE = "weft data prepare it again"


class Part(ConfigSection):
    """One of both splits: `longest` is in tokens, the hashes are of its .bin and .idx."""

    documents: int
    tokens: int
    longest: int
    sha256: str
    bounds_sha256: str


class Meta(ConfigSection):
    """What meta.json says; the same input makes the same file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: int
    dtype: TokenDtype
    tokenizer: str
    tokenizer_sha256: str
    vocab: int
    end: int | None
    inputs: tuple[str, ...]
    files: int
    input_bytes: int
    text_field: str
    split_on: str
    valid: float
    seed: int
    splits: dict[str, Part]


@dataclass(frozen=True)
class Prepared:
    """An opened folder: all files are there and as long as they must be."""

    folder: Path
    meta: Meta

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: it is not there, or it is another.
        """
        name = BYTES if self.meta.tokenizer == BYTES else str(self.folder / FILE)
        tokenizer = open_tokenizer(name)
        if tokenizer.sha256 != self.meta.tokenizer_sha256:
            got = f"sha256 {tokenizer.sha256[:12]}"
            need = f"{self.meta.tokenizer_sha256[:12]} as in {META}"
            raise DataError(Fault(TOKENIZER_KEY, f"{name} is not the one that made the tokens", got, need, PREPARE))
        return tokenizer

    def stream(self, split: Split, *, vocab: int) -> TokenStream:
        """The tokens of a split, with the bounds of its documents."""
        part, file = self.meta.splits[split], self.folder / f"{split}.bin"
        tokens = open_tokens(file, np.dtype(self.meta.dtype).newbyteorder("<"))
        return TokenStream((file,), (tokens,), vocab, documents=self.bounds(split), known_sha256=part.sha256)

    def bounds(self, split: Split) -> BoundsFile:
        """Place of every document of a split, and its length."""
        return BoundsFile(self.folder / f"{split}.idx", self.meta.splits[split].documents + 1)

    def damage(self) -> Iterator[str]:
        """What is not as it was written, by reading everything."""
        for split in SPLITS:
            part = self.meta.splits[split]
            for suffix, known in ((".bin", part.sha256), (".idx", part.bounds_sha256)):
                file = self.folder / f"{split}{suffix}"
                if (found := hash_file(file)) != known:
                    yield f"{file}: sha256 {found[:12]}, written was {known[:12]}"


def is_prepared(path: Path) -> bool:
    """Whether a folder was made by `weft data prepare`, whole or not."""
    return (path / META).is_file() or (path / f"{SPLITS[0]}.idx").is_file()


def open_prepared(folder: Path) -> Prepared:
    """The folder, its files looked at from outside.

    Raises:
        DataError: a file that is missing, cut off or not to be read.
    """
    meta = _read_meta(folder / META)
    faults = [fault for split in SPLITS for fault in _file_faults(folder, meta, split)]
    if meta.tokenizer != BYTES and not (folder / FILE).is_file():
        faults.append(Fault(KEY, f"{folder} lacks {FILE}", fix=PREPARE))
    if faults:
        raise DataError(*faults)
    return Prepared(folder, meta)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of what a run reads: a prepared folder's own, else the one that `data.tokenizer` names.

    Raises:
        DataError: it cannot be opened, or `data.tokenizer` names another than the folder's.
    """
    prepared = (prepared_of(source) for source in sources_of(data))
    found = next((each for each in prepared if each is not None), None)
    return open_tokenizer(data.tokenizer) if found is None else agreed_tokenizer(found, data)


def prepared_of(source: str) -> Prepared | None:
    """The prepared folder that a source is, or that it names a .bin of; None for any other source.

    Raises:
        DataError: the folder is not whole.
    """
    path = Path(source).expanduser()
    folder = path.parent if path.suffix == TOKEN_SUFFIX and path.stem in SPLITS else path
    return open_prepared(folder) if is_prepared(folder) else None


def sources_of(data: DataConfig) -> tuple[str, ...]:
    """The sources of a run, without their weights."""
    return tuple(word.rpartition("=")[0] for word in data.mix) or (data.source,)


def agreed_tokenizer(prepared: Prepared, data: DataConfig) -> Tokenizer:
    """The folder's own tokenizer; `data.tokenizer` may name the same one.

    Raises:
        DataError: it names another.
    """
    own = prepared.tokenizer()
    if data.tokenizer != BYTES and open_tokenizer(data.tokenizer).sha256 != own.sha256:
        what = f"is not the one that prepared {prepared.folder}"
        fix = "leave data.tokenizer out: a prepared folder brings its own"
        raise DataError(Fault(TOKENIZER_KEY, what, data.tokenizer, own.name, fix))
    return own


def hash_file(file: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(BLOCK_TOKENS):
            digest.update(block)
    return digest.hexdigest()


def _read_meta(file: Path) -> Meta:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise DataError(Fault(KEY, f"{file.parent} lacks {META}", error.strerror or "", fix=PREPARE)) from None
    try:
        meta = Meta.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise DataError(Fault(KEY, f"{file} cannot be read", f"{where}: {first['msg']}", fix=PREPARE)) from None
    if meta.format > FORMAT or set(meta.splits) != set(SPLITS):
        need = f"format {FORMAT} with {' and '.join(SPLITS)}"
        raise DataError(Fault(KEY, f"{file} is of a newer weft", f"format {meta.format}", need, PREPARE))
    return meta


def _file_faults(folder: Path, meta: Meta, split: Split) -> Iterator[Fault]:
    part = meta.splits[split]
    sizes = {".bin": part.tokens * np.dtype(meta.dtype).itemsize, ".idx": (part.documents + 1) * BOUND.itemsize}
    for suffix, size in sizes.items():
        file = folder / f"{split}{suffix}"
        if not file.is_file():
            yield Fault(KEY, f"{folder} lacks {file.name}", fix=PREPARE)
        elif (found := file.stat().st_size) != size:
            what = f"{file} is cut off" if found < size else f"{file} is too long"
            yield Fault(KEY, what, f"{found} bytes", f"{size} as {META} says", PREPARE)
