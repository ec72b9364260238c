"""Settings of a process on GPUs: deterministic algorithms, precision of float32 matrix products, the allocator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils import deterministic as deterministic_settings

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACE = ":4096:8"
"""One workspace of 4 MB for each stream: cuBLAS then adds in a fixed order. Read when CUDA starts."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
SETTINGS = (
    "expandable_segments:True",
    "pinned_use_cuda_host_register:True",
    "pinned_num_register_threads:8",
)
"""Of old and of new versions of torch, which read both."""


def expand_segments() -> None:
    """Have torch's allocator on GPUs grow its segments, unless the environment sets it otherwise: units
    of ZeRO 3 that are freed and allocated leave no gaps of odd sizes. Before CUDA starts.

    Host memory of saves is pinned by eight threads: the first save of 14 GiB stalled training for 10
    s with one, on an H200.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = ",".join(SETTINGS)


@contextmanager
def numerics(*, deterministic: bool, matmul: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Set the numerics of this process, and of its forks, inside the block.

    On GPUs the backwards of attention, embeddings and indexing add with atomics, in another order
    each time. With `deterministic` torch chooses other algorithms, and raises where there is none.
    On the CPU nothing changes.
    """
    settings: Any = deterministic_settings
    mode_before = torch.get_deterministic_debug_mode()
    fill_before = settings.fill_uninitialized_memory
    matmul_before = torch.get_float32_matmul_precision()
    workspace_before = os.environ.get(CUBLAS_WORKSPACE)
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("high" if matmul == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode_before)
        settings.fill_uninitialized_memory = fill_before
        torch.set_float32_matmul_precision(matmul_before)
        if workspace_before is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)
