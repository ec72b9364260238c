"""Every family and preset: discovered, imported without torch, of the published size, each parameter in one row."""

import functools
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from weft.core.model_config import ModelConfig, logical_axes, match_row
from weft.errors import ConfigError, PlanError
from weft.models import FAMILIES, PRESETS, family, preset
from weft.models.common.batch import chain, forward, image_batch, token_batch
from weft.models.common.init import named_parameters, tie
from weft.models.llama3 import config as llama3

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-moe-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "gemma3-1b": 999_885_952,
    "deepseek-16b": 15_706_484_224,
    "deepseek-v3-671b": 671_026_419_200,
}
"""Parameters of the released weights, tied ones counted once, biases of routers among them."""

LLAMA = {  # hidden_size, num_attention_heads, num_key_value_heads, factor of rope_scaling, tie_word_embeddings
    "llama3-1b": (2048, 32, 8, 32.0, True),
    "llama3-3b": (3072, 24, 8, 32.0, True),
    "llama3-8b": (4096, 32, 8, 8.0, False),
    "llama3-70b": (8192, 64, 8, 8.0, False),
    "llama3-405b": (16384, 128, 8, 8.0, False),
}
"""What parameter counts do not show of the released config.json of LLaMA 3.1 and 3.2."""

SMALL = [name for name, cfg in PRESETS.items() if name not in PUBLISHED]


def meta_blocks(cfg: ModelConfig) -> dict[str, nn.Module]:
    with torch.device("meta"):
        return family(cfg.family).blocks(cfg)


@functools.cache
def parameters_of(preset_name: str) -> Mapping[str, nn.Parameter]:
    """Of a preset, on the meta device; built once for the tests that only read them."""
    return named_parameters(meta_blocks(PRESETS[preset_name]))


def test_models_are_imported_without_torch():
    code = "import sys, weft.models; print(*weft.models.FAMILIES, 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *names, has_torch = shown.stdout.split()
    assert names == sorted(FAMILIES)
    assert has_torch == "False"


def test_each_preset_belongs_to_the_family_that_its_config_names():
    for name, module in FAMILIES.items():
        assert module.PRESETS, f"{name} has no preset"
        assert module.Config().family == name
        assert module.Config() in module.PRESETS.values(), "the defaults are a preset"
        for cfg in module.PRESETS.values():
            assert cfg.family == name
            assert type(cfg) is module.Config
    num_presets = sum(len(module.PRESETS) for module in FAMILIES.values())
    assert len(PRESETS) == num_presets


@pytest.mark.parametrize("name", PRESETS)
def test_each_parameter_has_one_row_of_axes_and_one_of_init(name: str):
    cfg = PRESETS[name]
    module = family(cfg.family)
    for parameter_name, parameter in parameters_of(name).items():
        count = len(logical_axes(parameter_name, module.AXES))
        assert count == parameter.dim(), parameter_name
        rule = match_row(parameter_name, module.init(cfg), title="init")
        assert rule[0] in ("normal", "ones", "zeros")


@pytest.mark.parametrize("name", PRESETS)
def test_axes_agree_with_shapes(name: str):
    """An axis that may be cut has one length throughout a model, or lengths of so many units each.

    Units are heads of several features, and what the widths of several kinds of feed-forward parts
    have in common.
    """
    cfg = PRESETS[name]
    module = family(cfg.family)
    lengths: dict[str, set[int]] = {}
    for parameter_name, parameter in parameters_of(name).items():
        for axis, length in zip(
            logical_axes(parameter_name, module.AXES), parameter.shape, strict=True
        ):
            lengths.setdefault(axis, set()).add(length)
    for axis, units in cfg.axis_sizes().items():
        if "heads" in axis or len(lengths[axis]) > 1:
            for length in lengths[axis]:
                assert length % units == 0
        else:
            assert lengths[axis] == {units}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str):
    cfg = PRESETS[name]
    blocks = meta_blocks(cfg)
    tie(blocks, family(cfg.family).ties(cfg))
    unique = {id(parameter): parameter.numel() for parameter in named_parameters(blocks).values()}
    assert sum(unique.values()) == PUBLISHED[name]


