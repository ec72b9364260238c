"""Architectures of transformers in NF4 under tp: blocks along rows, which are cut between blocks, and never within one."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch

from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.config.load import load
from weft.core.axes import Box
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.start.transformers_model import prepared
from weft.testing import run_ranks
from weft.train.build_training import build_training
from weft.train.event_log import EventLog
from weft.train.loop import run_training

MODEL = {
    "hf:llama": "--model.head_size 32 --model.dim 128 --model.ffn 256",
    "hf:phi3": "--model.dim 128 --model.ffn 256",  # fused q k v, and gate up
}
SIZES = "--model.layers 2 --data.seq_len 16 --batch.global_size 4 --batch.micro_size 1"
FLOAT64 = "--precision.params float64 --precision.compute float64 --precision.reduce float64"
OPTIONS = (
    f"--lora.rank 3 --lora.quantize nf4 --data.prefetch 0 --transport threads {SIZES} {FLOAT64}"
)


def losses(name: str, out: Path, words: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps of a run."""
    line = f"--model.name {name} {MODEL[name]} {OPTIONS} --out {out} {words}"
    run, _ = prepared(load(shlex.split(line), FAMILIES))
    os.makedirs(out, exist_ok=True)
    events = []

    def rank(comm: Comm) -> None:
        training = build_training(run, comm, stop_requested=lambda: False)
        with EventLog(None) as log:
            if comm.rank == 0:
                log.emit = events.append
            run_training(training, log)

    run_ranks(run.device_mesh, rank, timeout_s=200)
    return [(each["loss"], each["grad_norm"]) for each in events if each["event"] == "step"]


@pytest.mark.parametrize("name", MODEL)
def test_tensor_parallelism_computes_what_one_device_does(name: str, tmp_path: Path) -> None:
    right = losses(name, tmp_path / "one", "--steps 3 --save.every 2")
    head = losses(name, tmp_path / "tp", "--mesh tp2 --steps 2")
    rest = losses(
        name, tmp_path / "tp", "--mesh 'dp2 tp2' --parallel.zero 3 --steps 3 --resume auto"
    )
    assert [*head, *rest] == [pytest.approx(step, rel=1e-9) for step in right]
    stored = [open_checkpoint(tmp_path / out / "ckpt" / "step-000002") for out in ("one", "tp")]
    one, tp = (checkpoint.section("nf4/rows") for checkpoint in stored)
    assert one.shapes == tp.shapes
    assert len(one.shapes) >= 8
    for linear, shape in one.shapes.items():
        whole = Box.whole(shape)
        assert torch.equal(one.read(linear, whole), tp.read(linear, whole)), linear


def test_a_layout_that_would_cut_a_block_is_rejected_before_anything_starts() -> None:
    words = f"--model.name hf:llama --model.dim 128 {OPTIONS} --mesh tp2"
    with pytest.raises(
        PlanError, match=r"tp would cut the blocks of 64 of .*o_proj.*a border at 32"
    ):
        prepared(load(shlex.split(words), FAMILIES))
