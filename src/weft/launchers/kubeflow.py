"""Kubeflow Trainer: a TrainJob on a torch runtime, with the run config in a ConfigMap and run folders on a volume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from weft.errors import Fault
from weft.launchers.job import (
    CONFIG,
    CONTAINER_CONFIG,
    CONTAINER_RUNS,
    KUBERNETES_NAME,
    ClusterJob,
    Engine,
    LaunchOptions,
)
from weft.launchers.yaml_text import yaml_text

FILE = "kubeflow.yaml"
NODE = "node"
"""Name of the replicated job and of its container in Kubeflow's torch runtimes."""
MANAGER = "weft/launch"
"""Owner of the patch of the runtime."""


class KubeflowOptions(LaunchOptions):
    """Options of a Kubeflow TrainJob."""

    image: str = Field("", description="container image that has weft; needed")
    volume: str = Field("", description="persistent volume claim for run folders; needed")
    runtime: str = Field("torch-distributed", description="ClusterTrainingRuntime")
    namespace: str = Field("default", description="namespace of the job")
    save_s: int = Field(
        120, ge=1, le=86_400, description="seconds that a pod which must end has to save"
    )


def option_faults(options: KubeflowOptions) -> Iterator[Fault]:
    """Image and volume are needed; names must be names of Kubernetes."""
    if not options.image:
        fix = "--image registry/name:tag"
        yield Fault("image", "is needed: containers have no weft", fix=fix)
    if not options.volume:
        yield Fault("volume", "is needed: checkpoints must outlive the pods", fix="--volume CLAIM")
    if options.name[:1].isdigit():
        what, fix = "does not begin with a letter", f"--name weft-{options.name}"
        yield Fault("name", what, repr(options.name), "a name of a TrainJob", fix=fix)
    for key in ("name", "volume", "runtime", "namespace"):
        value = getattr(options, key)
        if value and not KUBERNETES_NAME.fullmatch(value):
            need = "lower-case letters, digits and hyphens"
            yield Fault(key, "is no name of Kubernetes", repr(value), need, fix=f"--{key} weft-run")


def files(job: ClusterJob, options: KubeflowOptions) -> Mapping[str, str]:
    """A ConfigMap and a TrainJob in one file."""
    name = kubernetes_name(job.name)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": options.namespace},
        "data": {CONFIG: job.config},
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": options.namespace},
        "spec": {
            "runtimeRef": {"name": options.runtime},
            "trainer": _trainer(job, options),
            "runtimePatches": [_runtime_patch(name, options)],
        },
    }
    return {FILE: yaml_text(config_map) + "---\n" + yaml_text(train_job)}


def _trainer(job: ClusterJob, options: KubeflowOptions) -> dict[str, Any]:
    """The command of every node. The runtime sets torchrun's PET_ variables: nodes and address."""
    resources: dict[str, str] = {}
    if job.cpus_per_node:
        resources["cpu"] = str(job.cpus_per_node)
    if job.gpus_per_node:
        resources["nvidia.com/gpu"] = str(job.gpus_per_node)
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": ["torchrun"],
        "args": ["-m", "weft", "train", f"{CONTAINER_CONFIG}/{CONFIG}", *job.flags],
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "env": [
            {"name": "WEFT_JOB", "value": f"kubeflow {job.name}"},
            {"name": "PET_MAX_RESTARTS", "value": str(job.restarts)},
        ],
    }
    if resources:
        trainer["resourcesPerNode"] = {"limits": resources, "requests": resources}
    return trainer


def _runtime_patch(name: str, options: KubeflowOptions) -> dict[str, Any]:
    """Volumes, and time to save, for the pods that the runtime describes."""
    volumes = [
        {"name": "weft-config", "configMap": {"name": name}},
        {"name": "weft-runs", "persistentVolumeClaim": {"claimName": options.volume}},
    ]
    mounts = [
        {"name": "weft-config", "mountPath": CONTAINER_CONFIG, "readOnly": True},
        {"name": "weft-runs", "mountPath": CONTAINER_RUNS},
    ]
    pod = {
        "terminationGracePeriodSeconds": options.save_s,
        "volumes": volumes,
        "containers": [{"name": NODE, "volumeMounts": mounts}],
    }
    job_template = {"spec": {"template": {"spec": pod}}}
    replicated_jobs = [{"name": NODE, "template": job_template}]
    job_set = {"spec": {"replicatedJobs": replicated_jobs}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": job_set}}


def kubernetes_name(name: str) -> str:
    """The name in lower case with hyphens, as Kubernetes needs it; it begins with a letter, as the
    schema of a TrainJob does.
    """
    plain = name.lower().replace("_", "-").replace(".", "-").strip("-")
    return (plain if plain[:1].isalpha() else f"weft-{plain}")[:50].strip("-")


def submit(file: Path, options: KubeflowOptions) -> list[str]:
    """kubectl with the file."""
    return ["kubectl", "apply", "-f", str(file)]


ENGINE = Engine(
    "kubeflow",
    "ConfigMap and TrainJob for kubectl apply",
    options=KubeflowOptions,
    shares_folder=False,
    option_faults=option_faults,
    files=files,
    submit=submit,
)
