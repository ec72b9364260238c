"""Losses of pairs as functions of sums over each answer: sigmoid (DPO), hinge, IPO, SimPO, ORPO; of single answers: KTO.

Note [Pair losses]
    With S the sum over the targets of an answer of log-probability under the model minus that under
    the reference model, M its mean (S / number of targets), and s the logistic function:

    sigmoid  -log s(beta (S_chosen - S_rejected))              Rafailov et al. 2023, equation 7
    hinge    max(0, 1 - beta (S_chosen - S_rejected))          Zhao et al. 2023; Liu et al. 2023
    ipo      (M_chosen - M_rejected - 1 / (2 beta))^2          Azar et al. 2023, equation 17
    simpo    -log s(beta (M_chosen - M_rejected) - gamma)      Meng et al. 2024, equation 6
    orpo     -M_chosen - beta log s(log(odds_chosen / odds_rejected)), odds = p / (1 - p),
             p = exp(M)                                        Hong et al. 2024, equations 3 to 7

    simpo and orpo have no reference model: S is a sum of log-probabilities. Label smoothing e (of
    sigmoid and simpo) is the probability that a label is wrong: (1 - e) (-log s(x)) + e (-log s(-x)),
    which is -log s(x) + e x.

Note [Unpaired answers]
    kto      w (1 - s(beta (S - z0))) of a desired answer, w (1 - s(beta (z0 - S))) of another one,
             w its weight                                      Ethayarajh et al. 2024, equation 8

    z0 estimates the divergence of the model from the reference: the mean over the answers of a step,
    at least 0 and without gradient, of S of the same prompt with the answer to another prompt. That
    one is the next in the data, whatever the batch is: so the reference is computed once, and z0 is
    the same for every layout. In a row it takes the place of the rejected answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.schema import DpoConfig, PairLossType


@dataclass(frozen=True)
class AnswerSums:
    """Sums over the targets of each answer; an answer without targets has sum 0.

    Attributes:
        logprobs: under the model, minus those under the reference model where the loss has one.
        num_targets: how many there are.
    """

    logprobs: Tensor
    num_targets: Tensor

    @property
    def means(self) -> Tensor:
        """Mean over the targets."""
        return self.logprobs / self.num_targets.clamp(min=1)


def pair_losses(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    """The loss of each pair; see Note [Pair losses]."""
    return _PAIR_LOSSES[dpo.loss_type](chosen, rejected, dpo)


def answer_rewards(answers: AnswerSums, dpo: DpoConfig) -> Tensor:
    """The reward of each answer: beta times its sum, or its mean where there is no reference model."""
    return dpo.beta * (answers.logprobs if dpo.has_reference else answers.means)


def kto_losses(answers: Tensor, is_desired: Tensor, z0: Tensor | float, dpo: DpoConfig) -> Tensor:
    """The loss of each answer.

    Args:
        answers: S of each.
        is_desired: 1 where the answer is desired, else 0.
    """
    signs = 2 * is_desired - 1
    weights = dpo.undesirable_weight + is_desired * (dpo.desirable_weight - dpo.undesirable_weight)
    return weights * torch.sigmoid(-dpo.beta * signs * (answers - z0))


def _sigmoid(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    scores = dpo.beta * (chosen.logprobs - rejected.logprobs)
    return _smoothed(scores, dpo.label_smoothing)


def _hinge(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    return F.relu(1 - dpo.beta * (chosen.logprobs - rejected.logprobs))


def _ipo(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    return (chosen.means - rejected.means - 1 / (2 * dpo.beta)).square()


def _simpo(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    scores = dpo.beta * (chosen.means - rejected.means) - dpo.gamma
    return _smoothed(scores, dpo.label_smoothing)


def _orpo(chosen: AnswerSums, rejected: AnswerSums, dpo: DpoConfig) -> Tensor:
    log_ratios = _log_odds(chosen.means) - _log_odds(rejected.means)
    return -chosen.means - dpo.beta * F.logsigmoid(log_ratios)


def _smoothed(scores: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid of scores whose labels are wrong with this probability."""
    if not label_smoothing:
        return -F.logsigmoid(scores)
    return label_smoothing * scores - F.logsigmoid(scores)


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)). Where p rounds to 1, as of a sum without targets, it and its gradient stay
    finite.
    """
    largest = -(torch.finfo(log_p.dtype).eps ** 2)
    # eps squared and not eps: log(1 - p) of a probability just below 1 keeps its digits in expm1
    below_zero = log_p.clamp(max=largest)
    return below_zero - torch.log(-torch.expm1(below_zero))


_PairLoss = Callable[[AnswerSums, AnswerSums, DpoConfig], Tensor]
_PAIR_LOSSES: Mapping[PairLossType, _PairLoss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
