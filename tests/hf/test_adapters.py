"""Stored adapters: merged exactly, or written alone in PEFT's layout; PEFT loads them and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.memory_source import Memory
from tests.one_device import plain_model
from tests.small_models import HF_FAMILIES, small_fields
from weft.checkpoint.format import Facts
from weft.config.hf.write_config import config_json
from weft.config.lora import LORA_A, LORA_B, LORA_M, adapted_linear, adapted_linears
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError
from weft.hf.adapters import merge_adapters, stored_lora, write_adapters
from weft.hf.match import mapping_of
from weft.hf.peft import adapter_config
from weft.hf.placement import hf_tensors
from weft.hf.write import choose_dtypes, write_folder
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward, token_batch, with_later_targets
from weft.models.common.init import named_parameters
from weft.models.common.lora import adapted

LORA = LoraConfig(rank=2, alpha=6.0)
DORA = LoraConfig(rank=2, alpha=6.0, dora=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "dim": 16, "heads": 2, "ffn": 24, "vocab": 31, "max_seq_len": 16},
    "llama3": {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 31},
    "qwen3": {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "head_size": 6, "ffn": 24, "vocab": 31, "tied": True},
    "qwen3-moe": {
        "layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "head_size": 6, "vocab": 31, "experts": 4, "top_k": 2, "expert_ffn": 8,
    },
    "deepseek": {
        "layers": 2, "first_k_dense": 1, "dim": 16, "heads": 2, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "v_head_dim": 4, "ffn": 24, "vocab": 31, "experts": 4, "top_k": 2, "expert_ffn": 8,
    },
}  # fmt: skip
CONFIGS |= {
    name: small_fields(name, layers=2, dim=16, vocab=31)
    for name in HF_FAMILIES
    if name not in CONFIGS
}


def config_of(name: str) -> ModelConfig:
    return FAMILIES[name].Config(**CONFIGS[name])


def trained(
    name: str, lora: LoraConfig, *, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, nn.Module], Memory]:
    """A model that has been somewhere: nothing is 0 or 1 any more."""
    cfg = config_of(name)
    family = adapted(FAMILIES[name], lora)
    blocks = plain_model(family, cfg, seed=3, dtype=dtype)
    params = {
        each: p
        for each, p in named_parameters(blocks).items()
        if each not in FAMILIES[name].ties(cfg)
    }
    with torch.no_grad():
        for param in params.values():
            param.add_(0.1 * torch.randn_like(param))
    values = {each: param.detach() for each, param in params.items()}
    return blocks, Memory(values)


def logits_of(blocks: dict[str, nn.Module], tokens: Tensor) -> Tensor:
    batch: Batch = with_later_targets(token_batch(tokens, tokens))
    with torch.no_grad():
        without_loss = {name: block for name, block in blocks.items() if name != "loss"}
        return forward(without_loss, batch)


def tokens_of() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(31, (2, 12), generator=generator)


def near(ours: Tensor, theirs: Tensor, bound: float) -> None:
    largest_error = (ours - theirs).abs().max()
    value = (largest_error / theirs.abs().max()).item()
    assert value <= bound


@pytest.mark.parametrize("name", CONFIGS)
def test_the_merged_model_is_the_one_with_adapters(name: str) -> None:
    """Every box of W + (alpha / rank) B A, and the logits of the plain family with them; 1e-12 is
    rounding in float64.
    """
    blocks, source = trained(name, LORA)
    cfg = config_of(name)
    whole = merge_adapters(source, LORA)
    plain_blocks = plain_model(FAMILIES[name], cfg, seed=0, dtype=torch.float64)
    params = named_parameters(plain_blocks)
    assert set(whole.shapes) == set(params) - set(FAMILIES[name].ties(cfg)), (
        "the names of the plain model, no other"
    )
    linears = set(adapted_linears((), cfg.linears()))
    with torch.no_grad():
        for each, shape in whole.shapes.items():
            value = whole.read(each, Box.whole(shape))
            linear = each.removesuffix(".weight")
            right = source.tensors[each]
            if linear in linears and linear != each:
                right = (
                    right + 3.0 * source.tensors[linear + LORA_B] @ source.tensors[linear + LORA_A]
                )
                box = Box(lo=(1, 2), hi=(shape[0] - 1, shape[1] - 3))
                assert torch.equal(whole.read(each, box), value[box.slices]), (
                    "the same bits in every box"
                )
                near(value, right, 1e-12)
            else:
                assert torch.equal(value, right)
            params[each].copy_(value)
    ours = logits_of(plain_blocks, tokens_of())
    near(ours, logits_of(blocks, tokens_of()), 1e-12)


def test_bits_do_not_depend_on_the_box() -> None:
    """Bands of rows are computed alike whatever part of them is asked for."""
    linear = "layer0.attn.q"
    generator = torch.Generator().manual_seed(5)
    shapes = {f"{linear}.weight": (700, 96), linear + LORA_A: (8, 96), linear + LORA_B: (700, 8)}
    source = Memory(
        {each: torch.randn(shape, generator=generator) for each, shape in shapes.items()}
    )
    whole = merge_adapters(source, LoraConfig(rank=8)).read(
        f"{linear}.weight", Box((0, 0), (700, 96))
    )
    for box in (
        Box((0, 0), (350, 96)),
        Box((350, 0), (700, 96)),
        Box((255, 33), (513, 71)),
        Box((699, 95), (700, 96)),
    ):
        assert torch.equal(
            merge_adapters(source, LoraConfig(rank=8)).read(f"{linear}.weight", box),
            whole[box.slices],
        )


@pytest.mark.parametrize("name", ["gpt2", "llama3", "deepseek"])
def test_the_merged_model_with_magnitudes_is_the_one_with_adapters(name: str) -> None:
    """Rows of the norms |W| + d, in every box, also of some columns alone."""
    blocks, source = trained(name, DORA)
    cfg = config_of(name)
    whole = merge_adapters(source, DORA)
    plain_blocks = plain_model(FAMILIES[name], cfg, seed=0, dtype=torch.float64)
    params = named_parameters(plain_blocks)
    assert set(whole.shapes) == set(params) - set(FAMILIES[name].ties(cfg))
    linears = set(adapted_linears((), cfg.linears()))
    with torch.no_grad():
        for each, shape in whole.shapes.items():
            value = whole.read(each, Box.whole(shape))
            params[each].copy_(value)
            linear = each.removesuffix(".weight")
            if linear not in linears or linear == each:
                continue
            norms = torch.linalg.vector_norm(source.tensors[each], dim=1)
            right = (norms + source.tensors[linear + LORA_M]).abs()
            near(torch.linalg.vector_norm(value, dim=1), right, 1e-12)
            box = Box(lo=(1, 2), hi=(shape[0] - 1, shape[1] - 3))
            assert torch.equal(whole.read(each, box), value[box.slices])
    ours = logits_of(plain_blocks, tokens_of())
    near(ours, logits_of(blocks, tokens_of()), 1e-12)


def test_merging_computes_wide_and_rounds_once() -> None:
    _, source = trained("llama3", LORA)
    low = Memory(
        {
            each: tensor.to(torch.float32 if adapted_linear(each) else torch.bfloat16)
            for each, tensor in source.tensors.items()
        }
    )
    each, linear = "layer0.attn.q.weight", "layer0.attn.q"
    box = Box.whole(low.shapes[each])
    merged = merge_adapters(low, LORA).read(each, box)
    wide = low.tensors[each].float() + 3.0 * (
        low.tensors[linear + LORA_B] @ low.tensors[linear + LORA_A]
    )
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, wide.bfloat16())


def test_without_adapters_the_source_is_itself() -> None:
    source = Memory({})
    assert merge_adapters(source, LoraConfig()) is source


def test_a_checkpoint_knows_its_adapters() -> None:
    run = {"lora": json.loads(LoraConfig(rank=4, alpha=8.0, targets=("q", "v")).model_dump_json())}
    facts = Facts(step=1, seed=1, family="llama3", architecture={}, plan={}, run=run)
    assert stored_lora(facts) == LoraConfig(rank=4, alpha=8.0, targets=("q", "v"))
    assert stored_lora(facts.model_copy(update={"run": {}})).rank == 0, (
        "written before there were adapters"
    )


def test_names_and_shapes_are_those_of_pefts_layout(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, targets=("q", "down"))
    _, source = trained("llama3", lora)
    write_adapters(
        tmp_path / "a",
        source,
        cfg=config_of("llama3"),
        lora=LoraConfig(rank=2, targets=("q", "down")),
        base="some/model",
    )
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    heads = [
        f"base_model.model.model.layers.{i}.{linear}"
        for i in (0, 1)
        for linear in ("mlp.down_proj", "self_attn.q_proj")
    ]
    expected = []
    for head in heads:
        for factor in "AB":
            expected.append(f"{head}.lora_{factor}.weight")
    assert sorted(tensors) == expected
    shape = tensors[f"{heads[0]}.lora_A.weight"].shape
    assert shape == (2, 24)
    shape = tensors[f"{heads[0]}.lora_B.weight"].shape
    assert shape == (16, 2)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["r"] == 2
    assert config["lora_alpha"] == 16
    assert config["base_model_name_or_path"] == "some/model"


def test_modules_are_named_by_the_shortest_ending_that_means_no_other() -> None:
    def modules(name: str, *words: str) -> list[str]:
        found: list[str] = adapter_config(
            config_of(name), LoraConfig(rank=1, targets=words), base=None
        )["target_modules"]
        return found

    assert modules("qwen3-moe") == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert modules("llama3", "layer1.attn.q") == ["1.self_attn.q_proj"]
    names = ("down_proj", "gate_proj", "up_proj")
    dense = [f"mlp.{each}" for each in names]
    shared = [f"shared_experts.{each}" for each in names]
    assert modules("deepseek", "gate", "up", "down") == sorted([*dense, *shared]), (
        "and no routed expert"
    )


SOME = {
    "gpt2": ("attn.k", "attn.q", "layer1.mlp.*", "down"),
    "llama3": ("q", "layer1.mlp.*"),
    "qwen3": ("attn.*", "down"),
    "qwen3-moe": ("attn.k", "layer1.attn.q"),
    "deepseek": ("attn.*",),
}


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # PEFT asks transformers for it
@pytest.mark.parametrize(
    ("name", "targets"),
    [*((each, ()) for each in CONFIGS if each != "deepseek"), *SOME.items()],
    ids=str,
)
def test_peft_computes_the_same_with_the_adapters(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    peft_computes_the_same(name, LoraConfig(rank=2, alpha=6.0, targets=targets), tmp_path)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_peft_computes_the_same_with_magnitudes(name: str, tmp_path: Path) -> None:
    peft_computes_the_same(name, DORA, tmp_path)


def test_magnitudes_of_some_parts_of_a_matrix_are_not_written(tmp_path: Path) -> None:
    """PEFT has one vector for q, k and v of GPT-2."""
    lora = DORA.model_copy(update={"targets": ("attn.q",)})
    _, source = trained("gpt2", lora)
    with pytest.raises(CheckpointError, match=r"c_attn holds 3 linears, and 1 have magnitudes"):
        write_adapters(tmp_path / "a", source, cfg=config_of("gpt2"), lora=lora, base=None)


def peft_computes_the_same(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    """The base goes to transformers, the adapters to PEFT; 1e-5 is float32 in two orders of
    summation.

    DeepSeek's dense and shared feed-forward parts are left out: see `unexpected_keys` in
    hf/peft.py.
    """
    peft = pytest.importorskip("peft", reason="the oracle is PEFT (extra `oracle`)")
    transformers = pytest.importorskip("transformers")
    blocks, source = trained(name, lora, dtype=torch.float32)
    cfg = config_of(name)
    write_base(tmp_path / "base", cfg, source)
    write_adapters(tmp_path / "adapters", source, cfg=cfg, lora=lora, base=str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    ).eval()
    before = model(input_ids=tokens_of(), use_cache=False).logits.detach()
    with_adapters = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
    theirs = with_adapters(input_ids=tokens_of(), use_cache=False).logits.detach()
    ours = logits_of(blocks, tokens_of())
    largest = (before - theirs).abs().max()
    assert largest > 1e-2 * theirs.abs().max(), "the adapters count"
    near(ours, theirs, 1e-5)
    merged = with_adapters.merge_and_unload()(
        input_ids=tokens_of(), use_cache=False
    ).logits.detach()
    near(ours, merged, 1e-5)
    read_back = set(load_file(tmp_path / "adapters" / "adapter_model.safetensors"))
    saved = peft.get_peft_model_state_dict(
        peft.PeftModel.from_pretrained(model, tmp_path / "adapters")
    )
    assert set(saved) == read_back, "every tensor has its place, none is left over"


def write_base(folder: Path, cfg: ModelConfig, source: Memory) -> None:
    """The frozen part alone, as transformers reads it."""
    base = Memory(
        {each: tensor for each, tensor in source.tensors.items() if adapted_linear(each) is None}
    )
    ties = FAMILIES[cfg.family].ties(cfg)
    mapping = mapping_of(cfg.family)
    tensors = hf_tensors(mapping.weights, cfg, base.shapes, ties=ties, where=str(folder))
    typed = choose_dtypes(tensors, base, dtype=None)
    config = config_json(mapping, cfg, dtype="float32")
    write_folder(folder, typed, base, max_shard_bytes=2**30, texts={}, config=config)


def test_adapters_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    cfg = config_of("llama3")
    with pytest.raises(CheckpointError, match=r"no adapters to write.*--lora\.rank 8"):
        write_adapters(tmp_path / "a", Memory({}), cfg=cfg, lora=LoraConfig(), base=None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        write_adapters(tmp_path / "full", Memory({}), cfg=cfg, lora=LORA, base=None)
    with pytest.raises(CheckpointError, match="no counterpart in transformers"):
        write_adapters(
            tmp_path / "b", Memory({}), cfg=FAMILIES["mnist"].Config(), lora=LORA, base=None
        )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["full"]
