"""Tied parameters, one parameter under several names: in one model, on one rank, and across pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from weft.models.common.init import named_parameters
from weft.schedule.actions import Act


@dataclass(frozen=True)
class CrossStageTie:
    """A tied parameter with a copy on this pipeline rank and one on another: the gradients of all
    copies are summed; the owner's copy counts in norms.

    Attributes:
        name: of the parameter on this rank.
        peer: the other pipeline rank.
        is_owner: whether the owner's name lives on this rank.
    """

    name: str
    peer: int
    is_owner: bool


def block_of(param_name: str) -> str:
    """The block that a global parameter name begins with."""
    return param_name.partition(".")[0]


def ties_on_rank(ties: Mapping[str, str], blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Alias -> the name under which a rank with these blocks holds the parameter: the owner's, or
    that of the first alias here where the owner lives elsewhere.
    """
    names_here: dict[str, str] = {}
    found: dict[str, str] = {}
    for alias, owner in ties.items():
        if block_of(alias) not in blocks:
            continue
        if block_of(owner) in blocks:
            found[alias] = owner
            continue
        name_here = names_here.setdefault(owner, alias)
        if name_here != alias:
            found[alias] = name_here
    return found


def own_named_parameters(
    blocks: Mapping[str, nn.Module], ties_here: Mapping[str, str]
) -> dict[str, nn.Parameter]:
    """Parameters by global name; a tied one under the one name that `ties_on_rank` gives it."""
    params: dict[str, nn.Parameter] = {
        name: param for name, param in named_parameters(blocks).items() if name not in ties_here
    }
    return params


def shared_parameters(
    model: Mapping[str, nn.Module] | nn.ModuleDict, repeats: Mapping[str, str]
) -> dict[str, str]:
    """Alias -> owner of parameters that are one object: a layer that is used twice, or weights tied
    by hand.

    Args:
        repeats: as in `PlainChain`; such a block shares parameters with no other one.
    """
    owners: dict[tuple[str, int], str] = {}
    found: dict[str, str] = {}
    for name, param in named_parameters(model).items():
        block_name = block_of(name)
        scope = block_name if block_name in repeats else ""
        key = (scope, id(param))
        owner = owners.setdefault(key, name)
        if owner != name:
            found[name] = owner
    return found


def completing_stages(
    stages: Mapping[int, nn.ModuleDict], params: Mapping[str, nn.Parameter], row: Sequence[Act]
) -> dict[str, int]:
    """For each parameter, of the stages that use it the one whose last action in `row` is latest;
    several stages may use a tied one.
    """
    last_place: dict[int, int] = {}
    for place, act in enumerate(row):
        last_place[act.stage] = place
    stage_of_param: dict[int, int] = {}
    for stage in sorted(stages, key=last_place.__getitem__):
        for param in stages[stage].parameters():
            stage_of_param[id(param)] = stage
    found: dict[str, int] = {}
    for name, param in params.items():
        found[name] = stage_of_param[id(param)]
    return found


def cross_stage_ties_of(
    ties: Mapping[str, str],
    params: Mapping[str, nn.Parameter],
    block_rank: Mapping[str, int],
    here: int,
) -> tuple[CrossStageTie, ...]:
    """Ties of this pipeline rank with each other one that holds a copy, by owner, then by rank: so
    any two ranks meet in the same order, and no ranks wait for each other in a circle.
    """
    aliases_of: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        aliases_of.setdefault(owner, []).append(alias)
    found: list[CrossStageTie] = []
    for owner, aliases in sorted(aliases_of.items()):
        names = [owner, *aliases]
        holders = {block_rank[block_of(name)] for name in names}
        names_here = [name for name in names if name in params]
        if not names_here:
            continue
        name = names_here[0]
        is_owner = name == owner
        found.extend(CrossStageTie(name, peer, is_owner) for peer in sorted(holders - {here}))
    return tuple(found)
