"""Checkpoints are independent of the layout: each of eight layouts loads what any of them saved, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import save
from tests.matrix.layouts import MIXTURES, Case, batches
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.state import param_states
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.core.axes import Box
from weft.prove.layout import micro_batches
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[dict[str, Tensor]]]:
    """A checkpoint of every layout after two steps, and the tensors as they were in memory."""
    folder = tmp_path_factory.mktemp("saved")
    truth = []
    for number, case in enumerate(LAYOUTS):

        def rank(
            comm: Comm,
            case: Case = case,
            number: int = number,
        ) -> list[Entries]:
            step = trained(case, number, comm)
            final = folder / f"step-{number:06d}"
            save(step, final, run_of(case, number))
            return parameters(step) + moments(step)

        ranks = run_ranks(case.mesh, rank)
        truth.append(assemble(ranks))
    return folder, truth


def test_the_checkpoints_differ(saved):
    first, second = saved[1][:2]
    assert first.keys() == second.keys()
    assert not torch.equal(first["model/embed.tok.weight"], second["model/embed.tok.weight"])
    assert {name.partition("/")[0] for name in first} == {"model", "optim"}
    assert any(name.endswith("router.bias") for name in first)
    assert len(first) > 4 * len(MIXTURES)


def readers() -> Iterator[object]:
    """Every layout; those whose parts others have too are for `make slow`."""
    for case in LAYOUTS:
        is_slow = case.mesh in ("dp4", "tp4", "cp2 tp2")
        yield pytest.param(case, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("case", list(readers()), ids=str)
def test_what_any_layout_saved_this_one_loads_to_the_last_bit(case, saved):
    folder, truth = saved
    paths = [folder / f"step-{number:06d}" for number in range(len(LAYOUTS))]
    checkpoints = [open_checkpoint(path) for path in paths]

    def rank(comm: Comm) -> tuple[list[Entries], list[str]]:
        step = build_step(run_of(case, 99), comm)
        wrong = []
        for number, right in enumerate(truth):
            step.restore(checkpoints[number])
            here = parameters(step) + moments(step)
            for entries in here:
                expected = right[entries.name][entries.box.slices]
                if not torch.equal(expected, entries.values):
                    wrong.append(f"{LAYOUTS[number]} -> {case}: {entries.name}")
        return here, wrong

    ranks = run_ranks(case.mesh, rank)
    for _, wrong in ranks:
        assert wrong == []
    last = assemble([here for here, _ in ranks])
    assert last.keys() == truth[-1].keys(), "nothing is left out"
    for name, right in truth[-1].items():
        assert torch.equal(last[name], right)
