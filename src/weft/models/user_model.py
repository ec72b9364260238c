"""A user's model: what its file or value contains, and the check of it. Imports no torch.

Config             dataclass; its fields become --model.* flags
blocks(config)     modules by name, in order; each is called with (x) or (x, batch)
AXES               pattern of parameter names -> logical axis of each dimension; or a function of the config
TIES               alias -> owner of tied parameters; or a function of the config. Optional
INIT               pattern of parameter names -> distribution of initial values. Optional
INPUTS             "tokens", "images", or named arrays: name -> weft.InputSpec; or a function of the config. Optional
HF                 weft.config.hf.mapping.HFMapping. Optional
blocks_of(module)  blocks by name of the one module that `blocks` returns. Optional
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from weft.code.identity import CodeIdentity, identity_of
from weft.code.reads import Reads
from weft.config.hf.mapping import HFMapping
from weft.config.schema import label_of
from weft.config.user_code import (
    installed_packages,
    is_file_reference,
    load_module,
    reads_of,
    source_digest,
    source_text,
)
from weft.core.input_spec import InputSpec, spec_problem
from weft.core.model_config import InitTable, InputKind
from weft.core.shard import DimAxis
from weft.errors import ConfigError, Fault, PlanError

KEY = "model.name"
INPUTS_FIX = 'INPUTS = {"pixels": weft.InputSpec((3, 32, 32), "uint8"), "targets": weft.InputSpec((), "int64", below=10)}'
"""An example of what a model of arrays declares."""
IMAGE_FIELDS = ("image_size", "classes")
"""Fields that a model of images has: height and width in pixels, and number of classes."""


CODE = ("Config", "blocks", "AXES", "TIES", "INIT", "INPUTS", "blocks_of")
"""What decides what a model computes."""
OF_WEFT = ("name", "digest", "text", "code", "reads")
"""Attributes of a model that no user defines."""
Inputs = Literal["tokens", "images"] | Mapping[str, InputSpec]
"""What a model reads."""
UserTable = Mapping[str, tuple[DimAxis | None, ...]]
"""As `AxisTable`; None is the axis of a dim that is not sharded."""


@dataclass(frozen=True)
class Model:
    """A user's model as a value, for `weft.train(model=...)`: what a model file contains.

    Attributes:
        Config: dataclass with a default for every field.
        blocks: (config) -> modules by name in order, or an nn.Sequential.
        AXES: pattern of parameter names -> logical axis of each dimension, or (config) -> such a
            table.
        TIES: alias -> owner of tied parameters, or (config) -> such a table.
        INIT: pattern of parameter names -> `("normal", std)`, `("ones",)` or `("zeros",)`; None: the
            values that the modules' constructors give after `torch.manual_seed(seed)`.
        INPUTS: what the model reads: "tokens", "images", or the arrays of a sample by name, the first of
            which the first block reads; or (config) -> such a mapping. None: images where Config has
            a field `image_size`, else tokens.
        HF: its format in Hugging Face folders.
        blocks_of: (module) -> blocks by name, where `blocks` returns another module than a chain.
        name: as messages and folders call it; for a file its absolute path.
        digest: of its file and those beside it that it imports.
        text: of its file.
        code: of all that it reaches; None: it has not been looked at.
        reads: what its code has read so far in this process.
    """

    Config: type
    blocks: Callable[[Any], Any]
    AXES: UserTable | Callable[[Any], UserTable] | None = None
    TIES: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None
    INIT: InitTable | Callable[[Any], InitTable] | None = None
    INPUTS: Inputs | Callable[[Any], Inputs] | None = None
    HF: HFMapping | None = None
    blocks_of: Callable[[Any], Any] | None = None
    name: str = "model"
    digest: str | None = None
    text: str | None = None
    code: CodeIdentity | None = None
    reads: Reads = field(default_factory=Reads, compare=False)

    @property
    def kind(self) -> InputKind:
        """What it reads."""
        if self.INPUTS == "tokens" or self.INPUTS == "images":
            return self.INPUTS
        if self.INPUTS is not None:
            return "arrays"
        names = {each.name for each in dataclasses.fields(self.Config)}
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
    reads = reads_of(module)
    model = model_of(module, name=reference)
    return replace(
        model,
        digest=source_digest(module),
        text=source_text(module),
        code=_code_of(model, reads.packages),
        reads=reads,
    )


def with_code(model: Model) -> Model:
    """A model that is no file, with the identity of its code as it is in this process."""
    modules = [sys.modules.get(each.__module__) for each in (model.Config, model.blocks)]
    files = [getattr(module, "__file__", None) or "" for module in modules]
    reads = Reads(installed_packages(*files))
    return replace(model, code=_code_of(model, reads.packages), reads=reads)


def _code_of(model: Model, packages: frozenset[str]) -> CodeIdentity:
    """The identity of a model, before anything of it runs: caches in its modules are empty."""
    values = {name: getattr(model, name) for name in CODE}
    return identity_of(values, module=model.Config.__module__, packages=packages)


def _check_names(path: Path, *, needs_axes: bool) -> None:
    """Reject a file that defines no `blocks` or no AXES, without importing it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the import says what is wrong
    found = _defined_names(tree)
    if "*" in found:
        return
    if "blocks" not in found:
        raise ConfigError(_no_blocks(path.stem))
    if needs_axes and "AXES" not in found:
        raise ConfigError(no_axes(path.stem, str(path)))


