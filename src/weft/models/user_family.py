"""The family of a user's model: its modules as blocks, and what weft derives from them: ties, initial values, sizes, FLOPs.

Blocks are always built by the user's code on the CPU; where weft asks for modules on the meta device
their parameters are moved there afterwards, so that any code may run in a constructor, and constant
buffers keep their values.
"""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.code.identity import CodeIdentity, identity_of_reads
from weft.config.hf.mapping import HFMapping
from weft.config.user_code import file_folder
from weft.core.input_spec import InputSpec, spec_problem
from weft.core.model_config import AxisTable, BlockSpec, InitTable, LinearShapes, ModelConfig
from weft.core.shard import Stacked
from weft.errors import ConfigError, Fault, PlanError, type_and_message
from weft.layout.plan import Plan
from weft.models.common.batch import Batch, example_of
from weft.models.common.buffer_updates import record_batch_norm
from weft.models.common.init import named_parameters, tie
from weft.models.common.layers import Loss
from weft.models.common.uncompiled import keep_compiler_unimported
from weft.models.runs_without_memory import run_without_memory
from weft.models.user_chain import META, chain_of, has_meta_values, move_to_meta, parameters_on_meta
from weft.models.user_config import UserModelConfig, config_type
from weft.models.user_facts import ModelFacts, facts_of, is_numbered, rows_of, units_of_axes
from weft.models.user_model import INPUTS_FIX, KEY, Model, no_axes, table_of
from weft.models.user_specs import MeasuredBlock, measure_blocks, output_dims

LOSS = "loss"
BUFFER_SEED = 0
WHOLE = "whole"
"""Logical axis of a dim that no mesh axis shards."""

