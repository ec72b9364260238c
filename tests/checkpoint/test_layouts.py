"""Checkpoints are independent of the layout: each of eight layouts loads what any of them saved, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import save
from tests.matrix.layouts import MIXTURES, Case, batches
from tests.one_device import micro_batches
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.state import param_states
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.core.axes import Box
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.step import TrainStep

FAMILY = "deepseek"
LR = 1e-2
NUM_STEPS = 2

LAYOUTS = (
    Case("", FAMILY, microbatches=1),
    Case("dp4", FAMILY, microbatches=1),
    Case("tp4", FAMILY, microbatches=1),
    Case("pp4", FAMILY),
    Case("dp2 tp2", FAMILY, zero=3, microbatches=1),
    Case("cp2 tp2", FAMILY, microbatches=1),
    Case("dp2 ep2", FAMILY, zero=1, microbatches=1),
    Case("pp2 dp2 tp2", FAMILY, schedule="interleaved", chunks=2, sequence=True, microbatches=2),
)
"""Of one model with everything in it: experts, routers' biases, a tied embedding that stands on two
pipeline ranks.
"""
QUICK = tuple(LAYOUTS[number] for number in (0, 3, 4, 6))
"""One rank, stages, ZeRO-3 with tensor shards, experts: each cuts other dims."""


@dataclass(frozen=True)
class Entries:
    """Some entries of one stored tensor, as a rank has them."""

    name: str
    box: Box
    values: Tensor


def run_of(case: Case, number: int) -> Run:
    """The run of layout `number`: a seed of its own, so that no two of them ever hold the same
    values.
    """
    return case.run.model_copy(update={"seed": 100 + number})


def trained(case: Case, number: int, comm: Comm) -> TrainStep:
    step = build_step(run_of(case, number), comm)
    for batch in batches(case)[:NUM_STEPS]:
        own = micro_batches(batch, step.model.plan, comm.rank)
        step(own, lr=LR)
    return step


def parameters(step: TrainStep) -> list[Entries]:
    """Whole pieces by global name: gathered by the code that `weft prove` uses, not by the one that
    saves.
    """
    found = step.grads.full_parameters()
    for name, param in step.model.params.items():
        if name not in found:
            found[name] = param.clone()
    entries = []
    for name, values in found.items():
        shard = step.model.shards[name]
        entries.append(Entries(f"model/{shard.owner}", shard.box, values))
    return entries


def moments(step: TrainStep) -> list[Entries]:
    """What the optimizer remembers of the entries here, box by box."""
    found = []
    for part in param_states(step.state()):
        owner = part.param.owner
        sizes = [box.size for box in part.boxes]
        for section, tensor in part.tensors.items():
            if section == "model":
                continue
            of_boxes = tensor.reshape(-1).split(sizes)
            for box, values in zip(part.boxes, of_boxes, strict=True):
                shaped = values.reshape(box.shape).clone()
                found.append(Entries(f"{section}/{owner}", box, shaped))
        for section, number in part.whole.items():
            found.append(Entries(f"{section}/{owner}", Box((), ()), number.clone()))
    return found


def assemble(ranks: list[list[Entries]]) -> dict[str, Tensor]:
    """Whole tensors out of what the ranks hold; copies are equal, and no entry is missing."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for entries in itertools.chain(*ranks):
        end = entries.box.hi
        largest = shapes.get(entries.name, end)
        shapes[entries.name] = tuple(map(max, largest, end))
        dtypes[entries.name] = entries.values.dtype
    whole = {}
    for name, shape in shapes.items():
        whole[name] = torch.full(shape, float("nan"), dtype=dtypes[name])
    for entries in itertools.chain(*ranks):
        name = entries.name
        there = whole[name][entries.box.slices]
        is_same = there.isnan() | (there == entries.values)
        assert bool(is_same.all()), f"copies of {name} differ"
        whole[name][entries.box.slices] = entries.values
    for name, tensor in whole.items():
        assert not bool(tensor.isnan().any()), f"some entry of {name} lies on no rank"
    return whole


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and the tensors as they were in memory."""

    path: Path
    truth: dict[str, Tensor]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory) -> Callable[[Case], Saved]:
    """Layout -> what it saved after two steps."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save_once(case: Case) -> Saved:
        number = LAYOUTS.index(case)
        path = folder / f"step-{number:06d}"

        def rank(comm: Comm) -> list[Entries]:
            step = trained(case, number, comm)
            save(step, path, run_of(case, number))
            return parameters(step) + moments(step)

        return Saved(path, assemble(run_ranks(case.mesh, rank)))

    return save_once


def test_the_checkpoints_differ(saved_by):
    first, second = (saved_by(case).truth for case in QUICK[:2])
    assert first.keys() == second.keys()
    assert not torch.equal(first["model/embed.tok.weight"], second["model/embed.tok.weight"])
    assert {name.partition("/")[0] for name in first} == {"model", "optim"}
    assert any(name.endswith("router.bias") for name in first)
    assert len(first) > 4 * len(MIXTURES)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_what_one_of_four_layouts_saved_this_one_loads_to_the_last_bit(case, saved_by):
    check_loads(case, {writer: saved_by(writer) for writer in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_what_any_layout_saved_this_one_loads_to_the_last_bit(case, saved_by):
    check_loads(case, {writer: saved_by(writer) for writer in LAYOUTS})


def check_loads(case: Case, saved: dict[Case, Saved]) -> None:
    """The ranks of a layout hold what each of the others saved."""
    checkpoints = {writer: open_checkpoint(by.path) for writer, by in saved.items()}

    def rank(comm: Comm) -> tuple[list[Entries], list[str]]:
        step = build_step(run_of(case, 99), comm)
        wrong = []
        for writer, by in saved.items():
            step.restore(checkpoints[writer])
            here = parameters(step) + moments(step)
            for entries in here:
                expected = by.truth[entries.name][entries.box.slices]
                if not torch.equal(expected, entries.values):
                    wrong.append(f"{writer} -> {case}: {entries.name}")
        return here, wrong

    ranks = run_ranks(case.mesh, rank)
    for _, wrong in ranks:
        assert wrong == []
    last = assemble([here for here, _ in ranks])
    *_, last_saved = saved.values()
    assert last.keys() == last_saved.truth.keys(), "nothing is left out"
    for name, right in last_saved.truth.items():
        assert torch.equal(last[name], right)
