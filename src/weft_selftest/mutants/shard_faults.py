"""Mutants of shards: buckets behind the first, frozen blocks, masters, adapters, large gradients, shares of stored tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.state import ParamState
from weft.checkpoint.write_item import WriteItem
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.reductions_under_way import ReductionsUnderWay
from weft_selftest.mutants.changes import result_times
from weft_selftest.mutants.fault import FunctionFault, ModuleFault, Mutant, MutantLayout

AXIS = (DP_AXIS,)
ANY_AXIS = ("",)
PARAMETERS = ("embed", "layer*", "head")
GROUP = "weft.parallel.zero.param_group:ParamGroup"
GRAD_NORM = "weft.parallel.zero.grad_norm"
SEVERAL_BUCKETS = "--model.dim 256 --model.vocab 16384"
LARGE_TENSORS = "--model.vocab 1024"


def reversed_when_frozen(wait: Callable[..., None], group: ParamGroup) -> None:
    """Shards of frozen blocks lie in reverse order in what was gathered."""
    was_gathered = group._gathering is not None
    wait(group)
    params = group.unsharded_params
    if was_gathered and params is not None and group.is_sharded and not group.is_trained:
        shards = params.alias().chunk(group.layout.num_shards)
        params.alias().copy_(torch.cat(shards[::-1]))


def without_second_bucket(
    start: Callable[..., None], reductions: ReductionsUnderWay, group: ParamGroup
) -> None:
    """The second of several buckets of equal axes that are reduced stays local."""
    started: list[ParamGroup] = vars(reductions).setdefault("started_groups", [])
    if group not in started:
        started.append(group)
    alike = [each for each in started if (each.axes, each.stage) == (group.axes, group.stage)]
    if len(alike) > 1 and group is alike[1]:
        group.axes, axes = (), group.axes
        start(reductions, group)
        group.axes = axes
        return
    start(reductions, group)


@dataclass
class GatheredIntoTheSameMemory:
    """A layer is gathered into the memory of the one before, which the forward still reads."""

    before: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, wait: Callable[..., None], group: ParamGroup) -> None:
        was_gathered = group._gathering is not None
        wait(group)
        params = group.unsharded_params
        if not was_gathered or params is None:
            return
        flat = params.alias()
        key = (group.comm.rank, flat.numel())
        with self.lock:
            before = self.before.get(key)
            self.before[key] = flat.clone()
        if before is not None and next(iter(group.params)).startswith("layer2."):
            flat.copy_(before)


def rounded_masters(after: Callable[..., None], reducer: GradientReducer) -> None:
    """What the optimizer updates is taken back from the rounded parameters."""
    after(reducer)
    for group in reducer.trained_groups:
        master = group.sharded_param
        if master is not None and group.policy.compute != group.policy.params:
            master.copy_(master.to(group.policy.compute))


def without_first_row(square: Callable[..., Tensor], gradient: Tensor, dtype: Any) -> Tensor:
    """The first row of a large gradient does not count."""
    return square(gradient.reshape(-1)[4096:], dtype)


def first_share(
    items: Callable[..., Iterator[WriteItem]], state: ParamState
) -> Iterator[WriteItem]:
    """Every replica writes the values of the first one's share."""
    start, _ = state.write_range
    for item in items(state):
        section, _, _ = item.name.partition("/")
        whole = next(
            (each for name, each in state.tensors.items() if name.startswith(section)), None
        )
        if whole is None or start == state.lo or item.tensor.numel() < 64:
            yield item
            continue
        first = whole.detach().reshape(-1)[: item.tensor.numel()]
        yield replace(item, tensor=first.view(item.tensor.shape))


def one_entry_less(write_range: Callable[..., tuple[int, int]], state: ParamState) -> Any:
    """The last of several replicas leaves out the last entry of its share."""
    start, stop = write_range(state)
    is_last = state.num_replicas > 2 and state.replica == state.num_replicas - 1
    is_share = stop - start < state.hi - state.lo
    return (start, stop - 1) if is_last and is_share and stop > start else (start, stop)


def first_bounds(
    pack: Callable[..., Tensor], layout: Any, tensors: Any, index: int, **named: Any
) -> Tensor:
    """Entries of a matrix that a bound cuts begin one entry too early."""
    shard = pack(layout, tensors, index, **named)
    for span in layout.spans:
        overlap = layout.overlap(span, index)
        first = overlap.in_param.start
        if 0 < first < overlap.in_param.stop:
            entries = tensors[span.name].detach().reshape(-1)
            shard[overlap.in_shard] = entries[first - 1 : overlap.in_param.stop - 1]
    return shard


