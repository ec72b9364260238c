"""Which kernel computes an attention, and why: a pure function of the device, the number type, the sizes and the mask. No torch.

Note [Kernels of attention]
    name        computes                                        scores in memory
    flash       all keys or a causal triangle; on a GPU torch   none
                takes cuDNN's kernel in place of it where that
                is faster
    cudnn       the same, of one block across ranks             none
    efficient   the same in float32 on a GPU; key heads are     none
                repeated for the queries that share them
    varlen      documents and windows on a GPU in 16 bits, one  none
                launch for all documents
    blocks      everything: one kernel for each document or     none, or those of some queries
                run of queries, see core/query_blocks.py
    masked      a mask tensor [S, S], where that is small       none on CPUs; all where no kernel takes it
    plain       everything, where that is small                 all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.core.attention_mask import AttentionMask, Feature

KernelName = Literal["flash", "cudnn", "efficient", "varlen", "blocks", "masked", "plain"]

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class AttentionLimits:
    """Sizes from which on attention is computed in smaller parts.

    Attributes:
        small_score_bytes: scores of one sequence up to this size are computed at once where a mask
            or a feature is required: faster than block by block, whose launches take longer.
        shortest_run: queries of a block at least where a mask divides it: kernels of fewer are slow.
        most_scores: that exist at a time where no fused kernel computes them.
        least_queries: of which scores exist at a time: products of fewer are slow.
        most_masked_pairs: entries of the mask of one block.
    """

    small_score_bytes: int
    shortest_run: int
    most_scores: int
    least_queries: int = 32
    most_masked_pairs: int = 2**22


LIMITS: Mapping[DeviceKind, AttentionLimits] = {
    "cpu": AttentionLimits(2**20, 64, 2**19),
    "cuda": AttentionLimits(2**24, 512, 2**24),
}
"""Those of CPUs are measured, and keep scores in the cache; those of GPUs are assumed, and their
scores take 64 MB in float32.
"""
MOST_SCORE_BYTES = 2**26
"""More scores than these never exist at a time."""
WINDOW_RUNS = 4
"""A window is this many runs of queries: half a run of keys is computed in vain for each query."""

SIXTEEN_BITS = ("bfloat16", "float16")
MOST_FLASH_HEAD = 256
MOST_CUDNN_HEAD = 128
FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class AttentionDevice:
    """A device, and what torch offers on it.

    Attributes:
        capability: of a GPU, as CUDA counts it.
        has_varlen: torch has `varlen_attn` with windows.
        has_cudnn: cuDNN's attention may be called.
        own_limits: in place of those of its kind.
    """

    kind: DeviceKind
    capability: tuple[int, int] = (0, 0)
    has_varlen: bool = False
    has_cudnn: bool = False
    own_limits: AttentionLimits | None = None

    @property
    def limits(self) -> AttentionLimits:
        """The sizes of parts that attention is computed in on this device."""
        return self.own_limits or LIMITS[self.kind]

    @property
    def has_flash(self) -> bool:
        """Whether flash attention runs on it in 16 bits."""
        return self.capability >= FLASH_CAPABILITY

    def lacks_fused(self, dtype: str) -> bool:
        """Whether it has no fused kernel of this number type."""
        return self.kind == "cuda" and dtype == "float64"


@dataclass(frozen=True)
class AttentionCall:
    """What one call of attention over whole sequences computes.

    Attributes:
        dtype: name of the number type, as torch has it.
        rows: sequences.
        head_size: the larger one of those of keys and values.
        has_documents: tokens see their own document alone.
        features: those besides the mask: softcap, sinks, head_bias, dropout.
    """

    dtype: str
    rows: int
    length: int
    heads: int
    key_heads: int
    head_size: int
    mask: AttentionMask
    has_documents: bool = False
    features: frozenset[Feature] = frozenset()

    @property
    def score_bytes(self) -> int:
        """All scores in the type of their sums, float32 at least."""
        size = 8 if self.dtype == "float64" else 4
        return size * self.rows * self.heads * self.length**2

    @property
    def needs_scores(self) -> bool:
        """Whether a feature changes scores or weights, so that no fused kernel computes them."""
        return bool(self.features - {"sinks"})

    @property
    def is_dense(self) -> bool:
        """Whether queries see all keys, or those before them: no mask tensor is needed."""
        columns = range(self.length)
        if self.has_documents:
            return False
        return self.mask.is_triangle(columns, columns) or self.mask.sees_all(columns, columns)


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a call, and why it is taken."""

    kernel: KernelName
    why: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.why})"


