"""Adapters of several runs as one: the exact weighted sum of their products, as PEFT's combination "cat"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.test_adapters import config_of, logits_of, near, tokens_of, trained, write_base
from tests.memory_source import Memory
from tests.one_device import plain_model
from tests.tiny_run import TINY
from weft.cli import main
from weft.commands.export import _merged_path
from weft.config.lora import LORA_A, LORA_B, adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.errors import EXIT_OK, EXIT_USER, CheckpointError
from weft.hf.adapters import merge_adapters, write_adapters
from weft.hf.combined_adapters import CombinedAdapters, WeightedAdapter
from weft.models import FAMILIES
from weft.models.common.init import named_parameters

FIRST = LoraConfig(rank=2, alpha=6.0)
SECOND = LoraConfig(rank=3, alpha=4.0)
SOME = LoraConfig(rank=3, alpha=4.0, targets=("q", "down"))
WEIGHTS = (0.5, -1.25)


def two_runs(
    name: str, loras: Sequence[LoraConfig], *, dtype: torch.dtype = torch.float64
) -> tuple[CombinedAdapters, list[Memory]]:
    """Two trained adapters of one base."""
    sources = [trained(name, lora, dtype=dtype)[1] for lora in loras]
    base = {name: t for name, t in sources[0].tensors.items() if adapted_linear(name) is None}
    sources = [Memory({**each.tensors, **base}) for each in sources]
    parts = map(WeightedAdapter, sources, loras, WEIGHTS)
    return CombinedAdapters(tuple(parts)), sources


@pytest.mark.parametrize("second", [SECOND, SOME], ids=["all", "some"])
def test_the_merged_model_has_the_sum_of_all_products(second: LoraConfig) -> None:
    combined, sources = two_runs("llama3", (FIRST, second))
    merged = merge_adapters(combined, combined.lora)
    assert set(merged.shapes) == {name for name in sources[0].shapes if not adapted_linear(name)}
    for name, shape in merged.shapes.items():
        right = sources[0].tensors[name]
        linear = name.removesuffix(".weight")
        for source, lora, weight in zip(sources, (FIRST, second), WEIGHTS, strict=True):
            a = source.tensors.get(linear + LORA_A)
            if a is not None:
                product = source.tensors[linear + LORA_B] @ a
                right = right + weight * lora.alpha / lora.rank * product
        near(merged.read(name, Box.whole(shape)), right, 1e-14)


def test_a_run_without_others_is_scaled() -> None:
    _, (source, _) = two_runs("llama3", (FIRST, SECOND))
    half = CombinedAdapters((WeightedAdapter(source, FIRST, 0.5),))
    name, linear = "layer0.attn.q.weight", "layer0.attn.q"
    merged = merge_adapters(half, half.lora).read(name, Box.whole(source.shapes[name]))
    product = source.tensors[linear + LORA_B] @ source.tensors[linear + LORA_A]
    near(merged, source.tensors[name] + 1.5 * product, 1e-14)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_peft_adds_them_alike(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the oracle is PEFT (extra `oracle`)")
    transformers = pytest.importorskip("transformers")
    cfg = config_of(name)
    combined, sources = two_runs(name, (FIRST, SECOND), dtype=torch.float32)
    base = str(tmp_path / "base")
    write_base(tmp_path / "base", cfg, sources[0])
    for folder, source, lora in zip("ab", sources, (FIRST, SECOND), strict=True):
        write_adapters(tmp_path / folder, source, cfg=cfg, lora=lora, base=base)
    write_adapters(tmp_path / "sum", combined, cfg=cfg, lora=combined.lora, base=base)

    def loaded(folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        return peft.PeftModel.from_pretrained(model, tmp_path / folder, adapter_name=folder).eval()

    def logits(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens_of(), use_cache=False).logits.detach()
        return found

    theirs = loaded("a")
    theirs.load_adapter(tmp_path / "b", adapter_name="b")
    theirs.add_weighted_adapter(["a", "b"], list(WEIGHTS), "sum", combination_type="cat")
    theirs.set_adapter("sum")
    ours = loaded("sum")
    near(logits(ours), logits(theirs), 1e-5)
    key = "sum"
    modules = dict(theirs.named_modules())
    for path, module in ours.named_modules():
        if hasattr(module, "get_delta_weight"):
            near(module.get_delta_weight(key), modules[path].get_delta_weight(key), 1e-6)
    blocks = plain_model(FAMILIES[name], cfg, seed=0, dtype=torch.float32)
    merged = merge_adapters(combined, combined.lora)
    with torch.no_grad():
        for each, param in named_parameters(blocks).items():
            owner = FAMILIES[name].ties(cfg).get(each, each)
            param.copy_(merged.read(owner, Box.whole(merged.shapes[owner])))
    near(logits_of(blocks, tokens_of()), logits(theirs), 1e-5)


def test_commands_merge_runs_of_one_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(tmp_path / "base")
    short = (*TINY, "--steps", "1", "--optim.warmup", "0")
    assert main(["train", *short, "--out", base]) == EXIT_OK
    runs = {
        "a": ("--lora.rank", "2"),
        "b": ("--lora.rank", "3", "--seed", "5"),
        "dora": ("--lora.rank", "2", "--lora.dora", "True"),
        "nf4": ("--lora.rank", "2", "--lora.quantize", "nf4"),
    }
    for name, words in runs.items():
        out = str(tmp_path / name)
        assert main(["train", *short, *words, "--lora.base", base, "--out", out]) == EXIT_OK
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    words = ("--merge", second, "--weights", "0.5", "0.25", "--adapters", "True")
    assert main(["export", first, str(tmp_path / "sum"), *words]) == EXIT_OK
    tensors = load_file(tmp_path / "sum" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape[0] == 5
    for others, message in (
        (
            [second, "--weights", "1"],
            "error: weights: are not one a run (got 1 for 2 runs; need 2)",
        ),
        ([base], "has no adapters to add"),
        ([str(tmp_path / "dora")], "has magnitudes (lora.dora), which have no weighted sum"),
        ([str(tmp_path / "nf4")], "extends another base than"),
    ):
        capsys.readouterr()
        assert main(["export", first, str(tmp_path / "no"), "--merge", *others]) == EXIT_USER
        assert message in capsys.readouterr().err
        assert not (tmp_path / "no").exists()


def test_a_missing_run_to_merge_is_named_by_its_option() -> None:
    with pytest.raises(CheckpointError) as error:
        _merged_path("runs/there-is-none")
    assert [fault.key for fault in error.value.faults] == ["merge"]
