"""Check that a block mixes tokens through `Attend` alone: under cp, other token mixing would use only a rank's own positions.

Each block computes a small random batch twice: whole sequences, and the columns of one
context-parallel rank. While it does, its `Attend` seams return each token's own values, scaled by
functions of its own query and key. A block whose other layers treat every token by itself yields the
same columns both times; one with attention of its own, a convolution over the sequence or positions
that it counts itself (also in a rotation of queries and keys alone) does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.core.attention_mask import ALL_FEATURES
from weft.errors import Fault, PlanError
from weft.models.common.attention import Attend, AttentionImplementation, AttentionSpec
from weft.models.common.batch import Batch, chain, token_batch
from weft.parallel.autograd.tree import map_leaves, tensors_in

ROWS, LENGTH, RANKS = 2, 8, 2
"""Of the batch, and of the context-parallel ranks that are imitated."""

MOST_ENTRIES = 2**28
"""Blocks with more parameter entries on the meta device are not checked: it would need their
memory.
"""

TOLERANCE = 1e-3
"""Relative to the largest output: rounding in float32 is 1e-6, a block that mixes tokens is off by
1e-1.
"""

TOLERANCE_16_BIT = 5e-2
"""The same for parameters in bfloat16 or float16."""


Activation = Tensor | tuple[Tensor, ...]
"""What a block hands on; several tensors to a loss that reads them."""

TOKENWISE = (
    nn.Linear,
    nn.Embedding,
    nn.RMSNorm,
    nn.LayerNorm,
    nn.Identity,
    nn.Dropout,
    nn.ModuleList,
    nn.ModuleDict,
)
"""Layers of torch that treat every token by itself."""


def check_blocks(
    blocks: Mapping[str, nn.Module],
    *,
    hidden_shape: tuple[int, ...] | None,
) -> None:
    """Reject blocks that mix tokens in another way than by `Attend`.

    Args:
        blocks: consecutive ones of a model, in order.
        hidden_shape: of one token's activation at the first block; None: the blocks begin with
            token ids.

    Raises:
        PlanError: the first block that does, or that cannot be run on the batch; it names it.
    """
    if all(map(_consists_of_tested, blocks.values())):
        return
    tokens_BS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 2
    batch = token_batch(tokens_BS, tokens_BS)
    x: Activation = batch.inputs
    if hidden_shape is not None:
        x = _random((ROWS, LENGTH, *hidden_shape))
    for name, block in blocks.items():
        if _num_meta_entries(block) > MOST_ENTRIES:
            return
        out = _check_block(name, block, x, batch)
        if isinstance(out, Tensor) and out.dim() == 0:
            return  # the loss
        shapes = [tuple(tensor.shape) for tensor in tensors_in(out)]
        if not all(map(_has_positions, shapes)):
            fault = Fault(
                name,
                "hands on an activation without a position for each token: under cp it would see its rank's columns alone",
                got=f"shape {shapes[0]}",
                fix="a mesh without cp",
            )
            raise PlanError(fault)
        drawn = tuple(map(_random, shapes))
        x = drawn if isinstance(out, tuple) else drawn[0]


def _consists_of_tested(block: nn.Module) -> bool:
    return all(map(_is_tested, block.modules()))


def _has_positions(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape has an entry for each token."""
    return shape[:2] == (ROWS, LENGTH)


def _random(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator)


def _check_block(
    name: str,
    block: nn.Module,
    x: Activation,
    batch: Batch,
) -> Activation:
    """Compare both ways of the block; its output for whole sequences."""
    probe = _Probe(block)
    try:
        with probe:
            whole = probe.run(x, batch)
            differences = [
                _difference(
                    probe,
                    x,
                    batch,
                    whole,
                    index,
                )
                for index in range(RANKS)
            ]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        what = f"the check for context parallelism cannot run it on {ROWS} sequences of {LENGTH} tokens: {error}"
        raise PlanError(
            Fault(
                name,
                what,
                need="a block of any batch size and length",
            )
        ) from error
    tolerance = TOLERANCE_16_BIT if probe.dtype in (torch.bfloat16, torch.float16) else TOLERANCE
    if max(differences) > tolerance:
        raise PlanError(
            Fault(
                name,
                "mixes tokens outside of Attend, or counts positions itself: under cp it would see its rank's columns alone",
                need="attention by weft.models.common.attention.Attend and positions from batch.positions",
                fix="a mesh without cp",
            )
        )
    return whole


