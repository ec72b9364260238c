"""Bad inputs of hardware files, schedule files, plan, simulate, explain and schedule: words, and a part of the expected line."""

from __future__ import annotations

from collections.abc import Iterator

from tests.input.cases import LAPTOP, Case, as_folder, fifo, link, write

HEAD = "microbatches 1\nstage_to_rank 0\n"
FILES: dict[str, tuple[str | bytes, str]] = {
    "a topology of no kind": (
        LAPTOP + 'link_topology = "ring"',
        "link_topology has an unknown value (got 'ring'; need 'switch' or 'full_mesh')",
    ),
    "a topology with a number": (LAPTOP + "link_topology = 3", "link_topology"),
    "a node of 1.5": (LAPTOP.replace("node = 2", "node = 1.5"), "node has the wrong type"),
    "a node of text": (LAPTOP.replace("node = 2", 'node = "2"'), "node has the wrong type"),
    "a node of -8": (LAPTOP.replace("node = 2", "node = -8"), "node is out of range"),
    "memory of -1": (LAPTOP.replace("value = 16", "value = -1"), "memory_gb.value is out of range"),
    "a peak of nan": (LAPTOP.replace("value = 0.1", "value = nan"), "bf16_tflops.value"),
    "two origins": (
        LAPTOP + 'link_gb_s = {value = 9, published = "a", measured = "b"}',
        "link_gb_s needs published",
    ),
    "an empty source": (LAPTOP + 'link_gb_s = {value = 9, published = ""}', "link_gb_s.published"),
    "a device of a kind": (LAPTOP + 'device = "tpu"', "device"),
    "an overlap above 1": (LAPTOP + "[efficiency]\noverlap_slowdown = 2.0", "overlap_slowdown"),
    "a latency below 0": (LAPTOP + "[efficiency]\nlatency_s = -1e-6", "latency_s"),
    "an efficiency of text": (LAPTOP + '[efficiency]\ngemm = "fast"', "efficiency.gemm"),
    "an efficiency that is no table": (LAPTOP + "efficiency = 0.8", "efficiency"),
    "an array of tables": (LAPTOP + "[[device]]\nnode = 2\n", "device"),
    "a key twice": (LAPTOP + "node = 3", "is not TOML"),
    "a byte-order mark in the middle": (LAPTOP + "\ufefflink = 1", "is not TOML"),
    "an infinite price": (
        LAPTOP + 'price_usd_h = {value = inf, published = "x"}',
        "price_usd_h.value is out of range",
    ),
    "5,000 digits": (LAPTOP.replace("node = 2", f"node = {'9' * 5000}"), "device.toml"),
}
ON = "--hardware h100"
WORDS: dict[str, tuple[str, str]] = {
    "plan on -1 device": (f"plan {ON} --devices -1", "devices: out of range"),
    "plan on 2.5 devices": (f"plan {ON} --devices 2.5", "devices"),
    "plan on many devices": (f"plan {ON} --devices 2097152", "devices: out of range"),
    "plan of another target": (f"plan {ON} --devices 8 --target speed", "target"),
    "plan without headroom": (f"plan {ON} --devices 8 --headroom 1", "headroom: out of range"),
    "plan that prints none": (f"plan {ON} --devices 8 --top 0", "top: out of range"),
    "plan that measures none": (f"plan {ON} --devices 8 --measured 0", "measured: out of range"),
    "plan in nan seconds": (f"plan {ON} --devices 8 --seconds nan", "seconds: out of range"),
    "plan for nothing": (f"plan {ON} --devices 8 --price_usd_h 0", "price_usd_h: out of range"),
    "plan with a negative power": (f"plan {ON} --devices 8 --power_w -3", "power_w: out of range"),
    "plan that scales to 0": (f"plan {ON} --devices 8 --scale 0", "scale"),
    "plan that scales to 7": (f"plan {ON} --devices 8 --scale 8 7", "or --scale 6, or --scale 8"),
    "plan of a misspelt flag": (f"plan {ON} --device 8 --devices 8", "device"),
    "why with a bad word": (f"plan {ON} --devices 8 --why dp8,micro0", "why: "),
    "why without a word": (f"plan {ON} --devices 8 --why", "why"),
    "simulate with a jitter of text": (f"simulate {ON} --jitter some", "jitter"),
    "simulate with -1 draws": (f"simulate {ON} --jitter 5% --draws -1", "draws: out of range"),
    "simulate with a slow rank twice": (f"simulate {ON} --slow 0=nan", "slow: cannot be read"),
    "simulate with a checkpoint below 0": (
        f"simulate {ON} --mtbf_hours 9 --checkpoint_s -1",
        "checkpoint_s: out of range",
    ),
    "simulate, a file below a file": ("simulate --svg text.txt/x.svg", "Fix: another --svg"),
    "explain on a mesh of 0": (f"explain {ON} --mesh dp0", "mesh"),
    "explain on half a mesh": (f"explain {ON} --mesh dp", "mesh"),
    "explain of two axes of one name": (f"explain {ON} --mesh dp2,dp2", "mesh"),
    "explain on an empty device": ("explain --hardware ,", "hardware: unknown device"),
    "a stack without a device": ("explain --stack llm-foundry-2023", "stack: is of a device"),
    "an unknown stack": (f"plan {ON} --devices 8 --stack llm-foundry", "did you mean"),
    "a stack of a device without sets": ("explain --hardware b200 --stack x", "b200 has no sets"),
    "schedule with half a chunk": ("schedule --chunks 0.5", "chunks"),
    "schedule of no micro-batch": ("schedule gpipe --microbatches 0", "microbatches: out of range"),
    "schedule of an unknown name": ("schedule 1f1bb", "did you mean '1f1b'?"),
}
TABLES = {
    "a negative stage": HEAD + "rank 0: F-1.0 B-1.0",
    "a word too many": HEAD + "rank 0: F0.0 B0.0 and more",
    "a rank of text": HEAD + "rank zero: F0.0 B0.0",
    "micro-batches of text": "microbatches one\nstage_to_rank 0\nrank 0: F0.0 B0.0",
}


def planner_cases() -> Iterator[Case]:
    """All of them."""
    on_device = ("explain", "--mesh", "dp2", "--hardware", "device.toml")
    for name, (content, line) in FILES.items():
        yield Case(f"file: {name}", on_device, line, write("device.toml", content), faults=3)
    for name, (text, line) in WORDS.items():
        yield Case(name, tuple(text.split()), line, faults=2)
    batch = ("--batch.global_size", "1", "--batch.micro_size", "1")
    table = ("simulate", "--pipeline.schedule", "t.txt", *batch)
    for name, content in TABLES.items():
        yield Case(f"table: {name}", table, "pipeline.schedule", write("t.txt", content))
    yield Case("file: a folder", on_device, "is no regular file", as_folder("device.toml"))
    yield Case("file: a pipe", on_device, "is no regular file", fifo("device.toml"))
    table = ("schedule", "t.txt")
    yield Case("table: a loop of links", table, "t.txt", link("t.txt", "t.txt"))
