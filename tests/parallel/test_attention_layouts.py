"""A model with windows, soft-cap, sinks and one bias per head trains on every layout as on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix.layouts import Case, shallow, subject_of
from tests.one_device import check_records, gradients, one_device, records_of
from weft.core.attention_mask import AttentionMask
from weft.core.model_config import ModelConfig
from weft.models import FAMILIES
from weft.models.common.attention import Attend

LLAMA = FAMILIES["llama3"]


@dataclass(frozen=True)
class WindowedFamily:
    """LLaMA, under its name, whose even layers have a window and sinks, whose odd ones a soft-cap
    and one bias per head.
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
def test_layout_trains_a_model_with_attention_features_as_one_device_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES._built_in, "llama3", WindowedFamily())
    subject = subject_of(case)
    right = one_device(subject)
    check_records(subject, records_of(subject), right)
    first = gradients(right.plain, 1)
    learned = [name for name in first if name.endswith(("sinks", "head_bias"))]
    assert len(learned) == case.config.layers
    assert all(first[name].any() for name in learned)
