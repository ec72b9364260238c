"""Starting values of parameters: a function of seed, global name and full shape only, so every layout starts bit-equal.

A rank that holds a shard draws the entries of that shard only: see Note [Counter-based numbers].
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.core.axes import Box
from weft.core.model_config import Draw, InitTable, match_row
from weft.core.shard import Shard
from weft.models.common.counter_normal import normal_entries

Blocks = Mapping[str, nn.Module] | nn.ModuleDict


def named_parameters(blocks: Blocks) -> dict[str, nn.Parameter]:
    """Parameters by global name (`layer17.attn.q.weight`) in chain order; a tied one is there under
    each name.
    """
    found: dict[str, nn.Parameter] = {}
    for block_name, block in blocks.items():
        own = block.named_parameters(remove_duplicate=False)
        for path, parameter in own:
            name = f"{block_name}.{path}"
            found[name] = parameter
    return found


def path_below(*names: str) -> str:
    """The path of a module below others, whose own path may be empty: `layer0.mlp.up`."""
    return ".".join(filter(None, names))


def tie(blocks: Blocks, ties: Mapping[str, str]) -> None:
    """Make each alias the very parameter of its owner; a pair is skipped if alias or owner is not
    in these blocks.
    """
    parameters = named_parameters(blocks)
    for alias, owner in ties.items():
        if alias not in parameters or owner not in parameters:
            continue
        block_name, _, path = alias.partition(".")
        module_path, _, attribute = path.rpartition(".")
        block = blocks[block_name]
        module = block.get_submodule(module_path)
        # the very object: gradients of both uses are summed by autograd
        setattr(module, attribute, parameters[owner])


def init_params(
    params: Mapping[str, Tensor],
    table: InitTable,
    *,
    seed: int,
    ties: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Set `params` (by global name, of any dtype, on any device) to their starting values.

    Args:
        ties: alias -> owner; an alias starts with its owner's values.
        shapes: full shape of each parameter, where `params` holds shards; default: the shapes of
            `params`.
        shards: the entries that each of `params` holds; default: all.
    """
    owners = ties or {}
    for name, param in params.items():
        # by the owner's name: both draw the same numbers, also where they are on different ranks
        owner = owners.get(name, name)
        rule = match_row(owner, table, title="init")
        shape = shapes[name] if shapes else tuple(param.shape)
        whole = Shard((Box.whole(shape),))
        shard = shards[name] if shards else whole
        parts: list[Tensor] = []
        for box in shard.boxes:
            part = draw(owner, shape, rule, seed=seed, box=box, device=param.device)
            parts.append(part)
        value = parts[0]
        if len(parts) > 1:
            value = torch.cat(parts, dim=shard.dim)
        with torch.no_grad():
            # drawn in float32 and rounded here: the values do not depend on the type of the parameters
            param.copy_(value)


def draw(
    name: str,
    shape: tuple[int, ...],
    rule: Draw,
    *,
    seed: int,
    box: Box | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The starting value of one box of a parameter (default: all of it), float32 whatever the dtype
    of the model.
    """
    box = box or Box.whole(shape)
    device = torch.device(device)
    if rule[0] == "ones":
        return torch.ones(box.shape, dtype=torch.float32, device=device)
    if rule[0] == "zeros":
        return torch.zeros(box.shape, dtype=torch.float32, device=device)
    if rule[0] == "own":
        whole: Tensor = rule[1](name, seed)
        entries = whole[box.slices]
        return entries.to(device)
    return normal_entries(name_key(name, seed), shape, box, std=rule[1], device=device)


def name_key(name: str, seed: int) -> int:
    """A stable key for each name, 64 bits."""
    text = f"{seed}:{name}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big")
