"""Configs and models of transformers from the fields of a weft config."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.config.hf.architectures import KEY, PREFIX
from weft.errors import Fault, PlanError, counted, type_and_message
from weft.models.common.backward_apart import backward_apart
from weft.models.common.batch import Batch, forward, token_example
from weft.models.common.init import named_parameters
from weft.models.runs_without_memory import run_without_memory
from weft.models.transformers.adapt import adapt, buffers_in_folders, transposed_linears
from weft.models.transformers.capture import LENGTH, OTHER, ROWS, Captured, capture
from weft.models.transformers.chain import blocks_of_model
from weft.models.transformers.experts import expert_params
from weft.models.transformers.interfaces import EAGER, NAME, register
from weft.models.transformers.sizes import (
    DROPOUT,
    LABEL_KEYS,
    LABELS,
    NONE,
    OF_INFERENCE,
    OUTPUTS,
    SETTINGS,
    TINY,
    TOKENS,
    fields_of,
    is_clip,
    is_drop_out,
    is_noise,
    own_name,
    tiny_settings,
)

LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
ROPES = ("rope_parameters", "rope_scaling")
LONGROPE = "longrope"
FACTORS = ("short_factor", "long_factor")


@functools.lru_cache(maxsize=256)
def default_config(model_type: str) -> Any:
    """A config of transformers with its own defaults.

    Raises:
        PlanError: it has none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type)
    except Exception as error:
        what = (
            f"{PREFIX}{model_type}: transformers has no default config: {type_and_message(error)}"
        )
        raise PlanError(Fault(KEY, what, fix=OTHER)) from error


def config_of(model_type: str, values: Mapping[str, Any]) -> Any:
    """The config of transformers of these sizes and settings; dropout that these do not name is 0.

    Raises:
        PlanError: transformers rejects it.
    """
    default = default_config(model_type)
    fields = dict(fields_of(default))
    settings: dict[str, Any] = json.loads(values.get(SETTINGS) or "{}")
    given: dict[str, Any] = {
        attribute: _left_out(default, attribute) if values[field] == NONE else values[field]
        for field, attribute in fields.items()
    }
    if "qk_rope_head_dim" in vars(default):  # latent attention: all heads have keys of their own
        given[own_name(default, "num_key_value_heads")] = values["heads"]
    if values.get(LABELS):
        settings = {name: x for name, x in settings.items() if name not in LABEL_KEYS}
        settings["num_labels"] = values[LABELS]
    if "model_type" in settings:  # the whole config.json of a folder
        given = {**given, **_own_positions(default, settings)}
        given = fit_factors({**fitted(settings, values["layers"]), **given})
    else:
        known = vars(default).keys() - fields.values()
        tiny = {name: value for name, value in TINY.items() if name in known}
        given |= {**tiny, **fitted(tiny_settings(model_type), values["layers"])}
        given |= {**dict(_token_ids(default, values["vocab"])), **settings}
    every = {**default.to_dict(), **given}
    kept = settings.keys() - noise_of(model_type, settings) if values.get(DROPOUT, True) else ()
    random = {
        name: value for name, value in random_of(model_type, every).items() if name not in kept
    }
    given |= {name: type(value)(0) for name, value in random.items()}
    try:
        return type(default)(**given)
    except Exception as error:
        what = f"{PREFIX}{model_type}: transformers rejects the config: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix="other sizes")) from error


def _left_out(default: Any, attribute: str) -> int | None:
    """A size that a config leaves out: null where its class does, else 0, as experts of a dense
    Granite 4.
    """
    return None if vars(default).get(attribute) is None else NONE


def random_of(model_type: str, config: Mapping[str, Any]) -> dict[str, float]:
    """The keys of a config by which it draws random numbers."""
    return {
        name: value
        for name, value in config.items()
        if is_drop_out(name, value) or is_noise(model_type, name, value)
    }


def noise_of(model_type: str, config: Mapping[str, Any]) -> dict[str, float]:
    """Those of them that no layout computes, which are set to 0."""
    return {name: value for name, value in config.items() if is_noise(model_type, name, value)}


