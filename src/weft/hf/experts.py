"""Owns how experts lie in files: published ones have a tensor per expert, transformers' memory a tensor per layer."""

from __future__ import annotations

from weft.hf.table import EXPERT, Row, Share

_NAMES = ("gate", "up", "down")


def published(ours: str, theirs: str) -> tuple[Row, ...]:
    """`experts.7.gate_proj.weight` [F, D] and so on: ours [E, F, D] is the stack."""
    return tuple(
        Row(f"{ours}.mlp.experts.{name}", f"{theirs}.mlp.experts.{EXPERT}.{name}_proj.weight") for name in _NAMES
    )


def packed(ours: str, theirs: str) -> tuple[Row, ...]:
    """`experts.gate_up_proj` [E, 2F, D], gate first, and `experts.down_proj` [E, D, F]."""
    both = f"{theirs}.mlp.experts.gate_up_proj"
    return (
        Row(f"{ours}.mlp.experts.gate", both, Share(0, 2, dim=1)),
        Row(f"{ours}.mlp.experts.up", both, Share(1, 2, dim=1)),
        Row(f"{ours}.mlp.experts.down", f"{theirs}.mlp.experts.down_proj"),
    )
