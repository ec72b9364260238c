"""The world of one rank (rank, size, rendezvous), read from the variables of torchrun or Slurm; cores of the machine.

Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import Fault, LaunchError
from weft.run.rank_status import RankStatus

Env = Mapping[str, str]

SLURM_PORTS = range(20_000, 30_000)
"""Ports for Slurm jobs: below Linux's range for outgoing connections."""

JOB_VARIABLE = "WEFT_JOB"
HOST_WORD = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
HOST_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
HOST_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ThreadRendezvous:
    """Ranks are threads of one process; `threads` is the `ThreadWorld` that they share."""

    threads: object


Rendezvous = str | ThreadRendezvous
"""`env://` (torchrun's variables), `tcp://host:port`, `file:///path`, the world of torch.distributed
(`SCRIPT_WORLD` of process_groups.py), or the memory of this process.
"""


@dataclass(frozen=True)
class Restart:
    """Why the ranks were started again.

    Attributes:
        number: 1 for the first restart, of at most `most`.
        rank, reason: the rank that failed, and how: with coordinates, step and phase.
        detected_s: from the fault to its detection.
        at_s: time.monotonic() of the detection.
        had_started: whether a step was begun before: then checkpoints in the run folder are of this
            run.
    """

    number: int
    most: int
    rank: int
    reason: str
    detected_s: float
    at_s: float
    had_started: bool


def ignore_error(error: Exception) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Attempt:
    """One start of ranks by the launcher that supervises them, or by torchrun or Slurm.

    Attributes:
        status: this rank's slot on the launcher's board; a board of its own where there is none.
        memory_folder: folder in memory for snapshots, which outlives the ranks; None: no snapshots.
        node: name of this node, where every node has such a folder; "": all ranks have the same.
        num_restarts: how often torchrun or Slurm has started the ranks of this job again.
        restart: by the launcher on this machine; None for the first attempt.
        has_launcher: whether all ranks are forks of one launcher, on its machine.
        report_error: tells the launcher of an error before this rank has closed its connections,
            at which others fail.
    """

    status: RankStatus
    memory_folder: Path | None = None
    node: str = ""
    num_restarts: int = 0
    restart: Restart | None = None
    has_launcher: bool = False
    report_error: Callable[[Exception], object] = ignore_error


@dataclass(frozen=True)
class World:
    """Rank and world size of one process or thread.

    Attributes:
        rank: 0 to size - 1, over all machines.
        local_rank: 0 to local_size - 1, on this machine: selects the GPU.
        job: name of the torchrun or Slurm job; "" for local ranks.
        nonce: random name of a local world, inherited by its ranks; "" in others.
        listener: file descriptor of the socket on which the store of rank 0 listens; None if it
            opens one, or needs none.
        attempt: None unless a launcher on this machine has forked and supervises the ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: Rendezvous
    job: str = ""
    nonce: str = ""
    listener: int | None = None
    attempt: Attempt | None = None

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_size == self.size


def detect(env: Env) -> World | None:
    """The world that torchrun or Slurm has started this process in; None outside of both.

    Raises:
        LaunchError: variables are missing, are not numbers, or contradict each other.
    """
    world = _torchrun_world(env) or _slurm_world(env)
    if world is None:
        return None
    if world.rank not in range(world.size):
        fault = Fault("rank", "is outside the world", got=f"rank {world.rank} of {world.size}")
        raise LaunchError(fault)
    return replace(world, job=job_name(env))


def job_name(env: Env) -> str:
    """Name of the torchrun or Slurm job that started this process; "" where nothing names it.

    It stays the same when the job is restarted: in job files of `weft launch`, WEFT_JOB names it.
    """
    if env.get(JOB_VARIABLE):
        return env[JOB_VARIABLE]
    if "RANK" in env:
        run_id = env.get("TORCHELASTIC_RUN_ID", "none")
        return "" if run_id == "none" else f"torchrun {run_id}"
    if "SLURM_PROCID" in env and env.get("SLURM_JOB_ID"):
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    return ""


def _torchrun_world(env: Env) -> World | None:
    """The world in torchrun's variables, which may also be set by hand."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    _require(env, "MASTER_ADDR")
    _number(env, "MASTER_PORT")
    return World(
        rank=_number(env, "RANK"),
        size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK", default=0),
        local_size=_number(env, "LOCAL_WORLD_SIZE", default=1),
        rendezvous="env://",
    )


