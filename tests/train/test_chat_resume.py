"""A run on conversations that stops and resumes equals the run that does not stop, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.data.chat_files import conversations, tokenizer_folder, write_jsonl
from weft.config.load import load
from weft.config.run import Run
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft_selftest.mutants.effect import RankRun

SIZES = "--model.layers 1 --model.dim 16 --model.heads 2 --model.kv_heads 1 --model.ffn 16"
BATCH = "--data.seq_len 32 --batch.global_size 4 --batch.micro_size 1 --mesh dp2"


def chat_run(folder: Path) -> Run:
    """A run on packed conversations, ten steps of which are more than an epoch."""
    tokenizer = tokenizer_folder(folder / "tokenizer")
    source = write_jsonl(folder / "chat.jsonl", conversations(24))
    data = f"--data.source {source} --data.format chat --data.tokenizer {tokenizer}/tokenizer.json"
    words = f"{SIZES} {BATCH} {data} --data.packing documents --model.vocab 320 --steps 10"
    return load(words.split(), FAMILIES)


def trained(run: Run) -> list[dict[str, torch.Tensor]]:
    """Losses, norms, parameters and moments, by rank."""
    build = partial(build_training, run, stop_requested=lambda: False)
    return run_ranks(run.device_mesh, RankRun(build))


def test_ten_steps_on_conversations_are_five_and_five(tmp_path: Path) -> None:
    run = chat_run(tmp_path)
    straight = trained(run.with_values({"save.at_end": False}))
    out = {"out": str(tmp_path / "run")}
    trained(run.with_values({**out, "save.every": 5, "save.at_end": False, "steps": 6}))
    resumed = trained(run.with_values({**out, "resume": "auto", "save.at_end": False}))
    for whole, part in zip(straight, resumed, strict=True):
        count = len([name for name in part if name.endswith("loss")])
        assert count == 5
        for name, tensor in part.items():
            assert torch.equal(whole[name], tensor), name
