"""Slurm: a batch script whose job resumes after preemption, the time limit, a lost node or a failed rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from weft.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_USER, Fault
from weft.launchers.job import ClusterJob, Engine, LaunchOptions

FILE = "slurm.sh"
TIME = re.compile(r"(\d+|(\d+-)?\d+:\d\d(:\d\d)?|\d+-\d+)")

# Note [Ends of a Slurm step]
#     0, 2    finished, or wrong input: the job ends
#     75      the ranks have saved, because of a signal before the time limit or a preemption: the job is queued again
#     other   a rank failed: started again on the same nodes, at most `run.restarts` times
# A lost node ends the whole allocation, and Slurm queues the job again (--requeue). Every start resumes from the newest
# checkpoint. srun returns the highest code of all ranks; it waits for those that are left, which end by themselves.


class SlurmOptions(LaunchOptions):
    """Options of a Slurm job."""

    time: str = Field("", description="time limit as sbatch reads it: 90, 4:00:00, 2-12")
    save_s: int = Field(
        120, ge=1, le=65535, description="seconds before the time limit at which the run saves"
    )
    partition: str = Field("", description="partition; empty: the default one")
    account: str = Field("", description="account; empty: the default one")


def option_faults(options: SlurmOptions) -> Iterator[Fault]:
    """What is wrong with the time limit."""
    if options.time and not TIME.fullmatch(options.time):
        fix = "for example --time 4:00:00"
        yield Fault("time", "is no time limit of Slurm", repr(options.time), fix=fix)


def files(job: ClusterJob, options: SlurmOptions) -> Mapping[str, str]:
    """The batch script."""
    directives = "\n".join(f"#SBATCH {directive}" for directive in _directives(job, options))
    text = f"""#!/bin/bash
# Training run, written by `weft launch slurm`. It is submitted with sbatch.
{directives}

export WEFT_JOB="slurm $SLURM_JOB_ID"   # one writer of the run folder, on whichever nodes it starts again
queued=${{SLURM_RESTART_COUNT:-0}}
failures=0
while true; do
  export SLURM_RESTART_COUNT=$((queued + failures))
  {_step_command(job)}
  code=$?
  case $code in
    {EXIT_OK} | {EXIT_USER}) exit $code ;;
    {EXIT_PREEMPTED}) echo "weft: saved; the job is queued again"; scontrol requeue "$SLURM_JOB_ID"; exit $code ;;
  esac
  failures=$((failures + 1))
  if [ $failures -gt {job.restarts} ]; then exit $code; fi
  echo "weft: exit code $code; start $failures of {job.restarts} after a failure"
done
"""
    return {FILE: text}


def _directives(job: ClusterJob, options: SlurmOptions) -> list[str]:
    """The options of sbatch."""
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * job.ranks_per_node}",
        f"--ntasks-per-node={job.ranks_per_node}",
    ]
    if job.cpus_per_rank:
        directives.append(f"--cpus-per-task={job.cpus_per_rank}")
    if job.gpus_per_node:
        directives.append(f"--gpus-per-node={job.gpus_per_node}")
    for name in ("time", "partition", "account"):
        value = getattr(options, name)
        if value:
            directives.append(f"--{name}={value}")
    directives += [
        f"--signal=USR1@{options.save_s}",
        "--requeue",
        "--open-mode=append",
        f'--chdir="{job.work_folder}"',
        f'--output="{job.folder}/slurm-%j.log"',
    ]
    return directives


def _step_command(job: ClusterJob) -> str:
    """The command that starts all ranks."""
    words = ["srun", "--kill-on-bad-exit=0", "--wait=60"]
    if job.cpus_per_rank:
        words.append(f"--cpus-per-task={job.cpus_per_rank}")
    return shlex.join([*words, job.python, "-m", "weft", "train", str(job.config_path)])


def submit(file: Path, options: SlurmOptions) -> list[str]:
    """sbatch with the script."""
    return ["sbatch", str(file)]


ENGINE = Engine(
    "slurm",
    "batch script for sbatch",
    options=SlurmOptions,
    shares_folder=True,
    option_faults=option_faults,
    files=files,
    submit=submit,
)
