"""Checkpoints of hosts without a shared folder: ranks save one checkpoint in separate folders, and all of them read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import run_facts
from tests.matrix.layouts import LR, Case, batches
from tests.one_device import micro_batches
from weft.checkpoint import transfer
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.saver import Saver
from weft.checkpoint.transfer import distribute, distribute_file, ranks_without_folder
from weft.comm.comm import Comm
from weft.errors import CheckpointError
from weft.testing import run_ranks
from weft.train.build_training import build_step

CASE = Case("pp2 dp2", family="gpt2")


def folder_of(root: Path, rank: int) -> Path:
    """Two hosts with two ranks each."""
    return root / f"host{rank // 2}"


def save_on_two_hosts(root: Path) -> list[list[str]]:
    """One step and a checkpoint; the events of every rank, in short."""

    def rank(comm: Comm) -> list[str]:
        step = build_step(CASE.run, comm)
        folder = folder_of(root, comm.rank)
        separate = ranks_without_folder(comm, folder)
        assert separate == (2, 3)
        saver = Saver(
            comm,
            folder,
            state=step.state,
            facts=run_facts(CASE.run, step),
            every=0,
            keep=2,
            stop_requested=lambda: False,
            separate=separate,
        )
        batch = batches(CASE)[0]
        own = micro_batches(batch, step.model.plan, comm.rank)
        step(own, lr=LR)
        found = []
        for event in saver.finish(1, save=True):
            found.append(f"{event['event']} {event.get('why', '')}")
        return found

    return run_ranks(CASE.mesh, rank)


@pytest.mark.parametrize("chunk", [1000, transfer.CHUNK_BYTES])
def test_one_checkpoint_of_two_hosts_is_on_the_host_of_rank_0(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk)
    assert save_on_two_hosts(tmp_path) == [["save "], [], [], []]
    path = checkpoint_path(tmp_path / "host0", 1)
    open_checkpoint(path).verify()
    assert len(list(path.glob("rank-*.safetensors"))) == 4
    assert not list(checkpoints(tmp_path / "host1"))
    assert not list((tmp_path / "host1" / "ckpt").iterdir())


def test_a_save_that_failed_is_tried_again_on_two_hosts(tmp_path):
    def rank(comm: Comm) -> list[str]:
        step = build_step(CASE.run, comm)
        folder = folder_of(tmp_path, comm.rank)
        saver = Saver(
            comm,
            folder,
            state=step.state,
            facts=run_facts(CASE.run, step),
            every=0,
            keep=2,
            stop_requested=lambda: False,
            separate=ranks_without_folder(comm, folder),
        )
        param = next(iter(step.model.params.values()))
        kept = param.detach().clone()
        if comm.rank < 2:
            param.data.fill_(torch.nan)
        events = list(saver.finish(1, save=True))
        param.data.copy_(kept)
        events += saver.finish(1, save=True, again=True)
        return [event["event"] for event in events]

    assert run_ranks(CASE.mesh, rank)[0] == ["save_failed", "save"]


@pytest.mark.parametrize("mesh", ["dp4", "pp2 tp2"])
@pytest.mark.parametrize("root", [0, 3])
def test_every_host_gets_a_copy_to_resume_from(tmp_path, mesh, root):
    save_on_two_hosts(tmp_path)
    if root == 3:
        (tmp_path / "host0").rename(tmp_path / "saved")
        (tmp_path / "host1").rename(tmp_path / "host0")
        (tmp_path / "saved").rename(tmp_path / "host1")
    source = checkpoint_path(folder_of(tmp_path, root), 1)

    def rank(comm: Comm) -> None:
        run_folder = folder_of(tmp_path, comm.rank)
        distribute(comm, checkpoint_path(run_folder, 1), root=root)

    run_ranks(mesh, rank)
    copy = checkpoint_path(folder_of(tmp_path, 3 - root), 1)
    open_checkpoint(copy).verify()
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in copy.iterdir()) == names
    for name in names:
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_a_host_that_cannot_write_its_copy_is_an_error_on_all_ranks(tmp_path):
    save_on_two_hosts(tmp_path)
    (tmp_path / "host1" / "ckpt").rmdir()
    (tmp_path / "host1" / "ckpt").symlink_to("/proc")

    def rank(comm: Comm) -> None:
        run_folder = folder_of(tmp_path, comm.rank)
        with pytest.raises(Exception, match="host1"):
            distribute(comm, checkpoint_path(run_folder, 1))

    run_ranks("dp4", rank)


@pytest.mark.parametrize("root", [0, 1])
def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path, root):
    """Before one of them waits for the bytes of another: what is measured here is a folder."""
    source = tmp_path / "rank-0.safetensors"
    source.mkdir()
    (source / "entry").touch()

    def rank(comm: Comm) -> None:
        with pytest.raises(CheckpointError, match=r"rank-0\.safetensors.*cannot be sent"):
            distribute_file(comm, source, None, root=root)

    run_ranks("dp2", rank, timeout_s=20)


def test_a_folder_that_cannot_be_written_is_left_to_the_first_save():
    separate = run_ranks("dp2", lambda comm: ranks_without_folder(comm, Path("/proc/run")))
    assert separate == [(), ()]
