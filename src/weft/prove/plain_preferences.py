"""Losses of preference pairs on one device, by their definitions, pair by pair, and the model that a policy is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import DpoConfig
from weft.data.logprob_files import Logprobs
from weft.data.order import Ints
from weft.models.common.batch import IGNORE, Batch, activation_of
from weft.models.common.buffer_updates import updating_modules
from weft.models.common.dropout_mode import run_block

REWARD = "reward"
LOSS = "loss"
"""The block that computes the loss, the last one of a chain."""


def target_logprobs(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """logprobs_BS of the targets in float32 at least, 0 where there is none; of losses_BS that a
    head has computed, too.
    """
    if logits_BSV.dim() == targets_BS.dim():
        return -logits_BSV
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    counts_BS = targets_BS != IGNORE
    index_BS1 = targets_BS.where(counts_BS, 0).unsqueeze(-1)
    chosen_BS = wide.log_softmax(-1).gather(-1, index_BS1).squeeze(-1)
    return chosen_BS.where(counts_BS, 0.0)


def _as_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class _PlainAnswer:
    """The log-probabilities of one answer.

    Attributes:
        policy: log-probabilities of its targets under the model.
        reference: under the reference model; None where the loss has none.
    """

    policy: Tensor
    reference: Tensor | None

    @property
    def gain(self) -> Tensor:
        """log(pi(y|x) / pi_ref(y|x)): products of probabilities are sums of logarithms."""
        assert self.reference is not None, "the reference model was evaluated"
        return (self.policy - self.reference).sum()

    @property
    def mean_gain(self) -> Tensor:
        """The same for one token of the answer."""
        return self.gain / len(self.policy)

    @property
    def mean_policy(self) -> Tensor:
        """(1 / |y|) log pi(y|x)."""
        return self.policy.sum() / len(self.policy)

    @property
    def inverse_odds(self) -> Tensor:
        """(1 - p) / p, where p is the geometric mean of the probabilities of the tokens."""
        return torch.expm1(-self.mean_policy)


def _plain_dpo(chosen: _PlainAnswer, rejected: _PlainAnswer, dpo: DpoConfig) -> Tensor:
    """Rafailov et al. 2023, equation 7; Mitchell 2023 ("cDPO") with label smoothing."""
    return _plain_bradley_terry(dpo.beta * (chosen.gain - rejected.gain), dpo.label_smoothing)


def _plain_hinge(chosen: _PlainAnswer, rejected: _PlainAnswer, dpo: DpoConfig) -> Tensor:
    """Zhao et al. 2023 (SLiC), Liu et al. 2023 (RSO)."""
    missing = 1 - dpo.beta * (chosen.gain - rejected.gain)
    return torch.where(missing > 0, missing, 0.0)


def _plain_ipo(chosen: _PlainAnswer, rejected: _PlainAnswer, dpo: DpoConfig) -> Tensor:
    """Azar et al. 2023, equation 17, for one token of each answer; tau is beta."""
    distance = chosen.mean_gain - rejected.mean_gain - 0.5 / dpo.beta
    return distance * distance


def _plain_simpo(chosen: _PlainAnswer, rejected: _PlainAnswer, dpo: DpoConfig) -> Tensor:
    """Meng et al. 2024, equation 6."""
    reward = dpo.beta * chosen.mean_policy - dpo.beta * rejected.mean_policy
    return _plain_bradley_terry(reward - dpo.gamma, dpo.label_smoothing)


def _plain_orpo(chosen: _PlainAnswer, rejected: _PlainAnswer, dpo: DpoConfig) -> Tensor:
    """Hong et al. 2024, equations 6 and 7: -log(1 / (1 + odds of rejected / odds of chosen))."""
    ratio = chosen.inverse_odds / rejected.inverse_odds
    return -chosen.mean_policy + dpo.beta * torch.log1p(ratio)


def _plain_bradley_terry(margin: Tensor, flipped: float) -> Tensor:
    """-log of the probability 1 / (1 + exp(-margin)) of the label, which is wrong with probability
    `flipped`.
    """
    zero = torch.zeros_like(margin)
    right = torch.logaddexp(zero, -margin)  # log(exp(0) + exp(-margin)), which does not overflow
    if not flipped:
        return right
    wrong = torch.logaddexp(zero, margin)
    return (1 - flipped) * right + flipped * wrong


PLAIN_LOSSES = {
    "sigmoid": _plain_dpo,
    "hinge": _plain_hinge,
    "ipo": _plain_ipo,
    "simpo": _plain_simpo,
    "orpo": _plain_orpo,
}


def _plain_kto(answer: _PlainAnswer, *, is_desired: bool, z0: float, dpo: DpoConfig) -> Tensor:
    """Ethayarajh et al. 2024, equations 7 and 8, with the weight in place of lambda: w - w v."""
    if is_desired:
        value = 1 / (1 + torch.exp(-dpo.beta * (answer.gain - z0)))
        return dpo.desirable_weight * (1 - value)
    value = 1 / (1 + torch.exp(-dpo.beta * (z0 - answer.gain)))
    return dpo.undesirable_weight * (1 - value)


class PlainPreferenceLoss(nn.Module):
    """The sum over pairs of `dpo.loss_type`, from the log-probabilities of each answer's tokens.

    Attributes:
        z0: of the step, for KTO; None: the sum that it is the mean of, in place of the loss.

    Args:
        perturbed: applied to log-probabilities, whose rounding counts `dpo.beta` times.
    """

    def __init__(self, dpo: DpoConfig, *, perturbed: Callable[[Tensor], Tensor] = _as_is) -> None:
        super().__init__()
        self.dpo = dpo
        self.perturbed = perturbed
        self.z0: float | None = None

    def forward(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """logits -> scalar."""
        assert batch.documents is not None, "pairs are documents"
        assert batch.pairs is not None, "pairs are marked"
        policy_BS = self.perturbed(target_logprobs(logits_BSV, batch.targets))
        total = policy_BS.new_zeros(())
        for row, column in batch.pairs.nonzero().tolist():
            number = int(batch.documents[row, column])
            first = number - number % 2
            chosen = _answer(policy_BS, batch, row=row, document=first)
            rejected = _answer(policy_BS, batch, row=row, document=first + 1)
            total = total + self._loss_of(chosen, rejected, is_marked_first=number == first)
        return total

    def _loss_of(
        self, chosen: _PlainAnswer, rejected: _PlainAnswer, *, is_marked_first: bool
    ) -> Tensor:
        if not self.dpo.has_labels:
            return PLAIN_LOSSES[self.dpo.loss_type](chosen, rejected, self.dpo)
        if self.z0 is None:
            return rejected.gain
        return _plain_kto(chosen, is_desired=is_marked_first, z0=self.z0, dpo=self.dpo)


class PlainRewardLoss(nn.Module):
    """The sum over pairs of -log of the probability that the chosen answer is the better one, from
    the scores of the last token of each (Ouyang et al. 2022, equation 1).
    """

    def forward(self, scores_BS1: Tensor, batch: Batch) -> Tensor:
        """scores -> scalar."""
        assert batch.documents is not None, "pairs are documents"
        assert batch.pairs is not None, "pairs are marked"
        wide = scores_BS1.to(torch.promote_types(scores_BS1.dtype, torch.float32))
        total = wide.new_zeros(())
        for row, column in batch.pairs.nonzero().tolist():
            number = int(batch.documents[row, column])
            chosen, rejected = (
                wide[row, int((batch.documents[row] == number + place).nonzero().max()), 0]
                for place in range(2)
            )
            total = total + _plain_bradley_terry(chosen - rejected, 0.0)
        return total


def _answer(policy_BS: Tensor, batch: Batch, *, row: int, document: int) -> _PlainAnswer:
    """The targets of a document of a row."""
    assert batch.documents is not None, "pairs are documents"
    is_target_S = (batch.documents[row] == document) & (batch.targets[row] != IGNORE)
    reference = None
    if batch.references is not None:
        reference = batch.references[row][is_target_S].to(policy_BS.dtype)
    return _PlainAnswer(policy_BS[row][is_target_S], reference)


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
            for name, block in self.blocks.items():
                # Nothing trains it: BatchNorm reads its statistics and moves none.
                for module in updating_modules(block, name).values():
                    module.train(False)

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
