"""Models of transformers imported and exported: the same logits, the same bytes; a broken mapping is detected."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hf.folders import edit, pack_experts
from tests.hf.models import CONFIGS, loaded, run_of, tensors_in, transformers, written
from tests.oracle.hugging_face import make_batch, shaken
from tests.small_models import HF_FAMILIES, small_config
from weft.checkpoint.folder import checkpoint_path
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.commands.import_ import import_run
from weft.config.hf.mapping import HFMapping
from weft.config.hf.write_config import config_json
from weft.hf.check_logits import compare_logits, load_model
from weft.hf.export_hf import export_hf
from weft.hf.folder import HfFolder
from weft.models import FAMILIES
from weft.models.common.batch import forward, with_later_targets

pytestmark = pytest.mark.usefixtures("fast_disk")


@pytest.mark.parametrize("name", CONFIGS)
def test_in_and_out_gives_the_same_bytes_and_the_same_logits(tmp_path: Path, name: str):
    folder = written(name, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    done = import_run(folder, tmp_path / "run", compares=True, chunk_bytes=20_000)
    assert done.is_equal
    assert "largest logit difference to transformers: " in done.lines[1]
    done = export_hf(
        checkpoint_path(tmp_path / "run", 0),
        tmp_path / "ours",
        dtype=None,
        max_shard_bytes=25_000,
        sidecar_folders=[tmp_path / "run" / "hf"],
        compares=True,
    )
    assert done.is_equal
    assert "largest logit difference to transformers: " in done.lines[1]
    theirs = tensors_in(folder)
    ours = tensors_in(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name])
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        assert torch.equal(
            *(loaded(each)(input_ids=tokens).logits for each in (folder, tmp_path / "ours"))
        )
    assert (tmp_path / "ours" / "generation_config.json").read_text() == (
        folder / "generation_config.json"
    ).read_text()
    first, last = (loaded(each).config for each in (folder, tmp_path / "ours"))
    assert last.eos_token_id == 2
    assert last.pad_token_id == first.pad_token_id


@pytest.mark.parametrize("family", HF_FAMILIES)
@pytest.mark.parametrize("token", [None, 0, 5, -1])
def test_the_embedding_has_the_padding_token_of_transformers(family: str, token: int | None):
    cfg = small_config(family, padding_id=token, mtp_depth=1)
    mapping = FAMILIES[family].hf
    tokens = {"pad_token_id": token}
    values = config_json(mapping, cfg, dtype="float32", original=tokens)
    assert values["pad_token_id"] == token
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config).get_input_embeddings()
        blocks = FAMILIES[family].blocks(cfg)
    embeddings = [block.tok for block in blocks.values() if hasattr(block, "tok")]
    assert len(embeddings) == (2 if family == "deepseek" else 1)
    for ours in embeddings:
        assert ours.padding_idx == theirs.padding_idx


@pytest.mark.parametrize("name", ["gpt2", "deepseek"])
def test_a_folder_of_fewer_digits_is_rounded_once(tmp_path: Path, name: str):
    folder = written(name, tmp_path / "theirs")
    import_run(folder, tmp_path / "run", compares=False)
    start = checkpoint_path(tmp_path / "run", 0)
    done = export_hf(
        start,
        tmp_path / "ours",
        dtype="bfloat16",
        max_shard_bytes=10**9,
        sidecar_folders=(),
        compares=True,
    )
    assert done.is_equal
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    theirs = tensors_in(folder)
    for key, tensor in tensors_in(tmp_path / "ours").items():
        is_wide = key.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_wide else torch.bfloat16), key
        assert torch.equal(tensor, theirs[key].to(tensor.dtype))
    loaded(tmp_path / "ours")
    again = import_run(tmp_path / "ours", tmp_path / "again", compares=True)
    assert again.is_equal
    section = open_checkpoint(checkpoint_path(tmp_path / "again", 0)).section("model")
    assert section.dtype("layer0.attn.o.weight") == torch.bfloat16, "stored as it was"


def test_transformers_loads_both_layouts_of_experts(tmp_path: Path):
    folder = written("qwen3-moe", tmp_path / "theirs")
    packed = written("qwen3-moe", tmp_path / "packed")
    pack_experts(packed, 4)
    run = run_of(packed)
    plain = HfFolder(folder, run.model)
    stacked = HfFolder(packed, run.model)
    assert compare_logits(folder, stacked, run.model).is_equal
    assert compare_logits(packed, plain, run.model).is_equal


def test_the_layer_that_predicts_the_second_next_token_computes_what_transformers_does(
    tmp_path: Path,
):
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this transformers has no multi-token prediction")
    main = loaded(written("deepseek", tmp_path / "theirs"))
    last = main.model.layers[-1]
    side = layers.MtpLayer(main.config, type(last), type(last.input_layernorm), 1)
    side.apply(main._init_weights)
    shaken(side)
    folder = tmp_path / "theirs"
    head = "model.layers.2."
    published = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}
    own = {}
    for name, tensor in side.state_dict().items():
        own[head + _renamed(name, published)] = tensor
    own |= {
        f"{head}embed_tokens.weight": main.model.embed_tokens.weight,
        f"{head}shared_head.head.weight": main.lm_head.weight,
    }
    edit(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.detach().clone() for name, tensor in own.items()}
        ),
    )
    run = run_of(folder, "--model.balance_loss", "0")
    assert run.model.architecture["mtp_depth"] == 1
    assert run.model.architecture["mtp_loss"] == 0.3

    source = HfFolder(folder, run.model)
    batch = with_later_targets(make_batch(61))
    source.check_aliases()
    with torch.no_grad():
        blocks = load_model(source, run.model, dtypes={})
        ours = forward(blocks, batch)
        hidden = main.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        turns = main.model.rotary_emb(hidden, batch.positions)
        joined = side(
            main.model.embed_tokens(batch.next_inputs), hidden, turns, None, batch.positions, None
        )
        theirs = _summed(main.lm_head(hidden), batch.targets) + 0.3 * _summed(
            main.lm_head(joined), batch.later_targets
        )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5), "float32"


def _renamed(name: str, heads: dict[str, str]) -> str:
    return next(
        (new + name.removeprefix(old) for old, new in heads.items() if name.startswith(old)), name
    )


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def exchange_rules(family: str, first: str, second: str) -> HFMapping:
    """The mapping of a family with the tensors of two rules exchanged."""
    mapping = FAMILIES[family].hf
    rules = {}
    for rule in mapping.weights.rules:
        name = rule.param.rpartition("}.")[2]
        rules[name] = rule
    swapped = {rules[first]: rules[second], rules[second]: rules[first]}
    changed = []
    for rule in mapping.weights.rules:
        other = swapped.get(rule, rule)
        exchanged = replace(rule, tensor=other.tensor, slice=other.slice)
        changed.append(exchanged)
    weights = replace(mapping.weights, rules=tuple(changed))
    return replace(mapping, weights=weights)


def drop_transposition(family: str, param: str) -> HFMapping:
    mapping = FAMILIES[family].hf
    rules = [
        replace(rule, transposed=False) if rule.param.endswith(param) else rule
        for rule in mapping.weights.rules
    ]
    return replace(mapping, weights=replace(mapping.weights, rules=tuple(rules)))


BROKEN = {
    "gate and up exchanged": (
        "llama3",
        exchange_rules("llama3", "mlp.gate.weight", "mlp.up.weight"),
    ),
    "norms exchanged": ("llama3", exchange_rules("llama3", "attn_norm.weight", "mlp_norm.weight")),
    "q and k exchanged": ("gpt2", exchange_rules("gpt2", "attn.q.weight", "attn.k.weight")),
    "a square not transposed": ("gpt2", drop_transposition("gpt2", "attn.o.weight")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_mapping_is_found_by_the_logits_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    family, mapping = BROKEN[name]
    folder = written(family, tmp_path / "theirs")
    import_run(folder, tmp_path / "right", compares=False)
    broken = replace(FAMILIES[family], hf=mapping)  # type: ignore[type-var]
    monkeypatch.setitem(FAMILIES._built_in, family, broken)
    imported = import_run(folder, tmp_path / "run", compares=True)
    assert not imported.is_equal
    assert imported.lines[1].endswith(": NOT the same model")
    exported = export_hf(
        checkpoint_path(tmp_path / "right", 0),
        tmp_path / "ours",
        dtype=None,
        max_shard_bytes=10**9,
        sidecar_folders=(),
        compares=True,
    )
    assert not exported.is_equal


def test_the_commands_report_and_fail_if_the_models_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = written("llama3", tmp_path / "theirs")
    run = str(tmp_path / "run")
    ours = str(tmp_path / "ours")
    assert main(["import", str(folder), "--out", run]) == 0
    message = capsys.readouterr().out.splitlines()
    assert "parameters" in message[0]
    assert message[1].startswith("largest logit difference to transformers: ")
    assert main(["export", run, ours, "--dtype", "float32", "--max_shard_bytes", "20000"]) == 0
    assert (Path(ours) / "model.safetensors.index.json").is_file()
    assert "largest logit difference" in capsys.readouterr().out
    monkeypatch.setattr("weft.hf.check_logits.importlib.util.find_spec", lambda name: None)
    assert main(["export", run, str(tmp_path / "more")]) == 0
    assert "not compared: transformers is not installed" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(
        "weft.hf.check_logits.hf_logits", lambda folder, tokens, **_: torch.zeros(2, 32, 61)
    )
    assert main(["export", run, str(tmp_path / "wrong")]) == 1


def test_models_that_do_not_fit_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written("llama3", tmp_path / "theirs")
    run = run_of(folder)
    monkeypatch.setattr("weft.hf.check_logits.MEMORY_SHARE", 0.0)
    source = HfFolder(folder, run.model)
    found = compare_logits(folder, source, run.model)
    assert re.match(r"not compared: both models take \d+ [KM]iB in float32, ", str(found))
