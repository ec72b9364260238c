"""Combinations of number types: docs/precision.md lists those that validation accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.core.precision import REPRESENTS, Dtype, dtype_faults

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
ROWS = re.findall(
    r"^\| (\w+\d+) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
)


@pytest.mark.parametrize("compute", REPRESENTS)
def test_the_page_names_the_types_that_validation_accepts(compute: Dtype) -> None:
    (row,) = [row for row in ROWS if row[0] == compute]
    _, params, reduce = row
    for kind in REPRESENTS:
        faults = dtype_faults(params=kind, compute=compute, reduce=kind)
        keys = {fault.key for fault in faults}
        accepts_params = "precision.params" not in keys
        accepts_reduce = "precision.reduce" not in keys
        assert (kind in params.split(", ")) == accepts_params, kind
        assert (kind in reduce.split(", ")) == accepts_reduce, kind


def test_every_type_of_computation_is_on_the_page() -> None:
    assert len(ROWS) == len(REPRESENTS)
