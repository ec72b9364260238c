"""Options of `weft bench comm` and `weft bench compute`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from weft.config.command_options import JsonOptions
from weft.core.transports import TransportName
from weft_plan.bench.bandwidth import OPERATIONS

DEFAULT_MESH = "dp2"


class BenchOptions(JsonOptions):
    """What both benchmarks have."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to measure; auto: GPUs if there are any"
    )
    write: str | None = Field(
        None,
        title="a file name",
        examples=["here.toml"],
        description="add the figures to this hardware file, for --hardware; made if missing",
    )
    published: str | None = Field(
        None,
        title="the name of a device",
        examples=["h100"],
        description="start a new hardware file with this device's published figures; what is measured becomes shares of them",
    )


class CommOptions(BenchOptions):
    """What `weft bench comm` measures."""

    mesh: str | None = Field(
        None, description=f"ranks and axes; None: {DEFAULT_MESH}, or dpN on N ranks of a launcher"
    )
    transport: TransportName = Field(
        "process", description="ranks as processes or as threads of one process"
    )
    operations: str = Field(",".join(OPERATIONS), description="names, separated by commas")
    smallest: str = Field("1KB", description="first size of the large tensor: 1KB, 64MB, 1GB")
    largest: str | None = Field(None, description="last size; None: 16MB on the CPU, 1GB on GPUs")
    factor: int = Field(4, ge=2, le=2**20, description="from one size to the next")
    seconds: float = Field(
        0.05, gt=0, le=60, description="time for one size of one operation; 3 to 1000 times"
    )
    svg: str | None = Field(
        None,
        title="a file name",
        examples=["x.svg"],
        description="write a plot of bus bandwidth by size to this file",
    )


class ComputeOptions(BenchOptions):
    """What `weft bench compute` measures."""

    ranks: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="ranks that measure at the same time; None: one a core, or one GPU",
    )
    seconds: float = Field(0.05, gt=0, le=60, description="time for one shape; 3 to 1000 times")


@dataclass(frozen=True)
class SizeRange:
    """Sizes in bytes; `largest` None: by the device."""

    smallest: int
    largest: int | None
    factor: int
