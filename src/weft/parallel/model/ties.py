"""Tied parameters, one parameter under several names: in one model, on one rank, and across pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from weft.models.common.init import named_parameters
from weft.schedule.actions import Act


@dataclass(frozen=True)
class CrossStageTie:
    """A tied parameter with copies on two pipeline ranks: both gradients are summed; the owner's
    copy counts in norms.
    """

    name: str
    peer: int
    is_owner: bool = True


def block_of(param_name: str) -> str:
    """The block that a global parameter name begins with."""
    return param_name.partition(".")[0]


def own_named_parameters(
    blocks: Mapping[str, nn.Module],
    ties: Mapping[str, str],
) -> dict[str, nn.Parameter]:
    """Parameters by global name; a tied one under its owner's, where that block lives here, too."""
    params: dict[str, nn.Parameter] = {}
    for name, param in named_parameters(blocks).items():
        owner = ties.get(name)
        if owner is None or block_of(owner) not in blocks:
            params[name] = param
    return params


def shared_parameters(
    model: Mapping[str, nn.Module] | nn.ModuleDict,
    repeats: Mapping[str, str],
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
    stages: Mapping[int, nn.ModuleDict],
    params: Mapping[str, nn.Parameter],
    row: Sequence[Act],
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
    """Ties of this pipeline rank with another one, in the order of the aliases."""
    found: list[CrossStageTie] = []
    for alias, owner in sorted(ties.items()):
        alias_rank = block_rank[block_of(alias)]
        owner_rank = block_rank[block_of(owner)]
        if alias_rank == owner_rank:
            continue
        if here == owner_rank:
            found.append(CrossStageTie(name=owner, peer=alias_rank))
        elif here == alias_rank and alias in params:
            found.append(
                CrossStageTie(
                    name=alias,
                    peer=owner_rank,
                    is_owner=False,
                )
            )
    return tuple(found)
