"""Decoders of transformers as families: equal to transformers' own class and on layouts; names, folders, axes and rejections."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmarks.architectures import against_transformers, float64_alone, proven

from weft.config.hf import architectures
from weft.config.hf.read_config import describe_folder
from weft.config.load import load
from weft.core.shard import Stacked
from weft.errors import CheckpointError, ConfigError, PlanError, UserError
from weft.models import FAMILIES
from weft.models.common.init import named_parameters
from weft.models.transformers.adapt import adapt, computes_linear, is_linear_of_own_class
from weft.models.transformers.build import architecture_of, build, config_of, param_names
from weft.models.transformers.check import check_against_transformers
from weft.models.transformers.experts import set_dispatch
from weft.models.transformers.interfaces import EAGER
from weft.models.transformers.own_experts import own_experts
from weft.models.transformers.shard_sizes import ShardSizes
from weft.models.transformers.sizes import SIZES
from weft.planner.certificate.certificate import certify
from weft.planner.measure.measured_run import MeasuredRun
from weft.start.checked_run import load_checked_run
from weft.start.transformers_model import prepared

ALIBI = '{"multi_query": false, "alibi": true, "bias": true}'
PDROPS = '{"attn_pdrop": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1}'

TINY = {name: size.tiny for name, size in SIZES.items()} | {"settings": ""}


def test_building_a_model_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of transformers ask whether a CUDA stream is captured, which starts the driver."""
    questions: list[None] = []
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: bool(questions.append(None))
    )
    prepared(load(["--model.name", "hf:olmo2", "--model.layers", "3"], FAMILIES))
    assert not questions


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma2", "gpt2", "mixtral", "bloom", "deepseek_v4", "zamba2", "jetmoe", "xglm"),
        pytest.param("longcat_flash", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    with float64_alone():
        outcome = against_transformers(name)
    assert outcome.word == "equal", outcome.text


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"mesh": "tp2", "parallel.sequence": True}),
        ("gemma2", {"mesh": "cp2"}),
        ("mixtral", {"mesh": "ep2"}),
        ("gpt2", {"mesh": "dp2", "parallel.zero": 3}),
        ("llama", {"mesh": "cp2", "model.settings": '{"attention_dropout": 0.2}'}),
        ("gpt2", {"mesh": "pp2", "model.settings": PDROPS}),
        ("qwen3_moe", {"mesh": "ep2", "model.settings": '{"attention_dropout": 0.2}'}),
        (
            "phi",
            {
                "mesh": "tp2",
                "parallel.recompute": "full",
                "model.settings": '{"attention_dropout": 0.2, "resid_pdrop": 0.1}',
            },
        ),
        ("gpt2", {"mesh": "tp2", "parallel.sequence": True, "model.settings": PDROPS}),
        ("bert", {"mesh": "tp2", "parallel.sequence": True}),
        ("mixtral", {"mesh": "pp2 tp2", "parallel.sequence": True, "parallel.recompute": "full"}),
        ("phi3", {"mesh": "tp3", "model.dim": 48, "model.heads": 6, "model.kv_heads": 3}),
        ("axk2", {"mesh": "dp2", "parallel.zero": 3}),
        ("codegen", {"mesh": "tp2"}),
        # These were rejected: no row of axes for a tied head; hooks of the whole model; attention in
        # float32; the mask of a window that no layer uses; tables that are no vocabularies.
        ("qwen2", {"mesh": "tp2", "model.settings": '{"tie_word_embeddings": true}'}),
        ("mamba2", {"mesh": "tp2"}),
        ("gpt_neo", {"mesh": "dp2", "parallel.zero": 3}),
        ("qwen2_moe", {"mesh": "cp2"}),
        ("camembert", {"mesh": "tp2"}),
        # These were rejected under cp: recurrences, short convolutions, ALiBi, positions of their own.
        ("mamba2", {"mesh": "cp2 tp2"}),
        ("bloom", {"mesh": "pp2 cp2", "pipeline.schedule": "zbv"}),
        ("lfm2_moe", {"mesh": "ep2 cp2", "parallel.recompute": "full"}),
        ("camembert", {"mesh": "cp3", "data.seq_len": 36}),
        ("bart", {"mesh": "cp2", "model.settings": '{"dropout": 0.1, "attention_dropout": 0.2}'}),
        ("mpt", {"mesh": "dp2 cp2", "parallel.zero": 3, "parallel.context": "ulysses"}),
        ("mixtral", {"mesh": "ep2 cp2"}),  # its check failed: it ran the dispatch of all ranks
        # These were rejected: per-layer embeddings, keys and values of earlier layers, embeddings that
        # layers read again, ids of tokens in routers; routers that draw; states of generation.
        ("gemma4_text", {"mesh": "pp2 tp2"}),
        pytest.param(
            "gemma3n_text", {"mesh": "cp2", "parallel.recompute": "full"}, marks=pytest.mark.slow
        ),
        ("zamba2", {"mesh": "pp2 dp2", "parallel.zero": 2}),
        pytest.param(
            "deepseek_v4", {"mesh": "tp2", "parallel.sequence": True}, marks=pytest.mark.slow
        ),
        ("nemotron_h", {"mesh": "ep2"}),
        ("phimoe", {"mesh": "cp2 tp2", "parallel.recompute": "full"}),
        pytest.param(
            "recurrent_gemma", {"mesh": "dp2", "parallel.zero": 3}, marks=pytest.mark.slow
        ),
        # Attention of these was whole on every rank of tp.
        ("olmo2", {"mesh": "tp2", "parallel.sequence": True}),
        *(
            pytest.param(name, {"mesh": mesh}, marks=pytest.mark.slow)
            for name, mesh in (
                ("olmo2", "pp2 tp2"),
                ("olmo2", "cp2 tp2"),
                ("olmo2", "tp4"),  # of two heads of keys
                ("gpt_oss", "tp2"),
                ("deepseek_v3", "tp2"),
                ("llama4_text", "tp2"),
                ("opt", "tp2"),
            )
        ),
        # Heads were in another order: a third of the fused rows of 12 heads holds whole ones.
        ("gpt_neox", {"mesh": "tp2", "model.heads": 12, "model.dim": 96}),
        # These were rejected: dense models of a mixture's class, and recurrent layers alone.
        ("granitemoehybrid", {"mesh": "tp2", "model.experts": 0, "model.top_k": 0}),
        (
            "granitemoehybrid",
            {"mesh": "dp2", "model.settings": '{"layer_types": ["mamba", "mamba"]}'},
        ),
        # It was rejected: its code of one device computes scores in float32 alone.
        ("gpt2", {"mesh": "tp2", "model.settings": '{"reorder_and_upcast_attn": true}'}),
        # These were rejected: numbers of tokens that experts ask for, keys without a default.
        *(
            pytest.param(name, {"mesh": mesh}, marks=pytest.mark.slow)
            for name, mesh in (
                ("longcat_flash", "dp2"),
                ("jetmoe", "tp2"),
                ("dbrx", "pp2"),
                ("rwkv", "cp2"),
                ("big_bird", "tp2"),
                ("xglm", "tp2"),
            )
        ),
        # Attention by code of their own was whole, ALiBi or heads that are an attribute; so was all of
        # Falcon, whose linears are a class of its own.
        ("bloom", {"mesh": "tp2", "parallel.sequence": True}),
        ("bloom", {"mesh": "tp4"}),
        ("mpt", {"mesh": "tp3", "model.heads": 6, "model.dim": 48}),
        ("falcon", {"mesh": "tp2", "model.kv_heads": 4, "model.settings": ALIBI}),
        *(
            pytest.param(name, {"mesh": mesh}, marks=pytest.mark.slow)
            for name, mesh in (
                ("gpt_neo", "cp2 tp2"),
                ("bloom", "cp2 tp2"),
                ("falcon", "tp2"),
                ("megatron-bert", "tp2"),
                ("gpt_neox_japanese", "tp2"),
                ("mvp", "tp2"),
            )
        ),
        # Experts by code of their own were whole on every rank.
        ("dbrx", {"mesh": "ep2"}),
        ("jetmoe", {"mesh": "ep2 tp2"}),
        pytest.param(
            "dbrx",
            {"mesh": "ep4", "batch.micro_size": 1, "parallel.recompute": "full"},
            marks=pytest.mark.slow,
        ),
        ("roformer", {"mesh": "tp2"}),  # it was rejected: a table of the trunk that layers read
    ],
)
def test_a_layout_computes_what_one_device_does(name: str, keys: dict[str, Any]) -> None:
    outcome = proven(name, keys)
    assert outcome.word == "equal", outcome.text


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("mixtral", mesh) for mesh in ("tp2", "ep2", "cp2", "tp2 --parallel.sequence True")),
        ("falcon_h1", "cp2"),
        ("qwen3_next", "cp2"),
        ("bloom", "tp2"),
        pytest.param("mpt", "tp2", marks=pytest.mark.slow),
        ("llama4_text", "dp2"),  # its router repeats the tokens of a rank
        # a rank has one head of keys, of which pairs are turned
        *(pytest.param(name, "tp2", marks=pytest.mark.slow) for name in ("glm", "olmo2")),
    ],
)
def test_the_types_of_a_step_are_known(name: str, mesh: str) -> None:
    run = load_checked_run(("--model.name", f"hf:{name}", "--mesh", *mesh.split(" ")))
    certificate = certify(MeasuredRun.of(run))
    assert [finding.text for finding in certificate.findings] == []
    assert certificate.verdict == "agrees"


