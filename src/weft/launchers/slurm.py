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
#
# Note [Spare nodes]
# With --no-kill Slurm takes a lost node out of the job and leaves the others to it. Until then, which takes SlurmdTimeout, no
# step can start on it: the script waits until a step runs on all nodes that the job has. Are there enough, the ranks start
# again on them, and find the snapshots in their memory; if not, the job is queued again. The batch script runs on the first
# node: if that one is lost, the job would go on without a script, so a watch on the other nodes queues it again. A step that has
# lost a node keeps its cores on the others for minutes, hence --overlap.


class SlurmOptions(LaunchOptions):
    """Options of a Slurm job."""

    time: str = Field("", description="time limit as sbatch reads it: 90, 4:00:00, 2-12")
    save_s: int = Field(
        120, ge=1, le=65535, description="seconds before the time limit at which the run saves"
    )
    spare_nodes: int = Field(
        0,
        ge=0,
        le=1024,
        description="nodes above --nodes: a lost node is replaced without queueing the job again",
    )
    partition: str = Field("", description="partition; empty: the default one")
    account: str = Field("", description="account; empty: the default one")


def option_faults(options: SlurmOptions) -> Iterator[Fault]:
    """What is wrong with the time limit."""
    if options.time and not TIME.fullmatch(options.time):
        fix = "for example --time 4:00:00"
        yield Fault("time", "is no time limit of Slurm", repr(options.time), fix=fix)
    elif options.time and _seconds(options.time) <= options.save_s:
        what = "the run would save, and be queued again, before it has trained"
        got = f"--time {options.time} is {_seconds(options.time):,} s"
        need = f"more than the {options.save_s:,} s of --save_s"
        yield Fault("time", what, got, need, fix="a longer --time, or a smaller --save_s")


def _seconds(time: str) -> int:
    """A time limit of Slurm: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    >>> _seconds("90"), _seconds("1:30"), _seconds("4:00:00"), _seconds("2-12")
    (5400, 90, 14400, 216000)
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds, *_ = [*parts, 0, 0]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds, *_) = 0, [*parts, 0]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def files(job: ClusterJob, options: SlurmOptions) -> Mapping[str, str]:
    """The batch script."""
    directives = "\n".join(f"#SBATCH {directive}" for directive in _directives(job, options))
    text = f"""#!/bin/bash
# {_what(job)}. It is submitted with sbatch.
{directives}

{_configs(job)}export WEFT_JOB="slurm $SLURM_JOB_ID"   # one writer of the run folder, on whichever nodes it starts again
{_keepers(job, options)}{_watches(job, options)}queued=${{SLURM_RESTART_COUNT:-0}}
failures=0
while true; do
  export SLURM_RESTART_COUNT=$((queued + failures))
  {_step_command(job, options)}
  code=$?
  case $code in
    {EXIT_OK} | {EXIT_USER}) exit $code ;;
    {EXIT_PREEMPTED}) echo "weft: saved; the job is queued again"; scontrol requeue "$SLURM_JOB_ID"; exit $code ;;
  esac
  failures=$((failures + 1))
  if [ $failures -gt {job.restarts} ]; then exit $code; fi
{_wait_for_nodes(job, options)}  echo "weft: exit code $code; start $failures of {job.restarts} after a failure"
done
"""
    return {FILE: text}


def _directives(job: ClusterJob, options: SlurmOptions) -> list[str]:
    """The options of sbatch."""
    nodes = job.nodes + options.spare_nodes
    directives = [
        f"--job-name={job.name}",
        f"--nodes={nodes}",
        f"--ntasks={nodes * job.ranks_per_node}",
        f"--ntasks-per-node={job.ranks_per_node}",
    ]
    if options.spare_nodes:
        directives.append("--no-kill")
    if job.cpus_per_rank:
        directives.append(f"--cpus-per-task={job.cpus_per_rank}")
    if job.gpus_per_node:
        directives.append(f"--gpus-per-node={job.gpus_per_node}")
    for name in ("time", "partition", "account"):
        value = getattr(options, name)
        if value:
            directives.append(f"--{name}={value}")
    if job.array:
        directives.append(f"--array=0-{len(job.array) - 1}")
    log = "%A_%a" if job.array else "%j"
    directives += [
        f"--signal=USR1@{options.save_s}",
        "--requeue",
        "--open-mode=append",
        f'--chdir="{job.work_folder}"',
        f'--output="{job.folder}/slurm-{log}.log"',
    ]
    return directives


def _what(job: ClusterJob) -> str:
    """What the script is, and who has written it."""
    if job.array:
        return "Training runs, a task each, written by `weft sweep --array slurm`"
    return "Training run, written by `weft launch slurm`"


def _configs(job: ClusterJob) -> str:
    """Lines with the config of each task of an array."""
    if not job.array:
        return ""
    return "\n".join(["configs=(", *(f"  {shlex.quote(str(path))}" for path in job.array), ")\n"])


def _keepers(job: ClusterJob, options: SlurmOptions) -> str:
    """Lines that start one keeper on every node, beside the ranks; see `weft.run.node_keeper`.

    It gets SIGTERM from Slurm when the script ends. A signal to srun would be SIGKILL for its tasks.
    """
    if not job.takes_snapshots:
        return ""
    return f"""export WEFT_NODE_KEEPER="slurm $SLURM_JOB_ID"   # snapshots in memory outlive the ranks
{_on_every_node(job, options, "weft.run.node_keeper")}
"""


def _watches(job: ClusterJob, options: SlurmOptions) -> str:
    """Lines that start a watch on every node for the loss of the first one, which runs this script."""
    if not options.spare_nodes:
        return ""
    watch = _on_every_node(job, options, "weft.run.batch_watch")
    return f"{watch}   # queues the job again if the node of this script is lost\n"


def _on_every_node(job: ClusterJob, options: SlurmOptions, module: str) -> str:
    """A step beside the ranks, with one process a node."""
    nodes = job.nodes + options.spare_nodes
    words = ["srun", "--overlap", "--no-kill", f"--nodes={nodes}", f"--ntasks={nodes}"]
    words += ["--ntasks-per-node=1", job.python, "-m", module]
    return f"{shlex.join(words)} < /dev/null &"


def _step_command(job: ClusterJob, options: SlurmOptions) -> str:
    """The command that starts all ranks."""
    words = ["srun", "--kill-on-bad-exit=0", "--wait=60"]
    if options.spare_nodes:
        ranks = job.nodes * job.ranks_per_node
        words += ["--overlap", f"--nodes={job.nodes}", f"--ntasks={ranks}"]
    if job.cpus_per_rank:
        words.append(f"--cpus-per-task={job.cpus_per_rank}")
    config = '"${configs[SLURM_ARRAY_TASK_ID]}"' if job.array else shlex.quote(str(job.config_path))
    return shlex.join([*words, job.python, "-m", "weft", "train"]) + " ".join(
        ["", config, *map(shlex.quote, job.flags)]
    )


def _wait_for_nodes(job: ClusterJob, options: SlurmOptions) -> str:
    """Lines that wait until all nodes of the job answer; see Note [Spare nodes]."""
    if not options.spare_nodes:
        return ""
    return f"""  while true; do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)
    srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 true && break
    sleep 5
  done
  if [ "$nodes" -lt {job.nodes} ]; then
    echo "weft: $nodes nodes are left, {job.nodes} are needed; the job is queued again"
    scontrol requeue "$SLURM_JOB_ID"; exit $code
  fi
"""


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
