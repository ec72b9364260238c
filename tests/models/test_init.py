"""Starting values depend on seed, global name and full shape only."""

import math

import pytest
import torch

from weft.core.axes import Box
from weft.core.shard import Shard
from weft.models import PRESETS, family
from weft.models.common.init import draw, init_params, name_key, named_parameters, tie

SMALL = (
    "gpt2-tiny",
    "llama3-tiny",
    "mnist-mlp",
    "mnist-conv",
    "qwen3-tiny",
    "qwen3-moe-tiny",
    "deepseek-tiny",
)


def started(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    cfg = PRESETS[name]
    module = family(cfg.family)
    parameters = {}
    for name, param in named_parameters(module.blocks(cfg)).items():
        parameters[name] = param.to(dtype)
    init_params(parameters, module.init(cfg), seed=seed, ties=module.ties(cfg))
    return parameters


@pytest.mark.parametrize("name", SMALL)
def test_values_do_not_depend_on_order_or_on_which_blocks_a_rank_holds(name: str):
    cfg = PRESETS[name]
    module = family(cfg.family)
    whole = started(name)
    torch.manual_seed(1234)
    for kept in whole:
        alone = {kept: torch.full_like(whole[kept], math.nan)}
        init_params(alone, module.init(cfg), seed=0, ties=module.ties(cfg))
        assert torch.equal(alone[kept], whole[kept]), kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_of_another_dtype_are_the_float32_ones_cast(dtype: torch.dtype):
    whole = started("llama3-tiny")
    cast = started("llama3-tiny", dtype=dtype)
    for name, value in whole.items():
        assert torch.equal(value.to(dtype), cast[name]), name


def rows_of_half(half: int, shape: torch.Size) -> Box:
    """The first or the second half of the rows of a tensor whose half has this shape."""
    num_rows, *other_dims = shape
    first = half * num_rows
    lower = (first, *(0 for _ in other_dims))
    upper = (first + num_rows, *other_dims)
    return Box(lower, upper)


@pytest.mark.parametrize("half", [0, 1])
def test_a_rank_draws_its_shard_as_the_whole_tensor_has_it(half: int):
    cfg = PRESETS["llama3-tiny"]
    table = family("llama3").init(cfg)
    whole = started("llama3-tiny")
    shapes = {}
    expected = {}
    local = {}
    shards = {}
    for name, value in whole.items():
        own = value.chunk(2)[half]
        shapes[name] = tuple(value.shape)
        expected[name] = own
        local[name] = torch.empty_like(own)
        shards[name] = Shard((rows_of_half(half, own.shape),))
    init_params(local, table, seed=0, shapes=shapes, shards=shards)
    for name in whole:
        assert torch.equal(local[name], expected[name]), name


def test_a_shard_of_several_boxes_is_their_concatenation():
    table = {"a.w": ("normal", 1.0)}
    whole = torch.empty(6, 5)
    local = torch.empty(6, 3)
    box = Box((0, 0), (6, 1))
    boxes = (box, Box((0, 3), (6, 5)))
    shard = Shard(boxes, dim=1)
    init_params({"a.w": whole}, table, seed=0)
    init_params({"a.w": local}, table, seed=0, shapes={"a.w": (6, 5)}, shards={"a.w": shard})
    assert torch.equal(local, whole[:, [0, 3, 4]])


def test_an_alias_starts_as_its_owner_on_a_stage_that_lacks_the_owner():
    cfg = PRESETS["gpt2-tiny"]
    module = family("gpt2")
    whole = started("gpt2-tiny")
    assert torch.equal(whole["head.proj.weight"], whole["embed.tok.weight"])
    blocks = module.blocks(cfg)
    tie(blocks, module.ties(cfg))
    tied = named_parameters(blocks)
    init_params(tied, module.init(cfg), seed=0, ties=module.ties(cfg))
    for name in whole:
        assert torch.equal(tied[name], whole[name])


def test_an_alias_is_drawn_by_its_owners_row():
    table = {"a.w": ("normal", 1.0), "b.w": ("zeros",)}
    ties = {"b.w": "a.w"}
    owner = torch.empty(20)
    alias = torch.empty(20)
    init_params({"a.w": owner}, table, seed=0, ties=ties)
    init_params({"b.w": alias}, table, seed=0, ties=ties)
    assert torch.equal(owner, alias)
    assert alias.unique().numel() == 20


def test_a_parameter_that_a_block_holds_twice_has_both_names():
    block = torch.nn.ModuleDict(
        {"one": torch.nn.Linear(2, 2, bias=False), "two": torch.nn.Linear(2, 2, bias=False)}
    )
    tie({"block": block}, {"block.two.weight": "block.one.weight"})
    parameters = named_parameters({"block": block})
    assert parameters["block.one.weight"] is parameters["block.two.weight"]


def test_names_and_seeds_give_different_values():
    values = [
        draw(name, (64,), ("normal", 1.0), seed=seed)
        for name in ("layer0.attn.q.weight", "layer1.attn.q.weight", "layer0.attn.k.weight")
        for seed in (0, 1)
    ]
    count = len({tuple(value.tolist()) for value in values})
    assert count == len(values)


def test_keys_of_names_stay_what_they_are():
    """Another value here makes every run of the past start differently."""
    assert name_key("embed.tok.weight", 0) == 3682942592106308134
    assert name_key("layer17.attn.q.weight", 3) == 6382505115082749396


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama3-tiny", "qwen3-tiny", "qwen3-moe-tiny", "deepseek-tiny"]
)
def test_standard_deviation_is_002_and_residual_projections_are_scaled_down(name: str):
    whole = started(name)
    layers = PRESETS[name].layers
    for parameter_name, value in whole.items():
        if value.dim() < 2:
            assert value.unique().tolist() == [
                1.0 if parameter_name.endswith("norm.weight") else 0.0
            ], parameter_name
            continue
        residual = parameter_name.endswith((".o.weight", ".down.weight", ".experts.down"))
        want = 0.02 / math.sqrt(2 * layers) if residual else 0.02
        # the deviation of a sample of n normals is itself normal with relative deviation 1 / sqrt(2 n)
        actual = abs(value.std().item() / want - 1)
        assert actual < 4 / math.sqrt(2 * value.numel()), parameter_name