@pytest.mark.parametrize(
    ("mesh", "got"),
    [("cp8", "4 heads"), pytest.param("cp4 tp2", "2 heads on each rank", marks=pytest.mark.slow)],
)
def test_heads_that_ulysses_cannot_exchange_are_rejected_at_the_start(mesh: str, got: str) -> None:
    words = ("--model.name", "hf:llama", "--mesh", mesh, "--parallel.context", "ulysses")
    with pytest.raises(UserError, match=rf"cp\d does not divide the heads \(got {got}"):
        load_checked_run(words)


def test_layers_that_read_other_documents_are_rejected_at_the_start() -> None:
    words = ("--model.name", "hf:falcon_h1", "--data.packing")
    with pytest.raises(PlanError, match=r"data.packing: its layers read the tokens of other doc"):
        load_checked_run((*words, "documents"))


def test_tied_embeddings_are_tied_across_the_stages_of_a_pipeline() -> None:
    outcome = proven("llama", {"mesh": "pp2", "model.settings": '{"tie_word_embeddings": true}'})
    assert outcome.word == "equal", outcome.text


@pytest.mark.slow
def test_what_is_exported_is_read_by_transformers() -> None:
    outcome = proven("olmo2", {"mesh": "dp2"}, what=("export",))
    assert outcome.word == "equal", outcome.text


