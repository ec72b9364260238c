"""The watch of a Slurm job for the node of its batch script; with real Slurm in tests/clusters/test_slurm_first_node.py."""

from __future__ import annotations

import pytest

from weft.run import batch_watch
from weft.run.batch_watch import is_lost, main


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("node[01-03]", False), ("node[02-03]", True), ("", False), ("(null)]", False)],
    ids=["all there", "taken out", "Slurm does not answer", "no host list"],
)
def test_a_node_is_lost_once_slurm_has_taken_it_out_of_the_job(nodes, expected):
    assert is_lost("node01", nodes) == expected


def test_another_node_queues_the_job_again_and_the_first_does_not_watch(tmp_path, monkeypatch):
    """squeue first lists all nodes, then fails, then misses the first one."""
    programs = {
        "squeue": """echo x >> calls
case $(wc -l < calls) in 1) echo 'n[1-3]' ;; 2) exit 1 ;; *) echo 'n[2-3]' ;; esac""",
        "scontrol": 'echo "$*" >> queued',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(batch_watch, "POLL_S", 0.01)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    assert main({**env, "SLURM_NODEID": "0"}) == 0
    assert not (tmp_path / "calls").exists()
    monkeypatch.setattr(batch_watch.time, "sleep", lambda _: None)
    assert main({**env, "SLURM_NODEID": "1"}) == 0
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
