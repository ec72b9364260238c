"""Models of transformers through weft and back: the same logits, the same bytes, and the same training steps.

Both sides train in float64 with the casts to float32 taken out of transformers' norms and routers (the code is otherwise
theirs), so 1e-9 is asked of weights after three steps of AdamW with weight decay and clipping. The mixtures train without
losses and biases that balance their load: transformers' models have none of these while they train.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.oracle.hugging_face import make_batch, shaken, widened
from tests.save.hf_folders import edit, pack_experts
from tests.train.saving import save
from weft.cli import main
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.config import Run
from weft.core.layout import plan_of
from weft.core.load import load
from weft.core.lr import learning_rate
from weft.models import FAMILIES
from weft.models.batch import Batch, forward, with_later_targets
from weft.prove.layout import micro_batches
from weft.save.folder import checkpoint_path
from weft.save.hf import gpt2, llama3, tables
from weft.save.hf.folder import HfFolder
from weft.save.hf.logits import compare, stored_model
from weft.save.hf.table import Row, WeightTable
from weft.save.read import open_checkpoint
from weft.testing import run_ranks
from weft.train.build import build_step
from weft.train.checkpoint import load_parameters
from weft.train.exchange import bring, send

transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face's transformers (extra `oracle`)")

pytestmark = pytest.mark.usefixtures("fast_disk")

STEPS, LR = 3, 1e-2
TRUNK = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **TRUNK,
        intermediate_size=48,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama3 tied": lambda: transformers.LlamaConfig(**TRUNK, intermediate_size=48, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**TRUNK, head_dim=12, intermediate_size=48),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **TRUNK, head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **{**TRUNK, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rope_parameters={**YARN, "rope_theta": 1e4},
        max_position_embeddings=2560,
    ),
}
UNBALANCED = {"qwen3-moe": {"balance_loss": 0.0}, "deepseek": {"balance_loss": 0.0, "balance_rate": 0.0}}


def their_model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).double()
    return shaken(model).to(dtype)


def written(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """A folder as transformers writes it."""
    their_model(name, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def loaded(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The folder in transformers, which finds all of its keys and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        output_loading_info=True,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    model.eval()  # drop-out, of which weft has none
    return model


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def run_of(folder: Path, *words: str) -> Run:
    return load(["--model.from_hf", str(folder), *words], FAMILIES)


def exported(checkpoint: Path, folder: Path, **asked: Any) -> Path:
    send(checkpoint, folder, **{"dtype": None, "max_shard_bytes": 10**9, "kept": (), "compares": False, **asked})
    return folder


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


def ours_after_steps(run: Run, start: Path, folder: Path, batches: list[Batch]) -> Path:
    """The steps on the run's layout, ranks as threads, from the imported checkpoint; then the export."""
    plan, final = plan_of(run), checkpoint_path(folder.parent / "trained", STEPS)

    def rank(comm: Comm) -> None:
        step = build_step(run, comm)
        load_parameters(step, open_checkpoint(start).section("model"))
        for index, batch in enumerate(batches):
            step(micro_batches(batch, plan, comm.rank), lr=learning_rate(index, run.optim, run.steps))
        save(step, final, run)

    run_ranks(plan.mesh, rank, timeout_s=100)
    return exported(final, folder)


