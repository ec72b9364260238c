"""`weft prove --against transformers`: healthy layouts are equal; faults on both sides of the ordinary proof are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.hf.models import tensors_in, written
from tests.prove.second_opinions import FAULTS, opinion_of
from tests.sampling import sampled
from tests.small_models import HF_FAMILIES
from weft.cli import main
from weft.config.hf.write_config import config_json
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError
from weft.models import FAMILIES
from weft.prove.against import float64, hf_model
from weft.prove.against.hf_weights import HFWeights
from weft.prove.against.proof import FAULT_OF_BOTH
from weft.prove.against.routers import balance_loss
from weft.prove.against.support import compared_config

transformers = pytest.importorskip(
    "transformers", reason="the second opinion is transformers' (extra `oracle`)"
)

LAYOUTS = {
    "llama3": "--mesh 'dp2 tp2' --parallel.zero 2 --model.rope_scaling_factor 8 "
    "--model.rope_scaling_original_context 16",
    "gpt2": "--mesh pp2",
    "mistral": "--mesh cp2 --data.packing documents",
    "qwen2": "--mesh tp2 --model.tied True --optim.name sgd",
    "qwen3": "--mesh dp2 --precision.compute bfloat16",
    "qwen3-moe": "--mesh ep2 --model.balance_loss 0.1 --data.packing documents",
    "gemma3": "--mesh cp2",
    "deepseek": "--mesh ep2 --model.mtp_depth 1 --data.packing documents "
    "--model.rope_scaling_factor 4 --model.rope_scaling_original_context 8",
}


@pytest.mark.parametrize("family", sampled(HF_FAMILIES))
def test_a_healthy_layout_is_equal_to_transformers(family: str):
    report = opinion_of(f"--model.name {family} {LAYOUTS[family]}", steps=2)
    assert report.holds, "\n".join(report.lines())
    assert {bound.bound for bound in report.bounds} == {0.0, 1e-9}
    phases = {bound.phase for bound in report.bounds}
    assert phases >= {"forward", "loss", "reduce", "norm", "clip", "moments", "update"}


def test_values_of_64_bits_are_read_as_they_are_stored(tmp_path: Path):
    folder = written("deepseek", tmp_path, dtype=torch.float64)
    config = json.loads((folder / "config.json").read_text())
    model = hf_model.loaded_model(folder, config, 0)
    names = model.published.keys() & tensors_in(folder)  # experts have other names in files
    assert "model.layers.1.mlp.gate.weight" in names
    for name in names:
        assert torch.equal(model.published[name], tensors_in(folder)[name]), name


@pytest.mark.parametrize("name", sampled(FAULTS))
def test_a_fault_on_both_sides_of_the_proof_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    report = opinion_of(f"{fault.words} --mesh dp1", steps=1, full=fault.full)
    assert not report.holds
    first = report.first
    assert first is not None
    assert first.tensor == fault.tensor, "\n".join(report.lines())
    if fault.tensor != "export":
        assert FAULT_OF_BOTH in report.notes


def test_updates_that_are_made_of_rounding_noise_are_no_difference():
    report = opinion_of("--model.name gpt2 --mesh tp2 --optim.name lion", steps=1)
    assert report.holds, "\n".join(report.lines())
    assert "weft's second formulas of lion" in report.against


def test_parts_that_stay_in_float32_widen_the_bounds_by_their_own_noise(
    monkeypatch: pytest.MonkeyPatch,
):
    """As shipped, norms of transformers round to float32: no bound is set by hand, it is derived from
    noise of that size, and the modules are named.
    """
    monkeypatch.setattr(hf_model, "compute_in_float64", torch.nn.Module.double)
    report = opinion_of("--mesh dp1", steps=1)
    assert report.holds, "\n".join(report.lines())
    assert any("rounds to float32 in model.layers.0.input_layernorm" in x for x in report.notes)
    forward = next(bound for bound in report.bounds if bound.phase == "forward")
    assert 1e-9 < forward.largest < forward.bound < 1e-4


def test_widened_code_names_float64():
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).float() * float(2)

    x = torch.rand(3, dtype=torch.float64)
    assert float64.widened(norm)(x).dtype == torch.float64
    assert norm(x).dtype == torch.float32


def test_an_entry_that_two_parameters_use_is_no_bijection():
    family = FAMILIES["llama3"]
    config = family.Config(layers=1, dim=8, heads=2, kv_heads=1, ffn=4, vocab=5)
    hf = hf_model.untouched_model(config_json(family.hf, config, dtype="float64"), 0)
    weights = HFWeights.of(family.hf, config, hf.published)
    doubled = HFWeights({**weights.params, "again": weights.params["head.proj.weight"]})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not used once"):
        doubled.check_bijection(hf.published)
    missing = {name: x for name, x in weights.params.items() if name != "embed.tok.weight"}
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not used once"):
        HFWeights(missing).check_bijection(hf.published)


def test_an_even_load_has_a_balance_loss_of_its_weight_for_each_target():
    logits = torch.eye(4, dtype=torch.float64) * 20
    targets = torch.tensor([1, 2, -100, 3])
    loss = balance_loss(logits, targets, {"top_k": 1, "balance_loss": 0.1})
    assert float(loss) == pytest.approx(0.1 * 3)


# runs that start from a folder


def saved_model(folder: Path, **keys: object) -> Path:
    """A small model that transformers has written, with keys of its config.json."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=256,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        **keys,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", ["", "--data.seq_len 16 --batch.global_size 4 --full"])
