"""Models of several parts: the text part is read, trained and exported as a model of text, with the whole model's logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.memory_source import Memory
from weft.commands.import_ import import_run
from weft.config.hf.read_config import describe_folder
from weft.config.hf.text_part import text_config_of
from weft.config.load import load
from weft.config.lora import LORA_A, LORA_B
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.errors import CheckpointError, ConfigError
from weft.hf.adapters import write_adapters
from weft.hf.check_logits import hf_logits
from weft.hf.export_hf import export_hf, placed_in
from weft.hf.folder import HfFolder
from weft.hf.match import match_folder
from weft.hf.text_places import whole_class
from weft.models import FAMILIES
from weft.start.preflight import training_notes

TEXT: Mapping[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA_4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 288}
GEMMA_4 |= {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_4_VISION = {
    **VISION,
    "model_type": "gemma4_vision",
    "head_dim": 8,
    "global_head_dim": 8,
    "num_key_value_heads": 2,
}
FOLDERS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma3": ("gemma3", {"head_dim": 8, "sliding_window": 8}, VISION),
    "mistral3": ("mistral", {"head_dim": 8}, VISION),
    "qwen3_5": (
        "hf:qwen3_5_text",
        {"head_dim": 8, **LINEAR},
        {**QWEN_VISION, "num_position_embeddings": 16},
    ),
    "gemma4": ("hf:gemma4_text", {"head_dim": 8, "global_head_dim": 8, **GEMMA_4}, GEMMA_4_VISION),
    "qwen2_5_vl": ("qwen2", {"rope_parameters": MROPE}, QWEN_VISION),
}
"""Model type -> family that reads its text part, keys of the text part, and those of the vision part."""


def saved(
    folder: Path, model_type: str, text: Mapping[str, Any], vision: Mapping[str, Any], **save: Any
) -> Path:
    """A small model of text and images as transformers saves it."""
    torch.manual_seed(0)
    default = CONFIG_MAPPING[model_type]()
    parts = {
        name: {"model_type": getattr(getattr(default, name), "model_type", ""), **values}
        for name, values in (("text_config", {**TEXT, **text}), ("vision_config", vision))
    }
    config = CONFIG_MAPPING[model_type](**parts)
    whole_class(config)(config).save_pretrained(folder, **save)
    return folder


@pytest.mark.parametrize("model_type", FOLDERS)
def test_the_text_part_is_imported_and_exported(model_type: str, tmp_path: Path) -> None:
    """With the logits of the whole model, and what is not read is said."""
    family, text, vision = FOLDERS[model_type]
    folder = saved(tmp_path / "in", model_type, text, vision)
    imported = import_run(folder, tmp_path / "run", compares=True)
    assert imported.is_equal
    assert any("largest logit difference" in line for line in imported.lines), imported.lines
    assert any("the text part alone is read, without" in line for line in imported.lines)
    run = load(["--model.from_hf", str(folder)], FAMILIES)
    assert run.model.name == family
    assert sum("the text part alone is read" in note for note in training_notes(run)) == 1
    out = tmp_path / "out"
    exported = export_hf(
        tmp_path / "run" / "ckpt" / "step-000000",
        out,
        dtype=None,
        max_shard_bytes=2**30,
        sidecar_folders=[tmp_path / "run" / "hf"],
        compares=False,
    )
    assert any(line.startswith("the text part alone, as ") for line in exported.lines)
    tokens = torch.randint(280, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = hf_logits(folder, tokens) - hf_logits(out, tokens)
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_peft_loads_adapters_into_the_text_part(model_type: str, tmp_path: Path) -> None:
    """Of the folder that they name as their base: each tensor, and no other part has adapters."""
    peft = pytest.importorskip("peft")
    _, text, vision = FOLDERS[model_type]
    base = saved(tmp_path / "base", model_type, text, vision)
    model = load(["--model.from_hf", str(base)], FAMILIES).model
    lora = LoraConfig(rank=2)
    values = {
        f"{linear}{end}": torch.randn(shape)
        for linear, (height, width) in model.linears().items()
        for end, shape in ((LORA_A, (2, width)), (LORA_B, (height, 2)))
    }
    placed = placed_in(str(base))
    assert placed is not None
    out = tmp_path / "adapters"
    write_adapters(
        out, Memory(values), cfg=model, lora=lora, base=str(base), place=placed.at.whole_name
    )
    config = CONFIG_MAPPING[model_type].from_pretrained(base)
    whole = whole_class(config).from_pretrained(base)
    found = peft.PeftModel.from_pretrained(whole, out).state_dict()
    stored = load_file(out / "adapter_model.safetensors")
    assert sum(".lora_" in name for name in found) == len(stored) == len(values)
    for name, tensor in stored.items():
        assert torch.equal(found[name.replace(".weight", ".default.weight")], tensor)


def test_one_tensor_an_expert_is_read_as_transformers_puts_them_together(tmp_path: Path) -> None:
    """As models are published; any part of a stack of experts is that of the packed tensor."""
    text = {"head_dim": 8, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    vision = {**QWEN_VISION, "num_position_embeddings": 16}
    published = saved(tmp_path / "published", "qwen3_5_moe", text, vision)
    packed = saved(tmp_path / "packed", "qwen3_5_moe", text, vision, save_original_format=False)
    folders = [
        HfFolder(folder, load(["--model.from_hf", str(folder)], FAMILIES).model)
        for folder in (published, packed)
    ]
    stacks = {name: shape for name, shape in folders[0].shapes.items() if ".experts." in name}
    assert len(stacks) == 8
    for name, (experts, rows, columns) in stacks.items():
        whole = Box.whole((experts, rows, columns))
        part = Box((1, rows // 4, 2), (3, rows - 3, columns))
        for box in (whole, part):
            assert torch.equal(*(folder.read(name, box) for folder in folders))


def test_transposed_experts_are_read_as_transformers_loads_them(tmp_path: Path) -> None:
    """Those of Qwen3-VL are published as [E, in, out]: the same values, and the whole model's logits."""
    text = {**EXPERTS, "head_dim": 8, "rope_parameters": MROPE, "norm_topk_prob": True}
    text |= {"moe_intermediate_size": 24}
    folder = saved(tmp_path / "in", "qwen3_vl_moe", text, QWEN_VISION)
    run = load(["--model.from_hf", str(folder)], FAMILIES)
    plain = HfFolder(folder, run.model)
    whole = {name: plain.read(name, Box.whole(shape)) for name, shape in plain.shapes.items()}
    tensors = load_file(folder / "model.safetensors")
    swapped = [name for name in tensors if ".experts." in name]
    assert len(swapped) == 8
    tensors |= {name: tensors[name].mT.contiguous() for name in swapped}
    save_file(tensors, folder / "model.safetensors")
    published = HfFolder(folder, run.model)
    for name, values in whole.items():
        part = Box((0,) * values.ndim, tuple(max(1, size // 2) for size in values.shape))
        for box in (Box.whole(values.shape), part):
            assert torch.equal(published.read(name, box), values[box.slices])
    assert import_run(folder, tmp_path / "run", compares=True).is_equal


def test_tensors_that_transformers_changes_are_rejected(tmp_path: Path) -> None:
    """MiniMax-M3-VL has one tensor an expert in its folders, its decoder all experts in one."""
    text = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    text |= {"layer_types": ["full_attention"] * 4, "mlp_layer_types": ["sparse"] * 4}
    folder = saved(tmp_path, "minimax_m3_vl", text, VISION)
    run = load(["--model.from_hf", str(folder)], FAMILIES)
    with pytest.raises(CheckpointError, match=r"changes tensors.*save_original_format=False"):
        match_folder(folder, run.model)


def test_a_decoder_that_computes_other_logits_is_rejected(tmp_path: Path) -> None:
    """Experts of Qwen3-VL are always normalised, those of Qwen 3 only where the config says so."""
    folder = saved(
        tmp_path, "qwen3_vl_moe", {**EXPERTS, "head_dim": 8, "rope_parameters": MROPE}, QWEN_VISION
    )
    run = load(["--model.from_hf", str(folder)], FAMILIES)
    with pytest.raises(CheckpointError, match="qwen3_vl_moe computes other logits of a text than"):
        match_folder(folder, run.model)


def test_text_that_is_read_in_both_directions_is_rejected(tmp_path: Path) -> None:
    """As the prompts of PaliGemma."""
    folder = saved(tmp_path, "paligemma", {"head_dim": 8}, VISION)
    run = load(["--model.from_hf", str(folder)], FAMILIES)
    with pytest.raises(CheckpointError, match="paligemma computes other logits of a text than"):
        match_folder(folder, run.model)


@pytest.mark.parametrize(
    ("model_type", "text"), [("glm4v", "glm4v_text"), ("mllama", "mllama_text_model")]
)
def test_a_text_part_without_a_decoder_is_rejected(
    model_type: str, text: str, tmp_path: Path
) -> None:
    """The layers of Mllama attend to images: its decoder is the whole model."""
    config = {"model_type": model_type, "text_config": {"model_type": text}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    what = f"{model_type}: transformers has no decoder for its text part"
    with pytest.raises(ConfigError, match=what):
        load(["--model.from_hf", str(tmp_path)], FAMILIES)


def test_a_config_that_says_little_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    """As those of the published models."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "model_type": "gemma3"}))
    described = describe_folder(tmp_path, FAMILIES)
    sizes = {name.rpartition(".")[2]: value for name, value in described.fields.items()}
    names = ("vocab", "dim", "heads", "kv_heads", "head_size", "layers")
    assert [sizes[name] for name in names] == [262_208, 2560, 8, 4, 256, 34]


def test_other_models_are_read_as_they_are() -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    assert text_config_of(config) is config
    dbrx = {"model_type": "dbrx", "attn_config": {}}
    assert text_config_of(dbrx) is dbrx
