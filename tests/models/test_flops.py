"""FLOPs of each block against torch's counter on meta tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.sampling import sampled
from tests.small_models import TEXT_FAMILIES, small_config
from weft.core.model_config import ModelConfig
from weft.models import PRESETS, family
from weft.models.common.attention import Attend
from weft.models.common.batch import chain, image_batch, token_batch, with_later_targets
from weft.models.common.decoder_config import DecoderConfig, attention_flops
from weft.models.deepseek import config as deepseek

NUM, SEQ = 3, 10

MODELS = {
    **{name: small_config(name) for name in TEXT_FAMILIES},
    "mnist-mlp": PRESETS["mnist-mlp"],
    "mnist-conv": PRESETS["mnist-conv"],
    "head size": PRESETS["qwen3-tiny"].model_copy(update={"head_size": 48}),
    "deepseek, all parts": deepseek.Config(
        layers=3, first_k_dense=2, top_k=3, shared_experts=2, mtp_depth=1
    ),
    "deepseek, parts left out": deepseek.Config(
        q_lora_rank=0, shared_experts=0, first_k_dense=0, v_head_dim=16
    ),
}


@pytest.mark.parametrize("name", sampled(MODELS))
def test_flops_of_each_block_equal_torchs_count(name: str):
    cfg = MODELS[name]
    with torch.device("meta"):
        blocks = family(cfg.family).blocks(cfg)
        if cfg.kind == "tokens":
            x = torch.zeros(NUM, SEQ, dtype=torch.int64)
            batch = with_later_targets(token_batch(x, x))
        else:
            x = torch.empty(NUM, 1, 28, 28)
            targets_B = torch.zeros(NUM, dtype=torch.int64)
            batch = image_batch(x, targets_B)
    for index, spec in enumerate(cfg.block_specs(SEQ)):
        with FlopCounterMode(display=False) as counter:
            x = chain({spec.name: blocks[spec.name]}, x, batch).x
        is_attention = spec.is_layer or spec.name == "mtp0"
        masked = masked_flops(cfg, index - 1) if is_attention else 0.0
        assert counter.get_total_flops() == NUM * (spec.flops + masked), spec.name


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_the_config_and_the_attention_of_a_layer_have_the_same_window(name: str):
    """FLOPs and memory follow from that of the config."""
    cfg = small_config(name)
    if not isinstance(cfg, DecoderConfig):
        pytest.skip("its config has no windows")
    with torch.device("meta"):
        blocks = family(name).blocks(cfg)
    for layer in range(cfg.layers):
        seams = [seam for seam in blocks[f"layer{layer}"].modules() if isinstance(seam, Attend)]
        assert [seam.mask.window for seam in seams] == [cfg.window_of(layer)], layer


def masked_flops(cfg: ModelConfig, layer: int) -> float:
    """torch counts the whole S x S square of attention, a spec counts the pairs inside mask and
    window.
    """
    if cfg.kind == "images":
        return 0.0
    if isinstance(
        cfg, deepseek.Config
    ):  # and torch counts the zeros by which v is made as wide as q and k
        padding = cfg.heads * max(cfg.qk_head_dim - cfg.v_head_dim, 0)
        return (
            SEQ * SEQ * cfg.heads * (cfg.qk_head_dim + cfg.v_head_dim) + 2.0 * SEQ * SEQ * padding
        )
    if isinstance(cfg, DecoderConfig):
        width = cfg.heads * cfg.head_size
    else:
        width = cfg.dim
    window = cfg.window_of(layer) if isinstance(cfg, DecoderConfig) else None
    return 4.0 * SEQ * SEQ * width - attention_flops(SEQ, width, window=window)


def test_flops_of_a_window_count_its_pairs_of_queries_and_keys():
    """A query at column p sees min(p + 1, window) keys; half of its own key counts, as without a
    window.
    """
    seq_len, width, window = 12, 7, 5
    num_pairs = (
        sum(min(p + 1, window) for p in range(seq_len)) - seq_len / 2 + (seq_len - window) / 2
    )
    assert attention_flops(seq_len, width, window=window) == 4.0 * width * num_pairs
    assert attention_flops(seq_len, width, window=seq_len) == attention_flops(
        seq_len, width, window=None
    )
