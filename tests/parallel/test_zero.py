"""ZeRO stages: memory of a rank, when gradients are reduced and parameters gathered, initialisation group by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.live import Live, storage_bytes
from tests.matrix.layouts import LR, Case, make_step, own_micro_batches
from tests.parallel.test_tp import Log
from weft.comm.comm import Comm
from weft.comm.ops import copy_to_region
from weft.core.zero_stages import MAX_UNDER_WAY
from weft.errors import CommError
from weft.models.common.counter_normal import NUM_QUANTILES
from weft.parallel.zero.flat_params import FlatLayout, FlatParams
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.sharding_policy import ShardingPolicy
from weft.testing import run_ranks
from weft.train.step import TrainStep

TABLE_OF_QUANTILES = 4 * NUM_QUANTILES
"""Bytes of the float32 table from which every initial value is drawn, whatever the model."""


def run_step(step: TrainStep, case: Case) -> None:
    step(own_micro_batches(case, step.model.comm), lr=LR)


@pytest.mark.parametrize("length", [0, 1, 5, 12])
@pytest.mark.parametrize("parts", [1, 2, 5, 7])
def test_shards_cover_every_entry_once(length: int, parts: int) -> None:
    layout = FlatLayout.of({"a": (length,), "b": (3, 2), "c": ()}, parts)
    tensors = {
        "a": torch.arange(length).float(),
        "b": torch.arange(6).view(3, 2) + 100.0,
        "c": torch.tensor(7.0),
    }
    whole = layout.pack(tensors, dtype=torch.float32, device=torch.device("cpu"))
    shards = [
        layout.pack_shard(tensors, i, dtype=torch.float32, device=torch.device("cpu"))
        for i in range(parts)
    ]
    assert torch.equal(torch.cat(shards), whole)
    for name, tensor in tensors.items():
        pieces = []
        for index, shard in enumerate(shards):
            pieces.append(layout.shard_views(shard, index)[name])
        assert torch.equal(torch.cat(pieces), tensor.flatten())
        assert torch.equal(layout.views(whole)[name], tensor)


def test_freed_parameters_are_valid_under_saved_views_once_filled_again() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    layout = FlatLayout.of({"w": (3, 3)}, 1)
    flat = FlatParams({"w": weight}, layout, dtype=torch.float32)
    values = flat.flat.clone()
    y = (weight @ torch.randn(3, 2)).tanh().sum()
    flat.free()
    assert not flat.is_allocated
    flat.allocate()
    flat.alias().copy_(values)
    y.backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_between_steps_a_rank_holds_its_shards(zero: Any) -> None:
    case = Case("dp3", family="gpt2", zero=zero, microbatches=1)

    def rank(comm: Comm) -> tuple[int, int, int, int, int]:
        step = make_step(case, comm)
        run_step(step, case)
        groups = step.grads.groups
        states = []
        for state in step.optimizer.state.values():
            states += [x for x in state.values() if x.dim()]
        return (
            sum(span.stop - span.start for group in groups for span in group.layout.spans),
            sum(group.layout.shard_length for group in groups),
            storage_bytes(
                [x for group in groups for x in (group.unsharded_params.flat, group.sharded_param)]
            ),
            storage_bytes(
                [
                    x
                    for group in groups
                    for x in (group.unsharded_grad, group.sharded_grad)
                    if x is not None
                ]
            ),
            sum(x.numel() for x in states),
        )

    found = run_ranks(case.mesh, rank)
    whole = found[0][0]
    shard = found[0][1]
    padded = 3 * shard
    assert whole <= padded < whole + 3 * 8
    for _, _, params, gradients, _ in found:
        assert params == 8 * (shard if zero == 3 else padded)
        assert gradients == 8 * (padded if zero == 1 else shard)
    total = sum(states for *_, states in found)
    assert total == 2 * whole


@pytest.mark.parametrize("mesh", ["dp2", "dp4"])
def test_a_zero_3_model_is_initialised_group_by_group(mesh: str) -> None:
    case = Case(mesh, zero=3, microbatches=1, layers=3)

    class Peak(Live):
        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self.most = max(self.most, self.num_bytes())
            return out

    def rank(comm: Comm) -> tuple[int, int, int, int]:
        peak = Peak()
        with peak:
            step = make_step(case, comm)
        groups = step.grads.groups
        biggest = max(8 * group.layout.length for group in groups)
        held = storage_bytes(
            [
                x
                for group in groups
                for x in (group.unsharded_params.flat, group.sharded_param, group.sharded_grad)
            ]
        )
        all_shards = sum(8 * group.layout.length for group in groups)
        return peak.most, held, biggest, all_shards

    for most, held, biggest, whole in run_ranks(case.mesh, rank):
        assert most <= held + 2 * biggest + TABLE_OF_QUANTILES, (
            "shards, and a group while it is initialised and packed"
        )
        assert 2 * biggest < whole


def starts_of_a_backward(mesh: str, zero: Any) -> list[list[str]]:
    case = Case(mesh, zero=zero, microbatches=2)

    def rank(comm: Comm) -> list[str]:
        step = make_step(case, comm)
        log = Log()
        first = step.model.params["layer0.attn_norm.weight"]
        first.register_post_accumulate_grad_hook(
            lambda _: log.lines.append("layer0 has a gradient")
        )
        comm.observers = (log,)
        run_step(step, case)
        return [line for line in log.lines if line.startswith("start") or "has" in line]

    return run_ranks(mesh, rank)


@pytest.mark.parametrize(("zero", "backwards"), [(1, 1), (2, 2), (3, 2)])
def test_gradients_are_reduced_while_the_backward_still_runs(zero: Any, backwards: int) -> None:
    for lines in starts_of_a_backward("dp2", zero):
        marks: list[int] = []
        reduces: list[int] = []
        for place, line in enumerate(lines):
            if "layer0" in line:
                marks.append(place)
            if line == "start reduce_scatter":
                reduces.append(place)
        num_groups = len(reduces) // backwards
        of_last_backward = reduces[-num_groups:]
        early = [place for place in of_last_backward if place < marks[-1]]
        assert len(early) >= num_groups - 2, "only the groups that come last wait for the end"
        starts_in_first = reduces[0] < marks[0]
        assert starts_in_first == (backwards == 2), "stage 1 adds micro-batches up first"


@pytest.mark.parametrize("zero", [1, 3])
def test_sums_over_copies_run_beside_the_backward(zero: Any) -> None:
    for lines in starts_of_a_backward("dp2 fsdp2", zero):
        first = lines.index("start reduce_scatter")
        end = max(place for place, line in enumerate(lines) if "layer0" in line)
        num_late = lines.count("start reduce_scatter") - lines[first:end].count("start all_reduce")
        assert num_late == 2, "those of the groups that come last wait for the end"


@pytest.mark.parametrize("zero", [2, 3])
def test_few_reductions_hold_an_unsharded_gradient_at_once(zero: Any) -> None:
    case = Case("dp2", zero=zero, microbatches=2)

    def rank(comm: Comm) -> int:
        step = make_step(case, comm)
        log = Log()
        comm.observers = (log,)
        run_step(step, case)
        under_way = most = 0
        for line in log.lines:
            action, _, op = line.partition(" ")
            if op == "reduce_scatter":
                under_way += 1 if action == "start" else -1
                most = max(most, under_way)
        return most

    assert run_ranks("dp2", rank) == [MAX_UNDER_WAY] * 2


def test_a_parameter_that_one_rank_does_not_use_cannot_stop_ranks_that_exchange_tokens() -> None:
    """Rank 1 reduces the group of "d" at the end of its backward, before which it needs rank 0."""

    def rank(comm: Comm) -> dict[str, torch.Tensor]:
        policy = ShardingPolicy(
            2, params=torch.float64, compute=torch.float64, reduce=torch.float64
        )
        params = {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in "abcd"}
        groups = [
            ParamGroup({name: param}, comm, policy, axes=("dp", "cp"))
            for name, param in params.items()
        ]
        reducer = GradientReducer(groups, comm, reduces_every_backward=True)
        reducer.zero_grad()
        x = copy_to_region(params["a"] * 2, comm, "cp")  # its backward is a sum over ranks
        x = x * params["b"] * params["c"]
        if comm.index("cp") == 0:
            x = x * params["d"]
        x.sum().backward()
        reducer.finish()
        return reducer.full_gradients()

    for found in run_ranks("dp2 cp2", rank):
        assert found["d"].tolist() == [4.0, 4.0]
        assert found["b"].tolist() == [8.0, 8.0]
        assert found["a"].tolist() == [16.0, 16.0]


def test_the_next_block_is_prefetched_while_one_runs() -> None:
    case = Case("dp2", zero=3, microbatches=1)

    def rank(comm: Comm) -> list[str]:
        step = make_step(case, comm)
        log = Log()
        for name, block in step.model.blocks.items():
            block.register_forward_pre_hook(
                lambda _, __, name=name: log.lines.append(f"run {name}")
            )
        comm.observers = (log,)
        run_step(step, case)
        return log.lines

    for lines in run_ranks("dp2", rank):
        place = lines.index("run layer1")
        assert lines[place - 1] == "start all_gather", "layer2 is on its way before layer1 runs"
        assert lines.count("start all_gather") == 2 * 7 + 1, (
            "7 blocks with parameters, forward and backward; the totals"
        )


def test_a_gradient_after_its_group_was_reduced_in_place_is_an_error() -> None:
    def rank(comm: Comm) -> None:
        policy = ShardingPolicy(
            1,
            params=torch.float32,
            compute=torch.float32,
            reduce=torch.float32,
            keeps_unsharded_grad=True,
        )
        params = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
        group = ParamGroup(params, comm, policy, axes=("dp",))
        reducer = GradientReducer((group,), comm, split_stages=frozenset({0}))
        reducer.set_requires_gradient_sync(0)
        for first, second in (("a", "b"), ("b", "a")):
            params[first].sum().backward()
            params[second].sum().backward()

    with pytest.raises(CommError, match="arrived after its group was reduced"):
        run_ranks("dp2", rank)


def test_a_parameter_that_only_some_backwards_use_is_summed_over_those() -> None:
    def gradients(
        uses: Callable[[dict[str, nn.Parameter], int], torch.Tensor], zero: Any
    ) -> dict[str, torch.Tensor]:
        def rank(comm: Comm) -> dict[str, torch.Tensor]:
            policy = ShardingPolicy(
                zero,
                params=torch.float64,
                compute=torch.float64,
                reduce=torch.float64,
                keeps_unsharded_grad=zero < 2,
            )
            params = {}
            for name in ("a", "b"):
                params[name] = nn.Parameter(torch.ones(3, dtype=torch.float64))
            group = ParamGroup(params, comm, policy, axes=("dp",))
            reducer = GradientReducer((group,), comm, reduces_every_backward=zero >= 2)
            reducer.zero_grad()
            for backward in range(3):
                if backward == 2:
                    reducer.set_requires_gradient_sync(0)
                uses(params, backward).backward()
            reducer.finish()
            return reducer.full_gradients()

        return run_ranks("dp2", rank)[0]

    def one_after_the_other(params: dict[str, nn.Parameter], backward: int) -> torch.Tensor:
        used = (
            [params["a"]]
            if backward == 0
            else [params["b"]]
            if backward == 1
            else [params["a"], params["b"]]
        )
        return (backward + 1) * torch.cat(used).sum()

    for zero in (1, 2):
        found = gradients(one_after_the_other, zero)
        assert found["a"].tolist() == [2.0 * (1 + 3)] * 3
        assert found["b"].tolist() == [2.0 * (2 + 3)] * 3


@pytest.mark.parametrize("mesh", ["dp1", "dp2"])
def test_the_first_gradient_of_a_step_replaces_the_last_one_and_what_is_unused_has_zeros(
    mesh: str,
) -> None:
    """Zeros, not None: an optimizer decays a parameter that no sample of this step has used."""

    def rank(comm: Comm) -> None:
        dtype = torch.float64
        policy = ShardingPolicy(
            0, params=dtype, compute=dtype, reduce=dtype, keeps_unsharded_grad=True
        )
        params = {name: nn.Parameter(torch.ones(3, dtype=dtype)) for name in ("a", "b")}
        group = ParamGroup(params, comm, policy, axes=("dp",))
        reducer = GradientReducer((group,), comm)
        for used, unused in (("a", "b"), ("b", "a"), ("b", "a")):
            reducer.zero_grad()
            for factor in (2, 3):  # two micro-batches
                (factor * params[used]).sum().backward()
            reducer.finish()
            assert params[used].grad.tolist() == [5.0 * comm.degree("dp")] * 3
            assert params[unused].grad.tolist() == [0.0] * 3

    run_ranks(mesh, rank)
