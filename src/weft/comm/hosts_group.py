"""The calls of a group on several hosts, equally many members on each: in shared memory within a host, over gloo between.

    host 0   member 0  1  2  3        members at one place of all hosts, 0 and 4, 1 and 5, ..., have
    host 1   member 4  5  6  7        a group of gloo

                    within hosts        between hosts, of one place   within hosts
all_reduce          reduce_scatter      all_reduce of the part        all_gather
all_reduce, small                       all_gather                    all_gather; all are reduced in rank order
reduce_scatter      reduce_scatter      reduce_scatter
all_gather                              all_gather                    all_gather
broadcast                               from the root, at its place   broadcast

What another host needs leaves a host once: with gloo alone every member sends to all members of the
other hosts. An all_to_all, in which nothing is sent twice, a gather, a scatter and a barrier have a
group of gloo of all members.

Note [Sums over hosts]
    A large sum is added up within each host in the order of ranks, then over hosts: the same order in
    every run and the same bits on every member, though not those of one host. bfloat16 and float16
    are added up in float32 and rounded once. Deterministic runs have flat groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm.backends import (
    ACCUMULATED_IN_FLOAT32,
    HOSTS,
    SMALL_BYTES,
    DeviceGroup,
    close_connections,
    reduce_in_order,
    summed,
)
from weft.comm.in_flight import BackendCall
from weft.comm.shared_group import ALGORITHMS, SharedGroup, SharedProgress, compare_texts
from weft.comm.shared_memory import SharedSegment, Steps
from weft.comm.signature import encode_signature
from weft.comm.transport import Call, Op


class HostsGroup(SharedGroup):
    """The calls of one member of a group on several hosts.

    Args:
        segment: memory of the members on this host.
        ranks: world ranks of the whole group, host after host.
        index: place of this member in `ranks`.
        width: members on each host.
        between: the group of gloo of the members at this one's place, one of each host.
        flat: the group of gloo of all members.
    """

    policy = HOSTS
    has_hosts = True

    def __init__(
        self,
        segment: SharedSegment,
        ranks: tuple[int, ...],
        *,
        index: int,
        width: int,
        between: DeviceGroup,
        flat: DeviceGroup,
        progress: SharedProgress,
    ) -> None:
        self.host, place = divmod(index, width)
        self.width, self.num_hosts = width, len(ranks) // width
        first = self.host * width
        super().__init__(segment, ranks[first : first + width], index=place, progress=progress)
        self._between, self._flat = between, flat
        self._peers = ranks[place::width]

    def steps_of(self, call: Call) -> Steps:
        """All parts of a call."""
        algorithms: dict[Op, Callable[[Call], Steps]] = {
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "broadcast": self._broadcast,
        }
        steps = algorithms.get(call.op, self._flat_call)(call)
        return self._checked(call, steps) if call.checked else steps

    def abort(self) -> None:
        """Fail what is under way on this rank, and its connections to other hosts."""
        super().abort()
        close_connections(self._between.process_group, self.host)
        close_connections(self._flat.process_group, self.host * self.width + self.rounds.index)

    def _within(self, part: Call) -> Steps:
        """A part of a call among the members of this host."""
        part = replace(part, ranks=self.ranks, index=self.rounds.index)
        return ALGORITHMS[part.op](self.rounds, part)

    def _over_hosts(self, part: Call) -> BackendCall:
        """Start a part of a call among the members at this place of all hosts."""
        return self._between.launch(replace(part, ranks=self._peers, index=self.host))

    def _checked(self, call: Call, steps: Steps) -> Steps:
        """The members get the signatures of all, before the parts of the call."""
        own = encode_signature(call)
        texts = own.new_empty(len(call.ranks), own.numel())
        yield from self._all_gather_equal(replace(call, signature="signatures"), own, texts)
        compare_texts(call, own, texts.unbind())
        yield from steps

    def _all_reduce(self, call: Call) -> Steps:
        output = call.required_output
        numel, size = output.numel(), len(call.ranks)
        if size * output.nbytes <= SMALL_BYTES:
            wholes = output.new_empty(size, numel)
            yield from self._all_gather_equal(call, output, wholes)
            output.copy_(reduce_in_order(wholes.unbind(), call.reduce))
            return
        length = -(-numel // self.width)
        starts = [min(place * length, numel) for place in range(self.width + 1)]
        sizes = tuple(end - start for start, end in pairwise(starts))
        total = _wide(output)
        own, rounded = (
            torch.split(whole, list(sizes))[self.rounds.index] for whole in (total, output)
        )
        # the average is taken once, at the end: hosts have sums of equally many members each
        added = replace(call, input=total, output=own, reduce=summed(call.reduce))
        yield from self._within(replace(added, op="reduce_scatter", input_split_sizes=sizes))
        # in place on the own part: the other parts are other members' to add up
        yield self._over_hosts(added)
        _finish_sum(call, own, rounded)
        yield from self._within(
            replace(call, op="all_gather", input=rounded, output_split_sizes=sizes)
        )

    def _reduce_scatter(self, call: Call) -> Steps:
        output, source = call.required_output, _wide(call.required_input)
        sizes, own_sizes = self._by_host(call.input_split_sizes)
        blocks = torch.split(source, [sum(block) for block in sizes])
        sums = source.new_empty(sum(own_sizes))
        added = replace(call, reduce=summed(call.reduce))
        for block, own, split_sizes in zip(
            blocks, torch.split(sums, list(own_sizes)), sizes, strict=True
        ):
            part = replace(added, input=block, output=own, input_split_sizes=split_sizes)
            yield from self._within(part)
        total = output if output.dtype == source.dtype else source.new_empty(output.numel())
        yield self._over_hosts(
            replace(added, input=sums, output=total, input_split_sizes=own_sizes)
        )
        _finish_sum(call, total, output)

    def _all_gather(self, call: Call) -> Steps:
        """Those of other hosts are gathered by place first."""
        own, num_hosts = call.required_input, self.num_hosts
        sizes, own_sizes = self._by_host(call.output_split_sizes)
        received = own.new_empty(sum(own_sizes))
        over_hosts = self._over_hosts(
            replace(
                call,
                output=received,
                input_split_sizes=(own.numel(),) * num_hosts,
                output_split_sizes=own_sizes,
            )
        )
        blocks = torch.split(call.required_output, [sum(block) for block in sizes])
        pieces = torch.split(received, list(own_sizes))

        def on_host(host: int, piece: Tensor) -> Steps:
            part = replace(call, input=piece, output=blocks[host], output_split_sizes=sizes[host])
            return self._within(part)

        # while the pieces of other hosts are on their way
        yield from on_host(self.host, own)
        yield over_hosts
        for host in range(num_hosts):
            if host != self.host:
                yield from on_host(host, pieces[host])

    def _all_gather_equal(self, call: Call, own: Tensor, wholes: Tensor) -> Steps:
        """`own` of every member into the rows of `wholes`."""
        sizes = (own.numel(),) * len(call.ranks)
        flat = wholes.view(-1)
        part = replace(call, op="all_gather", input=own, output=flat, output_split_sizes=sizes)
        return self._all_gather(part)

    def _broadcast(self, call: Call) -> Steps:
        host, place = divmod(call.root, self.width)
        # the others of each host have it from this member, in the step below
        if self.rounds.index == place:
            yield self._over_hosts(replace(call, root=host))
        yield from self._within(replace(call, root=place))

    def _flat_call(self, call: Call) -> Steps:
        yield self._flat.launch(call)

    def _by_host(self, values: tuple[int, ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """The values of all members, those of each host together; those of this member's place."""
        width = self.width
        blocks = [values[start : start + width] for start in range(0, len(values), width)]
        return blocks, tuple(block[self.rounds.index] for block in blocks)


def _wide(x: Tensor) -> Tensor:
    """x as it is added up."""
    return x.float() if x.dtype in ACCUMULATED_IN_FLOAT32 else x


def _finish_sum(call: Call, total: Tensor, output: Tensor) -> None:
    """Make an average of a sum if it is to be one, and round it to the output."""
    if call.reduce == "avg":
        total.div_(len(call.ranks))
    if total.dtype != output.dtype:
        output.copy_(total)
