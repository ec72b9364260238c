"""NF4: frozen matrices in 4 bits, as quantiles of a normal distribution times the largest entry of each block of 64.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3 and appendix E.

Note [Blocks of quantized matrices]
    A block is 64 neighbours along one dim, counted from the tensor's first entry; the last block of a
    line may be shorter. The dim is one that no layout shards: along a row for linears whose outputs are
    sharded over tp (q, k, v, gate, up), along a column for those whose inputs are (o, down). So every
    block lies on one rank whole, and the quantized shard of a rank is a part of the quantized matrix.
    In architectures of transformers (`hf:`), whose axes are found for each mesh with tp, all blocks run
    along rows, as in bitsandbytes: tp may cut a row between two blocks, and is rejected where it would
    cut a block.

        entry = level[code] * absmax of its block, in float32; rounded once to the type of compute

    The entry of the largest magnitude has the level 1 or -1, so quantizing what was dequantized yields
    the same codes and the same absmax: a checkpoint that is read entry by entry is resumed bit for bit.

Note [Double quantization]
    With `nf4_double` the absmax of 256 neighbouring blocks of a line are 8-bit shares of the largest of
    them, q / 255 times a float32: 4.13 bits a weight. Codes are those of the exact absmax. The 256 blocks
    never cross lines, so that shards of lines are parts of the whole; in bitsandbytes they run over the
    whole matrix, around their mean, so its scales are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.hf.architectures import is_architecture_name
from weft.core.model_config import ModelConfig, logical_axes
from weft.core.shard import Shard, first_axes
from weft.errors import Fault, PlanError
from weft.models import Family

BLOCK = 64
"""Entries that share an absmax."""
OFFSET = 0.9677083
"""Quantile of the largest level before all are divided by it: the mean of 1 - 1/30 and 1 - 1/32, to
the digits of the published levels.
"""
CHUNK_ENTRIES, CHUNK_ENTRIES_ON_GPU = 2**18, 2**24
"""Entries that are packed or unpacked at once, which bounds what is allocated for intermediate results."""
ABSMAX_BYTES = 4
BLOCK_BYTES = BLOCK // 2 + ABSMAX_BYTES
DOUBLE_BLOCKS = 256
"""Blocks of a line whose absmax share a scale under double quantization."""
DOUBLE_BYTES = DOUBLE_BLOCKS * (BLOCK // 2 + 1) + ABSMAX_BYTES
MOST_SHARE = 255


def nf4_levels() -> Tensor:
    """The 16 levels in ascending order: 7 negative quantiles, 0, and 8 positive ones, from -1 to 1.
    Float32 throughout, as where they were published.
    """

    def positive(count: int) -> list[float]:
        places = torch.linspace(OFFSET, 0.5, count + 1, dtype=torch.float32, device="cpu")
        return [NormalDist().inv_cdf(place) for place in places[:-1].tolist()]

    negative = [-value for value in positive(7)]
    levels = torch.tensor(sorted([*negative, 0.0, *positive(8)]), dtype=torch.float32, device="cpu")
    return levels / levels[-1]


@cache
def borders() -> tuple[float, ...]:
    """The means of neighbouring levels: an entry between two of them has the level between them, one on a
    border the lower level.
    """
    levels = nf4_levels()
    means: list[float] = ((levels[1:] + levels[:-1]) / 2).tolist()
    return tuple(means)


@cache
def _entries_of_bytes(device: torch.device) -> Tensor:
    """Both levels of every byte, the high four bits first: [256, 2]."""
    levels = nf4_levels()
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).to(device)


def packed_width(length: int, *, double: bool = False) -> int:
    """Bytes of a line of `length` entries, an even number: codes, then the absmax of its blocks; under
    double quantization shares, then scales.
    """
    *_, last = bytes_of_blocks(length, 0, length, double=double)
    num_bytes: int = last.stop
    return num_bytes


def unpacked_width(num_bytes: int, *, double: bool = False) -> int:
    """Entries of a line of so many bytes."""
    if not double:
        return 2 * (num_bytes - ABSMAX_BYTES * -(-num_bytes // BLOCK_BYTES))
    codes_and_shares = num_bytes - ABSMAX_BYTES * -(-num_bytes // DOUBLE_BYTES)
    return 2 * (codes_and_shares - -(-codes_and_shares // (BLOCK // 2 + 1)))


def bytes_of_blocks(
    length: int, start: int, stop: int, *, double: bool = False
) -> tuple[slice, ...]:
    """Where entries [start, stop), which are whole blocks, are among the bytes of a line: their codes
    and their absmax; under double quantization codes, shares and scales.
    """
    first, last = start // BLOCK, -(-stop // BLOCK)
    codes = slice(start // 2, stop // 2)
    behind = length // 2
    if not double:
        return codes, slice(behind + ABSMAX_BYTES * first, behind + ABSMAX_BYTES * last)
    shares = slice(behind + first, behind + last)
    behind += -(-length // BLOCK)
    first, last = first // DOUBLE_BLOCKS, -(-last // DOUBLE_BLOCKS)
    return codes, shares, slice(behind + ABSMAX_BYTES * first, behind + ABSMAX_BYTES * last)


def with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    """The shape with another length of one dim."""
    return (*shape[:dim], length, *shape[dim + 1 :])


@torch.no_grad()
def pack(matrix: Tensor, *, dim: int, double: bool = False) -> Tensor:
    """A matrix in 4 bits: [lines, bytes], where lines run along `dim`, which has an even length.

    Args:
        double: see Note [Double quantization].
    """
    lines = matrix.movedim(dim, -1)
    if lines.is_meta:
        num_bytes = packed_width(lines.shape[1], double=double)
        return lines.new_empty((len(lines), num_bytes), dtype=torch.uint8)
    chunks = lines.split(_lines_at_once(lines))
    return torch.cat([_packed(chunk, double=double) for chunk in chunks])


def _packed(lines: Tensor, *, double: bool) -> Tensor:
    num_lines, length = lines.shape
    padded = F.pad(lines.float(), (0, -length % BLOCK)).contiguous()
    blocks = padded.view(num_lines, -1, BLOCK)
    absmax = blocks.abs().amax(-1)
    # a block of zeros has the level 0 everywhere
    scaled = blocks / absmax.masked_fill(absmax == 0, 1).unsqueeze(-1)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for border in borders():  # a third of the time of torch.bucketize on a CPU
        # counts the borders below an entry, which is the number of its level
        codes += scaled > border
    codes = codes.view(num_lines, -1)[:, :length]
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
    scales = _shares(absmax) if double else absmax.view(torch.uint8)
    return torch.cat([pairs, scales], 1)


def _shares(absmax: Tensor) -> Tensor:
    """The bytes of shares, then of scales."""
    num_blocks = absmax.shape[1]
    padded = F.pad(absmax, (0, -num_blocks % DOUBLE_BLOCKS))
    groups = padded.view(len(absmax), -1, DOUBLE_BLOCKS)
    largest = groups.amax(-1)
    ratios = groups / largest.masked_fill(largest == 0, 1).unsqueeze(-1)
    shares = (ratios * MOST_SHARE).round().to(torch.uint8).flatten(1)[:, :num_blocks]
    return torch.cat([shares, largest.view(torch.uint8)], 1)


@torch.no_grad()
def unpack_into(matrix: Tensor, packed: Tensor, *, dim: int, double: bool = False) -> None:
    """Write the matrix of `pack`, whose entries are computed in float32."""
    lines = matrix.movedim(dim, -1)
    num_lines = _lines_at_once(lines)
    for chunk, entries in zip(packed.split(num_lines), lines.split(num_lines), strict=True):
        # through a view: `lines` is the matrix, transposed where blocks run along columns
        entries.copy_(_unpacked(chunk, double=double))


def unpack(packed: Tensor, *, dim: int, double: bool = False) -> Tensor:
    """The matrix of `pack`, in float32."""
    num_lines, num_bytes = packed.shape
    shape = (num_lines, unpacked_width(num_bytes, double=double))
    matrix = torch.empty(shape if dim == 1 else shape[::-1], device=packed.device)
    unpack_into(matrix, packed, dim=dim, double=double)
    return matrix


def _unpacked(packed: Tensor, *, double: bool) -> Tensor:
    num_lines, num_bytes = packed.shape
    length = unpacked_width(num_bytes, double=double)
    codes, *shares, scales = (
        packed[:, part] for part in bytes_of_blocks(length, 0, length, double=double)
    )
    entries = F.embedding(codes.int(), _entries_of_bytes(packed.device)).view(num_lines, length)
    # numbers of four bytes may not begin anywhere in a row of bytes
    aligned = scales.clone(memory_format=torch.contiguous_format)
    absmax = aligned.view(torch.float32)
    if double:
        largest = absmax.repeat_interleave(DOUBLE_BLOCKS, 1)[:, : shares[0].shape[1]]
        absmax = shares[0].float().div_(MOST_SHARE).mul_(largest)
    of_entries = absmax.unsqueeze(-1).expand(-1, -1, BLOCK).flatten(1)[:, :length]
    return entries.mul_(of_entries)


def _lines_at_once(lines: Tensor) -> int:
    most = CHUNK_ENTRIES if lines.is_cpu else CHUNK_ENTRIES_ON_GPU  # plans are those of GPUs
    return max(1, most // lines.shape[1])


def quantized_matrices(family: Family, cfg: ModelConfig) -> Mapping[str, int]:
    """Global name of each weight that a family holds in 4 bits -> dim along which its blocks run."""
    names: Mapping[str, int] = getattr(family, "quantized", lambda _: {})(cfg)
    return names


def has_double_blocks(family: Family) -> bool:
    """Whether a family holds weights in 4 bits under double quantization."""
    return bool(getattr(family, "has_double_blocks", False))


def check_borders(name: str, shard: Shard, length: int, *, dim: int, double: bool = False) -> None:
    """Check that a shard of a matrix begins and ends between blocks of `dim`, of this length; under
    double quantization between groups of blocks.

    Raises:
        PlanError: it cuts one.
    """
    size = BLOCK * DOUBLE_BLOCKS if double else BLOCK
    ends = {end for box in shard.boxes for end in (box.lo[dim], box.hi[dim])}
    cuts = sorted(end for end in ends - {length} if end % size)
    if cuts:
        what = f"tp would cut the blocks of {size} of {name}"
        got = f"a border at {cuts[0]} of its {length} features"
        fix = f"fewer ranks of tp, with parts of a multiple of {size}, or dp, pp or parallel.zero 3"
        if double:
            fix += ", or --lora.quantize nf4"
        raise PlanError(Fault("lora.quantize", what, got=got, fix=fix))


def block_dims(plain: Family, cfg: Any) -> dict[str, int]:
    """The dims of the blocks of all projections; see Note [Blocks of quantized matrices]."""
    axes = plain.axes(cfg)
    sharded = cfg.axis_sizes()
    found = {}
    for linear in cfg.linears():
        name = f"{linear}.weight"
        out_axis, in_axis = first_axes(logical_axes(name, axes))
        is_row_parallel = in_axis in sharded and out_axis not in sharded
        found[name] = 0 if is_row_parallel and not is_architecture_name(cfg.family) else 1
    return found
