"""Watch of a Slurm job that keeps running when it loses a node: on the other nodes, for the node of its batch script.

    node 0   the batch script, srun, ranks        lost: Slurm takes it out of the job, which stays RUNNING without a script
    node 1   ranks, this process                  sees that, and queues the job again

Slurm takes a node out once it has not answered for SlurmdTimeout. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from weft.errors import EXIT_OK, LaunchError
from weft.run.world import expand_hosts

POLL_S = 10.0
COMMAND_S = 60.0


def main(env: Mapping[str, str] = os.environ) -> int:
    """Wait for the loss of the first node, and queue the job again; on the first node end at once."""
    job = env["SLURM_JOB_ID"]
    first, *others = expand_hosts(env["SLURM_JOB_NODELIST"])
    number = int(env["SLURM_NODEID"])
    if not others or number == 0:
        return EXIT_OK
    while not is_lost(first, nodes_of(job)):
        time.sleep(POLL_S)
    time.sleep(number)  # one after the other: requests after the first one find a job that waits
    sys.stderr.write(
        f"weft: {first}, which ran the batch script, is lost; the job is queued again\n"
    )
    return _slurm("scontrol", "requeue", job).returncode


def is_lost(node: str, nodes: str) -> bool:
    """Whether a node is missing in the nodes of a job, as a host list; "": they are not known."""
    try:
        # a controller that does not answer, or answers with something else, says nothing of the node
        return bool(nodes) and node not in expand_hosts(nodes)
    except LaunchError:
        return False


def nodes_of(job: str) -> str:
    """The nodes that Slurm counts to a job; "" if it does not answer."""
    try:
        done = _slurm("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N")
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, as the job file does."""
    return subprocess.run(  # noqa: S603 - a command of Slurm
        words, stdout=subprocess.PIPE, text=True, check=False, timeout=COMMAND_S
    )


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks the ranks to save
    sys.exit(main())
