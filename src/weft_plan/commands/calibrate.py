"""`weft plan --calibrate`: short runs on this machine, to which the constants of its hardware file are fitted."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.commands.console import show_help, wants_help
from weft.config import flags
from weft.config.hardware import SUFFIX, find_hardware
from weft.config.rules.sections import bandwidths_are_known
from weft.errors import ConfigError, Fault
from weft.parallel.dp import AXIS as DP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.start.checked_run import set_openmp_policy
from weft_plan.commands.calibrate_options import CalibrateOptions
from weft_plan.entries import CALIBRATE

FLAG = "--calibrate"
MICRO_BATCHES = 4
"""Of a step and data rank."""


class ShortRun(NamedTuple):
    """A run that is timed.

    Attributes:
        axis: of its mesh, over all ranks.
        flags: besides its sizes.
    """

    axis: str
    layers: int
    dim: int
    heads: int
    seq_len: int
    micro_size: int
    flags: str = ""


RECOMPUTE = "--parallel.recompute full"
RUNS = (
    ShortRun(DP, 8, 32, 4, 32, 1),
    ShortRun(DP, 2, 512, 8, 32, 1),
    ShortRun(DP, 2, 64, 8, 256, 2),
    ShortRun(DP, 2, 256, 4, 256, 2),
    ShortRun(DP, 4, 64, 2, 64, 8),
    ShortRun(DP, 2, 384, 8, 128, 4, RECOMPUTE),
    ShortRun(DP, 4, 128, 8, 128, 2, "--parallel.zero 1"),
    ShortRun(DP, 2, 256, 8, 64, 2, "--parallel.zero 2"),
    ShortRun(TP, 8, 32, 4, 32, 1),
    ShortRun(TP, 2, 512, 8, 64, 2),
    ShortRun(TP, 2, 64, 8, 256, 2),
    ShortRun(TP, 4, 256, 4, 128, 2, RECOMPUTE),
    ShortRun(TP, 4, 64, 2, 128, 8),
    ShortRun(TP, 2, 384, 8, 64, 4),
    ShortRun(TP, 2, 128, 2, 256, 4),
    ShortRun(TP, 4, 128, 8, 64, 2),
    ShortRun(PP, 8, 64, 8, 32, 1),
    ShortRun(PP, 4, 256, 8, 64, 4),
    ShortRun(PP, 2, 64, 8, 256, 4),
    ShortRun(PP, 2, 128, 2, 256, 4, RECOMPUTE),
    ShortRun(PP, 4, 128, 8, 128, 8),
    ShortRun(PP, 2, 512, 8, 64, 1),
    ShortRun(PP, 8, 32, 4, 64, 4),
    ShortRun(PP, 4, 384, 8, 128, 1),
)
"""Each constant decides some of the runs: many small layers the launch, wide ones with few tokens the
matrix products and the optimizer's memory traffic, long sequences with heads of 64 attention, with
heads of 8 the traffic of its scores, narrow ones with many tokens memory, and those with few tokens a
collective its latency.
"""


def calibrate(words: Sequence[str]) -> int:
    """Run, fit, print and write."""
    own = [word for word in words if word != FLAG]
    if wants_help(own):
        return show_help(CalibrateOptions(), f"weft plan {CALIBRATE.usage}", CALIBRATE.line)
    options = flags.read_config(own, CalibrateOptions)
    faults = tuple(_faults(options))
    if faults:
        raise ConfigError(*faults)
    assert options.write is not None, "checked above"
    set_openmp_policy()
    from weft_plan.commands.calibrate_run import run_calibration  # late: imports torch

    return run_calibration(options.write, runs_of(options), options)


def runs_of(options: CalibrateOptions) -> tuple[tuple[str, ...], ...]:
    """The words of every run."""
    return tuple(words_of(run, options.ranks) for run in RUNS)


def words_of(run: ShortRun, ranks: int) -> tuple[str, ...]:
    """The words of a run, with a layer and a head at least for each rank."""
    heads = str(max(run.heads, ranks))
    data_ranks = ranks if run.axis == DP else 1
    sizes = {
        "--mesh": f"{run.axis}{ranks}",
        "--model.layers": str(max(run.layers, ranks)),
        "--model.dim": str(run.dim),
        "--model.heads": heads,
        "--model.kv_heads": heads,
        "--data.seq_len": str(run.seq_len),
        "--batch.micro_size": str(run.micro_size),
        "--batch.global_size": str(run.micro_size * data_ranks * MICRO_BATCHES),
    }
    words = [word for pair in sizes.items() for word in pair]
    return (*words, *run.flags.split())


def _sequence(path: str) -> str:
    """What makes a calibrated hardware file."""
    commands = (
        f"weft bench compute --write {path}",
        f"weft bench comm --mesh dp2 --write {path}",
        f"weft plan --calibrate --write {path}",
    )
    return ", then ".join(commands)


def _faults(options: CalibrateOptions) -> Iterator[Fault]:
    if options.write is None:
        need = "a file with figures"
        fix = _sequence("mine.toml")
        yield Fault("write", "no hardware file is named", need=need, fix=fix)
        return
    if importlib.util.find_spec("scipy") is None:
        yield Fault("calibrate", "scipy is not installed", fix='pip install "weft-train[plan]"')
    if not options.write.endswith(SUFFIX):
        need = f"a name that ends in {SUFFIX}"
        fix = "--write mine.toml"
        yield Fault("write", "is no hardware file", repr(options.write), need, fix)
        return
    if not Path(options.write).exists():
        fix = _sequence(options.write)
        yield Fault("write", "the file is missing", repr(options.write), fix=fix)
        return
    yield from bandwidths_are_known(find_hardware(options.write), options.ranks)
    cores = len(os.sched_getaffinity(0))
    if options.device == "cpu" and options.ranks > cores:
        need = f"at most {cores}: ranks that share a core are slower than their device"
        yield Fault(
            "ranks", "more ranks than cores", f"{options.ranks}", need, fix=f"--ranks {cores}"
        )
    if not os.access(Path(options.write), os.W_OK):
        yield Fault(
            "write",
            "cannot be written",
            repr(options.write),
            fix="copy it into a folder of yours, and name the copy",
        )
