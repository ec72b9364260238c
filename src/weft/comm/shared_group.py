"""The calls of a group in shared memory: what a member writes and reads in each round, and who moves the calls on.

all_reduce        piece              write it; read all halves, reduce    (two members, small tensors: one round)
                  own part of it     write the reduced part; read the parts of all
reduce_scatter    a part for each    read the own part of all halves, reduce
all_to_all        a part for each    read the own part of all halves
all_gather        piece              read all halves
broadcast, send   piece of the root  read its half
gather, scatter   piece; parts       the root reads all; all read their part of the root's half

Note [Progress in shared memory]
    A call is a generator that goes on until it must wait for another member. No thread of a backend
    moves it on in the meantime; a thread that waits in this process moves on all calls of all groups. So
    a rank that waits in one group does its part in the others, and correct programs do not
    deadlock. A thread does it for calls that no thread waits for, because the rank computes or waits
    for something else. It looks more and more rarely as long as it finds nothing to do: with more
    ranks than cores it would take time from those that compute.

Note [Waiting in shared memory]
    A rank that waits yields its core some times, for ranks that arrive together, and then sleeps at
    the counters of the members that it waits for. With two ranks on two cores the first is enough;
    of eight ranks on two cores, those that sleep leave the cores to those that compute.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from ctypes import memmove
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.backends import SHARED_MEMORY, BackendPolicy, reduce_into
from weft.comm.in_flight import BackendCall, wait_for_works
from weft.comm.local_peers import LocalPeers
from weft.comm.shared_memory import (
    LINE_BYTES,
    WORD_BYTES,
    Rounds,
    SeenWord,
    SharedSegment,
    Steps,
    tag_of,
    wait_for_change,
)
from weft.comm.signature import check_signatures, decode_signature, encode_signature
from weft.comm.transport import Call, Op, Reduce
from weft.errors import MismatchError, counted

MAX_DIRECT_BYTES = 2**15
"""Up to this many bytes of all members together, each reduces all of an all_reduce itself: one round
instead of two.
"""
TEXT_TAG = 1


def steps_of(rounds: Rounds, call: Call) -> Steps:
    """All rounds of a call; they raise MismatchError if its signature was to be compared, and differs."""
    steps = ALGORITHMS[call.op](rounds, call)
    return _checked(rounds, call, steps) if call.checked else steps


def _reduce(output: Tensor, tensors: Sequence[Tensor], op: Reduce) -> None:
    """As `reduce_into`; the counters that autograd keeps of changes are left alone, as other backends
    do.
    """
    with torch.inference_mode():
        reduce_into(output, tensors, op)


def _checked(rounds: Rounds, call: Call, steps: Steps) -> Steps:
    """Every member writes its signature and reads those of all, before the rounds of the call."""
    own = encode_signature(call)
    num_bytes = own.numel()
    half = rounds.begin()
    texts = rounds.segment.views(half, torch.uint8, start=0, num_bytes=num_bytes)
    texts[rounds.index].copy_(own)
    # the same tag whatever is called: members in different calls meet here, and can say what differs
    yield TEXT_TAG
    # the texts lie in the halves, so they are compared before the next round may overwrite them
    compare_texts(call, own, texts)
    yield from steps


def compare_texts(call: Call, own: Tensor, texts: Sequence[Tensor]) -> None:
    """Raise MismatchError if the encoded signatures of all members do not agree."""
    has_sizes = bool(call.input_split_sizes)
    if has_sizes or not all(torch.equal(own, text) for text in texts):
        signatures = [decode_signature(text, len(call.ranks)) for text in texts]
        check_signatures(call.axis, call.ranks, signatures)


def _all_reduce(rounds: Rounds, call: Call) -> Steps:
    output = call.required_output
    tag, capacity = tag_of(call.signature), rounds.segment.capacity
    is_small = rounds.size * output.nbytes <= MAX_DIRECT_BYTES
    if is_small or not output.nbytes:
        half = rounds.begin()
        memmove(rounds.segment.addresses[half][rounds.index], output.data_ptr(), output.nbytes)
        yield tag
        halves = rounds.segment.views(half, output.dtype, start=0, num_bytes=output.nbytes)
        _reduce(output, halves, call.reduce)
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
    # in place of the own half, into which this part was not written
    parts[index] = piece[start // item : end // item]
    half = rounds.begin()
    if end > start:
        # into the half of this round: the halves that are reduced are those of the round before
        reduced = segment.views(half, piece.dtype, start=0, num_bytes=end - start)
        _reduce(reduced[index], parts, op)
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
            _reduce(output[first // item : last // item], parts, call.reduce)


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
        # all take the largest number: a member with less to send writes empty pieces, and none
        # waits for another in vain
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
    # then the own piece stands where it belongs, and a copy onto itself would be undefined
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
        # others publish an empty half: the root may not overwrite its own before all have read it
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


ALGORITHMS: dict[Op, Callable[[Rounds, Call], Steps]] = {
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


SLEEP_S = 0.05
"""Longest sleep of a rank that waits; then it looks whether another has left."""
FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.032
BETWEEN_S = 0.005
"""Longest sleep at one thing while a call also waits for another: for other members of its host, or
for other hosts.
"""
COMPLETED_S, CLOSE_S = 1.0, 5.0
IDLE_S = 1.0
"""How long the thread goes on looking when nothing is under way."""


class SharedCall(BackendCall):
    """A call in shared memory.

    Attributes:
        between: its part between hosts that is under way, in a `HostsGroup`.
    """

    def __init__(self, group: SharedGroup, call: Call) -> None:
        super().__init__(())
        self.group = group
        self._steps = group.steps_of(call)
        self.between: BackendCall | None = None
        self.is_done = False
        self.error: Exception | None = None

    def advance(self) -> bool:
        """Go on until another member must be waited for; whether the call is done."""
        rounds = self.group.rounds
        try:
            # one step for each round whose halves are all there; many may be there at once where others were ahead
            while (self.between is None or self._is_complete_between()) and rounds.is_complete():
                step = next(self._steps)
                if isinstance(step, BackendCall):
                    self.between = step
                else:
                    rounds.publish(step)
        except StopIteration:
            self.is_done = True
        except MismatchError as error:
            self.error = error
            self.is_done = True
        return self.is_done

    def _is_complete_between(self) -> bool:
        """Whether the part between hosts that is under way has become complete."""
        between = self.between
        if between is None or not between.is_completed():
            return False
        between.wait(COMPLETED_S)
        self.between = None
        return True

    def wait(self, timeout_s: float) -> bool:
        """Block for at most `timeout_s`; whether the call is complete.

        Raises:
            MismatchError: the signatures differ.
            RuntimeError: a member has left, or the group was closed.
        """
        if not self.is_done:
            self.group.progress.wait_for(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_completed(self) -> bool:
        """Whether it is complete, after what can be done without waiting."""
        if not self.is_done:
            self.group.progress.advance()
        return self.is_done


class SharedGroup:
    """The calls of one member of a group.

    Attributes:
        policy: how its calls are carried.
        has_hosts: whether calls have parts between hosts.
        rounds: of this member.
        ranks: world ranks of the members on this host.
    """

    policy: BackendPolicy = SHARED_MEMORY
    has_hosts = False

    def __init__(
        self,
        segment: SharedSegment,
        ranks: tuple[int, ...],
        *,
        index: int,
        progress: SharedProgress,
    ) -> None:
        self.rounds = Rounds(segment, index, len(ranks))
        self.ranks = ranks
        self.progress = progress
        self._calls: deque[SharedCall] = deque()
        self._failure: RuntimeError | None = None

    def steps_of(self, call: Call) -> Steps:
        """All rounds of a call."""
        return steps_of(self.rounds, call)

    def awaited_between(self) -> BackendCall | None:
        """What the group waits for between hosts; the caller holds the lock."""
        return self._calls[0].between if self._calls else None

    def launch(self, call: Call) -> BackendCall:
        """Start a call: do what can be done without waiting."""
        started = SharedCall(self, call)
        with self.progress.lock:
            if self._failure is not None:
                started.error, started.is_done = self._failure, True
                return started
            self._calls.append(started)
            # calls of a group use its halves one after the other: behind an unfinished one nothing is begun
            if len(self._calls) > 1 or self.advance():
                self.progress.go_on_with(self)
        return started

    def advance(self) -> bool:
        """Move on the calls, in order; whether any is left."""
        try:
            while self._calls and self._calls[0].advance():
                self._calls.popleft()
        except RuntimeError as error:
            self.fail(error)
        except BaseException:
            self.fail(RuntimeError("the call was interrupted"))
            raise
        return bool(self._calls)

    def fail(self, error: RuntimeError) -> None:
        """Fail what is under way, and later calls."""
        # the first one: later ones follow from it
        self._failure = self._failure or error
        while self._calls:
            call = self._calls.popleft()
            call.error, call.is_done = self._failure, True

    def abort(self) -> None:
        """Fail what is under way on this rank."""
        with self.progress.lock:
            self.fail(RuntimeError("closed by this rank"))


class SharedProgress:
    """All groups of a rank in shared memory: see Note [Progress in shared memory].

    Args:
        peers: the other ranks of this host.
    """

    def __init__(self, peers: LocalPeers) -> None:
        self.lock = threading.RLock()
        self._peers = peers
        self._busy: set[SharedGroup] = set()
        self._is_busy = threading.Event()
        self._closing = threading.Event()
        self._looked_at_s = 0.0
        self._thread: threading.Thread | None = None

    def go_on_with(self, group: SharedGroup) -> None:
        """A group has calls under way; the caller holds the lock."""
        self._busy.add(group)
        if not self._is_busy.is_set():
            self._wake_thread()

    def advance(self) -> bool:
        """Move on all calls; whether any of them got on."""
        got_on = False
        with self.lock:
            for group in tuple(self._busy):
                before = group.rounds.number
                if not group.advance():
                    self._busy.discard(group)
                    got_on = True
                got_on = got_on or group.rounds.number > before
        return got_on

    def wait_for(self, call: SharedCall, timeout_s: float) -> None:
        """Move on all calls until this one is done, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        rounds = call.group.rounds
        while True:
            between = self._awaited_between((call.group,)) if call.group.has_hosts else None
            if between is not None or not rounds.spin():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return
                if between is None:
                    self._sleep(call, min(left_s, SLEEP_S))
                else:
                    wait_for_works(between, min(left_s, self._between_s()))
            self.advance()
            if call.is_done:
                return

    def _awaited_between(self, groups: Collection[SharedGroup]) -> BackendCall | None:
        """What one of these groups waits for between hosts."""
        with self.lock:
            found = (group.awaited_between() for group in groups)
            return next(filter(None, found), None)

    def _between_s(self) -> float:
        """How long a thread may wait for other hosts: less if other groups have calls under way."""
        return SLEEP_S if len(self._busy) == 1 else BETWEEN_S

    def close(self) -> None:
        """End the thread, and let the other ranks see that this one leaves."""
        self._closing.set()
        self._is_busy.set()  # after the other, which the thread reads when it wakes
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        self._peers.close()

    def _sleep(self, call: SharedCall, timeout_s: float) -> None:
        """Sleep until a member publishes, then look from time to time who has left."""
        words, waits_between = self._awaited_words(call)
        if words:
            wait_for_change(words, min(timeout_s, BETWEEN_S) if waits_between else timeout_s)
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= SLEEP_S:
            self._looked_at_s = now_s
            self._fail_lost()

    def _awaited_words(self, call: SharedCall) -> tuple[list[SeenWord], bool]:
        """The counters that calls wait for, [] if one of them can go on or this one is done; whether
        some wait for other hosts.
        """
        words: list[SeenWord] = []
        waits_between = False
        with self.lock:
            for group in self._busy:
                word = group.rounds.awaited_word()
                if word is not None:
                    words.append(word)
                elif group.awaited_between() is None:
                    return [], False
                else:
                    waits_between = True
            return ([] if call.is_done else words), waits_between

    def _fail_lost(self) -> None:
        """Fail groups that wait for a rank that has left."""
        lost = self._peers.lost()
        if not lost:
            return
        self.advance()  # what they have published before counts
        with self.lock:
            for group in tuple(self._busy):
                word = group.rounds.awaited_word()
                rank = group.ranks[group.rounds.awaited] if word else -1
                if rank in lost:
                    group.fail(RuntimeError(f"connection closed by rank {rank}"))

    def _wake_thread(self) -> None:
        self._is_busy.set()
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(
                target=self._run_thread, name="weft shared memory", daemon=True
            )
            self._thread.start()

    def _run_thread(self) -> None:
        """Move on calls that no thread waits for."""
        interval_s, idle_since_s = FIRST_LOOK_S, time.monotonic()
        while not self._closing.is_set():
            between = self._awaited_between(self._busy)
            if between is None:
                self._closing.wait(interval_s)
            else:
                wait_for_works(between, interval_s)
            interval_s = FIRST_LOOK_S if self.advance() else min(2 * interval_s, LAST_LOOK_S)
            now_s = time.monotonic()
            if self._busy:
                idle_since_s = now_s
            elif now_s - idle_since_s > IDLE_S:
                # Under the lock, so that a call that starts now either is seen as busy or finds the event cleared.
                with self.lock:
                    if not self._busy and not self._closing.is_set():
                        self._is_busy.clear()
                self._is_busy.wait()
                interval_s, idle_since_s = FIRST_LOOK_S, time.monotonic()