def theirs_after_steps(folder: Path, run: Run, batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The same steps with transformers and torch.optim.AdamW on one process."""
    model = loaded(folder, torch.float64)
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "Router"))}
    for kind in kinds:
        monkeypatch.setattr(kind, "forward", widened(kind.forward))
    decayed = [param for param in model.parameters() if param.ndim >= 2]
    rest = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": decayed, "weight_decay": run.optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=run.optim.betas, eps=run.optim.eps)
    for batch in batches:
        logits = model(input_ids=batch.inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip)
        assert norm > run.optim.clip, "clipping is part of the claim"
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_three_steps_on_a_layout_are_three_steps_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    folder = written(name, tmp_path / "theirs", dtype=torch.float64)
    wide = [word for kind in ("params", "compute", "reduce") for word in (f"--precision.{kind}", "float64")]
    free = [word for key, value in UNBALANCED.get(name, {}).items() for word in (f"--model.{key}", str(value))]
    run = run_of(
        folder,
        *("--mesh", "pp2 tp2 dp2", "--batch.global_size", "8", "--data.seq_len", "48", "--steps", str(STEPS)),
        *("--optim.lr", str(LR), "--optim.decay", "constant", "--optim.warmup", "0", "--optim.clip", "0.25"),
        *wide,
        *free,
    )
    bring(folder, tmp_path / "run", run, compares=False)
    batches = []
    for _ in range(STEPS):
        parts = [make_batch(61) for _ in range(4)]
        batches.append(
            Batch(
                inputs=torch.cat([part.inputs for part in parts]),
                targets=torch.cat([part.targets for part in parts]),
                positions=torch.cat([part.positions for part in parts]),
            )
        )
    ours = ours_after_steps(run, checkpoint_path(tmp_path / "run", 0), tmp_path / "ours", batches)
    trained = loaded(ours, torch.float64).state_dict()
    untrained = loaded(folder, torch.float64).state_dict()
    theirs = theirs_after_steps(folder, run, batches, monkeypatch).state_dict()
    assert trained.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.allclose(trained[key], tensor, rtol=0, atol=1e-9), key
        if not key.endswith("e_score_correction_bias"):
            assert (tensor - untrained[key]).abs().max() > 1e-3, f"{key} has moved"


def test_each_rank_starts_from_its_own_boxes_under_zero_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written("qwen3-moe", tmp_path / "theirs")
    words = ("--mesh", "pp2 ep2 tp2", "--parallel.zero", "3", "--batch.global_size", "8", "--data.seq_len", "16")
    run = run_of(folder, *words, "--precision.params", "float64", "--precision.compute", "float64")
    run = run.model_copy(update={"precision": run.precision.model_copy(update={"reduce": "float64"})})
    whole, plain = HfFolder(folder, run.model), HfFolder.read
    read: dict[str, int] = {}

    def counted(self: HfFolder, name: str, box: Box) -> Tensor:
        rank = threading.current_thread().name
        read[rank] = read.get(rank, 0) + box.size
        return plain(self, name, box)

    monkeypatch.setattr(HfFolder, "read", counted)

    def rank(comm: Comm) -> None:
        step = build_step(run, comm)
        assert read[threading.current_thread().name] == sum(piece.box.size for piece in step.model.pieces.values())
        for name, value in step.kept.parameters().items():
            piece = step.model.pieces[name]
            assert torch.equal(value, plain(whole, piece.owner, piece.box).to(torch.float64)), name

    run_ranks(plan_of(run).mesh, rank, timeout_s=100)
    assert len(read) == 8
    total = sum(Box.whole(shape).size for shape in whole.shapes.values())
    assert max(read.values()) < 0.4 * total


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
    monkeypatch.setattr("weft.save.hf.tables.TABLES", broken)
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
    monkeypatch.setattr("weft.save.hf.logits.importlib.util.find_spec", lambda name: None)
    assert main(["export", run, str(tmp_path / "more")]) == 0
    assert "not compared: transformers is not installed" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr("weft.save.hf.logits.their_logits", lambda folder, tokens: torch.zeros(2, 32, 61))
    assert main(["export", run, str(tmp_path / "wrong")]) == 1


def test_models_that_do_not_fit_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written("llama3", tmp_path / "theirs")
    run = run_of(folder)
    monkeypatch.setattr("weft.save.hf.logits.ROOM", 0.0)
    found = compare(folder, HfFolder(folder, run.model), run.model)
    assert str(found).startswith("not compared: both models take 0.0 GB in float32")
