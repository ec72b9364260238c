"""Qwen3: normalised queries and keys, independent head size, the released shapes."""

from __future__ import annotations

import math

import pytest
import torch

from weft.models import FAMILIES, PRESETS
from weft.models.common.batch import forward, token_batch
from weft.models.common.decoder import attention
from weft.models.common.decoder_config import DecoderConfig
from weft.models.common.init import named_parameters, tie
from weft.models.qwen3 import config as qwen3
from weft.models.qwen3_moe import config as qwen3_moe

RELEASED = {  # layers, hidden_size, heads, kv_heads, tie_word_embeddings
    "qwen3-0.6b": (28, 1024, 16, 8, True),
    "qwen3-8b": (36, 4096, 32, 8, False),
    "qwen3-moe-30b-a3b": (48, 2048, 32, 4, False),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", RELEASED)
def test_presets_have_the_released_shapes(name: str):
    cfg = PRESETS[name]
    assert isinstance(cfg, DecoderConfig)
    actual = (cfg.layers, cfg.dim, cfg.heads, cfg.kv_heads, cfg.tied)
    assert actual == RELEASED[name]
    assert cfg.head_size == 128
    assert cfg.vocab == 151_936
    assert cfg.max_seq_len == 40_960
    assert (cfg.rope_theta, cfg.norm_eps) == (1e6, 1e-6)


def test_the_mixed_preset_routes_as_released():
    cfg = PRESETS["qwen3-moe-30b-a3b"]
    assert isinstance(cfg, qwen3_moe.Config)
    assert cfg.experts == 128
    assert cfg.top_k == 8
    assert cfg.expert_ffn == 768
    assert cfg.norm_topk_prob is True
    assert cfg.balance_loss == 0.0


def test_about_a_tenth_of_the_mixed_preset_meets_each_token():
    cfg = PRESETS["qwen3-moe-30b-a3b"]
    per_token = sum(spec.flops for spec in cfg.block_specs(1)) / 2
    attention = (
        cfg.layers * cfg.heads * cfg.head_size
    )  # of a token to itself: products without weights
    embedding = cfg.vocab * cfg.dim
    norm_of_layer = 2 * (cfg.dim + cfg.head_size)
    norms = cfg.layers * norm_of_layer + cfg.dim
    assert (
        3.3e9 < per_token - attention + embedding + norms < 3.4e9
    )  # the model card's "3.3B activated"


def test_length_of_queries_and_keys_does_not_matter_as_they_are_normalised():
    cfg = qwen3.Config(layers=1, dim=32, heads=4, kv_heads=2, head_size=12, norm_eps=1e-30)
    attn = attention(cfg, qk_norm=torch.nn.RMSNorm)
    x = torch.randn(2, 5, 32)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    batch = token_batch(tokens, tokens)
    before = attn(x, batch)
    for weight in (attn.q.weight, attn.k.weight):
        weight.data *= 7.0
    torch.testing.assert_close(attn(x, batch), before, rtol=1e-12, atol=1e-12)
    attn.v.weight.data *= 7.0
    torch.testing.assert_close(attn(x, batch), 7.0 * before, rtol=1e-12, atol=1e-12)


def test_heads_are_normalised_one_by_one_before_they_are_rotated():
    cfg = qwen3.Config(layers=1, dim=16, heads=2, kv_heads=1, head_size=6)
    attn = attention(cfg, qk_norm=torch.nn.RMSNorm)
    x = torch.randn(1, 4, 16)
    for norm in (attn.q_norm, attn.k_norm):
        norm.weight.data = torch.rand(6) + 0.5
    seen = []
    attn.attend.register_forward_pre_hook(lambda module, args: seen.extend(args[:2]))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        attn(x, token_batch(tokens, tokens))
    queries, keys = seen
    assert_normalised_and_rotated(queries, x[0], attn.q, attn.q_norm.weight, cfg)
    assert_normalised_and_rotated(keys, x[0], attn.k, attn.k_norm.weight, cfg)


def turned(h: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary positions of one head of size 6, base 1e6, by halves."""
    frequencies = [1e6 ** (-pair / 3) for pair in range(3)]
    angles = position * torch.tensor(frequencies, dtype=torch.float64)
    cos = angles.cos()
    sin = angles.sin()
    left = h[:3]
    right = h[3:]
    turned_left = left * cos - right * sin
    turned_right = right * cos + left * sin
    return torch.cat((turned_left, turned_right))


def assert_normalised_and_rotated(ours, x_SD, linear, norm_weight, cfg):
    """Compare queries or keys with the formula, token by token and head by head."""
    num_heads = ours.shape[2]
    for s, x in enumerate(x_SD):
        for head in range(num_heads):
            rows_of_head = slice(6 * head, 6 * head + 6)
            h = linear.weight[rows_of_head] @ x
            mean_square = (h @ h).item() / 6
            root = math.sqrt(mean_square + cfg.norm_eps)
            h = h / root * norm_weight
            # angles up to 3 are float32 in the model: 3 x 6e-8 radians, and sine and cosine 6e-8 more
            largest_error = 4 * 6e-8 * h.norm().item()
            actual = ours[0, s, head]
            torch.testing.assert_close(actual, turned(h, s), rtol=0.0, atol=largest_error)


@pytest.mark.parametrize("family", [FAMILIES["qwen3"], FAMILIES["qwen3-moe"]])
def test_a_tied_model_has_one_matrix_less(family):
    for tied in (False, True):
        cfg = family.Config(layers=1, dim=16, vocab=11, tied=tied)
        blocks = family.blocks(cfg)
        tie(blocks, family.ties(cfg))
        parameters = named_parameters(blocks)
        assert (parameters["head.proj.weight"] is parameters["embed.tok.weight"]) == tied
        tokens = torch.randint(11, (2, 5))
        loss = forward(blocks, token_batch(tokens, tokens))
        loss.backward()
