"""The loss of preference pairs (direct preference optimization and its relatives), and families whose chain ends with it.

Note [Pairs]
    A row holds pairs: document 2k is the chosen answer behind its prompt, 2k + 1 the rejected one.
    The loss of a pair is a function of sums over the targets of both documents: of log-probabilities
    under the model (minus those under the reference model), and of targets; see Note [Pair losses].
    It is no sum over targets: ranks that share a sequence (cp) first add their parts of each
    document's sums (`PositionSum`), then each computes 1 / cp of the loss of all pairs.
    `Batch.pairs` marks one token of each pair, so that the pairs of a step are counted once: a target
    of the chosen answer. Of single answers (`unpaired`) document 2k is the answer, 2k + 1 another one
    behind its prompt; a mark in the latter says that the answer is not desired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.config.schema import DpoConfig
from weft.models import Family, builders_of
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.head_output import token_losses
from weft.models.common.layers import Loss
from weft.models.common.lazy_blocks import Builders
from weft.models.common.pair_losses import AnswerSums, answer_rewards, kto_losses, pair_losses

LOSS_BLOCK = "loss"
REQUIREMENT = "preference pairs"
NUM_REWARD_SUMS = 6
"""Entries of `reward_sums`."""


class PositionSum(nn.Module):
    """Seam: sums of documents over the ranks that share each sequence; identity on one device.

    Attributes:
        num_ranks: that share each sequence.
    """

    num_ranks = 1

    def forward(self, sums: Tensor) -> Tensor:
        return sums


class PreferenceLoss(Loss):
    """Sum over pairs of their losses; see Note [Pairs].

    Attributes:
        dpo: which loss, and its constants.
        on_token_losses: called with each micro-batch and its losses_BS: how reference
            log-probabilities are computed. While it is set the loss is 0.
        z0: of kto, see Note [Unpaired answers]; NaN until it is known; None: the forward gives the sum
            that it is the mean of.
        on_rewards: called in each forward that gives a loss of answers with `reward_sums`, where it is
            set.
    """

    takes_token_losses = True

    def __init__(self, dpo: DpoConfig) -> None:
        super().__init__()
        self.dpo = dpo
        self.position_sum: nn.Module = PositionSum()
        self.on_token_losses: Callable[[Batch, Tensor], None] | None = None
        self.z0: Tensor | float | None = math.nan
        self.on_rewards: Callable[[Tensor], object] | None = None

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({REQUIREMENT})

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """losses_BS: -log p of each target, 0 where it does not count; float32, or float64."""
        return token_losses(logits, targets)

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """logits_BSV, or the losses_BS of a head that computes them -> scalar."""
        losses_BS = self.token_losses(logits, batch.targets)
        if self.on_token_losses is not None:
            self.on_token_losses(batch, losses_BS)
            # a loss that a backward may run through, and of which nothing depends on the
            # references that are being computed
            return losses_BS.sum() * 0
        chosen, rejected, marks = self.answer_sums(self._gains(losses_BS, batch), batch)
        if self.dpo.has_labels and self.z0 is None:
            return (rejected.logprobs * marks.sum(-1)).sum() / self.num_ranks
        self.report_rewards(
            answer_rewards(chosen, self.dpo), answer_rewards(rejected, self.dpo), marks
        )
        if self.dpo.has_labels:
            assert self.z0 is not None, "it is known"
            losses = kto_losses(chosen.logprobs, marks[..., 0], self.z0, self.dpo)
        else:
            losses = pair_losses(chosen, rejected, self.dpo)
        # each of them computes the same loss, and their gradients are summed
        return (losses * marks.sum(-1)).sum() / self.num_ranks

    @torch.no_grad()
    def report_rewards(self, chosen: Tensor, rejected: Tensor, marks: Tensor) -> None:
        """Call `on_rewards` with the sums of these rewards, [B, pairs]."""
        if self.on_rewards is not None:
            sums = reward_sums(chosen, rejected, marks, has_labels=self.dpo.has_labels)
            self.on_rewards(sums / self.num_ranks)

    def answer_sums(self, values_BS: Tensor, batch: Batch) -> tuple[AnswerSums, AnswerSums, Tensor]:
        """Sums over the targets of the chosen and of the rejected answers, [B, pairs], and marks
        [B, pairs, 2]: 1 at the marked document of each pair.
        """
        if batch.pairs is None or batch.documents is None:
            raise ValueError("the loss of preference pairs needs pairs")
        counts = batch.targets != IGNORE
        gains_BS = torch.where(counts, values_BS, 0.0)
        whole = batch.documents_of_sequences
        assert whole is not None, "pairs are documents"
        most_pairs = whole.shape[1] // 2 + 1
        dtype = values_BS.dtype
        by_token = torch.stack((gains_BS, counts.to(dtype), batch.pairs.to(dtype)))
        sums = _sum_by_document(by_token, batch.documents, 2 * most_pairs)
        # stacked: one exchange over the ranks in place of three
        gains, num_targets, marks = self.position_sum(sums).unbind(0)
        chosen = AnswerSums(gains[:, 0::2], num_targets[:, 0::2])
        rejected = AnswerSums(gains[:, 1::2], num_targets[:, 1::2])
        return chosen, rejected, marks.unflatten(1, (most_pairs, 2))

    @property
    def num_ranks(self) -> int:
        """Ranks that compute the loss of the same pairs, of which each has a part."""
        return cast(PositionSum, self.position_sum).num_ranks

    def _gains(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """Log-probabilities of targets, minus those under the reference model where there is one."""
        if not self.dpo.has_reference:
            return -losses_BS
        if batch.references is None:
            raise ValueError(f"the loss {self.dpo.loss_type} needs reference log-probabilities")
        return -losses_BS - batch.references.to(losses_BS.dtype)


def reward_sums(chosen: Tensor, rejected: Tensor, marks: Tensor, *, has_labels: bool) -> Tensor:
    """Sums over the marked pairs, float64: rewards of chosen and of rejected answers, their numbers,
    pairs whose chosen answer has the larger reward, and pairs. Of answers with labels the desired ones
    are chosen, the others rejected, and there are no pairs.
    """
    is_pair = marks.sum(-1).double()
    are_chosen, are_rejected = is_pair, is_pair
    if has_labels:
        rejected = chosen
        are_chosen, are_rejected = marks.double().unbind(-1)
        is_pair = torch.zeros_like(is_pair)
    columns = (
        chosen * are_chosen,
        rejected * are_rejected,
        are_chosen,
        are_rejected,
        (chosen > rejected) * is_pair,
        is_pair,
    )
    return torch.stack([column.sum() for column in columns])


def _sum_by_document(values: Tensor, documents_BS: Tensor, num_slots: int) -> Tensor:
    """values_NBS -> sums_NBD over the tokens of each document."""
    num, rows, _ = values.shape
    index = documents_BS.clamp(max=num_slots - 1).expand_as(values)
    sums = values.new_zeros(num, rows, num_slots)
    return sums.scatter_add(2, index, values)


@dataclass(frozen=True)
class LossFamily:
    """A family whose chain ends with another loss.

    Attributes:
        build_loss: returns the loss, a new one on each call.
    """

    plain: Family
    build_loss: Callable[[], nn.Module]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The plain family's chain with the other loss."""
        blocks = self.plain.blocks(cfg)
        blocks[LOSS_BLOCK] = self.build_loss()
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """Builders of these blocks."""
        plain = builders_of(self.plain, cfg)
        if plain is None:
            return None
        return {**plain, LOSS_BLOCK: self.build_loss}


def with_preference_loss(plain: Family, dpo: DpoConfig) -> Family:
    """The family with the loss of preference pairs."""
    return cast(Family, LossFamily(plain, partial(PreferenceLoss, dpo)))


def preference_loss_of(blocks: Mapping[str, nn.Module]) -> PreferenceLoss | None:
    """The loss of preference pairs among the blocks of a rank; None where another rank has it."""
    block = blocks.get(LOSS_BLOCK)
    if isinstance(block, PreferenceLoss):
        return block
    return None
