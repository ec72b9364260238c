"""Checks of the section `[site]`: local updates need a mesh axis for them, and not every option works with it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.schema import PrecisionConfig, SiteConfig
from weft.config.unused_keys import set_keys
from weft.core.axes import local_update_axis
from weft.core.dimension import local_update_axes
from weft.core.mesh import Mesh
from weft.errors import Fault

KEYS = ("every", "lr", "momentum", "wire", "overlap", "mix", "gbit_s")


def sites_exist(mesh: Mesh, site: SiteConfig) -> Iterator[Fault]:
    """The section is read only where the mesh has an axis of local updates, and `mix` only where
    exchanges overlap with steps.
    """
    axis = local_update_axis(mesh)
    if axis is None:
        yield from _unread_keys(site)
        return
    names = [name for name, _ in mesh.axes]
    if names[0] != axis:
        outermost = [f"{axis}{mesh.degree(axis)}"]
        outermost += [f"{name}{degree}" for name, degree in mesh.axes if name != axis]
        yield Fault(
            "mesh",
            f"the ranks of a {axis} are not next to each other",
            got=repr(mesh.text),
            need=f"{axis} first",
            fix=f'--mesh "{" ".join(outermost)}"',
        )
    if not site.overlap:
        what = "is set, and site.overlap is 0: every site takes the outer parameters whole"
        yield from set_keys(site, "site", ("mix",), what, fix="--site.overlap 1, or leave it out")
    if site.overlap >= site.every:
        yield Fault(
            "site.overlap",
            "an exchange would not end before the next one begins",
            got=f"{site.overlap} with site.every {site.every}",
            need=f"below {site.every}",
            fix=f"--site.overlap {site.every - 1}" if site.every > 1 else "--site.overlap 0",
        )


def _unread_keys(site: SiteConfig) -> Iterator[Fault]:
    """Keys that have other values than their defaults, on a mesh without sites; the run.toml of a run
    over sites has them, so leaving them out is no fix.
    """
    (axis,) = local_update_axes()
    what = f"is set, and the mesh has no axis {axis}"
    fields = SiteConfig.model_fields
    for name in KEYS:
        fix = f'--mesh "{axis}2 ...", or --{axis}.{name} {fields[name].default}'
        yield from set_keys(site, axis, (name,), what, fix=fix)


def sites_take_options(
    mesh: Mesh, precision: PrecisionConfig, *, deterministic: bool
) -> Iterator[Fault]:
    """Options that are not possible where sites train apart."""
    axis = local_update_axis(mesh)
    if axis is None:
        return
    if deterministic:
        what = f"fixes the bits for every number of data ranks, and {axis} changes the algorithm"
        yield Fault("deterministic", what, got="True", need="False", fix="leave deterministic out")
    if precision.params not in ("float32", "float64"):
        yield Fault(
            "precision.params",
            "outer steps are smaller than its digits",
            got=precision.params,
            need="float32 or float64",
            fix="--precision.params float32; compute may stay as it is",
        )
