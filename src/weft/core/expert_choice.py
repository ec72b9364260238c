"""Which kernel multiplies tokens by the weights of their experts, and why: a pure function. No torch.

Note [Kernels of experts]
    grouped     `grouped_mm`: one launch for all experts; their loads stay on the device. Of rows in
                fp8 `_scaled_grouped_mm`
    loop        a product for each expert that has tokens; the host waits for the loads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertKernelName = Literal["grouped", "loop"]

GROUPED_CAPABILITIES = (9, 10)
"""GPUs by their major number; on others `grouped_mm` reads the loads on the host and loops, too."""
GROUPED_BYTES = {"bfloat16": 2}
"""Number types that `grouped_mm` multiplies on CPUs, on these GPUs and on the meta device, and the size
of an entry; what it multiplies on some of them alone cannot be predicted.
"""
FP8 = "float8_e4m3fn"
FP8_CAPABILITIES = (9,)
"""GPUs by their major number whose kernel multiplies groups of rows in fp8. torch 2.12 accepts 10, too, and
its kernel fails there (pytorch/pytorch#174699).
"""
ROW_UNIT_BYTES = 16
MOST_GROUPS = 1023


@dataclass(frozen=True)
class ExpertDevice:
    """A device that multiplies tokens by the weights of their experts.

    Attributes:
        capability: of a GPU, as CUDA counts it.
    """

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ExpertCall:
    """Products of `rows` tokens, each by the matrix of its expert, [inner, columns].

    Attributes:
        dtype: name of the number type of the operands, as torch has it; `FP8`: of scaled rows.
        is_aligned: rows of the operands lie one after the other, and begin at multiples of 16 bytes.
    """

    dtype: str
    rows: int
    inner: int
    columns: int
    num_experts: int
    is_aligned: bool = True


@dataclass(frozen=True)
class ExpertKernelChoice:
    """The kernel of a call, and why it is taken."""

    kernel: ExpertKernelName
    why: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.why})"


def choose_expert_kernel(call: ExpertCall, device: ExpertDevice) -> ExpertKernelChoice:
    """The kernel of the products of experts; see Note [Kernels of experts].

    >>> call = ExpertCall("bfloat16", rows=8192, inner=2048, columns=768, num_experts=128)
    >>> str(choose_expert_kernel(call, ExpertDevice("cuda", (9, 0))))
    'grouped (bfloat16 on cuda)'
    >>> str(choose_expert_kernel(call, ExpertDevice("cuda", (8, 0))))
    'loop (grouped_mm needs a GPU of capability 9.x or 10.x)'
    """
    reason = _why_not_grouped(call, device)
    if reason is None:
        return ExpertKernelChoice("grouped", f"{call.dtype} on {device.kind}")
    return ExpertKernelChoice("loop", reason)


def _why_not_grouped(call: ExpertCall, device: ExpertDevice) -> str | None:
    is_fp8 = call.dtype == FP8
    size = 1 if is_fp8 else GROUPED_BYTES.get(call.dtype)
    if size is None:
        return f"grouped_mm does not take {call.dtype}"
    major = device.capability[0]
    if is_fp8 and (device.kind == "cpu" or major not in FP8_CAPABILITIES):
        return "grouped_mm of rows in fp8 needs a GPU of capability 9.x"
    if device.kind == "cuda" and major not in GROUPED_CAPABILITIES:
        return "grouped_mm needs a GPU of capability 9.x or 10.x"
    if any(length * size % ROW_UNIT_BYTES for length in (call.inner, call.columns)):
        unit = ROW_UNIT_BYTES // size
        return f"grouped_mm needs widths that are multiples of {unit}: {call.inner}, {call.columns}"
    if not call.is_aligned:
        return f"grouped_mm needs rows that begin at multiples of {ROW_UNIT_BYTES} bytes"
    if call.num_experts > MOST_GROUPS:
        return f"grouped_mm takes at most {MOST_GROUPS} experts"
    if call.rows == 0 or (device.kind == "cpu" and call.rows < call.num_experts):
        return "most experts have no token"  # and are skipped
    return None
