"""What a pass over micro-batches keeps of products in fp8; see Note [Operands that are kept] in fp8_operands.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from weft.core.axes import state_axes
from weft.core.zero_stages import ZERO_THAT_GATHERS
from weft.models.common.experts import PRODUCTS
from weft.models.common.fp8_experts import Fp8ExpertProduct
from weft.models.common.fp8_operands import KeptOperands, LastInput
from weft.models.common.linear_products import Fp8Product, product_of
from weft.parallel.model.parallelize import ParallelModel


@dataclass(frozen=True)
class Fp8Pass:
    """The products in fp8 of a rank, and whether a pass keeps the rows of their weights."""

    keeps_weight: Mapping[KeptOperands, bool]

    @classmethod
    def of(cls, model: ParallelModel, *, microbatches: int) -> Fp8Pass:
        """Those of a pass of so many micro-batches. Compiled code keeps nothing: it rounds operands in
        the kernels that make them.
        """
        if model.plan.compiles_blocks(model.comm.device.type):
            return cls({})
        names = {id(param): name for name, param in model.params.items()}
        found = {}
        for block in model.blocks.values():
            for param, kept in _kept_operands(block):
                is_used_again = microbatches > 1 and not _is_freed(model, names[id(param)])
                found[kept] = is_used_again
        return cls(found)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep operands until it is left."""
        last_input = LastInput()
        for kept, keeps_weight in self.keeps_weight.items():
            kept.begin(last_input, keeps_weight=keeps_weight)
        try:
            yield
        finally:
            for kept in self.keeps_weight:
                kept.end()


def _kept_operands(block: nn.Module) -> Iterator[tuple[nn.Parameter, KeptOperands]]:
    """The weights of a block's products in fp8, with what is kept of them."""
    for module in block.modules():
        product = product_of(module)
        if isinstance(product, Fp8Product):
            yield module.get_parameter("weight"), product.kept
        for name, of_experts in vars(module).get(PRODUCTS, {}).items():
            if isinstance(of_experts, Fp8ExpertProduct):
                yield module.get_parameter(name), of_experts.kept


def _is_freed(model: ParallelModel, name: str) -> bool:
    """Whether the memory of a parameter is freed between its uses."""
    if name in model.quantized:
        return True
    axes = state_axes(model.comm.mesh, model.shards[name].reduce_axes)
    is_sharded = model.comm.degree(axes.sharded) > 1
    return model.plan.zero >= ZERO_THAT_GATHERS and is_sharded
