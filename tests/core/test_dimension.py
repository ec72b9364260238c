"""Dimension records: discovered without torch, and the rules that the other modules derive from them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterable

import pytest

from weft.core.axes import data_axes, gradient_axes
from weft.core.dimension import (
    activation_axes,
    all_axes,
    data_axis,
    default_sharding_rule,
    dimensions,
    exact_axes,
    local_update_axes,
    pipeline_axis,
    position_axes,
    replicated_axes,
    sequence_axes,
    token_axes,
    uneven_axes,
)
from weft.core.mesh import Mesh

KNOWN = ("site", "pp", "dp", "fsdp", "ep", "cp", "tp")


def known(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of weft's own dimensions: a file that is added to `weft.parallel` changes no test."""
    return tuple(axis for axis in axes if axis in KNOWN)


def test_dimensions_are_found_outermost_first() -> None:
    assert known(all_axes()) == KNOWN
    assert list(dimensions()) == sorted(dimensions(), key=lambda axis: dimensions()[axis].nesting)


def test_roles_follow_from_the_records() -> None:
    assert (pipeline_axis(), data_axis()) == ("pp", "dp")
    assert known(sequence_axes()) == ("site", "dp", "fsdp", "ep")
    assert known(position_axes()) == ("cp",)
    assert known(token_axes()) == ("site", "dp", "fsdp", "ep", "cp")
    assert known(replicated_axes()) == known(activation_axes()) == ("tp",)
    assert uneven_axes() >= {"vocab"}


def test_an_axis_of_local_updates_is_in_no_equality_with_one_device() -> None:
    assert known(local_update_axes()) == ("site",)
    assert known(exact_axes()) == ("pp", "dp", "fsdp", "ep", "cp", "tp")
    assert not set(local_update_axes()) & set(exact_axes())
    mesh = Mesh.parse("site2 dp2 tp2")
    assert data_axes(mesh) == gradient_axes(mesh, varies=data_axes(mesh), sharded=()) == ("dp",)


def test_each_logical_axis_is_sharded_over_one_mesh_axis() -> None:
    own = {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "vocab": "tp", "experts": "ep"}
    assert default_sharding_rule().items() >= own.items()
    logical_axes = [axis for dimension in dimensions().values() for axis in dimension.params]
    assert len(logical_axes) == len(set(logical_axes))


@pytest.mark.parametrize("name", all_axes())
def test_transforms_take_the_arguments_that_parallelize_passes(name: str) -> None:
    transform = dimensions()[name].load_transform()
    if transform is not None:
        arguments = dict.fromkeys(("plan", "comm", "axes", "axis_sizes", "dropout"))
        inspect.signature(transform).bind({}, **arguments)


def test_records_import_no_torch() -> None:
    code = "import sys; from weft.core.dimension import dimensions; dimensions(); sys.exit('torch' in sys.modules)"
    returncode = subprocess.run([sys.executable, "-c", code], check=False).returncode
    assert returncode == 0
