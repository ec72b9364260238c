"""What is computed by definition from transformers' routers: loads, the balance loss, the step of the balancing bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.batch import IGNORE

ROUTER = "Router"
"""End of the names of classes that choose experts; they return logits, weights and experts."""


@dataclass
class RouterRecord:
    """What the routers of a model returned for some tokens, by block.

    Attributes:
        logits: of all experts, [tokens, E], in the order of the calls.
        experts: chosen ones, [tokens, K].
    """

    logits: dict[str, list[Tensor]] = field(default_factory=dict)
    experts: dict[str, list[Tensor]] = field(default_factory=dict)

    def attach(self, block: str, module: nn.Module) -> None:
        """Record the routers below the module of a block."""
        for inner in module.modules():
            if not type(inner).__name__.endswith(ROUTER):
                continue

            def keep(router: nn.Module, args: object, output: Any) -> None:
                logits, _, experts = output
                self.logits.setdefault(block, []).append(logits)
                self.experts.setdefault(block, []).append(experts.detach())

            inner.register_forward_hook(keep)

    def clear(self) -> None:
        """Forget the recorded logits."""
        self.logits.clear()
        self.experts.clear()


def expert_loads(experts: Sequence[Tensor], num_experts: int) -> Tensor:
    """Tokens at each expert."""
    chosen = torch.cat([each.flatten() for each in experts])
    return torch.stack([(chosen == expert).sum() for expert in range(num_experts)])


def balance_loss(logits: Tensor, targets: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The sequence-wise balance loss of one sequence (DeepSeek-V3, equations 17 to 20) times its
    number of targets.

    Args:
        logits: of all experts, [T, E].
        targets: [T].
        settings: the architecture of the model.
    """
    num_tokens, num_experts = logits.shape
    top_k = int(settings["top_k"])
    is_sigmoid = settings.get("scoring") == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    best = scores.detach().topk(top_k, dim=-1).indices
    terms = []
    for expert in range(num_experts):
        chosen = (best == expert).any(-1).sum().to(scores.dtype)
        frequency = num_experts / (top_k * num_tokens) * chosen
        share = (scores[:, expert] / scores.sum(-1)).mean()
        terms.append(frequency * share)
    num_targets = (targets != IGNORE).sum().to(scores.dtype)
    loss: Tensor = settings["balance_loss"] * num_targets * torch.stack(terms).sum()
    return loss


def moved_bias(bias: Tensor, load: Tensor, *, rate: float) -> Tensor:
    """The balancing bias after a step: up where an expert's load is under the mean, down where it is
    above (Wang et al. 2024, algorithm 1).
    """
    mean = load.double().mean()
    return bias + rate * torch.sign(mean - load.double())
