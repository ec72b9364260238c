"""The family of a user's model: its modules as blocks, and what weft derives from them: ties, initial values, sizes, FLOPs.

Blocks are always built by the user's code on the CPU; where weft asks for modules on the meta device
their parameters are moved there afterwards, so that any code may run in a constructor, and constant
buffers keep their values.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.config.hf.mapping import HFMapping
from weft.core.dimension import default_sharding_rule
from weft.core.model_config import AxisTable, BlockSpec, InitTable, LinearShapes, ModelConfig
from weft.core.shard import Stacked
from weft.errors import Fault, PlanError, counted
from weft.layout.plan import Plan
from weft.models.common.batch import Batch, Extra, drop_batch, image_example, token_example
from weft.models.common.init import named_parameters, tie
from weft.models.common.layers import Loss
from weft.models.user_model import (
    KEY,
    Model,
    UserModelConfig,
    config_type,
    no_axes,
    table_of,
)

LOSS = "loss"
BUFFER_SEED = 0
WHOLE = "whole"
"""Logical axis of a dim that no mesh axis shards."""
META = torch.device("meta")

_build_lock = threading.Lock()
"""Held while a model is built: its constructors draw from torch's generator, which rank threads share."""


@dataclass(frozen=True, eq=False)
class UserFamily:
    """The `Family` of a user's model."""

    model: Model

    @functools.cached_property
    def Config(self) -> type[UserModelConfig]:  # noqa: N802 (a class, as in every family)
        """The section of the run config."""
        return config_type(self.model, self)

    @property
    def PRESETS(self) -> Mapping[str, ModelConfig]:  # noqa: N802 (a constant, as in every family)
        """None."""
        return {}

    @property
    def hf(self) -> HFMapping | None:
        """The Hugging Face format that the user declares."""
        return self.model.HF

    @property
    def digest(self) -> str | None:
        """Of the user's source code."""
        return self.model.digest

    @property
    def text(self) -> str | None:
        """Of the user's file."""
        return self.model.text

    def user_config(self, cfg: Any) -> Any:
        """The user's own Config with the values of a section."""
        values = {name: getattr(cfg, name) for name in cfg.field_names}
        return self.model.Config(**values)

    def axes(self, cfg: Any) -> AxisTable:
        """Logical axes of every parameter; None in a row means not sharded. Parameters under two
        names need one row.
        """
        if self.model.AXES is None:
            raise PlanError(no_axes(self.model.label, self.model.name))
        table: dict[str, tuple[Any, ...]] = {}
        for pattern, row in table_of(self.model.AXES, self.user_config(cfg)).items():
            words = (row,) if isinstance(row, str) else tuple(row)
            table[pattern] = tuple(WHOLE if word is None else word for word in words)
        facts = self._facts(cfg)
        for alias, owner in facts.ties.items():
            if not _rows_of(alias, table):
                rows = _rows_of(owner, table)
                if len(rows) == 1:
                    table[alias] = table[rows[0]]
        return table

    def ties(self, cfg: Any) -> dict[str, str]:
        """Alias -> owner: the user's table, and parameters that are one object."""
        return dict(self._facts(cfg).ties)

    def init(self, cfg: Any) -> InitTable:
        """The user's table; without one the values that the constructors give."""
        if self.model.INIT is not None:
            return table_of(self.model.INIT, self.user_config(cfg))
        facts = self._facts(cfg)
        values = ConstructedValues(self, cfg)
        return {name: ("own", values) for name in facts.shapes if name not in facts.ties}

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The chain, "loss" last; parameters are on torch's current default device."""
        is_meta = torch.get_default_device() == META
        with _build_lock, _seeded(BUFFER_SEED), torch.device("cpu"):
            blocks = self._build(cfg)
        if is_meta:
            move_to_meta(blocks, parameters_only=True)
        return blocks

    def initial_values(self, cfg: Any, *, seed: int) -> dict[str, Tensor]:
        """Values of all parameters after `torch.manual_seed(seed)`, by global name."""
        with _build_lock, _seeded(seed), torch.device("cpu"):
            blocks = self._build(cfg)
        params = named_parameters(blocks)
        return {name: param.detach() for name, param in params.items()}

    def _build(self, cfg: Any) -> dict[str, nn.Module]:
        config = self.user_config(cfg)
        try:
            made = self.model.blocks(config)
            if self.model.blocks_of is not None and isinstance(made, nn.Module):
                made = self.model.blocks_of(made)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            what = f"{self.model.label}: blocks(config) raises {type(error).__name__}: {first_line}"
            raise PlanError(Fault(KEY, what)) from error
        blocks = chain_of(made, name=self.model.label)
        if LOSS not in blocks:
            blocks[LOSS] = Loss()
        return blocks

    def _facts(self, cfg: Any) -> ModelFacts:
        return _facts_of(self, _config_text(cfg))

    def example(self, cfg: Any, plan: Plan) -> Batch | None:
        """A micro-batch of images on the meta device; None for tokens."""
        if self.model.kind == "tokens":
            return None
        return image_example(plan.micro_size, cfg.image_size)

    def facts(self, cfg: Any) -> ModelFacts:
        """Shapes, ties and linears of the whole model."""
        return self._facts(cfg)

    def axis_sizes(self, cfg: Any) -> dict[str, int]:
        """Units of each logical axis that may be sharded, from the shapes of the parameters."""
        facts = self._facts(cfg)
        sizes: dict[str, int] = {}
        if self.model.AXES is not None:
            sizes = _axis_sizes(facts.shapes, self.axes(cfg), self.user_config(cfg))
        if self.model.kind == "tokens":
            sizes.setdefault("vocab", self._vocab(cfg))
        return sizes

    def _vocab(self, cfg: Any) -> int:
        """Number of tokens that the model reads: a field of its config, else the rows of its first
        embedding.
        """
        config = self.user_config(cfg)
        for name in ("vocab", "vocab_size"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
        return self._facts(cfg).embedding_rows or 256

    def linears(self, cfg: Any) -> LinearShapes:
        """Linears of the layers, which may get adapters."""
        return dict(self._facts(cfg).linears)

    def block_specs(self, cfg: Any, seq_len: int) -> tuple[BlockSpec, ...]:
        """The blocks with FLOPs and output shapes, measured on the meta device."""
        return _specs_of(self, _config_text(cfg), seq_len)

    def section(self, text: str) -> UserModelConfig:
        """The config with these fields, as JSON."""
        return self.Config.model_validate_json(text)


class ConstructedValues:
    """Initial values as the user's constructors give them after `torch.manual_seed(seed)`; built at
    the first use, freed with this object.
    """

    def __init__(self, family: UserFamily, cfg: Any) -> None:
        self._family = family
        self._config = cfg
        self._seed: int | None = None
        self._values: dict[str, Tensor] = {}

    def __call__(self, name: str, seed: int) -> Tensor:
        """The whole parameter of this name."""
        if seed != self._seed:
            self._values = self._family.initial_values(self._config, seed=seed)
            self._seed = seed
        return self._values[name]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """All generators in the state after this seed; restored afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def chain_of(made: Any, *, name: str) -> dict[str, nn.Module]:
    """Blocks by name, from what a user's `blocks` returns.

    Raises:
        PlanError: it is no chain of modules, or a module takes other arguments than (x) or (x,
            batch).
    """
    blocks = _named_modules_of(made, name=name)
    faults: list[Fault] = []
    hooked: set[int] = set()
    for block_name, block in blocks.items():
        if not isinstance(block, nn.Module):
            what = f"{name}: block {block_name!r} is no nn.Module"
            faults.append(Fault(KEY, what, got=type(block).__name__))
        elif not block_name or "." in block_name:
            faults.append(Fault(KEY, f"{name}: block {block_name!r} has a dot in its name"))
        elif id(block) not in hooked:
            hooked.add(id(block))
            faults.extend(_adapt_call(block_name, block))
    if not blocks:
        faults.append(Fault(KEY, f"{name}: blocks(config) returns no block"))
    if faults:
        raise PlanError(*faults)
    return blocks


def _named_modules_of(made: Any, *, name: str) -> dict[str, Any]:
    if isinstance(made, (nn.Sequential, nn.ModuleDict, nn.ModuleList)):
        return dict(made._modules.items())  # named_children() leaves repeated modules out
    if isinstance(made, Mapping):
        return {str(block_name): block for block_name, block in made.items()}
    if isinstance(made, (list, tuple)):
        pairs = all(isinstance(item, tuple) and len(item) == 2 for item in made)
        return dict(made) if pairs else {str(place): block for place, block in enumerate(made)}
    need = "modules by name, an nn.Sequential, or any module with a blocks_of(module)"
    what = f"{name}: blocks(config) returns no chain"
    raise PlanError(Fault(KEY, what, got=type(made).__name__, need=need))


def _adapt_call(name: str, block: nn.Module) -> Iterator[Fault]:
    """Let a block whose forward takes x alone be called with (x, batch)."""
    parameters = [
        parameter
        for parameter in inspect.signature(block.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    takes_any = any(
        parameter.kind is parameter.VAR_POSITIONAL
        for parameter in inspect.signature(block.forward).parameters.values()
    )
    if len(required) > 2 or (not parameters and not takes_any):
        names = ", ".join(parameter.name for parameter in parameters)
        what = f"block {name!r} is called with (x) or (x, batch)"
        fix = "wrap it in a module whose forward takes x"
        yield Fault(KEY, what, got=f"{type(block).__name__}.forward({names})", fix=fix)
        return
    second = parameters[1] if len(parameters) > 1 else None
    takes_batch = len(required) == 2 or (second is not None and second.name == "batch")
    if not takes_batch and not takes_any:
        block.register_forward_pre_hook(drop_batch)


def move_to_meta(blocks: Mapping[str, nn.Module], *, parameters_only: bool) -> None:
    """Replace parameters (and buffers, and tensors that are attributes) by ones without memory;
    what is one object stays one.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            empty = torch.empty_like(tensor, device=META)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = (tensor, empty)
        return moved[id(tensor)][1]

    for block in blocks.values():
        for module in block.modules():
            holders: list[dict[str, Any]] = [module._parameters]
            if not parameters_only:
                holders += [module._buffers, module.__dict__]
            for holder in holders:
                for name, value in holder.items():
                    if isinstance(value, Tensor) and not value.is_meta:
                        holder[name] = on_meta(value)


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model's parameters without values.

    Attributes:
        shapes: global name -> shape, tied ones under each name.
        ties: alias -> owner.
        linears: name of a linear -> features out, in.
        embedding_rows: of the first embedding; 0 without one.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    linears: LinearShapes
    embedding_rows: int


def _config_text(cfg: Any) -> str:
    values = {name: getattr(cfg, name) for name in cfg.field_names}
    return json.dumps(values)


@functools.lru_cache(maxsize=32)
def _facts_of(family: UserFamily, text: str) -> ModelFacts:
    cfg = family.section(text)
    blocks = meta_blocks(family, cfg)
    shapes = {name: tuple(param.shape) for name, param in named_parameters(blocks).items()}
    ties = table_of(family.model.TIES, family.user_config(cfg))
    unknown = [name for pair in ties.items() for name in pair if name not in shapes]
    if unknown:
        what = f"{family.model.label}: TIES names no parameter: {', '.join(unknown)}"
        raise PlanError(Fault(KEY, what))
    owners: dict[int, str] = {}
    for name, param in named_parameters(blocks).items():
        owner = owners.setdefault(id(param), name)
        if owner != name:
            ties.setdefault(name, owner)
    linears: LinearShapes = {}
    embedding_rows = 0
    for block_name, block in blocks.items():
        for path, module in block.named_modules():
            if type(module) is nn.Linear and path and _is_numbered(block_name):
                linears[f"{block_name}.{path}"] = (module.out_features, module.in_features)
            if isinstance(module, nn.Embedding) and not embedding_rows:
                embedding_rows = module.num_embeddings
    return ModelFacts(shapes, ties, linears, embedding_rows)


def meta_blocks(family: UserFamily, cfg: Any) -> dict[str, nn.Module]:
    """The blocks without memory, buffers included."""
    with torch.device(META):
        blocks = family.blocks(cfg)
    move_to_meta(blocks, parameters_only=False)
    return blocks


def _rows_of(name: str, table: Mapping[str, Any]) -> list[str]:
    return [pattern for pattern in table if fnmatchcase(name, pattern)]


def axes_faults(family: UserFamily, cfg: Any) -> Iterator[Fault]:
    """Parameters that AXES misses or names twice, rows of another length, rows that match nothing."""
    shapes = family.facts(cfg).shapes
    table = family.axes(cfg)
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in shapes.items():
        rows = _rows_of(name, table)
        used.update(rows)
        if not rows:
            missing.append(name)
        elif len(rows) > 1:
            got = " and ".join(repr(row) for row in rows)
            yield Fault("AXES", f"names parameter {name} twice", got=got, fix="narrow one pattern")
        elif len(table[rows[0]]) != len(shape):
            got = f"{len(table[rows[0]])} axes for shape {list(shape)}"
            yield Fault("AXES", f"row {rows[0]!r} does not fit parameter {name}", got=got)
    if missing:
        fix = f"add rows, such as {missing[0]!r}: {(None,) * len(shapes[missing[0]])}"
        others = counted(len(missing) - 1, "other")
        what = f"misses parameter {missing[0]}" + (f" and {others}" if missing[1:] else "")
        yield Fault("AXES", what, fix=fix)
    for pattern in table:
        if pattern not in used:
            names = ", ".join(list(shapes)[:3])
            yield Fault("AXES", f"row {pattern!r} matches no parameter", got=f"{names}, ...")


def _axis_sizes(
    shapes: Mapping[str, tuple[int, ...]], table: AxisTable, config: Any
) -> dict[str, int]:
    """Units of the axes that some mesh axis may shard: a field of the config of that name, else the
    greatest common divisor of the lengths of all dims with this axis.
    """
    lengths: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        rows = _rows_of(name, table)
        if len(rows) != 1 or len(table[rows[0]]) != len(shape):
            continue
        for axis, length in zip(table[rows[0]], shape, strict=True):
            if isinstance(axis, Stacked):
                for part, units in axis.parts:
                    lengths.setdefault(part, []).append(units)
            else:
                lengths.setdefault(axis, []).append(length)
    sizes: dict[str, int] = {}
    for axis, found in lengths.items():
        if axis not in default_sharding_rule():
            continue
        divisor = math.gcd(*found)
        field = getattr(config, axis, None)
        is_unit = isinstance(field, int) and field > 0 and divisor % field == 0
        sizes[axis] = field if is_unit else divisor  # type: ignore[assignment]
    return sizes


@functools.lru_cache(maxsize=64)
def _specs_of(family: UserFamily, text: str, seq_len: int) -> tuple[BlockSpec, ...]:
    cfg = family.section(text)
    blocks = meta_blocks(family, cfg)
    tie(blocks, family.ties(cfg))
    first = _measure(blocks, example(family, cfg, rows=2, seq_len=seq_len), name=family.model.label)
    second_len = seq_len // 2 if seq_len % 2 == 0 else seq_len
    try:
        batch = example(family, cfg, rows=3, seq_len=second_len)
        second = _measure(blocks, batch, name=family.model.label)
    except PlanError:  # a model of one length
        second_len = seq_len
        batch = example(family, cfg, rows=3, seq_len=seq_len)
        second = _measure(blocks, batch, name=family.model.label)
    layers = [name for name in blocks if _is_numbered(name)]
    layers = layers or [name for name in blocks if name != LOSS]
    specs = []
    for name in blocks:
        out = _dims(first[name].shape, second[name].shape, lengths=(seq_len, second_len))
        specs.append(BlockSpec(name, first[name].flops / 2, out, is_layer=name in layers))
    return tuple(specs)


def _is_numbered(name: str) -> bool:
    """Whether a block is one of several: layer0, h1, 2."""
    return name[-1].isdigit()


def example(family: UserFamily, cfg: Any, *, rows: int, seq_len: int) -> Batch:
    """A batch on the meta device."""
    if family.model.kind == "images":
        return image_example(rows, cfg.image_size)
    return token_example(rows, seq_len)


@dataclass(frozen=True)
class _Measured:
    """Output shape of a block, () for several tensors, and FLOPs."""

    shape: tuple[int, ...]
    flops: float


class FlopCount(TorchDispatchMode):
    """Adds the FLOPs of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += float(count(*args, **(kwargs or {}), out_val=out))
        return out


def _measure(blocks: Mapping[str, nn.Module], batch: Batch, *, name: str) -> dict[str, _Measured]:
    """Run the chain on the meta device.

    Raises:
        PlanError: a block's forward fails.
    """
    found: dict[str, _Measured] = {}
    x: Any = batch.inputs
    for block_name, block in blocks.items():
        counter = FlopCount()
        try:
            with torch.no_grad(), counter:
                out = block(x, batch)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            what = f"its forward fails on the meta device: {type(error).__name__}: {first_line}"
            fix = "shapes must not depend on values; create tensors on x.device"
            raise PlanError(Fault(f"{name}: block {block_name!r}", what, fix=fix)) from error
        x = out.x if isinstance(out, Extra) else out
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        found[block_name] = _Measured(shape, counter.total)
    return found


def _dims(
    first: Sequence[int], second: Sequence[int], *, lengths: tuple[int, int]
) -> tuple[str | int, ...]:
    """The shape that a block hands on: dims that change with the batch and its length are named."""
    dims: list[str | int] = []
    for place, (size, other) in enumerate(zip(first, second, strict=False)):
        is_seq = (size, other) == lengths and (lengths[0] != lengths[1] or place == 1)
        if place == 0 and (size, other) == (2, 3):
            dims.append("batch")
        elif is_seq:
            dims.append("seq")
        else:
            dims.append(int(size))
    return tuple(dims)