_build_lock = threading.Lock()
"""Held while a model is built: its constructors may draw from NumPy's generator and Python's, which
rank threads share.
"""


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
        """No presets: a user's model has the sizes of its own config."""
        return {}

    @property
    def hf(self) -> HFMapping | None:
        """The Hugging Face format that the user declares."""
        return self.model.HF

    @property
    def digest(self) -> str | None:
        """The digest of the user's source code."""
        return self.model.digest

    @property
    def code(self) -> CodeIdentity:
        """Of the user's code, and of what it has read so far."""
        reads = identity_of_reads(self.model.reads, file_folder(self.model.name))
        return (self.model.code or CodeIdentity()) | reads

    @property
    def text(self) -> str | None:
        """The text of the user's file."""
        return self.model.text

    def user_config(self, cfg: Any) -> Any:
        """A new Config of the user with the values of a section; what changes it, changes no other."""
        values = {name: getattr(cfg, name) for name in cfg.field_names}
        return self.model.Config(**values)

    def axes(self, cfg: Any) -> AxisTable:
        """Logical axes of every parameter; None in a row means not sharded. Parameters under two
        names need one row.
        """
        if self.model.AXES is None:
            raise PlanError(no_axes(self.model.label, self.model.name))
        rows = table_of("AXES", self.model.AXES, self.user_config(cfg))
        table: dict[str, tuple[Any, ...]] = {}
        for pattern, row in rows.items():
            table[pattern] = _axes_of_row(pattern, row)
        ties = self._facts(cfg).ties
        for alias, owner in ties.items():
            owner_patterns = rows_of(owner, table)
            if len(owner_patterns) == 1 and not rows_of(alias, table):
                table[alias] = table[owner_patterns[0]]
        return table

    def ties(self, cfg: Any) -> dict[str, str]:
        """Alias -> owner: the user's table, and parameters that are one object."""
        return dict(self._facts(cfg).ties)

    def init(self, cfg: Any) -> InitTable:
        """The user's table; without one the values that the constructors give."""
        if self.model.INIT is not None:
            return table_of("INIT", self.model.INIT, self.user_config(cfg))
        facts = self._facts(cfg)
        values = ConstructedValues(self, cfg)
        return {name: ("own", values) for name in facts.shapes if name not in facts.ties}

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The chain, "loss" last; parameters are on torch's current default device."""
        is_meta = torch.get_default_device() == META
        with _build_lock:
            if is_meta:
                without_values = self._build_without_values(cfg)
                if without_values is not None:
                    return without_values
            # a caller's modes may leave draws of parameters out: those of buffers would be others then
            with _seeded(BUFFER_SEED), torch._C.DisableTorchFunction(), torch.device("cpu"):
                blocks = self._build(cfg)
        if is_meta:
            move_to_meta(blocks, parameters_only=True)
        return blocks

    def _build_without_values(self, cfg: Any) -> dict[str, nn.Module] | None:
        """The chain whose parameters never had memory, if its buffers have the values that they have
        beside real parameters: nothing but parameters has drawn random numbers.
        """
        keep_compiler_unimported()  # functions of torch.nn.init on the meta device
        with _seeded(BUFFER_SEED), torch.device("cpu"):
            before = _random_state()
            try:
                with parameters_on_meta():
                    blocks = self._build(cfg)
            except PlanError:  # it reads values of parameters, or fails below, too
                return None
            has_drawn = _random_state() != before
        if has_drawn or has_meta_values(blocks):
            return None
        return blocks

    def initial_values(self, cfg: Any, *, seed: int) -> dict[str, Tensor]:
        """Values of all parameters after `torch.manual_seed(seed)`, by global name."""
        with _build_lock, _seeded(seed), torch.device("cpu"):
            blocks = self._build(cfg)
        values: dict[str, Tensor] = {}
        for name, param in named_parameters(blocks).items():
            values[name] = param.detach()
        return values

    def _build(self, cfg: Any) -> dict[str, nn.Module]:
        model = self.model
        config = self.user_config(cfg)
        try:
            with model.reads.recorded():
                made = model.blocks(config)
                if isinstance(made, nn.Module):
                    _call_own_train(made)
                if model.blocks_of is not None and isinstance(made, nn.Module):
                    made = model.blocks_of(made)
        except PlanError:  # a line of its own, as of a decoder of transformers
            raise
        except Exception as error:
            what = f"{model.label}: blocks(config) raises {type_and_message(error)}"
            raise PlanError(
                Fault(KEY, what, fix="blocks(Config()) must work on its own: try it in Python")
            ) from error
        blocks = chain_of(made, name=model.label)
        if not isinstance(made, nn.Module):
            for block in blocks.values():
                _call_own_train(block)
        if LOSS not in blocks:
            blocks[LOSS] = Loss()
        return blocks

    def _facts(self, cfg: Any) -> ModelFacts:
        return _facts_of(self, _config_text(cfg))

    def example(self, cfg: Any, plan: Plan) -> Batch | None:
        """A micro-batch on the meta device of a model that reads no tokens; None for tokens."""
        if self.model.kind == "tokens":
            return None
        return example_of(cfg, plan.micro_size, plan.seq_len)

    def input_specs(self, cfg: Any) -> dict[str, InputSpec]:
        """The arrays of a sample that INPUTS names.

        Raises:
            ConfigError: INPUTS is no mapping of names to specs.
        """
        inputs = self.model.INPUTS
        specs = inputs(self.user_config(cfg)) if callable(inputs) else inputs
        if isinstance(specs, str) or specs is None:
            return {}
        problem = spec_problem(specs)
        if problem is not None:
            fault = Fault(KEY, f"{self.model.label}: {problem}", fix=INPUTS_FIX)
            raise ConfigError(fault)
        return dict(specs)

    def facts(self, cfg: Any) -> ModelFacts:
        """Shapes, ties and linears of the whole model."""
        return self._facts(cfg)

    def axis_sizes(self, cfg: Any) -> dict[str, int]:
        """Units of each logical axis that may be sharded, from the shapes of the parameters."""
        facts = self._facts(cfg)
        sizes: dict[str, int] = {}
        if self.model.AXES is not None:
            sizes = units_of_axes(facts.shapes, self.axes(cfg), self.user_config(cfg))
        if self.model.kind == "tokens":
            sizes.setdefault("vocab", self._vocab(cfg))
        return sizes

    def _vocab(self, cfg: Any) -> int:
        """Number of tokens that the model reads: a field of its config, else the rows of its first
        embedding.
        """
        config = self.user_config(cfg)
        for name in ("vocab", "vocab_size"):
            vocab = getattr(config, name, None)
            if isinstance(vocab, int):
                return vocab
        facts = self._facts(cfg)
        return facts.embedding_rows or 256

    def linears(self, cfg: Any) -> LinearShapes:
        """Linears of the layers, which may get adapters."""
        return dict(self._facts(cfg).linears)

    def expert_linears(self, cfg: Any) -> LinearShapes:
        """Matrices of the layers' routed experts, where weft multiplies tokens by them."""
        return dict(self._facts(cfg).expert_linears)

    def block_specs(self, cfg: Any, seq_len: int) -> tuple[BlockSpec, ...]:
        """The blocks with FLOPs and output shapes, measured on the meta device."""
        return _specs_of(self, _config_text(cfg), seq_len)

    def section(self, text: str) -> UserModelConfig:
        """The config with these fields, as JSON."""
        return self.Config.model_validate_json(text)


