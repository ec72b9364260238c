"""Short runs for a search: one or a few blocks of each kind under the sharding of a layout, on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from weft.core.dimension import default_sharding_rule, sequence_axes
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig, logical_axes
from weft.core.shard import first_axes
from weft.layout.plan import Plan
from weft.models.common.init import named_parameters
from weft.parallel.ep import AXIS as EP
from weft.parallel.ep import EXPERTS
from weft.parallel.tp import AXIS as TP
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.train.init_from import lazy_blocks
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_stages import BlockSize

NUM_MICROBATCHES = 2
"""Micro-batches of a short run: only the last one reduces gradients below ZeRO 2."""


FEWER_EXPERTS = (16, 32, 64)
"""Numbers of experts a layer that stand for more of them where each parameter costs the same."""
LEAST_PARAMS = 50e6
"""Of the largest block with fewer experts. Kernels over fewer parameters take the time of their
launch, so that each parameter would cost more than with all experts.
"""
VOCAB = "vocab"


class ShortRuns:
    """Measures a run with fewer blocks.

    Attributes:
        kinds: name of a block -> name of the first block that equals it.
        num_runs: that were measured.
    """

    def __init__(self, run: MeasuredRun, kinds: Mapping[str, str]) -> None:
        self.run = run
        self.kinds = kinds
        self.num_runs = 0
        self._sizes: dict[tuple[int, int], dict[str, BlockSize]] = {}

    def with_fewer_experts(self) -> ShortRuns:
        """Runs of the same model with fewer experts a layer, where it has many, and as much smaller
        a vocabulary: the shares of blocks in all parameters stay about the same. Itself where
        blocks would be small; see `LEAST_PARAMS`.
        """
        own = self.run.config.model
        model = _with_fewer_experts(own)
        if model is own:
            return self
        fewer = ShortRuns(self.run.with_model(model), self.kinds)
        sizes = fewer.sizes_of_kinds(tp=1, ep=1)
        return fewer if max(sizes.values()).total >= LEAST_PARAMS else self

    def measure(self, layout: Layout, *, copies: int = 1) -> RankStep:
        """A step of two micro-batches of the first rank of a layout without pipeline ranks.

        Args:
            copies: blocks of each kind, where the model has so many.
        """
        self.num_runs += 1
        num_sequences = layout.micro_size * Mesh.parse(layout.mesh).degree(sequence_axes())
        global_size = NUM_MICROBATCHES * num_sequences
        run = self.run.with_layout({**layout.values, "batch.global_size": global_size})
        short = run.with_plan(self._shortened(run.plan, copies))
        return measure_rank(short, 0)

    def _shortened(self, plan: Plan, copies: int) -> Plan:
        stage = plan.stages[0]
        counts: Counter[str] = Counter()
        kept = []
        for name in stage.blocks:
            kind = self.kinds[name]
            counts[kind] += 1
            if counts[kind] <= copies:
                kept.append(name)
        short = stage.model_copy(update={"blocks": tuple(kept)})
        return plan.model_copy(update={"stages": (short,)})

    def sizes_of_kinds(self, *, tp: int, ep: int) -> dict[str, BlockSize]:
        """Parameters of each kind of block on a rank."""
        degrees = (tp, ep)
        known = self._sizes.get(degrees)
        if known is None:
            known = self._count_params({TP: tp, EP: ep})
            self._sizes[degrees] = known
        return known

    def _count_params(self, degrees: Mapping[str, int]) -> dict[str, BlockSize]:
        model = self.run.config.model
        family = self.run.family
        blocks = lazy_blocks(family, model)
        axes = family.axes(model)
        has_expert_ranks = degrees[EP] > 1
        sizes = {}
        for kind in dict.fromkeys(self.kinds.values()):
            total = 0.0
            of_experts = 0.0
            for name, param in named_parameters({kind: blocks[kind]}).items():
                logical = first_axes(logical_axes(name, axes))
                count = param.numel() / num_shards(logical, degrees)
                total += count
                if has_expert_ranks and EXPERTS in logical:
                    of_experts += count
            sizes[kind] = BlockSize(total, of_experts)
        return sizes


def _with_fewer_experts(model: ModelConfig) -> ModelConfig:
    """The model with the smallest of `FEWER_EXPERTS` that it takes; itself where it takes none."""
    num_experts = model.axis_sizes().get(EXPERTS, 0)
    if EXPERTS not in type(model).model_fields:
        return model
    for fewer in FEWER_EXPERTS:
        if fewer >= num_experts:
            break
        changed = {**model.model_dump(), EXPERTS: fewer}
        if VOCAB in changed:
            changed[VOCAB] = max(1, changed[VOCAB] * fewer // num_experts)
        try:
            return type(model).model_validate(changed)
        except ValidationError:  # top_k is larger, or groups do not divide them
            continue
    return model


def num_shards(logical: Iterable[str], degrees: Mapping[str, int]) -> int:
    """Shards of a parameter with these logical axes under the degrees of mesh axes."""
    rule = default_sharding_rule()
    mesh_axes: set[str] = set()
    for axis in logical:
        if axis in rule:
            mesh_axes.add(rule[axis])
    shards = 1
    for axis in mesh_axes:
        shards *= degrees.get(axis, 1)
    return shards