def _difference(
    probe: _Probe,
    x: Activation,
    batch: Batch,
    whole: Activation,
    index: int,
) -> float:
    """Largest difference of a rank's columns, relative to the largest output; 0 where the output
    has no columns.
    """
    wholes = list(tensors_in(whole))
    for tensor in wholes:
        if not _has_positions(tuple(tensor.shape)):
            return 0.0
    own_batch = batch.columns(index=index, degree=RANKS)
    columns = own_batch.positions[0]

    def own_columns(tensor: Tensor) -> Tensor:
        return tensor[:, columns]

    own = probe.run(map_leaves(x, Tensor, own_columns), own_batch)
    worst = 0.0
    for tensor, own_tensor in zip(wholes, tensors_in(own), strict=True):
        expected = tensor[:, columns].double()
        error = (own_tensor.double() - expected).abs().max()
        largest = tensor.double().abs().max()
        relative = error / largest.clamp(min=1e-30)
        worst = max(worst, float(relative))
    return worst


def _is_tested(module: nn.Module) -> bool:
    kind = type(module)
    return kind in TOKENWISE or kind.__module__.startswith("weft.")


def _num_meta_entries(block: nn.Module) -> int:
    return sum(param.numel() for param in block.parameters() if param.is_meta)


class _OwnValues:
    """Attention of each token to itself alone, which depends on its query and key, too."""

    name = "probe"
    supports = ALL_FEATURES
    alternative = ""

    def __call__(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGW: Tensor,
        batch: Batch,
        spec: AttentionSpec,
    ) -> Tensor:
        group_size = q_BSHK.shape[2] // v_BSGW.shape[2]
        scaled_BSGW = v_BSGW * _scale_of(k_BSGK)
        values_BSHW = scaled_BSGW.repeat_interleave(group_size, dim=2)
        return values_BSHW * _scale_of(q_BSHK)


def _scale_of(x_BSHK: Tensor) -> Tensor:
    """[B, S, H, 1] between 0.5 and 1.5, which changes where a vector is rotated."""
    size = x_BSHK.shape[-1]
    places_K = torch.arange(1, size + 1, dtype=x_BSHK.dtype, device=x_BSHK.device)
    weights_K = places_K / size
    weighted_BSHK = x_BSHK * weights_K
    means_BSH1 = weighted_BSHK.mean(-1, keepdim=True)
    largest_BSH1 = x_BSHK.abs().amax(-1, keepdim=True)
    lengths_BSH1 = largest_BSH1.clamp(min=1e-30)
    return 1 + 0.5 * means_BSH1 / lengths_BSH1


class _Probe:
    """A block without randomness whose attention returns each token's own values; tensors on the
    meta device get values.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.stand_ins = _stand_ins(block)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        for param in block.parameters():
            if param.is_floating_point() and not param.is_meta:
                self.dtype = param.dtype
                self.device = param.device
                break
        self.training: dict[nn.Module, bool] = {}
        self.implementations: dict[Attend, AttentionImplementation] = {}

    def __enter__(self) -> None:
        for module in self.block.modules():
            self.training[module] = module.training
            if isinstance(module, Attend):
                self.implementations[module] = module.implementation
                module.implementation = _OwnValues()
        self.block.eval()

    def __exit__(self, *_error: object) -> None:
        for module, training in self.training.items():
            module.training = training
        for attend, implementation in self.implementations.items():
            attend.implementation = implementation

    @torch.no_grad()
    def run(self, x: Activation, batch: Batch) -> Activation:
        """The block's output."""
        local_x = map_leaves(x, Tensor, self._local)
        local_batch = batch.map(lambda field: field.to(self.device))
        block = _FunctionalBlock(self.block, self.stand_ins)
        chained = chain({"block": block}, local_x, local_batch)
        return chained.x

    def _local(self, x: Tensor) -> Tensor:
        local = x.to(self.device)
        if not x.is_floating_point():
            return local
        return local.to(self.dtype)


class _FunctionalBlock(nn.Module):
    """A block called with other parameters and buffers."""

    def __init__(self, block: nn.Module, stand_ins: dict[str, Tensor]) -> None:
        super().__init__()
        self.block = block
        self.stand_ins = stand_ins

    def forward(self, *args: object) -> object:
        return torch.func.functional_call(self.block, self.stand_ins, args)


def _stand_ins(block: nn.Module) -> dict[str, Tensor]:
    """Values for what is on the meta device: rows that differ, so that positions and features do."""
    generator = torch.Generator().manual_seed(0)
    stand_ins: dict[str, Tensor] = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if not tensor.is_meta:
            continue
        if tensor.is_floating_point():
            stand_ins[name] = torch.randn(tensor.shape, generator=generator) * 0.5
        else:
            stand_ins[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return stand_ins
