"""Owns what flows through a model: the Batch that every block may read, and the plain chain of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IGNORE = -100
"""Target of a token that does not count in the loss."""


@dataclass(frozen=True)
class Batch:
    """Sequences (or images) of one micro-batch; whoever cuts it along batch or sequence cuts every field alike.

    Attributes:
        inputs: tokens_BS int64, or images_BCHW float or uint8 (0..255).
        targets: targets_BS int64 (targets_B for images), IGNORE where a token does not count.
        positions: positions_BS int64, place of each token in its sequence or document (zeros_B for images).
        documents: documents_BS int64, tokens attend only within their own document; None: a sequence is one document.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None = None

    def num_targets(self) -> Tensor:
        """Number of targets that count, int64 scalar; stays on the device."""
        return (self.targets != IGNORE).sum()

    def rows(self, index: Tensor | slice) -> Batch:
        """Some of its sequences."""
        return self.map(lambda x: x[index])

    def map(self, act: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `act` applied to each tensor: `batch.map(lambda x: x[:4])`, `batch.map(torch.Tensor.cuda)`."""
        documents = None if self.documents is None else act(self.documents)
        return Batch(act(self.inputs), act(self.targets), act(self.positions), documents)


def token_batch(inputs_BS: Tensor, targets_BS: Tensor) -> Batch:
    """Sequences of one document each: positions count from 0."""
    positions_BS = torch.arange(inputs_BS.shape[1], device=inputs_BS.device).repeat(inputs_BS.shape[0], 1)
    return Batch(inputs_BS, targets_BS, positions_BS)


def image_batch(images_BCHW: Tensor, targets_B: Tensor) -> Batch:
    """Images and their classes; nothing has a position."""
    return Batch(images_BCHW, targets_B, torch.zeros_like(targets_B))


def forward(blocks: Mapping[str, nn.Module] | nn.ModuleDict, batch: Batch) -> Tensor:
    """The plain chain on one device: the summed loss, or what the last of these blocks hands on."""
    x = batch.inputs
    for block in blocks.values():
        x = block(x, batch)
    return x
