"""The attention seam: what a model requires of attention (`AttentionSpec`), and the implementation for one device.

A model calls `Attend`, which hands q, k and v to its `implementation` together with the
requirements. Context parallelism and cached generation set another implementation; each one
declares the features that it supports, and an `Attend` that requires more is rejected, see
`set_implementations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.attention_choice import (
    AttentionCall,
    AttentionDevice,
    AttentionLimits,
    KernelChoice,
    KernelName,
    choose_kernel,
)
from weft.core.attention_mask import ALL_FEATURES, CAUSAL, AttentionMask, Feature
from weft.core.query_blocks import row_blocks
from weft.errors import Fault, PlanError
from weft.models.common.attention_kernels import attention_device, pad_head
from weft.models.common.attention_spec import AttentionSpec, attention_call, visible_keys
from weft.models.common.batch import Batch
from weft.models.common.block_attention import SequenceAttention
from weft.models.common.dropout import attention_draws, has_no_memory
from weft.models.common.seam import check_declared, check_supported
from weft.models.common.varlen_attention import DocumentLengths, varlen_attention


class AttentionImplementation(Protocol):
    """A way to compute attention, and the features that it supports.

    Attributes:
        name: as messages call it.
        supports: features of a spec that it computes.
        alternative: what to use where it lacks a feature, as a message says it.
    """

    name: str
    supports: frozenset[Feature]
    alternative: str

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """This rank's tokens -> out_BSHW."""
        ...


Implementation = TypeVar("Implementation", bound=AttentionImplementation)


class FusedAttention:
    """Attention on one device over whole sequences, by the kernel that `choose_kernel` names.

    Attributes:
        device: that the choice is made for; None: that of q. Predictions on the meta device set it.
        limits: sizes of its parts in place of those of the device.
        on_choice: called with the kernel of each call.
    """

    name = "fused"
    supports = ALL_FEATURES
    alternative = ""
    left_out = ("_in_parts",)

    def __init__(self, device: AttentionDevice | None = None) -> None:
        self.device = device
        self.limits: AttentionLimits | None = None
        self.on_choice: Callable[[KernelChoice], object] | None = None

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        documents = batch.documents if spec.mask.documents else None
        call = attention_call(q_BSHK, k_BSGK, v_BSGW, spec, has_documents=documents is not None)
        device = self.device or attention_device(q_BSHK)
        if self.limits is not None:
            device = replace(device, own_limits=self.limits)
        choice = choose_kernel(call, device)
        if self.on_choice is not None:
            self.on_choice(choice)
        kernel = choice.kernel
        if kernel == "plain" and call.features:
            return _all_scores(q_BSHK, k_BSGK, v_BSGW, spec, documents)
        repeats_heads = kernel == "efficient" and call.heads > call.key_heads
        if kernel not in ("blocks", "varlen") and not repeats_heads:
            allowed = None
            if not call.is_dense:
                allowed = _allowed_keys(spec.mask, q_BSHK.transpose(1, 2), documents)
            return _by_torch(q_BSHK, k_BSGK, v_BSGW, spec, allowed=allowed)
        chosen = Chosen(call, device, kernel)
        return self._in_parts(q_BSHK, k_BSGK, v_BSGW, batch, spec, choice=chosen)

    def _in_parts(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGW: Tensor,
        batch: Batch,
        spec: AttentionSpec,
        *,
        choice: Chosen,
    ) -> Tensor:
        """Documents and runs of queries, whose number depends on the values of a batch."""
        call, device, kernel = choice
        documents = batch.documents if call.has_documents else None
        runs = None if documents is None else batch.document_runs
        can_be_varlen = not has_no_memory(q_BSHK) and None not in (runs or ())
        if kernel == "varlen" and can_be_varlen:
            longest = max((len(run) for of_row in runs or () for run in of_row or ()), default=0)
            borders = batch.document_borders if runs else _borders_of_sequences(q_BSHK)
            lengths = DocumentLengths(borders, longest or call.length)
            return varlen_attention(q_BSHK, k_BSGK, v_BSGW, lengths, spec)
        blocks = row_blocks(call, device, runs)  # which repeat heads for a kernel, and keep none
        attention = SequenceAttention(spec, blocks, documents, device)
        return attention(q_BSHK, k_BSGK, v_BSGW)


class Chosen(NamedTuple):
    """A call, and the kernel that computes it on a device."""

    call: AttentionCall
    device: AttentionDevice
    kernel: KernelName


def _by_torch(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, spec: AttentionSpec, *, allowed: Tensor | None
) -> Tensor:
    """torch's fused kernels: all keys or a triangle, or the keys that a mask tensor allows."""
    width = v_BSGW.shape[-1]
    head_size = q_BSHK.shape[-1]
    scale = spec.scale
    if (
        width != head_size
    ):  # fused kernels take one head size; without one, S x S scores are in memory
        scale = spec.scale_of(q_BSHK)
        size = max(width, head_size)
        q_BSHK, k_BSGK, v_BSGW = (pad_head(x, size) for x in (q_BSHK, k_BSGK, v_BSGW))
    columns = range(q_BSHK.shape[1])
    out_BHSW = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGW.transpose(1, 2),
        attn_mask=allowed,
        is_causal=allowed is None and spec.mask.is_triangle(columns, columns),
        scale=scale,
        enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
    )
    return out_BHSW.transpose(1, 2)[..., :width]