def test_parameters_have_the_names_of_transformers() -> None:
    names = param_names(architecture_of("llama", TINY | {"layers": 1}))
    assert names["embed.lm.model.embed_tokens.weight"] == "model.embed_tokens.weight"
    own = "model.layers.0.self_attn.q_proj.weight"
    assert names["layer0.layer.self_attn.q_proj.weight"] == own
    assert names["head.lm.lm_head.weight"] == "lm_head.weight"


def test_drop_out_is_what_settings_name() -> None:
    assert config_of("gpt2", TINY).resid_pdrop == 0.0
    settings = {"settings": '{"resid_pdrop": 0.25}'}
    config = config_of("gpt2", TINY | settings)
    assert (config.resid_pdrop, config.attn_pdrop) == (0.25, 0.0)
    assert config_of("gpt2", TINY | settings | {"dropout": False}).resid_pdrop == 0.0


def test_clipped_parameters_are_said_and_kept_in_the_config() -> None:
    words = ["--model.name", "hf:gemma3n_text", "--model.settings", '{"altup_coef_clip": 120.0}']
    _, notes = prepared(load(words, FAMILIES))
    assert notes[0].endswith(
        "trained without parameters clipped within the forward (config.json: altup_coef_clip 120)"
    )
    config = config_of("gemma3n_text", TINY | {"layers": 4})
    assert config.altup_coef_clip == 120.0
    (clip,) = {layer.altup.config.altup_coef_clip for layer in build(config).model.layers}  # type: ignore[union-attr]
    assert clip is None


