"""The text that a run generates at its end equals that of the plain model, for every family and layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generate.models import (
    CONFIGS,
    DRAWN,
    SEED,
    Generation,
    config_of,
    plain,
    plan_of,
    stored,
)
from weft.cli import main
from weft.comm.comm import Comm
from weft.errors import EXIT_OK
from weft.generate.decode import Decoder
from weft.models import FAMILIES
from weft.testing import run_ranks
from weft.train.build import build_model

LAYOUTS = [
    ("deepseek", "pp2 ep2", {}),
    ("llama3", "cp2 tp2", {"context": "ring"}),
    ("gpt2", "cp2 tp2", {"context": "allgather", "sequence_parallel": True}),
    ("llama3", "pp2 cp2", {"context": "ulysses"}),
    ("gpt2", "dp2 tp2", {"zero": 1, "sequence_parallel": True}),
    ("llama3", "dp2", {"recompute": "full"}),
]


@pytest.mark.parametrize(
    ("family", "mesh", "options"), [*((family, "", {}) for family in CONFIGS), *LAYOUTS]
)
def test_a_model_on_its_training_layout_generates_the_plain_models_text(family, mesh, options):
    config = config_of(family)
    source = stored(config, plain(config))
    plan = plan_of(config, mesh).model_copy(update={"seq_len": 8, **options})
    generation = Generation(prompts=((4, 9, 2),), num_tokens=12, sampling=DRAWN)
    texts, _ = generation.reference(config)

    def rank(comm: Comm) -> list[list[int]]:
        model = build_model(FAMILIES[family], config, plan, comm, seed=SEED, source=source)
        decoder = Decoder(
            model,
            vocab=config.axis_sizes()["vocab"],
            max_positions=getattr(config, "max_seq_len", None),
        )
        generated, _ = generation(decoder)
        return generated

    assert run_ranks(mesh, rank) == [texts] * plan.mesh.size


def test_weft_train_samples_at_its_end_the_same_text_on_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [
        "--model.layers",
        "2",
        "--model.dim",
        "32",
        "--data.seq_len",
        "16",
        "--transport",
        "threads",
    ]
    words += [
        "--batch.global_size",
        "2",
        "--batch.micro_size",
        "1",
        "--steps",
        "2",
        "--sample",
        "20",
    ]
    for kind in ("params", "compute", "reduce"):
        words += [f"--precision.{kind}", "float64"]
    texts = set()
    for mesh in ("", "cp2", "dp2 tp2"):
        out = tmp_path / f"run {mesh}"
        assert main(["train", *words, "--mesh", mesh, "--out", str(out)]) == EXIT_OK, (
            capsys.readouterr().err
        )
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        (event,) = [event for event in events if event["event"] == "sample"]
        assert event["prompt"] == "def "
        texts.add(event["text"])
    assert len(texts) == 1
