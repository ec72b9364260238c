"""What an attention computes, as a value (`AttentionSpec`), and which keys a mask lets a query see, as a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from weft.core.attention_choice import AttentionCall
from weft.core.attention_mask import CAUSAL, AttentionMask, Feature
from weft.models.common.dropout import AttentionDraws


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention computes: softmax over the visible keys of cap(scale q k^T) + bias, times
    v.

    Attributes:
        mask: which keys a query sees.
        scale: factor of q k^T, above 0: torch's fused kernels return NaN for others; None:
            1 / sqrt(head size).
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

    def __post_init__(self) -> None:
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"scale {self.scale}: attention needs a factor above 0")

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
        return self.sinks is None and not self.needs_scores

    @property
    def needs_scores(self) -> bool:
        """Whether scores or weights are others than those of a fused kernel; sinks are added to
        what it returns.
        """
        others = (self.softcap, self.head_bias, self.draws)
        return any(other is not None for other in others)

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


def attention_call(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, spec: AttentionSpec, *, has_documents: bool
) -> AttentionCall:
    """What decides the kernel of a call over whole sequences."""
    rows, length, heads, head_size = q_BSHK.shape
    features = spec.features - spec.mask.features
    if spec.draws is None:
        features = features - {"dropout"}  # "-=" of a frozenset fails in the compiler of torch 2.11
    return AttentionCall(
        str(q_BSHK.dtype).removeprefix("torch."),
        rows=rows,
        length=length,
        heads=heads,
        key_heads=k_BSGK.shape[2],
        head_size=max(head_size, v_BSGW.shape[-1]),
        mask=spec.mask,
        has_documents=has_documents,
        features=features,
    )


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
        # to both sides: causal masks have hidden the keys behind already
        is_near = distance.abs() < mask.window
        allowed = is_near if allowed is None else allowed & is_near
    return allowed
