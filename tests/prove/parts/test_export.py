"""The proof of export and import: healthy models keep every bit, and exchanged, shifted or lost tensors are named."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.prove.faults import FLOAT64, small_run
from weft.config.hf.mapping import WeightMapping
from weft.config.schema import LoraConfig
from weft.hf.placement import HFTensor
from weft.prove.parts import export
from weft.prove.parts.export import ExportProof
from weft.prove.parts.part_proof import Outcome
from weft.prove.parts.plain_export import merged_plainly
from weft.prove.report import Difference
from weft.prove.subject import Subject
from weft.run.run_ranks import arithmetic_of_ranks
from weft_selftest.mutants.plant import replaced

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes seconds, and the bits are compared without it."""
    monkeypatch.setattr(export, "_has_library", lambda: False)


def outcome_of(words: str, *meshes: str) -> Outcome:
    """The proof of an export of a run at reduced size, and of its import on other meshes."""
    found = Outcome()
    proof = ExportProof(Subject.of(small_run(words), steps=2), meshes or ("",))
    found.notes.extend(proof.notes)
    with arithmetic_of_ranks():
        found.take(proof.passes())
    return found


def first_difference(words: str) -> Difference:
    found = outcome_of(words)
    differences = found.passes[-1].differences
    assert differences, "the fault is reported"
    return differences[0]


def test_adapters_are_merged_by_definition() -> None:
    whole = {
        "layer0.q.weight": torch.ones(2, 2),
        "layer0.q.lora_a.weight": torch.tensor([[1.0, 2.0]]),
        "layer0.q.lora_b.weight": torch.tensor([[1.0], [3.0]]),
        "head.weight": torch.zeros(1),
    }
    found = merged_plainly(whole, LoraConfig(rank=1, alpha=2.0))
    assert found["layer0.q.weight"].tolist() == [[3.0, 5.0], [7.0, 13.0]]
    assert set(found) == {"layer0.q.weight", "head.weight"}


def test_an_export_keeps_every_bit(without_transformers: None) -> None:
    found = outcome_of(f"--mesh dp2 --lora.rank 2 {FLOAT64}", "pp2")
    assert found.is_equal, found.error or [str(each) for each in found.passes[-1].differences]
    assert [each.dtype for each in found.passes] == [
        "float64, export of dp2",
        "bfloat16 files, export of dp2",
        "float64, import on pp2",
    ]
    assert found.notes == [export.NOT_INSTALLED]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(
    "words",
    [
        "--mesh dp2",
        "--mesh ep2 --model.name deepseek --model.mtp_depth 1",
        "--mesh ep2 --model.name qwen3-moe",
        "--mesh pp2 --model.name gemma3",
        "--mesh 'dp2 tp2' --model.name gpt2 --parallel.zero 3",
        "--mesh dp2 --lora.rank 2 --precision.compute bfloat16",
    ],
)
def test_transformers_computes_the_logits_of_an_export(words: str) -> None:
    found = outcome_of(words)
    assert found.is_equal, found.error or [str(each) for each in found.passes[-1].differences]
    assert found.passes[-1].dtype == "float64, logits of transformers"


def test_an_exported_tensor_of_another_layer_is_named(without_transformers: None) -> None:
    def of_layer_0(right: Callable[..., Any], tensor: HFTensor, source: Any, box: Any) -> Any:
        if tensor.name == "model.layers.1.self_attn.q_proj.weight":
            (placement,) = tensor.placements
            other = replace(placement, param="layer0.attn.q.weight")
            tensor = replace(tensor, placements=(other,))
        return right(tensor, source, box)

    with replaced("weft.hf.write:assemble", of_layer_0):
        first = first_difference("--mesh dp2")
    assert (first.phase, first.tensor, first.block) == ("export", "layer1.attn.q.weight", "layer1")


def test_an_import_that_exchanges_gate_and_up_is_named(without_transformers: None) -> None:
    """On the way back alone: the exported folder is right."""
    other = {"gate": "up", "up": "gate"}

    def exchanged(right: Callable[..., Any], self: Any, name: str, box: Any) -> Any:
        block, _, place = name.partition(".mlp.")
        kind, _, rest = place.partition(".")
        if kind in other:
            name = f"{block}.mlp.{other[kind]}.{rest}"
        return right(self, name, box)

    with replaced("weft.hf.folder:HfFolder.read", exchanged):
        first = first_difference("--mesh dp2")
    assert first.phase == "import"
    assert first.tensor in ("layer0.mlp.gate.weight", "layer0.mlp.up.weight")


@pytest.mark.slow
def test_adapters_that_are_not_merged_are_named(without_transformers: None) -> None:
    def unmerged(right: Callable[..., Any], self: Any, name: str, box: Any) -> Any:
        del right
        return self._source.read(name, box)

    with replaced("weft.hf.adapters:MergedSource.read", unmerged):
        first = first_difference(f"--mesh dp2 --lora.rank 2 {FLOAT64}")
    assert first.phase == "export"
    assert (first.block, first.tensor) == ("layer0", "layer0.attn.k.weight")


@pytest.mark.slow
@needs_transformers
def test_a_rule_that_is_wrong_both_ways_is_seen_by_transformers_alone() -> None:
    """Gate and up are exchanged in the rules, which export and import share."""
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def exchanged(right: Callable[..., Any], self: WeightMapping, cfg: Any) -> Any:
        for rule in right(self, cfg):
            parts = rule.tensor.split(".")
            tensor = ".".join(names.get(part, part) for part in parts)
            yield replace(rule, tensor=tensor)

    with replaced("weft.config.hf.mapping:WeightMapping.expand", exchanged):
        first = first_difference("--mesh dp2")
    assert first.tensor == "logits of sequence 0"
