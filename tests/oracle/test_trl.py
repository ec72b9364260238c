"""Fine-tuning equals TRL: its tokens, masks and losses of the same records, from tests/golden/trl.json (see trl_figures.py)."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.test_finetuning import FLOAT64, OPTIM, events_of
from tests.oracle.trl_files import CASES, STEPS, TrlCase, model_folder
from weft.config.load import load
from weft.config.run import Run
from weft.data.conversations import ConversationSamples
from weft.data.dataset import open_data
from weft.models import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden" / "trl.json"
BOS, EOS = 280, 281
SAME = [case for case in CASES if case.trainer != "ORPO"]
ORPO = [case for case in CASES if case.trainer == "ORPO"]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())["figures"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("trl") / "model")


def run_of(case: TrlCase, folder: Path, out: Path, words: str = "") -> Run:
    """A run whose steps have all records of the file."""
    line = (
        f"--model.from_hf {folder} --data.source {folder}/{case.file}.jsonl --data.format auto"
        f" --data.tokenizer {folder} --data.seq_len 256 --data.packing single --data.prefetch 0"
        f" --transport threads --steps {STEPS} --out {out} {FLOAT64} {OPTIM} {case.words} {words}"
    )
    probe = load(shlex.split(f"{line} --mesh '' --batch.global_size 1"), FAMILIES)
    size = open_data(probe.data, probe.model).num_samples
    return load(shlex.split(f"{line} --batch.global_size {size} --batch.micro_size 1"), FAMILIES)


def documents(samples: Any) -> list[list[list[int]]]:
    assert isinstance(samples, ConversationSamples)
    stream = samples.data.stream
    bounds = stream.document_bounds[: len(stream.document_bounds)].tolist()
    return [
        [
            stream.read(start, stop).tolist(),
            (samples.data.mask[start:stop] > 0).astype(int).tolist(),
        ]
        for start, stop in pairwise(bounds)
    ]


@pytest.mark.parametrize(
    "case", [case for case in SAME if case.name != "sft_packed"], ids=lambda case: case.name
)
def test_tokens_and_masks_are_those_of_trl(
    case: TrlCase, folder: Path, figures: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(case, folder, tmp_path)
    records = figures[case.name]["documents"]
    assert documents(open_data(run.data, run.model)) == [
        each for record in records for each in record
    ]


@pytest.mark.parametrize("words", ["", "--mesh dp2", "--mesh 'cp2 tp2'"])
@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_losses_are_those_of_trl(
    case: TrlCase, folder: Path, figures: dict[str, Any], tmp_path: Path, words: str
) -> None:
    steps = events_of(run_of(case, folder, tmp_path, words), "step")
    expected = figures[case.name]["losses"]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-9)
    for step, logged in zip(steps, figures[case.name]["logged"], strict=True):
        names = {name: "z0" if name == "kl" else name.replace("/", "_") for name in logged}
        found = {
            name: value for name, value in step.items() if name[:8] == "rewards_" or name == "z0"
        }
        right = {names[name]: value for name, value in logged.items()}
        assert found == pytest.approx(right, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("case", ORPO, ids=lambda case: case.name)
def test_orpo_reads_what_trl_reads_between_a_beginning_and_an_end(
    case: TrlCase, folder: Path, figures: dict[str, Any], tmp_path: Path
) -> None:
    """TRL's `ORPOTrainer` adds both to what a template renders, too."""
    run = run_of(case, folder, tmp_path)
    right = [each for record in figures[case.name]["documents"] for each in record]
    for (ids, _), (tokens, _) in zip(documents(open_data(run.data, run.model)), right, strict=True):
        begin = [] if ids[0] == BOS else [BOS]
        end = [] if ids[-1] == EOS else [EOS]
        assert [*begin, *ids, *end] == tokens
