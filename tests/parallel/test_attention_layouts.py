"""A model with windows, soft-cap, sinks and one bias per head trains on every layout as on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix.layouts import (
    LR,
    SEED,
    TOLERANCE,
    Case,
    adamw,
    batches,
    on_one_device,
    shallow,
)
from weft.comm.comm import Comm
from weft.core.attention_mask import AttentionMask
from weft.core.model_config import ModelConfig
from weft.models import FAMILIES
from weft.models.common.attention import Attend
from weft.prove.layout import run_layout
from weft.prove.oracle import one_device
from weft.prove.trace import RankTrace, differences, uncovered
from weft.testing import run_ranks

LLAMA = FAMILIES["llama3"]


@dataclass(frozen=True)
class WindowedFamily:
    """LLaMA whose even layers have a window and sinks, whose odd ones a soft-cap and one bias per
    head.
    """

    Config: Any = LLAMA.Config

    @property
    def AXES(self) -> dict[str, tuple[Any, ...]]:
        return {
            **LLAMA.AXES,
            "layer*.attn.attend.sinks": ("heads",),
            "layer*.attn.attend.head_bias": ("heads",),
        }

    def axes(self, config: Any) -> dict[str, tuple[Any, ...]]:
        return self.AXES

    def ties(self, cfg: ModelConfig) -> dict[str, str]:
        return LLAMA.ties(cfg)

    def init(self, cfg: ModelConfig) -> dict[str, Any]:
        draws = {
            "layer*.attn.attend.sinks": ("normal", 1.0),
            "layer*.attn.attend.head_bias": ("normal", 0.3),
        }
        return {**LLAMA.init(cfg), **draws}

    def blocks(self, cfg: ModelConfig) -> dict[str, nn.Module]:
        blocks = LLAMA.blocks(cfg)
        for layer in range(cfg.layers):
            heads = nn.Parameter(torch.zeros(cfg.heads))
            if layer % 2 == 0:
                attend = Attend(mask=AttentionMask(window=3), sinks=heads)
            else:
                attend = Attend(softcap=0.5, scale=0.4, head_bias=heads)
            blocks[f"layer{layer}"].attn.attend = attend
        return blocks


FAMILY = WindowedFamily()


@dataclass(frozen=True)
class RankSteps:
    """What one rank of a case computes."""

    case: Case

    def __call__(self, comm: Comm) -> RankTrace:
        steps = batches(self.case)
        return run_layout(
            FAMILY,
            self.case.config,
            steps,
            plan=self.case.plan,
            comm=comm,
            seed=SEED,
            optimizer=adamw,
            lr=LR,
        )


CASES = (
    Case("tp2", microbatches=2),
    Case("tp2", sequence=True, microbatches=2),
    Case("cp2", microbatches=2, documents=True),
    Case("cp2", context="allgather", microbatches=2),
    Case("cp4", context="ulysses", microbatches=2, documents=True),
    Case("cp2 tp2", grouped=True, microbatches=2),
    Case("pp2"),
    Case("pp2 cp2", documents=True),
    Case("dp2", zero=3, microbatches=2),
)


@pytest.mark.parametrize("case", [shallow(case) for case in CASES], ids=str)
def test_layout_trains_a_model_with_attention_features_as_one_device_does(case: Case) -> None:
    alone = on_one_device(case)
    right = one_device(
        FAMILY,
        alone.config,
        batches(alone),
        seed=SEED,
        dtype=torch.float64,
        optimizer=adamw,
        clip=alone.clip,
        lr=LR,
    )
    ranks = run_ranks(case.mesh, RankSteps(case))
    assert not list(uncovered(right[0].params, ranks))
    found = differences(right, ranks, lr=LR)
    wrong = [each for each in found if not each.relative <= TOLERANCE]
    assert not wrong, f"{case}: first of {len(wrong)}: {wrong[0]}"
    learned = [name for name in right[0].grads if name.endswith(("sinks", "head_bias"))]
    assert len(learned) == case.config.layers
    for name in learned:
        assert right[0].grads[name].abs().max() > 0
