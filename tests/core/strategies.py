"""Hypothesis strategies of values of weft.core: attention masks, and meshes of given axes."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.core.attention_mask import AttentionMask
from weft.core.mesh import Mesh


@st.composite
def attention_masks(draw: st.DrawFn) -> AttentionMask:
    """Causal ones with a window and a prefix, and bidirectional ones with a window."""
    window = draw(st.none() | st.integers(1, 12))
    is_causal = draw(st.booleans())
    if not is_causal:
        return AttentionMask(causal=False, window=window)
    prefix = draw(st.integers(0, 8))
    return AttentionMask(window=window, prefix=prefix)


@st.composite
def meshes_of(draw: st.DrawFn, names: tuple[str, ...]) -> Mesh:
    """Meshes with these axes, each of 1 to 4 ranks."""
    axes = []
    for name in names:
        degree = draw(st.integers(1, 4))
        axes.append((name, degree))
    return Mesh(tuple(axes))
