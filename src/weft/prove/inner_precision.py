"""Casts inside a user's model: whether its forward computes in coarser number types than the run's, or fails in these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.core.model_config import ModelConfig
from weft.errors import type_and_message
from weft.models import Family
from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout_mode import run_block
from weft.models.common.uncompiled import keep_compiler_unimported
from weft.models.runs_without_memory import run_without_memory
from weft.models.user_family import UserFamily, example, meta_blocks
from weft.prove.bounds import FACTOR
from weft.train.casts import Casts, eps

MOST_COLUMNS = 64
"""Of the sequences that the model runs on, where it takes them."""


@dataclass(frozen=True)
class InnerPrecision:
    """What a forward does to the number type of its parameters.

    Attributes:
        dtype: the coarsest type to which it casts what it computes; None: it casts nothing.
        block: where it does, or fails.
        error: of a forward that does not run in the type; empty: it does.
    """

    dtype: torch.dtype | None = None
    block: str = ""
    error: str = ""

    def rounding(self, num_blocks: int) -> float:
        """How far two orders of computation move a result of so many blocks: a rounding a block."""
        return 0.0 if self.dtype is None else FACTOR * num_blocks * torch.finfo(self.dtype).eps


def inner_precision(
    family: Family, config: ModelConfig, *, dtype: torch.dtype, seq_len: int
) -> InnerPrecision:
    """The casts of a user's model in a number type; none of weft's own families, which compute in
    any.
    """
    plain = getattr(family, "plain", family)  # of adapters
    if not isinstance(plain, UserFamily):
        return InnerPrecision()
    keep_compiler_unimported()
    length = seq_len if seq_len % MOST_COLUMNS else min(seq_len, MOST_COLUMNS)
    found = _run(plain, config, dtype=dtype, seq_len=length)
    if found.error and length != seq_len:
        return _run(plain, config, dtype=dtype, seq_len=seq_len)
    return found


def _run(
    family: UserFamily, config: ModelConfig, *, dtype: torch.dtype, seq_len: int
) -> InnerPrecision:
    """Run the chain without memory."""

    def run(blocks: Mapping[str, nn.Module], batch: Batch) -> InnerPrecision:
        x: Any = batch.inputs
        found = InnerPrecision()
        for name, block in blocks.items():
            casts = Casts()
            try:
                with casts:
                    x = activation_of(run_block(name, block, x, batch))
            except Exception as error:
                raise _BlockError(name) from error
            if casts.coarsest is not None:
                coarsest = max(casts.coarsest, found.dtype or casts.coarsest, key=eps)
                found = InnerPrecision(coarsest, found.block or name)
        return found

    blocks = meta_blocks(family, config)
    for block in blocks.values():
        block.to(dtype)
    try:
        return run_without_memory(run, blocks, example(family, config, rows=2, seq_len=seq_len))
    except _BlockError as error:
        cause = error.__cause__ or error
        return InnerPrecision(block=error.block, error=type_and_message(cause))


class _BlockError(Exception):
    """An error of a block's forward, which is its cause."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.block = block
