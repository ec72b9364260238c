"""Speed of one rank: weft against a plain loop in torch, tokens a second and the share of the measured matrix peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from benchmarks.gpu.report import Row, Settings
from torch import nn

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.common.init import tie
from weft.train.build import build_step

PEAK_SIZE, REHEARSED_PEAK_SIZE = 8192, 256
ROUNDS, STEPS_A_ROUND = 6, 3
LR = 1e-4


@dataclass(frozen=True)
class Workload:
    """A model and the tokens of a step."""

    preset: str
    seq_len: int
    num_sequences: int


WORKLOADS = (Workload("gpt2-124m", 1024, 16), Workload("llama3-1b", 4096, 4))
REHEARSED = (Workload("gpt2-tiny", 32, 2),)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_speed(settings: Settings) -> Iterator[Row]:
    """Tokens a second of each way to train each model; nothing to judge, except that it runs."""
    device = torch.device(settings.device)
    peak = matrix_peak(device, REHEARSED_PEAK_SIZE if settings.is_rehearsal else PEAK_SIZE)
    yield Row("bfloat16 matrix products", f"{peak / 1e12:.2f} TFLOP/s")
    for workload in REHEARSED if settings.is_rehearsal else WORKLOADS:
        for name, make in ways(workload, device, settings.is_rehearsal).items():
            yield _row(f"{workload.preset} {name}", make, workload, device, peak=peak)


def matrix_peak(device: torch.device, size: int) -> float:
    """FLOP/s of a large product in bfloat16."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    for _ in range(3):
        a @ b
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize(device)
    return 20 * size**3 / (time.perf_counter() - start)


@dataclass(frozen=True)
class Way:
    """A step, and the parameters of its model."""

    step: Callable[[], object]
    num_params: int


def ways(
    workload: Workload,
    device: torch.device,
    is_rehearsal: bool,
) -> dict[str, Callable[[], Way]]:
    """Each way to train."""
    found = {
        "plain eager": lambda: plain_way(workload, device, is_compiled=False),
        "plain compiled": lambda: plain_way(workload, device, is_compiled=True),
        "weft": lambda: weft_way(workload, device),
        "weft selective recompute": lambda: weft_way(
            workload, device, "--parallel.recompute", "selective"
        ),
    }
    if is_rehearsal:
        del found["plain compiled"]
    return found


def flags(workload: Workload) -> list[str]:
    """The flags of `weft train`."""
    size = str(workload.num_sequences)
    return [
        *("--mesh", "", "--model.preset", workload.preset),
        *("--data.seq_len", str(workload.seq_len), "--precision.compute", "bfloat16"),
        *("--batch.global_size", size, "--batch.micro_size", size),
    ]


def batch_of(workload: Workload, device: torch.device) -> Batch:
    """Random tokens."""
    tokens = torch.randint(0, 255, (workload.num_sequences, workload.seq_len + 1))
    return token_batch(tokens[:, :-1], tokens[:, 1:]).map(lambda x: x.to(device))


def weft_way(workload: Workload, device: torch.device, *more: str) -> Way:
    """One rank of weft."""
    run = load([*flags(workload), *more], FAMILIES)
    world = ThreadWorld(1, devices=[device])
    step = build_step(run, Comm(run.device_mesh, 0, world.transport(0)))
    batch = batch_of(workload, device)
    return Way(lambda: step([batch], lr=LR), step.num_params)


def plain_way(workload: Workload, device: torch.device, *, is_compiled: bool) -> Way:
    """The same model in a loop of plain torch."""
    run = load(flags(workload), FAMILIES)
    family = FAMILIES[run.model.name]
    with torch.device(device):
        blocks = family.blocks(run.model)
    tie(blocks, family.ties(run.model))
    model = nn.ModuleDict(blocks)
    if is_compiled:
        for block in model.values():
            block.compile()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    batch = batch_of(workload, device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(model, batch) / batch.num_targets()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return Way(step, sum(param.numel() for param in params))


def _row(
    name: str,
    make: Callable[[], Way],
    workload: Workload,
    device: torch.device,
    *,
    peak: float,
) -> Row:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        way = make()
        seconds = seconds_a_step(way, device)
    except Exception as error:  # noqa: BLE001 - the other ways still run
        return Row(name, f"{type(error).__name__}: {str(error)[:200]}", is_ok=False)
    num_tokens = workload.num_sequences * workload.seq_len
    share = 6 * way.num_params * num_tokens / seconds / peak
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    value = f"{1e3 * seconds:9.1f} ms {num_tokens / seconds:10.0f} tokens/s"
    return Row(name, f"{value} {100 * share:5.1f}% of the peak {memory:5.1f} GiB")


def seconds_a_step(way: Way, device: torch.device) -> float:
    """Median of some rounds."""
    is_quick = device.type == "cpu"
    way.step()
    times = []
    for _ in range(1 if is_quick else ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(1 if is_quick else STEPS_A_ROUND):
            way.step()
        synchronize(device)
        times.append((time.perf_counter() - start) / (1 if is_quick else STEPS_A_ROUND))
    return statistics.median(times)