def _defined_names(tree: ast.AST) -> set[str]:
    """Names that a file assigns, defines or imports; `*` for an import of everything."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or alias.name
                first_part = name.partition(".")[0]
                found.add(first_part)
    return found


def _no_blocks(label: str) -> Fault:
    need = "blocks(config), which returns modules by name in order"
    return Fault(
        KEY, f"{label} defines no blocks", need=need, fix="define it, or blocks_of(module)"
    )


def no_axes(label: str, name: str) -> Fault:
    """A model without a table of axes."""
    fix = f"weft axes {name}, which proposes it"
    return Fault(KEY, f"{label} defines no AXES", fix=fix)


def model_of(namespace: Any, *, name: str) -> Model:
    """The model that a module, a class or any object with these names describes.

    Raises:
        ConfigError: it lacks what a model needs.
    """
    found: dict[str, Any] = {}
    names = {each.name for each in dataclasses.fields(Model)}
    for name_of_field in names.difference(OF_WEFT):
        value = getattr(namespace, name_of_field, None)
        if value is not None:
            found[name_of_field] = value
    found.setdefault("Config", NoFields)
    faults = list(_faults(found, label_of(name)))
    if faults:
        raise ConfigError(*faults)
    model = Model(name=name, **found)
    if isinstance(namespace, ModuleType):
        return model
    return with_code(model)


def _faults(found: Mapping[str, Any], name: str) -> Iterator[Fault]:
    """What is missing, or of another type."""
    if not callable(found.get("blocks")):
        yield _no_blocks(name)
    config = found["Config"]
    if not isinstance(config, type) or not dataclasses.is_dataclass(config):
        yield Fault(KEY, f"{name}: Config is not a dataclass", fix="@dataclass above class Config")
        return
    yield from _field_faults(config, name)
    yield from _input_faults(config, found.get("INPUTS"), name)


def _input_faults(config: type, inputs: Any, name: str) -> Iterator[Fault]:
    """INPUTS is unknown, or fields that a model of images needs are missing."""
    if isinstance(inputs, str) and inputs not in ("tokens", "images"):
        need = '"tokens", "images", or arrays by name'
        fix = 'INPUTS = "tokens"'
        yield Fault(KEY, f"{name}: INPUTS", got=repr(inputs), need=need, fix=fix)
    elif inputs is not None and not isinstance(inputs, str) and not callable(inputs):
        problem = spec_problem(inputs)
        if problem is not None:
            yield Fault(KEY, f"{name}: {problem}", fix=INPUTS_FIX)
    names = {each.name for each in dataclasses.fields(config)}
    missing = [each for each in IMAGE_FIELDS if each not in names]
    reads_images = inputs == "images"
    if inputs is None:
        reads_images = "image_size" in names
    if reads_images and missing:
        yield Fault(
            KEY,
            f"{name}: Config of a model of images lacks {' and '.join(missing)}",
            need=f"fields {' and '.join(IMAGE_FIELDS)}",
            fix='add them, or INPUTS = "tokens"',
        )


def _field_faults(config: type, name: str) -> Iterator[Fault]:
    """Fields without a default."""
    for each in dataclasses.fields(config):
        has_value = each.default is not dataclasses.MISSING
        has_factory = each.default_factory is not dataclasses.MISSING
        if not has_value and not has_factory:
            yield Fault(
                KEY,
                f"{name}: Config.{each.name} has no default",
                fix=f"{each.name}: ... = a small value for tests",
            )


def table_of(name: str, entry: Any, config: Any) -> dict[str, Any]:
    """A table of a model, which may be a function of the user's config.

    Raises:
        PlanError: it is no mapping with names of parameters, or patterns of them.
    """
    table = entry(config) if callable(entry) else entry
    if table is None:
        return {}
    try:
        rows = dict(table)
    except (TypeError, ValueError):
        rows = {None: None}
    if not all(isinstance(key, str) for key in rows):
        need = "a dict whose keys are names of parameters, or patterns of them"
        raise PlanError(Fault(name, "is no table", got=repr(table), need=need))
    return rows
