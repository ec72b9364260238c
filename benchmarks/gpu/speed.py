"""Speed of one rank: weft against a plain loop in torch, tokens a second and the share of the measured matrix peak."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.report import Check, Row, Settings
from torch import nn

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.models import FAMILIES
from weft.models.common.attention import fix_for_compiler
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.common.init import tie
from weft.run.numerics import numerics
from weft.train.build_training import build_step
from weft.train.step import TrainStep

PEAK_SIZE, REHEARSED_PEAK_SIZE = 8192, 256
ROUNDS, STEPS_A_ROUND = 4, 3
LR = 1e-4
SPEED_GOAL = 1.0
COMPILED_BOUND = 1e-4
"""Relative, of a loss or a norm in float32 products of IEEE precision."""


@dataclass(frozen=True)
class Workload:
    """A model and the tokens of a step."""

    preset: str
    seq_len: int
    num_sequences: int


WORKLOADS = (Workload("gpt2-124m", 1024, 16), Workload("llama3-1b", 4096, 4))
LONG = Workload("llama3-1b", 8192, 1)
REHEARSED = (Workload("gpt2-tiny", 32, 2),)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_matrix_peak(settings: Settings) -> Iterator[Row]:
    """The speed of large matrix products."""
    yield Row("bfloat16 matrix products", f"{peak_of(settings) / 1e12:.2f} TFLOP/s")


@functools.cache
def peak_of(settings: Settings) -> float:
    """FLOP/s of large products in bfloat16."""
    size = REHEARSED_PEAK_SIZE if settings.is_rehearsal else PEAK_SIZE
    return matrix_peak(torch.device(settings.device), size)


def speed_checks(settings: Settings) -> list[Check]:
    """Tokens a second of each way to train each model; nothing to judge, except that it runs."""
    device = torch.device(settings.device)
    checks = []
    for workload in REHEARSED if settings.is_rehearsal else WORKLOADS:
        for name, make in ways(workload, device, settings.is_rehearsal).items():
            full_name = f"{workload.preset} {name}"
            run = partial(_check_way, full_name, make, workload)
            checks.append(Check(full_name, run))
    return checks


def _check_way(
    name: str, make: Callable[[], Way], workload: Workload, settings: Settings
) -> Iterator[Row]:
    device = torch.device(settings.device)
    yield _row(name, make, workload, device, peak=peak_of(settings))


def goal_checks(settings: Settings) -> list[Check]:
    """One line a goal: weft is as fast as a plain loop, eager and compiled, in turns."""
    checks = []
    for workload in REHEARSED if settings.is_rehearsal else WORKLOADS:
        for is_compiled in (False,) if settings.is_rehearsal else (False, True):
            kind = "compiled" if is_compiled else "eager"
            name = f"goal: {workload.preset} {kind}, weft against a plain loop"
            run = partial(_check_goal, name, workload, is_compiled=is_compiled)
            checks.append(Check(name, run))
    return checks


def _check_goal(
    name: str, workload: Workload, settings: Settings, *, is_compiled: bool
) -> Iterator[Row]:
    device = torch.device(settings.device)
    more = ("--compile", "blocks") if is_compiled else ()
    ways = (plain_way(workload, device, is_compiled=is_compiled), weft_way(workload, device, *more))
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 if settings.is_rehearsal else 3):
        for way, times in zip(ways, seconds, strict=True):
            times.append(seconds_a_step(way, device))
    plain, weft = map(statistics.median, seconds)
    is_ok = None if settings.is_rehearsal else plain / weft >= SPEED_GOAL
    yield Row(name, f"{plain / weft:.3f} times as fast (goal {SPEED_GOAL:.2f})", is_ok)


def check_compiled_numbers(settings: Settings) -> Iterator[Row]:
    """Losses and gradient norms of compiled blocks beside those of the same blocks as written."""
    device = torch.device(settings.device)
    workload = (REHEARSED if settings.is_rehearsal else WORKLOADS)[0]
    found = []
    for mode in ("off", "blocks"):
        words = ("--precision.compute", "float32", "--compile", mode)
        step, _ = train_step(workload, device, *words)
        reports = [step([batch_of(workload, device)], lr=0.0) for _ in range(2)]
        found.append([number for each in reports for number in (each.loss, each.grad_norm)])
    worst = max(abs(a - b) / abs(a) for a, b in zip(*found, strict=True))
    yield Row("compiled blocks, float32, numbers", f"{worst:.1e} apart", worst < COMPILED_BOUND)


def check_tf32(settings: Settings) -> Iterator[Row]:
    """A float32 step with both precisions of matrix products."""
    device = torch.device(settings.device)
    workload = (REHEARSED if settings.is_rehearsal else WORKLOADS)[0]
    for matmul in ("ieee", "tf32"):
        with numerics(deterministic=False, matmul=matmul):
            way = weft_way(workload, device, "--precision.compute", "float32")
            seconds = seconds_a_step(way, device)
        yield Row(f"{workload.preset} float32, matmul {matmul}", f"{1e3 * seconds:9.1f} ms")
        del way


def check_documents(settings: Settings) -> Iterator[Row]:
    """Time and memory of long sequences, of one document and of several: those need a mask."""
    device = torch.device(settings.device)
    workload = REHEARSED[0] if settings.is_rehearsal else LONG
    for num_documents in (1, 4):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        way = weft_way(workload, device, num_documents=num_documents)
        seconds = seconds_a_step(way, device)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
        else:
            memory = 0.0
        name = f"{workload.preset}, {workload.seq_len} tokens in {num_documents} documents"
        yield Row(name, f"{1e3 * seconds:9.1f} ms {memory:5.1f} GiB")
        del way


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
    workload: Workload, device: torch.device, is_rehearsal: bool
) -> dict[str, Callable[[], Way]]:
    """Each way to train."""
    found = {
        "plain eager": lambda: plain_way(workload, device, is_compiled=False),
        "plain compiled": lambda: plain_way(workload, device, is_compiled=True),
        "transformers eager": lambda: transformers_way(workload, device, is_compiled=False),
        "transformers compiled": lambda: transformers_way(workload, device, is_compiled=True),
        "weft": lambda: weft_way(workload, device),
        "weft selective recompute": lambda: weft_way(
            workload, device, "--parallel.recompute", "selective"
        ),
        "weft, blocks compiled": lambda: weft_way(workload, device, "--compile", "blocks"),
    }
    if is_rehearsal:
        for name in list(found):
            if "compiled" in name or "transformers" in name:
                del found[name]
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
    shape = (workload.num_sequences, workload.seq_len + 1)
    tokens = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(0))
    return token_batch(tokens[:, :-1], tokens[:, 1:]).map(lambda x: x.to(device))


def weft_way(workload: Workload, device: torch.device, *more: str, num_documents: int = 1) -> Way:
    """One rank of weft."""
    step, run_step = train_step(workload, device, *more, num_documents=num_documents)
    return Way(run_step, step.num_params)


def train_step(
    workload: Workload, device: torch.device, *more: str, num_documents: int = 1
) -> tuple[TrainStep, Callable[[], object]]:
    """The step of one rank, and the call that runs it."""
    argv = [*flags(workload), *more]
    run = load(argv, FAMILIES)
    world = ThreadWorld(1, devices=[device])
    comm = Comm(run.device_mesh, 0, world.transport(0))
    step = build_step(run, comm)
    batch = batch_of(workload, device)
    if num_documents > 1:
        numbers = torch.arange(workload.seq_len, device=device)
        documents = numbers * num_documents // workload.seq_len
        batch = replace(batch, documents=documents.repeat(workload.num_sequences, 1))

    def run_step() -> object:
        return step([batch], lr=LR)

    return step, run_step


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
            fix_for_compiler(block, next(iter(model.parameters())))
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


def transformers_way(workload: Workload, device: torch.device, *, is_compiled: bool) -> Way:
    """transformers' own class of the same sizes, with its attention, in a plain loop."""
    import transformers  # late: the extra hf

    run = load(flags(workload), FAMILIES)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers_config(run.model))
    num_params = sum(param.numel() for param in model.parameters())
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    batch = batch_of(workload, device)
    call = torch.compile(model) if is_compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = call(input_ids=batch.inputs, use_cache=False).logits
            targets = batch.targets.flatten()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return Way(step, num_params)


def transformers_config(model: Any) -> Any:
    """The sizes of a model as transformers names them."""
    import transformers

    if model.name == "gpt2":
        return transformers.GPT2Config(
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
            n_positions=model.max_seq_len,
        )
    return transformers.LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.dim,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.max_seq_len,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tied,
        rms_norm_eps=model.norm_eps,
    )


def _row(
    name: str, make: Callable[[], Way], workload: Workload, device: torch.device, *, peak: float
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
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**30
    else:
        memory = 0.0
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
