"""Every discovered family that transformers has: logits and gradients in float64, with weights read by its hf.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.hugging_face import EXACT, compare_gradients, make_batch, near, our_blocks
from tests.small_models import HF_FAMILIES, small_config
from weft.config.hf.read_config import describe_folder
from weft.config.hf.safetensors_files import TensorEntry
from weft.config.hf.write_config import config_json
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.core.rope_scaling import RopeScaling
from weft.hf.match import MatchedFolder, mapping_of, match_tensors
from weft.hf.placement import ParamSource
from weft.models import FAMILIES
from weft.models.common.batch import IGNORE, forward
from weft.models.common.init import named_parameters
from weft.prove.against.float64 import widened

transformers = pytest.importorskip(
    "transformers", reason="the oracle is Hugging Face's transformers (extra `oracle`)"
)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_logits_and_gradients_equal_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare_with_transformers(small_config(family, balance_loss=0.0), tmp_path, monkeypatch)


SCALINGS = (
    "linear factor=2.0",
    "dynamic factor=2.0",
    "llama3 factor=4.0 original=16",
    "yarn factor=4.0 original=16",
    "yarn factor=4.0 original=16 fast=4.0 slow=0.5 gain=1.3 truncate=false",
)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "family", [name for name in HF_FAMILIES if "rope_scaling" in FAMILIES[name].Config.model_fields]
)
def test_scaled_rotary_embeddings_equal_transformers(
    family: str, scaling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that weft writes is read as the same model, and computes the same."""
    cfg = small_config(family, balance_loss=0.0, layers=2)
    cfg = type(cfg)(**{**cfg.model_dump(), "rope_scaling": scaling})
    compare_with_transformers(cfg, tmp_path, monkeypatch)
    found = describe_folder(tmp_path, FAMILIES).fields
    if family == "llama3" and scaling.startswith("llama3"):
        assert (found["rope_scaling"], found["rope_scaling_factor"]) == (
            None,
            4.0,
        )  # its own fields
    else:
        read, written = map(RopeScaling.parse, (found["rope_scaling"], scaling))
        assert replace(read, gain=read.cosine_gain) == replace(written, gain=written.cosine_gain)


def compare_with_transformers(
    cfg: ModelConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare logits, loss and all gradients with the model of the folder that weft writes."""
    torch.manual_seed(0)
    family = cfg.family
    hf_model = random_hf_model(cfg, folder)
    compute_in_float64(hf_model, monkeypatch)
    matched = match_state(hf_model, cfg)
    blocks = our_blocks(cfg)
    params = named_parameters(blocks)
    with torch.no_grad():
        for name, source in matched.params.items():
            params[name].copy_(assemble(source, hf_model.state_dict()))

    batch = make_batch(cfg.axis_sizes()["vocab"])
    logits_BSV = hf_model(input_ids=batch.inputs, use_cache=False).logits
    targets = batch.targets.flatten()
    loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
    without_loss = {name: block for name, block in blocks.items() if name != "loss"}
    near(forward(without_loss, batch), logits_BSV, "logits", EXACT)
    weft_loss = forward(blocks, batch)
    near(weft_loss, loss, "loss", EXACT)

    loss.backward()
    weft_loss.backward()
    hf_gradients = {name: param.grad for name, param in hf_model.named_parameters()}
    ties = FAMILIES[family].ties(cfg)
    trained = {
        name: param for name, param in params.items() if param.requires_grad and name not in ties
    }
    gradients = {name: assemble(matched.params[name], hf_gradients) for name in trained}
    compare_gradients(trained, gradients, EXACT)


def random_hf_model(cfg: ModelConfig, folder: Path) -> nn.Module:
    """transformers' model of the config.json that weft writes, float64, every weight moved far from
    its start.
    """
    config = config_json(mapping_of(cfg.family), cfg, dtype="float64")
    (folder / "config.json").write_text(json.dumps(config))
    hf_config = transformers.AutoConfig.from_pretrained(folder)
    implementations = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    hf_model = transformers.AutoModelForCausalLM.from_config(hf_config, **implementations).double()
    with torch.no_grad():
        for tensor in {
            tensor.data_ptr(): tensor for tensor in hf_model.state_dict().values()
        }.values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    return hf_model


def compute_in_float64(hf_model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms and routers of this model compute in float64, where transformers casts to float32."""
    for kind in {type(module) for module in hf_model.modules()}:
        if kind.__name__.endswith(("RMSNorm", "Router")):
            monkeypatch.setattr(kind, "forward", widened(kind.forward))


def match_state(hf_model: nn.Module, cfg: ModelConfig) -> MatchedFolder:
    """The state dict matched with the rules of the family, as if it were a folder."""
    entries = {}
    for name, tensor in hf_model.state_dict().items():
        entries[name] = TensorEntry(Path("state_dict"), "F64", tuple(tensor.shape), 0, 0)
    ties = FAMILIES[cfg.family].ties(cfg)
    return match_tensors(
        mapping_of(cfg.family).weights, cfg, entries, ties=ties, folder="state_dict"
    )


def assemble(source: ParamSource, tensors: Mapping[str, Tensor]) -> Tensor:
    """The whole parameter, from HF tensors by name."""
    assembled = torch.empty(source.shape, dtype=torch.float64)
    for copy in source.copies(Box.whole(source.shape)):
        part = tensors[copy.source][copy.box.slices]
        assembled[copy.at] = part.T if copy.transposed else part
    return assembled
