"""`weft bench`: measure collectives and kernels of this machine, and write a hardware file. Checks come before torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from weft.commands.console import print_result, show_help, wants_help
from weft.config.command_options import STANDARD_OUTPUT, read_options
from weft.config.hardware_file import fields_to_extend
from weft.core.mesh import Mesh
from weft.errors import ConfigError, Fault, did_you_mean
from weft.parallel.dp import AXIS as DP
from weft.run.world import World, detect
from weft.start.checked_run import set_openmp_policy
from weft_plan.bench.bandwidth import OPERATIONS
from weft_plan.commands.bench_options import (
    DEFAULT_MESH,
    BenchOptions,
    CommOptions,
    ComputeOptions,
    SizeRange,
)
from weft_plan.entries import BENCH

NAME = "weft bench"
SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MAX_SIZE = 2**34
BenchT = TypeVar("BenchT", bound=BenchOptions)


def bench(words: Sequence[str]) -> int:
    """Run one of the benchmarks."""
    name, rest = (words[0], list(words[1:])) if words else ("", [])
    if name in BENCHMARKS:
        return BENCHMARKS[name](rest)
    if wants_help(words):
        lines = [f"usage: {NAME} {BENCH.usage}", "", BENCH.line, "", *_overview()]
        return print_result("\n".join(lines))
    what = f"unknown benchmark {name!r}" if name else "no benchmark is named"
    hint = did_you_mean(name, BENCHMARKS)
    raise ConfigError(Fault(NAME, what, need=", ".join(BENCHMARKS), fix=hint))


def _options(words: Sequence[str], of: type[BenchT]) -> BenchT:
    options, places = read_options(words, of)
    if places:
        faults = (Fault(each, "belongs to no flag", fix=f"see {NAME} --help") for each in places)
        raise ConfigError(*faults)
    return options


def _overview() -> Iterator[str]:
    yield "  weft bench comm     collectives, by axis and inside and between nodes"
    yield "  weft bench compute  matrix products, attention, memory, launches"
    yield ""
    yield "`weft bench NAME --help` shows the options."


def comm(words: Sequence[str]) -> int:
    """Measure collectives on the ranks of torchrun or Slurm, or on local ones."""
    if wants_help(words):
        description = "measure collectives, check their results, and print their bandwidths"
        return show_help(CommOptions(), f"{NAME} comm [--mesh ...]", description)
    options = _options(words, CommOptions)
    world = detect(os.environ)
    mesh = Mesh.parse(options.mesh or _default_mesh(world))
    faults = [*_mesh_faults(mesh, world, options.transport), *_output_faults(options)]
    operations = tuple(options.operations.replace(",", " ").split())
    for name in operations:
        if name not in OPERATIONS:
            hint = did_you_mean(name, OPERATIONS)
            faults.append(Fault("operations", "unknown operation", repr(name), fix=hint))
    if not operations:
        faults.append(
            Fault(
                "operations",
                "names no operation",
                need=", ".join(OPERATIONS),
                fix="--operations all_reduce",
            )
        )
    if faults:
        raise ConfigError(*faults)
    sizes = _size_range(options)
    fields = _fields(options)
    set_openmp_policy()
    from weft_plan.commands.bench_run import run_comm  # late: imports torch, after all checks

    return run_comm(
        options, mesh=mesh, world=world, operations=operations, sizes=sizes, fields=fields
    )


def compute(words: Sequence[str]) -> int:
    """Measure kernels on local ranks."""
    if wants_help(words):
        description = (
            "measure matrix products, attention, memory and launches on every rank at once"
        )
        return show_help(ComputeOptions(), f"{NAME} compute [--ranks N]", description)
    options = _options(words, ComputeOptions)
    faults = tuple(_output_faults(options))
    if faults:
        raise ConfigError(*faults)
    fields = _fields(options)
    set_openmp_policy()
    from weft_plan.commands.bench_run import run_compute  # late: imports torch, after all checks

    return run_compute(options, fields=fields)


BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {"comm": comm, "compute": compute}


def _default_mesh(world: World | None) -> str:
    return DEFAULT_MESH if world is None else f"{DP}{world.size}"


def _mesh_faults(mesh: Mesh, world: World | None, transport: str) -> Iterator[Fault]:
    if mesh.size < 2:
        yield Fault("mesh", "has no ranks to communicate", str(mesh), fix=f"--mesh {DEFAULT_MESH}")
    if world is None:
        return
    if world.size != mesh.size:
        got = f"{world.size} ranks of the launcher"
        fix = f"--mesh dp{world.size}"
        yield Fault("mesh", "differs from the world size", got, f"{mesh.size} for {mesh}", fix)
    if transport == "threads":
        what = "ranks as threads cannot be started by a launcher"
        yield Fault("transport", what, fix="--transport process")


def _output_faults(options: BenchOptions) -> Iterator[Fault]:
    """Files that cannot be written, found before anything is measured."""
    outputs = {"json": options.json}
    if isinstance(options, CommOptions):
        outputs["svg"] = options.svg
    for key, path in outputs.items():
        if path in (None, STANDARD_OUTPUT):
            continue
        parent = Path(path).parent
        if not parent.is_dir() or Path(path).is_dir() or not os.access(parent, os.W_OK):
            yield Fault(
                key,
                "cannot be written",
                repr(path),
                "a file in a folder that exists",
                fix=f"--{key} with a file in a folder that exists and can be written",
            )
    if options.published is not None and options.write is None:
        fix = "--write file.toml"
        yield Fault("published", "starts a hardware file, and none is written", fix=fix)


def _fields(options: BenchOptions) -> dict[str, object] | None:
    """The fields that the hardware file has before; None: none is written."""
    if options.write is None:
        return None
    if options.published is not None and Path(options.write).exists():
        what = f"starts a new hardware file, and {options.write} exists"
        raise ConfigError(Fault("published", what, fix="another --write, or without --published"))
    return fields_to_extend(options.write, published=options.published)


def _size_range(options: CommOptions) -> SizeRange:
    smallest = parse_size("smallest", options.smallest)
    largest = None if options.largest is None else parse_size("largest", options.largest)
    if largest is not None and largest < smallest:
        got = f"{options.largest} < {options.smallest}"
        raise ConfigError(
            Fault(
                "largest",
                "is below the smallest size",
                got,
                fix="a larger --largest, or a smaller --smallest",
            )
        )
    return SizeRange(smallest, largest, options.factor)


def parse_size(key: str, text: str) -> int:
    """Bytes of `512`, `1KB`, `64MB`, `1GB`; K, M and G are powers of 1024.

    Raises:
        ConfigError: it is no size, or out of range.
    """
    match = SIZE.fullmatch(text.strip())
    need = "a size like 1KB, 64MB or 1GB"
    if match is None:
        raise ConfigError(
            Fault(key, "is no size", repr(text), need, fix=f"for example --{key} 1MB")
        )
    size = int(match[1][:20]) * UNITS[match[2].upper()]
    if not 4 <= size <= MAX_SIZE:
        raise ConfigError(
            Fault(
                key, "out of range", repr(text), "4 bytes to 16GB", fix=f"for example --{key} 1MB"
            )
        )
    return size
