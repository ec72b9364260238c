"""The attention seam: what a model requires of attention (`AttentionSpec`), and the implementation for one device.

A model calls `Attend`, which hands q, k and v to its `implementation` together with the
requirements. Context parallelism and cached generation set another implementation; each one
declares the features that it supports, and an `Attend` that requires more is rejected, see
`set_implementations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.attention_mask import ALL_FEATURES, CAUSAL, AttentionMask, Feature
from weft.models.common.batch import Batch
from weft.models.common.dropout import AttentionDraws, attention_draws, times_factors
from weft.models.common.dropped_attention import DroppedScores, dropped_attention
from weft.models.common.seam import check_declared, check_supported


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention computes: softmax over the visible keys of cap(scale q k^T) + bias, times
    v.

    Attributes:
        mask: which keys a query sees.
        scale: factor of q k^T; None: 1 / sqrt(head size).
        softcap: scores s become softcap * tanh(s / softcap) before masking (Gemma 2).
        sinks: one logit per head [H] in the denominator of the softmax, with no value (gpt-oss).
        head_bias: one slope per head [H]: scores get slope * (key column - query column) (ALiBi,
            Press et al. 2022).
        dropout: probability that a weight of the softmax is dropped, in training.
        draws: the random numbers by which they are; None: nothing is dropped now.
    """

    mask: AttentionMask = CAUSAL
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    head_bias: Tensor | None = None
    dropout: float = 0.0
    draws: AttentionDraws | None = None

    @property
    def features(self) -> frozenset[Feature]:
        """What an implementation must support."""
        found = set(self.mask.features)
        if self.softcap is not None:
            found.add("softcap")
        if self.sinks is not None:
            found.add("sinks")
        if self.head_bias is not None:
            found.add("head_bias")
        if self.dropout:
            found.add("dropout")
        return frozenset(found)

    @property
    def fits_fused_kernel(self) -> bool:
        """Whether torch's fused attention computes it: nothing but a scale and a mask."""
        return self.is_plain and self.draws is None

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but a scale, a mask and dropout."""
        others = (self.softcap, self.sinks, self.head_bias)
        return all(other is None for other in others)

    def scale_of(self, q: Tensor) -> float:
        """Factor of q k^T for queries of this head size (their last dim)."""
        if self.scale is not None:
            return self.scale
        head_size = q.shape[-1]
        return float(head_size**-0.5)

    def select_heads(self, heads: slice) -> AttentionSpec:
        """The same for some of the query heads."""
        spec = self
        if self.sinks is not None:
            spec = replace(spec, sinks=self.sinks[heads])
        if self.head_bias is not None:
            spec = replace(spec, head_bias=self.head_bias[heads])
        if self.draws is not None:
            spec = replace(spec, draws=self.draws.select_heads(heads))
        return spec


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
    """Attention on one device over whole sequences: torch's fused kernels, or all scores in memory
    where none fits.
    """

    name = "fused"
    supports = ALL_FEATURES
    alternative = ""

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        width = v_BSGW.shape[-1]
        missing = k_BSGK.shape[-1] - width
        if missing > 0:  # fused kernels take one head size; without one, S x S scores are in memory
            v_BSGW = F.pad(v_BSGW, (0, missing))
        documents = batch.documents if spec.mask.documents else None
        columns = range(q_BSHK.shape[1])
        is_triangle = spec.mask.is_triangle(columns, columns) and documents is None
        q_BHSK = q_BSHK.transpose(1, 2)
        k_BGSK = k_BSGK.transpose(1, 2)
        v_BGSW = v_BSGW.transpose(1, 2)
        if spec.fits_fused_kernel:
            out_BHSW = F.scaled_dot_product_attention(
                q_BHSK,
                k_BGSK,
                v_BGSW,
                attn_mask=None if is_triangle else _allowed_keys(spec.mask, q_BHSK, documents),
                is_causal=is_triangle,
                scale=spec.scale,
                enable_gqa=True,
            )
        elif spec.is_plain and spec.draws is not None:
            scores = DroppedScores(
                spec.scale_of(q_BHSK),
                None if is_triangle else _allowed_keys(spec.mask, q_BHSK, documents),
                is_triangle,
                spec.draws,
            )
            out_BHSW = dropped_attention(q_BHSK, k_BGSK, v_BGSW, scores)
        else:
            columns_S = torch.arange(len(columns), device=q_BHSK.device)
            out_BHSW = eager_attention(
                q_BHSK,
                k_BGSK,
                v_BGSW,
                spec,
                allowed=_allowed_keys(spec.mask, q_BHSK, documents),
                distance=columns_S[:, None] - columns_S,
                factors=None if spec.draws is None else spec.draws.of_columns(columns_S),
            )
        return out_BHSW.transpose(1, 2)[..., :width]


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

    @property
    def requirements(self) -> AttentionSpec:
        """What this attention computes, for every implementation of it."""
        return AttentionSpec(
            self.mask, self.scale, self.softcap, self.sinks, self.head_bias, self.dropout
        )

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch) -> Tensor:
        spec = self.requirements
        if self.training and spec.dropout:
            spec = replace(spec, draws=attention_draws(q_BSHK, spec.dropout))
        return self.implementation(q_BSHK, k_BSGK, v_BSGW, batch, spec)


def visible_keys(mask: AttentionMask, queries: Tensor, keys_T: Tensor) -> Tensor | None:
    """True where the query at a column of queries_[...]S sees the key at a column of keys_T: [...,
    S, T]; None: all see all.
    """
    distance = queries[..., :, None] - keys_T
    allowed = None
    if mask.causal:
        allowed = distance >= 0
    if mask.prefix:
        allowed = (distance >= 0) | (keys_T < mask.prefix)
    if mask.window is not None:
        is_near = distance.abs() < mask.window
        allowed = is_near if allowed is None else allowed & is_near
    return allowed


def eager_attention(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTW: Tensor,
    spec: AttentionSpec,
    *,
    allowed: Tensor | None,
    distance: Tensor,
    factors: Callable[[torch.dtype], Tensor] | None = None,
) -> Tensor:
    """Attention with all scores in memory, in float32 at least; every feature -> out_BHSW.

    Args:
        allowed: True where a query sees a key, broadcastable to [B, H, S, T].
        distance: query column - key column, broadcastable to [B, H, S, T].
        factors: of dropout, by which the weights are multiplied, [B, H, S, T].
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
    if factors is not None:
        weights_BHST = times_factors(weights_BHST, factors)
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
            a subclass that overrides `forward` without declaring what it requires.
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
        if overrides_forward(attend):
            attend = _plain_attend(attend.requirements)
            block.set_submodule(path, attend)
        attend.implementation = implementation
        made.append(implementation)
    return made


def overrides_forward(attend: Attend) -> bool:
    """Whether this instance computes something else than `Attend.forward`."""
    if "forward" in vars(attend):
        return True
    return type(attend).forward is not Attend.forward


def _plain_attend(spec: AttentionSpec) -> Attend:
    def parameter(x: Tensor | None) -> nn.Parameter | None:
        return x if x is None or isinstance(x, nn.Parameter) else nn.Parameter(x)

    return Attend(
        mask=spec.mask,
        scale=spec.scale,
        softcap=spec.softcap,
        sinks=parameter(spec.sinks),
        head_bias=parameter(spec.head_bias),
        dropout=spec.dropout,
    )
