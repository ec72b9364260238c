"""SkyPilot: a managed job that runs torchrun on every node and is recovered after preemption."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from weft import __version__
from weft.errors import EXIT_PREEMPTED, Fault
from weft.launchers.job import (
    CONFIG,
    CONTAINER_CONFIG,
    CONTAINER_RUNS,
    ClusterJob,
    Engine,
    LaunchOptions,
)
from weft.launchers.yaml_text import yaml_text

FILE = "skypilot.yaml"
PORT = 29_500
BUCKET = re.compile(r"(s3|gs|r2|cos|oci)://[A-Za-z0-9._/-]+")


class SkyPilotOptions(LaunchOptions):
    """Options of a SkyPilot managed job."""

    gpu: str = Field("H100", description="type of the GPUs")
    bucket: str = Field("", description="URL of the bucket for run folders: s3://NAME; needed")
    infra: str = Field("", description="cloud, region or Kubernetes context; empty: the cheapest")
    image: str = Field("", description="container image that has weft; empty: pip installs weft")
    wheel: str = Field(
        "",
        description="wheel of weft that is copied to the nodes and installed there; empty: this "
        "version of weft-train, from the package index of the nodes",
    )


def option_faults(options: SkyPilotOptions) -> Iterator[Fault]:
    """A bucket is needed: the disks of preempted machines are lost."""
    if not BUCKET.fullmatch(options.bucket):
        yield Fault(
            "bucket",
            "is needed: disks of preempted machines are lost",
            got=repr(options.bucket),
            need="a URL of a bucket",
            fix="--bucket s3://NAME",
        )
    if not options.wheel:
        return
    if options.image:
        yield Fault("wheel", "is not installed in an image", fix="leave out --wheel or --image")
    if not options.wheel.endswith(".whl") or not Path(options.wheel).is_file():
        fix = "pip wheel --no-deps -w dist ., then --wheel dist/NAME.whl"
        yield Fault("wheel", "is no wheel", repr(options.wheel), "a file NAME.whl", fix=fix)


def files(job: ClusterJob, options: SkyPilotOptions) -> Mapping[str, str]:
    """The YAML file of the task."""
    resources: dict[str, Any] = {
        "job_recovery": {
            "max_restarts_on_errors": job.restarts,
            "recover_on_exit_codes": [EXIT_PREEMPTED],
        },
        "use_spot": True,
    }
    if options.infra:
        resources["infra"] = options.infra
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    if job.cpus_per_node:
        resources["cpus"] = f"{job.cpus_per_node}+"
    if job.gpus_per_node:
        resources["accelerators"] = f"{options.gpu}:{job.gpus_per_node}"
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": {"WEFT_JOB": f"skypilot {job.name}"},
        "file_mounts": {
            f"{CONTAINER_CONFIG}/{CONFIG}": str(job.config_path),
            CONTAINER_RUNS: {"source": options.bucket, "mode": "MOUNT"},
        },
    }
    if options.wheel:
        wheel = f"{CONTAINER_CONFIG}/{Path(options.wheel).name}"
        task["file_mounts"][wheel] = str(Path(options.wheel).absolute())
        task["setup"] = f"pip install {shlex.quote(wheel)}\n"
    elif not options.image:
        need = "# needs a package index that has this version; else launch with --wheel or --image"
        task["setup"] = f"{need}\npip install weft-train=={__version__}\n"
    task["run"] = _command(job) + "\n"
    return {FILE: yaml_text(task)}


def _command(job: ClusterJob) -> str:
    """torchrun on one node; the first node is the rendezvous."""
    before = ["torchrun", '--nnodes="$SKYPILOT_NUM_NODES"', '--node-rank="$SKYPILOT_NODE_RANK"']
    address = '--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    after = [
        f"--master-port={PORT}",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--max-restarts={job.restarts}",
        "-m",
        "weft",
        "train",
        f"{CONTAINER_CONFIG}/{CONFIG}",
        *job.flags,
    ]
    return " ".join([*before, address, shlex.join(after)])


def submit(file: Path, options: SkyPilotOptions) -> list[str]:
    """A managed job, which SkyPilot recovers."""
    return ["sky", "jobs", "launch", "--yes", "--detach-run", str(file)]


ENGINE = Engine(
    "skypilot",
    "managed job for sky jobs launch",
    options=SkyPilotOptions,
    shares_folder=False,
    option_faults=option_faults,
    files=files,
    submit=submit,
)
