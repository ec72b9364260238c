"""The world read from the variables of torchrun and Slurm, incomplete variables, and Slurm host lists."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import LaunchError
from weft.run.world import World, detect, expand_hosts, job_name

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


def test_torchrun_variables_give_rank_and_rendezvous():
    assert detect(TORCHRUN) == World(5, 8, 1, 4, "env://")


def test_local_rank_and_size_default_to_one_rank_a_machine():
    world = detect(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (world.local_rank, world.local_size) == (0, 1)


def test_slurm_rendezvous_is_the_first_host_and_a_port_of_the_job():
    assert detect(SLURM) == World(5, 8, 1, 4, "tcp://node07:22345", job="slurm 4012345.0")


def test_a_job_has_the_name_that_its_launcher_gave_it():
    assert detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"}).job == "torchrun abc"
    assert detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).job == ""
    assert detect({**SLURM, "SLURM_STEP_ID": "3"}).job == "slurm 4012345.3"


def test_slurm_job_steps_use_their_own_host_and_port():
    step = {**SLURM, "SLURM_STEP_NODELIST": "node08", "SLURM_STEP_ID": "3"}
    assert detect(step).rendezvous == "tcp://node08:22348"


def test_slurm_tasks_are_spread_evenly_without_tasks_per_node():
    assert detect(without(SLURM, "SLURM_NTASKS_PER_NODE")).local_size == 4


def test_master_addr_and_port_override_the_slurm_rendezvous():
    world = detect({**SLURM, "MASTER_ADDR": "ib0", "MASTER_PORT": "1234"})
    assert world.rendezvous == "tcp://ib0:1234"


BATCH = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "4711"}
"""What sbatch gives the script of a job: the number of the first task, and no step."""


def test_the_batch_script_of_a_job_on_one_node_starts_its_ranks_itself():
    assert detect({**BATCH, "SLURM_JOB_NODELIST": "node07"}) is None
    assert detect({**BATCH, "SLURM_STEP_ID": "0"}).rank == 0, "a task of srun"


def test_the_batch_script_of_a_job_on_several_nodes_is_one_line_at_once():
    with pytest.raises(LaunchError) as error:
        detect(BATCH)
    assert str(error.value) == (
        "srun: the batch script of a job on several nodes starts one process, and no ranks (got 8 tasks on 2 nodes). "
        "Fix: `srun weft train ...` in the script, or `weft launch slurm`, which writes one"
    )


def test_torchrun_inside_a_slurm_job_takes_precedence():
    assert detect({**SLURM, **TORCHRUN}) == detect(TORCHRUN)


@pytest.mark.parametrize(
    "env", [{}, {"WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4"}, {**SLURM, "SLURM_NTASKS": "1"}]
)
def test_incomplete_or_single_task_environments_give_no_world(env):
    assert detect(env) is None


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            without(TORCHRUN, "MASTER_PORT"),
            "MASTER_PORT: is missing in the environment. Fix: start with torchrun or srun",
        ),
        (
            {**TORCHRUN, "WORLD_SIZE": "x"},
            "WORLD_SIZE: is no number (got 'x'). Fix: start with torchrun or srun",
        ),
        ({**TORCHRUN, "RANK": "8"}, "rank: is outside the world (got rank 8 of 8)"),
        (
            without(SLURM, "SLURM_JOB_NODELIST"),
            "SLURM_JOB_NODELIST: is missing in the environment. Fix: start with torchrun or srun",
        ),
    ],
)
def test_missing_or_invalid_variables_are_one_line(env, line):
    with pytest.raises(LaunchError) as caught:
        detect(env)
    assert str(caught.value) == line


def test_detect_does_not_import_torch():
    script = "import sys, weft.run.world; assert 'torch' not in sys.modules"
    returncode = subprocess.run([sys.executable, "-c", script], check=False).returncode
    assert returncode == 0


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ("localhost",)),
        ("a,b", ("a", "b")),
        ("node[01-04,07]", ("node01", "node02", "node03", "node04", "node07")),
        ("node[8-11]", ("node8", "node9", "node10", "node11")),
        ("node[098-101]-ib", ("node098-ib", "node099-ib", "node100-ib", "node101-ib")),
        ("gpu[1-2],login,cpu[3]", ("gpu1", "gpu2", "login", "cpu3")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
    ],
)
def test_slurm_host_lists_are_expanded_in_order(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "a,", "n[1-2", "n1-2]", "n[]", "n[a-b]", "n[2-1]", "n[1[2]]", "n[-3]"]
)
def test_an_invalid_host_list_is_rejected_with_its_text(text):
    with pytest.raises(LaunchError) as caught:
        expand_hosts(text)
    assert repr(text) in str(caught.value)


@given(st.lists(NAMES, min_size=1))
def test_plain_host_names_are_unchanged(names):
    assert expand_hosts(",".join(names)) == tuple(names)


@given(NAMES, st.integers(0, 500), st.integers(0, 60), st.integers(1, 5))
def test_a_host_range_has_every_number_once_at_its_width(name, first, length, width):
    low = f"{first:0{width}}"
    high = f"{first + length:0{width}}"
    hosts = expand_hosts(f"{name}[{low}-{high}]")
    expected = list(range(first, first + length + 1))
    assert [int(host.removeprefix(name)) for host in hosts] == expected
    for host in hosts:
        assert len(host) >= len(name) + width


@given(
    st.lists(
        st.tuples(NAMES, st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_a_host_list_is_the_concatenation_of_its_words(words):
    texts = []
    for name, numbers in words:
        listed = ",".join(map(str, numbers))
        texts.append(f"{name}[{listed}]")
    expected: tuple[str, ...] = ()
    for text in texts:
        expected += expand_hosts(text)
    assert expand_hosts(",".join(texts)) == expected


def test_the_name_of_a_job_stays_when_it_starts_again():
    steps = [{**SLURM, "SLURM_STEP_ID": step, "WEFT_JOB": "slurm 4012345"} for step in "01"]
    assert [job_name(step) for step in steps] == ["slurm 4012345", "slurm 4012345"]
    assert job_name(SLURM) == "slurm 4012345.0"