@pytest.mark.parametrize("name", LLAMA)
def test_llama_presets_have_the_published_heads_and_rotation(name: str):
    cfg = PRESETS[name]
    assert isinstance(cfg, llama3.Config)
    actual = (cfg.dim, cfg.heads, cfg.kv_heads, cfg.rope_scaling_factor, cfg.tied)
    assert actual == LLAMA[name]
    ramp = (
        cfg.rope_scaling_low_freq_factor,
        cfg.rope_scaling_high_freq_factor,
        cfg.rope_scaling_original_context,
    )
    assert (cfg.rope_theta, *ramp) == (500_000.0, 1.0, 4.0, 8192)
    assert (cfg.max_seq_len, cfg.norm_eps) == (131_072, 1e-5)


@pytest.mark.parametrize(
    ("name", "heads"), [("124m", 12), ("355m", 16), ("774m", 20), ("1.5b", 25)]
)
def test_gpt2_presets_have_the_published_heads(name: str, heads: int):
    cfg = PRESETS[f"gpt2-{name}"]
    assert cfg.axis_sizes()["heads"] == heads
    assert cfg.axis_sizes()["vocab"] == 50_257
    assert cfg.check_seq_len(1024) is None
    assert cfg.check_seq_len(1025) is not None


@pytest.mark.parametrize("name", PRESETS)
def test_tied_parameters_exist_and_are_of_one_shape(name: str):
    cfg = PRESETS[name]
    parameters = parameters_of(name)
    for alias, owner in family(cfg.family).ties(cfg).items():
        assert parameters[alias].shape == parameters[owner].shape


def test_tying_makes_one_parameter_of_two_and_leaves_a_lone_half_alone():
    cfg = PRESETS["gpt2-tiny"]
    blocks = meta_blocks(cfg)
    ties = family("gpt2").ties(cfg)
    last_stage = {"head": meta_blocks(cfg)["head"]}
    tie(blocks, ties)
    tie(last_stage, ties)
    parameters = named_parameters(blocks)
    assert parameters["head.proj.weight"] is parameters["embed.tok.weight"]
    assert set(named_parameters(last_stage)) == {
        "head.norm.weight",
        "head.norm.bias",
        "head.proj.weight",
    }


@pytest.mark.parametrize("name", SMALL)
def test_blocks_hand_on_the_shapes_that_their_specs_say(name: str):
    cfg = PRESETS[name]
    blocks = meta_blocks(cfg)
    x, batch = _batch(cfg)
    specs = cfg.block_specs(6)
    assert [spec.name for spec in specs] == list(blocks)
    for spec in specs:
        x = chain({spec.name: blocks[spec.name]}, x, batch).x
        sizes = {"batch": 3, "seq": 6}
        expected = tuple(sizes.get(str(size), size) for size in spec.out)
        assert x.shape == expected
        assert spec.is_layer == spec.name.startswith("layer")


@pytest.mark.parametrize("name", SMALL)
def test_chain_is_differentiable_in_every_parameter(name: str):
    cfg = PRESETS[name]
    blocks = meta_blocks(cfg)
    loss = forward(blocks, _batch(cfg)[1])
    loss.backward()
    for p in named_parameters(blocks).values():
        assert (p.grad is not None) == p.requires_grad


def _batch(cfg: ModelConfig):
    with torch.device("meta"):
        if cfg.kind == "images":
            inputs = torch.empty(3, 1, 28, 28)
            targets_B = torch.zeros(3, dtype=torch.int64)
            return inputs, image_batch(inputs, targets_B)
        inputs = torch.zeros(3, 6, dtype=torch.int64)
        return inputs, token_batch(inputs, inputs)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model 'lama3'.*did you mean 'llama3'\?"):
        family("lama3")
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt2-124'.*did you mean 'gpt2-124m'\?"):
        preset("gpt2-124")


def test_a_parameter_that_no_row_or_two_rows_match_is_named_with_the_rows():
    with pytest.raises(
        PlanError,
        match=r"'layer0.new.weight' is matched by 0 rows \(got 'embed.\*'; need exactly one row\)",
    ):
        logical_axes("layer0.new.weight", {"embed.*": ("vocab", "embed")})
    with pytest.raises(
        PlanError, match=r"AXES: parameter 'a.w' is matched by 2 rows \(got 'a.\*', '\*.w';"
    ):
        logical_axes("a.w", {"a.*": ("embed",), "*.w": ("ffn",), "b.w": ("ffn",)})
