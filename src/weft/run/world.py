"""Owns the world as one rank finds it: who it is, how many there are, and where all of them meet. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import Fault, LaunchError
from weft.run.hosts import expand

Env = Mapping[str, str]

SLURM_PORTS = range(20_000, 30_000)
"""Ports for Slurm jobs: below those that Linux gives to outgoing connections."""


@dataclass(frozen=True)
class Memory:
    """Ranks are threads of one process; `threads` is the `ThreadWorld` that they share."""

    threads: object


Rendezvous = str | Memory
"""Where ranks meet: `env://` (torchrun's variables), `tcp://host:port`, `file:///path`, or this process's memory."""


@dataclass(frozen=True)
class World:
    """One rank's place among all.

    Attributes:
        rank: 0 to size - 1, over all machines.
        local_rank: 0 to local_size - 1, on this machine: chooses the GPU.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: Rendezvous


def detect(env: Env) -> World | None:
    """The world that torchrun or Slurm has started this process in; None where nobody did.

    Raises:
        LaunchError: it is announced, and half of it is missing or makes no sense.
    """
    world = _torchrun(env) or _slurm(env)
    if world is not None and not 0 <= world.rank < world.size:
        raise LaunchError(Fault("rank", "is outside the world", got=f"rank {world.rank} of {world.size}"))
    return world


def _torchrun(env: Env) -> World | None:
    """What torchrun tells each process; whoever sets the same variables by hand is as welcome."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    _word(env, "MASTER_ADDR"), _number(env, "MASTER_PORT")
    local_rank, local_size = _number(env, "LOCAL_RANK", "0"), _number(env, "LOCAL_WORLD_SIZE", "1")
    return World(_number(env, "RANK"), _number(env, "WORLD_SIZE"), local_rank, local_size, "env://")


def _slurm(env: Env) -> World | None:
    """What srun tells each task. A job of one task is no world: there the ranks are still to be started."""
    if "SLURM_PROCID" not in env or env.get("SLURM_NTASKS", "1") == "1":
        return None
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    hosts = expand(env.get("SLURM_STEP_NODELIST") or _word(env, "SLURM_JOB_NODELIST"))
    meeting = f"tcp://{env.get('MASTER_ADDR') or hosts[0]}:{_slurm_port(env)}"
    local_size = _number(env, "SLURM_NTASKS_PER_NODE", str(-(-size // len(hosts))))
    return World(rank, size, _number(env, "SLURM_LOCALID"), local_size, meeting)


def _slurm_port(env: Env) -> int:
    """The same for all tasks of a job step, another for its neighbours in time."""
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    return SLURM_PORTS[(_number(env, "SLURM_JOB_ID", "0") + _number(env, "SLURM_STEP_ID", "0")) % len(SLURM_PORTS)]


def _word(env: Env, name: str, default: str | None = None) -> str:
    word = env.get(name) or default
    if word is None:
        raise LaunchError(Fault(name, "is missing in the environment", fix="start with torchrun or srun"))
    return word


def _number(env: Env, name: str, default: str | None = None) -> int:
    word = _word(env, name, default)
    if not word.isdecimal():
        raise LaunchError(Fault(name, "is no number", got=repr(word), fix="start with torchrun or srun"))
    return int(word)
