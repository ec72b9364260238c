"""Predicted peak memory against published rows of Zero Bubble (arXiv 2401.10241), without calibration.

    .venv/bin/python -m benchmarks.published_memory perf_rows.json [--only 1.5B] [--handcrafted]

ZB-1p and ZB-2p are the paper's searched tables: those of its heuristic (`benchmarks/zero_bubble_search.py`) with a limit of p and
2p activations on every rank, where weft's own zero_bubble and zero_bubble_h2 are the handcrafted ones (`--handcrafted`).

The layers are those of `benchmarks/megatron_gpt.py`; bfloat16, gradients summed in float32, AdamW: 18 bytes a parameter, as in
Megatron-LM. Nothing is fitted. Rows without a number of layers are left out.

The paper prints whole "GB" and does not say how many bytes one is. Its program (Megatron-LM's `report_memory`) prints "MB" of
2^20 bytes, so that a GB may be 1,024 or 1,000 of them; errors are given for both.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.zero_bubble_search import Costs, limited_table

from weft.config.load import load
from weft.config.run import Run
from weft.errors import UserError
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.played_actions import ActionKey
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.step_memory import StepMemory, step_memory

MIB = 2**20
GIB = 2**30
UNITS = {"GiB": GIB, "1,000 MiB": 1000 * MIB}
"""Readings of the paper's GB -> bytes."""
SOURCE = "Zero Bubble PP"
SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "zb-1p": "zero_bubble",
    "zb-2p": "zero_bubble_h2",
    "zb-v": "zbv",
}
SEARCHED = {"zb-1p": 1, "zb-2p": 2}
"""Published schedules from a search -> its memory limit, in activations for each pipeline rank."""
MODEL = Path(__file__).with_name("megatron_gpt.py")


@dataclass(frozen=True)
class Row:
    """A published memory; rows that differ in the number of micro-batches alone are one.

    Attributes:
        size: of the model, as the paper names it.
        published: in the paper's GB (`UNITS`).
    """

    size: str
    hidden: int
    layers: int
    heads: int
    pipeline: int
    chunks: int
    schedule: str
    microbatches: int
    micro_size: int
    published: float


def rows_of(path: Path, only: str) -> list[Row]:
    """The rows with a memory and a number of layers, one for each model, schedule and micro size."""
    found: dict[tuple[Any, ...], Row] = {}
    for fields in json.loads(path.read_text(encoding="utf-8")):
        memory = fields.get("measured", {}).get("memory_gb")
        model = fields["model"]
        if not fields["source"].startswith(SOURCE) or not memory or "layers" not in model:
            continue
        layout = fields["layout"]
        size = f"{model['params_b']}B"
        key = (size, layout["schedule"], layout["pp"], fields["micro_batch"])
        row = Row(
            size=size,
            hidden=model["hidden"],
            layers=model["layers"],
            heads=model["heads"],
            pipeline=layout["pp"],
            chunks=layout["vpp"],
            schedule=layout["schedule"],
            microbatches=layout["num_microbatches"],
            micro_size=fields["micro_batch"],
            published=memory,
        )
        is_smaller = key not in found or row.microbatches < found[key].microbatches
        if is_smaller and (not only or size == only):
            found[key] = row
    return list(found.values())


def run_of(row: Row, schedule: str) -> Run:
    """The row as a run of weft.

    Args:
        schedule: a built-in one, or a file.
    """
    settings = {
        "--model.layers": row.layers,
        "--model.dim": row.hidden,
        "--model.heads": row.heads,
        "--mesh": f"pp{row.pipeline}",
        "--pipeline.schedule": schedule,
        "--pipeline.chunks": row.chunks,
        "--batch.micro_size": row.micro_size,
        "--batch.global_size": row.micro_size * row.microbatches,
        "--data.seq_len": 1024,
        "--precision.compute": "bfloat16",
        "--device": "cpu",
    }
    words = [str(MODEL)]
    for key, value in settings.items():
        words += [key, str(value)]
    num_stages = row.pipeline * row.chunks
    units = (row.layers + 2) // num_stages  # "first and last stage have one layer fewer"
    words += ["--pipeline.split", *[str(units)] * num_stages]
    return load(words, FAMILIES)


def searched_run(row: Row) -> Run:
    """The row with a table of the paper's heuristic."""
    inner = measure_rank(MeasuredRun.of(run_of(row, SCHEDULES[row.schedule])), 1).actions
    forward, weight_grad = (inner[ActionKey(kind, 0, "middle")].change for kind in ("F", "W"))
    table = limited_table(
        row.pipeline,
        row.microbatches,
        limit=SEARCHED[row.schedule] * row.pipeline,
        costs=Costs(kept=-weight_grad / forward),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "searched.txt"
        path.write_text(table.text, encoding="utf-8")
        return run_of(row, str(path))


def memory_of_rows(run: Run) -> list[StepMemory]:
    """The memory of every pipeline rank. The inner ones have equal layers: one of them is played."""
    measured = MeasuredRun.of(run)
    last = measured.plan.pipeline_size - 1
    played: dict[int, RankStep] = {rank: measure_rank(measured, rank) for rank in (0, 1, last)}
    return [step_memory(played.get(row, played[1]), row) for row in range(last + 1)]


def lines(rows: Iterable[Row], *, handcrafted: bool) -> Iterator[str]:
    """A line a row, and the errors of all."""
    errors: dict[str, list[float]] = {unit: [] for unit in UNITS}
    for row in rows:
        name = (
            f"{row.size:>6} {row.schedule:<16} pp{row.pipeline} x {row.chunks}, b {row.micro_size}"
        )
        try:
            is_searched = row.schedule in SEARCHED and not handcrafted
            run = searched_run(row) if is_searched else run_of(row, SCHEDULES[row.schedule])
            memories = memory_of_rows(run)
        except UserError as error:
            yield f"{name}: {error}"
            continue
        memory = max(memories, key=lambda each: each.peak)
        off = {unit: memory.peak / (row.published * size) - 1 for unit, size in UNITS.items()}
        for unit, error in off.items():
            errors[unit].append(abs(error))
        shown = ", ".join(f"{100 * error:+.1f}% ({unit})" for unit, error in off.items())
        parts = {
            "kept": memory.kept.total,
            "in flight": memory.in_flight,
            "workspace": memory.workspace,
        }
        account = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items())
        yield (
            f"{name}: predicted {memory.peak / GIB:.1f} GiB of pp{memories.index(memory)} ({account}; {memory.cause}),"
            f" published {row.published:g}: {shown}"
        )
    for unit, found in errors.items():
        if found:
            yield f"GB as {unit}: {summary(found)}"


def summary(errors: Sequence[float]) -> str:
    within = sum(error <= 0.05 for error in errors)
    median = 100 * statistics.median(errors)
    return f"{within} of {len(errors)} within 5%; median {median:.1f}%, largest {100 * max(errors):.1f}%"


def main(words: list[str]) -> int:
    only = words[words.index("--only") + 1] if "--only" in words else ""
    rows = rows_of(Path(words[0]), only)
    for line in lines(rows, handcrafted="--handcrafted" in words):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
