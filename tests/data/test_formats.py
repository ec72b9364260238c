"""Formats of data files: each is read as what it holds, binary data are rejected, and a line says what was read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import zipfile

import numpy as np
import pyarrow
import pytest

from weft.cli import main
from weft.config.schema import DataConfig
from weft.data import row_files, tokens
from weft.data.documents import ReadOptions, read_documents
from weft.data.files import find_files
from weft.data.formats import FileFormat, format_of, read_as
from weft.data.token_sources import open_source
from weft.errors import DataError

TEXTS = [f'document {number}, "quoted",\n{"word " * 9}é' for number in range(9)]
ROWS = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
MARK = b"\xef\xbb\xbf"


def zst(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def table(delimiter):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


FILES = {
    "a.jsonl": (LINES, "1 JSONL"),
    "a.JSONL": (MARK + LINES, "1 JSONL"),
    "a.ndjson": (LINES, "1 JSONL"),
    "a.jsonl.gz": (gzip.compress(LINES), "1 JSONL (gz)"),
    "a.jsonl.xz": (lzma.compress(LINES), "1 JSONL (xz)"),
    "a.jsonl.bz2": (bz2.compress(LINES), "1 JSONL (bz2)"),
    "a.jsonl.zst": (zst(LINES[:99]) + zst(LINES[99:]), "1 JSONL (zst)"),
    "a.json": (json.dumps(ROWS, indent=1).encode(), "1 JSON array"),
    "b.jsonl": (json.dumps(ROWS).encode(), "1 JSON array"),
    "a.csv": (MARK + table(","), "1 CSV"),
    "a.tsv": (table("\t"), "1 TSV"),
}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(99)
UTF16 = "a text of words\n".encode("utf-16")


def array_file():
    file = io.BytesIO()
    np.save(file, np.arange(99))
    return file.getvalue()


def zip_file():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


BINARY = {
    "png": (PNG, "a PNG image"),
    "png in xz": (lzma.compress(PNG), "a PNG image"),
    "npy": (array_file(), "a NumPy array"),
    "zip": (zip_file(), "a zip archive"),
    "utf-16": (UTF16, "UTF-16 text"),
    "utf-16 without a mark": (UTF16[2:], "UTF-16 text without a byte-order mark"),
    "numbers": (np.arange(1, 99, dtype=np.float32).tobytes(), "binary data"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_of_rows_is_read_as_the_same_documents(tmp_path, name):
    content, said = FILES[name]
    (tmp_path / name).write_bytes(content)
    data = DataConfig(source=str(tmp_path / name), seq_len=8)
    stream = open_source(data.source, data, vocab=256)
    assert bytes(stream.read(0, len(stream)).tolist()).decode() == "".join(TEXTS)
    assert len(stream.document_bounds) == len(TEXTS) + 1
    assert stream.read_as == said


def test_a_json_array_is_read_in_blocks_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 7)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, ensure_ascii=False) + "\n")
    rows = row_files.array_rows(tmp_path / "a.json")
    assert [row.fields for row in rows] == ROWS


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"text": "a"}', "does not end"),
        ('[{"text": "a"} {"text": "b"}]', "after item 1 (got '{' in place"),
        ('[{"text": "a"}]\n[]', "more text stands behind the array"),
        ('["a"]', "in place of an object"),
        ("[" + '{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_array_of_objects_is_rejected_with_the_item(tmp_path, content, why):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as error:
        list(row_files.array_rows(tmp_path / "a.json"))
    assert why in str(error.value)


@pytest.mark.parametrize("behind", [b'\n[{"text": "b"}]', b" " * 20 + b"x", b"\xc3"])
def test_text_behind_an_array_that_ends_a_block_is_found(tmp_path, monkeypatch, behind):
    array = b'[{"text": "a"}]'
    (tmp_path / "a.json").write_bytes(array + behind)
    monkeypatch.setattr(row_files, "BLOCK_BYTES", len(array))
    with pytest.raises(DataError, match="after item 1"):
        list(row_files.array_rows(tmp_path / "a.json"))


@pytest.mark.parametrize("kept_below", [0, 2**20])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, monkeypatch, kept_below):
    monkeypatch.setattr(tokens, "MIN_ON_DISK_BYTES", kept_below)
    (tmp_path / "a.txt").write_bytes(MARK + b"a text")
    data = DataConfig(source=str(tmp_path / "a.txt"))
    stream = open_source(data.source, data, vocab=256)
    assert bytes(stream.read(0, len(stream)).tolist()) == b"a text"
    chunks = read_documents(tmp_path / "a.txt", ReadOptions())
    assert [chunk.text for chunk in chunks] == ["a text"]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("suffix", ["", ".txt", ".jsonl"])
def test_binary_data_are_rejected_whatever_their_name(tmp_path, name, suffix):
    content, what = BINARY[name]
    file = tmp_path / f"a{suffix}"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"is no text \\(got {what}"):
        format_of(file)


def test_the_command_that_is_printed_for_utf_16_mends_the_file(tmp_path):
    file = tmp_path / "a text.txt"
    file.write_bytes(UTF16)
    with pytest.raises(DataError) as error:
        format_of(file)
    subprocess.run(error.value.faults[0].fix, shell=True, check=True)
    new = tmp_path / "utf8-a text.txt"
    assert format_of(new).is_plain_text
    assert new.read_text().endswith("a text of words\n")


def test_compression_is_told_by_the_first_bytes_where_no_suffix_says_it(tmp_path):
    (tmp_path / "a").write_bytes(bz2.compress(b"a text"))
    assert format_of(tmp_path / "a") == FileFormat("text", "bz2")


def test_a_cut_zst_file_is_broken(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zst(LINES)[:-5])
    with pytest.raises(DataError, match="is a broken zstd file"):
        list(read_documents(tmp_path / "a.jsonl.zst", ReadOptions()))


def test_prepare_says_what_was_read_and_what_of_a_folder_was_left_out(tmp_path, capsys):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("1.txt", "2.txt", "3.MD"):
        (folder / name).write_text("some text\n")
    (folder / "4.jsonl.zst").write_bytes(zst(LINES))
    (folder / "5.png").write_bytes(PNG)
    (folder / "6.json").write_text("{}")
    (folder / "LICENSE").write_text("text")
    said = "3 text files, 1 JSONL (zst); left out: 1 json, 1 png, 1 without suffix"
    formats = map(format_of, find_files(str(folder)))
    assert read_as(str(folder), formats) == said
    assert main(["data", "prepare", str(folder), "--out", str(tmp_path / "o")]) == 0
    assert f"read as    {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("café ".encode("latin-1") * 3000, "1 text file (not UTF-8)"),
        ("\u00e9".encode() * 8000, "1 text file"),
        (b"a" + "\u00e9".encode() * 8000, "1 text file"),  # the head ends inside of a character
        (gzip.compress("café ".encode("latin-1") * 3000), "1 text file (gz, not UTF-8)"),
    ],
    ids=["latin-1", "utf-8", "cut", "compressed"],  # compressed bytes hold the time
)
def test_text_that_is_not_utf8_is_said(tmp_path, content, said):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    assert read_as(str(file), [format_of(file)]) == said
