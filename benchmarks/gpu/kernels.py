"""What runs on the device: kernels of attention with grouped heads, and a profile of two training steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from benchmarks.gpu.report import Row, Settings
from benchmarks.gpu.speed import REHEARSED, WORKLOADS, weft_way
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 64
NUM_PROFILED_STEPS = 2


def check_attention(settings: Settings) -> Iterator[Row]:
    """Which kernels take grouped heads, by dtype: where none but the last does, memory grows with the
    square of the length.
    """
    length = 64 if settings.is_rehearsal else 4096
    for dtype in (torch.float32, torch.bfloat16):
        taken = []
        for backend in BACKENDS:
            if _takes_grouped_heads(backend, dtype, length, settings.device):
                taken.append(backend.name.lower())
        name = f"attention with grouped heads, {dtype}".replace("torch.", "")
        yield Row(name, ", ".join(taken), bool(taken))


def _takes_grouped_heads(backend: SDPBackend, dtype: torch.dtype, length: int, device: str) -> bool:
    q = torch.randn(1, NUM_HEADS, length, HEAD_SIZE, dtype=dtype, device=device)
    k = torch.randn(1, NUM_KV_HEADS, length, HEAD_SIZE, dtype=dtype, device=device)
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    except RuntimeError:
        return False
    return True


def check_profile(settings: Settings) -> Iterator[Row]:
    """Kernels of a step, the time that they take, and the longest."""
    device = torch.device(settings.device)
    workload = (REHEARSED if settings.is_rehearsal else WORKLOADS)[0]
    step = weft_way(workload, device).step
    step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for _ in range(NUM_PROFILED_STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    times_us: dict[str, float] = {}
    for event in recorded.key_averages():
        is_gpu = device.type == "cuda"
        times_us[event.key] = event.self_device_time_total if is_gpu else event.self_cpu_time_total
    total_ms = sum(times_us.values()) / NUM_PROFILED_STEPS / 1e3
    yield Row(f"{workload.preset}: time of all operations of a step", f"{total_ms:.1f} ms")
    for name in sorted(times_us, key=times_us.__getitem__, reverse=True)[:3]:
        yield Row(f"  {name[:50]}", f"{times_us[name] / NUM_PROFILED_STEPS / 1e3:.1f} ms")
