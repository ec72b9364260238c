"""Ray: a script for `ray job submit` whose driver starts the ranks, and starts them again after a lost node."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from weft.errors import Fault
from weft.launchers.job import ClusterJob, Engine, LaunchOptions

FILE = "ray_job.py"


class RayOptions(LaunchOptions):
    """Options of a Ray job."""

    address: str = Field(
        "", description="of the job server, http://HOST:8265; empty: that of this machine"
    )


def option_faults(options: RayOptions) -> Iterator[Fault]:
    """Check nothing beyond what is shared by all launchers."""
    return iter(())


def files(job: ClusterJob, options: RayOptions) -> Mapping[str, str]:
    """The driver script."""
    values = {
        "name": job.name,
        "config": str(job.config_path),
        "work_folder": str(job.work_folder),
        "nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "gpus_per_node": job.gpus_per_node,
        "cpus_per_node": job.cpus_per_node or job.ranks_per_node,
        "restarts": job.restarts,
        **({"flags": job.flags} if job.flags else {}),
    }
    arguments = "\n".join(f"    {key}={value!r}," for key, value in values.items())
    text = f'''"""Training run, written by `weft launch ray`. Every node of the Ray cluster needs weft and this folder."""

from weft.launchers.ray_driver import RayJob, run_job

JOB = RayJob(
{arguments}
)

if __name__ == "__main__":
    raise SystemExit(run_job(JOB))
'''
    return {FILE: text}


def submit(file: Path, options: RayOptions) -> list[str]:
    """The job server runs the script, with this interpreter: raylets need no environment on PATH."""
    address = ["--address", options.address] if options.address else []
    return ["ray", "job", "submit", "--no-wait", *address, "--", sys.executable, str(file)]


ENGINE = Engine(
    "ray",
    "driver script for ray job submit",
    options=RayOptions,
    shares_folder=True,
    option_faults=option_faults,
    files=files,
    submit=submit,
)
