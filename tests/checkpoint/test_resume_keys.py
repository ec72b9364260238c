"""Config keys that must be equal at a resume, from manifests alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.checkpoint.format import Facts
from weft.checkpoint.resume import _key_changes
from weft.config.schema import DpoConfig


def changed_keys(stored: dict[str, Any], dpo: DpoConfig) -> list[tuple[str, str]]:
    """Key and fix of each fault of a run on pairs that resumes from a checkpoint with these keys."""
    facts = Facts(step=1, seed=1, family="llama3", architecture={}, plan={}, run=stored)
    config = {"loss": "dpo", "dpo": dpo.model_dump(mode="json")}
    return [(fault.key, fault.fix) for fault in _key_changes(config, facts, Path("ckpt"))]


@pytest.mark.parametrize(
    ("dpo", "key", "fix"),
    [
        (DpoConfig(loss_type="simpo", gamma=0.7, beta=2.0), "dpo.beta", "--dpo.beta 0.1"),
        (DpoConfig(loss_type="orpo", gamma=0.7), "dpo.loss_type", "--dpo.loss_type simpo"),
        (DpoConfig(loss_type="simpo"), "dpo.gamma", "--dpo.gamma 0.7"),
        (
            DpoConfig(loss_type="simpo", gamma=0.7, label_smoothing=0.1),
            "dpo.label_smoothing",
            "--dpo.label_smoothing 0.0",
        ),
    ],
)
def test_every_key_of_the_loss_of_pairs_is_compared(dpo: DpoConfig, key: str, fix: str) -> None:
    stored = DpoConfig(loss_type="simpo", gamma=0.7)
    run = {"loss": "dpo", "dpo": stored.model_dump(mode="json")}
    assert changed_keys(run, dpo) == [(key, fix)]
    assert changed_keys(run, stored) == []


def test_a_checkpoint_of_an_earlier_version_was_trained_with_the_loss_of_dpo() -> None:
    stored = {"loss": "dpo", "dpo": {"beta": 0.1}}
    assert changed_keys(stored, DpoConfig()) == []
    faults = changed_keys(stored, DpoConfig(loss_type="hinge"))
    assert faults == [("dpo.loss_type", "--dpo.loss_type sigmoid")]


def test_an_imported_model_is_trained_with_any_loss_of_pairs() -> None:
    assert changed_keys({}, DpoConfig(loss_type="orpo", beta=0.3)) == []
