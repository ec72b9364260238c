"""Two builds of a user's model have the same values: each rank builds its own, and so does a comparison with one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.errors import Fault, PlanError
from weft.models.common.init import path_below
from weft.models.user_family import UserFamily
from weft.train.init_from import meta_modules

MOST_DRAWN = 2**20
"""Entries of models whose parameters are compared, too; larger ones are built without them."""
SEED = 12345


def check_builds(family: UserFamily, config: ModelConfig) -> None:
    """Reject a model whose constructors draw from what no seed decides.

    Raises:
        PlanError: the first buffer, attribute or parameter that differs.
    """
    first, second = (dict(_constants(family, config)) for _ in range(2))
    num_entries = sum(math.prod(shape) for shape in family.facts(config).shapes.values())
    if num_entries <= MOST_DRAWN:
        first.update(family.initial_values(config, seed=SEED))
        second.update(family.initial_values(config, seed=SEED))
    for name, value in first.items():
        if name not in second or not _is_equal(value, second[name]):
            raise PlanError(
                Fault(
                    f"{family.model.label}: {name}",
                    "has other values in each build, and every rank builds its own",
                    fix="draw with torch, random or numpy.random, or from a generator with a fixed seed",
                )
            )


def _constants(family: UserFamily, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that are attributes, by name."""
    blocks: Mapping[str, nn.Module] = meta_modules(lambda: family.blocks(config))
    for block_name, block in blocks.items():
        for path, module in block.named_modules():
            for holder in (module._buffers, vars(module)):
                for name, value in holder.items():
                    if isinstance(value, Tensor) and not value.is_meta:
                        yield path_below(block_name, path, name), value


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
