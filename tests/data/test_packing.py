"""Document packing: which token belongs to which document, and equal results on every layout."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.changed_runs import in_float64
from weft.config.load import load
from weft.config.schema import DataConfig
from weft.data import document_bounds as bounds_module
from weft.data.dataset import open_data
from weft.data.document_bounds import BoundsFile, bounds_between, longest_document
from weft.data.packing import pack
from weft.data.prepare import PrepareOptions, prepare
from weft.data.samples import IGNORE
from weft.models import FAMILIES
from weft.models.gpt2 import config as gpt2
from weft.start.prove_run import prove_config

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(lengths=LENGTHS, window=st.tuples(st.integers(0, 60), st.integers(1, 16)))
def test_a_window_is_packed_as_a_look_at_every_token_says(lengths, window):
    owner = np.repeat(np.arange(len(lengths)), lengths)
    start, length = window
    stop = start + length
    if stop >= len(owner):
        return
    bounds = np.cumsum([0, *lengths])
    found = pack(bounds, start, length)
    mine = owner[start:stop]
    after = owner[start + 1 : stop + 1]
    begins = np.diff(mine) > 0
    assert (np.diff(found.documents) == begins).all()
    assert found.documents[0] == 0
    positions = []
    for place in range(length):
        is_same_document = mine[:place] == mine[place]
        positions.append(sum(is_same_document))
    assert found.positions.tolist() == positions
    is_last = mine != after
    assert found.is_last.tolist() == is_last.tolist()


@pytest.mark.parametrize("block", [1, 3, 512])
def test_bounds_on_the_disk_are_found_as_in_memory(tmp_path, monkeypatch, block):
    monkeypatch.setattr(bounds_module, "BLOCK", block)
    inside = np.cumsum(np.random.default_rng(3).integers(0, 4, 200))
    inside.astype("<i8").tofile(tmp_path / "a.idx")
    on_disk = BoundsFile(tmp_path / "a.idx", 200, sha256="")
    assert np.array_equal(on_disk[:], inside)
    for low in range(-1, int(inside[-1]) + 2, 3):
        expected = inside[(inside > low) & (inside <= low + 7)]
        assert (
            bounds_between(on_disk, low, low + 7).tolist()
            == bounds_between(inside, low, low + 7).tolist()
            == expected.tolist()
        )
    assert longest_document(on_disk) == longest_document(inside)


@given(lengths=LENGTHS)
def test_the_longest_document_is_found(lengths):
    bounds = np.cumsum([0, *lengths])
    number, length = longest_document(bounds)
    assert length == max(lengths) == lengths[number]


def test_the_drawing_of_the_note_is_what_is_made():
    """documents   a a a a a a b b c c c c c c c d d d      windows of 6"""
    bounds = np.array([0, 6, 8, 15, 18])
    windows = [pack(bounds, start, 6) for start in (0, 6)]
    actual = [window.documents.tolist() for window in windows]
    assert actual == [[0] * 6, [0, 0, 1, 1, 1, 1]]
    assert [window.positions.tolist() for window in windows] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 0, 1, 2, 3],
    ]
    assert [window.is_last.tolist() for window in windows] == [
        [False] * 5 + [True],
        [False, True] + [False] * 4,
    ]


@pytest.fixture
def folder(tmp_path):
    """Documents of 1 to 40 bytes."""
    lines = []
    for number in range(60):
        letter = "abcdefgh"[number % 8]
        length = 1 + number * 7 % 40
        text = letter * length
        lines.append(json.dumps({"text": text}) + "\n")
    file = tmp_path / "a.jsonl"
    file.write_text("".join(lines))
    options = PrepareOptions((str(file),), valid=0.2)
    prepare(options, tmp_path / "folder")
    return str(tmp_path / "folder")


def test_samples_of_packed_documents_have_the_tokens_of_the_stream(folder):
    data_config = DataConfig(source=folder, seq_len=16)
    plain = open_data(data_config, gpt2.Config())
    packed = open_data(DataConfig(source=folder, seq_len=16, packing="documents"), gpt2.Config())
    numbers = np.arange(plain.num_samples)
    whole = plain.read(numbers)
    found = packed.read(numbers)
    assert packed.num_samples == plain.num_samples
    assert np.array_equal(found.inputs, whole.inputs)
    stays = found.targets != IGNORE
    assert np.array_equal(found.targets[stays], whole.targets[stays])
    assert whole.documents is None
    assert 0 < found.documents.max() < 16
    assert found.positions.max() == 15
    # every document is one letter repeated, and its neighbours are others: a target across a border would show
    assert np.array_equal(found.targets[stays], found.inputs[stays])


def test_samples_read_one_by_one_are_those_read_together(folder):
    samples = open_data(DataConfig(source=folder, seq_len=16, packing="documents"), gpt2.Config())
    together = samples.read(np.arange(20))
    for number in range(20):
        alone = samples.read(np.array([number]))
        for name in ("inputs", "targets", "positions", "documents"):
            row_alone = getattr(alone, name)[0]
            row_together = getattr(together, name)[number]
            assert np.array_equal(row_alone, row_together)


def test_text_files_are_documents_without_being_prepared(tmp_path):
    for name, text in {"a": "aaaaa", "b": "", "c": "ccc"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = open_data(
        DataConfig(source=str(tmp_path), seq_len=7, packing="documents"), gpt2.Config()
    ).read(np.array([0]))
    assert found.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    assert found.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert found.targets.tolist() == [[97, 97, 97, 97, IGNORE, 99, 99]]


MODEL = [
    "--model.layers",
    "2",
    "--model.dim",
    "32",
    "--model.heads",
    "4",
    "--model.kv_heads",
    "2",
    "--model.ffn",
    "48",
]


@pytest.mark.parametrize(
    "words",
    [
        "--mesh cp2",
        "--mesh cp2 --parallel.context allgather",
        "--mesh cp2 --parallel.context ulysses",
        "--mesh pp2",
    ],
)
def test_packed_documents_train_alike_on_one_device_and_on_many(folder, words):
    packed = ["--data.source", folder, "--data.packing", "documents", "--data.seq_len", "16"]
    sizes = ["--batch.global_size", "8", "--batch.micro_size", "2"]
    argv = [*words.split(), *packed, *sizes, *MODEL]
    run = load(argv, FAMILIES)
    report = prove_config(in_float64(run), steps=2, full=True)
    assert report.holds, report.to_json()


def test_a_document_is_computed_as_if_it_stood_alone(folder):
    """The loss of packed documents is the loss of each piece by itself."""
    torch = pytest.importorskip("torch")
    from tests.one_device import plain_model
    from weft.models.common.batch import Batch, chain, token_batch

    words = ["--data.source", folder, "--data.packing", "documents", "--data.seq_len", "16"]
    run = load([*MODEL, *words], FAMILIES)
    samples = open_data(run.data, run.model)
    arrays = samples.read(np.arange(6))
    blocks = plain_model(FAMILIES["llama3"], run.model, seed=1, dtype=torch.float64)
    tensors = {}
    for name, array in vars(arrays).items():
        if array is not None:
            tensors[name] = torch.from_numpy(array)
    batch = Batch(**tensors)
    together = chain(blocks, batch.inputs, batch).x
    alone = torch.zeros((), dtype=torch.float64)
    for row, documents in enumerate(arrays.documents):
        for document in range(int(documents.max()) + 1):
            mine = torch.from_numpy(documents == document)
            inputs = batch.inputs[row, mine]
            targets = batch.targets[row, mine]
            positions = batch.positions[row, mine]
            piece = token_batch(inputs[None], targets[None])
            assert piece.positions.equal(positions[None])
            alone += chain(blocks, piece.inputs, piece).x
    assert abs(together - alone) < 1e-9 * abs(alone)
