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

from collections.abc import Callable, Sequence
from ctypes import memmove
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import ACCUMULATED_IN_FLOAT32, reduce_in_order
from weft.comm.shared_memory import LINE_BYTES, WORD_BYTES, Rounds, Steps, tag_of
from weft.comm.signature import check_signatures, decode_signature, encode_signature
from weft.comm.transport import Call, Op, Reduce
from weft.errors import MismatchError, counted

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


def steps_of(rounds: Rounds, call: Call) -> Steps:
    """All rounds of a call; they raise MismatchError if its signature was to be compared, and differs."""
    steps = _ALGORITHMS[call.op](rounds, call)
    return _checked(rounds, call, steps) if call.checked else steps


def reduce_into(output: Tensor, tensors: Sequence[Tensor], op: Reduce) -> None:
    """The reduction of `tensors`, first to last, into other memory: the bits of `reduce_in_order`.

    The counters that autograd keeps of changes are left alone, as other backends do.
    """
    with torch.inference_mode():
        if output.dtype in ACCUMULATED_IN_FLOAT32:
            output.copy_(reduce_in_order(tensors, op))
            return
        reduce_two = _REDUCE_TWO[op]
        reduce_two(tensors[0], tensors[1], out=output)
        for tensor in tensors[2:]:
            reduce_two(output, tensor, out=output)
        if op == "avg":
            output.div_(len(tensors))


def _checked(rounds: Rounds, call: Call, steps: Steps) -> Steps:
    """Every member writes its signature and reads those of all, before the rounds of the call."""
    own = encode_signature(call)
    num_bytes = own.numel()
    half = rounds.begin()
    texts = rounds.segment.views(half, torch.uint8, start=0, num_bytes=num_bytes)
    texts[rounds.index].copy_(own)
    yield TEXT_TAG
    has_sizes = bool(call.input_split_sizes)
    if has_sizes or not all(torch.equal(own, text) for text in texts):
        signatures = [decode_signature(text, rounds.size) for text in texts]
        check_signatures(call.axis, call.ranks, signatures)
    yield from steps


