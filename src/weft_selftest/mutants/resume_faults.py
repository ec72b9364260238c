"""Mutants of checkpoints and resumption: what is written, what is read back, and where the data goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from weft.checkpoint.state import MODEL, ParamState
from weft.checkpoint.write_item import WriteItem
from weft.parallel.ep import AXIS as EP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants import references
from weft_selftest.mutants.changes import named_argument
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

DP = MutantLayout("dp2")
LOAD = "weft.checkpoint.restore:load_entries"
WRITE = "weft.checkpoint.state:ParamState.write_items"
FIRST, SECOND = "optim/exp_avg", "optim/exp_avg_sq"
PARAMETERS = ("embed", "layer*", "head")
ANY_AXIS = ("",)


@torch.no_grad()
def swapped_moments(load: Callable[..., None], params: Iterable[ParamState], section: Any) -> None:
    """The first moment is read as the second, and the second as the first."""
    states = list(params)
    load(states, section)
    for local in states:
        if FIRST in local.tensors:
            first = local.tensors[FIRST].clone()
            local.tensors[FIRST].copy_(local.tensors[SECOND])
            local.tensors[SECOND].copy_(first)


@torch.no_grad()
def lost_moments(load: Callable[..., None], params: Iterable[ParamState], section: Any) -> None:
    """Moments are zeros."""
    states = list(params)
    load(states, section)
    for local in states:
        for name, tensor in local.tensors.items():
            if name != MODEL:
                tensor.zero_()


@torch.no_grad()
def lost_step_number(load: Callable[..., None], params: Iterable[ParamState], section: Any) -> None:
    """The optimizer counts its steps from 0."""
    states = list(params)
    load(states, section)
    for local in states:
        for scalar in local.whole.values():
            scalar.zero_()


@torch.no_grad()
def codes_of_a_scale_of_one(
    load: Callable[..., None], params: Iterable[ParamState], section: Any
) -> None:
    """Codes are read, and the largest values of their blocks are not."""
    states = list(params)
    load(states, section)
    for local in states:
        for largest in local.of_blocks.values():
            largest.fill_(1.0)


@torch.no_grad()
def initial_parameters(
    load: Callable[..., None], params: Iterable[ParamState], section: Any
) -> None:
    """Parameters keep their initial values."""
    states = list(params)
    before = [local.tensors[MODEL].clone() for local in states]
    load(states, section)
    for local, values in zip(states, before, strict=True):
        local.tensors[MODEL].copy_(values)


def reversed_rows(write: Callable[..., Iterator[WriteItem]], local: ParamState) -> Any:
    """A second shard is written with its rows in reverse order."""
    for item in write(local):
        is_later_shard = any(item.box.lo)
        if is_later_shard:
            yield _with_reversed_rows(item)
        else:
            yield item


def rows_turned_twice(write: Callable[..., Iterator[WriteItem]], local: ParamState) -> Any:
    """Rows of every parameter are written in reverse order; `rows_turned_back` reads them so."""
    for item in write(local):
        if item.tensor.dim():
            yield _with_reversed_rows(item)
        else:
            yield item


def _with_reversed_rows(item: WriteItem) -> WriteItem:
    return replace(item, tensor=item.tensor.flip(0))


@torch.no_grad()
def rows_turned_back(load: Callable[..., None], params: Iterable[ParamState], section: Any) -> None:
    """What `rows_turned_twice` has written is turned back."""
    states = list(params)
    load(states, section)
    for local in states:
        for tensor in local.tensors.values():
            flat = tensor.view(-1)
            start = 0
            for box in local.boxes:
                stop = start + box.size
                entries = flat[start:stop].view(box.shape)
                flat[start:stop] = entries.flip(0).reshape(-1)
                start = stop


def without_later_experts(write: Callable[..., Iterator[WriteItem]], local: ParamState) -> Any:
    """Experts of later ranks are not written."""
    if ".experts." in local.param.name and local.param.box.lo[0] > 0:
        return iter(())
    return write(local)


MUTANTS = (
    Mutant(
        "moments_are_swapped_in_the_checkpoint",
        "the first is read as the second",
        DP,
        (FunctionFault(LOAD, swapped_moments),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "moments_are_not_restored",
        "the optimizer starts anew",
        DP,
        (FunctionFault(LOAD, lost_moments),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
        reference=references.KEMPNERFORGE_MOMENTS,
    ),
    Mutant(
        "scales_of_states_in_8_bits_are_not_restored",
        "codes stand for other moments",
        MutantLayout("dp2", options="--optim.state_dtype 8bit"),
        (FunctionFault(LOAD, codes_of_a_scale_of_one),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "the_step_number_of_the_optimizer_is_not_restored",
        "the bias correction starts anew",
        DP,
        (FunctionFault(LOAD, lost_step_number),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
        reference=references.AUTOMODEL_MOMENTS,
    ),
    Mutant(
        "restored_parameters_are_initialised_again",
        "what was loaded is overwritten",
        DP,
        (FunctionFault(LOAD, initial_parameters),),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
        reference=references.SCALETORCH,
    ),
    Mutant(
        "a_resumed_run_replays_the_first_batches",
        "the position in the data is not restored",
        DP,
        (FunctionFault("weft.train.build_training:build_step_range", named_argument("start", 0)),),
        axes=ANY_AXIS,
        blocks=("", "embed"),
        reference=references.GPT_NEOX_DATA,
    ),
    Mutant(
        "shards_of_later_ranks_are_written_in_reverse_order",
        "the checkpoint holds other weights than the model",
        MutantLayout("dp2 tp2"),
        (FunctionFault(WRITE, reversed_rows),),
        axes=(TP_AXIS,),
        blocks=PARAMETERS,
    ),
    Mutant(
        "rows_are_turned_by_the_save_and_back_by_the_load",
        "the same layout resumes right; every other one, and an export, reads other weights",
        DP,
        (FunctionFault(WRITE, rows_turned_twice), FunctionFault(LOAD, rows_turned_back)),
        axes=ANY_AXIS,
        blocks=PARAMETERS,
    ),
    Mutant(
        "experts_of_later_ranks_are_not_written",
        "the save succeeds",
        MutantLayout("ep2", family="qwen3-moe"),
        (FunctionFault(WRITE, without_later_experts),),
        axes=(EP_AXIS,),
        blocks=PARAMETERS,
        reference=references.MEGATRON_LOST_EXPERTS,
    ),
)
