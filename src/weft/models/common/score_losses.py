"""Losses of texts that are scored at their last token: cross entropy of classes, and of pairs the loss of a reward model.

Note [Scores of texts]
    A head for labels gives scores of each token. Those of the last token of a text count, which has
    seen all of it, as in transformers' `...ForSequenceClassification`: the target there is the number
    of the class, and all other targets are IGNORE. A reward model has one score, r, and

        loss of a pair = -log sigmoid(r_chosen - r_rejected)       Ouyang et al. 2022, equation 1

    over documents 2k and 2k + 1 of a row: see Note [Pairs] in preference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.schema import DpoConfig, LossName
from weft.models import Family
from weft.models.common.batch import Batch
from weft.models.common.layers import Loss
from weft.models.common.preference import LossFamily, PreferenceLoss

REWARD: LossName = "reward"

OnRight = Callable[[Tensor], object]
"""Called with the number of texts or pairs of a micro-batch that are judged rightly, float64."""


class ClassLoss(Loss):
    """Sum of the cross entropy of the classes of texts; see Note [Scores of texts].

    Attributes:
        on_right: called in each forward, where it is set.
    """

    takes_token_losses = False

    def __init__(self) -> None:
        super().__init__()
        self.on_right: OnRight | None = None

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({"classes"})

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """scores_BSL -> scalar."""
        if self.on_right is not None:
            is_right = logits.argmax(-1) == batch.targets  # no class is IGNORE
            self.on_right(is_right.sum().double())
        return super().forward(logits, batch)


class RewardLoss(PreferenceLoss):
    """Sum over pairs of the loss of a reward model; see Note [Scores of texts].

    Attributes:
        on_right: as of `ClassLoss`; of a pair the chosen answer has the larger score.
    """

    takes_token_losses = False

    def __init__(self) -> None:
        super().__init__(DpoConfig())
        self.on_right: OnRight | None = None

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({"rewards"})

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        """scores_BS1 -> scalar."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen, rejected, marks = self.answer_sums(logits.squeeze(-1).to(wide), batch)
        self.report_rewards(chosen.logprobs, rejected.logprobs, marks)
        margins = chosen.logprobs - rejected.logprobs
        if self.on_right is not None:
            self.on_right(((margins > 0) * marks.sum(-1)).sum().double() / self.num_ranks)
        # pairs without a mark, as those of padding, count 0
        losses: Tensor = -F.logsigmoid(margins) * marks.sum(-1)
        return losses.sum() / self.num_ranks


LOSSES: Mapping[LossName, Callable[[], nn.Module]] = {"classify": ClassLoss, REWARD: RewardLoss}


def with_score_loss(plain: Family, loss: LossName) -> Family:
    """The family with the loss of scores of this name; the plain family for any other loss."""
    build = LOSSES.get(loss)
    return plain if build is None else cast(Family, LossFamily(plain, build))


def counts_right(block: nn.Module | None) -> ClassLoss | RewardLoss | None:
    """The loss of scores that a block is; None for any other block."""
    return block if isinstance(block, ClassLoss | RewardLoss) else None
