"""Gemma 3 with images: its text part is read, trained and exported as a model of text, with the logits of the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.config.hf.read_config import describe_folder
from weft.config.hf.text_part import TEXT_DEFAULTS, text_config_of, text_tensors
from weft.config.load import load
from weft.hf.check_logits import weft_logits
from weft.hf.folder import HfFolder
from weft.models import FAMILIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text and images as transformers saves it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "sliding_window": 8,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    tokens = {"image_token_index": 287, "boi_token_index": 285, "eoi_token_index": 286}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    folder = tmp_path_factory.mktemp("hf") / "gemma3"
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_logits_of_texts_are_those_of_the_whole_model(folder: Path) -> None:
    from transformers import Gemma3ForConditionalGeneration

    run = load(["--model.from_hf", str(folder)], FAMILIES)
    assert (run.model.name, run.model.architecture["layers"]) == ("gemma3", 7)
    tokens = torch.randint(280, (2, 24), generator=torch.Generator().manual_seed(1))
    whole = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = whole(tokens).logits
        found = weft_logits(HfFolder(folder, run.model), run.model, tokens, dtypes={})
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_config_that_says_little_has_the_defaults_of_transformers(
    folder: Path, tmp_path: Path
) -> None:
    """As those of the published models."""
    from transformers import Gemma3TextConfig

    default = Gemma3TextConfig()
    assert {name: getattr(default, name) for name in TEXT_DEFAULTS} == dict(TEXT_DEFAULTS)
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
    config = {"architectures": ["Gemma3ForCausalLM"], "text_config": {}}
    assert text_config_of(config) is config
    tensors = {"model.norm.weight": 1}
    assert text_tensors(tensors) is tensors