def test_the_reason_of_transformers_is_named() -> None:
    """Before, the line ended with the name of a check."""
    with pytest.raises(
        PlanError, match=r"\(2\) must be equal to the number of `layer_types` \(1\)"
    ):
        config_of("granitemoehybrid", TINY | {"settings": '{"layer_types": ["mamba"]}'})


def test_outputs_besides_logits_are_left_out_and_losses_of_them_are_said() -> None:
    """Before, the hooks that transformers adds for them were rejected as state of the model."""
    words = ["--model.name", "hf:mixtral", "--mesh", "dp1", "--model.settings"]
    load_checked_run((*words, '{"output_hidden_states": true, "output_attentions": true}'))
    settings = '{"output_router_logits": true, "router_aux_loss_coef": 0.01}'
    run = load_checked_run((*words, settings))
    (note,) = prepared(run)[1]
    assert note.endswith("even load of experts (config.json: router_aux_loss_coef 0.01)")
    assert FAMILIES["hf:mixtral"].hf.config.whole.write(run.model)["output_router_logits"]  # type: ignore[union-attr]


def test_skipped_layers_are_0() -> None:
    settings = {"settings": '{"layerdrop": 0.25, "dropout": 0.1}'}
    config = config_of("opt", TINY | settings)
    assert (config.layerdrop, config.dropout) == (0.0, 0.1)


def test_what_the_transforms_refuse_is_whole_and_said() -> None:
    run, notes = prepared(load(["--model.name", "hf:falcon", "--mesh", "tp2"], FAMILIES))
    axes = json.loads(run.model.axes)  # type: ignore[attr-defined]
    assert axes["layer*.layer.mlp.dense_h_to_4h.weight"] == ["ffn", None]
    assert "layer*.layer.self_attention.query_key_value.weight" not in axes
    (note,) = notes
    assert "whole on every rank" in note
    assert "self_attention.query_key_value" in note


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("olmo2", {"q_norm.weight": ["heads"], "k_norm.weight": ["kv_heads"]}),
        ("glm4", {"q_proj.weight": ["heads", None], "k_proj.weight": ["kv_heads", None]}),
        pytest.param("gpt_oss", {"sinks": ["heads"]}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"kv_b_proj.weight": ["heads", None]}, marks=pytest.mark.slow),
        pytest.param(
            "opt", {"q_proj.weight": [{"stacked": [["heads", 4]]}, None]}, marks=pytest.mark.slow
        ),
    ],
)
def test_attention_behind_the_interface_is_sharded_by_heads(
    name: str, rows: dict[str, Any]
) -> None:
    """It was whole: norms over all heads, sinks, latents, numbers of heads that are attributes, pairs
    of one sequence that are turned.
    """
    words = ["--model.name", f"hf:{name}", "--mesh", "tp2", "--batch.micro_size", "1"]
    run, notes = prepared(load(words, FAMILIES))
    axes = json.loads(run.model.axes)  # type: ignore[attr-defined]
    assert {row: axes[f"layer*.layer.self_attn.{row}"] for row in rows} == rows
    assert not [note for note in notes if "self_attn" in note]


