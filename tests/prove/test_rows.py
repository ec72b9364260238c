"""What a reduced proof keeps of a run: rows of its data with their masks, both cases of clipping, a user's ids and lengths."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.prove.faults import FLOAT64
from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.data.conversations import ConversationSamples, _RowArrays
from weft.models import FAMILIES
from weft.prove import user_model
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase, reduced_case


def run_of(words: str) -> Run:
    return load(shlex.split(words), FAMILIES)


def proof_of(words: str, *, steps: int = 1) -> ProofReport:
    return prove(reduced_case(run_of(words), steps).opened())


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Flags of a run on conversations that are longer than the sequences of a proof."""
    rows = []
    for number in range(40):
        question = {"role": "user", "content": f"question {number} " * 4}
        answer = {"role": "assistant", "content": f"answer {number} " * (1 + number % 4)}
        rows.append(json.dumps({"messages": [question, answer]}) + "\n")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(rows))
    keys = f"--data.source {path} --data.format chat --data.chat_template chatml"
    return f"{keys} --data.seq_len 256 --mesh dp2 {FLOAT64}"


def test_rows_of_the_run_are_proved_with_their_documents_and_masks(chats: str) -> None:
    subject = reduced_case(run_of(chats), 1).opened()
    assert isinstance(subject.samples, ConversationSamples)
    assert subject.run.data.seq_len == 32
    assert prove(subject).holds


def test_an_answer_mask_that_is_lost_is_seen(chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = _RowArrays.put

    def put(row: Any, place: int, number: int, tokens: Any, mask: Any, **label: Any) -> None:
        right(row, place, number, tokens, mask | 1, **label)

    monkeypatch.setattr(_RowArrays, "put", put)
    first = proof_of(chats).first
    assert first is not None
    assert (first.phase, first.tensor) == ("batch", "targets")


def test_the_last_step_is_not_clipped_and_the_others_are() -> None:
    subject = reduced_case(run_of(f"--mesh dp2 {FLOAT64}"), 2).opened()
    task = subject.task()
    assert 0 < task.clip_of(1) < 1 < task.clip_of(2)
    assert replace(task, first_unclipped=None).clip_of(2) == task.clip_of(1)


def test_a_user_model_keeps_its_vocabulary_and_the_length_of_the_run() -> None:
    words = f"{user_model.__file__} --mesh cp2 --model.vocab 2048 --model.layers 9"
    small = reduced(run_of(f"{words} --data.seq_len 256"), lambda *_: True)
    assert small.model.architecture["vocab"] == 2048
    assert small.model.architecture["layers"] == 3
    assert small.data.seq_len == 256
    long = reduced(run_of(f"{words} --data.seq_len 8192"), lambda *_: True)
    assert 256 <= long.data.seq_len < 8192, "where it is cheap"


def test_the_command_of_a_case_repeats_its_rows() -> None:
    case = reduced_case(run_of("--mesh dp2"), 2)
    assert case.command.endswith("--rows short")
    assert "--rows" not in ProofCase(case.run, 2).command


@pytest.mark.parametrize("global_size", [4, 64])
def test_an_epoch_of_short_rows_ends_within_the_third_step(global_size: int) -> None:
    run = run_of(f"--mesh dp2 --batch.global_size {global_size} --data.seq_len 64")
    subject = reduced_case(run, 3).opened()
    steps = subject.samples.num_samples / subject.run.batch.global_size
    assert 2 < steps < 3
