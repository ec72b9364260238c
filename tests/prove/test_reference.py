"""The one-device reference of a proof computes what a plain loop of torch computes: autograd, its clipping, its AdamW."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import LR, NUM_STEPS, Case, batches, subject_of
from tests.matrix.plain import ORDERS, PLAIN, Dtypes, Order, train
from weft.prove.proof import reference

FLOAT64 = Dtypes("float64", "float64", "float64")
AS_TORCH = {"optim.betas": (0.9, 0.999), "optim.decay": "constant"}


@pytest.mark.parametrize("order", [PLAIN, ORDERS[0]], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3-moe"])
def test_losses_are_those_of_a_plain_loop(family: str, order: Order) -> None:
    """Of the first step those of the initial values, of the others those of updates, which are
    clipped, decay and are corrected for the bias of their first moments.
    """
    case = Case("", family=family, microbatches=8, layers=2)
    trace = reference(subject_of(case, values=AS_TORCH)).run_all(NUM_STEPS)
    losses = [trace.values[step, "loss", "loss"].item() for step in range(1, NUM_STEPS + 1)]
    assert losses == pytest.approx(train(case, batches(case), FLOAT64, order, lr=LR), rel=1e-12)
    assert max(trace.values[step, "clip", "clip factor"].item() for step in (1, 2)) < 1
