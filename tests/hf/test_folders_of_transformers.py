"""Folders as transformers writes them: experts one by one, names of the authors, joined and split tensors; both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.hf.folders import Memory, edit, write
from weft.config.hf.read_config import describe_folder
from weft.config.hf.write_config import config_json
from weft.config.load import load
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, PlanError
from weft.hf.check_logits import compare_logits
from weft.hf.folder import HfFolder
from weft.hf.match import match_folder
from weft.models import FAMILIES
from weft.models.transformers.build import Architecture, architecture_of, param_names
from weft.models.transformers.check import check_against_transformers
from weft.models.transformers.family import AXES
from weft.models.transformers.stored import WithoutCopies, box_in_order
from weft.start.checked_run import load_checked_run
from weft.start.preflight import training_notes
from weft.start.transformers_model import prepared

transformers = pytest.importorskip("transformers")

FOLDERS = {
    "experts one by one": ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w3.weight"),
    "experts and a bias": ("deepseek_v3", "model.layers.1.mlp.experts.1.gate_proj.weight"),
    "names of the authors": ("exaone", "transformer.h.1.attn.attention.q_proj.weight"),
    "joined in memory": ("olmo_hybrid", "model.layers.0.linear_attn.q_conv1d.weight"),
    "joined in the files": ("sarvam_moe", "model.layers.0.attention.query_key_value.weight"),
    "an infinite limit": ("mamba2", None),
    "experts of each token": ("deepseek_v4", "model.layers.0.ffn.gate.tid2eid"),
}
"""Model type, and a tensor of its files that has another name in memory."""
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def written(folder: Path, model_type: str) -> nn.Module:
    """A small model of transformers with random values, saved by transformers."""
    torch.manual_seed(0)
    lm: Any = transformers.AutoModelForCausalLM.from_config(architecture(model_type).config)
    with torch.no_grad():
        for param in lm.parameters():
            param.copy_(torch.randn(param.shape))
        for tensor in lm.state_dict().values():
            if not tensor.is_floating_point():
                tensor.copy_(torch.randint(4, tensor.shape))
    lm.save_pretrained(folder)
    return cast(nn.Module, lm)


def architecture(model_type: str) -> Architecture:
    """Of the default sizes."""
    values = vars(FAMILIES[f"hf:{model_type}"].Config())
    return architecture_of(model_type, {k: v for k, v in values.items() if k != AXES})


def described(folder: Path, model_type: str) -> ModelConfig:
    """The model of transformers' own code that a folder describes."""
    family = FAMILIES[f"hf:{model_type}"]
    found = describe_folder(folder, {f"hf:{model_type}": family})
    return family.Config(**found.fields)


@pytest.mark.parametrize("name", FOLDERS)
def test_each_parameter_is_read_from_its_tensors(tmp_path: Path, name: str) -> None:
    model_type, tensor = FOLDERS[name]
    state = written(tmp_path, model_type).state_dict()
    files = load_file(tmp_path / "model.safetensors")
    assert tensor is None or tensor in files.keys() - state.keys()
    matched = match_folder(tmp_path, described(tmp_path, model_type))
    own_names = param_names(architecture(model_type))
    assert matched.params
    for param, source in matched.params.items():
        whole = torch.empty(source.shape, dtype=files[source.tensors[0]].dtype)
        for copy in source.copies(Box.whole(source.shape)):
            part = files[copy.source][copy.box.slices]
            whole[copy.at] = part.T if copy.transposed else part
        assert torch.equal(whole, state[own_names[param]])


@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_has_the_tensors_that_transformers_writes(tmp_path: Path, name: str) -> None:
    model_type, _ = FOLDERS[name]
    state = written(tmp_path / "theirs", model_type).state_dict()
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    cfg = described(tmp_path / "theirs", model_type)
    own_names = param_names(architecture(model_type))
    ties = FAMILIES[cfg.family].ties(cfg)
    values = {param: state[own] for param, own in own_names.items() if param not in ties}
    write(tmp_path / "ours", cfg, Memory(values))
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(each, state[own]) for own, each in again.state_dict().items())


