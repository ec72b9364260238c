"""`weft plan --calibrate`: short runs on this machine, to which the constants of its hardware file are fitted."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.commands.calibrate_options import CalibrateOptions
from weft.commands.console import set_openmp_policy, show_help, wants_help
from weft.config import flags
from weft.config.hardware import SUFFIX, find_hardware, world_faults
from weft.errors import ConfigError, Fault
from weft.parallel.dp import AXIS as DP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP

FLAG = "--calibrate"
USAGE = "weft plan --calibrate --write mine.toml"
LINE = "fit the constants of this machine to short runs, and write them to its hardware file"
AXES = (DP, TP, PP)
SIZES = (
    "--model.layers 2 --model.dim 64 --data.seq_len 64 --batch.micro_size 2",
    "--model.layers 4 --model.dim 64 --data.seq_len 128 --batch.micro_size 4",
    "--model.layers 2 --model.dim 128 --data.seq_len 128 --batch.micro_size 1",
    "--model.layers 4 --model.dim 128 --data.seq_len 64 --batch.micro_size 4",
    "--model.layers 2 --model.dim 256 --data.seq_len 64 --batch.micro_size 2",
    "--model.layers 4 --model.dim 256 --data.seq_len 128 --batch.micro_size 2",
    "--model.layers 2 --model.dim 256 --data.seq_len 256 --batch.micro_size 4",
    "--model.layers 2 --model.dim 384 --data.seq_len 128 --batch.micro_size 4",
)
"""Sizes of the runs of every mesh."""
VARIANTS = (
    "",
    "--parallel.recompute full",
    "",
    "--parallel.zero 1",
    "",
    "--parallel.recompute full",
    "--parallel.zero 2",
    "",
)
"""One for each size."""
MICRO_BATCHES = 4
"""Of a step and data rank."""


def calibrate(words: Sequence[str]) -> int:
    """Run, fit, print and write."""
    own = [word for word in words if word != FLAG]
    if wants_help(own):
        return show_help(CalibrateOptions(), USAGE, LINE)
    options = flags.read_config(own, CalibrateOptions)
    faults = tuple(_faults(options))
    if faults:
        raise ConfigError(*faults)
    assert options.write is not None, "checked above"
    set_openmp_policy()
    from weft.commands.calibrate_run import run_calibration  # late: imports torch

    return run_calibration(options.write, runs_of(options), options)


def runs_of(options: CalibrateOptions) -> tuple[tuple[str, ...], ...]:
    """The words of every run."""
    found = []
    for axis in AXES:
        for size, variant in zip(SIZES, VARIANTS, strict=True):
            words = f"--mesh {axis}{options.ranks} {size} {variant}".split()
            if axis == PP and "--model.layers" in words:
                layers = words.index("--model.layers") + 1
                words[layers] = str(max(int(words[layers]), options.ranks))
            micro = int(words[words.index("--batch.micro_size") + 1])
            data_ranks = options.ranks if axis == DP else 1
            total = str(micro * data_ranks * MICRO_BATCHES)
            heads = ["--model.heads", "8", "--model.kv_heads", "8"]
            found.append((*words, *heads, "--batch.global_size", total))
    return tuple(found)


def _faults(options: CalibrateOptions) -> Iterator[Fault]:
    if options.write is None:
        fix = "weft bench compute --write mine.toml, then weft plan --calibrate --write mine.toml"
        yield Fault("write", "no hardware file is named", need="a file with figures", fix=fix)
        return
    if importlib.util.find_spec("scipy") is None:
        yield Fault("calibrate", "scipy is not installed", fix='pip install "weft-train[plan]"')
    if not options.write.endswith(SUFFIX):
        yield Fault(
            "write", "is no hardware file", repr(options.write), f"a name that ends in {SUFFIX}"
        )
        return
    yield from world_faults(find_hardware(options.write), options.ranks)
    cores = len(os.sched_getaffinity(0))
    if options.device == "cpu" and options.ranks > cores:
        need = f"at most {cores}: ranks that share a core are slower than their device"
        yield Fault("ranks", "more ranks than cores", f"{options.ranks}", need)
    if not os.access(Path(options.write), os.W_OK):
        yield Fault("write", "cannot be written", repr(options.write))
