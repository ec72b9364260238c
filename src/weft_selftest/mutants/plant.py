"""Plants a mutant for the duration of a `with` block: replaces functions, module forwards, and the start of collectives."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.transport import Call, Channel, PendingCall
from weft.parallel.model.dropout_blocks import block_as_written
from weft.parallel.model.parallelize import ParallelModel
from weft_selftest.mutants.fault import (
    CollectiveFault,
    FunctionChange,
    FunctionFault,
    ModuleFault,
    Mutant,
    PlantedFault,
)

MAX_DEPTH = 24
"""Calls above the start of a collective among which its site is looked for."""
START_CALL = "weft.comm.comm:Comm._start_call"
PARALLELIZE = "weft.train.build:parallelize"

StartCall = Callable[[Comm, Call], PendingCall | None]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The product computes what the mutant says, in all threads of this process."""
    with ExitStack() as stack:
        for fault in mutant.faults:
            stack.enter_context(_plant(fault))
        yield


def _plant(fault: PlantedFault) -> Any:
    match fault:
        case CollectiveFault():
            return replaced(START_CALL, FaultyCollectives(fault))
        case FunctionFault():
            return replaced(fault.target, fault.change)
        case ModuleFault():
            return replaced(PARALLELIZE, functools.partial(_with_faulty_module, fault))


