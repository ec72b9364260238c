"""`weft.DataParallel`: one process, several devices; the CPU named more than once stands for several."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import PlanError
from weft.parallel.data_parallel.replicas import DataParallel

CPUS = ["cpu"] * 3
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


class Net(nn.Module):
    """A shared weight, a frozen one, a recurrent part, a buffer, nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, given: dict[str, Tensor], *, gain: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.seen += 1
        hidden = self.first(given["x"]) * gain
        x = torch.tanh(self.again(hidden))
        y, _ = self.rnn(x)
        thread = threading.current_thread()
        return self.frozen(y), {"sum": y.sum(), "who": thread.name}


def inputs(samples: int) -> Tensor:
    return torch.randn(
        samples, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def run(net: nn.Module, samples: int) -> tuple[Tensor, Tensor]:
    x = inputs(samples).requires_grad_()
    gain = torch.tensor(2.0, dtype=torch.float64)
    y, notes = net({"x": x}, gain=gain)
    loss = y.square().sum() + notes["sum"].sum()
    loss.backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("samples", [7, 3, 2, 1])
def test_outputs_and_gradients_are_those_of_one_device(samples: int) -> None:
    plain = Net()
    net = DataParallel(copy.deepcopy(plain), CPUS)
    want, want_dx = run(plain, samples)
    got, dx = run(net, samples)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(dx, want_dx, **CLOSE)
    for mine, theirs in zip(net.module.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)


def test_gradients_do_not_depend_on_which_thread_was_faster() -> None:
    gradients = []
    for _ in range(4):
        net = DataParallel(Net(), CPUS)
        run(net, 9)
        trained = [param for param in net.module.parameters() if param.requires_grad]
        gradients.append([param.grad for param in trained])
    first, *others = gradients
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0)


def test_each_replica_runs_in_a_thread_on_its_part_of_the_samples() -> None:
    seen: dict[str, int] = {}

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            name = threading.current_thread().name + str(len(seen))
            seen[name] = x.shape[1]
            barrier.wait()
            return x

    barrier = threading.Barrier(3, timeout=20)  # passed only if all three run at once
    x = torch.randn(2, 8, 3)
    data_parallel = DataParallel(Look(), CPUS, dim=1)
    assert torch.equal(data_parallel(x), x)
    assert sorted(seen.values()) == [2, 3, 3]


def test_the_first_replica_is_the_module_so_its_buffers_are_updated() -> None:
    net = DataParallel(Net(), CPUS)
    run(net, 6)
    assert net.module.seen == 1


def test_scalar_outputs_are_stacked_and_other_values_are_those_of_the_first_replica() -> None:
    net = DataParallel(Net(), CPUS)
    gain = torch.tensor(1.0, dtype=torch.float64)
    _, notes = net({"x": inputs(6)}, gain=gain)
    assert notes["sum"].shape == (3,)
    assert notes["who"] == threading.current_thread().name


def test_replicas_follow_the_modes_of_the_caller() -> None:
    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return x @ x.transpose(-1, -2)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        data_parallel = DataParallel(Look(), CPUS)
        dtype = data_parallel(torch.ones(6, 2, 2)).dtype
        assert dtype == torch.bfloat16


def test_training_equals_one_device() -> None:
    plain = Net()
    net = DataParallel(copy.deepcopy(plain), CPUS)
    for each in (plain, net):
        optimizer = torch.optim.SGD(
            [param for param in each.parameters() if param.requires_grad], lr=0.1
        )
        for samples in (6, 7, 8):
            optimizer.zero_grad()
            run(each, samples)
            if each is net:
                net.finish_gradient_synchronization()
            optimizer.step()
    for name, value in net.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], **CLOSE)


def test_the_error_of_a_replica_reaches_the_caller_and_names_the_device() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"cannot take {float(x.sum())}")

    with pytest.raises(ValueError, match="cannot take") as caught:
        DataParallel(Fails(), CPUS)(torch.ones(3))
    assert caught.value.__notes__ == ["raised by the replica on cpu"]


def test_inputs_that_differ_in_samples_and_no_devices_are_rejected() -> None:
    data_parallel = DataParallel(nn.Bilinear(2, 2, 2), CPUS)
    with pytest.raises(PlanError, match="differ in their number of samples"):
        data_parallel(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(PlanError, match="needs a device"):
        weft.DataParallel(nn.Linear(2, 2), [])
