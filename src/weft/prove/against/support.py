"""Which runs transformers can repeat, and the config.json of the compared model. No torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.config.hf.mapping import HFMapping, Json
from weft.config.hf.read_config import CONFIG, hf_mappings
from weft.config.hf.safetensors_files import read_json
from weft.config.hf.write_config import config_json, unwritable
from weft.config.schema import LoraConfig, ModelSection, PrecisionConfig
from weft.core.model_config import ModelConfig
from weft.errors import Fault, UserError
from weft.models import FAMILIES
from weft.models.transformers.sizes import SETTINGS, is_drop_out

KEY = "--against"
CROSS_ENTROPY = "cross_entropy"
LIBRARY = "transformers"
DTYPE = "float64"


def check_support(
    model: ModelSection, lora: LoraConfig, precision: PrecisionConfig, *, loss: str
) -> HFMapping:
    """How transformers names the model.

    Raises:
        UserError: transformers is missing, or does not compute this model, or the loss is another.
    """
    faults = tuple(_faults(model, lora, precision))
    if faults:
        raise UserError(*faults)
    if loss != CROSS_ENTROPY:
        fix = "prove the layout without --against, or with --loss cross_entropy and text"
        what = "the loop over transformers computes the cross entropy alone"
        raise UserError(Fault("loss", what, got=loss, need=CROSS_ENTROPY, fix=fix))
    mapping = FAMILIES[model.name].hf
    assert mapping is not None, "checked above"
    return mapping


def _faults(model: ModelSection, lora: LoraConfig, precision: PrecisionConfig) -> Iterator[Fault]:
    if importlib.util.find_spec(LIBRARY) is None:
        yield Fault(KEY, "transformers is not installed", fix='pip install "weft-train[oracle]"')
        return
    if FAMILIES[model.name].hf is None:
        need = f"one of {', '.join(hf_mappings(FAMILIES))}, or a model with a table HF"
        yield Fault(
            KEY,
            "transformers has no such model",
            got=model.name,
            need=need,
            fix="prove the layout without --against; docs/extend.md says what a table HF is",
        )
        return
    yield from unwritable(model, FAMILIES)
    yield from _drop_out_faults(model)
    if precision.linears == "fp8":
        what = "transformers' classes have no linears in fp8"
        fix = "prove the layout without --against, or with --precision.linears default"
        yield Fault("precision.linears", what, got="fp8", need="default", fix=fix)
    if lora.rank:
        yield Fault(
            "lora.rank",
            "adapters are not in transformers' classes",
            got=str(lora.rank),
            need="0",
            fix="prove the base model: --lora.rank 0",
        )


def _drop_out_faults(model: ModelSection) -> Iterator[Fault]:
    """Dropout of the family's own, or that settings of transformers name."""
    dropout = getattr(model, "dropout", 0)
    got = ""
    if isinstance(dropout, bool):
        settings: Json = json.loads(getattr(model, SETTINGS) or "{}")
        named = [name for name, value in settings.items() if is_drop_out(name, value)]
        got = ", ".join(named) if dropout else ""
    elif dropout:
        got = f"{dropout:g}"
    if got:
        fix = f"prove it without dropout: --model.dropout {type(dropout)(0)}"
        what = "transformers drops other entries than weft"
        yield Fault("model.dropout", what, got=got, need="none", fix=fix)


def compared_config(
    mapping: HFMapping, compared: ModelConfig, configured: ModelSection
) -> dict[str, Any]:
    """config.json of the compared model.

    Of a run that starts from a folder it is the folder's own file, in which only what the
    comparison has reduced is replaced: so transformers reads the published keys itself.

    Args:
        configured: the model of the run before its sizes were reduced.
    """
    written = config_json(mapping, compared, dtype=DTYPE)
    path = None if configured.from_hf is None else Path(configured.from_hf) / CONFIG
    if path is None or not path.is_file():
        return written
    found = dict(read_json(path))
    before = config_json(mapping, configured, dtype=DTYPE)
    found.update({key: value for key, value in written.items() if value != before.get(key)})
    return _cut_layer_lists(found, before, written)


def _cut_layer_lists(found: Json, before: Json, written: Json) -> dict[str, Any]:
    """Lists with an entry for each layer, for the layers that are compared."""
    num_before, num_compared = (_num_layers(config) for config in (before, written))
    cut = {}
    for key, value in found.items():
        is_of_layers = isinstance(value, list) and len(value) == num_before
        cut[key] = value[:num_compared] if is_of_layers else value
    return cut


def _num_layers(config: Json) -> int:
    return int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
