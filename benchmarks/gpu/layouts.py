"""Layouts as rank threads on one device, their losses and norms against one rank there and on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod

import torch
from benchmarks.gpu.report import Check, Row, Settings
from torch import Tensor

from tests.one_device import micro_batches
from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.config.run import plan_of
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.run.rank_threads import run_rank_threads
from weft.train.build_training import build_step

NUM_STEPS = 3
PATIENCE_S = 120.0
LR = 1e-3
NUM_TOKENS = 200

Numbers = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Case:
    """A layout of a model.

    Attributes:
        options: of the layout, which change no number.
        setting: options that change numbers: one rank with them is what the layout is compared with.
        dtype: the one in which it is computed; "": each.
        is_rehearsed: whether it is run on the CPU too, where time is short.
    """

    mesh: str
    options: str = ""
    model: str = "llama3"
    setting: str = ""
    dtype: str = ""
    is_rehearsed: bool = False

    def __str__(self) -> str:
        words = (self.model, self.mesh or "one rank", self.options, self.setting)
        return " ".join(word for word in words if word)

    @property
    def one_rank(self) -> Case:
        """The case that it is compared with."""
        return Case("", model=self.model, setting=self.setting)


CASES = (
    Case("dp2"),
    Case("dp4", "--parallel.zero 1"),
    Case("dp2", "--parallel.zero 2"),
    Case("dp2", "--parallel.zero 3", is_rehearsed=True),
    Case("tp2"),
    Case("tp2", "--parallel.sequence True", is_rehearsed=True),
    Case("tp2", "--parallel.sequence True --parallel.tp_overlap True"),
    Case("cp2"),
    Case("cp4"),
    Case("cp2", "--parallel.context allgather"),
    Case("cp2", "--parallel.context ulysses"),
    Case("pp2"),
    Case("pp2", "--pipeline.schedule zero_bubble"),
    Case("pp2", "--pipeline.schedule zbv --pipeline.chunks 2"),
    Case("", "--parallel.recompute full"),
    Case("", "--parallel.recompute selective"),
    Case("pp2 dp2 cp2 tp2", "--parallel.sequence True --parallel.zero 1"),
    Case("ep2", model="deepseek"),
    Case("dp2 ep2 tp2", "--parallel.sequence True --parallel.zero 3", model="deepseek"),
    Case("dp2 ep2", model="qwen3-moe"),
    Case("tp2", model="gpt2"),
    Case("tp2 cp2", model="gemma3"),
    Case("dp2", "--parallel.recompute offload"),
    Case("tp2", "--parallel.logits chunked"),
    Case("dp2 tp2", setting="--precision.linears fp8 --model.dim 128", dtype="bfloat16"),
    Case("ep2", setting="--precision.linears fp8", model="qwen3-moe", dtype="bfloat16"),
    Case("dp2", "--parallel.zero 3", setting="--optim.state_dtype 8bit"),
    Case("dp2", "--parallel.zero 2", setting="--optim.name muon"),
    Case("dp2", "--parallel.zero 1", setting="--optim.name lion"),
    Case("tp2", setting="--optim.name adafactor"),
    Case("dp2 tp2", setting="--lora.rank 4"),
    Case("dp2", "--parallel.zero 3", setting="--lora.rank 4 --lora.quantize nf4 --model.dim 128"),
    Case("dp2", "--compile blocks --parallel.zero 3", dtype="float32"),
    Case("dp2", setting="--precision.compute float16", dtype="bfloat16"),
)
BOUNDS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1e-2}
"""Largest relative difference of a loss or norm."""
NOISE_FACTOR, LEAST_BOUND = 8, 1e-12
"""One rank in float64 may differ from the CPU by this multiple of what `cosines_off` moves, and this."""


def flags(case: Case, dtype: str, settings: Settings) -> list[str]:
    """The flags of `weft train` for a case."""
    wide = "float32" if dtype == "bfloat16" else dtype
    seq_len, num_layers = ("16", "4") if settings.is_rehearsal else ("128", "4")
    words = [
        *("--mesh", case.mesh, "--model.name", case.model, "--model.layers", num_layers),
        *("--data.seq_len", seq_len, "--batch.global_size", "8", "--batch.micro_size", "1"),
        *("--precision.params", wide, "--precision.compute", dtype, "--precision.reduce", wide),
    ]
    if settings.is_rehearsal and case.model == "llama3":
        words += ["--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2"]
        words += ["--model.ffn", "64"]
    return [*words, *case.options.split(), *case.setting.split()]


def train(words: Sequence[str], device: str) -> Numbers:
    """Losses and gradient norms of a few steps, every rank on one device."""
    run = load(words, FAMILIES)
    plan = plan_of(run)
    size = run.device_mesh.size
    generator = torch.Generator().manual_seed(0)
    shape = (plan.global_size, run.data.seq_len + 1)
    tokens = torch.randint(0, NUM_TOKENS, shape, generator=generator)
    whole = token_batch(tokens[:, :-1], tokens[:, 1:])
    devices = [device] * size
    world = ThreadWorld(size, devices=devices, timeout_s=PATIENCE_S)

    def run_rank(rank: int) -> Numbers:
        comm = Comm(run.device_mesh, rank, world.transport(rank))
        step = build_step(run, comm)
        batches = []
        for batch in micro_batches(whole, plan, rank):
            batches.append(batch.map(lambda x: x.to(device)))
        numbers = []
        for _ in range(NUM_STEPS):
            report = step(batches, lr=LR)
            numbers.append((report.loss, report.grad_norm))
        return numbers

    threads = run_rank_threads(run_rank, world, timeout_s=PATIENCE_S)
    if threads.failures:
        raise threads.errors[threads.failures[0].rank]
    return threads.results[0]


def difference(found: Numbers, expected: Numbers) -> float:
    """Largest relative difference."""
    largest = 0.0
    for found_step, expected_step in zip(found, expected, strict=True):
        for number, right in zip(found_step, expected_step, strict=True):
            largest = max(largest, abs(number - right) / abs(right))
    return largest


@functools.cache
def reference(case: Case, dtype: str, settings: Settings) -> Numbers:
    """Numbers of one rank on the device."""
    return train(flags(case, dtype, settings), settings.device)


def layout_checks(dtype: str, settings: Settings) -> list[Check]:
    """Every layout in a number type against one rank on the same device, and that one against the CPU."""
    cases = []
    for case in CASES:
        is_run = case.is_rehearsed or not settings.is_rehearsal
        if is_run and case.dtype in ("", dtype):
            cases.append(case)
    checks = []
    for one_rank in dict.fromkeys(case.one_rank for case in cases):
        name = f"{dtype} {one_rank}"
        checks.append(Check(name, partial(_check_one_rank, one_rank, dtype)))
        for case in cases:
            if case.one_rank == one_rank:
                checks.append(Check(f"{dtype} {case}", partial(_check_case, case, dtype)))
    return checks


def _check_one_rank(case: Case, dtype: str, settings: Settings) -> Iterator[Row]:
    words = flags(case, dtype, settings)
    expected = reference(case, dtype, settings)
    again = difference(train(words, settings.device), expected)
    yield Row(f"{dtype} {case} against itself", f"{again:.1e}")
    if settings.device != "cpu":
        on_cpu = train(words, "cpu")
        found = difference(expected, on_cpu)
        bound = BOUNDS[dtype]
        if dtype == "float64":
            with cosines_off():
                bound = NOISE_FACTOR * difference(train(words, "cpu"), on_cpu) + LEAST_BOUND
        yield Row(
            f"{dtype} {case} against the CPU", f"{found:.1e} (bound {bound:.1e})", found <= bound
        )


@contextmanager
def cosines_off() -> Iterator[None]:
    """Inside, cosines and sines in float32 are off by two units in the last place or less, as CUDA documents
    its own. RoPE's angles are float32 in every run, as in published models.
    """
    generator = torch.Generator().manual_seed(0)
    names = ("cos", "sin")
    exact = {name: getattr(torch.Tensor, name) for name in names}

    def moved(name: str, x: Tensor) -> Tensor:
        y: Tensor = exact[name](x)
        if y.dtype != torch.float32:
            return y
        for _ in range(2):
            steps = torch.randint(-1, 2, y.shape, generator=generator)
            y = torch.where(steps == 0, y, torch.nextafter(y, y + steps))
        return y

    for name in names:
        setattr(torch.Tensor, name, partialmethod(_moved_by, partial(moved, name)))
    try:
        yield
    finally:
        for name in names:
            setattr(torch.Tensor, name, exact[name])


def _moved_by(x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    return move(x)


def _check_case(case: Case, dtype: str, settings: Settings) -> Iterator[Row]:
    numbers = train(flags(case, dtype, settings), settings.device)
    found = difference(numbers, reference(case.one_rank, dtype, settings))
    yield Row(f"{dtype} {case}", f"{found:.1e}", found <= BOUNDS[dtype])


def check_determinism(settings: Settings) -> Iterator[Row]:
    """Two runs give the same bits in deterministic mode."""
    from weft.run.numerics import numerics

    words = flags(Case(""), "float32", settings)
    with numerics(deterministic=True, matmul="ieee"):
        first, second = (train(words, settings.device) for _ in range(2))
    yield Row("two runs in deterministic mode", str(difference(first, second)), first == second)
