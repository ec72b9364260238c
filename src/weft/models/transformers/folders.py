"""Folders of a decoder of transformers: config.json as it is, tensors by transformers' own names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.config.hf.architectures import scored_architectures
from weft.config.hf.mapping import (
    ConfigMapping,
    HFMapping,
    IndexSets,
    Json,
    WeightMapping,
    WeightRule,
)
from weft.config.hf.read_config import CONFIG
from weft.config.keys import Flat
from weft.errors import Fault, PlanError, counted, type_and_message
from weft.models.transformers.build import (
    architecture_of,
    build,
    config_of,
    default_config,
    longrope,
    param_names,
    random_of,
)
from weft.models.transformers.interfaces import EAGER
from weft.models.transformers.sizes import (
    LABEL_KEYS,
    LABELS,
    NONE,
    SETTINGS,
    derived,
    fields_of,
    own_name,
)
from weft.models.transformers.stored import stored_tensors

POSITIONS = "max_seq_len"


def folder_mapping(model_type: str, class_name: str) -> HFMapping:
    """The format of the folders of an architecture."""
    own = FolderConfig(model_type)
    return HFMapping(
        architecture=class_name,
        model_type=model_type,
        config=ConfigMapping(whole=own, unwritable=own.unwritable),
        weights=WeightMapping(
            own=own, ignored=("*.rotary_emb.inv_freq",), index_sets=_none, unused=own.unused
        ),
        scored=scored_architectures().get(model_type, ""),
    )


def _none(_cfg: Any) -> IndexSets:
    """No rule has placeholders."""
    return {}


FLOAT = "__float__"
"""Key of a table that transformers writes in place of infinity, which JSON does not have."""


def _with_floats(value: Any) -> Any:
    """JSON of transformers with the numbers that such tables stand for."""
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT}:
        return float(value[FLOAT])
    return {name: _with_floats(each) for name, each in value.items()}


@dataclass(frozen=True)
class FolderConfig:
    """config.json of an architecture; its sizes are fields, all else is in `settings`."""

    model_type: str

    def faults(self, config: Json, *, key: str) -> Iterator[Fault]:
        """Quantised weights, code of the folder's own, and what transformers rejects."""
        if config.get("quantization_config"):
            fix = "turn its weights into bfloat16 first"
            yield Fault(key, "quantization_config: quantised weights are not trained", fix=fix)
            return
        try:
            self._read(config)
        except PlanError as error:
            yield Fault(key, error.faults[0].what, fix="correct it, or download the file again")

    def _read(self, config: Json) -> Any:
        """The config as transformers reads it.

        Raises:
            PlanError: it does not.
        """
        try:
            return type(default_config(self.model_type)).from_dict(_with_floats(config))
        except Exception as error:
            what = f"transformers rejects it: {type_and_message(error)}"
            raise PlanError(Fault(CONFIG, what)) from error

    def has_key(self, name: str) -> bool:
        """Whether transformers' config of this architecture declares a key."""
        return name in {field.name for field in dataclasses.fields(default_config(self.model_type))}

    def fields(self, config: Json) -> Flat:
        """Sizes, and all other keys as JSON."""
        default = default_config(self.model_type)
        read = self._read(config)
        sizes = dict(fields_of(default))
        settings = {own_name(default, name): value for name, value in _with_floats(config).items()}
        left_out = {*sizes.values(), *LABEL_KEYS}
        others = {name: value for name, value in settings.items() if name not in left_out}
        values = vars(read)  # an attribute that differs between layers cannot be asked for
        found: Flat = {
            field: values[name] if name in values else getattr(read, name)
            for field, name in sizes.items()
        }
        found.update({name: value for name, value in derived(found).items() if name in found})
        context = longrope(values).get("original_max_position_embeddings")
        if context and context < found.get(POSITIONS, 0):  # its tables are those of this context
            others[sizes[POSITIONS]] = found[POSITIONS]
            found[POSITIONS] = context
        found = {field: value or NONE for field, value in found.items()}
        return {**found, SETTINGS: json.dumps(others, sort_keys=True)}

    def write(self, cfg: Any) -> dict[str, Any]:
        """The config that the model was built with, with the noise that its author trained it with."""
        values = self._values(cfg)
        written: dict[str, Any] = config_of(self.model_type, values).to_dict()
        return written | random_of(self.model_type, json.loads(values[SETTINGS] or "{}"))

    def unwritable(self, cfg: Any) -> Iterator[Fault]:
        """Buffers that a folder holds, and that weft, which trains parameters, does not have."""
        buffers = architecture_of(self.model_type, self._values(cfg)).stored_buffers
        if buffers:
            what = f"an export would leave out {counted(len(buffers), 'buffer')}"
            yield Fault("model.name", what, got=min(buffers), fix="a family of weft's own")

    def rules(self, cfg: Any) -> Iterator[WeightRule]:
        """The tensors that transformers writes."""
        found = architecture_of(self.model_type, self._values(cfg))
        own = {rule.tensor: rule for rule in self.packed(cfg)}
        with torch.device("meta"):
            lm = found.build(EAGER)
        for tensor, name, part in stored_tensors(lm, found.shapes):
            yield replace(own[name], tensor=tensor, part=part)

    def unused(self, cfg: Any) -> tuple[str, ...]:
        """The tensors of a language model's head, which a model with labels leaves out."""
        found = architecture_of(self.model_type, self._values(cfg))
        if not found.labels:
            return ()
        with torch.device("meta"):
            lm: Any = build(found.config, implementation=EAGER)
        head = lm.get_output_embeddings()
        path = next(path for path, module in lm.named_modules() if module is head)
        shapes = {f"{path}.{name}": tuple(param.shape) for name, param in head.named_parameters()}
        return (*shapes, *(tensor for tensor, _, _ in stored_tensors(lm, shapes)))

    def packed(self, cfg: Any) -> Iterator[WeightRule]:
        """One tensor a parameter, under the name that it has in memory."""
        found = architecture_of(self.model_type, self._values(cfg))
        for name, own in param_names(found).items():
            yield WeightRule(
                name,
                own,
                transposed=own in found.transposed,
                keep_float32=own in found.kept,
                is_integer=own in found.integers,
            )

    def _values(self, cfg: Any) -> dict[str, Any]:
        sizes = dict(fields_of(default_config(self.model_type)))
        found = {name: getattr(cfg, name) for name in (*sizes, SETTINGS)}
        return {**found, LABELS: getattr(cfg, LABELS, 0)}
