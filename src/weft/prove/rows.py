"""Sequences that a proof compares: those of the run's data, or short documents made of the first ones. No torch."""

from __future__ import annotations

from typing import Literal

from weft.config.schema import SCORED, DataConfig, ModelSection
from weft.data.dataset import open_data
from weft.data.excerpt import Excerpt
from weft.data.samples import Samples

STDLIB = "stdlib"
"""The data of a config that names none."""
Rows = Literal["own", "short"]
"""own: the data as it is; short: an excerpt of it, see `weft.data.excerpt`."""


def open_rows(
    data: DataConfig, model: ModelSection, *, rows: Rows, num_samples: int = 0
) -> Samples:
    """The sequences of a run.

    Args:
        num_samples: sequences of an epoch of short rows of text.

    Raises:
        DataError: the data is missing, empty or broken.
    """
    data = _as_text(data)
    if rows == "own" or model.kind != "tokens":
        return open_data(data, model)
    return _excerpt(data, model).samples(num_samples)


def rows_digest(data: DataConfig, model: ModelSection) -> str:
    """Hash of the rows that the proof of a reduced run reads; "" of images and arrays, which it reads as they are.

    Raises:
        DataError: as `open_rows`.
    """
    return "" if model.kind != "tokens" else _excerpt(_as_text(data), model).sha256


def _as_text(data: DataConfig) -> DataConfig:
    """Data that is not named is text, in place of which a proof draws records that are scored."""
    if data.source == STDLIB and not data.mix and data.format in SCORED:
        return data.model_copy(update={"format": "text"})
    return data


def _excerpt(data: DataConfig, model: ModelSection) -> Excerpt:
    return Excerpt.of(data, vocab=model.axis_sizes()["vocab"])
