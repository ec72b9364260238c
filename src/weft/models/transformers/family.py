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
from weft.models.transformers.architectures import PREFIX, architectures, model_type_of
from weft.models.transformers.axes import axes_of
from weft.models.transformers.build import architecture_of, build, default_config
from weft.models.transformers.chain import blocks_of_model
from weft.models.transformers.folders import folder_mapping
from weft.models.transformers.sizes import SETTINGS, SIZES, fields_of
from weft.models.user_family import UserFamily
from weft.models.user_model import Model

PACKAGE = "transformers"
SETTINGS_HELP = "all other keys of config.json, as JSON; empty: tiny ones"


@functools.cache
def transformers_family(name: str) -> UserFamily:
    """The family of `hf:olmo2`.

    Raises:
        ConfigError: transformers is missing, or has no such decoder.
    """
    model_type = model_type_of(name)

    def blocks(config: Any) -> dict[str, nn.Module]:
        """The chain embed, layer0, ..., head."""
        found = architecture_of(model_type, vars(config))
        lm = build(found.config, implementation=found.captured.implementation)
        return blocks_of_model(lm, found.captured)

    def axes(config: Any) -> Mapping[str, Any]:
        """Logical axes by exact name."""
        return axes_of(architecture_of(model_type, vars(config)), vars(config))

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
    """A dataclass with the sizes that configs of this type have."""
    entries = [
        (name, int, field(default=SIZES[name].tiny, metadata={"help": SIZES[name].help}))
        for name, _ in fields_of(default_config(model_type))
    ]
    settings = (SETTINGS, str, field(default="", metadata={"help": SETTINGS_HELP}))
    return make_dataclass("Config", [*entries, settings], frozen=True)
