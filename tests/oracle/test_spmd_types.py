"""Rules of the typed certificate against those of Meta's `spmd_types`, which types the same operations on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.planner.test_axis_types import axis_type
from weft.planner.certificate.type_mode import TypeMode

spmd = pytest.importorskip("spmd_types", reason="pip install spmd_types")
checker = pytest.importorskip("spmd_types.checker")

SHAPE = (4, 4)
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "mm": torch.mm,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "relu": torch.relu,
    "sum": torch.sum,
    "double": lambda x: 2 * x,
    "plus one": lambda x: x + 1,
    "transpose": lambda x: x.t(),
    "softmax": lambda x: x.softmax(1),
    "view": lambda x: x.view(2, 8),
    "clone": torch.clone,
}
KINDS = ("R", "V", "P")
SAME = {"R": ("replicated", "zero"), "V": ("varying", "sharded"), "P": ("partial",)}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A fake group of two ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def library_type(act: Callable[..., Tensor], kinds: tuple[str, ...], group: Any) -> str:
    """What `spmd_types` says: a type, or "error"."""
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    with spmd.set_current_mesh(mesh), checker.typecheck():
        tensors = [torch.randn(SHAPE) for _ in kinds]
        for x, kind in zip(tensors, kinds, strict=True):
            spmd.assert_type(x, {group: getattr(spmd, kind)})
        try:
            out = act(*tensors)
        except spmd.SpmdTypeError:
            return "error"
        return str(spmd.get_axis_local_type(out, group).value)


def own_type(act: Callable[..., Tensor], kinds: tuple[str, ...]) -> str:
    """What the certificate says: a type, or "error"."""
    mode = TypeMode(("tp",))
    tensors = [torch.empty(SHAPE, device="meta") for _ in kinds]
    for x, kind in zip(tensors, kinds, strict=True):
        mode.set(x, (axis_type(kind, SHAPE),))
    with mode:
        out = act(*tensors)
    if mode.findings:
        return "error"
    kind = mode.type_of(out, "tp").kind
    return next(name for name, same in SAME.items() if kind in same)


STRICTER = {("V", "P"), ("P", "V")}
"""What varies inside of a declared region is not judged there, but where the region ends."""


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
def test_two_tensors_have_the_type_that_the_library_gives(
    name: str, left: str, right: str, group: Any
) -> None:
    expected = library_type(BINARY[name], (left, right), group)
    got = own_type(BINARY[name], (left, right))
    if (left, right) in STRICTER and expected == "error":
        assert got == "V"
    else:
        assert got == expected


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_has_the_type_that_the_library_gives(name: str, kind: str, group: Any) -> None:
    assert own_type(UNARY[name], (kind,)) == library_type(UNARY[name], (kind,), group)
