"""Documents of the library `datasets`: from folders, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.documents import ReadOptions
from weft.data.hub import HubDataset
from weft.data.prepare import PrepareOptions, prepare
from weft.errors import DataError

TEXTS = ["first text\nwith two lines", "", "x" * 70_000, "the last, with an é"]


@pytest.fixture(autouse=True)
def _without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets  # a second: only these tests pay for it
    import huggingface_hub.constants as hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder(tmp_path: Path) -> Path:
    """A data set with two splits."""
    place = tmp_path / "letters"
    place.mkdir()
    for split, texts in (("train", TEXTS), ("test", ["kept apart"])):
        rows = []
        for number, text in enumerate(texts):
            rows.append(json.dumps({"text": text, "n": number}))
        (place / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return place


def texts_of(source: str, **reading: Any) -> list[str]:
    texts, open_text = [], ""
    for piece in HubDataset.parse(source).documents(ReadOptions(**reading)):
        open_text += piece.text
        if piece.ends:
            texts.append(open_text)
            open_text = ""
    assert open_text == ""
    return texts


def complaint(source: str, **reading: Any) -> str:
    with pytest.raises(DataError) as raised:
        texts_of(source, **reading)
    (fault,) = raised.value.faults
    return str(fault)


def test_a_source_names_path_configuration_and_split() -> None:
    assert HubDataset.parse("hf:allenai/c4") == HubDataset(
        path="allenai/c4", config=None, split="train"
    )
    assert HubDataset.parse("hf:allenai/c4,en:validation") == HubDataset(
        path="allenai/c4", config="en", split="validation"
    )
    with pytest.raises(DataError, match=r"names no data set \(got 'hf::test'; need hf:PATH"):
        HubDataset.parse("hf::test")


def test_rows_of_a_split_are_documents_in_their_order_and_empty_ones_are_left_out(
    tmp_path: Path,
) -> None:
    place = folder(tmp_path)
    assert texts_of(f"hf:{place}") == [text for text in TEXTS if text]
    assert texts_of(f"hf:{place}:test") == ["kept apart"]


def test_a_set_is_prepared_into_the_same_tokens_as_its_file(tmp_path: Path) -> None:
    place = folder(tmp_path)
    for name, source in (("set", f"hf:{place}"), ("file", f"{place}/train.jsonl")):
        options = PrepareOptions((source,), valid=0.3)
        prepare(options, tmp_path / name)
    for part in ("train.bin", "valid.bin", "train.idx", "valid.idx"):
        assert (tmp_path / "set" / part).read_bytes() == (tmp_path / "file" / part).read_bytes(), (
            part
        )
    assert (tmp_path / "set" / "train.bin").stat().st_size > 0


def test_what_is_wrong_with_a_set_is_one_line(tmp_path: Path) -> None:
    place = folder(tmp_path)
    told = complaint(f"hf:{place}", text_field="txt")
    assert (
        f"hf:{place}:train has no such column (got 'txt'; need one of text, n). Fix: did you mean 'text'?"
        in told
    )
    assert f"hf:{place}:train: the column 'n' is not text (got int; need strings)" in complaint(
        f"hf:{place}", text_field="n"
    )
    assert f"data.source: hf:{place}:dev cannot be read (got " in complaint(f"hf:{place}:dev")
    missing = complaint("hf:missing/dataset")
    assert "data.source: hf:missing/dataset:train cannot be read (got " in missing
    assert missing.endswith(
        "Fix: check its name, configuration and split, and the network; or name files"
    )


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    assert complaint("hf:a/b").endswith("Fix: pip install 'weft-train[hub]', or name files")
