"""Fewer layers of a model that keep every kind of layer, and the patterns that name layers renamed with them. No torch.

Note [Roles of layers]
    The role of a layer is its kind (its projections, whether it has a window, else its FLOPs) and the
    patterns that name it but not every layer, as `layer2.*` does. A smaller model has a layer for each
    role. Its layers have the kinds that the family's config gives them, so each stands for a layer of
    the same kind, and a pattern that names that one is replaced by its own name:

        layers of the run   0 dense   1 dense   2 experts, "layer2.*"   3 to 60 experts
        reduced             0 dense   1 experts, as layer 2   2 experts, as layer 3
        patterns            "layer2.*" -> "layer1.*"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import cycle
from typing import Any

from pydantic import ValidationError

from weft.config.run import Run
from weft.config.schema import ModelSection
from weft.errors import UserError

FEWEST_LAYERS = 3
"""The first, the last and one between them; two stages hold different numbers of them."""
MOST_LAYERS = 12
"""More roles of layers are not kept."""
SHORTEST_PERIODS = {"global_every": 2, "first_k_dense": 1}
"""Fields that say which layers are of a kind -> their value in a smaller model that has the same kinds."""

IsValid = Callable[[Run], bool]


@dataclass(frozen=True)
class LayerRole:
    """What distinguishes a layer from others; see Note [Roles of layers]."""

    kind: Hashable
    patterns: frozenset[str] = frozenset()


def with_fewer_layers(run: Run, is_valid: IsValid) -> Run:
    """The run with the fewest layers that have every role, or else the most roles; as it is where
    fewer layers are not valid.
    """
    number = run.model.architecture.get("layers")
    if type(number) is not int or number <= FEWEST_LAYERS:
        return run
    roles = _roles(run)
    own_kinds = {role.kind for role in roles}
    best: tuple[int, Run] | None = None
    for fewer in range(FEWEST_LAYERS, number):
        if best is not None and (not best[0] or fewer > MOST_LAYERS):
            break
        for model in _with_layers(run.model, fewer):
            kinds = layer_kinds(model, run.data.seq_len)
            if not own_kinds.issuperset(kinds):
                continue
            stands_for = _assigned(roles, kinds)
            num_lost = len(set(roles) - set(stands_for))
            if best is not None and num_lost >= best[0]:
                continue
            changed = _with_model(run, model, stands_for)
            if is_valid(changed):
                best = (num_lost, changed)
    return run if best is None else best[1]


def layer_kinds(model: ModelSection, seq_len: int) -> tuple[Hashable, ...]:
    """For each layer what distinguishes its computation from that of others."""
    number = model.architecture["layers"]
    parts: list[set[str]] = [set() for _ in range(number)]
    for name in model.linears():
        layer, _, part = name.partition(".")
        index = layer.removeprefix("layer")
        if index.isdecimal() and int(index) < number:
            parts[int(index)].add(part)
    window_of = getattr(model, "window_of", None)
    others: Sequence[Hashable]
    if window_of is not None:
        others = [window_of(index) is None for index in range(number)]
    else:
        others = [block.flops for block in model.block_specs(seq_len) if block.is_layer]
    return tuple((frozenset(own), other) for own, other in zip(parts, others, strict=False))


def model_with(model: ModelSection, fields: Mapping[str, Any]) -> ModelSection | None:
    """The model with other values of some fields; None where it does not take them."""
    values = {**model.model_dump(), **fields}
    try:
        return type(model).model_validate(values, strict=False)
    except (ValidationError, UserError, ValueError):
        return None


def _with_layers(model: ModelSection, number: int) -> Iterator[ModelSection]:
    """The model with fewer layers: with shorter periods of its kinds, with its own, with one kind."""
    own = model.architecture
    present = [name for name in SHORTEST_PERIODS if name in own]
    shorter = {name: min(own[name], SHORTEST_PERIODS[name]) for name in present}
    for periods in (shorter, {}, dict.fromkeys(present, number)):
        found = model_with(model, {"layers": number, **periods})
        if found is not None:
            yield found


def _roles(run: Run) -> tuple[LayerRole, ...]:
    """The role of each layer."""
    kinds = layer_kinds(run.model, run.data.seq_len)
    of_linears = (*run.lora.targets, *run.precision.fp8_exclude)
    patterns = [*(group.match for group in run.optim.groups), *of_linears]
    roles = []
    for index, kind in enumerate(kinds):
        own = (each for each in patterns if _names_some(each, len(kinds)) and _names(each, index))
        roles.append(LayerRole(kind, frozenset(own)))
    return tuple(roles)


def _names(pattern: str, index: int) -> bool:
    """Whether the first part of a pattern of names matches a layer."""
    first, _, _ = pattern.partition(".")
    return fnmatchcase(f"layer{index}", first)


def _names_some(pattern: str, number: int) -> bool:
    """Whether a pattern names some of the layers, but not all."""
    named = [_names(pattern, index) for index in range(number)]
    return any(named) and not all(named)


def _assigned(roles: Sequence[LayerRole], kinds: Sequence[Hashable]) -> tuple[LayerRole, ...]:
    """For each layer of a smaller model the role that it has: the roles of its kind in turn."""
    of_kind: dict[Hashable, list[LayerRole]] = defaultdict(list)
    for role in dict.fromkeys(roles):
        of_kind[role.kind].append(role)
    in_turn = {kind: cycle(found) for kind, found in of_kind.items()}
    return tuple(next(in_turn[kind]) for kind in kinds)


def _with_model(run: Run, model: ModelSection, roles: Sequence[LayerRole]) -> Run:
    """The run with fewer layers, its patterns and stages fitted to them."""
    number = run.model.architecture["layers"]
    groups = [
        group.model_copy(update={"match": match})
        for group in run.optim.groups
        for match in _renamed(group.match, roles, number)
    ]

    def renamed(patterns: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for pattern in patterns for name in _renamed(pattern, roles, number))

    values: dict[str, Any] = {
        "model": model,
        "optim.groups": tuple(groups),
        "lora.targets": renamed(run.lora.targets),
        "precision.fp8_exclude": renamed(run.precision.fp8_exclude),
        "pipeline.split": _split(run.pipeline.split, len(roles)),
    }
    return run.with_values(values)


def _renamed(pattern: str, roles: Sequence[LayerRole], number: int) -> Iterator[str]:
    """The patterns that name the layers which stand for those that a pattern names."""
    if not _names_some(pattern, number):
        yield pattern
        return
    _, _, rest = pattern.partition(".")
    for index, role in enumerate(roles):
        if pattern in role.patterns:
            yield f"layer{index}.{rest or '*'}"


def _split(split: Sequence[int], number: int) -> tuple[int, ...]:
    """Stages with fewer layers: one at least for each that has some, the others where most are."""
    smaller = [min(layers, 1) for layers in split]
    while split and sum(smaller) < number:
        left = [layers - taken for layers, taken in zip(split, smaller, strict=True)]
        smaller[left.index(max(left))] += 1
    return tuple(smaller)
