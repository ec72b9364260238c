"""A user's model: what its file or value contains, and its config as a section of the run config. Imports no torch.

Config             frozen dataclass; its fields become --model.* flags
blocks(config)     modules by name, in order; each is called with (x) or (x, batch)
AXES               pattern of parameter names -> logical axis of each dimension; or a function of the config
TIES               alias -> owner of tied parameters; or a function of the config. Optional
INIT               pattern of parameter names -> distribution of initial values. Optional
INPUTS             "tokens" or "images". Optional
HF                 weft.config.hf.mapping.HFMapping. Optional
blocks_of(module)  blocks by name of the one module that `blocks` returns. Optional
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, create_model, model_validator

from weft.config.hf.mapping import HFMapping
from weft.config.schema import ModelSection, label_of
from weft.config.user_code import is_file_reference, load_module, source_digest, source_text
from weft.core.model_config import BlockSpec, InitTable, LinearShapes, ModelConfig
from weft.core.shard import DimAxis
from weft.errors import ConfigError, Fault

if TYPE_CHECKING:
    pass

KEY = "model.name"
Kind = Literal["tokens", "images"]
IMAGE_FIELDS = ("image_size", "classes")
"""Fields that a model of images has: height and width in pixels, and number of classes."""
CONTEXT_FIELDS = ("max_seq_len", "context", "block_size")
"""Fields that name the longest sequence of a model, if there is one."""
CHANGED = "the model file has changed since the run started"


UserTable = Mapping[str, tuple[DimAxis | None, ...]]
"""As `AxisTable`; None is the axis of a dim that is not sharded."""


@dataclass(frozen=True)
class Model:
    """A user's model as a value, for `weft.train(model=...)`: what a model file contains.

    Attributes:
        Config: frozen dataclass with a default for every field.
        blocks: (config) -> modules by name in order, or an nn.Sequential.
        AXES: pattern of parameter names -> logical axis of each dimension, or (config) -> such a
            table.
        TIES: alias -> owner of tied parameters, or (config) -> such a table.
        INIT: pattern of parameter names -> `("normal", std)`, `("ones",)` or `("zeros",)`; None: the
            values that the modules' constructors give after `torch.manual_seed(seed)`.
        INPUTS: what the model reads; None: images where Config has a field `image_size`.
        HF: its format in Hugging Face folders.
        blocks_of: (module) -> blocks by name, where `blocks` returns another module than a chain.
        name: as messages and folders call it; for a file its absolute path.
        digest: of its source code, where that is known.
        text: of its file.
    """

    Config: type
    blocks: Callable[[Any], Any]
    AXES: UserTable | Callable[[Any], UserTable] | None = None
    TIES: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None
    INIT: InitTable | Callable[[Any], InitTable] | None = None
    INPUTS: Kind | None = None
    HF: HFMapping | None = None
    blocks_of: Callable[[Any], Any] | None = None
    name: str = "model"
    digest: str | None = None
    text: str | None = None

    @property
    def kind(self) -> Kind:
        """What it reads."""
        if self.INPUTS is not None:
            return self.INPUTS
        names = {field.name for field in dataclasses.fields(self.Config)}
        return "images" if "image_size" in names else "tokens"

    @property
    def label(self) -> str:
        """A short name for messages."""
        return label_of(self.name)


@dataclass(frozen=True)
class NoFields:
    """The config of a model without a `Config`."""


def model_of_file(reference: str, *, needs_axes: bool = True) -> Model:
    """The model of a file or module.

    Args:
        needs_axes: whether a file without AXES is rejected before it is imported.

    Raises:
        ConfigError: it cannot be imported, or lacks what a model needs; AXES are not checked.
    """
    if is_file_reference(reference):
        _check_names(Path(reference), needs_axes=needs_axes)
    module = load_module(reference, key=KEY)
    model = model_of(module, name=reference)
    return replace(model, digest=source_digest(module), text=source_text(module))


def _check_names(path: Path, *, needs_axes: bool) -> None:
    """Reject a file that defines no `blocks` or no AXES, without importing it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the import says what is wrong
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    if "*" in found:
        return
    if "blocks" not in found:
        raise ConfigError(_no_blocks(path.stem))
    if needs_axes and "AXES" not in found:
        raise ConfigError(no_axes(path.stem, str(path)))


