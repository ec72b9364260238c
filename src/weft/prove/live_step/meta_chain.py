"""The plain blocks of a model on the meta device, and which parameters of the whole model each of them uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.core.model_config import ModelConfig
from weft.models import Family
from weft.models.common.head_output import use_plain_losses
from weft.models.common.init import named_parameters
from weft.models.common.moe import MoE, Router
from weft.parallel.model.ties import block_of, shared_parameters
from weft.prove.plain_buffers import prepare_plain
from weft.prove.plain_fp8 import use_plain_fp8
from weft.train.init_from import lazy_blocks, place_buffers


@dataclass(frozen=True)
class MetaChain:
    """The blocks of a model, whose parameters are on the meta device.

    Attributes:
        blocks: by name, in order.
        owners: name of a block -> path of a parameter in it -> global name of its owner.
        shapes: global name of an owner -> shape.
        trained: owners with gradients, in the order in which the forward first uses them.
        uncast: owners that stay in the dtype of parameters: biases of routers.
        products: owners whose gradients are products of matrices, which kernels add up in float32;
            those of vectors and of tables of tokens are sums over tokens in the type of
            activations, which lose more the more tokens there are.
        updated: modules whose buffers training updates, by name.
        routers: owners of weights of routers, whose gradients change by steps where rounding moves
            tokens to other experts.
    """

    blocks: Mapping[str, nn.Module]
    owners: Mapping[str, Mapping[str, str]]
    shapes: Mapping[str, tuple[int, ...]]
    trained: tuple[str, ...]
    uncast: frozenset[str]
    products: frozenset[str]
    routers: frozenset[str]
    updated: Mapping[str, nn.Module]

    @staticmethod
    def of(
        family: Family,
        config: ModelConfig,
        *,
        device: torch.device,
        compute: torch.dtype,
        has_token_losses: bool = False,
    ) -> MetaChain:
        """The chain of a family; buffers are on the device of a rank.

        Args:
            has_token_losses: whether heads hand on the losses of targets, not logits.
        """
        lazy = lazy_blocks(family, config)
        blocks = {name: lazy[name] for name in lazy}
        updated = prepare_plain(blocks, compute)
        if has_token_losses:
            use_plain_losses(blocks)
        use_plain_fp8(blocks)
        place_buffers(blocks.values(), device=device, dtype=compute)
        ties = {**shared_parameters(blocks, {}), **family.ties(config)}
        owners: dict[str, dict[str, str]] = {name: {} for name in blocks}
        shapes: dict[str, tuple[int, ...]] = {}
        trained: dict[str, None] = {}
        for name, param in named_parameters(blocks).items():
            owner = _last_owner(name, ties)
            block = block_of(name)
            owners[block][name.removeprefix(f"{block}.")] = owner
            shapes[owner] = tuple(param.shape)
            if param.requires_grad:
                trained.setdefault(owner)
        return MetaChain(
            blocks=blocks,
            owners=owners,
            shapes=shapes,
            trained=tuple(trained),
            uncast=frozenset(_router_biases(blocks, owners)),
            products=frozenset(trained).difference(_sums_over_tokens(blocks, owners, shapes)),
            routers=frozenset(_router_weights(blocks, owners)),
            updated=updated,
        )

    def of_block(self, block: str) -> dict[str, tuple[int, ...]]:
        """Owners of the parameters that a block uses, with their shapes."""
        return {owner: self.shapes[owner] for owner in self.owners[block].values()}

    @property
    def first_use(self) -> dict[str, str]:
        """Owner -> the first block that uses it, whose backward completes its gradient."""
        found: dict[str, str] = {}
        for block, owners in self.owners.items():
            for owner in owners.values():
                found.setdefault(owner, block)
        return found


def _last_owner(name: str, ties: Mapping[str, str]) -> str:
    """The owner of a name, also where an alias is tied to another alias."""
    while name in ties:
        name = ties[name]
    return name


def _router_biases(
    blocks: Mapping[str, nn.Module], owners: Mapping[str, Mapping[str, str]]
) -> list[str]:
    return [
        owners[name][f"{path}.bias".lstrip(".")]
        for name, path, router in _routers(blocks)
        if router.bias is not None
    ]


def _router_weights(
    blocks: Mapping[str, nn.Module], owners: Mapping[str, Mapping[str, str]]
) -> list[str]:
    return [owners[name][f"{path}.proj.weight".lstrip(".")] for name, path, _ in _routers(blocks)]


def _routers(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Router]]:
    """(block, path in it, router) of every layer of experts."""
    for name, block in blocks.items():
        for path, module in block.named_modules():
            if isinstance(module, MoE):
                yield name, f"{path}.router".lstrip("."), module.router


def _sums_over_tokens(
    blocks: Mapping[str, nn.Module],
    owners: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    found = [owner for owner, shape in shapes.items() if len(shape) < 2]
    for name, block in blocks.items():
        for path, module in block.named_modules():
            if isinstance(module, nn.Embedding):
                found.append(owners[name][f"{path}.weight" if path else "weight"])
    return found
