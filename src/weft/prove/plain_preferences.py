"""Direct preference optimization on one device, by its definition (Rafailov et al. 2023, equation 7), pair by pair."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.data.logprob_files import Logprobs
from weft.data.order import Ints
from weft.models.common.batch import IGNORE, Batch, activation_of
from weft.models.common.dropout_mode import run_block

LOSS = "loss"
"""The block that computes the loss, the last one of a chain."""


def target_logprobs(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """logprobs_BS of the targets in float32 at least; 0 where there is none."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    counts_BS = targets_BS != IGNORE
    index_BS1 = targets_BS.where(counts_BS, 0).unsqueeze(-1)
    chosen_BS = wide.log_softmax(-1).gather(-1, index_BS1).squeeze(-1)
    return chosen_BS.where(counts_BS, 0.0)


class PlainPreferenceLoss(nn.Module):
    """The sum over pairs of -log(1 / (1 + exp(-beta (chosen - rejected)))): each of them a sum over
    the answer of log-probabilities under the policy, minus those under the reference model.
    """

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """logits -> scalar."""
        assert batch.documents is not None, "pairs are documents"
        assert batch.pairs is not None, "pairs are marked"
        assert batch.references is not None, "the reference model was evaluated"
        policy_BS = target_logprobs(logits_BSV, batch.targets)
        gains_BS = policy_BS - batch.references.to(policy_BS.dtype)
        total = gains_BS.new_zeros(())
        for gains_S, documents_S, marks_S in zip(
            gains_BS, batch.documents, batch.pairs, strict=True
        ):
            for chosen in documents_S[marks_S].tolist():
                margin = (
                    gains_S[documents_S == chosen].sum() - gains_S[documents_S == chosen + 1].sum()
                )
                total = total + torch.log1p(torch.exp(-self.beta * margin))
        return total


class ReferenceModel:
    """The model that a policy is compared with: copies of the blocks before the first step.

    Args:
        blocks: the chain of the policy, with its initial parameters.
        stored: logprobs_NS of a run that began earlier; None: the copies compute them.
        perturbed: applied to what passes from block to block.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        *,
        stored: Logprobs | None,
        perturbed: Callable[[Tensor], Tensor],
    ) -> None:
        self.stored = stored
        self.perturbed = perturbed
        self.blocks: dict[str, nn.Module] = {}
        if stored is None:
            chain = {name: block for name, block in blocks.items() if name != LOSS}
            self.blocks = copy.deepcopy(chain)

    def add_to(self, batch: Batch, numbers: Ints, *, parts: Sequence[range]) -> Batch:
        """The batch with the log-probabilities of its targets.

        Args:
            numbers: of its samples.
            parts: rows of each micro-batch.
        """
        if self.stored is not None:
            return replace(batch, references=torch.from_numpy(self.stored[numbers.ravel()]))
        references_BS = torch.zeros(batch.targets.shape, dtype=torch.float64)
        for rows in parts:
            place = slice(rows.start, rows.stop)
            references_BS[place] = self._logprobs(batch.rows(place))
        return replace(batch, references=references_BS)

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> Tensor:
        x: Any = batch.inputs
        for name, block in self.blocks.items():
            x = self.perturbed(activation_of(run_block(name, block, x, batch)))
        return target_logprobs(x, batch.targets).double()
