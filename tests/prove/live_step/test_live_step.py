"""A step compared with one device while it trains: healthy layouts hold, and faults stop the run before its update."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.data.chat_files import write_jsonl
from tests.tiny_run import MODEL, SEQUENCES
from weft.cli import main
from weft.parallel.context.position_sum import ContextPositionSum
from weft.parallel.zero import grad_norm
from weft.prove.live_step.judgement import Judgement
from weft.train import build
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS
from weft.train.kl_estimate import KlEstimate
from weft.train.step import TrainStep
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

NORMED = Path(__file__).parents[2] / "user_models" / "normed_text.py"
FLOAT64 = tuple(
    word for key in ("params", "compute", "reduce") for word in (f"--precision.{key}", "float64")
)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Trains a tiny run whose first step is compared; the exit code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("weft.start.live_proof.is_proved", lambda run, environ: True)

    def run(*words: str, steps: int = 1) -> int:
        out = str(tmp_path / "run")
        model = () if "--model.name" in words else MODEL
        sizes = (*model, *SEQUENCES, "--batch.global_size", "4", "--transport", "threads")
        return main(["train", *sizes, *words, "--steps", str(steps), "--out", out])

    return run


def verdicts(tmp_path):
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "proof"]


@pytest.mark.parametrize(
    "words",
    [
        '--mesh "pp2 tp2" --parallel.zero 1',
        "--mesh dp2 --parallel.zero 3 --parallel.recompute full --batch.micro_size 2",
        '--mesh "cp2 tp2" --parallel.sequence True --data.packing documents',
        '--mesh "ep2 pp2" --model.name deepseek --model.layers 2 --pipeline.schedule zbv',
        "--mesh dp2 --precision.compute bfloat16 --lora.rank 2",
        '--mesh "site2 dp2" --data.packing documents',
        '--mesh "dp2 tp2" --model.name gpt2 --model.layers 2 --model.vocab 257 --deterministic True',
    ],
)
def test_a_healthy_step_is_equal(train, tmp_path, words):
    types = () if "precision" in words else FLOAT64
    assert train(*shlex.split(words), *types) == 0
    (verdict,) = verdicts(tmp_path)
    assert verdict["verdict"] == "equal"
    assert verdict["gradients"] > 10
    assert 0 <= verdict["closest"] < 1
    assert verdict["text"].startswith("proved equal: this run's first step (4 of 4 sequences, ")


def test_a_step_that_overflows_on_one_device_alone_is_said_and_the_next_is_compared(
    train, tmp_path
):
    """In float16 the embedding adds gradients of a whole sequence, with cp of half of it."""
    words = """--mesh "cp2 dp2" --model.name qwen2 --model.layers 2 --model.dim 32 --model.heads 8
        --model.kv_heads 4 --model.ffn 48 --model.max_seq_len 64 --model.vocab 257 --seed 199
        --model.tied False --data.seq_len 24 --batch.micro_size 2 --optim.name adafactor
        --optim.warmup 0 --precision.compute float16"""
    assert train(*shlex.split(words), steps=2) == 0
    first, second = verdicts(tmp_path)
    assert (first["verdict"], first["step"]) == ("unknown", 1)
    assert "in float16 its gradients overflow on one device" in first["text"]
    assert (second["verdict"], second["step"]) == ("equal", 2)


def test_the_verdict_is_in_the_manifest_and_steps_are_repeated(train, tmp_path):
    assert train("--mesh", "dp2", "--prove.during", "2", steps=4) == 0
    assert [each["step"] for each in verdicts(tmp_path)] == [1, 2, 4]
    manifest = json.loads((tmp_path / "run/ckpt/step-000004/manifest.json").read_text())
    assert manifest["facts"]["proof"]["step"]["verdict"] == "equal"
    assert manifest["facts"]["proof"]["step"]["step"] == 4


def fails(train, tmp_path, capsys, *words) -> str:
    """The error of a run that stops in its first step and has updated nothing."""
    assert train(*words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: step 1 is not what one device computes: "), error
    assert error.count("\n") == 1
    assert not list((tmp_path / "run").glob("ckpt/*"))
    verdicts = [each for each in read_events(tmp_path / "run" / EVENTS) if each["event"] == "proof"]
    assert verdicts[-1]["verdict"] == "different"
    assert str(verdicts[-1]["reason"]) in error
    return error


@pytest.mark.parametrize(
    ("mutant", "words", "named"),
    [
        ("gradients_are_never_reduced", ("--mesh", "dp2"), "reduce of step 1: head.proj.weight"),
        (
            "the_output_of_one_attention_is_not_summed",
            ("--mesh", "tp2"),
            "forward of step 1: layer1.output is different in all 4 sequences",
        ),
    ],
)
def test_planted_faults_are_named(train, tmp_path, capsys, mutant, words, named):
    with planted(all_mutants()[mutant]):
        assert named in fails(train, tmp_path, capsys, *words, *FLOAT64)


@pytest.fixture
def pairs(tmp_path):
    """Flags of a file of preference pairs."""
    records = []
    for number in range(8):
        answers = {"chosen": "it is " * (1 + number % 3), "rejected": "no"}
        records.append({"prompt": f"{number}? ", **answers})
    file = write_jsonl(tmp_path / "pairs.jsonl", records)
    data = ("--data.source", str(file), "--data.format", "preference", "--data.seq_len", "32")
    return ("--loss", "dpo", *data, *FLOAT64)


@pytest.mark.parametrize("loss", ["ipo", "orpo"])
def test_a_step_on_pairs_is_equal(train, tmp_path, pairs, loss):
    assert train("--mesh", "cp2 tp2", "--dpo.loss_type", loss, *pairs) == 0
    (verdict,) = verdicts(tmp_path)
    assert verdict["verdict"] == "equal"
    assert verdict["closest"] < 1


def test_means_over_this_ranks_targets_are_named(train, tmp_path, capsys, pairs, monkeypatch):
    right = ContextPositionSum.forward

    def own_counts(self, sums):
        gains, _, marks = right(self, sums).unbind(0)
        return torch.stack((gains, sums[1], marks))

    monkeypatch.setattr(ContextPositionSum, "forward", own_counts)
    error = fails(train, tmp_path, capsys, "--mesh", "cp2", "--dpo.loss_type", "orpo", *pairs)
    assert "computes: loss of step 1: loss is " in error
    assert " times the right value on ranks 0 1; " in error


@pytest.fixture
def answers(tmp_path):
    """Flags of a file of labelled answers, each step of which is compared."""
    records = [
        {
            "prompt": f"{number}? ",
            "completion": "it is " * (1 + number % 3),
            "label": number % 2 > 0,
        }
        for number in range(12)
    ]
    file = write_jsonl(tmp_path / "answers.jsonl", records)
    data = ("--data.source", str(file), "--data.format", "unpaired", "--data.seq_len", "48")
    rate = ("--optim.lr", "0.01", "--optim.warmup", "0", "--prove.during", "1")
    return ("--loss", "dpo", "--dpo.loss_type", "kto", *data, *rate)


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "cp2 tp2", *FLOAT64),
        ("--mesh", "site2 dp2", *FLOAT64),
        ("--mesh", "pp2 dp2", "--lora.rank", "2", "--lora.dropout", "0.2"),
        ("--mesh", "tp2", "--precision.compute", "bfloat16"),
    ],
)
def test_steps_on_labelled_answers_are_equal(train, tmp_path, answers, words):
    assert train(*words, *answers, steps=3) == 0
    found = [(verdict["step"], verdict["verdict"]) for verdict in verdicts(tmp_path)]
    assert found == [(1, "equal"), (2, "equal"), (3, "equal")]


def test_z0_of_a_model_with_batch_norm_is_that_of_its_running_statistics(train, tmp_path, answers):
    """Before, one device estimated it with statistics of each batch, and step 1 was refused."""
    model = ("--model.name", str(NORMED), "--mesh", "dp2", "--batch.micro_size", "2")
    assert train(*model, *answers, *FLOAT64, steps=3) == 0
    found = [(verdict["step"], verdict["verdict"]) for verdict in verdicts(tmp_path)]
    assert found == [(1, "equal"), (2, "equal"), (3, "equal")]


def test_another_z0_is_named(train, capsys, answers, monkeypatch):
    right = KlEstimate.update

    def lowered(self, batches):
        right(self, batches)
        self.loss.z0 = self.loss.z0 - 0.5

    monkeypatch.setattr(KlEstimate, "update", lowered)
    assert train("--mesh", "dp2", *answers, *FLOAT64, steps=2) == 1
    assert "step 1 is not what one device computes: loss of step 1" in capsys.readouterr().err


def test_noise_is_measured_where_numbers_differ_by_more_than_the_rounding_of_sums(
    train, tmp_path, monkeypatch
):
    noises = []
    right = Judgement.gradient_bound
    monkeypatch.setattr(Judgement, "_bound_without_noise", lambda self, row, **terms: -1.0)
    monkeypatch.setattr(
        Judgement,
        "gradient_bound",
        lambda self, row: noises.append(row.noise.largest) or right(self, row),
    )
    assert train("--mesh", "dp2") == 0
    (verdict,) = verdicts(tmp_path)
    assert verdict["verdict"] == "equal"
    assert 0 < verdict["closest"] < 1
    assert noises[0] == 0
    assert noises[-1] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh", "dp2", *FLOAT64),
        ("--mesh", "dp2"),
        ("--mesh", "site2 dp2", "--site.every", "1", *FLOAT64),
    ],
)
def test_a_gradient_that_is_wrong_on_one_rank_names_rank_and_axis(
    train, tmp_path, monkeypatch, capsys, words
):
    compute = TrainStep.compute

    def with_fault(self, batches, **options):
        computed = compute(self, batches, **options)
        if self.model.comm.rank == 1:
            self.grads.sharded_params["layer0.attn.q.weight"].grad.mul_(0.5)
        return computed

    monkeypatch.setattr(TrainStep, "compute", with_fault)
    error = fails(train, tmp_path, capsys, *words)
    assert (
        "layer0.attn.q.weight gradient is 1/2 times the right values on rank 1 (axis dp)" in error
    )


def test_initial_values_that_are_not_those_of_the_config_are_named(
    train, tmp_path, monkeypatch, capsys
):
    right = build.materialize_params

    def materialize(model, *args, names=None, **options):
        right(model, *args, names=names, **options)
        with torch.no_grad():
            for name in names or ():
                if name == "layer0.attn.q.weight" and model.comm.index("tp") == 1:
                    model.params[name].neg_()

    monkeypatch.setattr(build, "materialize_params", materialize)
    error = fails(train, tmp_path, capsys, "--mesh", "tp2", *FLOAT64)
    assert "layer0.attn.q.weight as used is not the initial value that the config defines" in error


def test_replicas_that_differ_are_named(train, tmp_path, monkeypatch, capsys):
    right = build.materialize_params

    def materialize(model, *args, names=None, **options):
        right(model, *args, names=names, **options)
        if "head.norm.weight" in (names or ()) and model.comm.rank == 1:
            with torch.no_grad():
                model.params["head.norm.weight"].add_(1e-12)

    monkeypatch.setattr(build, "materialize_params", materialize)
    error = fails(train, tmp_path, capsys, "--mesh", "dp2", *FLOAT64)
    assert "head.norm.weight as used is not the same on the ranks that hold copies of it" in error


@pytest.mark.parametrize(
    ("words", "num_updates"),
    [
        ('--mesh "dp2 tp2" --parallel.zero 3 --optim.clip 0.5', 21),
        ('--mesh "pp2 dp2" --parallel.zero 1 --optim.name sgd --optim.warmup 0', 21),
        ("--mesh dp2 --parallel.zero 2 --optim.name lion", 21),
        ("--mesh dp2 --parallel.zero 2 --optim.name muon", 7),
        ("--mesh dp2 --optim.name adafactor", 0),
    ],
)
def test_updates_are_compared_by_formula(train, tmp_path, words, num_updates):
    assert train(*shlex.split(words)) == 0
    (verdict,) = verdicts(tmp_path)
    assert verdict["updates"] == num_updates


@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        ("parameters_are_updated_twice", "embed.tok.weight is updated by 2 times"),
        ("no_weight_decay_under_zero", "embed.tok.weight is updated by "),
        ("norms_decay", "layer0.attn_norm.weight is updated by "),
    ],
)
def test_a_wrong_update_is_named(train, tmp_path, capsys, mutant, named):
    with planted(all_mutants()[mutant]):
        assert train("--mesh", "dp2", "--parallel.zero", "1") == 1
    error = capsys.readouterr().err
    assert f"update of step 1: {named}" in error
    assert "It was not saved. See weft prove " in error
    assert not list((tmp_path / "run").glob("ckpt/*"))


def test_a_wrong_norm_is_named(train, tmp_path, monkeypatch, capsys):
    right = grad_norm.squared_norm
    monkeypatch.setattr(grad_norm, "squared_norm", lambda *args: right(*args) * 4)
    error = fails(train, tmp_path, capsys, "--mesh", "dp2", *FLOAT64)
    assert "norm of step 1: gradient norm is " in error
    assert "2 times the right value" in error
