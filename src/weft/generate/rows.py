"""Owns the loop from prompts to tokens: rows grow in step, each until it ends; every rank knows every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import span
from weft.generate.decode import Decoder
from weft.generate.draw import Place


@dataclass
class Row:
    """One text under way.

    Attributes:
        sample: its number among those of the same prompt.
        tokens: what was drawn so far.
    """

    prompt: tuple[int, ...]
    sample: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """Of the next token."""
        return Place(self.sample, len(self.prompt) + len(self.tokens))


Choose = Callable[[Tensor, Place], int]
"""From logits_V to a token."""

IsOver = Callable[[Row], bool]
"""Asked of each row that has just got a token; it must answer alike on every rank."""


def grow(decoder: Decoder, rows: Sequence[Row], *, choose: Choose, is_over: IsOver) -> Iterator[tuple[Row, ...]]:
    """Give each row one token after the other until all are over; yields the rows that have just got one.

    Every rank of the mesh must iterate to the end, with equal rows. Ranks along ep share the rows out, one after another.
    """
    comm = decoder.model.comm
    shares = [range(*span(len(rows), comm.degree("ep"), index)) for index in range(comm.degree("ep"))]
    alive = [[rows[number] for number in share] for share in shares]
    here = comm.index("ep")
    logits = decoder.read([row.prompt for row in alive[here]])
    while True:
        drawn = None if logits is None else [choose(*pair) for pair in zip(logits, _places(alive[here]), strict=True)]
        grown = tuple(row for share in alive for row in share)
        tokens = _tell_all(drawn, [len(share) for share in alive], decoder)
        for row, token in zip(grown, tokens, strict=True):
            row.tokens.append(token)
        over = {id(row) for row in grown if is_over(row)}
        yield grown
        if len(over) == len(grown):
            return
        if over & set(map(id, alive[here])):
            decoder.keep([place for place, row in enumerate(alive[here]) if id(row) not in over])
        alive = [[row for row in share if id(row) not in over] for share in alive]
        logits = decoder.read([row.tokens[-1:] for row in alive[here]])


def _places(rows: Sequence[Row]) -> list[Place]:
    return [row.place for row in rows]


def _tell_all(drawn: Sequence[int] | None, counts: Sequence[int], decoder: Decoder) -> list[int]:
    """Every rank's tokens, in the order of rows, from those that the last stage has drawn."""
    comm: Comm = decoder.model.comm
    own = torch.tensor(drawn or [0] * counts[comm.index("ep")], dtype=torch.int64, device=comm.device)
    if own.numel():
        own = comm.broadcast_(own, "pp", root=decoder.model.plan.table.stage_to_rank[-1])
    return [int(token) for token in comm.all_gather(own, "ep", sizes=counts)]
