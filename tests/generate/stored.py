"""Runs on disk for the tests of the command: a folder with run.toml and one untrained checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.generate.models import stored
from tests.one_device import plain_model
from weft.checkpoint.commit import commit
from weft.checkpoint.folder import checkpoint_path, temporary_path
from weft.checkpoint.format import Facts
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.config.toml import dump
from weft.core.axes import Box
from weft.models import FAMILIES

STEP = 3
TINY = ("--model.layers", "2", "--model.dim", "32")


def write_run(out: Path, *words: str) -> Run:
    """A run's folder as training leaves it before the first checkpoint."""
    run = load([*TINY, *words], FAMILIES)
    out.mkdir(parents=True)
    (out / "run.toml").write_text(dump(run))
    return run


def write_checkpoint(out: Path, run: Run) -> Path:
    """The run's model as it starts, as a checkpoint in its folder."""
    blocks = plain_model(FAMILIES[run.model.name], run.model, seed=run.seed, dtype=torch.float32)
    source = stored(run.model, blocks)
    held = [
        WriteItem(
            name=f"model/{name}", shape=shape, box=Box.whole(shape), tensor=source.tensors[name]
        )
        for name, shape in source.shapes.items()
    ]
    final = checkpoint_path(out, STEP)
    start_write(temporary_path(final), 0, held).wait()
    facts = Facts(
        step=STEP,
        seed=run.seed,
        family=run.model.name,
        architecture=run.model.architecture,
        plan=json.loads(plan_of(run).to_json()),
        run=run.model_dump(mode="json"),
    )
    commit(temporary_path(final), final, facts, ranks=1)
    return final
