"""Noise on the embeddings of tokens while training (NEFTune, Jain et al. 2023), by counter: the same on any layout.

Note [Embedding noise]
    To each entry of an embedding x_BSD, u x alpha / sqrt(L x D) is added: u is uniform between -1 and
    1, L the number of tokens of the document (of the sequence, where it is one document; padding is
    none of its tokens). u is a function of key, call and place, as masks of dropout are: see
    Note [Counter-based dropout] in dropout.py. So noise is added where dropout would be: in batches
    with keys.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft.models.common.dropout import DropoutDraws, has_no_memory

NOISE = "noise_alpha"
"""Attribute of a module that adds noise to its result."""


class NoisyEmbedding(nn.Embedding):
    """An embedding with noise, of the amplitude `noise_alpha` / sqrt(L x D)."""

    noise_alpha: float

    def forward(self, input: Tensor) -> Tensor:
        return plus_noise(self, super().forward(input))


def with_noise(embedding: nn.Embedding, alpha: float) -> nn.Embedding:
    """The embedding, whose results have noise from now on: the same object, since others hold it, too."""
    kind = type(embedding)
    if kind is nn.Embedding:
        # in place: ties and tables of parameters hold this object
        embedding.__class__ = NoisyEmbedding
    else:  # one that computes more: noise comes after it
        bases = (_NoisyResult, kind)
        embedding.__class__ = cast(type[nn.Embedding], type(f"Noisy{kind.__name__}", bases, {}))
    vars(embedding)[NOISE] = alpha
    return embedding


class _NoisyResult(nn.Module):
    """In front of another class: its result has noise."""

    def forward(self, input: Tensor) -> Tensor:
        return plus_noise(self, super().forward(input))


def noise_of(module: nn.Module) -> float:
    """The alpha of a module's noise; 0 without noise."""
    return float(vars(module).get(NOISE, 0.0))


def plus_noise(module: nn.Module, x: Tensor) -> Tensor:
    """x, with noise where the module has one."""
    alpha = noise_of(module)
    return embedding_noise(x, alpha) if alpha else x


def embedding_noise(x: Tensor, alpha: float) -> Tensor:
    """x_BSD plus noise in the training runs of weft, in whose mode this is replaced; x elsewhere."""
    if has_torch_function_unary(x):
        out: Tensor = handle_torch_function(embedding_noise, (x,), x, alpha)
        return out
    return x


def add_noise(x: Tensor, draws: DropoutDraws, alpha: float, documents_BT: Tensor | None) -> Tensor:
    """x plus its noise; see Note [Embedding noise].

    Args:
        draws: of columns and features.
        documents_BT: documents of whole sequences; None: each is one.
    """
    if has_no_memory(x):
        return x + torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    # in the wide type and rounded once with x: noise of 16 bits would be added to entries of 16 bits
    noise = draws.uniform(wide)
    columns, features = draws.dims
    if documents_BT is None:
        noise *= alpha / (columns.length * features.length) ** 0.5
    else:
        held = torch.tensor([place for span in columns.spans for place in span], device=x.device)
        lengths_BS = _document_lengths(documents_BT)[:, held]
        noise *= (alpha / (lengths_BS * features.length).to(wide).sqrt()).unsqueeze(-1)
    return (x.to(wide) + noise.view(x.shape)).to(x.dtype)


def _document_lengths(documents_BT: Tensor) -> Tensor:
    """lengths_BT int64: number of tokens of each token's document."""
    rows, most_documents = documents_BT.shape
    slots = documents_BT.new_zeros(rows, most_documents + 1)
    lengths = slots.scatter_add(1, documents_BT, torch.ones_like(documents_BT))
    return lengths.gather(1, documents_BT)
