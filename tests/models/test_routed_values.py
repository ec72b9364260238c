"""Values beside the meta device: an even load of experts is read, and nothing else is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.runs_without_memory import reads_values
from weft.models.transformers.routed_values import routed_values

TOKENS, EXPERTS, TOP_K = 8, 4, 2


def chosen() -> Tensor:
    """Numbers of experts for each token, as a router yields them."""
    return torch.empty(TOKENS, EXPERTS, device="meta").topk(TOP_K, dim=-1)[1]


def test_each_expert_has_as_many_tokens() -> None:
    hidden = torch.empty(TOKENS, 16, device="meta", requires_grad=True)
    with routed_values():
        mask = F.one_hot(chosen(), EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        found = [int(number.item()) for number in hit]
        places = [torch.where(mask[number])[1] for number in found]
        out = torch.zeros_like(hidden).index_add(0, places[0], hidden[places[0]])
    out.sum().backward()
    assert found == list(range(EXPERTS))
    assert [len(place) for place in places] == [TOKENS * TOP_K // EXPERTS] * EXPERTS
    assert out.is_meta
    assert hidden.grad is not None


def test_lists_of_numbers_of_tokens_are_read() -> None:
    with routed_values():
        zeros = torch.zeros(TOKENS, EXPERTS, device="meta")
        sizes = zeros.scatter(1, chosen(), 1).long().sum(0).tolist()
    assert sizes == [TOKENS * TOP_K // EXPERTS] * EXPERTS


def test_what_depends_on_activations_has_no_value() -> None:
    x = torch.empty(TOKENS, EXPERTS, device="meta")
    with routed_values():
        total = torch.zeros(EXPERTS, device="meta")
        total.add_(x[0])
        with pytest.raises(Exception, match="meta") as caught:
            total.sum().item()
    assert reads_values(caught.value)
