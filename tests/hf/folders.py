"""Small Hugging Face folders with random values of each family, and ways to edit them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.memory_source import Memory
from tests.small_models import HF_FAMILIES, small_config
from weft.config.hf.read_config import describe_folder
from weft.config.hf.write_config import config_json
from weft.core.model_config import ModelConfig
from weft.hf.match import mapping_of
from weft.hf.placement import hf_tensors
from weft.hf.write import choose_dtypes, write_folder
from weft.models import FAMILIES
from weft.models.common.init import named_parameters
from weft.models.deepseek import config as deepseek
from weft.models.gpt2 import config as gpt2
from weft.models.llama3 import config as llama3
from weft.models.qwen3 import config as qwen3
from weft.models.qwen3_moe import config as qwen3_moe
from weft.train.init_from import meta_modules

DEEPSEEK = deepseek.Config(
    layers=3,
    dim=32,
    heads=4,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=10,
    ffn=36,
    experts=4,
    top_k=2,
    expert_ffn=12,
    n_group=2,
    topk_group=2,
    vocab=50,
)
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": gpt2.Config(layers=2, dim=24, heads=4, ffn=40, vocab=50, max_seq_len=16),
    "llama3": llama3.Config(layers=2, dim=32, heads=4, kv_heads=2, ffn=44, vocab=50),
    "llama3 tied": llama3.Config(
        layers=1, dim=32, heads=4, kv_heads=2, ffn=44, vocab=50, tied=True
    ),
    "qwen3": qwen3.Config(layers=2, dim=32, heads=4, kv_heads=2, head_size=12, ffn=44, vocab=50),
    "qwen3-moe": qwen3_moe.Config(
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        head_size=12,
        vocab=50,
        experts=4,
        top_k=2,
        expert_ffn=12,
    ),
    "deepseek": DEEPSEEK,
    "deepseek, second next": DEEPSEEK.model_copy(update={"mtp_depth": 1}),
    "deepseek, second next, q whole": DEEPSEEK.model_copy(
        update={"mtp_depth": 1, "q_lora_rank": 0}
    ),
    "deepseek, q whole": DEEPSEEK.model_copy(update={"q_lora_rank": 0, "shared_experts": 0}),
}

CONFIGS |= {
    name: small_config(name, layers=2, tied=False) for name in HF_FAMILIES if name not in CONFIGS
}


def shapes_of(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Whole shape of each parameter, by its owner's name."""
    family = FAMILIES[cfg.family]
    params = named_parameters(meta_modules(lambda: family.blocks(cfg)))
    return {
        name: tuple(param.shape) for name, param in params.items() if name not in family.ties(cfg)
    }


def random_values(cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Memory:
    """A value for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes_of(cfg)
    return Memory(
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    )


def write(folder: Path, cfg: ModelConfig, values: Memory, *, max_shard_bytes: int = 10**9) -> Path:
    """The folder of a model."""
    mapping = mapping_of(cfg.family)
    ties = FAMILIES[cfg.family].ties(cfg)
    tensors = hf_tensors(mapping.weights, cfg, values.shapes, ties=ties, where=str(folder))
    typed = choose_dtypes(tensors, values, dtype=None)
    config = config_json(mapping, cfg, dtype="float32")
    write_folder(folder, typed, values, max_shard_bytes=max_shard_bytes, texts={}, config=config)
    return folder


def config_of(folder: Path) -> ModelConfig:
    """The model that a folder describes."""
    found = describe_folder(folder, FAMILIES)
    return FAMILIES[found.family].Config(**found.fields, **found.suggested)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a folder that is one file."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pack_experts(folder: Path, num_experts: int) -> None:
    """Let experts lie as transformers holds them in memory: two tensors a layer."""

    def pack(tensors: dict[str, Tensor]) -> None:
        heads = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
        for head in heads:

            def stacked(name: str, head: str = head) -> Tensor:
                each = [
                    tensors.pop(f"{head}.experts.{e}.{name}_proj.weight")
                    for e in range(num_experts)
                ]
                return torch.stack(each)

            both = torch.cat((stacked("gate"), stacked("up")), dim=1)
            tensors[f"{head}.experts.gate_up_proj"] = both
            tensors[f"{head}.experts.down_proj"] = stacked("down")

    edit(folder, pack)
