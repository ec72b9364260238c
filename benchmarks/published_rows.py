"""Rows of the published facts as runs of weft, or the reason why a row is none.

`perf_rows.json` has one row a published measurement, `vtrain_single.csv` 720 steps on one node of A100.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.efficiency import Efficiency

VOCAB = 50257
SCHEDULES = {
    "1f1b": "1f1b",
    "none": "1f1b",
    "None": "1f1b",
    "zb-1p": "zero_bubble",
    "zb-2p": "zero_bubble_h2",
    "zb-v": "zbv",
    "interleaved-1f1b": "interleaved",
}
RECOMPUTE = {"none": "none", "full": "full", "selective(attn core)": "selective"}
COMPUTE = ("bf16", "fp16", "amp_bf16", "bf16 (fp32 grad accum)", "fp16/bf16 (not printed)")
# NCCL's kernels take about 16 of the 108 or 132 multiprocessors from those beside them: 0.15.
UNFUSED = Efficiency(gemm_half=1e6, score_bytes=15.0, overlap_slowdown=0.15, source="")
FUSED = Efficiency(gemm_half=1e6, overlap_slowdown=0.15, source="")


class InexpressibleError(Exception):
    """The row is no run of weft; says why."""


class Stack(NamedTuple):
    """Rows with one set of constants: a device and the software on it.

    Attributes:
        hardware: name in the table.
        start: constants to start from.
    """

    name: str
    hardware: str
    start: Efficiency


MEGATRON = Stack("A100, Megatron with unfused attention", "a100", UNFUSED)
STACKS = {
    "vTrain single node": MEGATRON,
    "vTrain measured data (MICRO 2024)": MEGATRON,
    "BLOOM chronicles (Jean Zay A100)": MEGATRON,
    "Zero Bubble PP (arXiv 2401.10241)": MEGATRON,
    "Korthikanti et al. 2022 (arXiv 2205.05198)": MEGATRON,
    "Narayanan et al. SC'21 (arXiv 2104.04473)": MEGATRON,
    "ScaleTorch README": Stack("910B, ScaleTorch", "910b", FUSED),
}
MOSAIC = "MosaicML llm-foundry benchmarks"


class Published(NamedTuple):
    """A published measurement as a run.

    Attributes:
        key: what decides its half.
        words: of the run, as on a command line.
        layers: of each stage.
    """

    key: str
    source: str
    stack: Stack
    words: tuple[str, ...]
    layers: tuple[int, ...]
    seconds: float
    group: str = ""

    @property
    def values(self) -> dict[str, str]:
        """The words as flags and values."""
        return dict(zip(self.words[::2], self.words[1::2], strict=True))

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the mesh axes."""
        return {axis[:2]: int(axis[2:]) for axis in self.values["--mesh"].split()}

    @property
    def is_fitted(self) -> bool:
        """Whether the row belongs to the half that is fitted."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return digest[0] % 2 == 0


def stack_of(row: Mapping[str, Any]) -> Stack:
    source = row["source"]
    gpu = str(row["hardware"].get("gpu", "")).lower()
    if source == MOSAIC:
        name = "h100" if gpu.startswith("h100") else "a100"
        return Stack(f"{name.upper()}, llm-foundry (FSDP)", name, FUSED)
    if source not in STACKS:
        raise InexpressibleError(f"too few rows of {source} for a set of constants")
    return STACKS[source]


def seconds_of(row: Mapping[str, Any]) -> float:
    values = {**row["derived"], **row["measured"]}
    if "iteration_s" in values:
        return float(values["iteration_s"])
    speed = values.get("tokens_per_s_per_gpu")
    if not (speed and row.get("global_batch") and row["hardware"].get("count")):
        raise InexpressibleError("no time of a step")
    tokens = row["global_batch"] * row["model"]["seq"]
    return float(tokens / speed / row["hardware"]["count"])


def model_words(model: Mapping[str, Any], *, tp: int, layers: int) -> list[str]:
    arch = str(model.get("arch", ""))
    fields = {
        "layers": layers,
        "dim": model["hidden"],
        "heads": model["heads"],
        "ffn": model["ffn"],
        "max_seq_len": model["seq"],
        "vocab": padded(model.get("vocab", VOCAB), 128 * tp),
    }
    if arch.startswith(("gpt", "mpt")):
        name = "gpt2"
    elif arch.startswith("qwen3 (") and "experts" not in model:
        name = "qwen3"
        fields |= {"kv_heads": model["kv_heads"], "head_size": model["head_dim"]}
    else:
        raise InexpressibleError(f"model {arch or 'not stated'}")
    words = ["--model.name", name]
    for key, value in fields.items():
        words += [f"--model.{key}", str(value)]
    return words


def padded(number: int, multiple: int) -> int:
    """Megatron pads the vocabulary to whole shards."""
    return -(-number // multiple) * multiple


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages, or first and last ones with a layer less (for embedding and head)."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    raise InexpressibleError(f"{layers} layers on {stages} stages")


def run_of_row(row: Mapping[str, Any]) -> Published:
    model, layout = row["model"], row["layout"]
    missing = [name for name in ("hidden", "heads", "ffn", "seq", "layers") if not model.get(name)]
    if missing:
        raise InexpressibleError(f"sizes not printed: {', '.join(missing)}")
    if row["dtype"] not in COMPUTE:
        raise InexpressibleError(f"number type {row['dtype']}")
    schedule = SCHEDULES.get(str(layout.get("schedule")))
    recompute = RECOMPUTE.get(str(layout.get("recompute")))
    if schedule is None or recompute is None:
        raise InexpressibleError(f"{layout.get('schedule')}, recompute {layout.get('recompute')}")
    if layout.get("ep", 1) > 1 or layout.get("sp"):
        raise InexpressibleError("experts or sequence parallelism")
    micro, total = row.get("micro_batch"), row.get("global_batch")
    if not (micro and total):
        raise InexpressibleError("batch not printed")
    degrees = {name: layout.get(name) or 1 for name in ("pp", "dp", "cp", "tp")}
    chunks = layout.get("vpp") or 1
    if schedule == "zbv":
        chunks = 2
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved"
    layers = stage_layers(model["layers"], degrees["pp"] * chunks)
    words = [
        *model_words(model, tp=degrees["tp"], layers=model["layers"]),
        *layout_words(degrees, micro, total),
        *["--data.seq_len", str(model["seq"])],
        *["--parallel.recompute", recompute, "--parallel.zero", str(layout.get("zero") or 0)],
    ]
    if degrees["pp"] > 1:
        words += ["--pipeline.schedule", schedule, "--pipeline.chunks", str(chunks)]
    reduce = "float32" if "fp32" in row["dtype"] else "bfloat16"
    words += ["--precision.reduce", reduce]
    return Published(
        key=row["id"],
        source=row["source"],
        stack=stack_of(row),
        words=tuple(words),
        layers=layers,
        seconds=seconds_of(row),
    )


def layout_words(degrees: Mapping[str, int], micro: int, total: int) -> list[str]:
    axes = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return [
        *["--mesh", " ".join(axes), "--precision.compute", "bfloat16"],
        *["--batch.micro_size", str(micro), "--batch.global_size", str(total)],
        *["--data.tokenizer", "bytes"],
    ]


def run_of_csv(values: Sequence[str]) -> Published:
    _, total, micro, hidden, heads, layers, seq, tp, dp, pp = map(int, values[:10])
    model = {"hidden": hidden, "heads": heads, "ffn": 4 * hidden, "seq": seq, "arch": "gpt"}
    words = [
        *model_words(model, tp=tp, layers=layers),
        *layout_words({"pp": pp, "dp": dp, "tp": tp}, micro, total),
        *["--data.seq_len", str(seq), "--precision.reduce", "bfloat16"],
    ]
    return Published(
        key=",".join(values[:10]),
        source="vTrain single node",
        stack=MEGATRON,
        words=tuple(words),
        layers=stage_layers(layers, pp),
        seconds=float(values[10]) / 1e3,
        group=",".join((*values[:2], *values[3:7])),
    )


def read_rows(facts: Path) -> tuple[list[Published], Counter[str]]:
    """The rows that are runs of weft, and reasons of the others with their number."""
    found: list[Published] = []
    with (facts / "vtrain_single.csv").open() as file:
        found += [run_of_csv(values) for values in list(csv.reader(file))[1:]]
    reasons: Counter[str] = Counter()
    for row in json.loads((facts / "perf_rows.json").read_text()):
        if row["kind"] != "train_step":
            continue
        try:
            found.append(run_of_row(row))
        except InexpressibleError as reason:
            reasons[f"{row['source']}: {reason}"] += 1
    return found, reasons
