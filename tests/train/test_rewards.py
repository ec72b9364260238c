"""Rewards of answers: of sums that are known, the same on any layout, in events, lines and series."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.test_finetuning import events_of
from tests.oracle.test_trl import run_of
from tests.oracle.trl_files import CASES, model_folder
from weft.models.common.preference import reward_sums
from weft.track.series import numbers_of
from weft.train.rewards import Rewards
from weft.view.progress import Progress
from weft.view.step_lines import step_line

FIELDS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies", "z0")
CHOSEN = torch.tensor([[1.0, 2.0, 9.0]])
REJECTED = torch.tensor([[2.0, -1.0, 9.0]])


def test_means_are_over_marked_pairs() -> None:
    marks = torch.tensor([[[1, 0], [1, 0], [0, 0]]])
    sums = reward_sums(CHOSEN, REJECTED, marks, has_labels=False)
    assert Rewards.of_sums(sums.tolist()) == Rewards(1.5, 0.5, 1.0, 0.5)


def test_answers_with_labels_are_no_pairs() -> None:
    marks = torch.tensor([[[1, 0], [0, 1], [0, 0]]])
    sums = reward_sums(CHOSEN, REJECTED, marks, has_labels=True)
    rewards = Rewards.of_sums([*sums.tolist(), 0.25])
    assert rewards == Rewards(1.0, 2.0, -1.0, None, 0.25)
    assert rewards.fields() == {
        "rewards_chosen": 1.0,
        "rewards_rejected": 2.0,
        "rewards_margins": -1.0,
        "z0": 0.25,
    }


def test_a_mean_of_no_answers_is_no_number() -> None:
    marks = torch.tensor([[[1, 0], [1, 0], [1, 0]]])
    sums = reward_sums(CHOSEN, REJECTED, marks, has_labels=True)
    assert set(Rewards.of_sums(sums.tolist()).fields()) == {"rewards_chosen"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("rewards") / "model")


def rewards_of(events: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: event[name] for name in FIELDS if name in event} for event in events]


@pytest.mark.parametrize("name", ["orpo", "kto"])
def test_rewards_do_not_depend_on_the_layout(folder: Path, tmp_path: Path, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    words = f"--eval.every 3 --eval.source {folder}/{case.file}.jsonl"
    right = {
        kind: rewards_of(events_of(run_of(case, folder, tmp_path / "one", words), kind))
        for kind in ("step", "eval")
    }
    assert len(right["step"][-1]) == 4
    assert "rewards_margins" in right["eval"][-1]
    for number, mesh in enumerate(("pp2 dp2", "cp2 tp2")):
        run = run_of(case, folder, tmp_path / str(number), f"{words} --mesh '{mesh}'")
        for kind, expected in right.items():
            found = rewards_of(events_of(run, kind))
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_deterministic_rewards_have_the_same_bits_on_any_number_of_data_ranks(
    folder: Path, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == "kto")
    found = [
        rewards_of(
            events_of(
                run_of(
                    case, folder, tmp_path / f"{degree}", f"--deterministic True --mesh dp{degree}"
                ),
                "step",
            )
        )
        for degree in (1, 2, 4)
    ]
    assert found[0] == found[1] == found[2]


def test_a_line_and_a_tracker_show_them() -> None:
    fields = {"rewards_margins": 1.25, "rewards_accuracies": 0.75, "rewards_chosen": 0.5, "z0": 2.0}
    numbers = numbers_of({"event": "step", "step": 1, **fields})
    assert numbers == {
        "train/rewards/margins": 1.25,
        "train/rewards/accuracies": 0.75,
        "train/rewards/chosen": 0.5,
        "train/kl": 2.0,
    }
    step = {
        "loss": 0.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 2,
        "step_s": 1.0,
        "tokens_per_s": 2.0,
    }
    progress = Progress()
    progress.update({"event": "run", "steps": 2, "batch_size": 2, "loss": "dpo"})
    progress.update({"event": "step", "step": 1, **step, **fields})
    assert "margin 1.250  right 75%  z0 2.000" in step_line(progress, elapsed_s=1.0)
