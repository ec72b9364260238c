"""FLOPs that a pipeline is cut by, against torch's own counter on meta tensors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from weft.core.model_config import ModelConfig, causal_attention_flops
from weft.models import PRESETS, family
from weft.models.common.batch import chain, image_batch, token_batch, with_later_targets
from weft.models.common.decoder_config import DecoderConfig
from weft.models.deepseek import config as deepseek

NUM, SEQ = 3, 10


MODELS = {
    **{name: PRESETS[name] for name in ("gpt2-tiny", "llama3-tiny", "mnist-mlp", "mnist-conv", "qwen3-tiny")},
    "head size": PRESETS["qwen3-tiny"].model_copy(update={"head_size": 48}),
    "qwen3-moe-tiny": PRESETS["qwen3-moe-tiny"],
    "deepseek-tiny": PRESETS["deepseek-tiny"],
    "deepseek, all parts": deepseek.Config(layers=3, first_k_dense=2, top_k=3, shared_experts=2, mtp_depth=1),
    "deepseek, parts left out": deepseek.Config(q_lora_rank=0, shared_experts=0, first_k_dense=0, v_head_dim=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_each_block_equal_torchs_count(name: str):
    cfg = MODELS[name]
    with torch.device("meta"):
        blocks = family(cfg.family).blocks(cfg)
        if cfg.kind == "tokens":
            x = torch.zeros(NUM, SEQ, dtype=torch.int64)
            batch = with_later_targets(token_batch(x, x))
        else:
            x = torch.empty(NUM, 1, 28, 28)
            batch = image_batch(x, torch.zeros(NUM, dtype=torch.int64))
    for spec in cfg.block_specs(SEQ):
        with FlopCounterMode(display=False) as counter:
            x = chain({spec.name: blocks[spec.name]}, x, batch).x
        above = _counted_above_need(cfg) if spec.is_layer or spec.name == "mtp0" else 0.0
        assert counter.get_total_flops() == NUM * (spec.flops + above), spec.name


def _counted_above_need(cfg: ModelConfig) -> float:
    """torch counts the whole S x S square of causal attention, a spec counts the half that is needed."""
    if cfg.kind == "images":
        return 0.0
    if isinstance(cfg, deepseek.Config):  # and torch counts the zeros by which v is made as wide as q and k
        padding = cfg.heads * (cfg.qk_head_dim - cfg.v_head_dim)
        return SEQ * SEQ * cfg.heads * (cfg.qk_head_dim + cfg.v_head_dim) + 2.0 * SEQ * SEQ * padding
    return causal_attention_flops(SEQ, cfg.heads * cfg.head_size if isinstance(cfg, DecoderConfig) else cfg.dim)
