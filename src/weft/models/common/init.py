"""Owns how parameters start: each one's values are a function of seed, global name and full shape, and of nothing else.

So any layout starts bit-equal: a rank that holds a cut draws the whole tensor and keeps its cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from weft.core.model_config import Draw, InitTable, match_row


def named_parameters(blocks: Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Parameters by global name (`layer17.attn.q.weight`) in chain order; a tied one is there under each name."""
    return {
        f"{block_name}.{name}": parameter
        for block_name, block in blocks.items()
        for name, parameter in block.named_parameters(remove_duplicate=False)
    }


def tie(blocks: Mapping[str, nn.Module] | nn.ModuleDict, ties: Mapping[str, str]) -> None:
    """Make each alias the very parameter of its owner; a pair whose owner or alias lives elsewhere is left alone."""
    parameters = named_parameters(blocks)
    for alias, owner in ties.items():
        if alias in parameters and owner in parameters:
            block_name, _, path = alias.partition(".")
            module, _, attribute = path.rpartition(".")
            setattr(blocks[block_name].get_submodule(module), attribute, parameters[owner])


def initialise(
    params: Mapping[str, Tensor],
    table: InitTable,
    *,
    seed: int,
    ties: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    piece: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Fill `params` (by global name, of any dtype, on any device) with their starting values.

    Args:
        ties: alias -> owner; the alias starts as its owner does.
        shapes: full shape of each parameter, where `params` holds cuts; default: the shape that is there.
        piece: (global name, full tensor) -> what this rank keeps of it; default: all.
    """
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in params.items()}
    drawn = ("", torch.empty(0))
    for name in sorted(params, key=lambda name: (ties or {}).get(name, name)):
        owner = (ties or {}).get(name, name)
        if drawn[0] != owner:
            drawn = owner, draw(owner, shapes[name], match_row(owner, table, title="init"), seed=seed)
        with torch.no_grad():
            params[name].copy_(piece(name, drawn[1]) if piece else drawn[1])


def draw(name: str, shape: tuple[int, ...], rule: Draw, *, seed: int) -> Tensor:
    """The full starting value, float32 on the CPU whatever the dtype and device of the model."""
    if rule[0] != "normal":
        return torch.full(shape, 1.0 if rule[0] == "ones" else 0.0, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(name_seed(name, seed))
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    return value.normal_(0.0, rule[1], generator=generator)


def name_seed(name: str, seed: int) -> int:
    """A stable seed of its own for each name, 32 bits: torch's CPU generator reads no more of a seed than these."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
