"""`weft.FullyShardedDataParallel`: any module trains as in one process, and each rank holds its shards."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.live import Live, storage_bytes
from tests.parallel.test_dp import LOOPS, Loop
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.errors import DataError, PlanError, WeftError
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.parallel.zero.sharded_tensor import local_of
from weft.testing import run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
RANKS = "dp3"


class Cell(nn.Module):
    """A block of uneven shapes, with a buffer and a parameter that the forward does not use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, 2 * width + 1),
            nn.Linear(2 * width + 1, width, bias=False),
        )
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor, *, gain: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.up(x) * gain + 0.0)
        out = x + self.down(hidden) + self.shift
        return {"out": (out, "a note")}


class Net(nn.Module):
    """Tied embedding and head, a scale of the net's own, a frozen block, blocks in a list."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 5)
        self.cells = nn.ModuleList([Cell(5), Cell(5)])
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for cell in self.cells:
            x = cell(x, gain=self.scale.mean())["out"][0]
        logits: Tensor = self.head(self.frozen(x) * self.scale)
        return logits


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    logits = net(tokens[:, :-1])
    targets = tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data() -> Tensor:
    """[step, backward, sequence, token]"""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (3, 2, 6, 5), generator=generator)


def train_alone(*, clip: float = 0.0) -> dict[str, Tensor]:
    net = Net().double()
    optimizer = torch.optim.AdamW(
        [param for param in net.parameters() if param.requires_grad], lr=1e-2
    )
    for step in data():
        optimizer.zero_grad()
        sum(loss_of(net, tokens) for tokens in step).backward()  # type: ignore[union-attr]
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net.state_dict()


def train(
    net: FullyShardedDataParallel,
    *,
    defer: bool = False,
    set_to_none: bool = True,
    clip: float = 0.0,
) -> None:
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in data():
        first, second = (tokens.chunk(3)[net.comm.rank] for tokens in step)
        if defer:
            with net.no_sync():
                loss_of(net, first).backward()
        else:
            loss_of(net, first).backward()
        loss = loss_of(net, second)
        loss.backward()
        net.finish_gradient_synchronization()
        if clip:
            net.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def assert_close_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor of `expected` within the rounding of float64."""
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **CLOSE)


