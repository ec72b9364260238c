"""Starting values of parameters: a function of seed, global name and full shape only, so every layout starts bit-equal.

A rank that holds a shard draws the whole tensor and keeps its shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from weft.core.model_config import Draw, InitTable, match_row

Blocks = Mapping[str, nn.Module] | nn.ModuleDict


def named_parameters(blocks: Blocks) -> dict[str, nn.Parameter]:
    """Parameters by global name (`layer17.attn.q.weight`) in chain order; a tied one is there under
    each name.
    """
    found: dict[str, nn.Parameter] = {}
    for block_name, block in blocks.items():
        for name, parameter in block.named_parameters(remove_duplicate=False):
            found[f"{block_name}.{name}"] = parameter
    return found


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
        module = blocks[block_name].get_submodule(module_path)
        setattr(module, attribute, parameters[owner])


def init_params(
    params: Mapping[str, Tensor],
    table: InitTable,
    *,
    seed: int,
    ties: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    shard: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Set `params` (by global name, of any dtype, on any device) to their starting values.

    Args:
        ties: alias -> owner; an alias starts with its owner's values.
        shapes: full shape of each parameter, where `params` holds shards; default: the shapes of
            `params`.
        shard: (global name, full tensor) -> the shard of this rank; default: the full tensor.
    """
    owners = {name: (ties or {}).get(name, name) for name in params}
    drawn_name = ""
    drawn = torch.empty(0)
    for name in sorted(params, key=lambda name: owners[name]):
        owner = owners[name]
        if owner != drawn_name:
            shape = shapes[name] if shapes else tuple(params[name].shape)
            drawn_name = owner
            drawn = draw(owner, shape, match_row(owner, table, title="init"), seed=seed)
        value = shard(name, drawn) if shard else drawn
        with torch.no_grad():
            params[name].copy_(value)


def draw(
    name: str,
    shape: tuple[int, ...],
    rule: Draw,
    *,
    seed: int,
) -> Tensor:
    """The full starting value, float32 on the CPU whatever the dtype and device of the model."""
    if rule[0] == "ones":
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if rule[0] == "zeros":
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(name_seed(name, seed))
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    return value.normal_(0.0, rule[1], generator=generator)


def name_seed(name: str, seed: int) -> int:
    """A stable seed for each name, 32 bits: torch's CPU generator reads no more of a seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
