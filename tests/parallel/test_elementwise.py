"""The trial step that tells elementwise optimizers from others."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from weft.errors import PlanError, first_line, type_and_message
from weft.parallel.zero.elementwise import elementwise_state_keys


class RaisesWithoutAMessage(SGD):
    def step(self, closure=None):
        raise ValueError


def test_an_optimizer_that_raises_without_a_message_is_rejected():
    with pytest.raises(PlanError, match="it raises ''"):
        elementwise_state_keys(RaisesWithoutAMessage, device=torch.device("cpu"))


def test_first_line_and_type_of_errors_with_and_without_a_message():
    assert first_line(ValueError("\n too large\nmore")) == "too large"
    assert type_and_message(ValueError("too large\nmore")) == "ValueError: too large"
    assert first_line(ValueError()) == ""
    assert type_and_message(ValueError()) == "ValueError"
