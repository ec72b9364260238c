"""Models of transformers through weft and back: the same logits, the same bytes; a table that is broken shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hf.folders import edit, pack_experts
from tests.hf.models import CONFIGS, loaded, run_of, tensors_in, written
from tests.oracle.hugging_face import make_batch, shaken
from weft.checkpoint.folder import checkpoint_path
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.hf import gpt2, llama3, tables
from weft.hf.folder import HfFolder
from weft.hf.logits import compare, stored_model
from weft.hf.table import Row, WeightTable
from weft.models.common.batch import forward, with_later_targets
from weft.train.exchange import bring, send

pytestmark = pytest.mark.usefixtures("fast_disk")


@pytest.mark.parametrize("name", CONFIGS)
def test_in_and_out_gives_the_same_bytes_and_the_same_logits(tmp_path: Path, name: str):
    folder = written(name, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    done = bring(folder, tmp_path / "run", run_of(folder), compares=True, chunk_bytes=20_000)
    assert done.holds
    assert "largest logit difference to transformers: " in done.lines[1]
    done = send(
        checkpoint_path(tmp_path / "run", 0),
        tmp_path / "ours",
        dtype=None,
        max_shard_bytes=25_000,
        kept=[tmp_path / "run" / "hf"],
        compares=True,
    )
    assert done.holds
    assert "largest logit difference to transformers: " in done.lines[1]
    theirs, ours = tensors_in(folder), tensors_in(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        assert torch.equal(*(loaded(each)(input_ids=tokens).logits for each in (folder, tmp_path / "ours")))
    assert (tmp_path / "ours" / "generation_config.json").read_text() == (folder / "generation_config.json").read_text()
    assert loaded(tmp_path / "ours").config.eos_token_id == 2


@pytest.mark.parametrize("name", ["gpt2", "deepseek"])
def test_a_folder_of_fewer_digits_is_rounded_once(tmp_path: Path, name: str):
    folder = written(name, tmp_path / "theirs")
    bring(folder, tmp_path / "run", run_of(folder), compares=False)
    start = checkpoint_path(tmp_path / "run", 0)
    done = send(start, tmp_path / "ours", dtype="bfloat16", max_shard_bytes=10**9, kept=(), compares=True)
    assert done.holds
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    theirs = tensors_in(folder)
    for key, tensor in tensors_in(tmp_path / "ours").items():
        is_wide = key.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_wide else torch.bfloat16), key
        assert torch.equal(tensor, theirs[key].to(tensor.dtype))
    loaded(tmp_path / "ours")
    again = bring(tmp_path / "ours", tmp_path / "again", run_of(tmp_path / "ours"), compares=True)
    assert again.holds
    section = open_checkpoint(checkpoint_path(tmp_path / "again", 0)).section("model")
    assert section.dtype("layer0.attn.o.weight") == torch.bfloat16, "stored as it was"


def test_transformers_loads_both_layouts_of_experts(tmp_path: Path):
    folder = written("qwen3-moe", tmp_path / "theirs")
    packed = written("qwen3-moe", tmp_path / "packed")
    pack_experts(packed, 4)
    run = run_of(packed)
    plain, stacked = HfFolder(folder, run.model), HfFolder(packed, run.model)
    assert compare(folder, stacked, run.model).holds
    assert compare(packed, plain, run.model).holds


def test_the_layer_that_predicts_the_second_next_token_computes_what_transformers_does(tmp_path: Path):
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this transformers has no multi-token prediction")
    main = loaded(written("deepseek", tmp_path / "theirs"))
    last = main.model.layers[-1]
    side = layers.MtpLayer(main.config, type(last), type(last.input_layernorm), 1)
    side.apply(main._init_weights)
    shaken(side)
    folder, head = tmp_path / "theirs", "model.layers.2."
    published = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}
    own = {head + _renamed(name, published): tensor for name, tensor in side.state_dict().items()}
    own |= {
        f"{head}embed_tokens.weight": main.model.embed_tokens.weight,
        f"{head}shared_head.head.weight": main.lm_head.weight,
    }
    edit(folder, lambda tensors: tensors.update({name: tensor.detach().clone() for name, tensor in own.items()}))
    run = run_of(folder, "--model.balance_loss", "0")
    assert (run.model.architecture["mtp_depth"], run.model.architecture["mtp_loss"]) == (1, 0.3)

    source, batch = HfFolder(folder, run.model), with_later_targets(make_batch(61))
    source.check_copies()
    with torch.no_grad():
        ours = forward(stored_model(source, run.model, types={}), batch)
        hidden = main.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        turns = main.model.rotary_emb(hidden, batch.positions)
        joined = side(main.model.embed_tokens(batch.next_inputs), hidden, turns, None, batch.positions, None)
        theirs = _summed(main.lm_head(hidden), batch.targets) + 0.3 * _summed(main.lm_head(joined), batch.later_targets)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5), "float32"


def _renamed(name: str, heads: dict[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in heads.items() if name.startswith(old)), name)


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def exchanged(table: WeightTable, first: str, second: str) -> WeightTable:
    """The table with what two rows say of their tensors exchanged."""
    theirs = {row.ours.rpartition("}.")[2]: row for row in table.rows}
    swap = {theirs[first].ours: theirs[second], theirs[second].ours: theirs[first]}
    return replace(table, rows=tuple(_like(row, swap[row.ours]) if row.ours in swap else row for row in table.rows))


def _like(row: Row, other: Row) -> Row:
    return replace(row, theirs=other.theirs, share=other.share)


def not_transposed(table: WeightTable, ours: str) -> WeightTable:
    rows = (replace(row, transposed=False) if row.ours.endswith(ours) else row for row in table.rows)
    return replace(table, rows=tuple(rows))


BROKEN = {
    "gate and up exchanged": ("llama3", exchanged(llama3.TABLE, "mlp.gate.weight", "mlp.up.weight")),
    "norms exchanged": ("llama3", exchanged(llama3.TABLE, "attn_norm.weight", "mlp_norm.weight")),
    "q and k exchanged": ("gpt2", exchanged(gpt2.TABLE, "attn.q.weight", "attn.k.weight")),
    "a square not transposed": ("gpt2", not_transposed(gpt2.TABLE, "attn.o.weight")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_found_by_the_logits_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    family, table = BROKEN[name]
    folder = written(family, tmp_path / "theirs")
    bring(folder, tmp_path / "right", run_of(folder), compares=False)
    broken = {**tables.TABLES, family: table}
    monkeypatch.setattr("weft.hf.tables.TABLES", broken)
    monkeypatch.setattr("weft.train.exchange.TABLES", broken)
    into = bring(folder, tmp_path / "run", run_of(folder), compares=True)
    assert not into.holds
    assert into.lines[1].endswith(": NOT the same model")
    out = send(
        checkpoint_path(tmp_path / "right", 0),
        tmp_path / "ours",
        dtype=None,
        max_shard_bytes=10**9,
        kept=(),
        compares=True,
    )
    assert not out.holds


def test_the_commands_say_what_they_did_and_fail_where_the_models_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = written("llama3", tmp_path / "theirs")
    run, ours = str(tmp_path / "run"), str(tmp_path / "ours")
    assert main(["import", str(folder), "--out", run]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "parameters" in told[0]
    assert told[1].startswith("largest logit difference to transformers: ")
    assert main(["export", run, ours, "--dtype", "float32", "--max_shard_bytes", "20000"]) == 0
    assert (Path(ours) / "model.safetensors.index.json").is_file()
    assert "largest logit difference" in capsys.readouterr().out
    monkeypatch.setattr("weft.hf.logits.importlib.util.find_spec", lambda name: None)
    assert main(["export", run, str(tmp_path / "more")]) == 0
    assert "not compared: transformers is not installed" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr("weft.hf.logits.their_logits", lambda folder, tokens: torch.zeros(2, 32, 61))
    assert main(["export", run, str(tmp_path / "wrong")]) == 1


def test_models_that_do_not_fit_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written("llama3", tmp_path / "theirs")
    run = run_of(folder)
    monkeypatch.setattr("weft.hf.logits.ROOM", 0.0)
    found = compare(folder, HfFolder(folder, run.model), run.model)
    assert str(found).startswith("not compared: both models take 0.0 GB in float32")
