"""Owns the way from samples on disk to the micro-batches of a step on this rank's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.data.order import Ints, layout_of, places_of_step
from weft.data.samples import Samples
from weft.models.common.batch import IGNORE, Batch, with_later_targets


@dataclass(frozen=True)
class Feed:
    """Which samples a data rank takes, a pure function of (seed, step) and of its place.

    Attributes:
        index, degree: place of this rank along the data axes, and how many ranks there are.
        context_index, context_degree: place of this rank among those that share each sequence, and how many there are.
        later: whether the model reads later targets, too.
    """

    samples: Samples
    global_size: int
    micro_size: int
    seed: int
    index: int
    degree: int
    device: torch.device
    context_index: int = 0
    context_degree: int = 1
    later: bool = False

    def batches(self, step: int) -> list[Batch]:
        """Micro-batches of step `step` (from 0), in the order in which the schedule numbers them."""
        return self.micro_batches(samples_of(self.samples, step, global_size=self.global_size, seed=self.seed))

    def micro_batches(self, chosen: Ints) -> list[Batch]:
        """This rank's micro-batches of a batch of these samples; in place of one below 0 stands one without targets."""
        mine = layout_of(chosen, index=self.index, degree=self.degree, micro_size=self.micro_size)
        whole = whole_batch(self.samples, mine, later=self.later)
        held = whole.columns(index=self.context_index, degree=self.context_degree).map(lambda x: x.to(self.device))
        return [held.rows(slice(start, start + self.micro_size)) for start in range(0, mine.size, self.micro_size)]


def samples_of(samples: Samples, step: int, *, global_size: int, seed: int) -> Ints:
    """Numbers of the samples of step `step` (from 0), the same on every rank."""
    return samples.at(places_of_step(step, global_size), seed=seed)


def whole_batch(samples: Samples, chosen: Ints, *, later: bool) -> Batch:
    """These samples, nothing cut; [any shape] counts as flat."""
    arrays = samples.read(chosen.clip(min=0))
    arrays.targets[chosen.ravel() < 0] = IGNORE
    batch = Batch(**{name: torch.from_numpy(array) for name, array in vars(arrays).items() if array is not None})
    return with_later_targets(batch) if later else batch
