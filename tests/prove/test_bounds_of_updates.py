"""How far rounding of gradients may move parameters: small gradients have updates that depend on it."""

from __future__ import annotations

import torch

from tests.prove.test_proof import small_run
from weft.prove.bounds import MOST_RATES
from weft.prove.proof import reference_bounds
from weft.prove.reference_trace import TensorKey
from weft.prove.subject import Subject

NAME = "layer0.mlp.down.weight"


def test_an_entry_may_move_by_the_relative_rounding_of_its_gradient():
    bounds = reference_bounds(Subject.of(small_run("--mesh dp2"), steps=2), skipped=frozenset())
    free = bounds.free_updates(NAME, 1)
    key = TensorKey(1, "clip", f"{NAME} clipped gradient")
    gradient = bounds.plain.values[key].double().abs()
    limit = bounds.bound(key) * bounds.scale(key)
    most = MOST_RATES * bounds.plain.lrs[1]
    torch.testing.assert_close(free, most * (limit / gradient).clamp(max=1))
    assert float(free.median()) < 1e-3 * most, "the update of most entries does not depend on it"
    assert bool((bounds.free_updates(NAME, 2) >= free).all())
    assert bounds.free_updates(NAME, 0) is None