def _all_scores(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, spec: AttentionSpec, documents: Tensor | None
) -> Tensor:
    q_BHSK = q_BSHK.transpose(1, 2)
    columns_S = torch.arange(q_BSHK.shape[1], device=q_BSHK.device)
    out_BHSW = eager_attention(
        q_BHSK,
        k_BSGK.transpose(1, 2),
        v_BSGW.transpose(1, 2),
        spec,
        allowed=_allowed_keys(spec.mask, q_BHSK, documents),
        distance=columns_S[:, None] - columns_S,
    )
    return out_BHSW.transpose(1, 2)


def _borders_of_sequences(q_BSHK: Tensor) -> Tensor:
    rows, length, _, _ = q_BSHK.shape
    stop = rows * length + 1
    return torch.arange(0, stop, length, dtype=torch.int32, device=q_BSHK.device)


def _allowed_keys(
    mask: AttentionMask, q_BHSK: Tensor, documents_BS: Tensor | None
) -> Tensor | None:
    """True where a query of whole sequences sees a key, broadcastable to [B, H, S, S]; None: all
    see all.
    """
    columns_S = torch.arange(q_BHSK.shape[2], device=q_BHSK.device)
    allowed = visible_keys(mask, columns_S, columns_S)
    if documents_BS is None:
        return allowed
    is_same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    is_same_B1SS = is_same_BSS.unsqueeze(1)
    return is_same_B1SS if allowed is None else is_same_B1SS & allowed


