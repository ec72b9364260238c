"""`weft data prepare`: content of the prepared folder for every kind of input, and rejected inputs."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from weft.cli import main
from weft.config.load import load
from weft.config.schema import DataConfig
from weft.data import documents, prepare, prepared, rows
from weft.data.dataset import open_data, open_validation
from weft.data.documents import ReadOptions, read_documents, split_text
from weft.data.files import stdlib_files
from weft.data.prepare import PrepareOptions, is_valid
from weft.data.prepared import open_prepared, tokenizer_of
from weft.data.token_sources import open_source
from weft.data.tokenizer import FileTokenizer, open_tokenizer, train_bpe
from weft.data.verify import content_faults
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, DataError
from weft.models import FAMILIES
from weft.models.gpt2 import config as gpt2

TEXTS = [f"document {number}: " + "lorem ipsum " * (number % 7) + "\n" for number in range(60)]
VOCAB = 300


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A small tokenizer.json, trained on Python."""
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    file.write_text(
        train_bpe((path.read_text() for path in list(stdlib_files())[:12]), vocab=VOCAB)
    )
    return file


def write_lines(file, texts=TEXTS, field="text"):
    rows = "".join(
        json.dumps({field: text, "id": number}) + "\n" for number, text in enumerate(texts)
    )
    data = rows.encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return str(file)


def documents_of(folder, split="train"):
    """The documents of a prepared folder, as text."""
    found = open_prepared(folder)
    stream = found.stream(split, vocab=found.meta.vocab)
    bounds = found.bounds(split)
    tokenizer = found.tokenizer()
    found = []
    for start, stop in pairwise(bounds[:]):
        found.append(tokenizer.decode(stream.read(start, stop).tolist()))
    return found


def made(tmp_path, *inputs, **recipe):
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    options = PrepareOptions(inputs=inputs, **{"valid": 0.0} | recipe)
    prepare.prepare(options, out)
    return out


# ---- what is written


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_is_a_document_of_its_own(tmp_path, name):
    folder = made(tmp_path, write_lines(tmp_path / name))
    assert documents_of(folder) == TEXTS


