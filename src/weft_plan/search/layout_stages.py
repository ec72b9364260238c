"""Stages of the layouts of a search: their blocks, layers and parameters, each computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from weft.core.model_config import BlockSpec
from weft.layout.plan import make_stages
from weft.layout.stages import least_layers, most_stages
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.schedule.actions import Table
from weft_plan.search.layout_choice import Layout


class BlockSize(NamedTuple):
    """Parameters of a block on a rank.

    Attributes:
        experts: of these, those of experts that are sharded over ep: other ranks share their
            gradients and states.
    """

    total: float
    experts: float = 0.0


class SizesOfKinds(Protocol):
    """Parameters of each kind of block on a rank, by the degrees of two axes."""

    def __call__(self, *, tp: int, ep: int) -> Mapping[str, BlockSize]: ...


NO_PARAMS = BlockSize(0.0)


class BlockParams(NamedTuple):
    """Parameters of the blocks of a stage or rank: of all, and of the first two and the last that
    have some.

    Attributes:
        experts: as of `BlockSize`.
        num_blocks: that have parameters.
        num_expert_blocks: of these, with experts.
        largest: parameters of the largest block.
    """

    total: float
    experts: float
    num_blocks: int
    num_expert_blocks: int
    first: BlockSize
    second: BlockSize
    last: BlockSize
    largest: float

    @staticmethod
    def of(sizes: Sequence[BlockSize]) -> BlockParams:
        """The parameters of blocks in order."""
        own = [size for size in sizes if size.total]
        if not own:
            return BlockParams(0.0, 0.0, 0, 0, NO_PARAMS, NO_PARAMS, NO_PARAMS, 0.0)
        with_experts = [size.experts for size in own if size.experts]
        return BlockParams(
            total=sum(size.total for size in own),
            experts=sum(with_experts),
            num_blocks=len(own),
            num_expert_blocks=len(with_experts),
            first=own[0],
            second=own[1] if len(own) > 1 else NO_PARAMS,
            last=own[-1],
            largest=max(size.total for size in own),
        )


class LayoutStages:
    """Stages of the layouts of one model."""

    def __init__(
        self, specs: Sequence[BlockSpec], kinds: Mapping[str, str], sizes_of_kinds: SizesOfKinds
    ) -> None:
        self._specs = specs
        self._kinds = kinds
        self._sizes_of_kinds = sizes_of_kinds
        self._names: dict[object, tuple[tuple[str, ...], ...]] = {}
        self._block_sizes: dict[object, list[list[BlockSize]]] = {}
        self._sizes_by_rank: dict[object, list[list[BlockSize]]] = {}
        self._totals: dict[int, list[list[float]]] = {}
        self._params: dict[int, list[BlockParams]] = {}

    def num_stages(self, layout: Layout) -> int:
        """Pipeline ranks by chunks."""
        return layout.degree(PP) * layout.chunks

    def are_possible(self, layout: Layout) -> bool:
        """Whether the model has blocks for every stage."""
        return self.num_stages(layout) <= most_stages(self._specs)

    def can_be_split(self, layout: Layout) -> bool:
        """Whether there are several numbers of layers a stage to choose from."""
        num_layers = sum(1 for block in self._specs if block.is_layer)
        return 1 < self.num_stages(layout) <= num_layers

    def names(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """Blocks of every stage."""
        num_stages = self.num_stages(layout)
        key = num_stages, layout.split
        known = self._names.get(key)
        if known is None:
            stages = make_stages(self._specs, num_stages, split=layout.split)
            known = tuple(stage.blocks for stage in stages)
            self._names[key] = known
        return known

    def layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers of every stage."""
        return self.num_layers(self.names(layout))

    def num_layers(self, names_of_stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """Layers among the blocks of every stage."""
        layers = {block.name for block in self._specs if block.is_layer}
        return tuple(len(layers.intersection(names)) for names in names_of_stages)

    def least_layers(self, layout: Layout) -> tuple[int, ...]:
        """Fewest layers that every stage may have."""
        return least_layers(self._specs, self.num_stages(layout))

    def sizes(self, layout: Layout) -> list[list[float]]:
        """Parameters of every block of every stage."""
        return self._totals_of(self._sizes_of_stages(layout))

    def params(self, layout: Layout) -> list[BlockParams]:
        """Parameters of every stage."""
        return self._summed(self._sizes_of_stages(layout))

    def sizes_of_ranks(self, layout: Layout, table: Table) -> list[list[float]]:
        """Parameters of every block of every pipeline rank; `table` is that of the layout."""
        return self._totals_of(self._sizes_of_ranks(layout, table))

    def params_of_ranks(self, layout: Layout, table: Table) -> list[BlockParams]:
        """Parameters of every pipeline rank."""
        return self._summed(self._sizes_of_ranks(layout, table))

    def _sizes_of_stages(self, layout: Layout) -> list[list[BlockSize]]:
        tp, ep = layout.degree(TP), layout.degree(EP)
        key = self.num_stages(layout), layout.split, tp, ep
        known = self._block_sizes.get(key)
        if known is None:
            of_kinds = self._sizes_of_kinds(tp=tp, ep=ep)
            known = []
            for names in self.names(layout):
                known.append([of_kinds[self._kinds[name]] for name in names])
            self._block_sizes[key] = known
        return known

    def _sizes_of_ranks(self, layout: Layout, table: Table) -> list[list[BlockSize]]:
        shape = layout.degree(PP), layout.schedule, layout.chunks, layout.split
        key = shape, layout.degree(TP), layout.degree(EP)
        known = self._sizes_by_rank.get(key)
        if known is None:
            known = [[] for _ in range(table.num_ranks)]
            for stage, sizes in enumerate(self._sizes_of_stages(layout)):
                rank = table.stage_to_rank[stage]
                known[rank].extend(sizes)
            self._sizes_by_rank[key] = known
        return known

    def _totals_of(self, all_sizes: list[list[BlockSize]]) -> list[list[float]]:
        """Of lists that are kept here, so that their ids stay their own."""
        key = id(all_sizes)
        if key not in self._totals:
            self._totals[key] = [[size.total for size in sizes] for sizes in all_sizes]
        return self._totals[key]

    def _summed(self, all_sizes: list[list[BlockSize]]) -> list[BlockParams]:
        """The sums of lists that are kept here, so that each is summed once."""
        key = id(all_sizes)
        if key not in self._params:
            self._params[key] = [BlockParams.of(sizes) for sizes in all_sizes]
        return self._params[key]
