"""The calls of a group on several hosts, equally many members on each: in shared memory within a host, over gloo between.

    host 0   member 0  1  2  3        members at one place of all hosts, 0 and 4, 1 and 5, ..., have
    host 1   member 4  5  6  7        a group of gloo

                    within hosts, by place   between hosts, of one place      within hosts
all_reduce          reduce_scatter           all_reduce of the part           all_gather
all_reduce, small   all_gather               all_gather; all are added in the order of their ranks
reduce_scatter      reduce_scatter           reduce_scatter
all_gather                                   all_gather                       all_gather
all_to_all          all_to_all               all_to_all
broadcast                                    broadcast at the root's place    broadcast
gather              gather                   gather at the root's place
scatter                                      scatter at the root's place      scatter
barrier             barrier                  barrier

Every byte that other hosts need leaves a host once, and a sum leaves it as one part for each
member. Gloo alone would send what each member has to each member of the other hosts.

Note [Sums over hosts]
    A large sum is added up within each host in the order of ranks, then over hosts: the same order in
    every run and the same bits on every member, though not those of one host. bfloat16 and float16
    are added up in float32 and rounded once. Deterministic runs have flat groups.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from weft.comm.transport import Call, Op, Reduce


class HostsGroup(SharedGroup):
    """The calls of one member of a group on several hosts.

    Args:
        segment: memory of the members on this host.
        ranks: world ranks of the whole group, host after host.
        index: place of this member in `ranks`.
        width: members on each host.
        between: the group of gloo of the members at this one's place, one of each host.
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
        progress: SharedProgress,
    ) -> None:
        self.host, place = divmod(index, width)
        self.width, self.num_hosts = width, len(ranks) // width
        first = self.host * width
        super().__init__(segment, ranks[first : first + width], index=place, progress=progress)
        self._between = between
        self._peers = ranks[place::width]

    def steps_of(self, call: Call) -> Steps:
        """All parts of a call."""
        steps = self._steps_of(call)
        return self._checked(call, steps) if call.checked else steps

    def abort(self) -> None:
        """Fail what is under way on this rank, and its connections to other hosts."""
        super().abort()
        close_connections(self._between.process_group, self.host)

    def _steps_of(self, call: Call) -> Steps:
        match call.op:
            case "all_reduce":
                yield from self._all_reduce(call)
            case "reduce_scatter":
                yield from self._reduce_scatter(call)
            case "all_gather":
                own, output = call.required_input, call.required_output
                yield from self._all_gather(call, own, output, call.output_split_sizes)
            case "all_to_all":
                yield from self._all_to_all(call)
            case "barrier":
                yield from self._within(call, "barrier")
                yield self._over_hosts(call, "barrier")
            case _:
                yield from self._of_root(call)

    def _within(
        self,
        call: Call,
        op: Op,
        *,
        input: Tensor | None = None,
        output: Tensor | None = None,
        input_split_sizes: Sequence[int] = (),
        output_split_sizes: Sequence[int] = (),
        reduce: Reduce = "sum",
        root: int = 0,
    ) -> Steps:
        """A part of a call among the members of this host."""
        part = Call(
            op,
            call.axis,
            self.ranks,
            self.rounds.index,
            call.signature,
            input=input,
            output=output,
            input_split_sizes=tuple(input_split_sizes),
            output_split_sizes=tuple(output_split_sizes),
            reduce=reduce,
            root=root,
        )
        return ALGORITHMS[op](self.rounds, part)

    def _over_hosts(
        self,
        call: Call,
        op: Op,
        *,
        input: Tensor | None = None,
        output: Tensor | None = None,
        input_split_sizes: Sequence[int] = (),
        output_split_sizes: Sequence[int] = (),
        reduce: Reduce = "sum",
        root: int = 0,
    ) -> BackendCall:
        """Start a part of a call among the members at this place of all hosts."""
        part = Call(
            op,
            call.axis,
            self._peers,
            self.host,
            call.signature,
            input=input,
            output=output,
            input_split_sizes=tuple(input_split_sizes),
            output_split_sizes=tuple(output_split_sizes),
            reduce=reduce,
            root=root,
        )
        return self._between.launch(part)

    def _checked(self, call: Call, steps: Steps) -> Steps:
        """The members get the signatures of all, before the parts of the call."""
        own = encode_signature(call)
        texts = own.new_empty(len(call.ranks), own.numel())
        sizes = (own.numel(),) * len(call.ranks)
        yield from self._all_gather(call, own, texts.view(-1), sizes)
        compare_texts(call, own, texts.unbind())
        yield from steps

    def _all_reduce(self, call: Call) -> Steps:
        output = call.required_output
        if len(call.ranks) * output.nbytes <= SMALL_BYTES:
            numel, size = output.numel(), len(call.ranks)
            wholes = output.new_empty(size, numel)
            yield from self._all_gather(call, output, wholes.view(-1), (numel,) * size)
            output.copy_(reduce_in_order(wholes.unbind(), call.reduce))
            return
        index, length = self.rounds.index, -(-output.numel() // self.width)
        starts = [min(place * length, output.numel()) for place in range(self.width + 1)]
        sizes = [end - start for start, end in pairwise(starts)]
        op, total = summed(call.reduce), _wide(output)
        own = total[starts[index] : starts[index + 1]]
        yield from self._within(
            call, "reduce_scatter", input=total, output=own, input_split_sizes=sizes, reduce=op
        )
        yield self._over_hosts(call, "all_reduce", output=own, reduce=op)
        rounded = output[starts[index] : starts[index + 1]]
        _finish_sum(call, own, rounded)
        yield from self._within(
            call, "all_gather", input=rounded, output=output, output_split_sizes=sizes
        )

    def _reduce_scatter(self, call: Call) -> Steps:
        output, source = call.required_output, _wide(call.required_input)
        op, sizes, own_sizes = summed(call.reduce), *self._by_host(call.input_split_sizes)
        sums = source.new_empty(sum(own_sizes))
        blocks = torch.split(source, [sum(block) for block in sizes])
        for block, own, split_sizes in zip(
            blocks, torch.split(sums, own_sizes), sizes, strict=True
        ):
            yield from self._within(
                call,
                "reduce_scatter",
                input=block,
                output=own,
                input_split_sizes=split_sizes,
                reduce=op,
            )
        total = output if output.dtype == source.dtype else source.new_empty(output.numel())
        yield self._over_hosts(
            call,
            "reduce_scatter",
            input=sums,
            output=total,
            input_split_sizes=own_sizes,
            output_split_sizes=(output.numel(),) * self.num_hosts,
            reduce=op,
        )
        _finish_sum(call, total, output)

    def _all_gather(
        self, call: Call, own: Tensor, output: Tensor, split_sizes: Sequence[int]
    ) -> Steps:
        """`own` of all members into `output`; those of other hosts are gathered by place first."""
        sizes, own_sizes = self._by_host(split_sizes)
        received = own.new_empty(sum(own_sizes))
        over_hosts = self._over_hosts(
            call,
            "all_gather",
            input=own,
            output=received,
            input_split_sizes=(own.numel(),) * self.num_hosts,
            output_split_sizes=own_sizes,
        )
        blocks = torch.split(output, [sum(block) for block in sizes])
        pieces = [*torch.split(received, own_sizes)]
        pieces[self.host] = own
        others = [host for host in range(self.num_hosts) if host != self.host]
        for host in (self.host, *others):
            if host == others[0]:
                yield over_hosts
            yield from self._within(
                call,
                "all_gather",
                input=pieces[host],
                output=blocks[host],
                output_split_sizes=sizes[host],
            )

    def _all_to_all(self, call: Call) -> Steps:
        """Members of a host first tell each other how much they send to whom, and exchange by place
        what they send: that of one place then goes to the member at that place of each host.
        """
        source, index = call.required_input, self.rounds.index
        row = torch.tensor(call.input_split_sizes)
        table = row.new_empty(self.width, row.numel())
        yield from self._within(
            call,
            "all_gather",
            input=row,
            output=table.view(-1),
            output_split_sizes=(row.numel(),) * self.width,
        )
        received = table.view(self.width, self.num_hosts, self.width)[:, :, index].T.tolist()
        sizes, _ = self._by_host(call.input_split_sizes)
        output_sizes, _ = self._by_host(call.output_split_sizes)
        sent = [sum(block) for block in received]
        packed = source.new_empty(sum(sent))
        blocks = torch.split(source, [sum(block) for block in sizes])
        for host, (block, part) in enumerate(zip(blocks, torch.split(packed, sent), strict=True)):
            yield from self._within(
                call,
                "all_to_all",
                input=block,
                output=part,
                input_split_sizes=sizes[host],
                output_split_sizes=received[host],
            )
        yield self._over_hosts(
            call,
            "all_to_all",
            input=packed,
            output=call.required_output,
            input_split_sizes=sent,
            output_split_sizes=[sum(block) for block in output_sizes],
        )

    def _of_root(self, call: Call) -> Steps:
        """broadcast, gather or scatter, over the members at the place of the root."""
        host, place = divmod(call.root, self.width)
        is_at_place = self.rounds.index == place
        if call.op == "broadcast":
            output = call.required_output
            if is_at_place:
                yield self._over_hosts(call, "broadcast", output=output, root=host)
            yield from self._within(call, "broadcast", output=output, root=place)
        elif call.op == "gather":
            own = call.required_input
            block = own.new_empty(self.width * own.numel()) if is_at_place else None
            yield from self._within(call, "gather", input=own, output=block, root=place)
            if block is not None:
                yield self._over_hosts(call, "gather", input=block, output=call.output, root=host)
        else:
            output, block = call.required_output, None
            if is_at_place:
                block = output.new_empty(self.width * output.numel())
                yield self._over_hosts(call, "scatter", input=call.input, output=block, root=host)
            yield from self._within(call, "scatter", input=block, output=output, root=place)

    def _by_host(self, values: Sequence[int]) -> tuple[list[Sequence[int]], list[int]]:
        """The values of all members, those of each host together; those of this member's place."""
        width = self.width
        blocks = [values[start : start + width] for start in range(0, len(values), width)]
        return blocks, [block[self.rounds.index] for block in blocks]


def _wide(x: Tensor) -> Tensor:
    """x as it is added up."""
    return x.float() if x.dtype in ACCUMULATED_IN_FLOAT32 else x


def _finish_sum(call: Call, total: Tensor, output: Tensor) -> None:
    """Make an average of a sum if it is to be one, and round it to the output."""
    if call.reduce == "avg":
        total.div_(len(call.ranks))
    if total.dtype != output.dtype:
        output.copy_(total)