def _no_blocks(label: str) -> Fault:
    need = "blocks(config), which returns modules by name in order"
    return Fault(KEY, f"{label} defines no blocks", need=need)


def no_axes(label: str, name: str) -> Fault:
    """A model without a table of axes."""
    fix = f"weft axes {name} proposes it"
    return Fault(KEY, f"{label} defines no AXES", fix=fix)


def model_of(namespace: Any, *, name: str) -> Model:
    """The model that a module, a class or any object with these names describes.

    Raises:
        ConfigError: it lacks what a model needs.
    """
    found = {}
    for field in dataclasses.fields(Model):
        if field.name in ("name", "digest", "text"):
            continue
        value = getattr(namespace, field.name, None)
        if value is not None:
            found[field.name] = value
    found.setdefault("Config", NoFields)
    faults = list(_faults(found, label_of(name)))
    if faults:
        raise ConfigError(*faults)
    model = Model(name=name, **found)
    if isinstance(namespace, ModuleType):
        return model
    return replace(model, digest=_digest_of_objects(model))


def _faults(found: Mapping[str, Any], name: str) -> Iterator[Fault]:
    """What is missing, or of another type."""
    if not callable(found.get("blocks")):
        yield _no_blocks(name)
    config = found["Config"]
    settings = getattr(config, "__dataclass_params__", None)
    is_frozen = settings is not None and settings.frozen
    if not isinstance(config, type) or not is_frozen:
        fix = "@dataclass(frozen=True) above class Config"
        yield Fault(KEY, f"{name}: Config is not a frozen dataclass", fix=fix)
        return
    yield from _field_faults(config, name)
    inputs = found.get("INPUTS")
    if inputs not in (None, "tokens", "images"):
        yield Fault(KEY, f"{name}: INPUTS", got=repr(inputs), need='"tokens" or "images"')
    names = {field.name for field in dataclasses.fields(config)}
    missing = [field for field in IMAGE_FIELDS if field not in names]
    reads_images = inputs == "images" or (inputs is None and "image_size" in names)
    if reads_images and missing:
        need = f"fields {' and '.join(IMAGE_FIELDS)}"
        what = f"{name}: Config of a model of images lacks {' and '.join(missing)}"
        yield Fault(KEY, what, need=need)


def _field_faults(config: type, name: str) -> Iterator[Fault]:
    """Fields without a default, or with the name of a key of every model."""
    reserved = set(ModelSection.model_fields)
    for field in dataclasses.fields(config):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if not has_default:
            what = f"{name}: Config.{field.name} has no default"
            yield Fault(KEY, what, fix=f"{field.name}: ... = a small value for tests")
        if field.name in reserved or hasattr(ModelConfig, field.name):
            what = f"{name}: Config.{field.name} is a name that weft uses itself"
            yield Fault(KEY, what, fix="rename the field")


def _digest_of_objects(model: Model) -> str | None:
    """SHA-256 of the source code of a model that is no file; None where that is not known."""
    try:
        sources = [inspect.getsource(part) for part in (model.Config, model.blocks)]
    except (OSError, TypeError):
        return None
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


class ModelParts(Protocol):
    """What a config needs of its model's modules; in user_family.py, which imports torch."""

    def axis_sizes(self, cfg: Any) -> dict[str, int]: ...

    def block_specs(self, cfg: Any, seq_len: int) -> tuple[BlockSpec, ...]: ...

    def linears(self, cfg: Any) -> LinearShapes: ...

    def user_config(self, cfg: Any) -> Any: ...


