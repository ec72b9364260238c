"""Rows of the published facts as runs of weft, or the reason why a row is none.

`perf_rows.json` has one row a published measurement, `vtrain_single.csv` 720 steps on one node of A100.

Note [ScaleTorch]
    Rows of ScaleTorch are expressed as its code runs them, which is not what their labels say
    (github.com/jianzhnie/ScaleTorch at 454b589; scaletorch/trainer, models, parallel):
    - Pipeline stages call their layers without `gradient_checkpointing`: nothing is recomputed.
    - The model is built without the argument for sequence parallelism: the same run as without.
    - The flag of ring attention is set after the layers have read it: a rank attends to its own
      part of a sequence alone, as if the parts were sequences.
    - Gradients are reduced by a wrapper that is made where dp > 1, over dp x cp, in float32. With
      gradient accumulation all micro-batches are inside of `no_sync`: no reduction at all (in a
      pipeline, one).
    - Parameters and both moments are bfloat16 (`model.to(dtype)`, AdamW on them).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fact_rows import read_csv_rows, read_json_rows

from weft.config.efficiency import Efficiency
from weft.config.hardware import Hardware, find_hardware, hardware_table

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
WITHOUT_NORM_SYNC = ("zb-1p", "zb-2p", "zb-v")
"""Schedules whose published runs check the norm after the update: Qi et al. 2023, section 4."""
RECOMPUTE = {"none": "none", "full": "full", "selective(attn core)": "selective"}
COMPUTE = ("bf16", "fp16", "amp_bf16", "bf16 (fp32 grad accum)", "fp16/bf16 (not printed)")
# NCCL's kernels take about 16 of the 108 or 132 multiprocessors from those beside them: 0.15.
UNFUSED = Efficiency(gemm_half=1e6, score_bytes=15.0, overlap_slowdown=0.15, source="")
FUSED = Efficiency(gemm_half=1e6, overlap_slowdown=0.15, source="")
GBIT_S = 0.125
"""10^9 bytes a second."""
NETWORK = re.compile(r"(?:(\d+) ?x ?)?(?:[A-Za-z-]+ )?([\d.]+) Gb(?:/s)?\b.*? per (node|GPU)")
"""As sources print the network: links of a node, their rate, and of what that is the sum."""


Reasons = dict[str, list[str]]
"""Why rows are no runs of weft -> their keys."""


class InexpressibleError(Exception):
    """The row is no run of weft; says why."""


@dataclass(frozen=True)
class Stack:
    """Software with one set of constants on a type of device.

    Attributes:
        hardware: type of the device.
        start: constants to start from.
    """

    name: str
    hardware: str
    start: Efficiency


MOSAIC = "MosaicML llm-foundry benchmarks"
SCALETORCH = "ScaleTorch README"
MEGATRON = Stack("A100, Megatron with unfused attention", "a100", UNFUSED)
DEEPSPEED = Stack("A100, DeepSpeed ZeRO 3", "a100", UNFUSED)
STACKS = {
    "vTrain single node": MEGATRON,
    "vTrain measured data (MICRO 2024)": MEGATRON,
    "BLOOM chronicles (Jean Zay A100)": MEGATRON,
    "Zero Bubble PP (arXiv 2401.10241)": MEGATRON,
    "Korthikanti et al. 2022 (arXiv 2205.05198)": MEGATRON,
    "Narayanan et al. SC'21 (arXiv 2104.04473)": MEGATRON,
    SCALETORCH: Stack("910B, ScaleTorch", "910b", FUSED),
}


@dataclass(frozen=True)
class Published:
    """A published measurement as a run.

    Attributes:
        key: what decides its half.
        words: of the run, as on a command line.
        layers: of each stage.
        hardware: of its devices, with the network that the source prints.
        group: rows of one model and batch, of which one layout is the fastest.
        waits_for_norm: see `weft_plan.calibration.measured_steps.MeasuredStep`.
    """

    key: str
    source: str
    stack: Stack
    words: tuple[str, ...]
    layers: tuple[int, ...]
    seconds: float
    hardware: Hardware = field(compare=False)
    group: str = ""
    waits_for_norm: bool = True

    @property
    def values(self) -> dict[str, str]:
        """The words as flags and values."""
        return dict(zip(self.words[::2], self.words[1::2], strict=True))

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the mesh axes."""
        return {axis[:2]: int(axis[2:]) for axis in self.values["--mesh"].split()}

    @property
    def family(self) -> str:
        """Rows alike: of one model on devices of one kind."""
        values = self.values
        sizes = [values[f"--model.{name}"] for name in ("layers", "dim", "heads")]
        return " ".join((self.source, self.hardware.name, *sizes))

    @property
    def is_fitted(self) -> bool:
        """Whether the row belongs to the half that is fitted."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return digest[0] % 2 == 0


def device_of(row: Mapping[str, Any]) -> str:
    """The device of the hardware table whose name the printed one contains: the longest such name."""
    printed = str(row["hardware"].get("gpu"))
    text = printed.lower()
    found = [name for name in hardware_table() if name in text]
    if not found:
        raise InexpressibleError(f"hardware.gpu: {printed} is not in the hardware table")
    return max(found, key=len)


def stack_of(row: Mapping[str, Any]) -> Stack:
    """The set of constants of a row: of the software of its source, where that is known, on the type
    of its device.
    """
    device = device_of(row)
    if row["source"] == MOSAIC:
        return Stack(f"{device.upper()}, llm-foundry (FSDP)", device, FUSED)
    stack = STACKS.get(row["source"])
    if stack is None:
        return Stack(f"{device.upper()}, other software", device, FUSED)
    if stack.hardware == device:
        return stack
    _, _, software = stack.name.partition(", ")
    return replace(stack, name=f"{device.upper()}, {software}", hardware=device)


def hardware_of(row: Mapping[str, Any], stack: Stack) -> Hardware:
    """The devices of a row: 40 or 80 GB, with the network that is printed."""
    printed = row["hardware"]
    has_40_gb = "40gb" in str(printed.get("gpu", "")).lower()
    hardware = find_hardware("a100-40gb" if has_40_gb else stack.hardware)
    network = NETWORK.search(str(printed.get("inter_bw") or ""))
    if network is None:
        return hardware
    links, rate, whole = network.groups()
    devices = int(printed["gpus_per_node"]) if whole == "node" else 1
    network_gb_s = int(links or 1) * float(rate) * GBIT_S / devices
    return replace(hardware, network_gb_s=network_gb_s)


def seconds_of(row: Mapping[str, Any]) -> float:
    """Measured seconds of a step, or those of its tokens at the measured speed."""
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


def stage_layers(layers: int, stages: int, *, is_balanced: bool = False) -> tuple[int, ...]:
    """Equal stages, or first and last ones with a layer less (for embedding and head), or, in
    DeepSpeed, stages that differ by a layer.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    if is_balanced:
        ends = [stage * layers // stages for stage in range(stages + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))
    raise InexpressibleError(f"{layers} layers on {stages} stages")


def run_of_row(row: Mapping[str, Any]) -> Published:
    """A row of `perf_rows.json` as a run."""
    _check_sizes(row)
    if row["source"] != SCALETORCH:
        return _run_of_checked_row(row, seconds=seconds_of(row))
    seconds = seconds_of(row)
    _check_ranks(row, row["layout"])
    return _run_of_checked_row(as_scaletorch_runs(row), seconds=seconds)


def as_scaletorch_runs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as its software runs it; see Note [ScaleTorch]."""
    layout = {**row["layout"], "sp": False, "cp": 1, "params": "bfloat16"}
    is_pipeline = layout["pp"] > 1
    if is_pipeline:
        layout["recompute"] = "none"
    model = dict(row["model"])
    batch = row["global_batch"]
    context = row["layout"].get("cp") or 1
    model["seq"] //= context
    accumulates = layout.get("grad_accum", 1) > 1 and not is_pipeline
    if accumulates:
        batch //= layout["dp"]
        layout["dp"] = 1
    elif layout["dp"] > 1:
        batch *= context
        layout["dp"] *= context
    return {
        **row,
        "model": model,
        "layout": layout,
        "global_batch": batch,
        "dtype": "bf16 (fp32 grad accum)",
        "hardware": {**row["hardware"], "count": None},
    }


def _run_of_checked_row(row: Mapping[str, Any], *, seconds: float) -> Published:
    model, layout = row["model"], row["layout"]
    printed_schedule = str(layout.get("schedule"))
    recompute = RECOMPUTE.get(str(layout.get("recompute")))
    if printed_schedule not in SCHEDULES or recompute is None:
        what = f"{layout.get('schedule')}, recompute {layout.get('recompute')}"
        raise InexpressibleError(what)
    degrees = degrees_of(layout)
    _check_ranks(row, layout)
    schedule, chunks = _schedule(layout)
    words = [
        *model_words(model, tp=degrees["tp"], layers=model["layers"]),
        *layout_words(degrees, row["micro_batch"], row["global_batch"]),
        *["--data.seq_len", str(model["seq"])],
        *["--parallel.recompute", recompute, "--parallel.zero", str(layout.get("zero") or 0)],
    ]
    if layout.get("sp"):
        words += ["--parallel.sequence", "True"]
    if degrees["pp"] > 1:
        words += ["--pipeline.schedule", schedule, "--pipeline.chunks", str(chunks)]
    reduce = "float32" if "fp32" in row["dtype"] else "bfloat16"
    words += ["--precision.reduce", reduce]
    if "params" in layout:
        words += ["--precision.params", layout["params"]]
    stack = stack_of(row)
    if stack == MEGATRON and layout.get("zero") == 3:
        stack = DEEPSPEED  # Megatron-LM has no ZeRO 3
    return Published(
        key=row["id"],
        source=row["source"],
        stack=stack,
        words=tuple(words),
        layers=stage_layers(
            model["layers"],
            degrees["pp"] * chunks,
            is_balanced=layout.get("embedding_as_stage_layer") is False,
        ),
        seconds=seconds,
        hardware=hardware_of(row, stack),
        waits_for_norm=printed_schedule not in WITHOUT_NORM_SYNC,
    )


def _check_sizes(row: Mapping[str, Any]) -> None:
    model = row["model"]
    names = ("hidden", "heads", "ffn", "seq", "layers")
    missing = [name for name in names if not model.get(name)]
    if missing:
        raise InexpressibleError(f"sizes not printed: {', '.join(missing)}")
    if row["dtype"] not in COMPUTE:
        raise InexpressibleError(f"number type {row['dtype']}")
    if row["layout"].get("ep", 1) not in (None, 1):
        raise InexpressibleError("experts")
    if not (row.get("micro_batch") and row.get("global_batch")):
        raise InexpressibleError("batch not printed")


def degrees_of(layout: Mapping[str, Any]) -> dict[str, int]:
    """Degrees of the mesh axes; those that are not printed are 1."""
    return {name: layout.get(name) or 1 for name in ("pp", "dp", "cp", "tp")}


def _check_ranks(row: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    ranks = math.prod(degrees_of(layout).values())
    devices = row["hardware"].get("count")
    if devices and devices != ranks:
        raise InexpressibleError(f"{ranks} ranks are printed for {devices} devices")


def _schedule(layout: Mapping[str, Any]) -> tuple[str, int]:
    """The schedule and the stages of a rank."""
    schedule = SCHEDULES[str(layout.get("schedule"))]
    chunks = layout.get("vpp") or 1
    if schedule == "zbv":
        chunks = 2
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved"
    return schedule, chunks


def layout_words(degrees: Mapping[str, int], micro: int, total: int) -> list[str]:
    axes = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return [
        *["--mesh", " ".join(axes), "--precision.compute", "bfloat16"],
        *["--batch.micro_size", str(micro), "--batch.global_size", str(total)],
        *["--data.tokenizer", "bytes"],
    ]


def run_of_csv(values: Sequence[str]) -> Published:
    """A row of `vtrain_single.csv` as a run."""
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
        hardware=find_hardware(MEGATRON.hardware),
        group=",".join((*values[:2], *values[3:7])),
    )


def read_rows(facts: Path) -> tuple[list[Published], Reasons]:
    """The rows that are runs of weft, and the keys of the others by the reason.

    Args:
        facts: a folder with both files, or a file like `perf_rows.json`.

    Raises:
        RowError: of a file that is not as `fact_rows` describes.
    """
    found: list[Published] = []
    steps_of_one_node = facts / "vtrain_single.csv"
    if steps_of_one_node.exists():
        found += [run_of_csv(values) for values in read_csv_rows(steps_of_one_node)]
    reasons: Reasons = defaultdict(list)
    path = facts / "perf_rows.json" if facts.is_dir() else facts
    for row in read_json_rows(path):
        if row["kind"] != "train_step":
            continue
        try:
            found.append(run_of_row(row))
        except InexpressibleError as reason:
            reasons[f"{row['source']}: {reason}"].append(row["id"])
    return found, reasons