def mean_of_shards(finish: Callable[..., None], group: ParamGroup) -> None:
    """Gradients are divided by the number of shards."""
    finish(group)
    if group.policy.zero == 3 and group.sharded_grad is not None:
        group.sharded_grad.mul_(1 / group.layout.num_shards)


MUTANTS = (
    Mutant(
        "the_second_bucket_of_gradients_is_not_reduced",
        "visible only in a model that is larger than a bucket",
        MutantLayout("dp2", options=SEVERAL_BUCKETS),
        (
            FunctionFault(
                "weft.parallel.zero.reductions_under_way:ReductionsUnderWay.start",
                without_second_bucket,
            ),
        ),
        axes=AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "shards_of_frozen_blocks_are_gathered_in_reverse_order",
        "the base of adapters is permuted under ZeRO 3",
        MutantLayout("dp2", options="--parallel.zero 3 --lora.rank 3"),
        (FunctionFault(f"{GROUP}._wait_all_gather", reversed_when_frozen),),
        axes=AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "a_layer_is_gathered_into_the_memory_of_the_one_before",
        "a prefetch overwrites what is still read",
        MutantLayout("dp2", options="--parallel.zero 3"),
        (FunctionFault(f"{GROUP}._wait_all_gather", GatheredIntoTheSameMemory()),),
        axes=(DP_AXIS, ""),
        blocks=("layer2",),
    ),
    Mutant(
        "gradients_of_adapters_are_averaged_over_shards",
        "a mean under ZeRO 3 where the loss is normalised already",
        MutantLayout("dp2", options="--parallel.zero 3 --lora.rank 3"),
        (FunctionFault(f"{GROUP}.finish_step", mean_of_shards),),
        axes=(DP_AXIS, ""),
        blocks=PARAMETERS,
    ),
    Mutant(
        "masters_are_taken_back_from_rounded_parameters",
        "updates below a unit of bfloat16 are lost at every step",
        MutantLayout("dp2", options="--precision.compute bfloat16 --parallel.zero 1"),
        (
            FunctionFault(
                "weft.parallel.zero.gradient_reducer:GradientReducer.after_optimizer_step",
                rounded_masters,
            ),
        ),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "a_matrix_that_a_bound_cuts_begins_one_entry_early",
        "bounds of shards within a matrix are off by one",
        MutantLayout("dp2", options="--parallel.zero 3"),
        (FunctionFault("weft.parallel.zero.flat_params:FlatLayout.pack_shard", first_bounds),),
        axes=(DP_AXIS, ""),
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_scale_of_an_adapter_is_that_of_a_shard",
        "its second matrix is zero at first, so that only its gradient differs",
        MutantLayout("tp2", options="--lora.rank 3"),
        (ModuleFault("layer1.attn.q.lora_b", result_times(0.5), axis=TP_AXIS),),
        axes=(TP_AXIS, ""),
        blocks=("layer1",),
    ),
    Mutant(
        "the_first_row_of_a_large_gradient_is_not_normed",
        "visible only in tensors that are normed in rows",
        MutantLayout(
            "dp2",
            options="--model.vocab 8192 --precision.params float32 --precision.compute float32 "
            "--precision.reduce float32",
        ),
        (FunctionFault(f"{GRAD_NORM}:_square_in_rows", without_first_row),),
        axes=ANY_AXIS,
        blocks=("",),
    ),
    Mutant(
        "replicas_write_the_values_of_the_first_share",
        "a checkpoint whose boxes are right and whose values are not",
        MutantLayout("dp2", options=LARGE_TENSORS),
        (FunctionFault("weft.checkpoint.state:ParamState.write_items", first_share),),
        axes=(DP_AXIS, ""),
        blocks=(*PARAMETERS, ""),
    ),
    Mutant(
        "the_last_of_four_replicas_writes_one_entry_less",
        "a hole at the end of every large tensor",
        MutantLayout("dp4", options=LARGE_TENSORS),
        (FunctionFault("weft.checkpoint.state:ParamState.write_range", one_entry_less),),
        axes=(DP_AXIS, ""),
        blocks=(*PARAMETERS, ""),
    ),
)