def assert_equal_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor of `expected`, bit for bit."""
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_module_trains_as_one_process_on_the_whole_batch(
    zero: Any, defer: bool, set_to_none: bool
) -> None:
    nets = [Net(seed).double() for seed in range(3)]

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = FullyShardedDataParallel(nets[comm.rank], comm, zero=zero)
        train(net, defer=defer, set_to_none=set_to_none)
        return net.full_state_dict()

    expected = train_alone()
    for state in run_ranks(RANKS, rank):
        assert state.keys() == expected.keys()
        assert_close_state(state, expected)


@pytest.mark.parametrize("zero", [1, 3])
def test_clipping_takes_the_norm_of_all_ranks(zero: Any) -> None:
    want = train_alone(clip=0.05)

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = FullyShardedDataParallel(copy.deepcopy(plain), comm, zero=zero)
        train(net, clip=0.05)
        return net.full_state_dict()

    plain = Net().double()
    for name, value in run_ranks(RANKS, rank)[1].items():
        torch.testing.assert_close(
            value, want[name], rtol=1e-7, atol=1e-9
        )  # torch adds 1e-6 to a norm of another rounding


@pytest.mark.parametrize("blocks", ["root", "nested", "linears"])
def test_blocks_may_be_none_nested_or_small(blocks: str) -> None:
    def chosen(net: Net) -> list[nn.Module]:
        if blocks == "root":
            return []
        if blocks == "nested":
            return [net.cells[0], net.cells[0].up, net.cells[1]]
        return [module for module in net.modules() if isinstance(module, nn.Linear)]

    plain = Net().double()

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = copy.deepcopy(plain)
        wrapped = FullyShardedDataParallel(net, comm, blocks=chosen(net))
        train(wrapped)
        return wrapped.full_state_dict()

    expected = train_alone()
    for state in run_ranks("dp3", rank):
        assert_close_state(state, expected)


def test_forwards_with_and_without_gradients_use_the_updated_values() -> None:
    x = torch.ones(1, 3, dtype=torch.float64)

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        linear = nn.Linear(3, 1).double()
        net = FullyShardedDataParallel(linear, comm, zero=2, blocks=())
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net(x).sum().backward()
        net.finish_gradient_synchronization()
        with torch.no_grad():
            before = net(x)
            optimizer.step()
            after = net(x)
        with_gradient = net(x).detach()
        return before, after, with_gradient

    for before, after, with_gradient in run_ranks("dp2", rank):
        change = before - after
        assert torch.allclose(change, torch.full_like(change, 4.0))
        assert torch.equal(after, with_gradient)


def test_gradients_accumulate_until_they_are_zeroed() -> None:
    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        net = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), comm)
        (weight,) = net.parameters()
        found = []
        for _ in range(2):
            loss = net(torch.ones(1, 2)).sum()
            loss.backward()
            net.finish_gradient_synchronization()
            assert weight.grad is not None
            found.append(weight.grad.clone())
        return found[0], found[1]

    for once, twice in run_ranks("dp2", rank):
        assert torch.equal(twice, 2 * once)


def held_bytes(net: FullyShardedDataParallel) -> int:
    """Bytes of unsharded parameters and shards that a rank holds between steps."""
    tensors = [
        tensor
        for group in net._reducer.groups
        for tensor in (group.unsharded_params.flat, group.sharded_param)
    ]
    return storage_bytes(tensors)


@pytest.mark.parametrize(("zero", "fraction"), [(1, 1.0), (2, 1.0), (3, 1 / 3)])
def test_between_steps_a_rank_holds_its_shards(zero: Any, fraction: float) -> None:
    plain = Net().double()

    def num_entries(net: nn.Module) -> int:
        return sum(local_of(param).numel() for param in net.parameters())

    def rank(comm: Comm) -> tuple[int, int]:
        net = FullyShardedDataParallel(copy.deepcopy(plain), comm, zero=zero)
        train(net)
        return held_bytes(net), num_entries(net)

    own_bytes = 8 * num_entries(plain) * fraction
    padding = 8 * 2 * 6  # up to 2 entries for each of 6 groups
    results = run_ranks(RANKS, rank)
    for held, _ in results:
        assert own_bytes <= held <= own_bytes + padding
    assert sum(entries for _, entries in results) == num_entries(plain)


class Deep(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        linears = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.layers = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_module_on_the_meta_device_is_never_unsharded_on_any_rank() -> None:
    layers, width = 12, 32
    block_bytes = 4 * width * width

    class Peak(Live):
        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self.most = max(self.most, self.num_bytes())
            return out

    def rank(comm: Comm) -> tuple[int, dict[str, Tensor]]:
        with torch.device("meta"):
            deep = Deep(layers, width)
        peak = Peak()
        with peak:
            net = FullyShardedDataParallel(deep, comm)
        return peak.most, net.full_state_dict()

    (most, state), (_, other) = run_ranks("dp2", rank)
    assert most <= layers * block_bytes / 2 + 3 * block_bytes, (
        "the shards, and one block while it is initialised and packed"
    )
    for name, value in state.items():
        assert torch.equal(value, other[name])
    for value in state.values():
        assert 0.05 < value.std() < 0.2, "as reset_parameters draws"


class Tied(nn.Module):
    """A head with the weight of the embedding and its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(tokens)))
        return logits


def test_on_the_meta_device_tied_weights_stay_tied_and_all_start_as_the_first_rank() -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        with torch.device("meta"):
            tied = Tied()
        net = FullyShardedDataParallel(tied, comm)
        assert len(list(net.parameters())) == 4
        loss = net(torch.arange(3)).sum()
        loss.backward()
        net.finish_gradient_synchronization()
        return net.full_state_dict()

    first, second = run_ranks("dp2", rank)
    assert torch.equal(first["embed.weight"], first["head.weight"])
    assert first["embed.weight"].std() > 0.5, "as nn.Embedding draws, not as nn.Linear does"
    for name, value in first.items():
        assert torch.equal(value, second[name])
    assert first["norm.running_var"].isfinite().all()


def test_a_meta_module_without_reset_parameters_is_rejected_by_name() -> None:
    def rank(comm: Comm) -> None:
        with torch.device("meta"):
            FullyShardedDataParallel(Net(), comm)

    with pytest.raises(PlanError, match="Cell is on the meta device and has no reset_parameters"):
        run_ranks("dp2", rank)


class HalfReset(nn.Module):
    """A module whose `reset_parameters` sets one of its tensors."""

    def __init__(self, missing: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3))
        self.missing = missing
        if missing == "second":
            self.second = nn.Parameter(torch.zeros(3))
        else:
            self.register_buffer("table", torch.arange(3.0))

    def reset_parameters(self) -> None:
        self.first.data.normal_()


