"""Tiny models of transformers with random values, and the folders that it writes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.oracle.hugging_face import shaken
from tests.small_models import HF_FAMILIES, small_config
from weft.config.hf.write_config import config_json
from weft.config.load import load
from weft.config.run import Run
from weft.hf.export_hf import export_hf
from weft.models import FAMILIES
from weft.prove.against.hf_model import read_as_stored

transformers = pytest.importorskip(
    "transformers", reason="the oracle is Hugging Face's transformers (extra `oracle`)"
)

TRUNK = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=61,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **TRUNK,
        intermediate_size=48,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama3 tied": lambda: transformers.LlamaConfig(
        **{**TRUNK, "pad_token_id": 7}, intermediate_size=48, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**TRUNK, head_dim=12, intermediate_size=48),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **TRUNK,
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **{**TRUNK, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rms_norm_eps=1e-3,  # not of latents
        rope_parameters={**YARN, "rope_theta": 1e4},
        max_position_embeddings=2560,
    ),
}


def hf_config(family: str) -> Any:
    """transformers' config of a small model of the family, as weft writes it."""
    cfg = small_config(family, vocab=61, layers=2)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    values = config_json(FAMILIES[family].hf, cfg, dtype="float32", original=tokens)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


CONFIGS |= {name: partial(hf_config, name) for name in HF_FAMILIES if name not in CONFIGS}


def their_model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).double()
    return shaken(model).to(dtype)


def written(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB"
) -> Path:
    """A folder as transformers writes it."""
    their_model(name, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def loaded(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The folder in transformers, which finds all of its keys and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        output_loading_info=True,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    if dtype == torch.float64:
        read_as_stored(model, folder)
    model.eval()  # dropout, of which weft has none
    return model


def tensors_in(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def run_of(folder: Path, *words: str) -> Run:
    return load(["--model.from_hf", str(folder), *words], FAMILIES)


def exported(checkpoint: Path, folder: Path, **asked: Any) -> Path:
    options = {
        "dtype": None,
        "max_shard_bytes": 10**9,
        "sidecar_folders": (),
        "compares": False,
        **asked,
    }
    export_hf(checkpoint, folder, **options)
    return folder
