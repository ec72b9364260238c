"""The family of a decoder of transformers: a user's model whose file weft writes itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import Any

from torch import nn

from weft.code.identity import CodeIdentity
from weft.code.sources import version_of
from weft.code.values import short_digest
from weft.config.hf.architectures import (
    KEY,
    PREFIX,
    architectures,
    model_type_of,
    scored_architectures,
)
from weft.errors import ConfigError, Fault
from weft.models.transformers.adapt import adapt
from weft.models.transformers.axis_rows import axes_of, shards, shards_parts
from weft.models.transformers.build import architecture_of, default_config
from weft.models.transformers.chain import blocks_of_model
from weft.models.transformers.folders import folder_mapping
from weft.models.transformers.sizes import (
    AXES,
    DROPOUT,
    LABELS,
    SETTINGS,
    SIZES,
    fields_of,
    tiny_size,
)
from weft.models.user_family import UserFamily
from weft.models.user_model import Model

PACKAGE = "transformers"
NEEDED = {"layers", "dim", "vocab"}
TEXTS = {
    SETTINGS: "other keys of config.json, as JSON; tiny ones where none are given",
    AXES: "axes by pattern of parameters, as JSON; empty: found at the start, where the mesh has tp",
}


@functools.cache
def transformers_family(name: str) -> UserFamily:
    """The family of `hf:olmo2`.

    Raises:
        ConfigError: transformers is missing, or has no such decoder.
    """
    model_type = model_type_of(name)

    def values_of(config: Any) -> dict[str, Any]:
        """What decides the architecture."""
        return {name: value for name, value in vars(config).items() if name != AXES}

    def blocks(config: Any) -> dict[str, nn.Module]:
        """The chain embed, layer0, ..., head."""
        found = architecture_of(model_type, values_of(config))
        lm = adapt(found.build())
        for own in found.untrained:
            lm.get_parameter(own).requires_grad_(False)
        return blocks_of_model(
            lm,
            found.captured,
            has_region=shards(found, vars(config)),
            has_parts=shards_parts(found, vars(config)),
        )

    def axes(config: Any) -> Mapping[str, Any]:
        """Logical axes by exact name."""
        return axes_of(architecture_of(model_type, values_of(config)), vars(config))

    version = str(version_of(PACKAGE))
    model = Model(
        Config=_config_class(model_type),
        blocks=blocks,
        AXES=axes,
        INPUTS="tokens",
        HF=folder_mapping(model_type, architectures()[model_type]),
        name=f"{PREFIX}{model_type}",
        text="",
        code=CodeIdentity({f"package {PACKAGE}": short_digest(version.encode())}),
    )
    return UserFamily(model)


def _config_class(model_type: str) -> type:
    """A dataclass with the sizes that configs of this type have.

    Raises:
        ConfigError: it is no config of one decoder.
    """
    default = default_config(model_type)
    fields = dict(fields_of(default))
    has_senses = any("vision" in name or "audio" in name for name in type(default).sub_configs)
    if has_senses or not fields.keys() >= NEEDED:
        what = f"{PREFIX}{model_type} is a model of several parts, not one decoder"
        raise ConfigError(Fault(KEY, what, fix=_text_part(model_type)))
    entries = [
        (name, int, field(default=tiny_size(model_type, name), metadata={"help": SIZES[name].help}))
        for name in fields
    ]
    texts = [
        (name, str, field(default="", metadata={"help": text})) for name, text in TEXTS.items()
    ]
    help_text = {"help": "dropout as the settings say; False: none"}
    dropout = (DROPOUT, bool, field(default=True, metadata=help_text))
    labels = []
    if model_type in scored_architectures():
        help_text = {"help": "scores of a text; 0: the head is that of the vocabulary"}
        labels.append((LABELS, int, field(default=0, metadata=help_text)))
    return make_dataclass("Config", [*entries, dropout, *labels, *texts], frozen=True)


def _text_part(model_type: str) -> str:
    """The name of the decoder of a model of several parts, where transformers has one."""
    names = [name for name in (f"{model_type}_text",) if name in architectures()]
    return f"its text part, {PREFIX}{names[0]}" if names else "another architecture"