@pytest.mark.parametrize("missing", ["second", "table"])
def test_a_meta_module_that_leaves_a_tensor_unset_is_rejected_by_name(missing: str) -> None:
    def rank(comm: Comm) -> None:
        with torch.device("meta"):
            FullyShardedDataParallel(HalfReset(missing), comm)

    with pytest.raises(PlanError, match=f"{missing}: has no values: it is on the meta device"):
        run_ranks("dp2", rank)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_full_state_dicts_follow_parameters_that_scripts_have_given_other_memory(zero: Any) -> None:
    given = {key: torch.full_like(value, 7) for key, value in nn.Linear(5, 3).state_dict().items()}

    def rank(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        net = FullyShardedDataParallel(nn.Linear(5, 3), comm, zero=zero)
        for param in net.parameters():
            param.data = torch.full_like(param.data, 3)
        replaced = net.full_state_dict()
        net.double()
        net.load_full_state_dict(given)
        out = net(torch.ones(2, 5, dtype=torch.float64))
        return replaced, net.full_state_dict(), out.detach()

    for replaced, loaded, out in run_ranks("dp2", rank):
        for key, value in given.items():
            assert torch.equal(replaced[key], torch.full_like(value, 3))
            assert loaded[key].dtype == torch.float64
            assert torch.equal(loaded[key], value.double())
        assert torch.equal(out, torch.full((2, 3), 5 * 7.0 + 7, dtype=torch.float64))


def test_a_full_state_dict_of_other_shapes_is_rejected() -> None:
    def rank(comm: Comm) -> None:
        net = FullyShardedDataParallel(nn.Linear(5, 3), comm)
        state = {
            key: value.reshape(value.shape[::-1]) for key, value in net.full_state_dict().items()
        }
        with pytest.raises(
            DataError, match=r"weight: has another shape \(got \[5, 3\]; need \[3, 5\]"
        ):
            net.load_full_state_dict(state)

    run_ranks("dp2", rank)


def test_a_full_state_dict_is_loaded_into_shards() -> None:
    other = Net(7).double()
    tokens = data()[0, 0]

    def rank(comm: Comm, zero: Any) -> tuple[dict[str, Tensor], Tensor]:
        module = Net(comm.rank).double()
        net = FullyShardedDataParallel(module, comm, zero=zero)
        net.load_full_state_dict(other.state_dict())
        with torch.no_grad():
            return net.full_state_dict(), net(tokens)

    expected_logits = other(tokens)
    for zero in (2, 3):
        for state, logits in run_ranks("dp2", lambda comm, zero=zero: rank(comm, zero)):
            assert_equal_state(state, other.state_dict())
            assert torch.equal(logits, expected_logits)


def test_a_state_dict_with_other_keys_is_rejected() -> None:
    def rank(comm: Comm) -> None:
        FullyShardedDataParallel(nn.Linear(2, 2), comm).load_full_state_dict(
            {"weight": torch.zeros(2, 2)}
        )

    with pytest.raises(DataError, match="missing or unknown keys: bias"):
        run_ranks("dp2", rank)


def test_parameters_of_a_module_around_it_are_the_shards() -> None:
    def rank(comm: Comm) -> bool:
        net = FullyShardedDataParallel(nn.Linear(4, 4), comm)
        around = nn.Sequential(net, nn.Tanh())
        return {id(param) for param in around.parameters()} == {
            id(shard) for shard in net._shard_of.values()
        }

    assert all(run_ranks("dp2", rank))


def test_blocks_run_in_the_compute_dtype_and_the_optimizer_updates_the_params_dtype() -> None:
    seen: list[torch.dtype] = []

    class Look(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x)

    def rank(comm: Comm) -> tuple[torch.dtype, set[torch.dtype]]:
        net = FullyShardedDataParallel(
            nn.Sequential(Look(4, 4), Look(4, 4)),
            comm,
            compute=torch.bfloat16,
            reduce=torch.float32,
        )
        y = net(torch.ones(2, 4))
        y.float().sum().backward()
        net.finish_gradient_synchronization()
        return y.dtype, {
            dtype for param in net.parameters() for dtype in (param.dtype, param.grad.dtype)
        }

    for y, params in run_ranks("dp2", rank):
        assert y == torch.bfloat16
        assert params == {torch.float32}
    assert set(seen) == {torch.bfloat16}


def test_each_block_is_gathered_once_forward_and_once_backward_and_reduced_once() -> None:
    layers, width = 4, 6

    def rank(comm: Comm) -> dict[Any, Any]:
        torch.manual_seed(0)
        net = FullyShardedDataParallel(Deep(layers, width), comm)
        counter = Counter()
        comm.observers = (counter,)
        net(torch.ones(2, width)).sum().backward()
        net.finish_gradient_synchronization()
        return counter.traffic

    own_bytes_of_block = 4 * width * width // 2
    for traffic in run_ranks("dp2", rank):
        gathers = traffic["dp", "all_gather"]
        reductions = traffic["dp", "reduce_scatter"]
        assert gathers.operations == 2 * layers
        assert reductions.operations == layers
        assert gathers.sent_bytes == 2 * layers * own_bytes_of_block


def test_frozen_blocks_are_resharded_during_the_backward() -> None:
    layers, width = 6, 8

    def num_unsharded(net: FullyShardedDataParallel) -> int:
        return sum(group.unsharded_params.is_allocated for group in net._reducer.groups)

    def rank(comm: Comm) -> int:
        torch.manual_seed(0)
        deep = Deep(layers, width).requires_grad_(False)
        net = FullyShardedDataParallel(deep, comm)
        held: list[int] = []

        def before_backward(*_: object) -> None:
            held.append(num_unsharded(net))

        for layer in deep.layers:
            layer.register_full_backward_pre_hook(before_backward)
        net(torch.ones(2, width, requires_grad=True)).sum().backward()
        assert num_unsharded(net) == 0
        return max(held)

    assert max(run_ranks("dp2", rank)) <= 3, "the block that runs, the one before, the one after"


class Branches(nn.Module):
    """A block of which ranks may use different parameters; `unused` has no part in any forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.cells = nn.ModuleList([Branch(), Branch()])

    def forward(self, x: Tensor, branch: str) -> Tensor:
        for cell in self.cells:
            x = cell(x, branch)
        return x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3).double()
        self.left = nn.Linear(3, 3).double()
        self.unused = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, branch: str) -> Tensor:
        x = self.trunk(x)
        return self.left(x) if branch == "left" else torch.tanh(x)


def has_gradient(net: nn.Module) -> dict[str, bool]:
    return {name: param.grad is not None for name, param in net.named_parameters()}


def decaying_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_that_no_rank_used_have_no_gradient_and_do_not_decay(zero: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, 4, 3, dtype=torch.float64, generator=generator)
    branches = [("left", "right"), ("right", "right"), ("right", "left")]
    alone = Branches()
    for x_of_rank, branches_of_rank in zip(x, branches, strict=True):
        for samples, branch in zip(x_of_rank, branches_of_rank, strict=True):
            loss = alone(samples, branch).sum() / 3
            loss.backward()
    decaying_adamw(alone).step()
    expected = has_gradient(alone)
    assert not all(expected.values()), "a parameter is unused"
    nets = [Branches() for _ in range(3)]

    def rank_of(comm: Comm) -> tuple[dict[str, bool], dict[str, Tensor]]:
        net = FullyShardedDataParallel(nets[comm.rank], comm, zero=zero)
        optimizer = decaying_adamw(net)
        for samples, branch in zip(x[comm.rank], branches[comm.rank], strict=True):
            loss = net(samples, branch).sum()
            loss.backward()
        net.finish_gradient_synchronization()
        optimizer.step()
        return has_gradient(net), net.full_state_dict()

    for has_grad, state in run_ranks("dp3", rank_of):
        assert has_grad == expected
        assert_close_state(state, alone.state_dict())


def test_ranks_that_use_different_parameters_of_a_block_start_their_calls_in_one_order() -> None:
    """Found: under ZeRO 3 a rank that left a parameter unused met the others' all-gathers with its
    reductions.
    """
    plain = DifferingCells()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    x = torch.ones(4, 3, dtype=torch.float64)

    def gradients_of(comm: Comm) -> dict[str, Tensor]:
        net = FullyShardedDataParallel(nets[comm.rank], comm)
        net(x, use_last=comm.rank == 0).sum().backward()
        net.finish_gradient_synchronization()
        with torch.no_grad():
            for shard in net.parameters():
                shard.copy_(shard.grad)
        return net.full_state_dict()

    for use_last in (True, False):
        (plain(x, use_last=use_last).sum() / 2).backward()
    for found in run_ranks("dp2", gradients_of):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, **CLOSE)


class DifferingCells(nn.Module):
    """Four blocks; each uses its last layer only if `use_last` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.cells = nn.ModuleList([DifferingCell() for _ in range(4)])

    def forward(self, x: Tensor, *, use_last: bool) -> Tensor:
        for cell in self.cells:
            x = cell(x, use_last)
        return x


class DifferingCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(3, 3).double() for _ in range(2))

    def forward(self, x: Tensor, use_last: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x) if use_last else x


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_unused_parameter_stays_as_it_is_whatever_loop_zeroes_gradients(
    zero: Any, loop: Loop
) -> None:
    plain = Branches()

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = FullyShardedDataParallel(copy.deepcopy(plain), comm, zero=zero)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        x = torch.ones(4, 3, dtype=torch.float64)

        def backward() -> None:
            net(x, "left").sum().backward()
            net.finish_gradient_synchronization()

        for _ in range(3):
            loop(optimizer, backward)
        return net.full_state_dict()

    for state in run_ranks("dp2", rank):
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value) == ("unused" in name)


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_of_no_sync_alone_are_synchronised_by_finish(zero: Any) -> None:
    def rank(comm: Comm) -> None:
        net = FullyShardedDataParallel(nn.Linear(4, 4), comm, zero=zero)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with net.no_sync():
            net(torch.ones(2, 4)).sum().backward()
        assert not any(param.grad.any() for param in net.parameters())
        net.finish_gradient_synchronization()
        before = net.full_state_dict()
        optimizer.step()
        assert not torch.equal(net.full_state_dict()["weight"], before["weight"])

    run_ranks("dp2", rank)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_state_dict_has_the_shards_under_the_names_of_the_parameters(zero: Any) -> None:
    plain = Net()

    def rank(comm: Comm) -> None:
        net = FullyShardedDataParallel(copy.deepcopy(plain), comm, zero=zero)
        state = net.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, param in net.named_parameters():
            assert torch.equal(state[name], param)
        for name, buffer in net.named_buffers():
            assert torch.equal(state[name], buffer)
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        want = net(tokens)
        state = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for value in net.state_dict().values():
                value.mul_(2)
        net.load_state_dict(state)
        assert torch.equal(net(tokens), want)
        with pytest.raises(PlanError, match="cannot be assigned"):
            net.load_state_dict(state, assign=True)
        outer = nn.ModuleDict({"net": net})
        names = [name for name, _ in outer.named_parameters()]
        assert set(names) <= set(outer.state_dict())

    run_ranks("dp2", rank)


