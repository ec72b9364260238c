"""Rejected Hugging Face folders: tensors missing, left over or of another shape, damaged files, broken rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hf.folders import CONFIGS, config_of, edit, edit_config, random_values, shapes_of, write
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError
from weft.hf.folder import HfFolder
from weft.hf.match import mapping_of, match_tensors
from weft.models import FAMILIES

pytestmark = pytest.mark.usefixtures("fast_disk")

GPT2, LLAMA, TIED, MOE = (CONFIGS[name] for name in ("gpt2", "llama3", "llama3 tied", "qwen3-moe"))


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(
    name: str, value: Callable[[dict[str, Tensor]], Tensor]
) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors)})


WRONG: dict[str, tuple[ModelConfig, Callable[[dict[str, Tensor]], None], str]] = {
    "a tensor is missing": (
        LLAMA,
        drop("model.norm.weight"),
        "1 tensor is missing (need model.norm.weight)",
    ),
    "an expert is missing": (
        MOE,
        drop("model.layers.1.mlp.experts.2.up_proj.weight"),
        "1 tensor is missing (need model.layers.1.mlp.experts.2.up_proj.weight)",
    ),
    "a tensor is left over": (
        LLAMA,
        put("model.layers.0.self_attn.q_proj.bias", lambda t: t["model.norm.weight"].clone()),
        "no place for (got model.layers.0.self_attn.q_proj.bias)",
    ),
    "a layer is left over": (
        LLAMA,
        put("model.layers.2.input_layernorm.weight", lambda t: t["model.norm.weight"].clone()),
        "no place for (got model.layers.2.input_layernorm.weight)",
    ),
    "an expert is left over": (
        MOE,
        put(
            "model.layers.1.mlp.experts.4.up_proj.weight", lambda t: t["model.norm.weight"].clone()
        ),
        "no place for (got model.layers.1.mlp.experts.4.up_proj.weight)",
    ),
    "experts differ": (
        MOE,
        put("model.layers.1.mlp.experts.2.up_proj.weight", lambda t: torch.ones(3, 32)),
        "model.layers.1.mlp.experts.2.up_proj.weight differs from model.layers.1.mlp.experts.0.up_proj.weight "
        "(got F32 [3, 32]; need F32 [12, 32])",
    ),
    "one type differs": (
        MOE,
        put("model.layers.1.mlp.experts.2.up_proj.weight", lambda t: torch.ones(12, 32).double()),
        "(got F64 [12, 32]; need F32 [12, 32])",
    ),
    "fused by another number": (
        GPT2,
        put("transformer.h.0.attn.c_attn.bias", lambda t: torch.ones(71)),
        "transformer.h.0.attn.c_attn.bias does not divide by 3 (got [71])",
    ),
    "no matrix": (
        GPT2,
        put("transformer.h.0.mlp.c_fc.weight", lambda t: torch.ones(40)),
        "transformer.h.0.mlp.c_fc.weight is no matrix (got [40])",
    ),
    "quantized": (
        LLAMA,
        put("model.norm.weight", lambda t: torch.ones(32).to(torch.float8_e4m3fn)),
        "model.norm.weight is of a type that parameters cannot have (got F8_E4M3)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_of_another_model_is_rejected_by_tensor(tmp_path: Path, name: str):
    cfg, change, message = WRONG[name]
    folder = write(tmp_path / "hf", cfg, random_values(cfg))
    edit(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        HfFolder(folder, cfg)


def test_a_shape_that_differs_from_the_config_is_reported(tmp_path: Path):
    folder = write(tmp_path / "hf", LLAMA, random_values(LLAMA))
    edit_config(folder, intermediate_size=48)
    source = HfFolder(folder, config_of(folder))
    message = re.escape(
        "model.layers.0.mlp.down_proj.weight: config.json makes another shape of it (got [32, 44]; need [32, 48])"
    )
    with pytest.raises(CheckpointError, match=message):
        source.check_shapes(shapes_of(config_of(folder)))


def test_a_rule_that_is_dropped_or_doubled_is_found(tmp_path: Path):
    for name, cfg in CONFIGS.items():
        folder = write(tmp_path / name, cfg, random_values(cfg))
        mapping = mapping_of(cfg.family).weights
        listed = HfFolder(folder, cfg).entries
        ties = FAMILIES[cfg.family].ties(cfg)
        indices = mapping.index_sets(cfg)
        for rule in mapping.rules:
            tensors = [each.tensor.replace("{expert}", "0") for each in rule.expand(indices)]
            if not any(tensor in listed for tensor in tensors):
                continue
            other_rules = [each for each in mapping.rules if each is not rule]
            less = replace(mapping, rules=tuple(other_rules))
            with pytest.raises(CheckpointError, match=r"no place for|not used exactly once"):
                match_tensors(less, cfg, listed, ties=ties, folder="hf")
            if rule.param.format_map(_First()) not in ties:
                more = replace(
                    mapping, rules=(*mapping.rules, replace(rule, param=f"{rule.param}.again"))
                )
                with pytest.raises(CheckpointError, match="not used exactly once"):
                    match_tensors(more, cfg, listed, ties=ties, folder="hf")


class _First(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def damaged(folder: Path, name: str) -> None:
    """One kind of damage to a folder of shards."""
    shards = sorted(folder.glob("model-*.safetensors"))
    index = folder / "model.safetensors.index.json"
    second = shards[1]
    match name:
        case "missing shard":
            second.unlink()
        case "truncated":
            second.write_bytes(second.read_bytes()[:-10])
        case "empty":
            second.write_bytes(b"")
        case "a page of HTML":
            second.write_bytes(b"<!DOCTYPE html>" * 10)
        case "another file":
            second.write_bytes(shards[0].read_bytes())
        case "index is no JSON":
            index.write_text("{")
        case "index without map":
            index.write_text("{}")
        case "index that leads out":
            index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
        case "pickled":
            for path in (*shards, index):
                path.unlink()
            (folder / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing shard", "00002-of-000.*missing shard"),
        ("truncated", "00002-of-000.*is cut short"),
        ("empty", "00002-of-000.*no safetensors file"),
        ("a page of HTML", "00002-of-000.*no safetensors file"),
        ("another file", "stands in model-00001.* too"),
        ("index is no JSON", "index.json: is no JSON"),
        ("index without map", "index.json: has no weight_map"),
        ("index that leads out", "index.json: has no weight_map"),
        ("pickled", "holds no weights.*Fix: save it as safetensors"),
    ],
)
def test_damage_is_reported_with_its_file(tmp_path: Path, name: str, message: str):
    folder = write(tmp_path / "hf", LLAMA, random_values(LLAMA), max_shard_bytes=5000)
    damaged(folder, name)
    with pytest.raises(CheckpointError, match=message):
        HfFolder(folder, LLAMA)
