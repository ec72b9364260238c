"""Owns forwards that remember: new tokens through the stages in turn, logits of each row's last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.generate.angles import share_angles
from weft.generate.cache import look_at, remember
from weft.models.common.batch import Batch, chain
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import gather_vocabulary, run_stages
from weft.train.sample import written_with


class Decoder:
    """A model's rows of tokens as they grow. All ranks of the mesh call it alike; ranks along ep bring rows of their own.

    It takes the model over: its attention is swapped for one that keeps keys and values.
    """

    def __init__(self, model: ParallelModel, *, vocab: int) -> None:
        self.model, self.vocab = model, vocab
        self.caches = remember(model.stages)
        share_angles(model.stages)
        self.lengths: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether this rank is of the stage that yields logits."""
        return self.model.plan.table.stage_to_rank[-1] == self.model.comm.index("pp")

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Take in the next tokens of each row, one at least: logits_BV behind its last one; None before the last stage."""
        firsts = self.lengths or (0,) * len(rows)
        counts = [len(row) for row in rows]
        length = max(counts, default=1)
        padded = [[*row, *([0] * (length - len(row)))] for row in rows]
        tokens_BS = torch.tensor(padded, dtype=torch.int64, device=self.model.comm.device).view(len(rows), length)
        with torch.no_grad():  # not inference_mode: its tensors must not be written by the threads of gloo
            logits = self._forward(look_at(tokens_BS, firsts), [count - 1 for count in counts])
        self.lengths = tuple(first + count for first, count in zip(firsts, counts, strict=True))
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.model.comm.device)
        for cache in self.caches:
            cache.keep(index)
        self.lengths = tuple(self.lengths[row] for row in rows)

    def forget(self) -> None:
        """Begin anew; the memory of the caches goes."""
        for cache in self.caches:
            cache.clear()
        self.lengths = ()

    def _forward(self, batch: Batch, lasts: Sequence[int]) -> Tensor | None:
        def shape_of(stage: int) -> tuple[int, ...]:
            _, _, *width = self.model.plan.stages[stage].out
            return (*batch.inputs.shape, *(int(entry) for entry in width))

        def play(stage: int, x: Tensor) -> Tensor:
            return self._play(stage, x, batch, lasts)

        x = run_stages(self.model, batch.inputs, play=play, shape_of=shape_of)
        return gather_vocabulary(x, self.model, vocab=self.vocab) if self.is_last else None

    def _play(self, stage: int, x: Tensor, batch: Batch, lasts: Sequence[int]) -> Tensor:
        """x_BSD through a stage's blocks; the head sees each row's last token alone, and yields logits_BV."""
        for name, block in written_with(self.model.stages[stage]).items():
            if name == "head":
                rows = torch.arange(len(lasts), device=x.device)
                x = x[rows, torch.tensor(lasts, dtype=torch.int64, device=x.device)].unsqueeze(1)
            x = chain({name: block}, x, batch).x
        return x.squeeze(1) if "head" in self.model.stages[stage] else x