@pytest.mark.parametrize("num_small", [0, 2000])
def test_a_huge_cell_of_a_parquet_file_is_rejected(tmp_path, monkeypatch, num_small):
    """Alone in its row group the metadata gives it away; among many its length is looked at."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 10_000)
    texts = ["small"] * num_small + ["x" * 10_001]
    table = arrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    with pytest.raises(DataError, match=rf"row {num_small + 1} holds a text that is too long"):
        made(tmp_path, str(tmp_path / "a.parquet"))


def test_every_row_of_a_parquet_file_is_a_document(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"body": [*TEXTS, None, ""], "id": list(range(62))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    folder = made(tmp_path, str(tmp_path / "a.parquet"), text_field="body")
    assert documents_of(folder) == TEXTS


def test_every_text_file_is_a_document_and_no_byte_is_lost(tmp_path):
    contents = [bytes(range(32, 256)) * 3500, "é\r\n\u2028x".encode(), b"\xff"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    (tmp_path / "empty.txt").touch()
    folder = made(tmp_path, f"{tmp_path}/*.txt")
    found = open_prepared(folder)
    assert (folder / "train.bin").read_bytes() == np.frombuffer(
        b"".join(contents), np.uint8
    ).astype("<u2").tobytes()
    values = found.bounds("train")[:].tolist()
    expected = np.cumsum([0, *map(len, contents)]).tolist()
    assert values == expected
    assert found.meta.files == 4
    assert found.meta.input_bytes == sum(map(len, contents))


def test_blank_lines_part_the_documents_of_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "READ_BYTES", 7)
    (tmp_path / "a.txt").write_text("\n \none\ntwo\n\n\n  three\n \t\nfour")
    assert documents_of(made(tmp_path, f"{tmp_path}/a.txt", split_on="blank")) == [
        "one\ntwo\n",
        "  three\n",
        "four",
    ]


def test_files_of_all_kinds_go_into_one_folder_in_their_order(tmp_path):
    (tmp_path / "b.md").write_text("second")
    inputs = (
        write_lines(tmp_path / "z.jsonl", ["first"]),
        str(tmp_path / "b.md"),
        f"{tmp_path}/b*",
    )
    folder = made(tmp_path, *inputs)
    assert documents_of(folder) == ["first", "second"]


def test_a_tokenizer_ends_each_document_with_its_own_token(tmp_path, bpe):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe))
    assert documents_of(folder) == [f"{text}<|endoftext|>" for text in TEXTS]
    assert (folder / "tokenizer.json").read_bytes() == bpe.read_bytes()
    meta = open_prepared(folder).meta
    assert meta.vocab == VOCAB
    assert meta.end == 0
    assert meta.dtype == "uint16"


def test_a_bpe_is_trained_on_the_inputs(tmp_path):
    paths = [str(path) for path in list(stdlib_files())[:12]]
    folder = made(tmp_path, *paths, tokenizer="train", vocab=VOCAB)
    meta = open_prepared(folder).meta
    part = open_prepared(folder).meta.splits["train"]
    assert meta.vocab == VOCAB
    assert part.tokens < 0.8 * meta.input_bytes
    with open(paths[0]) as file:
        assert documents_of(folder)[0] == f"{file.read()}<|endoftext|>"


def test_the_same_recipe_makes_the_same_bytes(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", TEXTS * 4)
    folders = [made(tmp_path, source, tokenizer="train", vocab=270, valid=0.3) for _ in range(2)]
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", "meta.json"):
        data = (folders[0] / name).read_bytes()
        assert data == (folders[1] / name).read_bytes()


def test_the_meta_file_counts_what_is_there(tmp_path):
    texts = ["four", "", "seven 7", "one"]
    part = open_prepared(made(tmp_path, write_lines(tmp_path / "a.jsonl", texts))).meta.splits[
        "train"
    ]
    assert part.documents == 3
    assert part.tokens == 14
    assert part.longest == 7


def test_large_vocabularies_are_kept_in_32_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.ByteTokenizer, "vocab", 2**16 + 1)
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"))
    values = np.fromfile(folder / "train.bin", "<u4").tolist()
    assert values == list("".join(TEXTS).encode())


def test_a_document_that_is_open_when_there_are_tokens_enough_is_ended(tmp_path):
    (tmp_path / "long.txt").write_text("a line of a text that is longer than a batch\n" * 40_000)
    options = PrepareOptions((str(tmp_path / "long.txt"),), valid=0.0, max_tokens=1000)
    info = prepare.prepare(options, tmp_path / "out").splits["train"]
    assert (info.documents, info.longest) == (1, info.tokens)
    assert not list(content_faults(open_prepared(tmp_path / "out"), "train"))


# ---- pieces


@given(text=st.text(st.sampled_from("ab é\n\t .0"), max_size=120), limit=st.integers(1, 20))
def test_a_text_that_is_cut_is_the_same_text(text, limit):
    parts = list(split_text(text, limit=limit))
    assert "".join(parts) == text
    for part in parts[:-1]:
        assert 0 < len(part) <= limit


@given(
    lines=st.lists(
        st.sampled_from(["def f(x):", "    return 1", "", "a  b", "é = 'ß'"]),
        min_size=8,
        max_size=40,
    )
)
def test_the_tokens_of_pieces_are_those_of_the_whole(bpe, lines):
    text = "\n".join(lines)
    tokenizer = open_tokenizer(str(bpe))
    parts = list(split_text(text, limit=40))
    actual = [token for part in parts for token in tokenizer.encode(part)]
    assert actual == tokenizer.encode(text)


def test_the_words_of_pieces_are_those_of_the_whole_at_blank_lines():
    """GPT-2's words: a blank line is two of them before a letter, and one at the end of a text."""
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    text = "one two\n\nthree four\n\n" * 9
    parts = list(split_text(text, limit=23))
    actual = [word for part in parts for word, _ in gpt2_words(part)]
    assert actual == [word for word, _ in gpt2_words(text)]


@given(
    words=st.lists(st.sampled_from(["a", " ", "  ", "über", "42", "!?"]), min_size=20, max_size=60)
)
def test_the_tokens_of_one_long_line_are_those_of_the_whole(bpe, words):
    """Of a line with a word in every part: it can be split before that word."""
    text = " ".join(words)
    assume(" " * 12 not in text)
    tokenizer = open_tokenizer(str(bpe))
    parts = list(split_text(text, limit=17))
    actual = [token for part in parts for token in tokenizer.encode(part)]
    assert actual == tokenizer.encode(text)


