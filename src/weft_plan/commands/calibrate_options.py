"""Options of `weft plan --calibrate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.schema import ConfigSection


class CalibrateOptions(ConfigSection):
    """What `weft plan --calibrate` runs and writes."""

    write: str | None = Field(
        None,
        title="a file name",
        examples=["mine.toml"],
        description="hardware file that has the figures and gets the constants",
    )
    ranks: Annotated[int, Field(ge=2, le=8)] = Field(
        2, description="ranks of the runs; no more than there are cores or GPUs"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to run; auto: GPUs if there are any"
    )
    steps: Annotated[int, Field(ge=3, le=100)] = Field(7, description="timed steps of each run")