def test_tensors_as_they_are_in_memory_are_read_too(tmp_path: Path) -> None:
    lm: Any = written(tmp_path, "mixtral")
    lm.save_pretrained(tmp_path / "packed", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(
        tmp_path / "packed" / "model.safetensors"
    )
    matched = match_folder(tmp_path / "packed", described(tmp_path / "packed", "mixtral"))
    source = matched.params["layer0.layer.mlp.experts.gate_up_proj"]
    assert source.tensors == ("model.layers.0.mlp.experts.gate_up_proj",)


def test_a_band_of_scores_that_is_named_noise_is_computed(tmp_path: Path) -> None:
    """Phi-3.5-MoE's router weighs the experts within `router_jitter_noise`, also in evaluation."""
    config = architecture("phimoe").config
    config.router_jitter_noise = 0.5
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    cfg = described(tmp_path, "phimoe")
    comparison = compare_logits(tmp_path, HfFolder(tmp_path, cfg), cfg)
    assert comparison.is_equal, comparison


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    written(tmp_path, "mixtral")
    edit(tmp_path, lambda tensors: tensors.update({EXPERT: torch.ones(3, 5)}))
    with pytest.raises(CheckpointError, match=rf"{EXPERT}: config.json makes another shape of it"):
        match_folder(tmp_path, described(tmp_path, "mixtral"))


def test_numbers_of_experts_need_a_type_that_holds_them() -> None:
    """DeepSeek-V4 has the experts of each token in a table, which is cast as parameters are."""
    words = ["--model.name", "hf:deepseek_v4", "--precision.compute", "bfloat16"]
    prepared(load([*words, "--model.experts", "256"], FAMILIES))
    with pytest.raises(PlanError, match="compute: does not hold the numbers of 257 experts"):
        prepared(load([*words, "--model.experts", "257"], FAMILIES))


def test_coordinates_of_a_large_model_take_no_memory() -> None:
    whole = torch.zeros(1).expand(2**20, 2**20)
    with WithoutCopies():
        parts = [part.contiguous().clone() for part in torch.chunk(whole, 2)]
    assert [part.shape[0] for part in parts] == [2**19, 2**19]
    assert parts[0].untyped_storage().nbytes() == whole.element_size()


def test_entries_in_another_order_are_no_part() -> None:
    interleaved = torch.arange(8).view(2, 4).T.reshape(8)
    assert box_in_order([torch.arange(3, 8)]) == Box((3,), (8,))
    assert box_in_order([interleaved]) is None
    assert box_in_order([torch.arange(8).flip(0)]) is None


def longrope_folder(folder: Path, **changes: Any) -> Path:
    """config.json of a Phi-3 whose longrope begins behind 32 tokens."""
    rope = {
        "rope_type": "longrope",
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
    }
    config = architecture("phi3").config.to_dict() | {
        "architectures": ["Phi3ForCausalLM"],
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "rope_parameters": rope | changes,
    }
    folder.joinpath("config.json").write_text(json.dumps(config))
    return folder


def test_longrope_is_trained_within_its_original_context(tmp_path: Path) -> None:
    cfg = described(longrope_folder(tmp_path), "phi3")
    assert vars(cfg)["max_seq_len"] == 32
    assert "at most model.max_seq_len = 32" in str(cfg.check_seq_len(33))
    values = {name: value for name, value in vars(cfg).items() if name != AXES and name != "family"}
    assert check_against_transformers("phi3", values, packs_documents=True) == ""
    family = FAMILIES[cfg.family]
    assert family.hf is not None
    written_again = config_json(family.hf, cfg, dtype="float32")
    assert written_again["max_position_embeddings"] == 128
    assert written_again["rope_parameters"]["long_factor"] == [2.0, 3.0, 4.0, 5.0]


def test_the_forward_of_longrope_keeps_no_state(tmp_path: Path) -> None:
    config = longrope_folder(tmp_path).joinpath("config.json").read_text()
    sizes = ("--model.max_seq_len", "32", "--data.seq_len", "16")
    load_checked_run(("--model.name", "hf:phi3", "--model.settings", config, *sizes))


def test_noise_that_is_left_out_stays_in_the_config(tmp_path: Path) -> None:
    written(tmp_path, "mixtral")
    path = tmp_path / "config.json"
    noise = {"router_jitter_noise": 0.1, "attention_dropout": 0.2}
    path.write_text(json.dumps(json.loads(path.read_text()) | noise))
    cfg = described(tmp_path, "mixtral")
    family = FAMILIES[cfg.family]
    assert family.hf is not None
    assert noise.items() <= config_json(family.hf, cfg, dtype="float32").items()


def test_longrope_beyond_its_original_context_is_rejected(tmp_path: Path) -> None:
    config = longrope_folder(tmp_path).joinpath("config.json").read_text()
    words = ["--model.name", "hf:phi3", "--model.settings", config, "--model.max_seq_len", "128"]
    with pytest.raises(
        PlanError, match=r"max_seq_len: longer than the original .*Fix: --model.max"
    ):
        prepared(load(words, FAMILIES))


def test_factors_of_longrope_are_checked_by_transformers(tmp_path: Path) -> None:
    folder = longrope_folder(tmp_path, long_factor=[1.0] * 5)
    with pytest.raises(CheckpointError, match=r"transformers rejects it: .*'validate_rope'"):
        described(folder, "phi3")


def test_dynamic_rope_is_plain_within_the_context() -> None:
    values = dict(vars(FAMILIES["hf:llama"].Config()))
    settings = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    values |= {"settings": json.dumps(settings)}
    values.pop(AXES)
    assert check_against_transformers("llama", values, packs_documents=True) == ""


def test_advice_of_transformers_on_a_config_is_not_shown(tmp_path: Path) -> None:
    """Such as on the original context of longrope, which every command would repeat."""
    config = architecture("phi3").config
    rope = {**config.rope_parameters, "rope_type": "longrope"}
    rope["original_max_position_embeddings"] = 32
    factors = [1.0] * (config.hidden_size // config.num_attention_heads // 2)
    config.rope_parameters = {**rope, "short_factor": factors, "long_factor": factors}
    config.original_max_position_embeddings = 32
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    words = ("import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--compare", "False")
    found = subprocess.run(
        [sys.executable, "-m", "weft", *words], capture_output=True, text=True, check=True
    )
    assert "transformers]" not in found.stderr


def test_one_note_names_the_settings_that_a_family_does_not_compute(tmp_path: Path) -> None:
    """Windows of Qwen 2 are two: the switch, and the types of layers that it makes."""
    config = architecture("qwen2").config
    config.use_sliding_window, config.layer_types = True, ["full_attention", "sliding_attention"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run = load(["--model.from_hf", str(tmp_path)], FAMILIES)
    (note,) = [note for note in training_notes(run) if "transformers' own code" in note]
    assert "use_sliding_window" in note
    assert "layer_types" in note
