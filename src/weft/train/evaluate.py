"""Owns evaluation: the mean loss per target over a source that is not trained on, the same number under any layout."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weft.data.order import Ints
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.train.feed import Feed

NO_SAMPLE = -1
"""Stands where the last batch has no sample left: it is fed one without targets, so that every batch is as large."""


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found, the same on every rank.

    Attributes:
        loss: mean over all targets, nats.
        targets: how many there are.
        seconds: that it took on this rank.
    """

    loss: float
    targets: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluation:
    """The validation samples in their order, forward through the layout that trains.

    Args:
        feed: gives this rank its part of any samples.
        most_batches: batches of the global size that are taken; 0 for all.
    """

    def __init__(self, model: ParallelModel, feed: Feed, *, most_batches: int) -> None:
        self.model, self.feed, self.most_batches = model, feed, most_batches
        self.player = ForwardPlayer(model)

    def __call__(self) -> EvalReport:
        """Evaluate; every rank must call."""
        start, comm = time.perf_counter(), self.model.comm
        total = torch.zeros(2, dtype=torch.float64, device=comm.device)
        counts = comm.index("tp") == 0 and comm.index("pp") == self.model.plan.table.stage_to_rank[-1]
        for chosen in batches_of(self.feed.samples.num_samples, self.feed.global_size, most=self.most_batches):
            micro: list[Batch] = self.feed.micro_batches(chosen)
            loss = self.player.loss(micro)
            targets = torch.stack([batch.num_targets() for batch in micro]).sum()
            if counts:
                total += torch.stack((loss, targets.double()))
        loss_sum, targets_sum = comm.all_reduce(total, tuple(name for name, _ in comm.mesh.axes)).tolist()
        return EvalReport(loss_sum / max(targets_sum, 1), int(targets_sum), time.perf_counter() - start)


def batches_of(num_samples: int, size: int, *, most: int) -> Iterator[Ints]:
    """Samples 0, 1, ... in batches of `size`, the last one filled up; at most `most` batches, 0 for all."""
    starts = range(0, num_samples, size)
    for start in starts[:most] if most else starts:
        chosen = np.arange(start, start + size, dtype=np.int64)
        chosen[chosen >= num_samples] = NO_SAMPLE
        yield chosen


def eval_event(step: int, report: EvalReport) -> dict[str, Any]:
    """One line of events.jsonl; `tokens` counts targets over all ranks."""
    return {
        "event": "eval",
        "step": step,
        "loss": report.loss,
        "perplexity": report.perplexity,
        "tokens": report.targets,
        "seconds": report.seconds,
    }
