"""Evaluation: mean loss per target over validation data, the same number under every layout."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.dimension import replicated_axes
from weft.data.order import Ints
from weft.data.samples import num_evaluated
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.preference import LOSS_BLOCK, NUM_REWARD_SUMS, preference_loss_of
from weft.models.common.score_losses import counts_right
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.parallel.pp import AXIS as PP
from weft.train.data_loader import DataLoader
from weft.train.kl_estimate import KlEstimate
from weft.train.rewards import Rewards, rank_sums, reward_sums_of

NO_SAMPLE = -1
"""Fills up the last batch: a sample without targets, so that every batch has the same size."""

MAX_EXPONENT = 700


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation, the same on every rank.

    Attributes:
        loss: mean over all targets, nats.
        targets: number of targets.
        seconds: duration on this rank.
        num_bytes: bytes of the targets' text; 0 where they are not counted.
        has_perplexity: whether the loss is that of tokens or classes, not of preference pairs or of
            arrays.
        accuracy: share of texts whose class, or of pairs whose better answer, has the largest score;
            None: nothing is scored.
        rewards: of the answers; None: the loss is not of answers.
    """

    loss: float
    targets: int
    seconds: float
    num_bytes: int = 0
    has_perplexity: bool = True
    accuracy: float | None = None
    rewards: Rewards | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of the targets' text; None where there are none."""
        if not self.num_bytes:
            return None
        return self.loss * self.targets / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that is beyond a float."""
        if self.loss < MAX_EXPONENT:
            return math.exp(self.loss)
        return math.inf


class Evaluation:
    """Forward passes over the validation samples, in their order, on the layout that trains.

    Args:
        loader: loads this rank's part of given samples.
        most_batches: batches of the global size per evaluation; 0 for all.
        num_bytes_V: bytes of the text of each token; None: they are not counted.
        kl: estimates z0 of each batch; None where the loss needs none.
    """

    def __init__(
        self,
        model: ParallelModel,
        loader: DataLoader,
        *,
        most_batches: int,
        num_bytes_V: Tensor | None = None,
        kl: KlEstimate | None = None,
    ) -> None:
        self.kl = kl
        self.num_bytes_V = num_bytes_V
        self.model = model
        self.loader = loader
        self.most_batches = most_batches
        self.player = ForwardPlayer(model)
        self.scores = counts_right(model.blocks.get(LOSS_BLOCK))
        self.answers = preference_loss_of(model.blocks)

    def __call__(self) -> EvalReport:
        """Evaluate; every rank must call it."""
        start = time.perf_counter()
        comm = self.model.comm
        is_first_copy = comm.index(replicated_axes()) == 0
        last_stage_rank = self.model.plan.table.stage_to_rank[-1]
        is_last_stage = comm.index(PP) == last_stage_rank
        has_perplexity = True
        local = torch.zeros(5 + NUM_REWARD_SUMS, dtype=torch.float64, device=comm.device)
        num_samples = num_evaluated(self.loader.samples, self.loader.global_size)
        for chosen in batches_of(num_samples, self.loader.global_size, most=self.most_batches):
            micro_batches: list[Batch] = self.loader.micro_batches(chosen)
            first = micro_batches[0]
            has_perplexity = first.pairs is None and first.fields is None
            if self.kl is not None:
                self.kl.update(micro_batches)
            with self._counted() as num_right, reward_sums_of(self.answers) as rewards:
                loss = self.player.loss(micro_batches)
            targets = torch.stack([batch.num_targets() for batch in micro_batches]).sum()
            # Ranks along tp and the like compute the same loss again, and other stages none.
            if is_first_copy and is_last_stage:
                num_bytes = sum(self._num_bytes(batch) for batch in micro_batches)
                is_scored = loss.new_tensor(self.scores is not None)
                sums = (loss, targets.double(), loss.new_tensor(num_bytes), num_right, is_scored)
                local[:5] += torch.stack(sums)
                local[5:] += rank_sums(comm, rewards, fixed_order=False)
        totals = comm.sum_world(local).tolist()
        loss_sum, num_targets, num_bytes, num_right_texts, is_scored_world, *reward_totals = totals
        comm.check_connections()
        return EvalReport(
            loss=loss_sum / max(num_targets, 1),
            targets=int(num_targets),
            seconds=time.perf_counter() - start,
            num_bytes=0 if is_scored_world else int(num_bytes),
            has_perplexity=has_perplexity and not is_scored_world,
            accuracy=num_right_texts / max(num_targets, 1) if is_scored_world else None,
            rewards=Rewards.of_sums(reward_totals) if any(reward_totals) else None,
        )

    @contextmanager
    def _counted(self) -> Iterator[Tensor]:
        """The number of texts or pairs that this rank has judged rightly, a sum until the end."""
        num_right = torch.zeros((), dtype=torch.float64, device=self.model.comm.device)
        if self.scores is not None:
            self.scores.on_right = lambda number: num_right.add_(number)
        try:
            yield num_right
        finally:
            if self.scores is not None:
                self.scores.on_right = None

    def _num_bytes(self, batch: Batch) -> int:
        """Bytes of the text of the targets that count; a token that the tokenizer does not know has
        none.
        """
        if self.num_bytes_V is None:
            return 0
        targets = batch.targets[batch.targets != IGNORE]
        known = targets[targets < len(self.num_bytes_V)]
        return int(self.num_bytes_V[known].sum())


def batches_of(num_samples: int, size: int, *, most: int) -> Iterator[Ints]:
    """Samples 0, 1, ... in batches of `size`, the last one filled up; at most `most` batches, 0 for
    all.
    """
    starts = range(0, num_samples, size)
    if most:
        starts = starts[:most]
    for start in starts:
        chosen = np.arange(start, start + size, dtype=np.int64)
        chosen[chosen >= num_samples] = NO_SAMPLE
        yield chosen


def eval_event(step: int, report: EvalReport) -> dict[str, Any]:
    """The `eval` event of events.jsonl; `tokens` counts targets, or pairs, over all ranks."""
    event: dict[str, Any] = {"event": "eval", "step": step, "loss": report.loss}
    if report.has_perplexity:
        event["perplexity"] = report.perplexity
    if report.accuracy is not None:
        event["accuracy"] = report.accuracy
    if report.rewards is not None:
        event |= report.rewards.fields()
    event["tokens"] = report.targets
    event["seconds"] = report.seconds
    return event
