"""Evaluation: each sample counts once, the loss is the same under every layout, and training is unchanged."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.one_device import plain_model
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.load import load
from weft.data.dataset import open_data, open_validation
from weft.models import FAMILIES
from weft.models.common.batch import IGNORE, chain
from weft.parallel.pipeline.forward import forward_table
from weft.testing import run_ranks
from weft.train.build import build_data_loader
from weft.train.build_training import build_step
from weft.train.data_loader import whole_batch
from weft.train.evaluate import NO_SAMPLE, Evaluation, batches_of
from weft.train.event_lines import read_events

SIZES = "--batch.global_size 6 --batch.micro_size 1 --data.seq_len 16 --eval.every 1 --steps 4"
FLOAT64 = "--precision.params float64 --precision.compute float64 --precision.reduce float64"
MODEL = {
    "llama3": "--model.layers 4 --model.dim 32 --model.heads 4 --model.kv_heads 2 --model.ffn 48",
    "deepseek": (
        "--model.name deepseek --model.layers 3 --model.first_k_dense 1 --model.dim 32 --model.heads 4 --model.q_lora_rank 12"
        " --model.kv_lora_rank 10 --model.qk_nope_head_dim 6 --model.qk_rope_head_dim 4 --model.v_head_dim 8 --model.ffn 48"
        " --model.experts 8 --model.top_k 2 --model.expert_ffn 16 --model.n_group 4 --model.topk_group 2 --model.mtp_depth 1"
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two text files: to train on, and 413 tokens to evaluate on, 25 samples: four batches of 6 and
    one left.
    """
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text("some text to train on, over and over. " * 40)
    (folder / "valid.txt").write_text(
        "other words, that were never trained upon; " * 9 + "and some that end it so.\n"
    )
    return folder


def run_of(source, words, family="llama3"):
    data = ["--data.source", f"{source}/train.txt", "--eval.source", f"{source}/valid.txt"]
    return load(
        [*data, *SIZES.split(), *FLOAT64.split(), *MODEL[family].split(), *words.split()], FAMILIES
    )


def loader_of(run, comm, samples):
    return build_data_loader(
        samples, comm, run.batch, seed=run.seed, later=run.model.reads_later_targets
    )


def losses(run):
    """Loss before the first step, after it, and after the second; with the loss of the steps
    between.
    """

    def rank(comm: Comm):
        step = build_step(run, comm)
        samples = open_data(run.data, run.model)
        feed = loader_of(run, comm, samples)
        validation = open_validation(run.data, run.model, source=run.eval.source)
        evaluation = Evaluation(
            step.model, loader_of(run, comm, validation), most_batches=run.eval.batches
        )
        found = [evaluation().loss]
        for number in range(2):
            found += [step(feed.batches(number), lr=0.01).loss, evaluation().loss]
        return (*found, evaluation().targets)

    everyone = run_ranks(run.device_mesh, rank)
    assert len(set(everyone)) == 1, "every rank reports the same"
    return everyone[0]


@cache
def alone(source, family):
    return losses(run_of(source, "", family))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--mesh dp3", marks=pytest.mark.slow),
        pytest.param("--mesh pp2 tp2", marks=pytest.mark.slow),
        "--mesh pp2 dp2 --pipeline.schedule zbv --parallel.zero 2",
        "--mesh cp2 --parallel.zero 3",
        "--mesh pp2 --pipeline.schedule interleaved --pipeline.chunks 2 --parallel.recompute full --parallel.zero 3",
        "--mesh tp2 --parallel.sequence True",
    ],
)
def test_the_loss_is_the_same_under_any_layout(source, words):
    expected = alone(source, "llama3")
    found = losses(run_of(source, words))
    assert found == pytest.approx(expected, rel=1e-9)
    assert found[-1] == expected[-1]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--mesh ep2", marks=pytest.mark.slow),
        pytest.param("--mesh pp2 --pipeline.schedule zero_bubble", marks=pytest.mark.slow),
    ],
)
def test_experts_and_later_targets_do_not_change_that(source, words):
    assert losses(run_of(source, words, "deepseek")) == pytest.approx(
        alone(source, "deepseek"), rel=1e-9
    )


@pytest.mark.parametrize("family", ["llama3", "deepseek"])
def test_it_is_the_mean_over_the_whole_source_of_the_plain_model(source, family):
    run = run_of(source, "", family)
    samples = open_validation(run.data, run.model, source=run.eval.source)
    assert samples.num_samples % run.batch.global_size
    batch = whole_batch(
        samples, np.arange(samples.num_samples), later=run.model.reads_later_targets
    )
    blocks = plain_model(FAMILIES[family], run.model, seed=run.seed, dtype=torch.float64)
    with torch.no_grad():
        total = chain(blocks, batch.inputs, batch).x.item()
        mean = total / batch.num_targets().item()
    found = alone(source, family)
    assert found[0] == pytest.approx(mean, rel=1e-12)
    assert found[-1] == samples.num_samples * 16


