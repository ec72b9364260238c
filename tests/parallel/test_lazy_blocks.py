"""A rank builds the blocks of its own stages only, and its part of the model is the same as from all blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from tests.sampling import sampled
from weft.comm.comm import Comm
from weft.comm.transport import MetaTransport
from weft.config.schema import LoraConfig
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, make_stages
from weft.models import FAMILIES, Family, builders_of
from weft.models.common.batch import example_of
from weft.models.common.lazy_blocks import Builder, LazyBlocks
from weft.models.common.lora import adapted
from weft.parallel.model.fingerprint import fingerprint
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.train.init_from import meta_modules

LAYERS = 6
SEQ_LEN = 16
LAZY_FAMILIES = [
    name for name, family in FAMILIES.items() if builders_of(family, family.Config()) is not None
]
LORA = LoraConfig(rank=2, alpha=4.0)


def config_of(family: Family, **values: Any) -> Any:
    return family.Config(layers=LAYERS, **values)


def parallel_model(
    family: Family,
    config: Any,
    blocks: Mapping[str, nn.Module],
    *,
    mesh: str,
    rank: int,
    sequence_parallel: bool = False,
) -> ParallelModel:
    plan = Plan(
        mesh=Mesh.parse(mesh),
        family=config.family,
        architecture="{}",
        stages=make_stages(config.block_specs(SEQ_LEN), Mesh.parse(mesh).degree("pp")),
        seq_len=SEQ_LEN,
        microbatches=4,
        sequence_parallel=sequence_parallel,
    )
    transport = MetaTransport(plan.mesh.size, rank, device="cpu")
    comm = Comm(plan.mesh, rank, transport)
    return parallelize(
        blocks,
        plan,
        comm,
        axes=family.axes(config),
        ties=family.ties(config),
        example=example_of(config, 1, SEQ_LEN),
    )


def geometry(model: ParallelModel) -> dict[str, Any]:
    """All that a rank holds, but for values."""
    modules = {}
    for name, block in model.blocks.items():
        types = []
        for path, module in block.named_modules():
            types.append((path, type(module)))
        modules[name] = types
    params = {
        name: (param.shape, param.dtype, param.requires_grad)
        for name, param in model.params.items()
    }
    return {
        "modules": modules,
        "params": params,
        "shards": model.shards,
        "stage_of": model.stage_of,
        "cross_stage_ties": model.cross_stage_ties,
        "frozen": model.frozen,
    }


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["plain", "lora"])
@pytest.mark.parametrize("name", sampled(LAZY_FAMILIES))
def test_a_rank_holds_the_same_as_from_all_blocks(name: str, lora: LoraConfig) -> None:
    family = adapted(FAMILIES[name], lora)
    config = config_of(family)
    builders = builders_of(family, config)
    assert builders is not None
    has_sequences = config.kind != "images"
    for rank, sequence_parallel in ((0, False), (3, has_sequences)):
        facts = []
        for blocks in (
            meta_modules(lambda: family.blocks(config)),
            LazyBlocks(builders, meta_modules),
        ):
            model = parallel_model(
                family,
                config,
                blocks,
                mesh="pp2 tp2",
                rank=rank,
                sequence_parallel=sequence_parallel,
            )
            facts.append(geometry(model))
        assert facts[0] == facts[1], (rank, sequence_parallel)


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["plain", "lora"])
@pytest.mark.parametrize("name", LAZY_FAMILIES)
def test_builders_build_the_blocks_of_the_family(name: str, lora: LoraConfig) -> None:
    """Blocks of one builder are equal, which the trace relies on; the names are the specs'."""
    family = adapted(FAMILIES[name], lora)
    config = config_of(family)
    builders = builders_of(family, config)
    assert builders is not None
    lazy = LazyBlocks(builders, meta_modules)
    whole = meta_modules(lambda: family.blocks(config))
    names = [spec.name for spec in config.block_specs(SEQ_LEN)]
    assert list(lazy) == list(whole) == names
    for block_name, first in lazy.repeats(distinct=()).items():
        assert fingerprint(lazy[block_name]) == fingerprint(lazy[first])
    for block_name, block in whole.items():
        assert fingerprint(lazy[block_name]) == fingerprint(block)


@pytest.mark.parametrize("mesh", ["pp3", "pp3 tp2"])
def test_a_rank_builds_its_own_stages_and_one_block_of_each_kind(mesh: str) -> None:
    family = FAMILIES["llama3"]
    config = config_of(family)
    builders = builders_of(family, config)
    assert builders is not None
    counts: Counter[Builder] = Counter()

    def call(build: Builder) -> nn.Module:
        counts[build] += 1
        return meta_modules(build)

    lazy = LazyBlocks(builders, call)
    model = parallel_model(family, config, lazy, mesh=mesh, rank=0)
    own_layers = [name for name in model.blocks if name.startswith("layer")]
    assert len(own_layers) < LAYERS
    assert counts[builders["layer0"]] == len(own_layers) + 1
    assert counts[builders["head"]] == 1


def test_a_block_with_a_tied_parameter_equals_no_other() -> None:
    makers = dict.fromkeys(("a", "b", "c"), lambda: nn.Linear(2, 2))
    lazy = LazyBlocks(makers, meta_modules)
    assert lazy.repeats(distinct={"a"}) == {"c": "b"}
    templates = lazy.templates(lazy.repeats(distinct={"a"}))
    assert templates["b"] is templates["c"] is not templates["a"]
    assert lazy["b"] is lazy["b"] is not lazy["c"]