def _axes_of_row(pattern: str, row: Any) -> tuple[Any, ...]:
    """The axes of a row of a user's table, which may be a single name.

    Raises:
        PlanError: it holds something else than axes.
    """
    axes = (row,) if isinstance(row, str | Stacked) else row
    is_sequence = isinstance(axes, list | tuple)
    if not is_sequence or not all(axis is None or isinstance(axis, str | Stacked) for axis in axes):
        need = "for each dim None, the name of an axis, or Stacked"
        fix = f'{{"{pattern}": (None, None)}} for a matrix that is not sharded'
        raise PlanError(Fault("AXES", f"row {pattern!r} has no axes", repr(row), need, fix))
    return tuple(WHOLE if axis is None else axis for axis in axes)


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


def _call_own_train(module: nn.Module) -> None:
    """Call the `train` of modules that define it, as a training loop would: it may keep frozen parts
    in evaluation mode. Modes that a constructor has set stay where no module defines it.
    """
    for each in module.modules():
        if type(each).train is not nn.Module.train:
            each.train(each.training)


def _random_state() -> tuple[object, ...]:
    """The state of all generators."""
    python_state = random.getstate()
    _, numpy_keys, numpy_position, *_ = np.random.get_state(legacy=True)
    torch_state = torch.get_rng_state()
    return (python_state, tuple(numpy_keys), numpy_position, tuple(torch_state.tolist()))


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


def _config_text(cfg: Any) -> str:
    values = {name: getattr(cfg, name) for name in cfg.field_names}
    return json.dumps(values)


@functools.lru_cache(maxsize=32)
def _facts_of(family: UserFamily, text: str) -> ModelFacts:
    cfg = family.section(text)
    model = family.model
    blocks = meta_blocks(family, cfg)
    ties = table_of("TIES", model.TIES, family.user_config(cfg))
    return facts_of(blocks, ties, label=model.label)


def meta_blocks(family: UserFamily, cfg: Any) -> dict[str, nn.Module]:
    """The blocks without memory, buffers included, whose forwards update none."""
    with torch.device(META):
        blocks = family.blocks(cfg)
    move_to_meta(blocks, parameters_only=False)
    for block in blocks.values():
        record_batch_norm(block)
    return blocks


@functools.lru_cache(maxsize=64)
def _specs_of(family: UserFamily, text: str, seq_len: int) -> tuple[BlockSpec, ...]:
    """FLOPs and output dims of every block, from two batches of different sizes: dims that differ
    are those of the batch and the sequence.
    """
    cfg = family.section(text)
    blocks = meta_blocks(family, cfg)
    tie(blocks, family.ties(cfg))

    def measured(rows: int, length: int) -> dict[str, MeasuredBlock]:
        batch = example(family, cfg, rows=rows, seq_len=length)
        measure = functools.partial(measure_blocks, name=family.model.label)
        return run_without_memory(measure, blocks, batch)

    first = measured(2, seq_len)
    second_len = seq_len
    if seq_len % 2 == 0:
        second_len = seq_len // 2
    try:
        second = measured(3, second_len)
    except PlanError:  # a model of one length
        second_len = seq_len
        second = measured(3, second_len)
    layers = [name for name in blocks if is_numbered(name)]
    if not layers:
        layers = [name for name in blocks if name != LOSS]
    specs: list[BlockSpec] = []
    for name in blocks:
        out = output_dims(first[name].shape, second[name].shape, lengths=(seq_len, second_len))
        parts = []
        if len(first[name].parts) == len(second[name].parts):
            for one, other in zip(first[name].parts, second[name].parts, strict=True):
                dims = output_dims(one[1], other[1], lengths=(seq_len, second_len))
                parts.append((one[0], dims))
        flops = first[name].flops / 2
        spec = BlockSpec(name, flops, out, is_layer=name in layers, parts=tuple(parts))
        specs.append(spec)
    return tuple(specs)


def example(family: UserFamily, cfg: Any, *, rows: int, seq_len: int) -> Batch:
    """A batch on the meta device."""
    return example_of(cfg, rows, seq_len)
