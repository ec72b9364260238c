"""Excerpts of a run's data: real rows, several documents a sequence, masks, ids of the whole vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.config.schema import DataConfig
from weft.data.conversations import ConversationSamples
from weft.data.excerpt import Excerpt
from weft.data.samples import IGNORE, SequenceSamples

VOCAB = 256
SEQ_LEN = 32


def lines_of(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data_of(source: str, **keys: object) -> DataConfig:
    values = {"source": source, "seq_len": SEQ_LEN, **keys}
    return DataConfig.model_validate(values)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    rows: list[dict[str, object]] = [{"text": f"document {i} " * (1 + i % 9)} for i in range(50)]
    return lines_of(tmp_path / "texts.jsonl", rows)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows: list[dict[str, object]] = []
    for i in range(40):
        rows.append({"prompt": f"question {i}? " * 20, "completion": f"answer {i}. " * (1 + i % 5)})
    return lines_of(tmp_path / "prompts.jsonl", rows)


def test_sequences_hold_several_documents_and_some_end_where_a_document_does(texts: str) -> None:
    samples = Excerpt.of(data_of(texts, packing="documents"), vocab=VOCAB).samples(8)
    assert isinstance(samples, SequenceSamples)
    arrays = samples.read(np.arange(samples.num_samples))
    assert arrays.documents is not None
    num_documents = arrays.documents.max(axis=1) + 1
    assert np.median(num_documents) >= 2
    assert (arrays.targets[:, -1] == IGNORE).any()
    assert (arrays.targets[:, -1] != IGNORE).any(), "and some in the middle of one"
    assert (arrays.positions[:, 0] == 0).all()


def test_ids_are_those_of_the_data_and_of_the_whole_vocabulary(texts: str) -> None:
    stream = Excerpt.of(data_of(texts), vocab=VOCAB).samples(64)
    assert isinstance(stream, SequenceSamples)
    ids = stream.read(np.arange(stream.num_samples)).inputs
    assert "document 2 document 2" in bytes(ids.ravel().tolist()).decode("latin-1")
    assert len(np.unique(ids)) > 0.9 * VOCAB


def test_ids_beyond_the_vocabulary_are_taken_modulo_it(tmp_path: Path) -> None:
    ids = np.arange(50_000, 50_257, dtype="<u2")
    (tmp_path / "tokens.bin").write_bytes(ids.tobytes())
    data = data_of(str(tmp_path / "tokens.bin"), token_dtype="uint16")
    own = Excerpt.of(data, vocab=50_257).samples(4).read(np.arange(1)).inputs
    small = Excerpt.of(data, vocab=257).samples(4).read(np.arange(1)).inputs
    assert own[0, 0] == 50_000
    assert (small == own % 257).all()


def test_rows_of_records_keep_prompts_and_answers(prompts: str) -> None:
    excerpt = Excerpt.of(data_of(prompts, format="prompt"), vocab=VOCAB)
    samples = excerpt.samples(8)
    assert isinstance(samples, ConversationSamples)
    arrays = samples.read(np.arange(samples.num_samples))
    assert arrays.documents is not None
    assert (arrays.documents.max(axis=1) >= 1).any()
    counts = (arrays.targets != IGNORE).sum(axis=1)
    assert counts.min() > 0
    assert len(set(counts.tolist())) > 2, "numbers of targets differ"
    is_full = samples.table.lengths[list(samples.documents(0))].sum() == SEQ_LEN
    assert is_full, "a record ends where its sequence does"


def test_other_rows_have_another_hash(texts: str, prompts: str) -> None:
    first = Excerpt.of(data_of(texts), vocab=VOCAB)
    assert first.sha256 == Excerpt.of(data_of(texts), vocab=VOCAB).sha256
    assert first.sha256 != Excerpt.of(data_of(prompts, format="prompt"), vocab=VOCAB).sha256


def test_a_mixture_takes_documents_of_its_sources_in_turn(texts: str, tmp_path: Path) -> None:
    other = lines_of(tmp_path / "other.jsonl", [{"text": "other " * 5}] * 8)
    data = data_of("stdlib", mix=(f"{texts}=0.5", f"{other}=0.5"))
    first, second, *_ = Excerpt.of(data, vocab=VOCAB).documents
    assert bytes(first.ids.tolist()).startswith(b"document 0")
    assert bytes(second.ids.tolist()).startswith(b"other")
