"""Options of `weft simulate`: their values, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from weft.commands.console import fix_of_path
from weft.config.command_options import JsonOptions
from weft.config.schema import SiteConfig
from weft.core.axes import local_update_axis
from weft.core.mesh import Mesh
from weft.errors import Fault

SHARE = re.compile(r"(?P<number>\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(?P<percent>%?)")
SLOW_RANK = re.compile(r"(?P<rank>\d{1,9})=(?P<factor>\d{1,6}(?:\.\d{0,9})?|\.\d{1,9})")
FILES = ("svg", "html", "perfetto")
"""Options that name a file to write."""
NEED_HARDWARE = ("jitter", "slow", "mtbf_hours")
"""Options that are about seconds on a device."""
NEED_FAILURES = ("checkpoint_s", "storage_gb_s", "restart_s")
"""Options that are about failures."""


class SimulateOptions(JsonOptions):
    """What `weft simulate` adds to a run and writes, besides the keys of the run."""

    jitter: str | None = Field(
        None,
        title="a share",
        examples=["5%"],
        description="standard deviation of an action's time: 5% or 0.05",
    )
    draws: int = Field(200, ge=1, le=10_000, description="steps that are drawn with jitter")
    slow: tuple[str, ...] = Field(
        (), examples=["3=1.3"], description="slow ranks: 3=1.3 takes 1.3 times as long"
    )
    mtbf_hours: float | None = Field(
        None, gt=0, description="mean time between failures of one device, hours"
    )
    checkpoint_s: float | None = Field(
        None, ge=0, description="seconds for which a checkpoint stops training"
    )
    storage_gb_s: float | None = Field(
        None, gt=0, description="or bandwidth of the storage for all ranks, 10^9 bytes/s"
    )
    restart_s: float | None = Field(
        None, ge=0, description="seconds from a failure to the first step; None: 600"
    )
    svg: str | None = Field(
        None, title="a file name", examples=["x.svg"], description="write this SVG picture"
    )
    html: str | None = Field(
        None,
        title="a file name",
        examples=["x.html"],
        description="write this page with zoom and tooltips",
    )
    perfetto: str | None = Field(
        None,
        title="a file name",
        examples=["x.json"],
        description="write this trace for ui.perfetto.dev",
    )


def file_faults(options: SimulateOptions) -> Iterator[Fault]:
    """Files that cannot be written, before anything is computed."""
    for name in FILES:
        path = getattr(options, name)
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            fix = fix_of_path(path, name)
            yield Fault(name, "cannot write the file", repr(path), "a file in a folder", fix)


def option_faults(
    options: SimulateOptions, mesh: Mesh, site: SiteConfig, *, has_hardware: bool
) -> Iterator[Fault]:
    """What is wrong with the options for a run on this mesh."""
    if has_hardware:
        yield from _link_faults(mesh, site)
    else:
        yield from _hardware_faults(options)
    yield from _failure_faults(options)
    if options.jitter is not None and read_share(options.jitter) is None:
        need = "a share from 0% to 100%"
        got = repr(options.jitter)
        yield Fault("jitter", "out of range", got, need, fix="--jitter 5%")
    yield from _slow_faults(options.slow, mesh.size)


def _hardware_faults(options: SimulateOptions) -> Iterator[Fault]:
    """Options about seconds, which need a device."""
    for name in NEED_HARDWARE:
        if getattr(options, name):
            what = "is about seconds, and no device is named"
            yield Fault(name, what, need="hardware", fix="--hardware h100")


def _failure_faults(options: SimulateOptions) -> Iterator[Fault]:
    """Options about failures without a time between them, and the other way round."""
    if options.mtbf_hours is None:
        for name in NEED_FAILURES:
            if getattr(options, name) is not None:
                what = "is about failures, and no mean time between them is given"
                yield Fault(name, what, need="mtbf_hours", fix="--mtbf_hours 50000")
    elif options.checkpoint_s is None and options.storage_gb_s is None:
        yield Fault(
            "mtbf_hours",
            "needs the cost of a checkpoint",
            need="checkpoint_s or storage_gb_s",
            fix="--checkpoint_s 30, or --storage_gb_s 100",
        )


def _link_faults(mesh: Mesh, site: SiteConfig) -> Iterator[Fault]:
    """A link between sites whose speed is not known: its seconds are a part of the step."""
    axis = local_update_axis(mesh)
    if axis is None or mesh.degree(axis) == 1 or site.gbit_s:
        return
    yield Fault(
        "site.gbit_s",
        "is not known, and the step waits for the link between sites",
        got=str(site.gbit_s),
        need="its speed in Gbit/s",
        fix="--site.gbit_s 1",
    )


def _slow_faults(words: Sequence[str], num_ranks: int) -> Iterator[Fault]:
    for word in words:
        slow = read_slow(word)
        if slow is None:
            need = "RANK=FACTOR, a factor above 0"
            yield Fault("slow", "cannot be read", repr(word), need, "--slow 0=1.3")
        elif slow[0] >= num_ranks:
            need = f"a rank from 0 to {num_ranks - 1}"
            yield Fault("slow", "there is no such rank", repr(word), need, f"--slow 0={slow[1]:g}")


def read_share(text: str) -> float | None:
    """`5%` or `0.05` as a number from 0 to 1; None for anything else."""
    found = SHARE.fullmatch(text.strip())
    if found is None:
        return None
    share = float(found["number"])
    if found["percent"]:
        share /= 100
    return share if share <= 1 else None


def read_slow(text: str) -> tuple[int, float] | None:
    """`3=1.3` as a rank and its factor; None for anything else."""
    found = SLOW_RANK.fullmatch(text.strip())
    if found is None:
        return None
    factor = float(found["factor"])
    if factor <= 0:
        return None
    return int(found["rank"]), factor
