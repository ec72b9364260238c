"""Times of products, attention, memory traffic, launches and a tiny step on a device, on several ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.comm.comm import Comm
from weft.planner.measure.kernels import attended_pairs
from weft.run.world import num_cores
from weft_plan.bench.clock import Times, timed_for
from weft_plan.bench.host_time import tiny_step

WorkKind = Literal["gemm", "attention", "memory", "launch", "step"]
GemmShape = tuple[int, int, int]
"""Rows, columns and inner length."""
AttentionShape = tuple[int, int, int, int]
"""Batch, heads, tokens and head size."""

TF32 = "tf32"
"""Stands for float32 whose matrix products are rounded to 10 bits."""
NUM_LAUNCHES = 200


@dataclass(frozen=True)
class ComputeWork:
    """One piece of work on a device.

    Attributes:
        name: its shape.
        dtype: float32, bfloat16, ..., or tf32.
        flops: multiplications and additions, of attended pairs only.
        num_bytes: of distinct inputs and outputs.
        outputs: of a matrix product.
        launches: kernels that one run of it launches; its times are of one of them.
    """

    kind: WorkKind
    name: str
    dtype: str
    flops: int = 0
    num_bytes: int = 0
    outputs: int = 0
    launches: int = 1


@dataclass(frozen=True)
class ComputeTimes:
    """The work and its time, the median of the ranks.

    Attributes:
        median_s: of a rank's median. Of its mean where ranks share cores: what the others run in
            between belongs to the time of a step there, and a median of short runs has none of it.
    """

    work: ComputeWork
    min_s: float
    median_s: float

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations a second."""
        return self.work.flops / self.median_s / 1e12

    @property
    def tb_s(self) -> float:
        """10^12 bytes a second."""
        return self.work.num_bytes / self.median_s / 1e12


@dataclass(frozen=True)
class ComputeSuite:
    """What is timed on a kind of device."""

    dtypes: tuple[str, ...]
    gemms: tuple[GemmShape, ...]
    attentions: tuple[AttentionShape, ...]
    attention_dtypes: tuple[str, ...]
    memory_bytes: int


SUITES = {
    "cpu": ComputeSuite(
        dtypes=("float32", "bfloat16", "float64"),
        gemms=(
            (256, 256, 256),
            (512, 512, 512),
            (1024, 1024, 1024),
            (512, 1024, 256),
            (32, 512, 512),
        ),
        attentions=((1, 8, 256, 64), (1, 8, 512, 64)),
        attention_dtypes=("float32", "bfloat16"),
        memory_bytes=2**26,
    ),
    "cuda": ComputeSuite(
        dtypes=("bfloat16", "float16", TF32, "float32", "float64"),
        gemms=(
            *((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)),
            *((8192, 14336, 4096), (8192, 4096, 14336), (512, 4096, 4096)),
        ),
        attentions=((1, 32, 2048, 128), (1, 32, 8192, 128)),
        attention_dtypes=("bfloat16",),
        memory_bytes=2**30,
    ),
}
"""By type of device. Few shapes of squares and of layers: a training step has hundreds."""


def measure_computation(
    comm: Comm, suite: ComputeSuite, *, budget_s: float
) -> tuple[ComputeTimes, ...]:
    """Time a suite on all ranks at once; every rank must call it, and gets the same.

    Args:
        budget_s: time of one piece of work.
    """
    shares_cores = comm.device.type == "cpu" and comm.mesh.size > num_cores()
    works: list[ComputeWork] = []
    own_times: list[tuple[float, float]] = []
    for work, run in _pieces(suite, comm.device):
        comm.barrier_world()
        times = _timed_in(work.dtype, run, budget_s, comm.device)
        works.append(work)
        seconds = times.mean_s if shares_cores else times.median_s
        own_times.append((times.min_s / work.launches, seconds / work.launches))
    rows = torch.tensor([own_times], dtype=torch.float64, device=comm.device)
    middle = comm.all_gather_world(rows).median(dim=0).values.cpu()
    return tuple(
        ComputeTimes(work, min_s=float(min_s), median_s=float(median_s))
        for work, (min_s, median_s) in zip(works, middle, strict=True)
    )


