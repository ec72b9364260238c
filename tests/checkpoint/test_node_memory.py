"""Snapshots in the memory of several nodes: each is copied to another node, so the loss of one node loses no step."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_memory import steps_of, train
from tests.tiny_run import TINY
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.format import data_file_name
from weft.checkpoint.holders import HolderShift, choose_holders
from weft.checkpoint.node_memory import FACTS, NodeMemory, _pieces_here, _shift_file
from weft.checkpoint.pieces import NO_STEP, Pieces, first_holders, newest_whole, pieces_in, text_of
from weft.checkpoint.resume import AUTO
from weft.comm.comm import Comm
from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.errors import CheckpointError
from weft.run import node_folder
from weft.run.node_folder import open_node_folder
from weft.run.rank_status import StatusBoard
from weft.run.world import Attempt
from weft.start.checked_run import load_checked_run
from weft.testing import run_ranks

NUM_STEPS = 5
NODES = ("left", "right")

# ------------------------------------------------------------------------------------------ the choice of holders


@pytest.mark.parametrize(
    ("mesh", "nodes", "holders"),
    [
        ("dp2 pp2 tp2", "AAAABBBB", HolderShift("dp", 1)),
        ("tp4", "AABB", HolderShift("tp", 2)),
        ("dp2 tp2", "ABAB", HolderShift("tp", 1)),
        ("dp2 tp2", "ABBA", HolderShift("dp", 1)),
        ("pp2 dp2", "ABCD", HolderShift("pp", 1)),
        ("dp2 tp3", "AABBCC", HolderShift("dp", 1)),
        ("dp3", "AAB", None),
        ("dp4", "AAAA", None),
        ("", "A", None),
    ],
)
def test_the_holder_of_every_rank_is_on_another_node(mesh, nodes, holders):
    assert choose_holders(Mesh.parse(mesh), nodes) == holders


@given(degrees=st.lists(st.integers(1, 4), min_size=3, max_size=3), ranks_a_node=st.integers(1, 8))
def test_nodes_of_equal_size_always_have_holders_on_other_nodes(degrees, ranks_a_node):
    dp, pp, tp = degrees
    mesh = Mesh.parse(f"dp{dp} pp{pp} tp{tp}")
    num_nodes, rest = divmod(mesh.size, ranks_a_node)
    nodes = [str(rank // ranks_a_node) for rank in range(mesh.size)]
    found = choose_holders(mesh, nodes)
    if not rest and num_nodes > 1:
        assert found is not None
    if found is None:
        return
    for group in mesh.iter_groups(found.axis):
        for place, rank in enumerate(group):
            holder = group[(place + found.shift) % len(group)]
            assert nodes[holder] != nodes[rank]


def test_the_newest_snapshot_of_which_every_file_is_left():
    whole = Pieces(ranks=4, held=(0, 1, 2, 3))
    first_half = Pieces(ranks=4, held=(0, 1))
    second_half = Pieces(ranks=4, held=(2, 3))
    assert newest_whole([{8: whole, 6: whole}, {8: whole}]) == 8
    assert newest_whole([{8: second_half, 6: whole}, {6: second_half}]) == 6
    assert newest_whole([{8: second_half}, {8: first_half}]) == 8
    assert newest_whole([{8: second_half}, {}]) == NO_STEP


def test_files_that_two_attempts_wrote_after_the_same_step_are_not_mixed():
    """An attempt died before all nodes had published step 8; the next one, of two ranks, wrote it
    again, and a node of the first one is back.
    """
    stale = Pieces(ranks=4, held=(1, 2, 3), snapshot="first")
    fresh = Pieces(ranks=2, held=(0, 1), snapshot="second")
    half = Pieces(ranks=2, held=(0,), snapshot="second")
    for found in ([{8: stale}, {8: fresh}], [{8: fresh}, {8: stale}]):
        assert newest_whole(found) == 8
        holder = found.index({8: fresh})
        assert first_holders(found, 8) == {0: holder, 1: holder}
    assert newest_whole([{8: half, 6: fresh}, {8: stale}]) == 6


def test_a_file_is_sent_by_the_first_rank_whose_node_has_it():
    second_half = Pieces(ranks=4, held=(2, 3))
    whole = Pieces(ranks=4, held=(0, 1, 2, 3))
    found = [{6: whole}, {8: second_half}, {8: whole}]
    assert first_holders(found, 8) == {0: 2, 1: 2, 2: 1, 3: 1}
    sent = [pieces_in(text_of(node)) for node in found]
    assert sent == found


# ------------------------------------------------------------------------------------------ runs on two nodes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    source = ("--data.source", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"))
    words = ("--mesh", "dp2", "--parallel.zero", "2", "--save.memory_every", "2")
    small = [word for word in TINY if word not in ("--transport", "threads")]
    return load_checked_run([*small, *source, *words, "--steps", str(NUM_STEPS)])


def train_on_nodes(
    run: Run, folder: Path, *, nodes: tuple[str, ...] = NODES, until: int = NUM_STEPS
) -> list[dict[str, Any]]:
    """Events of ranks on nodes with a memory of their own, which stop dead after a step."""

    def rank_events(comm: Comm) -> list[dict[str, Any]]:
        node = nodes[comm.rank]
        memory_folder = folder / node
        memory_folder.mkdir(parents=True, exist_ok=True)
        status = StatusBoard.in_memory(1).rank(0)
        attempt = Attempt(
            status, memory_folder=memory_folder, node=node, num_restarts=int(run.resume == AUTO)
        )
        return train(comm, run, attempt, until=until)

    return run_ranks(run.mesh, rank_events)[0]


def again(run: Run) -> Run:
    """The run as its agent starts it again."""
    return run.with_values({"resume": AUTO})


def test_a_run_goes_on_from_memory_bit_for_bit_when_a_node_is_lost(run, tmp_path):
    whole = run_ranks(run.mesh, lambda comm: train(comm, run, None))[0]
    memory = tmp_path / "memory"
    died = train_on_nodes(run, memory, until=5)
    for lost in NODES:
        shutil.rmtree(memory / lost)
        resumed = train_on_nodes(again(run), memory)
        (resume,) = [event for event in resumed if event["event"] == "resume"]
        assert resume["step"] in (2, 4)
        actual = steps_of(died)[: resume["step"]] + steps_of(resumed)
        assert actual == steps_of(whole)
    assert not (tmp_path / "run" / "ckpt").exists(), "nothing was saved on disk"
    shutil.rmtree(memory)
    started = train_on_nodes(again(run), memory, until=1)
    (resume,) = [event for event in started if event["event"] == "resume"]
    (lost,) = resume["passed_over"]
    assert "no whole snapshot is left in the memory of these nodes" in lost
    assert resume["path"] is None


def test_snapshots_of_a_version_without_ids_are_left_alone(tmp_path):
    """They ended the restart in a KeyError."""
    memory = NodeMemory(tmp_path, ("node",), None)
    for step, facts in ((2, {"ranks": 1, "facts": {}}), (4, {"ranks": 1, "snapshot": "id"})):
        path = checkpoint_path(memory.pieces, step)
        path.mkdir(parents=True)
        (path / FACTS).write_text(json.dumps(facts))
    assert list(_pieces_here(memory)) == [4]


def test_snapshots_without_a_second_copy_have_a_note_and_a_fresh_start_reads_none(run, tmp_path):
    uneven = ("left", "left", "right")
    run = run.with_values({"mesh": "dp3", "batch": run.batch.model_copy(update={"global_size": 6})})
    memory = tmp_path / "memory"
    for _ in range(2):
        # the snapshot of step 4 waits for that of step 2
        events = train_on_nodes(run, memory, nodes=uneven, until=5)
        (note,) = [event["text"] for event in events if event["event"] == "note"]
        assert "save.memory_every: no shift along the axes" in note
        assert "a lost node loses them" in note
        assert steps_of(events)[0][0] == 1
        run_folder = memory / "left" / "pieces"
        assert list(checkpoints(run_folder)) != []


@pytest.mark.parametrize("fault", ["absent", "unreadable"])
def test_a_file_that_one_rank_cannot_send_is_an_error_on_all_ranks(fault, tmp_path):
    """Before the other one waits for its bytes."""

    def rank(comm: Comm) -> None:
        folder = tmp_path / str(comm.rank)
        folder.mkdir()
        own = folder / data_file_name(comm.rank)
        if comm.rank == 0:
            own.write_bytes(b"bytes")
        elif fault == "unreadable":
            (own / "entry").mkdir(parents=True)
        with pytest.raises(CheckpointError, match=f"{data_file_name(1)}.*cannot be sent"):
            _shift_file(comm, HolderShift("dp", 1), folder, data_file_name)

    run_ranks("dp2", rank, timeout_s=20)


def test_a_node_without_a_folder_is_known_to_all_ranks(tmp_path):
    def memory_of(comm: Comm) -> bool:
        folder = tmp_path if comm.rank else None
        return NodeMemory.of(comm, folder, "node") is None

    assert run_ranks("dp2", memory_of) == [True, True]


# ------------------------------------------------------------------------------------------ the folder of a node

OPEN_FOLDER = """
import sys
from pathlib import Path
from weft.run.node_folder import open_node_folder
print(open_node_folder({"TORCHELASTIC_RUN_ID": "job"}, Path("run")))
"""


def test_the_folder_of_a_node_outlives_ranks_and_ends_with_their_agent(tmp_path):
    agent = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", {OPEN_FOLDER!r}], check=True)
sys.stdout.flush()
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    first = process.stdout.readline().strip()
    second = process.stdout.readline().strip()
    assert first == second, "both ranks, one after the other, have the same"
    folder = Path(first)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30.0
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


def test_a_folder_that_others_can_read_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr(node_folder, "_fork_cleaner", lambda agent_file, folder: None)
    env = {"TORCHELASTIC_RUN_ID": "job"}
    folder = open_node_folder(env, tmp_path / "run")
    assert folder is not None
    assert folder.parent == tmp_path
    os.chmod(folder, 0o755)
    assert open_node_folder(env, tmp_path / "run") is None
