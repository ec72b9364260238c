"""Bad inputs of data: formats of files, records, pairs, packing, mixtures, tokenizers; a table of files, flags and lines."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow

from tests.input.cases import ANSWER, ASK, GOOD, PAIR, Case
from tests.input.folders import write

PNG = b"\x89PNG\r\n\x1a\n" + bytes(99)
TEXT = b'{"text": "some text of some words"}\n' * 40
CHAT = ("--data.format", "chat", "--data.chat_template", "chatml")
DPO = ("--data.format", "preference", "--loss", "dpo")
TOKENIZER = ("--data.source", "text.txt", "--data.tokenizer", "tokenizer.json")


def zipped() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


def zst(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def numpy_file() -> bytes:
    file = BytesIO()
    np.save(file, np.arange(99))
    return file.getvalue()


def vocabulary(**changes: object) -> bytes:
    """A tokenizer.json of a few words; changes replace its parts."""
    words = {"some": 0, "text": 1, "to": 2, "train": 3, "on": 4, "?": 5}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"},
    }  # fmt: skip
    return json.dumps({**content, **changes}).encode()


FILES: dict[str, tuple[str, bytes, str]] = {
    "a PNG image": ("a.png", PNG, "a.png is no text (got a PNG image"),
    "an image as text": ("a.txt", PNG, "a.txt is no text (got a PNG image"),
    "an image as JSONL": ("a.jsonl", PNG, "is no text (got a PNG image"),
    "an image in xz": ("a.txt.xz", lzma.compress(PNG), "is no text (got a PNG image"),
    "a zip": ("a.zip", zipped(), "(got a zip archive"),
    "a zip as CSV": ("a.csv", zipped(), "(got a zip archive"),
    "a NumPy array": ("a.npy", numpy_file(), "(got a NumPy array"),
    "a PDF": ("a.pdf", b"%PDF-1.7\n% words", "(got a PDF"),
    "a broken tar": ("a.tar.gz", gzip.compress(bytes(257) + b"ustar" + bytes(99)), "is a broken tar"),
    "a database": ("a.db", b"SQLite format 3\0" + bytes(99), "(got a SQLite database"),
    "UTF-16 text": ("a.txt", "a text".encode("utf-16"), "iconv -f UTF-16 -t UTF-8 a.txt"),
    "UTF-16 CSV": ("a.csv", "text\nwords\n".encode("utf-16"), "iconv -f UTF-16"),
    "UTF-32 text": ("a.txt", "a text".encode("utf-32"), "(got UTF-32 text"),
    "UTF-16 without a mark": ("a.txt", ("a text" * 9).encode("utf-16-le"), "without a byte-order"),
    "zero bytes as text": ("a.txt", bytes(999), "(got binary data"),
    "numbers as text": ("a.txt", np.arange(99.0, dtype="<f4").tobytes(), "is no text (got"),
    "broken xz": ("a.jsonl.xz", lzma.compress(TEXT)[:-9], "is a broken xz file"),
    "broken bz2": ("a.jsonl.bz2", bz2.compress(TEXT)[:-9], "is a broken bz2 file"),
    "broken zst": ("a.jsonl.zst", zst(TEXT)[:-5], "is a broken zstd file"),
    "no xz at all": ("a.txt.xz", b"plain text", "is a broken xz file"),
    "no zst at all": ("a.txt.zst", b"plain text", "is a broken zstd file"),
    "compressed parquet": ("a.parquet.gz", gzip.compress(b"PAR1" + bytes(9)), "compressed parquet"),
    "an array that is cut": ("a.json", b'[{"text": "a"}, {"te', "after item 1"),
    "an array of texts": ("a.json", b'["a", "b"]', "in place of an object"),
    "an array without commas": ("a.json", b'[{"text": "a"} {"text": "b"}]', "in place of ','"),
    "two arrays": ("a.json", b'[{"text": "a"}]\n[{"text": "b"}]', "behind the array"),
    "an empty array": ("a.json", b"[]", "is empty"),
    "an object over lines": ("a.json", b'{\n"text": "a"\n}', "one JSON object a line"),
    "an array without the field": ("a.json", b'[{"body": "a"}]', "has no such field (got 'text')"),
    "CSV without the column": ("a.csv", b"id,body\n1,a\n", "has no such field (got 'text')"),
    "CSV with a long row": ("a.csv", b"id,text\n1,a,b\n", "a.csv:2 has other columns"),
    "CSV with a short row": ("a.csv", b"id,text\n1\n", "got fewer cells; need 2 cells"),
    "CSV in Latin-1": ("a.csv", b"text\n\xe9\xe8\n", "a.csv:2 cannot be read"),
    "CSV with an open quote": ("a.csv", b'text\n"a\nb\n', "cannot be read"),
    "CSV of a header": ("a.csv", b"id,text\n", "is empty"),
    "TSV with commas": ("a.tsv", b"id,text\n1,a\n", "has no such field (got 'text')"),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "is empty"),
    "JSONL of a mark": ("a.jsonl", b"\xef\xbb\xbf", "is empty"),
}  # fmt: skip
"""Name -> file, its content, a part of the line."""

Rows = list[object]
RECORDS: dict[str, tuple[tuple[str, ...], Rows, str]] = {
    "tools without an answer": (CHAT, [{"messages": [ASK], "tools": []}], "no message is of the role"),
    "messages of null": (CHAT, [{"messages": None}], "has no 'messages'"),
    "a message of null": (CHAT, [{"messages": [None]}], "message 1 of 'messages' is no object"),
    "a role of a number": (CHAT, [{"messages": [{"role": 1, "content": "x"}]}], "has no role"),
    "a pair of numbers": (DPO, [{**PAIR, "chosen": 3}], "'chosen' is not text"),
    "a pair of lists and texts": (DPO, [{**PAIR, "chosen": [ANSWER]}], "'chosen' is not text"),
    "a pair without the rejected": (DPO, [{"prompt": "a", "chosen": "b"}], "has no 'rejected'"),
    "a pair whose prompt is empty": (DPO, [{**PAIR, "prompt": []}], "'prompt' is not text"),
    "pairs that are conversations": (DPO, [GOOD], "--data.format chat"),
    "pairs too long": ((*DPO, "--data.long", "error"), [{**PAIR, "chosen": "b" * 999}], "longer than"),
    "pairs in a stream": ((*DPO, "--data.packing", "stream"), [PAIR], "records stay whole"),
    "texts too long": ((*CHAT, "--data.long", "error", "--data.seq_len", "60"), [GOOD], "longer than"),
}  # fmt: skip
"""Name -> flags, records, a part of the line."""

WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a mixture of one that is missing": (("--data.mix", "text.txt=1", "nowhere=1"), "no such file"),
    "a mixture with weight 0": (("--data.mix", "text.txt=0", "prep=1"), "is not valid (got '0'"),
    "a mixture with weight nan": (("--data.mix", "text.txt=nan"), "is not valid (got 'nan'"),
    "a mixture with a share too small": (("--data.mix", "text.txt=1", "prep=1e-9"), "is too small"),
    "a mixture of one twice": (("--data.mix", "prep=1", "prep=2"), "names a source twice"),
    "a mixture without weights": (("--data.mix", "text.txt"), "names no weight"),
    "documents of ids": (("--data.source", "a.bin", "--data.packing", "documents"), "where documents begin"),
    "long documents": (
        ("--data.source", "text.txt", "--data.packing", "documents", "--data.long", "error"),
        "document 0 of text.txt is longer",
    ),
    "packing of another name": (("--data.packing", "rows"), "data.packing"),
    "round trip of another name": (("--data.round_trip", "none"), "data.round_trip"),
}  # fmt: skip
TOKENIZERS: dict[str, tuple[bytes, str]] = {
    "a tokenizer that joins words": (vocabulary(), "does not reproduce 1 text"),
    "a tokenizer in lower case": (
        vocabulary(normalizer={"type": "Replace", "pattern": {"String": "s"}, "content": ""}),
        "decode(encode(text)) == text",
    ),
    "a tokenizer of another model": (vocabulary(model={"type": "Words"}), "is not a tokenizer"),
    "a tokenizer of a list": (b"[]", "is not a tokenizer"),
    "a tokenizer in UTF-16": (vocabulary().decode().encode("utf-16"), "is not a tokenizer"),
}


def data_formats() -> Iterator[Case]:
    """All of them; every fourth runs by default."""
    for name, (file, content, line) in FILES.items():
        yield Case(name, ("train", "--data.source", file), line, write(file, content))
    for name, (flags, rows, line) in RECORDS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        yield Case(
            name, ("train", "--data.source", "c.jsonl", *flags), line, write("c.jsonl", text)
        )
    for name, (flags, line) in WORDS.items():
        yield Case(name, ("train", *flags), line, _ids)
    for name, (content, line) in TOKENIZERS.items():
        yield Case(name, ("train", *TOKENIZER), line, write("tokenizer.json", content))


def _ids(folder: Path) -> None:
    np.arange(200, dtype="<u2").tofile(folder / "a.bin")
