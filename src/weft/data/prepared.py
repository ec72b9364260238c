"""Prepared folders, the output of `weft data prepare`: files, metadata, opening.

DIR/meta.json        sizes, hashes and options
DIR/train.bin        tokens of the documents, concatenated; uint16 or uint32, little-endian
DIR/train.idx        index of every document's first token, then the number of tokens; int64, little-endian
DIR/valid.bin .idx   the same for the documents kept for validation
DIR/tokenizer.json   unless tokens are bytes
DIR/train.mask       of fine-tuning records: uint8, whether each token is of an answer; valid.mask too
DIR/chat_template.jinja, tokenizer_config.json   what rendered the records: the template, and special tokens
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from weft.config.schema import ConfigSection, DataConfig, RecordFormat
from weft.data.chat_template import FILE as TEMPLATE_FILE
from weft.data.chat_template import TOKENIZER_CONFIG
from weft.data.document_bounds import BOUND, BoundsFile
from weft.data.files import KEY, TOKEN_SUFFIX
from weft.data.streams import file_of_folder, is_url
from weft.data.tokenizer import BYTES, FILE, MAX_ID, Tokenizer, open_tokenizer
from weft.data.tokenizer import KEY as TOKENIZER_KEY
from weft.data.tokens import BLOCK_TOKENS, Tokens, TokenStream, open_tokens
from weft.errors import DataError, Fault, counted
from weft.small_files import MIB, UnreadableFile, is_regular_within, read_bytes

META = "meta.json"
FORMAT = 1
RECORDS_FORMAT = 2
"""Of folders with masks, which a weft that does not know them must not train on."""
TEXT = "text"
TOKENS = "tokens"
"""Record format of rows of ids, which a script has tokenized."""
MAX_META_BYTES = 4 * MIB
Split = Literal["train", "valid"]
TokenDtype = Literal["uint16", "uint32"]
SPLITS: tuple[Split, Split] = ("train", "valid")
NOT_OF_FOLDERS = re.compile(r"[*?\[{]|\.\w+$")
"""In URLs of files and patterns."""
PREPARE_AGAIN = "prepare it again: weft data prepare INPUT --out FOLDER"
"""Words in capitals stand for what only the reader knows, in all printed commands."""


def prepare_command(source: str, data: DataConfig) -> str:
    """How to prepare a source as a run reads it, and to train on the result."""
    options = ""
    for name in ("format", "chat_template", "tokenizer", "text_field"):
        value = getattr(data, name)
        if value != DataConfig.model_fields[name].default:
            options += f" --{name} {shlex.quote(value)}"
    return f"weft data prepare {shlex.quote(source)}{options} --out FOLDER, then --{KEY} FOLDER"


class SplitInfo(ConfigSection):
    """Sizes of one split (`longest` in tokens), and hashes of its .bin, .idx and .mask."""

    documents: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    longest: Annotated[int, Field(ge=0)]
    sha256: str
    bounds_sha256: str
    mask_sha256: str = ""


class PreparedMeta(ConfigSection):
    """Content of meta.json; the same input gives the same file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: int
    dtype: TokenDtype
    tokenizer: str
    tokenizer_sha256: str
    vocab: Annotated[int, Field(ge=1, le=MAX_ID)]
    end: Annotated[int, Field(ge=0)] | None
    inputs: tuple[str, ...]
    files: int
    input_bytes: int
    text_field: str
    split_on: str
    valid: float
    seed: int
    splits: dict[str, SplitInfo]
    record_format: Literal["text", "tokens"] | RecordFormat = "text"
    classes: tuple[str, ...] = ()
    num_shared: Annotated[int, Field(ge=0)] = 0
    """Texts in which a token is of prompt and answer."""
    num_changed: Annotated[int, Field(ge=0)] = 0
    """Texts that the tokenizer does not reproduce."""
    first_changed: str = ""
    read_as: str = ""
    """What the inputs were read as, in words; folders of an older weft do not say it."""
    blocks: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """CRC-32 of sampled blocks of each file (`data/verify.py`); folders of an older weft have none."""