@pytest.mark.parametrize(
    ("name", "path", "row"),
    [
        ("bloom", "self_attention.query_key_value", ["heads", None]),
        ("mpt", "attn.Wqkv", [{"stacked": [["heads", 4], ["kv_heads", 4], ["kv_heads", 4]]}, None]),
        pytest.param("gpt_neo", "attn.attention.q_proj", ["heads", None], marks=pytest.mark.slow),
    ],
)
def test_attention_by_code_of_its_own_is_sharded_by_heads(
    name: str, path: str, row: list[Any]
) -> None:
    run, notes = prepared(load(["--model.name", f"hf:{name}", "--mesh", "tp2"], FAMILIES))
    axes = json.loads(run.model.axes)  # type: ignore[attr-defined]
    assert axes[f"layer*.layer.{path}.weight"] == row
    assert not notes


def test_heads_are_those_of_the_fields() -> None:
    """GPT-Neo's attribute has a name for which other configs have a tiny value: it had 8 heads."""
    assert config_of("gpt_neo", TINY | {"heads": 2}).num_heads == 2


def test_attention_of_own_code_may_have_more_heads_than_positions() -> None:
    values = TINY | {"heads": 32, "dim": 64, "settings": '{"max_position_embeddings": 32}'}
    captured = architecture_of("gpt_neo", values).captured
    assert len(captured.own_attentions) == TINY["layers"]


def test_linears_of_a_class_of_their_own_are_sharded_where_they_compute_the_same() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * super().forward(x)

    falcon = adapt(build(config_of("falcon", TINY), implementation=EAGER))
    assert type(falcon.get_submodule("transformer.h.0.mlp.dense_h_to_4h")) is nn.Linear
    assert not computes_linear(Doubled)
    scaled = Scaled(2, 2)
    assert is_linear_of_own_class(scaled)
    scaled.scale = 2.0
    assert not is_linear_of_own_class(scaled)


@pytest.mark.parametrize("name", ["jetmoe", "dbrx"])
def test_experts_of_own_code_have_gradients_without_a_token(name: str) -> None:
    """A rank of ep whose experts no token has chosen: DBRX could not tell the shape of its result."""
    lm = build(config_of(name, TINY))
    set_dispatch(lm)
    ((_, experts), *_) = own_experts(lm)
    none = torch.zeros(0, 1)
    chosen = (none.long(), none) if name == "dbrx" else ([0, 0, 0, 0],)
    y = experts(torch.zeros(0, 64), *chosen)
    assert len(y) == 0
    y.sum().backward()
    grads = [param.grad for param in experts.parameters()]
    assert grads
    assert all(grad is not None and not grad.any() for grad in grads)


@pytest.mark.parametrize("name", ["jetmoe", "dbrx"])
def test_a_copy_of_experts_of_own_code_computes_with_its_own_weights(name: str) -> None:
    lm = build(config_of(name, TINY))
    set_dispatch(lm)
    ((_, experts), *_) = own_experts(lm)
    copied = copy.deepcopy(experts).double()
    x = torch.ones(4, 64, dtype=torch.float64)
    index = torch.arange(4).unsqueeze(1)
    chosen = (index, x.new_ones(4, 1)) if name == "dbrx" else ([1, 1, 1, 1],)
    before = copied(x, *chosen)
    assert before.dtype == torch.float64
    for param in experts.parameters():
        param.data.zero_()
    assert torch.equal(copied(x, *chosen), before)
    assert before.all()


def test_experts_of_own_code_are_sharded_by_rows_of_an_expert() -> None:
    words = ("--model.name", "hf:dbrx", "--mesh", "ep2")
    run = load_checked_run(words)
    row = FAMILIES["hf:dbrx"].axes(run.model)["layer0.layer.ffn.experts.mlp.w1"]
    assert row == (Stacked(("experts", 4)), "whole")


def write_config(folder: Path, **keys: Any) -> Path:
    config = config_of("olmo2", TINY).to_dict() | {"architectures": ["Olmo2ForCausalLM"]} | keys
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_of_an_architecture_that_weft_has_no_family_for(tmp_path: Path) -> None:
    found = describe_folder(write_config(tmp_path, rms_norm_eps=1e-3), FAMILIES)
    assert found.family == "hf:olmo2"
    assert found.fields["dim"] == TINY["dim"]
    settings = json.loads(found.fields["settings"])  # type: ignore[arg-type]
    assert settings["rms_norm_eps"] == 1e-3


