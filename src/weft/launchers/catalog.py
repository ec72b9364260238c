"""The engines that `weft launch` knows, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.launchers import kubeflow, ray, skypilot, slurm
from weft.launchers.job import Engine

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {engine.name: engine for engine in (slurm.ENGINE, ray.ENGINE, kubeflow.ENGINE, skypilot.ENGINE)}
)
