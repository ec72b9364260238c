"""Cached generation of windows, soft-caps, sinks and biases == the model without a cache, which sees whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.generate.models import PROMPTS, SEED, Generation, config_of, plain, plan_of, worst
from weft.comm.comm import Comm
from weft.core.attention_mask import CAUSAL, AttentionMask
from weft.core.model_config import ModelConfig
from weft.errors import PlanError
from weft.generate.decode import Decoder
from weft.models import FAMILIES
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import parallelize
from weft.testing import run_ranks

HEADS, SAME = 8, 1e-9

FEATURES: dict[str, dict[str, Any]] = {
    "window of one": {"mask": AttentionMask(window=1)},
    "window": {"mask": AttentionMask(window=3)},
    "window beyond the text": {"mask": AttentionMask(window=50)},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "head bias": {"head_bias": True},
    "all at once": {
        "mask": AttentionMask(window=4),
        "scale": 0.4,
        "softcap": 2.0,
        "sinks": True,
        "head_bias": True,
    },
}


def attend_of(
    mask: AttentionMask = CAUSAL, *, sinks: bool = False, head_bias: bool = False, **rest: Any
) -> Attend:
    generator = torch.Generator().manual_seed(SEED)
    values = torch.rand(2, HEADS, generator=generator, dtype=torch.float64)
    return Attend(
        mask=mask,
        sinks=nn.Parameter(values[0]) if sinks else None,
        head_bias=nn.Parameter(values[1]) if head_bias else None,
        **rest,
    )


def model_with(config: ModelConfig, features: dict[str, Any]) -> dict[str, nn.Module]:
    """The plain model; every second layer keeps full causal attention, as in Gemma."""
    blocks = plain(config)
    for layer in ("layer0", "layer2"):
        blocks[layer].attn.attend = attend_of(**features)
    return blocks


@pytest.mark.parametrize(
    "generation",
    [
        Generation(num_tokens=8),
        Generation(prompts=PROMPTS[:1], num_tokens=8),
        Generation(((1, 2), (3, 4)), 8),
    ],
    ids=["rows of different length", "one row", "rows in step"],
)
@pytest.mark.parametrize("name", FEATURES)
def test_cached_attention_equals_whole_sequences(name: str, generation: Generation) -> None:
    """Before, a window was ignored after the prompt: 0.32 of the largest logit off."""
    config = config_of("llama3")
    blocks = model_with(config, FEATURES[name])
    texts, logits = generation.reference_of(blocks)

    def rank(comm: Comm) -> None:
        axes = {**FAMILIES["llama3"].AXES, "layer*.attn.attend.*": ("norm",)}
        model = parallelize(
            model_with(config, FEATURES[name]), plan_of(config, ""), comm, axes=axes
        )
        decoder = Decoder(model, vocab=config.vocab)
        ours, held = generation(decoder)
        assert ours == texts
        assert worst(held, logits) < SAME

    run_ranks("", rank)


def test_a_window_reads_its_own_cells_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama3")
    read: list[int] = []
    right = torch.nn.functional.scaled_dot_product_attention

    def counted(q, k, v, **rest):
        read.append(k.shape[2])
        return right(q, k, v, **rest)

    def rank(comm: Comm) -> None:
        blocks = plain(config)
        for layer in range(config.layers):
            blocks[f"layer{layer}"].attn.attend = Attend(mask=AttentionMask(window=3))
        model = parallelize(blocks, plan_of(config, ""), comm, axes=FAMILIES["llama3"].AXES)
        decoder = Decoder(model, vocab=config.vocab)
        decoder.read([tuple(range(10))])
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        decoder.read([(5,)])

    run_ranks("", rank)
    assert read == [3] * config.layers


class WindowAttend(Attend):
    """Overrides `forward`, declares nothing."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        attend = Attend(mask=AttentionMask(window=3))
        return attend(q, k, v, batch)


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (
            Attend(mask=AttentionMask(causal=False)),
            "layer1.attn.attend: cached attention does not support bidirectional (need one of causal, documents, dropout, "
            "head_bias, sinks, softcap, window). Fix: a causal mask without a prefix: tokens are generated from left to right",
        ),
        (
            Attend(mask=AttentionMask(prefix=2)),
            "layer1.attn.attend: cached attention does not support prefix (need",
        ),
        (
            WindowAttend(),
            "layer1.attn.attend: WindowAttend overrides Attend.forward without declaring its requirements (need "
            "`requirements` that cached attention can compute). Fix: use Attend(mask=AttentionMask(...), scale=..., ",
        ),
    ],
    ids=["bidirectional", "prefix", "undeclared"],
)
def test_what_a_cache_cannot_compute_is_rejected(attend: Attend, message: str) -> None:
    config = config_of("llama3")

    def rank(comm: Comm) -> None:
        blocks = plain(config)
        blocks["layer1"].attn.attend = attend
        model = parallelize(blocks, plan_of(config, ""), comm, axes=FAMILIES["llama3"].AXES)
        Decoder(model, vocab=config.vocab)

    with pytest.raises(PlanError) as caught:
        run_ranks("", rank)
    assert message in str(caught.value)