def _timed_in(
    dtype: str, run: Callable[[], object], budget_s: float, device: torch.device
) -> Times:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == TF32 else "highest")
    try:
        return timed_for(run, budget_s, device)
    finally:
        torch.set_float32_matmul_precision(before)


Piece = tuple[ComputeWork, Callable[[], object]]


def _pieces(suite: ComputeSuite, device: torch.device) -> Iterator[Piece]:
    for dtype in suite.dtypes:
        for shape in suite.gemms:
            yield _gemm(shape, dtype, device)
    for dtype in suite.attention_dtypes:
        for sizes in suite.attentions:
            yield _attention(sizes, dtype, device)
            yield _attention_with_backward(sizes, dtype, device)
    yield from _memory(suite.memory_bytes, device)
    yield _launches(device)
    step, launches = tiny_step(device)
    yield ComputeWork("step", "a step of a tiny model", "float32", launches=launches), step


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of tensors; that of tf32 is float32."""
    dtype: torch.dtype = getattr(torch, "float32" if name == TF32 else name)
    return dtype


def _gemm(shape: GemmShape, dtype: str, device: torch.device) -> Piece:
    rows, columns, inner = shape
    left = torch.ones(rows, inner, dtype=torch_dtype(dtype), device=device)
    right = torch.ones(inner, columns, dtype=torch_dtype(dtype), device=device)
    out = left.new_empty(rows, columns)
    num_elements = left.numel() + right.numel() + out.numel()
    work = ComputeWork(
        kind="gemm",
        name=f"{rows} x {columns} x {inner}",
        dtype=dtype,
        flops=2 * rows * columns * inner,
        num_bytes=num_elements * out.element_size(),
        outputs=out.numel(),
    )
    return work, lambda: torch.mm(left, right, out=out)


def _attention_inputs(
    sizes: AttentionShape, dtype: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    numbers = torch.randn((3, *sizes), generator=generator)
    q, k, v = numbers.to(device, torch_dtype(dtype)).unbind()
    return q, k, v


def _attention_work(sizes: AttentionShape, dtype: str, name: str, products: int) -> ComputeWork:
    """`products` matrix products over the attended pairs; see `weft.planner.measure.kernels`."""
    batch, heads, tokens, head_size = sizes
    pairs = attended_pairs(tokens, tokens, causal=True)
    flops_a_product = 2 * batch * heads * pairs * head_size
    num_elements = batch * heads * tokens * head_size
    bytes_a_product = 2 * num_elements * torch_dtype(dtype).itemsize
    return ComputeWork(
        kind="attention",
        name=f"{batch} x {heads} x {tokens} x {head_size} {name}",
        dtype=dtype,
        flops=products * flops_a_product,
        num_bytes=products * bytes_a_product,
    )


def _attention(sizes: AttentionShape, dtype: str, device: torch.device) -> Piece:
    q, k, v = _attention_inputs(sizes, dtype, device)
    work = _attention_work(sizes, dtype, "forward", products=2)
    return work, lambda: scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_with_backward(sizes: AttentionShape, dtype: str, device: torch.device) -> Piece:
    q, k, v = _attention_inputs(sizes, dtype, device)
    for x in (q, k, v):
        x.requires_grad_()
    grad = torch.ones_like(q)

    def run() -> object:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    return _attention_work(sizes, dtype, "both ways", products=7), run


def _memory(num_bytes: int, device: torch.device) -> Iterator[Piece]:
    x = torch.ones(num_bytes // 4, device=device)
    y = torch.ones_like(x)
    out = torch.empty_like(x)
    size = f"{num_bytes >> 20} MiB"
    copied = ComputeWork("memory", f"copy {size}", "float32", num_bytes=2 * num_bytes)
    yield copied, lambda: out.copy_(x)
    added = ComputeWork("memory", f"add {size}", "float32", num_bytes=3 * num_bytes)
    yield added, lambda: torch.add(x, y, out=out)


def _launches(device: torch.device) -> Piece:
    x = torch.ones(1, device=device)

    def run() -> None:
        for _ in range(NUM_LAUNCHES):
            x.add_(1.0)

    return ComputeWork("launch", "add to 1 element", "float32", launches=NUM_LAUNCHES), run
