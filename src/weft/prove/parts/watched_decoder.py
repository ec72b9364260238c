"""A decoder that keeps what each block computes for the last token of each row; it changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.generate.decode import Decoder
from weft.models.common.batch import activation_of
from weft.parallel.model.parallelize import ParallelModel

HEAD = "head"
"""Its output are the logits, which are compared anyway."""


class TokenPlace(NamedTuple):
    """A token: the number of its prompt, and its position."""

    prompt: int
    position: int


@dataclass
class _Reading:
    """One read of rows.

    Attributes:
        places: of the token that follows each row.
        columns: of the last token of each row.
    """

    places: Sequence[TokenPlace]
    columns: Sequence[int]
    shape: tuple[int, int]


class WatchedDecoder(Decoder):
    """A decoder whose blocks are watched.

    Args:
        prompts: number of the prompt of each row of this rank.

    Attributes:
        outputs: (place of the token that follows, block) -> x_D of the last token. Nothing where
            ranks share the columns of a sequence, or the model has no caches.
    """

    def __init__(
        self, model: ParallelModel, *, vocab: int, max_positions: int | None, prompts: Sequence[int]
    ) -> None:
        super().__init__(model, vocab=vocab, max_positions=max_positions)
        self.prompts = list(prompts)
        self.outputs: dict[tuple[TokenPlace, str], Tensor] = {}
        self._reading: _Reading | None = None
        for name, block in model.blocks.items():
            block.register_forward_hook(partial(self._keep, name))

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Read tokens as `Decoder.read` does, and note what was read."""
        # Before the read, which makes the rows longer.
        starts = self.lengths or [0] * len(rows)
        counts = [len(row) for row in rows]
        places = []
        for prompt, start, count in zip(self.prompts, starts, counts, strict=True):
            places.append(TokenPlace(prompt, start + count))
        self._reading = None
        if self.has_caches and rows and self._num_sequence_parts == 1:
            columns = [count - 1 for count in counts]
            self._reading = _Reading(places, columns, (len(rows), max(counts)))
        return super().read(rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep some rows as `Decoder.keep_rows` does."""
        self.prompts = [self.prompts[row] for row in rows]
        super().keep_rows(rows)

    def _keep(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep the output of a block, where this rank has all columns of it."""
        x = activation_of(output)
        reading = self._reading
        is_whole = (
            reading is not None
            and isinstance(x, Tensor)
            and x.dim() == 3
            and tuple(x.shape[:2]) == reading.shape
        )
        if name == HEAD or reading is None or not is_whole:
            return
        for row, (place, column) in enumerate(zip(reading.places, reading.columns, strict=True)):
            self.outputs[place, name] = x[row, column].detach().clone()
