"""Batches, extra results of blocks, and the targets of multi-token prediction."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from weft.models.common.batch import (
    IGNORE,
    Batch,
    Extra,
    chain,
    forward,
    token_batch,
    with_later_targets,
)


class Add(nn.Module):
    """Adds a number to x, and may return extras."""

    def __init__(
        self, number: float, *, loss: float | None = None, load: list[int] | None = None
    ) -> None:
        super().__init__()
        self.number, self.loss, self.load = number, loss, load

    def forward(self, x: Tensor, batch: Batch) -> Tensor | Extra:
        total = x + self.number
        if self.loss is None and self.load is None:
            return total
        loss = None
        if self.loss is not None:
            loss = x.sum() * self.loss
        load = None
        if self.load is not None:
            load = torch.tensor(self.load)
        return Extra(total, loss, load)


def batch_of(x: Tensor) -> Batch:
    nothing = torch.zeros(1, dtype=torch.int64)
    return Batch(x, nothing, nothing)


BLOCKS = {
    "a": Add(1.0),
    "b": Add(2.0, loss=10.0, load=[1, 2]),
    "c": Add(3.0, loss=100.0),
    "d": Add(4.0, load=[3, 4]),
}


def test_a_chain_hands_on_x_and_sums_losses_and_keeps_loads_by_name():
    x = torch.zeros(2)
    out = chain(BLOCKS, x, batch_of(x))
    assert out.x.tolist() == [10.0, 10.0]
    assert out.loss == 10 * 2 + 100 * 6
    loads = {name: load.tolist() for name, load in out.loads.items()}
    assert loads == {"b": [1, 2], "d": [3, 4]}


def test_a_chain_of_plain_blocks_has_neither():
    x = torch.zeros(2)
    actual = chain({"a": BLOCKS["a"]}, x, batch_of(x))[1:]
    assert actual == (None, {})


def test_the_whole_loss_has_the_extra_losses_and_what_is_no_loss_has_not():
    actual = forward(BLOCKS, batch_of(torch.tensor(0.0)))
    assert actual == 10 + 10 * 1 + 100 * 3
    values = forward(BLOCKS, batch_of(torch.zeros(2))).tolist()
    assert values == [10.0, 10.0]


def test_extra_losses_have_gradients():
    x = torch.tensor(1.0, requires_grad=True)
    forward(BLOCKS, batch_of(x)).backward()
    assert x.grad == 1 + 10 + 100


INPUTS = torch.tensor([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
TARGETS = torch.tensor([[2, 3, 4, 5, 6, 7], [12, IGNORE, 14, 15, 16, IGNORE]])


def test_later_targets_are_the_targets_after_and_next_inputs_the_inputs_after():
    batch = with_later_targets(token_batch(INPUTS, TARGETS))
    assert batch.next_inputs.tolist() == [[2, 3, 4, 5, 6, 7], [12, 13, 14, 15, 16, 0]]
    assert batch.later_targets.tolist() == [
        [3, 4, 5, 6, 7, IGNORE],
        [IGNORE, 14, 15, 16, IGNORE, IGNORE],
    ]


def test_nothing_is_predicted_beyond_a_document():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 4, 4]])
    ends = torch.tensor([[2, IGNORE, 4, 5, IGNORE, 7], [12, IGNORE, 14, 99, 16, IGNORE]])
    batch = with_later_targets(Batch(INPUTS, ends, INPUTS, documents))
    assert batch.next_inputs.tolist() == [[2, 0, 4, 5, 0, 7], [12, 13, 14, 99, 16, 0]]
    assert batch.later_targets.tolist() == [
        [IGNORE, IGNORE, 5, IGNORE, IGNORE, IGNORE],
        [IGNORE, 14, 99, IGNORE, IGNORE, IGNORE],
    ]


@pytest.mark.parametrize("width", [1, 2])
def test_the_shortest_sequences_have_later_targets_too(width: int):
    inputs = INPUTS[:, :width]
    targets = TARGETS[:, :width]
    batch = with_later_targets(token_batch(inputs, targets))
    last_targets = batch.later_targets[:, -1]
    assert last_targets.tolist() == [IGNORE, IGNORE]
    assert batch.next_inputs.shape == (2, width)
    assert batch.later_targets.shape == (2, width)


def test_rows_and_maps_take_every_field_along():
    values = [INPUTS + number for number, _ in enumerate(fields(Batch))]
    batch = Batch(*values)
    row = batch.rows(slice(1, 2))
    for name, x in vars(batch).items():
        assert torch.equal(getattr(row, name), x[1:])
    plain_row = token_batch(INPUTS, TARGETS).rows(slice(0, 1))
    assert plain_row.later_targets is None