@dataclass(frozen=True)
class Prepared:
    """An opened folder: all files exist and have the sizes that meta.json states."""

    folder: Path
    meta: PreparedMeta

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that produced the tokens.

        Raises:
            DataError: it is missing, or it has another hash.
        """
        if self.meta.tokenizer == BYTES:
            name = BYTES
        else:
            name = str(self.folder / FILE)
        tokenizer = open_tokenizer(name, within=self.folder)
        if tokenizer.sha256 != self.meta.tokenizer_sha256:
            got = f"sha256 {tokenizer.sha256[:12]}"
            need = f"{self.meta.tokenizer_sha256[:12]} as in {META}"
            raise DataError(
                Fault(
                    TOKENIZER_KEY,
                    f"{name} did not produce the tokens",
                    got=got,
                    need=need,
                    fix=PREPARE_AGAIN,
                )
            )
        return tokenizer

    def stream(self, split: Split, *, vocab: int) -> TokenStream:
        """The tokens of a split, with the bounds of its documents."""
        file = self.folder / f"{split}.bin"
        dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        return TokenStream(
            files=(file,),
            parts=(open_tokens(file, dtype),),
            vocab=vocab,
            documents=self.bounds(split),
            known_sha256=self.meta.splits[split].sha256,
            read_as=self.meta.read_as,
        )

    def mask(self, split: Split) -> Tokens:
        """Whether each token is of an answer, uint8."""
        return open_tokens(self.folder / f"{split}.mask", np.dtype(np.uint8))

    def files(self, split: Split) -> tuple[tuple[Path, str], ...]:
        """The files of a split with the SHA-256 of each."""
        info = self.meta.splits[split]
        hashes = {".bin": info.sha256, ".idx": info.bounds_sha256}
        if self.meta.record_format != TEXT:
            hashes[".mask"] = info.mask_sha256
        found = []
        for suffix, sha256 in hashes.items():
            file = self.folder / f"{split}{suffix}"
            found.append((file, sha256))
        return tuple(found)

    def bounds(self, split: Split) -> BoundsFile:
        """Index of every document's first token, and the number of tokens."""
        info = self.meta.splits[split]
        return BoundsFile(
            path=self.folder / f"{split}.idx", length=info.documents + 1, sha256=info.bounds_sha256
        )

    def damage(self) -> Iterator[str]:
        """Files whose content differs from what was written; reads everything."""
        for split in SPLITS:
            for file, written in self.files(split):
                found = hash_file(file)
                if found != written:
                    yield f"{file}: sha256 {found[:12]}, {written[:12]} was written"


def is_prepared(path: Path) -> bool:
    """Whether a folder was written by `weft data prepare`, complete or not."""
    bounds = path / f"{SPLITS[0]}.idx"
    return os.path.lexists(path / META) or os.path.lexists(bounds)


