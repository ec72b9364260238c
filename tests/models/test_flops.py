"""FLOPs that a pipeline is cut by, against torch's own counter on meta tensors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from weft.core.model import causal_attention_flops
from weft.models import PRESETS, family
from weft.models.batch import image_batch, token_batch

NUM, SEQ = 3, 10


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-tiny", "mnist-mlp", "mnist-conv"])
def test_flops_of_each_block_equal_torchs_count(name: str):
    cfg = PRESETS[name]
    with torch.device("meta"):
        blocks = family(cfg.family).blocks(cfg)
        if cfg.kind == "tokens":
            x = torch.zeros(NUM, SEQ, dtype=torch.int64)
            batch = token_batch(x, x)
        else:
            x = torch.empty(NUM, 1, 28, 28)
            batch = image_batch(x, torch.zeros(NUM, dtype=torch.int64))
    for spec in cfg.block_specs(SEQ):
        with FlopCounterMode(display=False) as counter:
            x = blocks[spec.name](x, batch)
        # torch counts the whole S x S square of causal attention, a spec counts the half that is needed
        square = causal_attention_flops(SEQ, cfg.dim) if cfg.kind == "tokens" and spec.is_layer else 0.0
        assert counter.get_total_flops() == NUM * (spec.flops + square), spec.name