@contextmanager
def replaced(target: str, change: FunctionChange) -> Iterator[None]:
    """Calls of `target` ("module:Class.name") go to `change`, with the replaced function first."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    before = vars(owner)[name]
    setattr(owner, name, _replacement(before, change))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _replacement(before: Any, change: FunctionChange) -> Any:
    """What stands for a function, static method or property."""
    if isinstance(before, staticmethod):
        return staticmethod(_calling(before.__func__, change))
    if isinstance(before, property):
        assert before.fget is not None, "a property that can be read"
        return property(_calling(before.fget, change))
    return _calling(before, change)


def _calling(function: Callable[..., Any], change: FunctionChange) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return change(function, *args, **kwargs)

    return call


# modules


def _with_faulty_module(
    fault: ModuleFault, parallelize: Callable[..., ParallelModel], *args: Any, **kwargs: Any
) -> ParallelModel:
    model = parallelize(*args, **kwargs)
    comm = model.comm
    if fault.axis and comm.degree(fault.axis) == 1:
        return model
    if fault.index is not None and comm.index(fault.axis) != fault.index:
        return model
    block_name, _, path = fault.path.partition(".")
    block = model.blocks.get(block_name)
    if block is None:
        return model
    module: nn.Module = block_as_written(block).get_submodule(path)
    module.forward = functools.partial(fault.change, type(module).forward, module)
    return model


# collectives


@dataclass(frozen=True)
class _ChangedResult:
    """A pending call whose result is changed when it is waited for."""

    pending: PendingCall | None
    change: Callable[[], None]

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.change()

    def is_completed(self) -> bool:
        return self.pending is None or self.pending.is_completed()


@dataclass
class FaultyCollectives:
    """In place of `Comm._start_call`: changes the calls that the fault names.

    Attributes:
        counts: calls of the site so far, by rank.
        last_results: result of the call before, by rank and length.
    """

    fault: CollectiveFault
    counts: Counter[int] = field(default_factory=Counter)
    last_results: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self,
        start: Callable[[Comm, Call, Channel], PendingCall | None],
        comm: Comm,
        call: Call,
        channel: Channel,
    ) -> PendingCall | None:
        if not self._is_meant(comm, call):
            return start(comm, call, channel)

        def start_on_its_channel(comm: Comm, changed: Call) -> PendingCall | None:
            is_moved = changed.axis != call.axis
            own = comm._group(changed.axis).channel if is_moved else channel
            return start(comm, changed, own)

        started = _start_changed(self.fault, start_on_its_channel, comm, call)
        if self.fault.change != "stale":
            return started
        return _ChangedResult(started, functools.partial(self._make_stale, call))

    def _is_meant(self, comm: Comm, call: Call) -> bool:
        fault = self.fault
        if fault.op and call.op != fault.op:
            return False
        if fault.axis and call.axis != fault.axis:
            return False
        if not _is_called_by(fault.site):
            return False
        with self.lock:
            number = self.counts[comm.rank]
            self.counts[comm.rank] += 1
        is_number_meant = fault.call is None or fault.call == number
        is_place_meant = fault.place is None or fault.place == call.index
        return is_number_meant and (is_place_meant or fault.change == "zero")

    def _make_stale(self, call: Call) -> None:
        result = call.required_output
        key = (call.rank, result.numel())
        before = self.last_results.get(key)
        self.last_results[key] = result.clone()
        if before is not None:
            result.copy_(before)


def _is_called_by(site: str) -> bool:
    frame = sys._getframe(2)
    for _ in range(MAX_DEPTH):
        if frame.f_code.co_qualname == site:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _start_changed(
    fault: CollectiveFault, start: StartCall, comm: Comm, call: Call
) -> PendingCall | None:
    match fault.change:
        case "skip":
            _skip(call)
            return None
        case "avg" | "max":
            return start(comm, replace(call, reduce=fault.change))
        case "bfloat16":
            return start(comm, _rounded(call))
        case "twice":
            return _start_twice(start, comm, call)
        case "group":
            return start(comm, _of_other_axis(call, comm, fault.other_axis))
        case "zero":
            if call.index == fault.place:
                _sent(call).zero_()
            return start(comm, call)
        case "reverse" if call.op == "reduce_scatter":
            return start(comm, _with_reversed_input(call))
        case "truncate":
            return _start_truncated(start, comm, call)
    pending = start(comm, call)
    return _ChangedResult(pending, functools.partial(_change_result, fault, call))


def _sent(call: Call) -> Tensor:
    sent = call.input if call.input is not None else call.output
    assert sent is not None, f"{call.op} sends a tensor on this rank"
    return sent


def _skip(call: Call) -> None:
    """Leave every member alone with what it has."""
    if call.output is None or call.op in ("all_reduce", "broadcast"):
        return
    if call.op == "recv":
        call.output.zero_()
        return
    own = call.required_input
    if call.op == "reduce_scatter":
        call.output.copy_(torch.split(own, list(call.input_split_sizes))[call.index])
        return
    is_in_place = own.untyped_storage().data_ptr() == call.output.untyped_storage().data_ptr()
    if is_in_place:
        return
    call.output.zero_()
    if call.op == "all_gather":
        pieces = torch.split(call.output, list(call.output_split_sizes))
        pieces[call.index].copy_(own)
    else:
        num_kept = min(len(own), len(call.output))
        call.output[:num_kept].copy_(own[:num_kept])


def _rounded(call: Call) -> Call:
    if call.input is None:
        sent = _sent(call)
        sent.copy_(sent.to(torch.bfloat16))
        return call
    return replace(call, input=call.input.to(torch.bfloat16).to(call.input.dtype))


def _start_twice(start: StartCall, comm: Comm, call: Call) -> PendingCall | None:
    first = start(comm, call)
    if first is not None:
        first.wait()
    return start(comm, call)


def _of_other_axis(call: Call, comm: Comm, axis: str) -> Call:
    return replace(
        call,
        axis=axis,
        ranks=comm.mesh.group(comm.rank, (axis,)),
        index=comm.mesh.index(comm.rank, (axis,)),
    )


def _with_reversed_input(call: Call) -> Call:
    pieces = torch.split(call.required_input, list(call.input_split_sizes))
    return replace(call, input=torch.cat(pieces[::-1]))


def _start_truncated(start: StartCall, comm: Comm, call: Call) -> PendingCall:
    output = call.required_output
    num_kept = max(1, len(output) // 4)
    tail = output[-num_kept:].clone()
    pending = start(comm, call)

    def restore_tail() -> None:
        output[-num_kept:].copy_(tail)

    return _ChangedResult(pending, restore_tail)


def _change_result(fault: CollectiveFault, call: Call) -> None:
    output = call.output
    if output is None:
        return
    if fault.change == "scale":
        output.mul_(fault.factor)
        return
    pieces = _pieces(call, output)
    if fault.change == "reverse":
        output.copy_(torch.cat([piece.clone() for piece in pieces[::-1]]))
    elif fault.change == "repeat":
        output.copy_(torch.cat([pieces[0].clone() for _ in pieces]))


def _pieces(call: Call, output: Tensor) -> Sequence[Tensor]:
    if call.output_split_sizes:
        return torch.split(output, list(call.output_split_sizes))
    return output.chunk(len(call.ranks))