class UserModelConfig(ModelConfig):
    """Base of the configs that are made from the `Config` of user models."""

    parts: ClassVar[ModelParts]
    source_digest: ClassVar[str | None] = None
    field_names: ClassVar[tuple[str, ...]] = ()

    def axis_sizes(self) -> dict[str, int]:
        return self.parts.axis_sizes(self)

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        return self.parts.block_specs(self, seq_len)

    def linears(self) -> LinearShapes:
        return self.parts.linears(self)

    def check_seq_len(self, seq_len: int) -> Fault | None:
        """Longer than the context that a field of the config names."""
        for name in CONTEXT_FIELDS:
            longest = getattr(self, name, None)
            if isinstance(longest, int) and seq_len > longest:
                fix = f"set model.{name} to {seq_len} or data.seq_len to {longest}"
                what = "longer than the model's context"
                need = f"at most model.{name} = {longest}"
                return Fault("data.seq_len", what, got=str(seq_len), need=need, fix=fix)
        return None

    @model_validator(mode="after")
    def _is_valid_for_its_author(self) -> UserModelConfig:
        self.parts.user_config(self)
        stored = getattr(self, "digest", None)
        if stored is not None and stored != self.source_digest:
            raise ValueError(
                f"{CHANGED} ({label_of(self.family)}, now {self.source_digest}): restore it, or start a new run"
            )
        return self


def config_type(model: Model, parts: ModelParts) -> type[UserModelConfig]:
    """The section of the run config with the fields of a model's Config.

    Raises:
        ConfigError: a field's type cannot be a value of a config.
    """
    descriptions = field_descriptions(model.Config)
    names = tuple(field.name for field in dataclasses.fields(model.Config))

    class OwnConfig(UserModelConfig):
        pass

    OwnConfig.parts = parts
    OwnConfig.source_digest = model.digest
    OwnConfig.field_names = names
    OwnConfig.family = model.name
    OwnConfig.kind = model.kind
    try:
        hints = typing.get_type_hints(model.Config, include_extras=True)
        defaults = model.Config()
        fields: dict[str, Any] = {}
        for name in names:
            description = descriptions.get(name, "")
            default = getattr(defaults, name)
            fields[name] = (hints[name], Field(default, description=description))
        made: Any = create_model("Config", __base__=OwnConfig, **fields)
        made()
    except Exception as error:
        first_line = " ".join(str(error).split())
        what = f"{model.label}: Config cannot be made from its defaults: {first_line}"
        need = "numbers, texts, booleans, or tuples of them"
        raise ConfigError(Fault(KEY, what, need=need)) from error
    found: type[UserModelConfig] = made
    return found


def field_descriptions(config: type) -> dict[str, str]:
    """Help of each field: its `metadata["help"]`, else the text below it, else the comment behind it."""
    found: dict[str, str] = {}
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):
        source = ""
    if source:
        found.update(_comments(source))
        found.update(_texts_below(source))
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            found[field.name] = str(field.metadata["help"])
    return found


def _comments(source: str) -> dict[str, str]:
    """Name at the start of a line -> comment at its end."""
    found: dict[str, str] = {}
    lines = iter(source.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        name, colon, _ = token.line.partition(":")
        if token.type == tokenize.COMMENT and colon and name.strip().isidentifier():
            found[name.strip()] = token.string.lstrip("# ")
    return found


def _texts_below(source: str) -> dict[str, str]:
    """Name of a field -> the string that stands below it."""
    found: dict[str, str] = {}
    (definition,) = ast.parse(source).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_field and is_text and isinstance(below.value.value, str):  # type: ignore[attr-defined]
            text = below.value.value  # type: ignore[attr-defined]
            found[field.target.id] = " ".join(text.split())  # type: ignore[attr-defined]
    return found


def table_of(entry: Any, config: Any) -> dict[str, Any]:
    """A table of a model, which may be a function of the user's config."""
    table = entry(config) if callable(entry) else entry
    return dict(table or {})
