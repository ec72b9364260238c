"""Digests of tensors in memory: they add up over any boxes, any change shows, and a wrong save or load is rejected."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saving import save
from tests.checkpoint.states import DTYPES, bits, cut
from tests.matrix.layouts import LR, Case, batches
from tests.one_device import micro_batches
from weft.checkpoint import state
from weft.checkpoint.format import DIGEST, MANIFEST
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.tensor_digest import CHUNK_ENTRIES, MODULUS, digest_of_box
from weft.checkpoint.write_item import WriteItem
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.errors import CheckpointError
from weft.python_api import prove
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("fast_disk")


def digest(tensor: torch.Tensor) -> int:
    return int(digest_of_box(tensor, Box.whole(tensor.shape))) % MODULUS


@given(
    shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
    dtype=st.sampled_from((*DTYPES, torch.int32, torch.uint8)),
    seed=st.integers(0, 2**32),
)
def test_the_digests_of_any_boxes_add_up(shape, dtype, seed):
    tensor = bits(shape, dtype=dtype, seed=seed % 97)
    parts = 0
    for box in cut(Box.whole(shape), random.Random(seed)):
        parts += int(digest_of_box(tensor[box.slices], box))
    assert parts % MODULUS == digest(tensor)


@pytest.mark.parametrize("shape", [(3, CHUNK_ENTRIES + 5), (CHUNK_ENTRIES + 5, 3), (40, 50, 60)])
def test_the_digests_of_large_boxes_add_up(shape):
    tensor = torch.randn(shape)
    last = len(shape) - 1
    half = shape[last] // 2
    parts = 0
    for lo, hi in ((0, half), (half, shape[last])):
        box = Box((0,) * last + (lo,), (*shape[:last], hi))
        parts += int(digest_of_box(tensor[box.slices], box))
    assert parts % MODULUS == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_change_of_one_bit_or_of_the_order_changes_the_digest(dtype):
    square = torch.randn(24, 24).to(dtype)
    right = digest(square)
    others = [square.T, square.flip(0), square.flip(1), square.roll(1, 0), -square]
    for row in range(24):
        changed = square.clone()
        raw = changed.view(torch.uint8)
        raw[row, row] ^= 1 << (row % 8)
        others.append(changed)
    assert right not in [digest(other) for other in others]


def trained(case: Case, comm: Comm) -> TrainStep:
    step = build_step(case.run, comm)
    batch = batches(case)[0]
    step(micro_batches(batch, step.model.plan, comm.rank), lr=LR)
    return step


def save_initial(case: Case, folder: Path, comm: Comm) -> None:
    save(build_step(case.run, comm), folder, case.run)


def test_equal_states_have_equal_digests_under_every_layout(tmp_path):
    found = []
    for number, mesh in enumerate(("", "dp3", "pp2 tp2", "dp2 tp2")):
        case = Case(mesh, family="gpt2", microbatches=6, zero=1 if "dp" in mesh else 0)
        folder = tmp_path / str(number) / "step-000000"
        run_ranks(case.mesh, partial(save_initial, case, folder))
        checkpoint = open_checkpoint(folder)
        assert checkpoint.manifest.digests.keys() == checkpoint.manifest.tensors.keys()
        found.append(checkpoint.manifest.digests)
        for name, known in checkpoint.manifest.digests.items():
            section, _, owner = name.rpartition("/")
            shape = checkpoint.manifest.tensors[name].shape
            whole = checkpoint.section(section).read(owner, Box.whole(shape))
            assert digest(whole) == known, name
    assert all(digests == found[0] for digests in found)


def first_share_of_every_replica(local: state.ParamState):
    """The planted fault: every replica writes the values of the first share into its own box."""
    first = replace(local, replica=0)
    values = {item.name: item.tensor.reshape(-1) for item in right_items(first)}
    for item in right_items(local):
        entries = values.get(item.name, item.tensor.reshape(-1))
        if entries.numel() >= item.tensor.numel() > 1:
            wrong = entries[: item.tensor.numel()].view(item.box.shape)
            item = WriteItem(item.name, item.shape, item.box, wrong)
        yield item


right_items = state.ParamState.write_items


def save_sharing(step: TrainStep, folder: Path, case: Case, *, entries: int) -> None:
    """Save with replicas that share pieces of so many entries."""
    right = step.state
    step.state = lambda: replace(right(), min_shared_entries=entries)
    save(step, folder, case.run, done=1)
    step.state = right


@pytest.mark.parametrize("reader", ["dp3", "tp2", ""])
def test_a_wrong_share_of_a_replica_is_rejected_by_every_layout(reader, tmp_path, monkeypatch):
    case = Case("dp3", family="gpt2", microbatches=6)
    folder = tmp_path / "step-000001"
    monkeypatch.setattr(state.ParamState, "write_items", first_share_of_every_replica)
    run_ranks(case.mesh, lambda comm: save_sharing(trained(case, comm), folder, case, entries=64))
    monkeypatch.undo()
    open_checkpoint(folder).verify()  # every byte is as it was written
    other = Case(reader, family="gpt2", microbatches=6)

    def read(comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            build_step(other.run, comm).restore(open_checkpoint(folder))
        return str(error.value)

    for text in run_ranks(other.mesh, read):
        assert "what was loaded differs from what training held when it was saved" in text
        assert "model/embed.tok.weight" in text


def test_shared_pieces_hold_the_values_of_every_replica(tmp_path):
    case = Case("dp3", family="gpt2", microbatches=6)

    def rank(comm: Comm) -> None:
        step = trained(case, comm)
        for entries, name in ((64, "shared"), (2**14, "alone")):
            save_sharing(step, tmp_path / name / "step-000001", case, entries=entries)

    run_ranks(case.mesh, rank)
    shared, alone = (
        open_checkpoint(tmp_path / name / "step-000001") for name in ("shared", "alone")
    )
    assert shared.manifest.digests == alone.manifest.digests
    several = 0
    for name, stored in shared.manifest.tensors.items():
        section, _, owner = name.rpartition("/")
        several += len(stored.pieces) > 1
        whole = Box.whole(stored.shape)
        read = [source.section(section).read(owner, whole) for source in (shared, alone)]
        assert torch.equal(*read), name
    assert several > 20


def test_a_proof_saves_pieces_that_replicas_share(monkeypatch):
    model = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 64}
    config = {"mesh": "dp2", "steps": 2, "model": model, "data.seq_len": 16, "batch.global_size": 4}
    assert prove(config, first=2).holds
    monkeypatch.setattr(state.ParamState, "write_items", first_share_of_every_replica)
    report = prove(config, first=2)
    assert not report.holds
    assert report.first is not None
    assert report.first.phase == "checkpoint"


def test_a_checkpoint_without_digests_is_read_as_before(tmp_path):
    case = Case("dp2", family="gpt2")
    folder = tmp_path / "step-000001"
    run_ranks(case.mesh, lambda comm: save(trained(case, comm), folder, case.run, done=1))
    old = open_checkpoint(folder).manifest.model_copy(update={"format": 1, "digests": {}})
    text = old.to_json().replace('"digests":{},', "").encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")

    def read(comm: Comm) -> None:
        build_step(case.run, comm).restore(open_checkpoint(folder))

    run_ranks(case.mesh, read)