def _all_reduce(rounds: Rounds, call: Call) -> Steps:
    output = call.required_output
    tag, capacity = tag_of(call.signature), rounds.segment.capacity
    is_small = rounds.size * output.nbytes <= MAX_DIRECT_BYTES
    if is_small or not output.nbytes:
        half = rounds.begin()
        memmove(rounds.segment.addresses[half][rounds.index], output.data_ptr(), output.nbytes)
        yield tag
        halves = rounds.segment.views(half, output.dtype, start=0, num_bytes=output.nbytes)
        reduce_into(output, halves, call.reduce)
        return
    for number in range(_num_rounds(output.nbytes, capacity)):
        first, last = _piece(output.nbytes, capacity, number)
        item = output.element_size()
        piece = output[first // item : last // item]
        yield from _all_reduce_by_parts(rounds, piece, call.reduce, tag=tag + 2 * number)


def _all_reduce_by_parts(rounds: Rounds, piece: Tensor, op: Reduce, *, tag: int) -> Steps:
    """A piece of an all_reduce, of which each member reduces one part."""
    segment, index = rounds.segment, rounds.index
    address, num_bytes = piece.data_ptr(), piece.nbytes
    part = -(-num_bytes // (rounds.size * LINE_BYTES)) * LINE_BYTES  # whole lines and elements
    bounds = [min(place * part, num_bytes) for place in range(rounds.size + 1)]
    start, end = bounds[index], bounds[index + 1]

    half = rounds.begin()
    written = segment.addresses[half][index]
    memmove(written, address, start)
    memmove(written + end, address + end, num_bytes - end)  # no other member reads the own part
    yield tag

    item = piece.element_size()
    parts = list(segment.views(half, piece.dtype, start=start, num_bytes=end - start))
    parts[index] = piece[start // item : end // item]
    half = rounds.begin()
    if end > start:
        reduced = segment.views(half, piece.dtype, start=0, num_bytes=end - start)
        reduce_into(reduced[index], parts, op)
    yield tag + 1
    for member in rounds.everyone:
        begin, end = bounds[member], bounds[member + 1]
        memmove(address + begin, segment.addresses[half][member], end - begin)


def _reduce_scatter(rounds: Rounds, call: Call) -> Steps:
    source, output = call.required_input, call.required_output
    tag, part, item = tag_of(call.signature), _part_bytes(rounds), output.element_size()
    for number in range(_num_rounds(max(call.input_split_sizes) * item, part)):
        half = rounds.begin()
        _write_parts(rounds, source, call.input_split_sizes, number)
        yield tag + number
        first, last = _piece(output.nbytes, part, number)
        if last > first:
            start, num_bytes = _part_at(rounds, rounds.index), last - first
            parts = rounds.segment.views(half, output.dtype, start=start, num_bytes=num_bytes)
            reduce_into(output[first // item : last // item], parts, call.reduce)


def _all_to_all(rounds: Rounds, call: Call) -> Steps:
    """A member knows only its own sizes: all say how many rounds they need, and how much they send to whom.

    Unequal sizes are an error after the last round, on the member that expects others: the rounds of
    all members stay the same.
    """
    source, output = call.required_input, call.required_output
    tag, part, item = tag_of(call.signature), _part_bytes(rounds), output.element_size()
    own_rounds = _num_rounds(max(*call.input_split_sizes, *call.output_split_sizes) * item, part)
    starts = list(accumulate(call.output_split_sizes, initial=0))
    num_rounds, number = own_rounds, 0
    while number < num_rounds:
        half = rounds.begin()
        _write_parts(rounds, source, call.input_split_sizes, number)
        rounds.write_number(own_rounds)
        yield tag + number
        num_rounds = max(rounds.numbers())
        for member, numel in enumerate(call.output_split_sizes):
            first, last = _piece(numel * item, part, number)
            read = rounds.segment.addresses[half][member] + _part_at(rounds, rounds.index)
            memmove(output.data_ptr() + starts[member] * item + first, read, last - first)
        number += 1
    _check_sent(rounds, call)


def _check_sent(rounds: Rounds, call: Call) -> None:
    """Raise MismatchError if this member expects other sizes than the members send to it."""
    words, line = rounds.segment.words, _part_at(rounds, rounds.index) // WORD_BYTES
    sent = [words[header + line] for header in rounds.segment.headers[rounds.half]]
    for member, (got, expected) in enumerate(zip(sent, call.output_split_sizes, strict=True)):
        if got != expected:
            sender, receiver = call.ranks[member], call.ranks[rounds.index]
            raise MismatchError(
                f"over {call.axis}, split sizes of the ranks do not match: rank {sender} sends"
                f" {counted(got, 'element')} to rank {receiver}, which expects {expected}"
            )


def _all_gather(rounds: Rounds, call: Call) -> Steps:
    own, output = call.required_input, call.required_output
    item = output.element_size()
    sizes = [item * numel for numel in call.output_split_sizes]
    starts = list(accumulate(sizes, initial=0))
    is_in_place = own.data_ptr() == output.data_ptr() + starts[rounds.index]
    read = [m for m in rounds.everyone if not (is_in_place and m == rounds.index)]
    for number in range(_num_rounds(max(sizes), rounds.segment.capacity)):
        _write_whole(rounds, own, number)
        yield tag_of(call.signature) + number
        for member in read:
            address = output.data_ptr() + starts[member]
            _read_whole(rounds, member, number, address, sizes[member])


def _broadcast(rounds: Rounds, call: Call) -> Steps:
    """From the root; of a message, from its first member."""
    tensor = call.required_input if call.op == "send" else call.required_output
    is_root = rounds.index == call.root
    for number in range(_num_rounds(tensor.nbytes, rounds.segment.capacity)):
        _write_whole(rounds, tensor if is_root else tensor[:0], number)
        yield tag_of(call.signature) + number
        if not is_root:
            _read_whole(rounds, call.root, number, tensor.data_ptr(), tensor.nbytes)


def _gather(rounds: Rounds, call: Call) -> Steps:
    own = call.required_input
    for number in range(_num_rounds(own.nbytes, rounds.segment.capacity)):
        _write_whole(rounds, own, number)
        yield tag_of(call.signature) + number
        if call.output is not None:
            for member in rounds.everyone:
                address = call.output.data_ptr() + member * own.nbytes
                _read_whole(rounds, member, number, address, own.nbytes)


def _scatter(rounds: Rounds, call: Call) -> Steps:
    output = call.required_output
    part = _part_bytes(rounds)
    for number in range(_num_rounds(output.nbytes, part)):
        half = rounds.begin()
        if call.input is not None:
            _write_parts(rounds, call.input, (output.numel(),) * rounds.size, number)
        yield tag_of(call.signature) + number
        first, last = _piece(output.nbytes, part, number)
        read = rounds.segment.addresses[half][call.root] + _part_at(rounds, rounds.index)
        memmove(output.data_ptr() + first, read, last - first)


def _barrier(rounds: Rounds, call: Call) -> Steps:
    rounds.begin()
    yield tag_of(call.signature)


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
    written = rounds.segment.addresses[half][rounds.index]
    memmove(written, tensor.data_ptr() + first, last - first)


def _read_whole(rounds: Rounds, member: int, number: int, address: int, num_bytes: int) -> None:
    """Read piece `number` of a tensor of another member."""
    first, last = _piece(num_bytes, rounds.segment.capacity, number)
    memmove(address + first, rounds.segment.addresses[rounds.half][member], last - first)


# Half a slot has a part for each member: a line, the number of elements for the member in its first word, and data. As the
# half begins with a line, too, that word has the same distance from the header as the data of the part from the data
# of the half.


def _write_parts(rounds: Rounds, source: Tensor, split_sizes: Sequence[int], number: int) -> None:
    """Write piece `number` of what each member receives into its part of the own half."""
    part, item = _part_bytes(rounds), source.element_size()
    segment, half, index = rounds.segment, rounds.half, rounds.index
    header, address = segment.headers[half][index], segment.addresses[half][index]
    start = source.data_ptr()
    for member, numel in enumerate(split_sizes):
        at = _part_at(rounds, member)
        segment.words[header + at // WORD_BYTES] = numel
        first, last = _piece(numel * item, part, number)
        memmove(address + at, start + first, last - first)
        start += numel * item


def _part_bytes(rounds: Rounds) -> int:
    """Bytes of data of the part of a half that is for one member."""
    return rounds.segment.capacity // (rounds.size * LINE_BYTES) * LINE_BYTES - LINE_BYTES


def _part_at(rounds: Rounds, member: int) -> int:
    """Where the data for a member begin, from the beginning of the data of the half."""
    return member * (_part_bytes(rounds) + LINE_BYTES) + LINE_BYTES


def _num_rounds(num_bytes: int, most: int) -> int:
    """Rounds in which a buffer passes; one for an empty buffer."""
    return max(1, -(-num_bytes // most))


def _piece(num_bytes: int, most: int, number: int) -> tuple[int, int]:
    """Where piece `number` of a buffer begins and ends; empty behind its end."""
    return min(number * most, num_bytes), min((number + 1) * most, num_bytes)