@pytest.mark.parametrize("read_bytes", [1, 5, 1000])
def test_pieces_do_not_depend_on_how_a_file_is_read(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(documents, "READ_BYTES", read_bytes)
    monkeypatch.setattr(split_text, "__kwdefaults__", {"limit": 16})
    text = "héllo wörld\n" * 9 + "ein langes\n\nEnde"
    (tmp_path / "a.txt").write_text(text)
    pieces = list(read_documents(tmp_path / "a.txt", ReadOptions()))
    texts = [piece.text for piece in pieces]
    assert texts == list(split_text(text))
    ends = [piece.ends for piece in pieces]
    expected = [False] * (len(pieces) - 1) + [True]
    assert ends == expected


def test_memory_does_not_grow_with_the_text(tmp_path):
    def peak(lines):
        (tmp_path / "a.txt").write_text("a line of some forty characters or so...\n" * lines)
        tracemalloc.start()
        shutil.rmtree(made(tmp_path, f"{tmp_path}/a.txt"))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small = peak(60_000)
    large = peak(240_000)
    assert large < 1.1 * small


# ---- validation


@pytest.mark.parametrize("batch_chars", [1, 100, 10**6])
def test_the_split_is_a_function_of_seed_and_number_alone(tmp_path, monkeypatch, batch_chars):
    monkeypatch.setattr(prepare, "BATCH_CHARS", batch_chars)
    valid = is_valid(range(60), share=0.2, seed=3)
    assert valid == is_valid(range(30), share=0.2, seed=3) + is_valid(
        range(30, 60), share=0.2, seed=3
    )
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), valid=0.2, seed=3)
    expected = {
        split: [t for t, kept in zip(TEXTS, valid, strict=True) if kept == (split == "valid")]
        for split in prepared.SPLITS
    }
    assert {split: documents_of(folder, split) for split in prepared.SPLITS} == expected
    assert expected["valid"]


def test_as_many_documents_as_asked_for_are_kept_for_validation():
    assert sum(is_valid(range(100_000), share=0.01, seed=1)) == pytest.approx(1000, rel=0.1)
    assert is_valid(range(99), share=0.5, seed=1) != is_valid(range(99), share=0.5, seed=2)
    assert not is_valid([0], share=0.999, seed=1)[0]


# ---- training on it


def test_a_prepared_folder_has_its_tokenizer_and_its_facts(tmp_path, bpe):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe), valid=0.2)
    data = DataConfig(source=str(folder), seq_len=8)
    facts = open_data(data, gpt2.Config(vocab=VOCAB)).facts()
    part = open_prepared(folder).meta.splits["train"]
    assert facts["tokens"] == part.tokens
    assert facts["documents"] == part.documents
    assert facts["sha256"] == part.sha256[:12]
    assert tokenizer_of(data).name == str(folder / "tokenizer.json")
    named = open_data(
        DataConfig(source=str(folder / "valid.bin"), seq_len=8), gpt2.Config(vocab=VOCAB)
    ).facts()
    assert named["tokens"] == open_prepared(folder).meta.splits["valid"].tokens


def test_small_texts_are_made_into_tokens_when_a_run_starts(tmp_path, bpe):
    texts = [*TEXTS, "long " * documents.CHUNK_CHARS, "", "the end"]
    file = tmp_path / "a.jsonl"
    folder = made(tmp_path, write_lines(file, texts), tokenizer=str(bpe))
    model = gpt2.Config(vocab=VOCAB)
    of_texts = DataConfig(source=str(file), tokenizer=str(bpe), seq_len=8)
    of_folder = of_texts.model_copy(update={"source": str(folder)})
    here = open_data(of_texts, model)
    there = open_data(of_folder, model)
    assert here.num_samples == there.num_samples
    numbers = np.arange(here.num_samples)
    inputs_here = here.read(numbers).inputs
    inputs_there = there.read(numbers).inputs
    assert np.array_equal(inputs_here, inputs_there)
    bounds_there = there.stream.document_bounds[:]
    assert np.array_equal(here.stream.document_bounds, bounds_there)


