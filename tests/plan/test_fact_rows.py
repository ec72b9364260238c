"""Files of published measurements: one line names the row and the field; devices come from the printed name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fact_rows import RowError, read_csv_rows, read_json_rows
from benchmarks.published_rows import (
    MOSAIC,
    UNFUSED,
    InexpressibleError,
    Stack,
    hardware_of,
    read_rows,
    stack_of,
)

ROW = {
    "id": "a/1",
    "kind": "train_step",
    "source": "A new source",
    "dtype": "amp_bf16",
    "model": {"arch": "mpt", "hidden": 64, "heads": 4, "ffn": 256, "seq": 128, "layers": 2},
    "hardware": {"gpu": "H100-SXM-80GB", "count": 8},
    "layout": {"dp": 8, "zero": 3, "schedule": "none", "recompute": "none"},
    "micro_batch": 1,
    "global_batch": 8,
    "measured": {"iteration_s": 0.5},
    "derived": {},
}


def file_of(folder: Path, rows: object) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def row_with(section: str, **fields: Any) -> dict[str, Any]:
    return {**ROW, section: {**ROW[section], **fields}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**ROW, "layout": None}, "layout: None (need a table)"),
        ({**ROW, "source": 3}, "source: 3 (need a text)"),
        ({**ROW, "micro_batch": -1}, "micro_batch: -1 (need a number above 0, or null)"),
        (row_with("model", hidden="big"), "model.hidden: 'big' (need a number above 0, or null)"),
        (row_with("measured", iteration_s=True), "measured.iteration_s: True (need a number"),
    ],
)
def test_a_bad_row_is_named_with_its_field(row: object, expected: str, tmp_path: Path) -> None:
    with pytest.raises(RowError) as caught:
        read_json_rows(file_of(tmp_path, [ROW, row]))
    assert str(caught.value).startswith(f"rows.json row 2 (id a/1): {expected}")


def test_a_file_that_is_no_list_of_rows_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"dict \(need a list of rows\)"):
        read_json_rows(file_of(tmp_path, {}))
    steps = tmp_path / "vtrain_single.csv"
    steps.write_text("# head\n2,16,8,1024,16,24,1024,1,1,2,372.1\n2,16,8\n", encoding="utf-8")
    with pytest.raises(RowError, match="line 3: 3 columns"):
        read_csv_rows(steps)


def test_a_row_of_an_unknown_source_has_constants_of_its_device(tmp_path: Path) -> None:
    rows, reasons = read_rows(file_of(tmp_path, [ROW]))
    assert not reasons
    assert rows[0].stack.hardware == "h100"
    assert stack_of({**ROW, "source": MOSAIC}).name.startswith("H100, llm-foundry")
    on_gb200 = row_with("hardware", gpu="NVIDIA GB200 NVL72")
    assert stack_of(on_gb200).hardware == "gb200"
    with pytest.raises(
        InexpressibleError, match=r"hardware\.gpu: Z900 is not in the hardware table"
    ):
        stack_of(row_with("hardware", gpu="Z900"))


def test_a_row_that_is_no_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    rows, reasons = read_rows(file_of(tmp_path, [row_with("model", heads=None)]))
    assert not rows
    assert reasons == {"A new source: sizes not printed: heads": ["a/1"]}


@pytest.mark.parametrize(
    ("printed", "gb_s"),
    [
        ("4x100 Gb RoCE per node", 6.25),
        ("EFA (3200 Gb/s per node)", 50),
        ("4x Omni-Path 100 Gb/s per node", 6.25),
        ("200 Gb/s HDR IB per GPU", 25),
        ("RoCE RDMA", 25),  # no rate: that of the table
    ],
)
def test_the_network_is_the_printed_one(printed: str, gb_s: float) -> None:
    hardware = {"gpu": "A100-SXM-80GB", "gpus_per_node": 8, "inter_bw": printed}
    stack = Stack("A100, software", "a100", UNFUSED)
    assert hardware_of({"hardware": hardware}, stack).network_gb_s == gb_s
