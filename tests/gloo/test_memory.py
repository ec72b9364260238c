"""Memory of ranks in processes: ZeRO states equal the formulas up to padding; activations under recompute and cp."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.memory import (
    POLICIES,
    ZERO_STAGES,
    MeasureLayer,
    Setting,
    measure_states,
    predicted_layer_bytes,
)

from weft.testing import run_ranks

FIELDS: dict[str, Any] = {
    "layers": 3,
    "dim": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 192,
    "vocab": 256,
}
LAYER: dict[str, Any] = {"layers": 1, "dim": 64, "heads": 8, "kv_heads": 4, "ffn": 176}
PADDING = 0.005
"""Of the bytes: up to d - 1 entries a unit. The goal is 5%."""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        policy if policy == "mixed" else pytest.param(policy, marks=pytest.mark.slow)
        for policy in POLICIES
    ],
)
def test_the_memory_of_a_rank_between_steps_equals_the_formula(policy: str, zero: Any) -> None:
    setting = Setting(zero, POLICIES[policy], degree=3)
    measured = measure_states(setting, FIELDS)
    assert measured.bytes_per_param == pytest.approx(setting.predicted_bytes(), rel=PADDING)


def test_the_formulas_equal_the_papers_for_its_dtypes() -> None:
    params = 2
    grads = 4  # float32
    optimizer = 12
    for degree in (2, 8, 64):
        theory = [
            Setting(zero, POLICIES["mixed"], degree).predicted_bytes() for zero in ZERO_STAGES
        ]
        assert theory == [
            params + grads + optimizer,
            params + grads + optimizer / degree,
            params + (grads + optimizer) / degree,
            16 / degree,  # float32 parameters, gradients and two moments
        ]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", ["", "cp2", "cp4"])
def test_a_layer_saves_activations_of_its_sequence_shard_under_cp_and_recompute(
    recompute: Any, mesh: str
) -> None:
    num_tokens = 64
    cp_size = int(mesh.removeprefix("cp") or 1)
    expected = predicted_layer_bytes(recompute, LAYER, num_tokens // cp_size)
    for saved in run_ranks(mesh, MeasureLayer(recompute, tuple(LAYER.items()), num_tokens)):
        assert saved == expected
