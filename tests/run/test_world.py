"""Claims about joining a world that is there already: torchrun's, Slurm's, none, and half of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.errors import LaunchError
from weft.run.world import World, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "4012345",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_torchrun_says_who_and_where():
    assert detect(TORCHRUN) == World(5, 8, 1, 4, "env://")


def test_hand_made_ranks_are_one_a_machine_unless_they_say_otherwise():
    world = detect(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (world.local_rank, world.local_size) == (0, 1)


def test_slurm_meets_on_its_first_host_at_a_port_of_the_job():
    assert detect(SLURM) == World(5, 8, 1, 4, "tcp://node07:22345")


def test_slurm_job_steps_meet_at_their_own_hosts_and_ports():
    step = {**SLURM, "SLURM_STEP_NODELIST": "node08", "SLURM_STEP_ID": "3"}
    assert detect(step).rendezvous == "tcp://node08:22348"


def test_slurm_tasks_are_spread_evenly_where_nobody_says_how():
    assert detect(without(SLURM, "SLURM_NTASKS_PER_NODE")).local_size == 4


def test_slurm_obeys_an_address_that_the_job_script_sets():
    world = detect({**SLURM, "MASTER_ADDR": "ib0", "MASTER_PORT": "1234"})
    assert world.rendezvous == "tcp://ib0:1234"


def test_torchrun_inside_a_slurm_job_wins():
    assert detect({**SLURM, **TORCHRUN}) == detect(TORCHRUN)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4"}, {**SLURM, "SLURM_NTASKS": "1"}])
def test_nobody_has_started_a_world(env):
    assert detect(env) is None


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            without(TORCHRUN, "MASTER_PORT"),
            "MASTER_PORT: is missing in the environment. Fix: start with torchrun or srun",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "x"}, "WORLD_SIZE: is no number (got 'x'). Fix: start with torchrun or srun"),
        ({**TORCHRUN, "RANK": "8"}, "rank: is outside the world (got rank 8 of 8)"),
        (
            without(SLURM, "SLURM_JOB_NODELIST"),
            "SLURM_JOB_NODELIST: is missing in the environment. Fix: start with torchrun or srun",
        ),
    ],
)
def test_half_a_world_is_one_line(env, line):
    with pytest.raises(LaunchError) as caught:
        detect(env)
    assert str(caught.value) == line


def test_looking_for_a_world_does_not_import_torch():
    script = "import sys, weft.run.world; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