def test_training_does_not_notice(source):
    """The steps between evaluations are those of a run without any."""
    run = run_of(source, "--mesh dp2 --parallel.zero 3")

    def rank(comm: Comm):
        step = build_step(run, comm)
        samples = open_data(run.data, run.model)
        feed = loader_of(run, comm, samples)
        return [step(feed.batches(number), lr=0.01).loss for number in range(2)]

    with_evaluations = losses(run)
    actual = run_ranks(run.device_mesh, rank)[0]
    assert actual == [with_evaluations[1], with_evaluations[3]]


def test_batches_count_every_sample_once():
    batches = list(batches_of(25, 6, most=0))
    values = np.concatenate(batches)[:25].tolist()
    assert values == list(range(25))
    values = batches[-1].tolist()
    assert values == [24, *[NO_SAMPLE] * 5]
    assert len(list(batches_of(25, 6, most=2))) == 2


def test_a_sample_that_is_none_has_no_targets(source):
    run = run_of(source, "")
    samples = open_validation(run.data, run.model, source=run.eval.source)
    chosen = np.array([3, NO_SAMPLE])
    batch = whole_batch(samples, chosen, later=False)
    assert (batch.targets[0] != IGNORE).all()
    assert (batch.targets[1] == IGNORE).all()


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zero_bubble", "zbv", "dual_pipe_v", "interleaved"]
)
def test_the_forwards_of_every_schedule_are_all_there(schedule):
    from weft.schedule.catalog import make_table
    from weft.schedule.lower import check_rendezvous, lower

    table = forward_table(make_table(schedule, ranks=4, microbatches=8, chunks=None))
    acts = [act for row in table.rows for act in row]
    expected = {(s, m) for s in range(table.num_stages) for m in range(8)}
    assert {(act.stage, act.mb) for act in acts} == expected
    assert len(acts) == 8 * table.num_stages
    check_rendezvous(lower(table))


def test_the_events_and_lines_of_a_run_agree(tmp_path, capsys):
    rows = "".join(
        json.dumps({"text": f"{number} bottles of beer on the wall, " * 3}) + "\n"
        for number in range(60)
    )
    (tmp_path / "a.jsonl").write_text(rows)
    prepared = str(tmp_path / "prepared")
    out = str(tmp_path / "run")
    assert (
        main(["data", "prepare", f"{tmp_path}/a.jsonl", "--out", prepared, "--valid", "0.2"]) == 0
    )
    data = [
        "--data.source",
        prepared,
        "--data.packing",
        "documents",
        "--data.seq_len",
        "32",
        "--sample",
        "3",
    ]
    words = [*data, "--eval.every", "2", "--steps", "5", "--out", out, *MODEL["llama3"].split()]
    capsys.readouterr()
    assert main(["train", "--mesh", "dp2", "--transport", "threads", *words]) == 0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    found = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in found] == [2, 4, 5]
    assert found[0]["loss"] > found[2]["loss"]
    for event in found:
        assert event["perplexity"] == pytest.approx(np.exp(event["loss"]))
    assert len({event["tokens"] for event in found}) == 1
    told = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("evaluated after step")
    ]
    assert len(told) == 3
    assert (
        f"loss {found[2]['loss']:.4f} nats, perplexity {found[2]['perplexity']:.2f}, {found[2]['tokens']:,}"
        in told[2]
    )


@pytest.mark.parametrize("linears", ["default", "fp8"])
def test_a_checkpoint_has_the_validation_loss_of_its_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], linears: str
) -> None:
    """`weft eval` computes as the run does, its linears and experts in fp8 too; with a number type that
    is asked for all in that type.
    """
    out = str(tmp_path / "run")
    data = ["--data.source", f"{source}/train.txt", "--eval.source", f"{source}/valid.txt"]
    words = [*data, *SIZES.split(), "--model.name", "qwen3-moe", "--precision.linears", linears]
    ranks = ["--mesh", "ep2", "--transport", "threads"]
    assert main(["train", *ranks, *words, "--prove.before", "never", "--out", out]) == 0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    of_run = [event["loss"] for event in events if event["event"] == "eval"][-1]
    capsys.readouterr()

    def evaluated(*words: str) -> float:
        assert main(["eval", out, *words, "--batch_size", "6", "--json"]) == 0
        loss: float = json.loads(capsys.readouterr().out)["loss"]
        return loss

    assert evaluated(*ranks) == of_run
    in_float32 = evaluated("--dtype", "float32", *ranks)
    assert (in_float32 == of_run) == (linears == "default")
    assert in_float32 == pytest.approx(of_run, rel=1e-2)
    assert evaluated("--transport", "threads") == pytest.approx(of_run, rel=1e-3)