def test_quantised_weights_are_rejected(tmp_path: Path) -> None:
    folder = write_config(tmp_path, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="quantised weights are not trained"):
        describe_folder(folder, FAMILIES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:olmo22", "is no decoder of transformers.*did you mean 'hf:olmo2'"),
        ("hf:t5", "is no decoder of transformers"),
        ("hf:gemma3", "a model of several parts.*hf:gemma3_text"),
    ],
)
def test_other_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["--model.name", name], FAMILIES)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "architectures", dict)
    with pytest.raises(ConfigError, match=r"weft-train\[hf\]"):
        architectures.model_type_of("hf:llama")


def test_sizes_that_do_not_fit_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--model.name", "hf:llama", "--model.head_size", "3"]
    with pytest.raises(PlanError, match="its forward fails without values: RuntimeError"):
        prepared(load(words, FAMILIES))
    assert capfd.readouterr().err == ""


def test_an_old_transformers_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "__init__.py"
    monkeypatch.setattr(
        architectures.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=package)
    )
    decoders = architectures.architectures.__wrapped__
    package.write_text('"""A model."""\n__version__ = "5.7.1"\n')
    assert decoders() == {}
    package.write_text('__version__ = "5.8.0rc1"\n')
    table = tmp_path / "models" / "auto" / "modeling_auto.py"
    table.parent.mkdir(parents=True)
    table.write_text(f'{architectures.TABLE} = OrderedDict([("llama", "LlamaForCausalLM")])\n')
    assert decoders() == {"llama": "LlamaForCausalLM"}
    package.write_text('__version__ = "5.7.1"\n')
    monkeypatch.setattr(architectures, "architectures", decoders)
    with pytest.raises(ConfigError, match=r"needs transformers 5.8 or newer.*weft-train\[hf\]"):
        architectures.model_type_of("hf:llama")


def test_buffers_of_folders_are_parameters_that_are_not_trained() -> None:
    family = FAMILIES["hf:deepseek_v3"]
    assert family.hf is not None
    config = family.Config()
    assert not list(family.hf.config.unwritable(config))
    found = architecture_of("deepseek_v3", TINY)
    (bias,) = found.kept
    assert bias == "model.layers.1.mlp.gate.e_score_correction_bias"
    name = bias.replace("model.layers.1.", "layer1.layer.")
    params = named_parameters(family.blocks(config))
    assert [one for one, param in params.items() if not param.requires_grad] == [name]
    (rule,) = (one for one in family.hf.weights.expand(config) if one.param == name)
    assert (rule.tensor, rule.keep_float32) == (bias, True)


def test_what_no_gradient_reaches_is_not_trained_and_said() -> None:
    _, notes = prepared(load(["--model.name", "hf:bart"], FAMILIES))
    (note,) = notes
    assert "not trained, as no gradient reaches them: 20 parameters" in note
    assert "encoder_attn" in note


@pytest.mark.parametrize(
    ("name", "is_said"), [("hf:llama4_text", True), ("hf:mixtral", False), ("hf:minimax", False)]
)
def test_experts_that_do_not_compute_in_fp8_are_said(name: str, is_said: bool) -> None:
    _, notes = prepared(load(["--model.name", name, "--precision.linears", "fp8"], FAMILIES))
    said = "feed_forward.experts.gate_up_proj among them, compute in float32, not in fp8"
    assert any(said in note for note in notes) == is_said


def test_fused_weights_are_sharded_by_heads_and_parts() -> None:
    run, notes = prepared(load(["--model.name", "hf:gpt2", "--mesh", "tp2"], FAMILIES))
    axes = json.loads(run.model.axes)  # type: ignore[attr-defined]
    parts = [["heads", 4], ["kv_heads", 4], ["kv_heads", 4]]
    assert axes["layer*.layer.attn.c_attn.weight"] == [{"stacked": parts}, None]
    assert axes["layer*.layer.mlp.c_fc.weight"] == ["ffn", None]
    assert notes == ()


