"""The section of the run config that is made from the `Config` of a user's model. Imports no torch."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar, Protocol

from pydantic import Field, PrivateAttr, create_model, model_validator

from weft.config.schema import ModelSection
from weft.core.input_spec import InputSpec
from weft.core.model_config import BlockSpec, LinearShapes, ModelConfig, ModelNotBuiltError
from weft.errors import ConfigError, Fault
from weft.models.field_help import field_descriptions
from weft.models.user_model import KEY, Model

CONTEXT_FIELDS = (
    "max_seq_len", "context", "context_length", "context_size", "block_size", "n_ctx", "n_positions",
    "max_position_embeddings", "max_positions",
)  # fmt: skip
"""Fields that name the longest sequence of a model, if there is one."""


class ModelParts(Protocol):
    """What a config needs of its model's modules; in user_family.py, which imports torch."""

    def axis_sizes(self, cfg: Any) -> dict[str, int]: ...

    def block_specs(self, cfg: Any, seq_len: int) -> tuple[BlockSpec, ...]: ...

    def linears(self, cfg: Any) -> LinearShapes: ...

    def expert_linears(self, cfg: Any) -> LinearShapes: ...

    def user_config(self, cfg: Any) -> Any: ...

    def input_specs(self, cfg: Any) -> dict[str, InputSpec]: ...


class UserModelConfig(ModelConfig):
    """Base of the configs that are made from the `Config` of user models."""

    is_opaque: ClassVar[bool] = True
    parts: ClassVar[ModelParts]
    field_names: ClassVar[tuple[str, ...]] = ()
    _may_be_built: bool = PrivateAttr(default=True)

    def unbuilt(self) -> UserModelConfig:
        copy = self.model_copy()
        copy._may_be_built = False
        return copy

    def _built(self) -> ModelParts:
        if not self._may_be_built:
            raise ModelNotBuiltError
        return self.parts

    def axis_sizes(self) -> dict[str, int]:
        return self._built().axis_sizes(self)

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        return self._built().block_specs(self, seq_len)

    def linears(self) -> LinearShapes:
        return self._built().linears(self)

    def expert_linears(self) -> LinearShapes:
        return self._built().expert_linears(self)

    def input_specs(self) -> dict[str, InputSpec]:
        return self.parts.input_specs(self)

    def check_seq_len(self, seq_len: int) -> Fault | None:
        """Longer than the context that a field of the config names."""
        for name in CONTEXT_FIELDS:
            longest = getattr(self, name, None)
            if isinstance(longest, int) and seq_len > longest:
                return Fault(
                    "data.seq_len",
                    "longer than the model's context",
                    got=str(seq_len),
                    need=f"at most model.{name} = {longest}",
                    fix=f"set model.{name} to {seq_len} or data.seq_len to {longest}",
                )
        return None

    @model_validator(mode="after")
    def _is_valid_for_its_author(self) -> UserModelConfig:
        self.parts.user_config(self)
        return self


def config_type(model: Model, parts: ModelParts) -> type[UserModelConfig]:
    """The section of the run config with the fields of a model's Config.

    Raises:
        ConfigError: a field's type cannot be a value of a config, or its name is one of weft's.
    """
    names = tuple(field.name for field in dataclasses.fields(model.Config))
    faults = [_reserved(model, name) for name in names if name in _names_of_weft()]
    if faults:
        raise ConfigError(*faults)

    class OwnConfig(UserModelConfig):
        pass

    OwnConfig.parts = parts
    OwnConfig.field_names = names
    OwnConfig.family = model.name
    OwnConfig.kind = model.kind
    try:
        fields = _pydantic_fields(model.Config, names)
        made: Any = create_model("Config", __base__=OwnConfig, **fields)
        made()
    except Exception as error:
        first_line = " ".join(str(error).split())
        fault = Fault(
            KEY,
            f"{model.label}: Config cannot be made from its defaults: {first_line}",
            need="numbers, texts, booleans, or tuples of them",
        )
        raise ConfigError(fault) from error
    found: type[UserModelConfig] = made
    return found


def _names_of_weft() -> frozenset[str]:
    """Names that every section of a model has: keys, attributes, and what is declared for them."""
    found: set[str] = set()
    for section in (*ModelSection.__mro__, *UserModelConfig.__mro__):
        found |= {*vars(section), *vars(section).get("__annotations__", ())}
    return frozenset(found)


def _reserved(model: Model, name: str) -> Fault:
    what = f"{model.label}: Config.{name} is a name that weft uses itself"
    return Fault(KEY, what, fix="rename the field")


def _pydantic_fields(config: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Name -> (type, field) as `create_model` takes them, with the defaults of the dataclass."""
    descriptions = field_descriptions(config)
    hints = typing.get_type_hints(config, include_extras=True)
    defaults = config()
    fields: dict[str, Any] = {}
    for name in names:
        default = getattr(defaults, name)
        description = descriptions.get(name, "")
        field = Field(default, description=description)
        fields[name] = (hints[name], field)
    return fields
