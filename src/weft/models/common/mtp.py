"""Owns multi-token prediction (DeepSeek-V3, section 2.2): a side block that predicts the token after the next one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch, Extra, chain
from weft.models.common.layers import Loss


class SecondNext(nn.Module):
    """Hands x on as it is and adds `weight` times the summed loss of predicting the token after the next one.

    What the head would read of a token and the embedding of the next token, each behind a norm of its own, are joined and
    pass one more layer of the model. `tok`, `last_norm` and `proj` are to be tied to the model's embedding, last norm and
    head. The batch must have passed `with_later_targets`.
    """

    def __init__(self, layer: nn.Module, *, vocab: int, dim: int, norm_eps: float, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.tok = nn.Embedding(vocab, dim)
        self.last_norm, self.x_norm, self.next_norm, self.norm = (nn.RMSNorm(dim, eps=norm_eps) for _ in range(4))
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.proj = nn.Linear(dim, vocab, bias=False)
        self.loss = Loss()

    def forward(self, x_BSD: Tensor, batch: Batch) -> Extra:
        out = chain({"layer": self.layer}, self._join(x_BSD, batch), batch)
        assert batch.later_targets is not None, "with_later_targets fills both fields"
        loss = self.weight * self.loss(self.proj(self.norm(out.x)), replace(batch, targets=batch.later_targets))
        return Extra(x_BSD, loss if out.loss is None else loss + out.loss, out.loads.get("layer"))

    def _join(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        assert batch.next_inputs is not None, "multi-token prediction reads a batch made by with_later_targets"
        next_BSD, own_BSD = self.next_norm(self.tok(batch.next_inputs)), self.x_norm(self.last_norm(x_BSD))
        joined_BSD: Tensor = self.join(torch.cat((next_BSD, own_BSD), dim=-1))
        return joined_BSD