def test_sequence_parallelism_names_the_blocks_that_work_on_whole_sequences() -> None:
    words = ["--model.name", "hf:mixtral", "--mesh", "tp2", "--parallel.sequence", "True"]
    _, notes = prepared(load(words, FAMILIES))
    (note,) = notes
    assert "sequence parallelism: layer* works on whole sequences: layer0.layer.mlp.gate" in note


def test_context_parallelism_counts_the_blocks_that_work_on_whole_sequences() -> None:
    words = ["--model.name", "hf:mamba2", "--mesh", "cp2"]
    _, notes = prepared(load(words, FAMILIES))
    (note,) = notes
    assert "context parallelism: layer.mixer in 2 of 5 blocks (layer0, ...) on whole seq" in note


def test_blocks_gather_no_sequence_of_which_tp_ranks_hold_parts() -> None:
    words = ("--model.name", "hf:bart", "--mesh", "cp2 tp2", "--parallel.sequence", "True")
    with pytest.raises(
        PlanError, match=r"parallel.sequence: embed mixes tokens.*Fix: --parallel.s"
    ):
        load_checked_run(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("bart", "dp2"), ("diffllama", "dp2"), ("mamba2", "cp2")]
)
def test_text_is_generated_as_from_whole_forwards(name: str, mesh: str) -> None:
    outcome = proven(name, {"mesh": mesh}, what=("generate",))
    assert outcome.word == "equal", outcome.text


def test_attributes_are_scaled_only_while_attention_runs() -> None:
    """By the rows that a shard of the fused linear has, also where the forward fails."""
    lm = adapt(build(config_of("gpt2", TINY)))
    attention = lm.get_submodule("transformer.h.0.attn")
    ShardSizes(attention, lm.config)
    attention.c_attn.weight = nn.Parameter(attention.c_attn.weight[:96])  # type: ignore[union-attr, index]
    seen: list[tuple[object, ...]] = []
    attention.c_attn.register_forward_pre_hook(
        lambda *_: seen.append((attention.num_heads, attention.split_size, attention.head_dim))
    )
    with pytest.raises(RuntimeError):
        attention(torch.zeros(1, 4, 64))
    assert seen == [(2, 32, 16)]
    assert (attention.num_heads, attention.split_size) == (4, 64)


def test_layers_that_run_twice_are_no_chain() -> None:
    with pytest.raises(PlanError, match="one after the other, once each"):
        architecture_of("hrm_text", TINY)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_heads_that_score_texts_take_the_place_of_the_vocabularys(name: str) -> None:
    """The scores of each token are those of transformers' own trunk, and of a folder of a language
    model all is read but its head, whatever its name there.
    """
    scored = TINY | {"labels": 3}
    check_against_transformers(name, scored, packs_documents=True)
    family = FAMILIES[f"hf:{name}"]
    assert family.hf is not None
    config = family.Config(labels=3)
    names = param_names(architecture_of(name, scored))
    assert names["head.lm.score.weight"] == "score.weight"
    language = {rule.tensor for rule in family.hf.weights.expand(family.Config())}
    left_out = language - {rule.tensor for rule in family.hf.weights.expand(config)}
    assert left_out == language.intersection(family.hf.weights.unused(config))
    assert len(left_out) == 1


def test_heads_of_whole_texts_are_rejected() -> None:
    """BERT's class reads the first token through a layer of its own."""
    with pytest.raises(PlanError, match="BertForSequenceClassification has no linear that scores"):
        architecture_of("bert", TINY | {"labels": 3})


@pytest.mark.slow
def test_ranks_are_forked_after_the_model_was_compared(tmp_path: Path) -> None:
    """With as many threads as there are cores: OpenMP's do not survive a fork."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-m", "weft", "train", "--model.name", "hf:olmo2", "--mesh", "tp2"]
    words += ["--steps", "1", "--data.seq_len", "16", "--batch.global_size", "4"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "run")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout
