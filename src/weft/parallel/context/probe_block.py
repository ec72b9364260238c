"""A block as the probe for context parallelism runs it: parameters have values, each token attends to itself alone."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from weft.core.attention_mask import ALL_FEATURES
from weft.models.common.attention import Attend, AttentionImplementation
from weft.models.common.attention_spec import AttentionSpec
from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout_mode import run_block
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.expert.dispatch import ExpertParallelDispatch
from weft.parallel.model.block_values import drawn_value, tables_of

Activation = Tensor | tuple[Tensor, ...]
"""What a block hands on; several tensors to a loss that reads them."""


class _OwnValues:
    """Attention of each token to itself alone, which depends on its query and key, too."""

    name = "probe"
    supports = ALL_FEATURES
    alternative = ""

    def __init__(self, attended: list[Batch]) -> None:
        self._attended = attended

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        if spec.mask.documents:
            self._attended.append(batch)
        scaled_BSGW = v_BSGW * _scale_of(k_BSGK)
        group_size, rest = divmod(q_BSHK.shape[2], v_BSGW.shape[2])
        if rest:  # a rank's heads of queries beside all heads of keys, of which it will read some
            scaled_BSGW, group_size = scaled_BSGW.mean(2, keepdim=True), q_BSHK.shape[2]
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


class ProbeBlock:
    """A block without randomness whose attention returns each token's own values; tensors on the
    meta device get values.

    Attributes:
        attended: the batches that `Attend` was given in the last run, where its mask has documents.
    """

    def __init__(self, block: nn.Module, vocab: int) -> None:
        self.block = block
        self.vocab = vocab
        self.attended: list[Batch] = []
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        for param in block.parameters():
            if param.is_floating_point() and not param.is_meta:
                self.dtype = param.dtype
                self.device = param.device
                break
        self.training: dict[nn.Module, bool] = {}
        self.implementations: dict[Attend, AttentionImplementation] = {}
        self.dispatches: list[ExpertParallelDispatch] = []

    def __enter__(self) -> None:
        for module in self.block.modules():
            self.training[module] = module.training
            if isinstance(module, Attend):
                self.implementations[module] = module.implementation
                module.implementation = _OwnValues(self.attended)
            if isinstance(module, ExpertParallelDispatch):
                self.dispatches.append(module)
                module.is_alone = True
        self.block.eval()

    def __exit__(self, *_error: object) -> None:
        for module, training in self.training.items():
            module.training = training
        for attend, implementation in self.implementations.items():
            attend.implementation = implementation
        for dispatch in self.dispatches:
            dispatch.is_alone = False
        # these hold the modules, too
        self.training.clear()
        self.implementations.clear()
        self.dispatches.clear()

    @functools.cached_property
    def _stand_ins(self) -> dict[str, Tensor]:
        return _stand_ins(self.block, self.vocab)

    def release(self) -> None:
        """Free the block and its values, as far as the end of the `with` block does not need them."""
        self.block = nn.Identity()
        self.attended.clear()
        self.__dict__.pop("_stand_ins", None)

    def run(self, x: Activation, batch: Batch) -> Activation:
        """The block's output."""
        local_x = map_leaves(x, Tensor, lambda tensor: _placed(tensor, self.device, self.dtype))
        local_batch = batch.map(lambda field: field.to(self.device))
        return self._run(self._stand_ins, local_x, local_batch)

    def run_without_values(self, x: Activation, batch: Batch) -> Activation:
        """Run the block on the meta device and return its output."""
        tensors = (*self.block.named_parameters(), *self.block.named_buffers())
        on_meta = {name: tensor.to("meta") for name, tensor in tensors}
        floats = (param.dtype for param in self.block.parameters() if param.is_floating_point())
        dtype = next(floats, self.dtype)
        meta_x = map_leaves(x, Tensor, lambda tensor: _placed(tensor, torch.device("meta"), dtype))
        return self._run(on_meta, meta_x, batch.map(lambda field: field.to("meta")))

    @torch.no_grad()
    def _run(self, values: dict[str, Tensor], x: Activation, batch: Batch) -> Activation:
        self.attended.clear()
        block = _FunctionalBlock(self.block, values)
        out: Activation = activation_of(run_block("", block, x, batch))
        return out


def _placed(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """An activation on a device, in the type of the parameters that read it; ids keep theirs."""
    return x.to(device, dtype) if x.is_floating_point() else x.to(device)


class _FunctionalBlock(nn.Module):
    """A block called with other parameters and buffers."""

    def __init__(self, block: nn.Module, stand_ins: dict[str, Tensor]) -> None:
        super().__init__()
        self.block = block
        self.stand_ins = stand_ins

    def forward(self, *args: object) -> object:
        return torch.func.functional_call(self.block, self.stand_ins, args)


def _stand_ins(block: nn.Module, vocab: int) -> dict[str, Tensor]:
    """Values for what is on the meta device; of a table that tensor parallelism shards, whole ones."""
    tables = tables_of(block)
    stand_ins: dict[str, Tensor] = {}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if tensor.is_meta:
            rows = max(vocab, len(tensor)) if id(tensor) in tables else None
            stand_ins[name] = drawn_value(tensor, dtype=torch.float32, rows=rows)
    return stand_ins
