"""Runs made from another run: on another mesh, of one site, in float64; the keys that differ, and the command. No torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from weft.config.hf.mapping import Families
from weft.config.load import load
from weft.config.rules.checks import as_flags
from weft.config.run import Run
from weft.config.schema import SiteConfig
from weft.core.axes import local_update_axis, without_local_updates
from weft.core.mesh import Mesh

DEFAULT_FAMILY = "llama3"
NOT_IN_COMMAND = frozenset(
    ("model.preset", "model.name", "out", "resume", "resume_code", "device", "transport", "nproc")
)


def with_mesh(run: Run, mesh: str) -> Run:
    """The run on another mesh, with as many micro-batches."""
    changed = run.with_values({"mesh": mesh})
    sequences_of_rank = run.batch.micro_size * run.num_micro
    global_size = sequences_of_rank * changed.num_data_ranks
    return changed.with_values({"batch.global_size": global_size})


def with_degree(run: Run, axis: str, degree: int) -> Run:
    """The run with another degree of a mesh axis, and as many micro-batches."""
    return with_mesh(run, _mesh_text(run.device_mesh, axis, degree))


def _mesh_text(mesh: Mesh, axis: str, degree: int) -> str:
    """The text of a mesh with another degree of an axis; 1 leaves it out."""
    degrees = dict(mesh.axes) | {axis: degree}
    return " ".join(f"{name}{degrees[name]}" for name, _ in mesh.axes if degrees[name] > 1)


def inside_site(run: Run) -> Run:
    """The run of one site: its layout and its part of the batch, without local updates."""
    mesh = run.device_mesh
    axis = local_update_axis(mesh)
    assert axis is not None, "the run has sites"
    num_sites = mesh.degree(axis)
    return run.with_values(
        {
            "mesh": without_local_updates(mesh).text,
            "batch.global_size": run.batch.global_size // num_sites,
            axis: SiteConfig(),
        }
    )


def in_float64(run: Run) -> Run:
    """The run with float64 in place of its number types."""
    keys = ("precision.params", "precision.compute", "precision.reduce")
    return run.with_values(dict.fromkeys(keys, "float64"))


def changes(before: Run, after: Run) -> dict[str, tuple[str, str]]:
    """Keys that differ, with both values."""
    old = _flat(before)
    return {
        key: (str(old.get(key)), str(value))
        for key, value in _flat(after).items()
        if key != "model.preset" and old.get(key) != value
    }


def command_of(run: Run, families: Families, *, steps: int) -> str:
    """The command line that proves exactly this run."""
    default = load(["--model.name", run.model.name], families)
    flags: dict[str, Any] = {}
    if run.model.name != DEFAULT_FAMILY:
        flags["model.name"] = run.model.name
    default_values = _flat(default)
    for key, value in _flat(run).items():
        is_default = default_values.get(key) == value
        if key not in NOT_IN_COMMAND and not is_default:
            flags[key] = value
    command = f"weft prove --full --first {steps} {as_flags(flags)}"
    return command.rstrip()


def _flat(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(run).model_fields:
        value = getattr(run, name)
        if isinstance(value, BaseModel):
            for key in type(value).model_fields:
                found[f"{name}.{key}"] = getattr(value, key)
        else:
            found[name] = value
    return found