def clips_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Bounds of parameters that a forward of training would clip; an update of a step keeps none."""
    return {name: value for name, value in config.items() if is_clip(name, value)}


def _token_ids(default: Any, vocab: int) -> Iterator[tuple[str, int]]:
    """Ids of special tokens that a small vocabulary does not have: its last one in their place."""
    for name in TOKENS:
        if isinstance(vars(default).get(name), int) and vars(default)[name] >= vocab:
            yield name, vocab - 1


def fitted(settings: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Settings whose lists of one entry a layer have this many: cut, or repeated."""
    found = dict(settings)
    for name in LAYER_LISTS:
        kinds = settings.get(name)
        if kinds:
            found[name] = [kinds[index % len(kinds)] for index in range(num_layers)]
    return found


def longrope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope of a config whose tables change behind its original context; empty: of another kind."""
    for name in ROPES:
        rope = config.get(name)
        if isinstance(rope, dict) and LONGROPE in (rope.get("rope_type"), rope.get("type")):
            return rope
    return {}


def num_factors(config: Mapping[str, Any]) -> int:
    """Pairs of entries that the rope of a config turns in each head."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = longrope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return int(head_size * (part or 1.0)) // 2


def fit_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose factors of longrope are as many as its heads have pairs: cut, or repeated."""
    found = dict(config)
    rope = longrope(config)
    for name in (name for name in ROPES if rope and config.get(name)):
        factors = {each: rope[each] for each in FACTORS if each in rope}
        number = num_factors(config)
        fit = {each: (list(row) * number)[:number] for each, row in factors.items()}
        found[name] = {**rope, **fit}
    return found


def _own_positions(default: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The longest context of a folder whose rope is trained within a shorter one."""
    name = own_name(default, "max_position_embeddings")
    return {name: settings[name]} if name in settings else {}


def build(config: Any, *, implementation: str = NAME, labels: int = 0) -> nn.Module:
    """A model with the initial values of transformers, on torch's current device; its blocks are
    those of `adapt(build(...))`.

    Args:
        implementation: of attention and experts, as transformers names it.
        labels: scores of a text; 0: its head is that of the vocabulary.
    """
    from transformers.models.auto import modeling_auto

    register()
    own = type(config).from_dict(config.to_dict())
    vars(own).update(dict.fromkeys(clips_of(vars(own))))  # past the checks of its types
    vars(own).update(dict.fromkeys(vars(own).keys() & set(OF_INFERENCE), 0))
    vars(own).update(dict.fromkeys(vars(own).keys() & set(OUTPUTS), False))
    own.dtype = None  # of a folder: classes for labels would make it the default of all threads
    own._attn_implementation_internal = implementation
    own._experts_implementation_internal = NAME if implementation in (NAME, EAGER) else EAGER
    classes: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if labels:
        classes = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    model_class: Any = classes[type(config)]
    lm: nn.Module = model_class(own)
    return lm


@dataclass(frozen=True)
class Architecture:
    """A decoder of transformers, with what it computes at some sizes.

    Attributes:
        config: of transformers.
        captured: from one run without memory.
        shapes: name of a parameter, as transformers has it -> shape.
        transposed: names of weights that transformers has as [in, out].
        kept: names of buffers of transformers that are parameters here.
        integers: names of those that hold whole numbers.
        experts: name of a parameter whose first dim holds experts -> their number.
        stored_buffers: names of buffers that transformers stores in a folder, and weft does not.
        untrained: names of parameters that no gradient of the loss reaches.
        parts_run: whether forward and backward of its parts run without values.
        labels: scores of a text; 0: the head is that of the vocabulary.
    """

    config: Any
    captured: Captured
    shapes: Mapping[str, tuple[int, ...]]
    transposed: frozenset[str]
    kept: frozenset[str]
    integers: frozenset[str]
    experts: Mapping[str, int]
    stored_buffers: frozenset[str]
    untrained: frozenset[str] = frozenset()
    parts_run: bool = False
    labels: int = 0

    def build(self, implementation: str = "") -> nn.Module:
        """The model; see `build`.

        Args:
            implementation: of attention; empty: the one that its blocks call.
        """
        how = implementation or self.captured.implementation
        return build(self.config, implementation=how, labels=self.labels)


def architecture_of(model_type: str, values: Mapping[str, Any]) -> Architecture:
    """The architecture of these fields of a weft config.

    Raises:
        PlanError: transformers rejects the sizes, or the model is no chain of decoder layers.
    """
    return _architecture(model_type, json.dumps(dict(values), sort_keys=True))


TRIES = ((NAME, True), (NAME, False), (EAGER, True), (EAGER, False))
"""Implementation of attention, and whether the forward gets a mask. Of the first implementation that
runs, without a mask where its parts do not run with one.
"""


