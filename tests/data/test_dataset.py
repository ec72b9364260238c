"""The data of a run: order of samples, token streams, images, and rejected sources."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.schema import DataConfig
from weft.data import files, images, tokens
from weft.data.dataset import open_data
from weft.data.formats import format_of, formats_of
from weft.data.order import layout_of, permuted, samples_of_step
from weft.errors import DataError
from weft.models import FAMILIES
from weft.models.gpt2 import config as gpt2
from weft.models.mnist import config as mnist
from weft.start.rules.data_sources import source_faults
from weft.start.rules.start_checks import data_checks

BYTES_MODEL = gpt2.Config()
IMAGES_MODEL = mnist.Config()


def open_tokens(source, *, seq_len=4, model=BYTES_MODEL, token_dtype="uint16"):
    return open_data(
        DataConfig(source=str(source), seq_len=seq_len, token_dtype=token_dtype), model
    )


def complaint(source, model=BYTES_MODEL, **data):
    with pytest.raises(DataError) as raised:
        open_data(DataConfig(source=str(source), **data), model)
    (fault,) = raised.value.faults
    assert fault.key == "data.source"
    return str(fault)


# ---- order


@given(length=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_an_epoch_is_a_permutation(length, key):
    values = sorted(permuted(np.arange(length), length, key=key).tolist())
    assert values == list(range(length))


def test_an_epoch_of_a_trillion_samples_costs_no_more():
    places = np.arange(10**12 - 1000, 10**12)
    found = permuted(places, 10**12, key=7)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < 10**12


def correlation(left, right):
    return np.corrcoef(left, right)[0, 1]


def test_a_permutation_is_mixed_and_changes_with_its_key():
    length = 10_000
    places = np.arange(length)
    first = permuted(places, length, key=1)
    second = permuted(places, length, key=2)
    num_equal = (first == second).sum()
    assert num_equal < 0.001 * length
    for order in (first, second):
        assert abs(correlation(places, order)) < 0.05
        assert abs(correlation(order[:-1], order[1:])) < 0.05
        num_neighbours = (np.diff(order) == 1).sum()
        assert num_neighbours < 0.001 * (length - 1)


def test_every_order_of_three_samples_comes_up_about_as_often():
    counts = {}
    for key in range(1200):
        seed = key * 0x9E3779B97F4A7C15 % 2**64
        order = tuple(permuted(np.arange(3), 3, key=seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    for count in counts.values():
        assert 140 < count < 260


@given(length=st.integers(1, 60), size=st.integers(1, 25), seed=st.integers(0, 2**63 - 1))
def test_steps_walk_through_whole_epochs_without_a_gap(length, size, seed):
    num_steps = 3 * length // size + 1
    steps = []
    for number in range(num_steps):
        samples = samples_of_step(number, global_size=size, num_samples=length, seed=seed)
        steps.append(samples)
    walk = np.concatenate(steps)
    num_epochs = len(walk) // length
    for epoch in range(num_epochs):
        start = epoch * length
        in_epoch = walk[start : start + length]
        assert sorted(in_epoch.tolist()) == list(range(length))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(samples_of_step(epoch, global_size=50, num_samples=50, seed=seed).tolist())
        for epoch in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_written_down():
    """A run that is resumed years later must go on in the order in which it began."""
    assert samples_of_step(3, global_size=8, num_samples=10, seed=1).tolist() == [
        7,
        2,
        3,
        6,
        0,
        1,
        1,
        0,
    ]


@given(
    degree=st.integers(1, 6),
    micro=st.integers(1, 5),
    num_micro=st.integers(1, 6),
    step=st.integers(0, 50),
)
def test_every_layout_reads_the_same_samples_a_step(degree, micro, num_micro, step):
    size = degree * micro * num_micro
    samples = samples_of_step(step, global_size=size, num_samples=1000, seed=3)
    parts = [
        layout_of(samples, index=index, degree=degree, micro_size=micro) for index in range(degree)
    ]
    for part in parts:
        assert part.shape == (num_micro, micro)
    for m in range(num_micro):
        for d in range(degree):
            for i in range(micro):
                actual = parts[d][m, i]
                expected = samples[(m * degree + d) * micro + i]
                assert actual == expected


# ---- token streams


def test_a_sample_is_its_tokens_and_its_targets_are_shifted_by_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(40, 60)))
    data = open_tokens(tmp_path / "a.txt")
    assert data.num_samples == (20 - 1) // 4 == 4
    arrays = data.read(np.array([[3, 0]]))
    assert arrays.inputs.tolist() == [[52, 53, 54, 55], [40, 41, 42, 43]]
    assert arrays.targets.tolist() == [[53, 54, 55, 56], [41, 42, 43, 44]]
    assert arrays.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert {array.dtype for array in (arrays.inputs, arrays.targets, arrays.positions)} == {
        np.dtype(np.int64)
    }


@pytest.mark.parametrize(("length", "samples"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_sample_has_its_last_target(tmp_path, length, samples):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(40, 40 + length)))
    data = open_tokens(file)
    assert data.num_samples == samples
    last = data.read(np.array([samples - 1]))
    assert last.targets[0, -1] == 40 + samples * 4


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    span=st.tuples(st.integers(0, 40), st.integers(1, 9)),
)
def test_a_stream_reads_across_files_as_if_they_were_one(sizes, span):
    whole = np.arange(sum(sizes), dtype=np.uint8)
    pieces = []
    for size in sizes:
        start = sum(map(len, pieces))
        pieces.append(whole[start : start + size])
    stream = tokens.TokenStream(
        tuple(Path(f"{i}") for i in range(len(sizes))), tuple(pieces), vocab=256
    )
    start = span[0]
    stop = min(sum(span), len(whole))
    if start < stop:
        values = stream.read(start, stop).tolist()
        assert values == list(range(start, stop))


def test_files_that_are_tokenized_in_memory_are_all_counted(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text(f"text\nsome words of {name}\n")
    facts = open_tokens(tmp_path).facts()
    assert (facts["files"], facts["documents"]) == (3, 3)


def test_a_folder_is_its_text_files_end_to_end_sorted_by_path(tmp_path):
    texts = {
        "b.txt": b"second ",
        "a/z.md": b"first ",
        "c.py": b"third",
        ".hidden/x.txt": b"no",
        "d.dat": b"no",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    for source in (tmp_path, f"{tmp_path}/**/*.[mtp][dxy]*"):
        data = open_tokens(source)
        assert bytes(data.stream.read(0, 18).astype(np.uint8)) == b"first second third"
        facts = data.facts()
        assert facts["files"] == 3
        assert facts["bytes"] == 18
        assert facts["tokens"] == 18
        assert facts["samples"] == 4
        assert facts["sha256"] == hashlib.sha256(b"first second third").hexdigest()[:12]


def test_bytes_of_text_in_another_encoding_are_tokens_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 256)))
    values = open_tokens(tmp_path / "a.txt").stream.read(0, 224).tolist()
    assert values == list(range(32, 256))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("left_from", [0, 2**20])
def test_token_files_are_numbers_in_little_endian(tmp_path, monkeypatch, dtype, left_from):
    monkeypatch.setattr(tokens, "MIN_ON_DISK_BYTES", left_from)
    ids = np.arange(0, 5000, 50)
    little_endian = np.dtype(dtype).newbyteorder("<")
    ids[:60].astype(little_endian).tofile(tmp_path / "a.bin")
    ids[60:].astype(little_endian).tofile(tmp_path / "b.bin")
    data = open_tokens(tmp_path, model=gpt2.Config(vocab=5000), token_dtype=dtype)
    for piece in data.stream.parts:
        assert isinstance(piece, tokens.TokenFile) == (left_from == 0)
    assert data.num_samples == 24
    inputs = data.read(np.arange(24)).inputs
    assert np.array_equal(inputs.ravel(), ids[:96])


def test_the_standard_library_is_what_plain_python_reads():
    root = Path(sysconfig.get_path("stdlib"))
    data = open_tokens("stdlib", seq_len=128)
    found = [file.relative_to(root).as_posix() for file in data.stream.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    assert not [
        name
        for name in found
        if "test" in Path(name).parts or "site-packages" in name or not name.endswith(".py")
    ]
    assert list(data.stream.files) == sorted(data.stream.files)
    text = b"".join(file.read_bytes() for file in data.stream.files)
    assert data.facts()["sha256"] == hashlib.sha256(text).hexdigest()[:12]
    (sample,) = data.read(np.array([1000])).inputs
    actual = bytes(sample.astype(np.uint8))
    assert actual == text[128_000:128_128]
    assert 5e6 < data.facts()["bytes"] <= files.STDLIB_MAX_BYTES


def test_the_standard_library_is_text_and_is_read_once():
    found = files.stdlib_files()
    assert formats_of(files.STDLIB, found) == tuple(map(format_of, found))
    first, second = (open_tokens("stdlib", seq_len=length) for length in (128, 64))
    assert first.stream is second.stream


def test_the_standard_library_stops_at_its_limit(monkeypatch):
    monkeypatch.setattr(files, "STDLIB_MAX_BYTES", 100_000)
    found = files.stdlib_files.__wrapped__()
    assert sum(file.stat().st_size for file in found) <= 100_000
    assert found


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "no such file or folder (got '{path}')"),
        (
            b"",
            "is empty (got 0 bytes in {path}; need some text or tokens). Fix: name a file or folder with text",
        ),
        (
            b"1234",
            "{path} is too short (got 4 tokens; need at least 5 = data.seq_len + 1). Fix: --data.seq_len 3",
        ),
        (
            b"1",
            "is too short (got 1 token; need at least 5 = data.seq_len + 1). Fix: a longer source",
        ),
    ],
)
def test_text_that_cannot_be_trained_on_is_rejected(tmp_path, content, line):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    assert line.format(path=path) in complaint(path, seq_len=4)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ([], "no file to read in the folder"),
        (["a.dat", ".b.txt"], "no file to read in the folder"),
        (["a.txt", "b.bin"], "holds text and token files (got 1 .bin and 1 others; need one kind)"),
    ],
)
def test_a_folder_without_files_of_one_kind_is_rejected(tmp_path, names, line):
    for name in names:
        (tmp_path / name).write_bytes(b"0123456789")
    assert line in complaint(tmp_path)


def test_a_pattern_that_nothing_matches_is_rejected(tmp_path):
    assert f"no file matches (got '{tmp_path}/*.c')" in complaint(f"{tmp_path}/*.c")


def test_what_is_no_regular_file_is_rejected(tmp_path):
    told = complaint("/dev/zero")
    assert "cannot read the file (got '/dev/zero'). Fix: is no regular file" in told


def test_a_file_that_cannot_be_read_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"0123456789")

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot read the file" in complaint(tmp_path / "a.txt")
    assert "Permission denied" in complaint(tmp_path / "a.txt")


def test_a_token_beyond_the_vocabulary_is_named_with_file_and_place(tmp_path):
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    np.array([1, 2, 300, 400], dtype="<u2").tofile(tmp_path / "b.bin")
    told = complaint(tmp_path, seq_len=4)
    assert (
        f"{tmp_path}/b.bin holds an id outside the vocabulary at token 2 (got id 300; need below model.vocab = 256)"
        in told
    )
    assert "raise model.vocab above 400" in told


def test_the_last_token_of_the_vocabulary_is_taken_and_the_one_after_it_is_not(tmp_path):
    last = tmp_path / "last.bin"
    after = tmp_path / "after.bin"
    np.array([255] * 9, dtype="<u2").tofile(last)
    np.array([256] * 9, dtype="<u2").tofile(after)
    sample = open_tokens(last).read(np.array([0]))
    assert sample.inputs.tolist() == [[255] * 4]
    assert "id 256; need below model.vocab = 256" in complaint(after)


def test_a_token_beyond_the_vocabulary_is_found_when_it_is_read_at_the_latest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tokens, "SCANNED_TOKENS", 5)
    numbers = [1, 2, 3, 4, 5, 6, 999, 8, 9]
    np.array(numbers, dtype="<u2").tofile(tmp_path / "a.bin")
    data = open_tokens(tmp_path)
    data.read(np.array([0]))
    with pytest.raises(DataError, match=r"at token 6 \(got id 999"):
        data.read(np.array([1]))


def test_a_token_file_that_ends_inside_a_token_is_rejected(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"123456789")
    assert (
        "ends inside a token (got 9 bytes; need a multiple of 2 bytes for uint16 (data.token_dtype))"
        in complaint(tmp_path)
    )


# ---- images


def idx(array):
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_pair(folder, count=7, *, kind="train", zipped=False, size=28, labels=None):
    random = np.random.default_rng(5)
    pictures = random.integers(0, 256, (count, size, size), dtype=np.uint8)
    if labels is None:
        labels = random.integers(0, 10, count, dtype=np.uint8)
    else:
        labels = labels
    for name, array in (
        (f"{kind}-images-idx3-ubyte", pictures),
        (f"{kind}-labels-idx1-ubyte", labels),
    ):
        content = idx(array)
        (folder / (name + ".gz" * zipped)).write_bytes(
            gzip.compress(content) if zipped else content
        )
    return pictures, labels


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_as_they_were_written(tmp_path, zipped):
    pictures, labels = write_pair(tmp_path, zipped=zipped)
    write_pair(tmp_path, 3, kind="t10k")
    data = open_data(DataConfig(source=str(tmp_path)), IMAGES_MODEL)
    arrays = data.read(np.array([6, 0]))
    assert data.num_samples == 7
    assert np.array_equal(arrays.inputs, pictures[[6, 0]][:, None])
    assert arrays.inputs.dtype == np.uint8
    assert arrays.targets.tolist() == labels[[6, 0]].tolist()
    assert arrays.positions.tolist() == [0, 0]
    assert (
        data.facts()["sha256"]
        == hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()[:12]
    )


def test_the_file_of_the_images_names_the_pair(tmp_path):
    write_pair(tmp_path)
    write_pair(tmp_path, 3, kind="t10k")
    assert (
        open_data(DataConfig(source=f"{tmp_path}/t10k-images-idx3-ubyte"), IMAGES_MODEL).num_samples
        == 3
    )


def test_the_digits_stand_in_for_mnist():
    pytest.importorskip("sklearn")
    data = open_data(DataConfig(source="digits"), IMAGES_MODEL)
    arrays = data.read(np.array([0, 1796]))
    assert data.num_samples == 1797
    assert arrays.inputs.shape == (2, 1, 28, 28)
    assert arrays.inputs.max() == 255
    assert arrays.targets.tolist() == [0, 8]
    inner = arrays.inputs[0, 0, 2:26, 2:26].reshape(8, 3, 8, 3)
    assert (inner == inner[:, :1, :, :1]).all()


def test_the_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'weft-train[digits]'" in complaint("digits", IMAGES_MODEL)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda content: content[:-1], "is truncated (got 5503 bytes; need 5504 for 7 x 28 x 28)"),
        (lambda content: content + b"x", "is too long (got 5505 bytes"),
        (lambda content: content[:9], "ends inside its header (got 9 bytes; need 16 bytes)"),
        (
            lambda content: b"PNG!" + content[4:],
            "is not an IDX file of 3 dims (got magic 504e4721; need 00000803)",
        ),
        (
            lambda content: b"\x00\x00\x0d\x03" + content[4:],
            "is not an IDX file of 3 dims (got magic 00000d03",
        ),
        (lambda content: gzip.compress(content)[:-20], "is a broken compressed file"),
        (lambda _content: b"", "is not an IDX file of 3 dims"),
        (
            lambda content: content[:4] + struct.pack(">I", 0) + content[8:16],
            "images and labels differ in number (got 0 in",
        ),
    ],
)
def test_a_broken_idx_file_is_rejected(tmp_path, damage, line):
    write_pair(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    assert line in complaint(tmp_path, IMAGES_MODEL)


def test_images_and_labels_of_other_counts_sizes_or_classes_are_rejected(tmp_path):
    write_pair(tmp_path, labels=np.zeros(6, np.uint8))
    assert "images and labels differ in number (got 7 in" in complaint(tmp_path, IMAGES_MODEL)
    write_pair(tmp_path, labels=np.array([0, 9, 10, 3, 11, 0, 0], np.uint8))
    assert "out of range at image 2 (got 10; need below model.classes = 10)" in complaint(
        tmp_path, IMAGES_MODEL
    )
    write_pair(tmp_path, size=20)
    assert "images of another size (got 20 x 20; need 28). Fix: --model.image_size 20" in complaint(
        tmp_path, IMAGES_MODEL
    )


def test_a_folder_without_a_pair_is_rejected(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert "no pair of IDX files" in complaint(tmp_path, IMAGES_MODEL)
    assert "no such file or folder" in complaint(tmp_path / "nowhere", IMAGES_MODEL)


def test_text_and_images_are_not_mistaken_for_each_other():
    assert "'stdlib' is text, the model reads images" in complaint("stdlib", IMAGES_MODEL)
    assert "'digits' are images, the model reads tokens" in complaint("digits")


# ---- vocabularies


def faults_of_run(*argv, from_hf=None):
    run = load(argv, FAMILIES)
    return [str(fault) for fault in source_faults(run.data, with_folder(run.model, from_hf))]


def with_folder(model, from_hf):
    return model.model_copy(update={"from_hf": from_hf})


def test_token_files_may_have_fewer_ids_than_bytes_have_alone_in_a_folder_and_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.arange(60, dtype="<u2").tofile(tmp_path / name / "x.bin")
    small = (
        "--model.vocab",
        "60",
        "--data.seq_len",
        "8",
        "--batch.global_size",
        "2",
        "--batch.micro_size",
        "2",
    )
    for source in (
        ("--data.source", f"{tmp_path}/a/x.bin"),
        ("--data.source", f"{tmp_path}/a"),
        ("--data.mix", f"{tmp_path}/a=1", f"{tmp_path}/b/x.bin=2"),
    ):
        run = load((*source, *small), FAMILIES)
        assert run_checks(run, config_checks, data_checks) == ()


def test_the_vocabulary_of_a_model_from_a_folder_is_not_to_be_changed(tmp_path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    argv = ("--data.source", f"{tmp_path}/a.txt", "--model.vocab", "99")
    line = (
        "model.vocab: is smaller than the tokenizer's (got 99; need at least 256 for bytes). Fix: "
    )
    assert faults_of_run(*argv) == [f"{line}--model.vocab 256"]
    own = "weft data prepare INPUT --out FOLDER --tokenizer {}, then --data.source FOLDER"
    assert faults_of_run(*argv, from_hf=str(tmp_path)) == [line + own.format("FILE")]
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert faults_of_run(*argv, from_hf=str(tmp_path)) == [line + own.format(file)]
