"""What a pipeline stage sends: a tuple or dict of tensors as columns of one, whose gradient is theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.core.mesh import Mesh
from weft.layout.plan import Plan, Stage
from weft.parallel.pipeline.boundary import received_input, sent_output

DIMS = (("batch", 3, 4), ("batch",), ("batch", 2))


def plan_of(names: tuple[str, ...]) -> Plan:
    parts = tuple(zip(names, DIMS, strict=True)) if names else ()
    out = () if names else ("batch", 5)
    stages = (
        Stage(blocks=("layer0",), out=out, flops=1.0, parts=parts),
        Stage(blocks=("loss",), out=(), flops=1.0),
    )
    return Plan(
        mesh=Mesh.parse("pp2"),
        family="mnist",
        architecture="{}",
        stages=stages,
        microbatches=2,
        micro_size=2,
    )


def tensors() -> list[Tensor]:
    sizes = [[2 if size == "batch" else int(size) for size in dims] for dims in DIMS]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("names", [("", "", ""), ("x", "gate", "skip")], ids=["tuple", "dict"])
def test_several_tensors_and_their_gradients_go_through_one(names: tuple[str, ...]) -> None:
    plan = plan_of(names)
    handed = tensors()
    output: Any = tuple(handed) if not names[0] else dict(zip(names, handed, strict=True))
    sent = sent_output(plan, 0, output)
    assert tuple(sent.shape) == plan.boundary_shape(0) == (2, 12 + 1 + 2)
    arrived = sent.detach().requires_grad_()
    taken = received_input(plan, 0, arrived)
    assert type(taken) is type(output)
    values = list(taken.values()) if isinstance(taken, dict) else list(taken)
    if names[0]:
        assert list(taken) == list(names)
    for one, other in zip(values, handed, strict=True):
        assert torch.equal(one, other)
    sum((place + 1) * value.square().sum() for place, value in enumerate(values)).backward()
    sent.backward(arrived.grad)
    for place, each in enumerate(handed):
        assert each.grad is not None
        assert torch.allclose(each.grad, 2 * (place + 1) * each.detach(), rtol=0, atol=1e-15)


def test_one_tensor_is_sent_as_it_is() -> None:
    plan = plan_of(())
    x = torch.randn(2, 5)
    assert sent_output(plan, 0, x) is x
    assert received_input(plan, 0, x) is x
    assert plan.boundary_shape(0) == (2, 5)


def test_tensors_without_rows_are_sent_as_columns_without_rows() -> None:
    plan = plan_of(("", "", ""))
    sent = sent_output(plan, 0, tuple(tensor[:0] for tensor in tensors()))
    assert tuple(sent.shape) == (0, 12 + 1 + 2)
