"""Sinks of attention: one more key of each head, whose score is a parameter and whose value is 0."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """out_BHSW and log-sum-exp over the keys -> over the keys and the sinks."""
    sinks_H1 = sinks_H[:, None].to(lse_BHS.dtype)
    # of a query without a key the sink is all there is: lse is the sink's, and the output stays 0
    lse = torch.logaddexp(lse_BHS, sinks_H1)
    weight = torch.exp(lse_BHS - lse)
    return out * weight.unsqueeze(-1), lse


def sinks_gradient(sinks_H: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The softmax's gradient for a key whose value is 0: minus its weight times grad . out, summed
    over the queries.
    """
    wide = lse.dtype
    sinks_H1 = sinks_H[:, None].to(wide)
    weights_BHS = torch.exp(sinks_H1 - lse)
    products_BHSW = grad.to(wide) * out.to(wide)
    dots_BHS = products_BHSW.sum(-1)
    gradient_H = (weights_BHS * dots_BHS).sum((0, 2))
    return -gradient_H.to(sinks_H.dtype)