def test_raw_text_mixed_with_a_prepared_folder_is_read_by_its_tokenizer(tmp_path, bpe):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe), valid=0.2)
    sizes = ["--model.vocab", str(VOCAB), "--data.seq_len", "8"]
    mixed = load(["--data.mix", f"{folder}=1", f"{tmp_path}/a.jsonl=1", *sizes], FAMILIES)
    data_config = DataConfig(tokenizer=str(bpe))
    whole = open_source(f"{tmp_path}/a.jsonl", data_config, vocab=VOCAB)
    count = len(open_data(mixed.data, mixed.model).parts[1].stream)
    assert count == len(whole)
    run = load(
        ["--data.source", str(folder), "--eval.source", f"{tmp_path}/a.jsonl", *sizes], FAMILIES
    )
    count = len(open_validation(run.data, run.model, source=run.eval.source).stream)
    assert count == len(whole)


# ---- what is rejected


def rejected(words, capsys):
    capsys.readouterr()
    assert main(words) == EXIT_USER
    (told,) = capsys.readouterr().err.splitlines()
    return told.replace("error: ", "")


PREPARE = {
    "no input": (["--out", "{tmp}/x"], "inputs: is missing (need files or folders)"),
    "no out": (["{tmp}/a.jsonl"], "out: is missing (need a folder to write)"),
    "out is there": (
        ["{tmp}/a.jsonl", "--out", "{tmp}"],
        "out: exists already (got '{tmp}'; need a new folder)",
    ),
    "out below a file": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/a.jsonl/x"],
        "out: the folder cannot be created (got",
    ),
    "no file": (
        ["{tmp}/no", "--out", "{tmp}/x"],
        "inputs: no such file or folder (got '{tmp}/no')",
    ),
    "empty": (["{tmp}/empty.txt", "--out", "{tmp}/x"], "inputs: is empty (got no text in 1 file"),
    "tokens": (
        ["{tmp}/a.bin", "--out", "{tmp}/x"],
        "inputs: holds tokens already (got {tmp}/a.bin",
    ),
    "broken line": (
        ["{tmp}/broken.jsonl", "--out", "{tmp}/x"],
        "inputs: {tmp}/broken.jsonl:2 is not JSON (got ",
    ),
    "line is a list": (
        ["{tmp}/list.jsonl", "--out", "{tmp}/x"],
        "inputs: {tmp}/list.jsonl is no JSON array of objects, after item 0 (got",
    ),
    "no such field": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--text_field", "texte"],
        "text_field: {tmp}/a.jsonl:1 has no such field (got 'texte'). Fix: did you mean 'text'?",
    ),
    "field is a number": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--text_field", "id"],
        "text_field: {tmp}/a.jsonl:1: the field 'id' is not text (got int; need text)",
    ),
    "no such column": (
        ["{tmp}/a.parquet", "--out", "{tmp}/x"],
        "text_field: {tmp}/a.parquet has no such column (got 'text'; need one of body, id). Fix: known: body, id",
    ),
    "column of numbers": (
        ["{tmp}/a.parquet", "--out", "{tmp}/x", "--text_field", "id"],
        "text_field: {tmp}/a.parquet: the column 'id' is not text (got int64; need strings)",
    ),
    "no parquet": (
        ["{tmp}/b.parquet", "--out", "{tmp}/x"],
        "inputs: {tmp}/b.parquet is not a parquet file",
    ),
    "broken gzip": (
        ["{tmp}/b.jsonl.gz", "--out", "{tmp}/x"],
        "inputs: {tmp}/b.jsonl.gz is a broken gzip file",
    ),
    "share": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--valid", "1"],
        "valid: out of range (got 1.0; need a number, at least 0",
    ),
    "no tokenizer": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--tokenizer", "{tmp}/a.jsonl"],
        "tokenizer: {tmp}/a.jsonl is not a tokenizer",
    ),
    "no UTF-8": (
        ["{tmp}/latin.txt", "--out", "{tmp}/x", "--tokenizer", "train"],
        "inputs: {tmp}/latin.txt is not UTF-8 text (got 0xe9 at byte 3)",
    ),
    "vocab too small": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--tokenizer", "train", "--vocab", "257"],
        "vocab: leaves no room for pairs of bytes (got 257",
    ),
    "vocab too large": (
        ["{tmp}/a.jsonl", "--out", "{tmp}/x", "--tokenizer", "train", "--vocab", "5000"],
        "tokenizer: there is too little text for so many tokens",
    ),
    "unknown flag": (["{tmp}/a.jsonl", "--output", "{tmp}/x"], "output: unknown key"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that is wrong."""
    tmp = tmp_path_factory.mktemp("place")
    write_lines(tmp / "a.jsonl")
    (tmp / "empty.txt").touch()
    (tmp / "a.bin").write_bytes(b"1234")
    (tmp / "broken.jsonl").write_text('{"text": "fine"}\n{"text": "split_text of')
    (tmp / "list.jsonl").write_text('["text"]\n')
    (tmp / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp / "b.parquet").write_text("PAR?")
    (tmp / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-12])
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"body": ["a"], "id": [1]}), tmp / "a.parquet")
    return tmp


@pytest.mark.parametrize("case", PREPARE)
def test_what_cannot_be_prepared_is_reported_in_one_line_and_leaves_nothing(case, place, capsys):
    words = [word.format(tmp=place) for word in PREPARE[case][0]]
    line = PREPARE[case][1].format(tmp=place)
    before = sorted(place.iterdir())
    assert rejected(["data", "prepare", *words], capsys).startswith(line)
    assert sorted(place.iterdir()) == before


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-2])


DAMAGE = {
    "meta.json": (lambda folder: (folder / "meta.json").unlink(), "lacks meta.json"),
    "no meta": (lambda folder: (folder / "meta.json").write_text("{}"), "meta.json cannot be read"),
    "train.bin": (lambda folder: (folder / "train.bin").unlink(), "lacks train.bin"),
    "valid.idx": (lambda folder: (folder / "valid.idx").unlink(), "lacks valid.idx"),
    "tokenizer.json": (lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "split_text tokens": (lambda folder: cut_off(folder / "train.bin"), "train.bin is truncated"),
    "split_text bounds": (lambda folder: cut_off(folder / "train.idx"), "train.idx is truncated"),
    "other tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text() + "\n"
        ),
        "tokenizer.json did not produce the tokens",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_folder_that_is_not_whole_is_rejected(case, tmp_path, bpe, capsys):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe))
    damage, line = DAMAGE[case]
    damage(folder)
    assert line in rejected(
        ["train", "--data.source", str(folder), "--model.vocab", "300", "--data.seq_len", "8"],
        capsys,
    )
    if case != "other tokenizer":
        words = ["data", "show", str(folder)]
        assert line in rejected(words, capsys)


def test_show_prints_what_is_in_a_folder_and_finds_a_flipped_bit(tmp_path, bpe, capsys):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe), valid=0.2)
    argv = ["data", "show", str(folder), "--verify", "True", "--tokens", "5"]
    assert main(argv) == EXIT_OK
    told = capsys.readouterr().out
    assert "300 tokens, stored as uint16" in told
    assert "all files match their hashes" in told
    content = bytearray((folder / "valid.bin").read_bytes())
    content[7] ^= 4
    (folder / "valid.bin").write_bytes(content)
    assert main(["data", "show", str(folder), "--verify", "True"]) == EXIT_FAILED
    assert "valid.bin: sha256" in capsys.readouterr().out
    words = ["data", "show", str(tmp_path)]
    assert "is not a prepared folder" in rejected(words, capsys)
    assert "takes one folder (got nothing)" in rejected(["data", "show"], capsys)
    assert "unknown word 'prepar'" in rejected(["data", "prepar"], capsys)


RUNS = {
    "vocabulary": (
        ["--data.source", "{folder}"],
        "model.vocab: is smaller than the tokenizer's (got 256; need at least 300 for {folder}/tokenizer.json)."
        " Fix: --model.vocab 300",
    ),
    "another tokenizer": (
        [
            "--data.source",
            "{folder}",
            "--data.tokenizer",
            "{tmp}/other.json",
            "--model.vocab",
            "300",
        ],
        "data.tokenizer: is not the tokenizer that prepared {folder} (got {tmp}/other.json; need {folder}/tokenizer.json)",
    ),
    "no tokenizer": (
        ["--data.tokenizer", "{tmp}/no.json"],
        "data.tokenizer: cannot read the tokenizer (got '{tmp}/no",
    ),
    "much text": (
        ["--data.tokenizer", "{folder}/tokenizer.json", "--model.vocab", "300"],
        "data.source: is too large to be tokenized at every start",
    ),
    "nothing to evaluate on": (
        ["--eval.every", "5"],
        "eval.source: there is nothing to evaluate on (got 'stdlib'",
    ),
    "no validation": (
        [
            "--data.source",
            "{folder}",
            "--model.vocab",
            "300",
            "--data.seq_len",
            "8",
            "--eval.every",
            "5",
        ],
        "eval.source: is empty (got 0 tokens in {folder}/valid.bin",
    ),
    "evaluation by another tokenizer": (
        ["--eval.every", "5", "--eval.source", "{folder}"],
        "eval.source: {folder} was prepared by another tokenizer than the training data (got {folder}/tokenizer.json;"
        " need bytes). Fix: weft data prepare INPUT --out FOLDER --tokenizer bytes, then --eval.source FOLDER",
    ),
    "missing evaluation": (
        ["--eval.every", "5", "--eval.source", "{tmp}/no"],
        "eval.source: no such file or folder",
    ),
    "broken line": (
        ["--data.source", "{tmp}/broken.jsonl"],
        "data.source: {tmp}/broken.jsonl:1 is not JSON",
    ),
    "field": (
        ["--data.source", "{tmp}/a.jsonl", "--data.text_field", "tex"],
        "data.text_field: {tmp}/a.jsonl:1 has no such field (got 'tex'). Fix: did you mean 'text'?",
    ),
    "long": (
        [
            "--data.source",
            "{tmp}/a.jsonl",
            "--data.packing",
            "documents",
            "--data.long",
            "error",
            "--data.seq_len",
            "64",
        ],
        "data.long: document 13 of {tmp}/a.jsonl is longer than the sequence (got 86 tokens; need at most 64)."
        " Fix: --data.seq_len 86, or --data.long split",
    ),
    "no bounds": (
        ["--data.source", "{tmp}/a.bin", "--data.packing", "documents", "--data.seq_len", "2"],
        "data.packing: {tmp}/a.bin does not say where documents begin",
    ),
    "no weight": (
        ["--data.mix", "stdlib"],
        "data.mix: names no weight (got 'stdlib'; need SOURCE=WEIGHT)",
    ),
    "weight is a word": (
        ["--data.mix", "stdlib=much"],
        "data.mix: the weight of stdlib is not valid (got 'much'",
    ),
    "weight is zero": (
        ["--data.mix", "stdlib=0"],
        "data.mix: the weight of stdlib is not valid (got '0'; need a",
    ),
    "weight is nan": (
        ["--data.mix", "stdlib=nan"],
        "data.mix: the weight of stdlib is not valid (got 'nan'; need a",
    ),
    "twice": (
        ["--data.mix", "stdlib=1", "stdlib=2"],
        "data.mix: names a source twice (got 'stdlib'",
    ),
    "too small": (
        ["--data.mix", "stdlib=1", "{tmp}/a.jsonl=9999"],
        "data.mix: a weight is too small (got 1 of",
    ),
    "tokenizers": (
        [
            "--data.mix",
            "{folder}=1",
            "{tmp}/second=1",
            "--model.vocab",
            "300",
            "--data.seq_len",
            "8",
        ],
        "data.mix: its sources were prepared by different tokenizers (got {folder} and {tmp}/second",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_cannot_be_trained_on_is_reported_in_one_line(case, tmp_path, bpe, capsys):
    names = {
        "tmp": tmp_path,
        "folder": made(tmp_path, write_lines(tmp_path / "a.jsonl"), tokenizer=str(bpe)),
    }
    (tmp_path / "other.json").write_text(bpe.read_text() + " ")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "a.bin").write_bytes(bytes(64))
    if case == "tokenizers":
        options = PrepareOptions((f"{tmp_path}/a.jsonl",))
        prepare.prepare(options, tmp_path / "second")
    words = [word.format(**names) for word in RUNS[case][0]]
    line = RUNS[case][1].format(**names)
    assert rejected(["train", "--out", f"{tmp_path}/run", *words], capsys).startswith(line)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)]
)
def test_what_is_cut_short_leaves_nothing(tmp_path, monkeypatch, capsys, error, code):
    def end(_self):
        raise error

    monkeypatch.setattr(prepare.TokenWriter, "end_document", end)
    assert (
        main(["data", "prepare", write_lines(tmp_path / "a.jsonl"), "--out", f"{tmp_path}/x"])
        == code
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    if code == EXIT_USER:
        assert "out: cannot be written (got '" in (told := capsys.readouterr().err)
        assert "No space left on device" in told


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    words = ["data", "prepare", f"{tmp_path}/a.parquet", "--out", str(tmp_path / "x")]
    assert (
        "parquet files need pyarrow, which is not installed. Fix: pip install 'weft-train[data]'"
        in rejected(words, capsys)
    )


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_not_a_crash(tmp_path):
    folder = made(tmp_path, write_lines(tmp_path / "a.jsonl", ["x" * 2_000_000]))
    data_config = DataConfig(source=str(folder), seq_len=8)
    data = open_data(data_config, gpt2.Config())
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match="a file became shorter after it was opened"):
        data.read(np.array([1000]))


def test_a_tokenizer_knows_its_end_and_its_highest_id(bpe):
    tokenizer = open_tokenizer(str(bpe.parent))
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.vocab == VOCAB
    assert tokenizer.end == 0
    assert tokenizer.decode([*tokenizer.encode("héllo"), 0, VOCAB + 5]) == "héllo<|endoftext|>"
    assert tokenizer.encode_batch(["a b", ""]) == [tokenizer.encode("a b"), []]
    assert open_tokenizer("bytes").decode([104, 105, 999]) == "hi?"


# ---- tokenizers


@pytest.fixture
def shortened(tmp_path, bpe):
    """A tokenizer.json with the truncation and padding of an earlier use."""
    content = json.loads(bpe.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    file = tmp_path / "shortened.json"
    file.write_text(json.dumps(content))
    return file


def test_stored_truncation_and_padding_are_switched_off(tmp_path, bpe, shortened):
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    streams = []
    for tokenizer in (bpe, shortened):
        data = DataConfig(source=str(tmp_path / "a.txt"), tokenizer=str(tokenizer))
        stream = open_source(data.source, data, vocab=VOCAB)
        streams.append(stream.read(0, len(stream)).tolist())
    assert streams[0] == streams[1]
    assert open_tokenizer(str(shortened)).encode_batch(["ab"]) == [
        open_tokenizer(str(bpe)).encode("ab")
    ]


@pytest.fixture
def lower_case(tmp_path, bpe):
    """A tokenizer.json that loses capital letters."""
    content = json.loads(bpe.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    file = tmp_path / "lower.json"
    file.write_text(json.dumps(content))
    return file


def test_texts_that_a_tokenizer_changes_are_rejected_at_the_start_of_a_run(
    tmp_path, lower_case, capsys
):
    lines = write_lines(tmp_path / "a.jsonl", ["the cat", "The Mat", "A mat"])
    model = gpt2.Config(vocab=VOCAB)
    data = DataConfig(source=lines, tokenizer=str(lower_case), seq_len=4)
    with pytest.raises(DataError) as error:
        open_data(data, model)
    changed = "(got document 2: 'The Mat' becomes 'the mat'"
    assert f"does not reproduce 2 texts {changed}" in str(error.value)
    assert "--data.round_trip any" in str(error.value)
    accepted = data.model_copy(update={"round_trip": "any"})
    assert open_data(accepted, model).num_samples > 0
    out = str(tmp_path / "o")
    words = ["data", "prepare", lines, "--out", out, "--tokenizer", str(lower_case)]
    assert main([*words, "--valid", "0"]) == EXIT_OK
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("train on it: weft ")
    assert command.endswith("--data.round_trip any")
    prepared_data = DataConfig(source=out, seq_len=4)
    with pytest.raises(DataError, match="does not reproduce 2 texts"):
        open_data(prepared_data, model)
    few = "--steps 1 --model.layers 1 --data.seq_len 4 --prove.before never --transport threads"
    assert main([*command.split(), *few.split(), "--out", str(tmp_path / "run")]) == EXIT_OK


def test_the_number_of_workers_changes_no_byte(tmp_path):
    """A process has one number of threads, so each preparation is one of its own."""
    lines = "".join(f"a line with the number {number}\n" for number in range(3000))
    (tmp_path / "text.txt").write_text(lines)
    found = []
    for workers in ("1", "3"):
        out = tmp_path / f"prepared{workers}"
        words = ["text.txt", "--out", out, "--tokenizer", "train", "--vocab", "300"]
        command = [sys.executable, "-m", "weft", "data", "prepare", *words, "--workers", workers]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        found.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert found[0] == found[1]
    assert found[0]["train.bin"]