def test_stored_weights_are_read_by_transformers_itself(size: str, tmp_path: Path):
    space = ord(" ")
    folder = saved_model(tmp_path / "llama", pad_token_id=space, tie_word_embeddings=not size)
    words = f"--model.from_hf {folder} --data.tokenizer bytes --mesh tp2 {size}"
    is_full = "--full" in words
    report = opinion_of(words.replace("--full", ""), steps=2, full=is_full)
    assert report.holds, "\n".join(report.lines())
    assert not any("starting values" in note for note in report.notes)


def test_keys_of_a_folder_that_were_not_reduced_are_read_by_transformers(tmp_path: Path):
    def llama(**fields: object) -> ModelConfig:
        return FAMILIES["llama3"].Config(**fields)

    folder = tmp_path / "published"
    folder.mkdir()
    configured = llama(layers=3, dim=64, heads=2, kv_heads=2, ffn=32, rope_theta=500_000.0)
    mapping = FAMILIES["llama3"].hf
    original = config_json(mapping, configured, dtype="bfloat16")
    original |= {"rope_theta": 4e5, "layer_types": ["full_attention"] * 3, "pad_token_id": 7}
    (folder / "config.json").write_text(json.dumps(original), encoding="utf-8")
    section = configured.model_copy()
    object.__setattr__(section, "from_hf", str(folder))
    found = compared_config(
        mapping, configured.model_copy(update={"layers": 2, "dim": 16}), section
    )
    assert found["rope_theta"] == 4e5, "the folder's own"
    assert (found["num_hidden_layers"], found["hidden_size"]) == (2, 16)
    assert found["layer_types"] == ["full_attention"] * 2
    assert found["pad_token_id"] == 7


# the command


def test_the_command_prints_what_it_was_compared_with(capsys: pytest.CaptureFixture[str]):
    words = ["prove", "--mesh", "dp2", "--first", "1", "--against", "transformers", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["against"].startswith(f"transformers {transformers.__version__} (Llama")
    assert report["verdict"] == "equal"
    assert report["command"].endswith("--against transformers")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.name mnist", "transformers has no such model"),
        ("--loss dpo", "computes the cross entropy alone"),
        ("--lora.rank 2", "adapters are not in transformers' classes"),
        ("--model.name deepseek --model.scoring softmax", "DeepSeek-V3 in transformers"),
    ],
)
def test_what_transformers_lacks_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["prove", "--against", "transformers", *words.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") <= 2


def test_nothing_but_transformers_is_known(capsys: pytest.CaptureFixture[str]):
    assert main(["prove", "--against", "jax"]) == 2
    assert "transformers" in capsys.readouterr().err


def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    assert main(["prove", "--against", "transformers", "--mesh", "dp1"]) == 2
    assert "weft-train[oracle]" in capsys.readouterr().err