def _slurm_world(env: Env) -> World | None:
    """The world in srun's variables; None for a job of one task, and for the batch script of a job
    on one node: they start their ranks themselves.
    """
    if "SLURM_PROCID" not in env or env.get("SLURM_NTASKS", "1") == "1":
        return None
    size = _number(env, "SLURM_NTASKS")
    node_list = env.get("SLURM_STEP_NODELIST") or _require(env, "SLURM_JOB_NODELIST")
    hosts = expand_hosts(node_list)
    if _is_batch_script(env):
        if len(hosts) == 1:
            return None
        raise LaunchError(
            Fault(
                "srun",
                "the batch script of a job on several nodes starts one process, and no ranks",
                got=f"{size} tasks on {len(hosts)} nodes",
                fix="`srun weft train ...` in the script, or `weft launch slurm`, which writes one",
            )
        )
    tasks_per_host = -(-size // len(hosts))
    address = env.get("MASTER_ADDR") or hosts[0]
    return World(
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=_number(env, "SLURM_NTASKS_PER_NODE", default=tasks_per_host),
        rendezvous=f"tcp://{address}:{_slurm_port(env)}",
    )


def _is_batch_script(env: Env) -> bool:
    """Whether sbatch has started this process, and not srun: the script is no task of a step,
    although Slurm's daemon gives it the number of the first task.
    """
    is_step = "SLURM_STEP_ID" in env or "SLURM_STEP_NODELIST" in env
    return "SLURM_TASK_PID" in env and not is_step


def _slurm_port(env: Env) -> int:
    """A port that is equal for all tasks of a job step and differs between consecutive jobs and
    steps.
    """
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    job = _number(env, "SLURM_JOB_ID", default=0)
    step = _number(env, "SLURM_STEP_ID", default=0)
    return SLURM_PORTS[(job + step) % len(SLURM_PORTS)]


def _require(env: Env, name: str) -> str:
    value = env.get(name)
    if not value:
        raise LaunchError(
            Fault(name, "is missing in the environment", fix="start with torchrun or srun")
        )
    return value


def _number(env: Env, name: str, *, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    value = _require(env, name)
    if not value.isdecimal():
        raise LaunchError(
            Fault(name, "is no number", got=repr(value), fix="start with torchrun or srun")
        )
    return int(value)


def num_cores() -> int:
    """Cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host of a Slurm host list, in order: `node[08-10,12]-ib` is node08-ib node09-ib
    node10-ib node12-ib.

    Leading zeros are kept; a word may hold several brackets, the last one varies fastest.

    Raises:
        LaunchError: the text is no host list.
    """
    words = HOST_WORD.findall(text)
    if not words or ",".join(words) != text:
        raise _invalid_host_list(text)
    hosts: list[str] = []
    for word in words:
        hosts.extend(_hosts_of_word(word, text))
    return tuple(hosts)


def _hosts_of_word(word: str, text: str) -> Iterator[str]:
    choices: list[list[str]] = []
    for ranges, plain in HOST_PART.findall(word):
        if plain:
            choices.append([plain])
        else:
            numbers = _numbers_of_ranges(ranges, text)
            choices.append(list(numbers))
    for parts in itertools.product(*choices):
        yield "".join(parts)


def _numbers_of_ranges(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = HOST_RANGE.fullmatch(part)
        if match is None:
            raise _invalid_host_list(text)
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise _invalid_host_list(text)
        width = len(first)
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}}"


def _invalid_host_list(text: str) -> LaunchError:
    fault = Fault(
        "SLURM_JOB_NODELIST",
        "is no host list",
        got=repr(text),
        need="host names like node[01-04,07]",
    )
    return LaunchError(fault)
