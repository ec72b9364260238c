"""Owns what every model family says of itself without torch: its config, its axes' sizes, its blocks' costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class BlockSpec:
    """One block of a model, as a planner sees it.

    flops: forward FLOPs of one sequence (or sample), 2 x multiply-adds, attention included, causal halved.
    out: shape that it hands on, as `("batch", "seq", dim)` or `("batch", width)`; `()` for the scalar loss.
    """

    name: str
    flops: float
    out: tuple[str | int, ...]
    is_layer: bool


class ModelConfig(BaseModel):
    """Base of every family's Config; the defaults of its fields are the family's tiny preset."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    kind: ClassVar[Literal["tokens", "images"]] = "tokens"

    def axis_sizes(self) -> dict[str, int]:
        """How many units each logical axis that may be cut has: `{"heads": 32, "kv_heads": 8, ...}`."""
        raise NotImplementedError

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        """The blocks in order; the last one is "loss"."""
        raise NotImplementedError