@functools.lru_cache(maxsize=64)
def _architecture(model_type: str, text: str) -> Architecture:
    """With weft's attention; with transformers' eager code where layers do not call the interface."""
    values = json.loads(text)
    config = config_of(model_type, values)
    errors: list[PlanError] = []
    found: list[Architecture] = []
    for implementation, has_mask in TRIES:
        if found and found[0].captured.implementation != implementation:
            break
        try:
            run = _run(config, implementation, values, has_mask=has_mask)
        except PlanError as error:
            errors.append(error)
            continue
        if run.parts_run:
            return run
        found.append(run)
    if not found:
        # What the chain is not comes before errors of transformers' code, of which a KeyError is that of a
        # table of classes by implementation, in which weft's is not.
        chain = [error for error in errors if error.__cause__ is None]
        others = [error for error in errors if not isinstance(error.__cause__, KeyError)]
        raise (chain or others or errors)[0]
    return found[0]


def _run(
    config: Any, implementation: str, values: Mapping[str, Any], *, has_mask: bool
) -> Architecture:
    labels = values.get(LABELS, 0)
    try:
        with torch.device("meta"):
            lm = build(config, implementation=implementation, labels=labels)
            transposed = frozenset(f"{path}.weight" for path, _ in transposed_linears(lm))
            kept = frozenset(path for _, _, path in buffers_in_folders(lm))
            lm = adapt(lm)
    except Exception as error:
        what = f"transformers cannot build it: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix="other sizes, or another architecture")) from error
    params = dict(lm.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    num_layers = values["layers"]
    captured = capture(
        lm, num_layers, implementation=implementation, has_mask=has_mask, is_scored=labels > 0
    )
    buffers = frozenset(lm.state_dict()) - shapes.keys()
    found = Architecture(
        config=config,
        captured=captured,
        shapes=shapes,
        transposed=transposed,
        kept=kept,
        integers=frozenset(name for name in kept if not params[name].is_floating_point()),
        experts=expert_params(lm),
        stored_buffers=buffers,
        labels=labels,
    )
    unused = shapes.keys() - param_names(found).values()
    if unused:
        what = f"{counted(len(unused), 'parameter')} that no token of a text passes"
        raise PlanError(Fault(KEY, what, got=min(unused), fix=OTHER))
    untrained = _untrained(lm, found)
    return replace(found, untrained=untrained or frozenset(), parts_run=untrained is not None)


def _untrained(lm: nn.Module, found: Architecture) -> frozenset[str] | None:
    """What transformers does not train either: indexers that yield places alone, biases of another
    head, attention to an encoder that is not there.

    None: the backward fails without values.
    """
    own_names = param_names(found)

    def run(blocks: Mapping[str, nn.Module], batch: Batch) -> frozenset[str]:
        params = named_parameters(blocks)
        trained = {name: param for name, param in params.items() if param.requires_grad}
        total = forward(blocks, batch).sum()
        grads = torch.autograd.grad(total, tuple(trained.values()), allow_unused=True)
        none = (name for name, grad in zip(trained, grads, strict=True) if grad is None)
        return frozenset(own_names[name] for name in none)

    try:
        with torch.inference_mode(False), torch.enable_grad():
            blocks = blocks_of_model(lm, found.captured)
            example = token_example(ROWS, LENGTH)
            keys = torch.zeros(ROWS, dtype=torch.int64, device=example.inputs.device)
            example = replace(example, draw_keys=keys)
            return backward_apart(lambda: run_without_memory(run, blocks, example))
    except Exception:  # noqa: BLE001 - the checks of the run say what fails
        return None


def param_names(found: Architecture) -> dict[str, str]:
    """Global name of a parameter -> its name in transformers, in the order of the chain."""
    layers = f"{found.captured.layers}."
    embed: dict[str, str] = {}
    inner: dict[str, str] = {}
    head: dict[str, str] = {}
    for name in found.shapes:
        if name.startswith(layers):
            index, _, rest = name.removeprefix(layers).partition(".")
            inner[f"layer{index}.layer.{rest}"] = name
        elif is_below(name, found.captured.before):
            embed[f"embed.lm.{name}"] = name
        elif is_below(name, found.captured.after):
            head[f"head.lm.{name}"] = name
    return embed | inner | head


def is_below(name: str, paths: Collection[str]) -> bool:
    """Whether a parameter belongs to one of these modules."""
    return any(name.startswith(f"{path}.") for path in paths)