def open_prepared(folder: Path) -> Prepared:
    """Open a prepared folder; sizes are checked, contents are not.

    Raises:
        DataError: a file that is missing, truncated or unreadable.
    """
    meta = _read_meta(folder / META)
    faults: list[Fault] = []
    for split in SPLITS:
        faults.extend(_file_faults(folder, meta, split))
    if meta.tokenizer != BYTES and not (folder / FILE).is_file():
        faults.append(Fault(KEY, f"{folder} lacks {FILE}", fix=PREPARE_AGAIN))
    if faults:
        raise DataError(*faults)
    return Prepared(folder, meta)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run's data: that of a prepared folder, else the one that `data.tokenizer`
    names.

    Raises:
        DataError: it cannot be opened, or `data.tokenizer` names another than the folder's.
    """
    for source in sources_of(data):
        prepared = prepared_of(source)
        if prepared is not None:
            return agreed_tokenizer(prepared, data)
    return open_tokenizer(data.tokenizer)


def prepared_of(source: str) -> Prepared | None:
    """The prepared folder that a source is, or that it names a .bin of; None for any other source.

    Raises:
        DataError: the folder is incomplete.
    """
    path = Path(os.path.expanduser(source))
    names_split = path.suffix == TOKEN_SUFFIX and path.stem in SPLITS
    if is_url(source):
        url = source.rpartition("/")[0] if names_split else source.rstrip("/")
        return _downloaded(url)
    folder = path.parent if names_split else path
    if is_prepared(folder):
        return open_prepared(folder)
    return None


def _downloaded(url: str) -> Prepared | None:
    """The prepared folder behind a URL, in the cache; None for any other URL.

    Raises:
        DataError: the folder is incomplete, or a file cannot be downloaded.
    """
    first = None if NOT_OF_FOLDERS.search(url) else file_of_folder(url, META)
    if first is None:
        return None
    folder = first.fetched().parent
    meta = _read_meta(folder / META)
    suffixes = (".bin", ".idx") if meta.record_format == TEXT else (".bin", ".idx", ".mask")
    names = [f"{split}{suffix}" for split in SPLITS for suffix in suffixes]
    if meta.tokenizer != BYTES:
        names.append(FILE)
    if meta.record_format != TEXT:
        written = (TEMPLATE_FILE, TOKENIZER_CONFIG)
        names += [name for name in written if file_of_folder(url, name) is not None]
    for name in names:
        first.beside(name).fetched()
    return open_prepared(folder)


def sources_of(data: DataConfig) -> tuple[str, ...]:
    """The sources of a run, without their weights."""
    if not data.mix:
        return (data.source,)
    sources = []
    for entry in data.mix:
        source, _, _ = entry.rpartition("=")
        sources.append(source)
    return tuple(sources)


def agreed_tokenizer(prepared: Prepared, data: DataConfig) -> Tokenizer:
    """The folder's own tokenizer; `data.tokenizer` may name the same one.

    Raises:
        DataError: it names another.
    """
    own = prepared.tokenizer()
    if data.tokenizer != BYTES and open_tokenizer(data.tokenizer).sha256 != own.sha256:
        what = f"is not the tokenizer that prepared {prepared.folder}"
        fix = "omit data.tokenizer: a prepared folder has its own"
        raise DataError(Fault(TOKENIZER_KEY, what, got=data.tokenizer, need=own.name, fix=fix))
    return own


def hash_file(file: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(BLOCK_TOKENS):
            digest.update(block)
    return digest.hexdigest()


def _read_meta(file: Path) -> PreparedMeta:
    try:
        text = read_bytes(file, max_bytes=MAX_META_BYTES, within=file.parent)
    except UnreadableFile as error:
        missing = Fault(KEY, f"{file.parent} lacks {META}", got=error.what, fix=PREPARE_AGAIN)
        if error.is_missing:
            fault = missing
        else:
            fault = error.fault(KEY, fix=PREPARE_AGAIN)
        raise DataError(fault) from None
    try:
        meta = PreparedMeta.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise DataError(
            Fault(KEY, f"{file} cannot be read", got=f"{where}: {first['msg']}", fix=PREPARE_AGAIN)
        ) from None
    if meta.format > RECORDS_FORMAT or set(meta.splits) != set(SPLITS):
        need = f"format {RECORDS_FORMAT} with {' and '.join(SPLITS)}"
        raise DataError(
            Fault(
                KEY,
                f"{file} was written by a newer weft",
                got=f"format {meta.format}",
                need=need,
                fix=PREPARE_AGAIN,
            )
        )
    max_vocab = 2 ** (8 * np.dtype(meta.dtype).itemsize)
    if meta.vocab > max_vocab or (meta.end or 0) >= meta.vocab:
        got = f"vocab {meta.vocab}, end {meta.end}"
        need = f"end < vocab <= {max_vocab}"
        raise DataError(
            Fault(
                KEY,
                f"{file} contradicts itself: {meta.dtype}",
                got=got,
                need=need,
                fix=PREPARE_AGAIN,
            )
        )
    return meta


def _file_faults(folder: Path, meta: PreparedMeta, split: Split) -> Iterator[Fault]:
    info = meta.splits[split]
    tokens_size = info.tokens * np.dtype(meta.dtype).itemsize
    bounds_size = (info.documents + 1) * BOUND.itemsize
    sizes = {".bin": tokens_size, ".idx": bounds_size}
    if meta.record_format != TEXT:
        sizes[".mask"] = info.tokens
    for suffix, size in sizes.items():
        file = folder / f"{split}{suffix}"
        if not file.is_file():
            yield Fault(KEY, f"{folder} lacks {file.name}", fix=PREPARE_AGAIN)
            continue
        if not is_regular_within(file, folder):
            yield Fault(KEY, f"{file} cannot be read, or lies elsewhere", fix=PREPARE_AGAIN)
            continue
        found = file.stat().st_size
        if found != size:
            if found < size:
                what = f"{file} is truncated"
            else:
                what = f"{file} is too long"
            yield Fault(
                KEY,
                what,
                got=counted(found, "byte"),
                need=f"{size} as {META} states",
                fix=PREPARE_AGAIN,
            )
