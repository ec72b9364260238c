"""The algorithms of collectives and messages in shared memory: what a member writes and reads in each round.

all_reduce        piece              write it; read all halves, reduce    (two members, small tensors: one round)
                  own part of it     write the reduced part; read the parts of all
reduce_scatter    a part for each    read the own part of all halves, reduce
all_to_all        a part for each    read the own part of all halves
all_gather        piece              read all halves
broadcast, send   piece of the root  read its half
gather, scatter   piece; parts       the root reads all; all read their part of the root's half
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import ACCUMULATED_IN_FLOAT32, reduce_in_order
from weft.comm.shared_rounds import Rounds, Steps, tag_of
from weft.comm.shared_segment import LINE_BYTES
from weft.comm.signature import check_signatures, decode_signature, encode_signature
from weft.comm.transport import Call, Op, Reduce

MAX_DIRECT_BYTES = 2**15
"""Up to this many bytes of all members together, each reduces all of an all_reduce itself: one round
instead of two.
"""
TEXT_TAG = 1

_REDUCE_TWO: dict[Reduce, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduce_into(output: Tensor, tensors: Sequence[Tensor], op: Reduce) -> None:
    """The reduction of `tensors`, first to last, into other memory: the bits of `reduce_in_order`."""
    if output.dtype in ACCUMULATED_IN_FLOAT32:
        output.copy_(reduce_in_order(tensors, op))
        return
    reduce_two = _REDUCE_TWO[op]
    reduce_two(tensors[0], tensors[1], out=output)
    for tensor in tensors[2:]:
        reduce_two(output, tensor, out=output)
    if op == "avg":
        output.div_(len(tensors))


def run_call(rounds: Rounds, call: Call) -> Steps:
    """All rounds of a call.

    Raises:
        MismatchError: its signature was to be compared, and differs.
    """
    if call.checked:
        yield from _compare_signatures(rounds, call)
    yield from _ALGORITHMS[call.op](rounds, call)


def _compare_signatures(rounds: Rounds, call: Call) -> Steps:
    """Every member writes its signature and reads those of all."""
    own = encode_signature(call)
    num_bytes = own.numel()
    half = rounds.begin()
    rounds.segment.view(rounds.index, half, torch.uint8)[:num_bytes].copy_(own)
    yield from rounds.exchange(TEXT_TAG)
    texts = [rounds.segment.view(m, half, torch.uint8)[:num_bytes] for m in rounds.everyone]
    has_sizes = bool(call.input_split_sizes)
    if not has_sizes and all(torch.equal(own, text) for text in texts):
        return
    check_signatures(call.axis, call.ranks, [decode_signature(text, rounds.size) for text in texts])


def _all_reduce(rounds: Rounds, call: Call) -> Steps:
    output = call.required_output
    is_direct = rounds.size == 2 or rounds.size * output.nbytes <= MAX_DIRECT_BYTES
    steps = _all_reduce_directly if is_direct else _all_reduce_by_parts
    pieces = _pieces(output.nbytes, rounds.segment.capacity)
    for number, (start, num_bytes) in enumerate(pieces):
        yield from steps(rounds, call, tag_of(call.signature) + 2 * number, start, num_bytes)


def _all_reduce_directly(rounds: Rounds, call: Call, tag: int, start: int, num_bytes: int) -> Steps:
    """A piece of an all_reduce, which every member reduces whole."""
    output = call.required_output
    segment = rounds.segment
    half = rounds.begin()
    memmove(segment.data_address(rounds.index, half), output.data_ptr() + start, num_bytes)
    yield from rounds.exchange(tag)
    if num_bytes:
        first, last = _elements(output, start, num_bytes)
        halves = [segment.view(m, half, output.dtype)[: last - first] for m in rounds.everyone]
        with torch.inference_mode():
            reduce_into(output[first:last], halves, call.reduce)


def _all_reduce_by_parts(rounds: Rounds, call: Call, tag: int, start: int, num_bytes: int) -> Steps:
    """A piece of an all_reduce, of which each member reduces one part."""
    output = call.required_output
    segment, size, index = rounds.segment, rounds.size, rounds.index
    address = output.data_ptr() + start
    half = rounds.begin()
    memmove(segment.data_address(index, half), address, num_bytes)
    yield from rounds.exchange(tag)

    part = -(-num_bytes // (size * LINE_BYTES)) * LINE_BYTES  # whole lines and elements
    bounds = [min(place * part, num_bytes) for place in range(size + 1)]
    first, last = _elements(output, bounds[index], bounds[index + 1] - bounds[index])
    halves = [segment.view(m, half, output.dtype)[first:last] for m in rounds.everyone]
    half = rounds.begin()
    if last > first:
        with torch.inference_mode():
            reduced = segment.view(index, half, output.dtype)[: last - first]
            reduce_into(reduced, halves, call.reduce)
    yield from rounds.exchange(tag + 1)
    for member in rounds.everyone:
        begin, end = bounds[member], bounds[member + 1]
        memmove(address + begin, segment.data_address(member, half), end - begin)


def _reduce_scatter(rounds: Rounds, call: Call) -> Steps:
    source, output = call.required_input, call.required_output
    segment, item = rounds.segment, output.element_size()
    part = _part_bytes(rounds)
    num_rounds = _num_rounds(max(call.input_split_sizes) * item, part)
    for number in range(num_rounds):
        tag = tag_of(call.signature) + number
        half = rounds.begin()
        _write_parts(rounds, source, call.input_split_sizes, number)
        yield from rounds.exchange(tag)
        first, last = _piece(output.numel() * item, part, number)
        if last > first:
            begin = rounds.index * part // item
            end = begin + (last - first) // item
            parts = [segment.view(m, half, output.dtype)[begin:end] for m in rounds.everyone]
            with torch.inference_mode():
                reduce_into(output[first // item : last // item], parts, call.reduce)


def _all_to_all(rounds: Rounds, call: Call) -> Steps:
    """A member knows only its own sizes: in the first round all say how many rounds they need."""
    source, output = call.required_input, call.required_output
    segment, item = rounds.segment, output.element_size()
    part = _part_bytes(rounds)
    own_rounds = _num_rounds(max(*call.input_split_sizes, *call.output_split_sizes) * item, part)
    num_rounds, number = own_rounds, 0
    starts = [item * start for start in accumulate(call.output_split_sizes, initial=0)]
    while number < num_rounds:
        tag = tag_of(call.signature) + number
        rounds.begin()
        _write_parts(rounds, source, call.input_split_sizes, number)
        yield from rounds.exchange(tag, own_rounds)
        num_rounds = max(rounds.numbers())
        for member, numel in enumerate(call.output_split_sizes):
            first, last = _piece(numel * item, part, number)
            read = segment.data_address(member, rounds.half) + rounds.index * part
            memmove(output.data_ptr() + starts[member] + first, read, last - first)
        number += 1


def _all_gather(rounds: Rounds, call: Call) -> Steps:
    own, output = call.required_input, call.required_output
    item = output.element_size()
    sizes = [item * numel for numel in call.output_split_sizes]
    starts = list(accumulate(sizes, initial=0))
    is_in_place = own.data_ptr() == output.data_ptr() + starts[rounds.index]
    read = [m for m in rounds.everyone if not (is_in_place and m == rounds.index)]
    for number in range(_num_rounds(max(sizes), rounds.segment.capacity)):
        _write_whole(rounds, own, number)
        yield from rounds.exchange(tag_of(call.signature) + number)
        for member in read:
            address = output.data_ptr() + starts[member]
            _read_whole(rounds, member, number, address, sizes[member])


def _broadcast(rounds: Rounds, call: Call) -> Steps:
    """From the root; of a message, from its first member."""
    tensor = call.required_input if call.op == "send" else call.required_output
    is_root = rounds.index == call.root
    for number in range(_num_rounds(tensor.nbytes, rounds.segment.capacity)):
        _write_whole(rounds, tensor if is_root else tensor[:0], number)
        yield from rounds.exchange(tag_of(call.signature) + number)
        if not is_root:
            _read_whole(rounds, call.root, number, tensor.data_ptr(), tensor.nbytes)


def _gather(rounds: Rounds, call: Call) -> Steps:
    own = call.required_input
    for number in range(_num_rounds(own.nbytes, rounds.segment.capacity)):
        _write_whole(rounds, own, number)
        yield from rounds.exchange(tag_of(call.signature) + number)
        if call.output is not None:
            for member in rounds.everyone:
                address = call.output.data_ptr() + member * own.nbytes
                _read_whole(rounds, member, number, address, own.nbytes)


def _scatter(rounds: Rounds, call: Call) -> Steps:
    output = call.required_output
    part = _part_bytes(rounds)
    for number in range(_num_rounds(output.nbytes, part)):
        rounds.begin()
        if call.input is not None:
            _write_parts(rounds, call.input, (output.numel(),) * rounds.size, number)
        yield from rounds.exchange(tag_of(call.signature) + number)
        first, last = _piece(output.nbytes, part, number)
        read = rounds.segment.data_address(call.root, rounds.half) + rounds.index * part
        memmove(output.data_ptr() + first, read, last - first)


def _barrier(rounds: Rounds, call: Call) -> Steps:
    tag = tag_of(call.signature)
    rounds.begin()
    yield from rounds.exchange(tag)


_ALGORITHMS: dict[Op, Callable[[Rounds, Call], Steps]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send": _broadcast,
    "recv": _broadcast,
    "barrier": _barrier,
}


def _write_whole(rounds: Rounds, tensor: Tensor, number: int) -> None:
    """Begin a round and write piece `number` of a tensor."""
    half = rounds.begin()
    first, last = _piece(tensor.nbytes, rounds.segment.capacity, number)
    written = rounds.segment.data_address(rounds.index, half)
    memmove(written, tensor.data_ptr() + first, last - first)


def _read_whole(rounds: Rounds, member: int, number: int, address: int, num_bytes: int) -> None:
    """Read piece `number` of a tensor of another member."""
    first, last = _piece(num_bytes, rounds.segment.capacity, number)
    memmove(address + first, rounds.segment.data_address(member, rounds.half), last - first)


def _write_parts(rounds: Rounds, source: Tensor, split_sizes: Sequence[int], number: int) -> None:
    """Write piece `number` of what each member receives into its part of the own half."""
    part, item = _part_bytes(rounds), source.element_size()
    address = rounds.segment.data_address(rounds.index, rounds.half)
    start = source.data_ptr()
    for member, numel in enumerate(split_sizes):
        first, last = _piece(numel * item, part, number)
        memmove(address + member * part, start + first, last - first)
        start += numel * item


def _part_bytes(rounds: Rounds) -> int:
    """Size of the part of a half that is for one member."""
    return rounds.segment.capacity // (rounds.size * LINE_BYTES) * LINE_BYTES


def _num_rounds(num_bytes: int, most: int) -> int:
    """Rounds in which a buffer passes; one for an empty buffer."""
    return max(1, -(-num_bytes // most))


def _piece(num_bytes: int, most: int, number: int) -> tuple[int, int]:
    """Where piece `number` of a buffer begins and ends; empty behind its end."""
    return min(number * most, num_bytes), min((number + 1) * most, num_bytes)


def _pieces(num_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and length of the pieces of a buffer; an empty one has one."""
    for number in range(_num_rounds(num_bytes, most)):
        first, last = _piece(num_bytes, most, number)
        yield first, last - first


def _elements(tensor: Tensor, start: int, num_bytes: int) -> tuple[int, int]:
    """The same piece, in elements."""
    item = tensor.element_size()
    return start // item, (start + num_bytes) // item