def test_the_parameters_of_a_block_that_one_rank_alone_runs_are_named() -> None:
    def rank(comm: Comm) -> None:
        net = FullyShardedDataParallel(Optional(), comm)
        loss = net(torch.ones(2, 3), skips=comm.rank == 1).sum()
        loss.backward()
        net.finish_gradient_synchronization()

    with pytest.raises(WeftError) as caught:
        run_ranks("dp2", rank)
    (note,) = (note for note in caught.value.__notes__ if "all-gathered" in note)
    assert re.search(r"this rank all-gathered (trunk|adapter).weight, (trunk|adapter).bias", note)


class Optional(nn.Module):
    """A block that a forward may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.adapter = nn.Linear(3, 5)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        x = self.trunk(x)
        return x if skips else self.adapter(x)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_wrapped_module_keeps_its_parameter_names(zero: Any) -> None:
    plain = Net()

    def names_of(module: nn.Module, **options: str) -> list[str]:
        return [name for name, _ in module.named_parameters(**options)]

    names = names_of(plain)

    def rank(comm: Comm) -> dict[str, int]:
        net = FullyShardedDataParallel(copy.deepcopy(plain), comm, zero=zero)
        assert names_of(net) == names
        assert names_of(net.module) == names
        assert names_of(net, prefix="net") == [f"net.{name}" for name in names]
        frozen = [name for name, param in net.named_parameters() if not param.requires_grad]
        assert frozen == ["frozen.weight", "frozen.bias"]
        assert net.module.scale.shape == (5,), "the forward uses the unsharded parameter"
        with torch.no_grad():
            net(torch.zeros(2, 3, dtype=torch.int64))
        return {name: local_of(param).numel() for name, param in net.named_parameters()}

    sizes = run_ranks("dp3", rank)
    for name, param in plain.named_parameters():
        total = sum(size[name] for size in sizes)
        assert total == param.numel()