@dataclass(frozen=True)
class OwnHeads:
    """The heads of keys and values that a rank's heads of queries read, where it computes all of them.

    Attributes:
        first: the rank's first head of queries.
        number: of its heads of queries.
        total: heads of queries of all ranks.
    """

    first: int
    number: int
    total: int

    @classmethod
    def of_rank(cls, index: int, number: int, *, total: int) -> OwnHeads:
        """Of the rank at a place along an axis that shards the heads of queries evenly."""
        return cls(index * number, number, total)

    def numbers(self, num_shared: int) -> list[int]:
        """Which of the shared heads, in an order in which the rank's heads share them evenly.

        >>> OwnHeads(first=2, number=2, total=8).numbers(2)
        [0]
        >>> OwnHeads(first=3, number=3, total=12).numbers(6), OwnHeads(4, 4, 16).numbers(8)
        ([1, 2, 2], [2, 3])
        """
        group = self.total // num_shared
        unit = math.gcd(self.number, group)
        heads = range(self.first, self.first + self.number, unit)
        return [head // group for head in heads]

    def select(self, x_BSGK: Tensor) -> Tensor:
        """These heads of keys or values."""
        heads = self.numbers(x_BSGK.shape[2])
        start, stop = heads[0], heads[-1] + 1
        if heads == list(range(start, stop)):
            return x_BSGK[:, :, start:stop]
        return torch.stack([x_BSGK[:, :, head] for head in heads], dim=2)


class Attend(nn.Module):
    """Seam: attention of each token to the keys that `mask` lets it see. H query heads share G
    key/value heads, H / G each.

    Heads of v may have another size than those of q and k. A subclass that overrides `forward` must
    override `requirements`, too, where context parallelism or cached generation is to compute it;
    else these reject it.

    Args:
        mask: see `AttentionSpec`.
        scale: see `AttentionSpec`.
        softcap: see `AttentionSpec`.
        sinks: parameter of the model, [H]; sharded as the heads are.
        head_bias: parameter of the model, [H]; sharded as the heads are.
        dropout: see `AttentionSpec`.

    Attributes:
        implementation: what computes it.
        fixed: what it computes, where compiled code calls it; see `fix_for_compiler`.
        own_heads: which of k and v it reads; None: all.
    """

    def __init__(
        self,
        *,
        mask: AttentionMask = CAUSAL,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        head_bias: nn.Parameter | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.scale = scale
        self.softcap = softcap
        self.sinks = sinks
        self.head_bias = head_bias
        self.dropout = dropout
        self.implementation: AttentionImplementation = FusedAttention()
        self.fixed: AttentionSpec | None = None
        self.own_heads: OwnHeads | None = None
        AttentionSpec(
            mask, scale, dropout=dropout
        )  # rejects a wrong scale where the model is built

    @property
    def requirements(self) -> AttentionSpec:
        """What this attention computes, for every implementation of it."""
        return AttentionSpec(
            self.mask, self.scale, self.softcap, self.sinks, self.head_bias, self.dropout
        )

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch) -> Tensor:
        if self.own_heads is not None:
            k_BSGK, v_BSGW = self.own_heads.select(k_BSGK), self.own_heads.select(v_BSGW)
        spec = self.fixed or self.requirements
        if self.training and spec.dropout:
            spec = replace(spec, draws=attention_draws(q_BSHK, spec.dropout))
        return self.implementation(q_BSHK, k_BSGK, v_BSGW, batch, spec)


def fix_for_compiler(block: nn.Module, param: Tensor) -> None:
    """Fix what attention below a block computes, and by which device's kernels: compiled code that made a
    specification, or asked for the device of `param`, would be divided there.
    """
    device = attention_device(param)
    for module in block.modules():
        if not isinstance(module, Attend):
            continue
        implementation = module.implementation
        if isinstance(implementation, FusedAttention) and implementation.device is None:
            implementation.device = device
        if module.sinks is None and module.head_bias is None:
            module.fixed = module.requirements


def eager_attention(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTW: Tensor,
    spec: AttentionSpec,
    *,
    allowed: Tensor | None,
    distance: Tensor,
) -> Tensor:
    """Attention with all scores in memory, in float32 at least; every feature -> out_BHSW.

    Args:
        allowed: True where a query sees a key, broadcastable to [B, H, S, T].
        distance: query column - key column, broadcastable to [B, H, S, T].
    """
    group_size = q_BHSK.shape[1] // k_BGTK.shape[1]
    k_BHTK = k_BGTK.repeat_interleave(group_size, dim=1)
    v_BHTW = v_BGTW.repeat_interleave(group_size, dim=1)
    wide = torch.promote_types(q_BHSK.dtype, torch.float32)
    dots_BHST = q_BHSK @ k_BHTK.transpose(-1, -2)
    scores_BHST = dots_BHST.to(wide) * spec.scale_of(q_BHSK)
    if spec.softcap is not None:
        scores_BHST = spec.softcap * torch.tanh(scores_BHST / spec.softcap)
    if spec.head_bias is not None:
        slopes_H11 = spec.head_bias[:, None, None]
        scores_BHST = scores_BHST - slopes_H11 * distance
    if allowed is not None:
        scores_BHST = scores_BHST.masked_fill(~allowed, float("-inf"))
    weights_BHST = _softmax(scores_BHST, spec.sinks)
    return weights_BHST.to(v_BHTW.dtype) @ v_BHTW


def _softmax(scores_BHST: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Weights of the keys; with sinks they sum to less than 1."""
    if sinks_H is None:
        return scores_BHST.softmax(-1)
    *outer_shape, _ = scores_BHST.shape
    sinks_H11 = sinks_H[:, None, None].to(scores_BHST.dtype)
    sinks_BHS1 = sinks_H11.expand(*outer_shape, 1)
    with_sinks = torch.cat((scores_BHST, sinks_BHS1), dim=-1)
    weights = with_sinks.softmax(-1)
    return weights[..., :-1]


DECLARE_ATTENTION = (
    "use Attend(mask=AttentionMask(...), scale=..., softcap=...) or define `requirements`"
)


def set_implementations(
    block: nn.Module, make: Callable[[], Implementation], *, name: str
) -> list[Implementation]:
    """Let each `Attend` below `block` be computed by what `make` returns; the implementations, in
    the order of modules.

    Args:
        name: of the block, for messages.

    Raises:
        PlanError: an `Attend` that requires a feature that the implementation does not support, or
            a subclass that overrides `forward` without declaring what it requires, or declares
            sinks or a bias that are not its own parameters.
    """
    made = []
    for path, attend in list(block.named_modules()):
        if not isinstance(attend, Attend):
            continue
        implementation = make()
        key = f"{name}.{path}" if path else name
        name_of_kind = f"{implementation.name} attention"
        check_declared(attend, Attend, name=name_of_kind, key=key, fix=DECLARE_ATTENTION)
        check_supported(
            attend.requirements.features,
            implementation.supports,
            name=name_of_kind,
            key=key,
            fix=implementation.alternative,
        )
        # its forward would not call the implementation; what it computes is what it declares
        if overrides_forward(attend):
            attend = _plain_attend(attend, key)
            block.set_submodule(path, attend)
        attend.implementation = implementation
        made.append(implementation)
    return made


def overrides_forward(attend: Attend) -> bool:
    """Whether this instance computes something else than `Attend.forward`."""
    if "forward" in vars(attend):
        return True
    return type(attend).forward is not Attend.forward


def _plain_attend(attend: Attend, key: str) -> Attend:
    """What a subclass declares to compute, with its own parameters.

    Raises:
        PlanError: it declares other sinks, or another bias; as parameters of the plain one they would
            be trained in place of what they are computed from.
    """
    spec = attend.requirements
    declared = {"sinks": spec.sinks, "head_bias": spec.head_bias}
    for name, tensor in declared.items():
        if tensor is not getattr(attend, name):
            what = f"declares {name} that are not its parameter `{name}`"
            raise PlanError(Fault(key, what, fix=f"Attend({name}=nn.Parameter(...))"))
    return Attend(
        mask=spec.mask,
        scale=spec.scale,
        softcap=spec.softcap,
        sinks=attend.sinks,
        head_bias=attend.head_bias,
        dropout=spec.dropout,
    )
