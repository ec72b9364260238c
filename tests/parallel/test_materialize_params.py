"""Memory for the parameters of a rank: what no machine can hold is rejected before it is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weft.errors import PlanError
from weft.parallel.model.materialize import materialize_params


def test_parameters_larger_than_the_machine_are_rejected_before_any_is_allocated() -> None:
    """Before, the allocator's error, exit code 1 and a traceback file."""
    small = torch.empty(4, device="meta")
    huge = torch.empty(2**50, device="meta")
    model: Any = SimpleNamespace(params={"a": nn.Parameter(small), "b": nn.Parameter(huge)})
    with pytest.raises(
        PlanError, match=r"got 4,503,599,627,370,512 bytes for 1,125,899,906,842,628"
    ):
        materialize_params(model, {}, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    assert model.params["a"].is_meta
