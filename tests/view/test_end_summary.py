"""The last lines of a run: time, speed, loss, and commands for what it has left."""

from __future__ import annotations

from typing import Any

import pytest

from weft.view.end_summary import end_summary
from weft.view.progress import Progress

RUN = {"event": "run", "out": "runs/a b", "data": {"tokens": 9, "samples": 3}, "steps": 2}
STEPS = [
    {"event": "step", "step": 1, "loss": 5.0, "tokens": 1000, "step_s": 3.0},
    {"event": "step", "step": 2, "loss": 4.5, "tokens": 1000, "step_s": 1.0},
]
END = {"event": "end", "status": "finished", "seconds": 65.0, "steps": 2, "checkpoint": "x"}


def summary_of(*events: dict[str, Any]) -> list[tuple[str, str]]:
    progress = Progress()
    for event in events:
        progress.update(event)
    return end_summary(progress)


def test_a_run_that_has_finished_says_how_it_went_and_what_is_next() -> None:
    assert summary_of(RUN, *STEPS, {**END, "best_loss": 4.25, "best_step": 1}) == [
        ("trained", "2 steps in 1:05, 2,000 tokens, 500 tokens/s"),
        ("loss", "5.0000 to 4.5000 nats; best evaluation 4.2500 after step 1"),
        ("its page", "weft report 'runs/a b'"),
        ("its text", "weft generate 'runs/a b' --prompt 'def ' --tokens 40"),
    ]


@pytest.mark.parametrize(
    ("data_format", "command"),
    [
        ("chat", ("its chat", "weft chat 'runs/a b'")),
        ("instruction", ("its chat", "weft chat 'runs/a b'")),
        ("chat, instruction", ("its chat", "weft chat 'runs/a b'")),
        ("chat, prompt", ("its text", "weft generate 'runs/a b' --prompt 'def ' --tokens 40")),
        ("prompt", ("its text", "weft generate 'runs/a b' --prompt 'def ' --tokens 40")),
    ],
)
def test_a_model_of_conversations_is_talked_to(data_format: str, command: tuple[str, str]) -> None:
    data = {"tokens": 9, "conversations": 3, "format": data_format}
    assert summary_of({**RUN, "data": data}, *STEPS, END)[-1] == command


@pytest.mark.parametrize(
    "events",
    [
        ({**RUN, "data": {"samples": 3}}, *STEPS, END),  # images
        ({**RUN, "data": {"pairs": 3}}, *STEPS, END),
        (RUN, *STEPS, {**END, "checkpoint": None}),
    ],
)
def test_text_is_generated_from_a_stored_model_of_text(events: tuple[dict[str, Any], ...]) -> None:
    assert [text for label, text in summary_of(*events) if label.startswith("its")] == [
        "weft report 'runs/a b'"
    ]


@pytest.mark.parametrize(
    "events",
    [
        (RUN, *STEPS),
        (RUN, *STEPS, {**END, "status": "stopped"}),
        (RUN, *STEPS, {**END, "status": "failed"}),
        (RUN, END),  # nothing was left to train
    ],
)
def test_other_ends_have_their_own_line(events: tuple[dict[str, Any], ...]) -> None:
    assert summary_of(*events) == []
