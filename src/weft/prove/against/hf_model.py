"""A model of transformers by its config.json, in float64, loaded from a folder, with its layer of multi-token prediction."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from weft.checkpoint.source import Source
from weft.config.hf.mapping import HFMapping
from weft.config.hf.read_config import CONFIG
from weft.config.hf.safetensors_files import list_some
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.text_tensors import Renaming
from weft.prove.against.float64 import compute_in_float64
from weft.prove.against.hf_weights import export

OPTIONS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
SIDE_NAMES = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "post_norm.": "shared_head.norm.",
    "mtp_block.": "",
}
"""Start of a name in transformers' `MtpLayer` -> its start in a published folder, below the layer."""


@dataclass(frozen=True)
class HFModel:
    """A model of transformers with the weights of a run.

    Attributes:
        model: of the class that the family names.
        side: the layer of multi-token prediction; None: there is none.
        published: tensors by the names of a published folder: parameters and buffers.
    """

    model: Any
    side: nn.Module | None
    published: Mapping[str, Tensor]

    @property
    def base(self) -> Any:
        """The model without its head."""
        return getattr(self.model, self.model.base_model_prefix)

    @cached_property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in their order."""
        for module in self.base.children():
            if isinstance(module, nn.ModuleList):
                return tuple(module)
        raise AssertionError("transformers' decoders hold their layers in a ModuleList")

    @property
    def modules(self) -> Iterator[nn.Module]:
        """All modules, those of the side layer among them."""
        yield from self.model.modules()
        if self.side is not None:
            yield from self.side.modules()

    @property
    def trained(self) -> dict[str, Tensor]:
        """The published tensors that are parameters; buffers are not trained."""
        return {
            name: tensor
            for name, tensor in self.published.items()
            if isinstance(tensor, nn.Parameter)
        }

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients by published names, zero where a tensor has none; they are cleared."""
        found = {}
        for name, param in self.trained.items():
            found[name] = torch.zeros_like(param) if param.grad is None else param.grad
        for param in self.trained.values():
            param.grad = None
        return found


def quiet_transformers() -> Any:
    """transformers, whose log and progress bars are silent; seconds to import."""
    import transformers  # late: an extra

    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    return transformers


def untouched_model(config: Mapping[str, Any], mtp_depth: int) -> HFModel:
    """The model with the starting values that transformers draws."""
    transformers = quiet_transformers()
    with tempfile.TemporaryDirectory(prefix="weft-config-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        hf_config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float64, **OPTIONS)
    return _finished(model, mtp_depth)


def _options(transformers: Any, hf_config: Any) -> dict[str, str]:
    """Options of a class of transformers: its eager code, where it has no other attention."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    return OPTIONS if model_class._supports_sdpa else {**OPTIONS, "attn_implementation": "eager"}


def loaded_model(folder: Path, config: Mapping[str, Any], mtp_depth: int) -> HFModel:
    """The model of a folder, read by transformers.

    Args:
        config: config.json to read it with.

    Raises:
        CheckpointError: transformers misses tensors, or does not know some.
    """
    transformers = quiet_transformers()
    with tempfile.TemporaryDirectory(prefix="weft-config-") as other:
        (Path(other) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        hf_config = transformers.AutoConfig.from_pretrained(other)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=hf_config,
        dtype=torch.float64,
        local_files_only=True,
        output_loading_info=True,
        **_options(transformers, hf_config),
    )
    side_layer = f"model.layers.{hf_config.num_hidden_layers}."
    unknown = [name for name in info["unexpected_keys"] if not name.startswith(side_layer)]
    faults = []
    for what, names in (("misses", info["missing_keys"]), ("does not know", unknown)):
        if names:
            fault = Fault(str(folder), f"transformers {what} {list_some(sorted(names))}")
            faults.append(fault)
    if faults:
        raise CheckpointError(*faults)
    read_as_stored(model, folder)
    return _finished(model, mtp_depth)


def read_as_stored(model: nn.Module, folder: Path) -> None:
    """Make a model float64 with the bits of its folder: transformers rounds tensors to float32 whose
    modules declare that type, whatever type is asked for.

    Raises:
        CheckpointError: such a tensor is not in the folder.
    """
    rounded = {name for name, x in model.state_dict().items() if x.dtype == torch.float32}
    tensors = model.double().state_dict()
    renaming = Renaming(model)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            listed = stored.keys()
            names = {own: name for name in listed for own in (renaming.renamed(name), name)}
            for name in rounded.intersection(names):
                tensors[name].copy_(stored.get_tensor(names[name]))
                rounded.remove(name)
    if rounded:
        what = f"transformers rounds {list_some(sorted(rounded))} to float32"
        raise CheckpointError(Fault(str(folder), what, need="tensors of these names in its files"))


def exported_model(
    values: Source, *, mapping: HFMapping, cfg: ModelConfig, config: Mapping[str, Any]
) -> HFModel:
    """A model of weft, written as `weft export` does and read by transformers."""
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as parent:
        folder = Path(parent) / "exported"
        export(folder, values, mapping=mapping, cfg=cfg, config=config)
        return loaded_model(folder, config, getattr(cfg, "mtp_depth", 0))


def _finished(model: Any, mtp_depth: int) -> HFModel:
    """The model for training in float64, and its side layer with drawn values."""
    model.train()
    side = _side_layer(model) if mtp_depth else None
    compute_in_float64(model)
    if side is not None:
        compute_in_float64(side)
    return HFModel(model, side, _published(model, side))


def _side_layer(model: Any) -> nn.Module:
    """One more layer of the model, as transformers predicts the token after the next one."""
    from transformers.modeling_layers import MtpLayer  # late: an extra

    layers = model.base_model.layers
    kind = type(layers[-1])
    norm = type(layers[-1].input_layernorm)
    side: nn.Module = MtpLayer(model.config, kind, norm, len(layers) - 1)
    side.apply(model._init_weights)
    return side


def _published(model: Any, side: nn.Module | None) -> dict[str, Tensor]:
    found = dict(model.state_dict(keep_vars=True))
    if side is None:
        return found
    layer = f"model.layers.{model.config.num_hidden_layers}"
    for name, tensor in side.state_dict(keep_vars=True).items():
        for start, published in SIDE_NAMES.items():
            if name.startswith(start):
                found[f"{layer}.{published}{name.removeprefix(start)}"] = tensor
    return found