def choose_kernel(call: AttentionCall, device: AttentionDevice) -> KernelChoice:
    """The kernel of attention over whole sequences; see Note [Kernels of attention].

    >>> packed = AttentionCall("bfloat16", 1, 32768, 32, 8, 128, AttentionMask(), has_documents=True)
    >>> str(choose_kernel(packed, AttentionDevice("cuda", (9, 0), has_varlen=True)))
    'varlen (documents)'
    >>> str(choose_kernel(packed, AttentionDevice("cuda", (9, 0))))
    'blocks (documents; this torch has no varlen_attn with windows)'
    """
    if call.is_dense and not call.features:
        dense = dense_kernel(call.dtype, call.head_size, device)
        if dense is not None:
            return dense
    reason = _what_is_required(call, device)
    of_sequence = call.score_bytes // call.rows
    is_small = (
        of_sequence <= device.limits.small_score_bytes and call.score_bytes <= MOST_SCORE_BYTES
    )
    if is_small and "dropout" not in call.features:
        kernel: KernelName = "plain" if call.features or call.is_dense else "masked"
        return KernelChoice(kernel, f"{reason}; its scores are small")
    if call.features or call.is_dense:
        return KernelChoice("blocks", reason)
    missing = _missing_for_varlen(call, device)
    if missing is None:
        return KernelChoice("varlen", reason)
    return KernelChoice("blocks", f"{reason}; {missing}" if missing else reason)


def dense_kernel(dtype: str, head_size: int, device: AttentionDevice) -> KernelChoice | None:
    """The fused kernel of a block without mask or feature; None where no kernel computes it."""
    if device.kind == "cpu":
        return KernelChoice("flash", "no mask")
    if dtype in SIXTEEN_BITS and head_size <= MOST_FLASH_HEAD and device.has_flash:
        return KernelChoice("flash", "no mask, 16 bits")
    if device.lacks_fused(dtype):
        return None
    return KernelChoice("efficient", f"no mask; flash attention does not take {dtype} here")


def choose_block_kernel(
    dtype: str, head_size: int, device: AttentionDevice, *, has_mask: bool, needs_scores: bool
) -> KernelName:
    """The kernel of one block of queries and keys, which returns the log-sum-exp too.

    Args:
        has_mask: queries see some of the keys, which a tensor says.
        needs_scores: a feature changes scores or weights.
    """
    if needs_scores or device.lacks_fused(dtype):
        return "plain"
    if device.kind == "cpu":
        return "flash"
    is_short = dtype in SIXTEEN_BITS and device.has_flash
    if has_mask or not is_short or head_size > MOST_FLASH_HEAD:
        return "efficient"
    fits_cudnn = device.has_cudnn and head_size <= MOST_CUDNN_HEAD
    return "cudnn" if fits_cudnn else "flash"


def _what_is_required(call: AttentionCall, device: AttentionDevice) -> str:
    mask = call.mask
    names: list[str] = sorted(call.features)
    if call.has_documents:
        names.append("documents")
    if mask.window is not None:
        names.append("window")
    if mask.prefix:
        names.append("prefix")
    return " and ".join(names) or f"{call.dtype} on {device.kind}"


def _missing_for_varlen(call: AttentionCall, device: AttentionDevice) -> str | None:
    """Why `varlen_attn` does not compute it; "" on CPUs, which have no such kernel; None: it does."""
    if device.kind == "cpu":
        return ""
    if call.dtype not in SIXTEEN_BITS:
        return f"no kernel of documents and windows takes {call.dtype}"
    if call.mask.prefix:
        return "no kernel takes a prefix"
    if not device.has_flash or call.head_size > MOST_FLASH_HEAD:
        return f"flash attention needs capability 8.0 and heads of at most {MOST_FLASH_HEAD}"
    if not device.has_varlen:
        return "this torch has no varlen_attn with windows"
    return None


def queries_at_a_time(
    call: AttentionCall, device: AttentionDevice, document: range, *, rows: int, is_mixed: bool
) -> int:
    """Queries of one block of a document, or of a sequence without documents.

    Args:
        rows: sequences of the block.
        is_mixed: the columns belong to several documents, in any order.
    """
    num_keys = len(document)
    mask = call.mask
    is_whole = mask.is_triangle(document, document) or mask.sees_all(document, document)
    most = num_keys
    if is_mixed or not is_whole:
        most = masked_queries(num_keys, device)
        if mask.window is not None:
            most = min(most, max(mask.window // WINDOW_RUNS, device.limits.shortest_run))
    if call.needs_scores or device.lacks_fused(call.dtype):
        most = min(most, scored_queries(rows * call.heads * num_keys, device))
    return most


def masked_queries(num_keys: int, device: AttentionDevice) -> int:
    """Queries of a block at a time that a mask divides."""
    return max(device.limits.shortest_run, device.limits.most_masked_pairs // num_keys)


def scored_queries(scores_a_query: int, device: AttentionDevice) -> int:
    """Queries at a time whose scores are in memory."""
    return max(device.limits.least_queries, device.limits.most_scores // scores_a_query)
