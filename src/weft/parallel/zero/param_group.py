"""Owns a unit: parameters whose values are gathered, whose gradients are reduced and whose shards are updated together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.errors import CommError
from weft.parallel.zero.flat import FlatLayout, FlatParams

Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class ShardingPolicy:
    """How parameters are held.

    Attributes:
        zero: what is spread over the ranks that would hold copies: 0 nothing, 1 optimizer states, 2 gradients too,
            3 parameters too.
        params: dtype of the values that the optimizer moves.
        compute: dtype in which blocks compute and parameters are gathered.
        reduce: dtype in which gradients are kept and summed over micro-batches and ranks.
        share: factor of a finished sum of gradients: 1, or 1 / ranks for their mean.
        keeps_full: whether the memory of whole gradients stays between steps; it holds the finished ones where dtypes agree.
        keeps_grad: whether the memory of finished gradients stays; else whoever takes them away has them.
    """

    zero: Zero
    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    share: float = 1.0
    keeps_full: bool = False
    keeps_grad: bool = True


class ParamGroup:
    """Some parameters of one rank. They are all trained, or none of them is.

    Attributes:
        axes: mesh axes along which the gradient is summed and, from ZeRO 1 on, everything is spread.
        stage: whose backward completes the gradients.
        whole: the parameters that modules use, in `compute`.
        shard: this rank's entries of the values, in `params`; the optimizer moves them.
        grad: this rank's entries of the finished gradient, in `params`; None where there is none.
        full: gradients of the whole unit on their way, in `reduce`.
        missing: parameters whose gradient of the backward under way has not arrived.
        is_reduced: whether `full` has been given to a reduction since the last `settle`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        comm: Comm,
        policy: ShardingPolicy,
        *,
        axes: tuple[str, ...],
        stage: int = 0,
    ) -> None:
        self.params, self.comm, self.policy, self.axes, self.stage = dict(params), comm, policy, axes, stage
        self.index = comm.index(axes) if policy.zero else 0
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        self.layout = FlatLayout.of(shapes, comm.degree(axes) if policy.zero else 1)
        self.missing = set(self.params)
        self.full: Tensor | None = None
        self.grad: Tensor | None = None
        self.is_direct = self.is_reduced = False
        self._reducing: Work | None = None
        self._gathering: Work | None = None
        self.shard = self._take_parameters()
        if self.is_trained and policy.keeps_grad:
            self._make_gradients()

    @property
    def is_trained(self) -> bool:
        """Whether gradients are wanted."""
        return next(iter(self.params.values())).requires_grad

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold other entries."""
        return self.layout.parts > 1

    @property
    def is_on_demand(self) -> bool:
        """Whether the whole values are here only while they are needed."""
        return self.policy.zero == 3 and self.is_spread

    @property
    def _is_kept_there(self) -> bool:
        """Whether the finished gradient lies in the memory of the whole one."""
        policy = self.policy
        return policy.keeps_full and policy.keeps_grad and policy.reduce == policy.params

    def _take_parameters(self) -> Tensor:
        """Move the parameters into flat memory; returns this rank's shard."""
        policy, mine = self.policy, self.layout.shard_range(self.index)
        if policy.params == policy.compute and not self.is_on_demand:
            self.whole = FlatParams(self.params, self.layout, dtype=policy.compute)
            return self.whole.flat[mine]
        device = next(iter(self.params.values())).device
        shard = self.layout.pack_shard(self.params, self.index, dtype=policy.params, device=device)
        self.whole = FlatParams(self.params, self.layout, dtype=policy.compute)
        self.release()
        return shard

    def _make_gradients(self) -> None:
        policy, mine = self.policy, self.layout.shard_range(self.index)
        if policy.keeps_full:
            self.full = self.shard.new_zeros(self.layout.length, dtype=policy.reduce)
            self.is_direct = policy.compute == policy.reduce
        if self.full is not None and self.is_direct:
            for name, view in self.layout.views(self.full).items():
                self.params[name].grad = view
        self.grad = self.full[mine] if self.full is not None and self._is_kept_there else torch.zeros_like(self.shard)

    # gradients on their way

    def zero_gradients(self) -> None:
        """Make every gradient 0."""
        for flat in (self.grad, self.full):
            if flat is not None:
                flat.zero_()

    def take_gradient(self, name: str, param: Tensor) -> bool:
        """Put the gradient that autograd left at a parameter where it is summed; whether it was the last one missing."""
        if self.is_reduced and self.policy.keeps_full:
            raise CommError(
                f"a gradient of {name} came after those of its unit were reduced: a backward of this step used other "
                f"parameters than the one before it; use ZeRO 2, or a schedule whose backward is not split"
            )
        if self.full is None:
            self.full = self.shard.new_zeros(self.layout.length, dtype=self.policy.reduce)
        if not self.is_direct:
            assert param.grad is not None, "the hook runs after the gradient was accumulated"
            self.layout.views(self.full)[name].add_(param.grad)
            param.grad = None
        self.missing.discard(name)
        return not self.missing

    def start_reduce(self) -> None:
        """Begin to sum `full` over the ranks; one without any gradient brings zeros."""
        self.settle()
        full = (
            self.full if self.full is not None else self.shard.new_zeros(self.layout.length, dtype=self.policy.reduce)
        )
        if self.is_spread:
            start = self.comm.start_reduce_scatter_ if self._is_kept_there else self.comm.start_reduce_scatter
            self._reducing = start(full, self.axes)
        else:
            self._reducing = self.comm.start_all_reduce_(full, self.axes) if self.axes else Work.done(full)
        self.is_reduced = True
        if not self.policy.keeps_full:
            self.full = None

    def settle(self) -> None:
        """Wait for the sum under way and take it in."""
        if self._reducing is None:
            return
        total, self._reducing = self._reducing.wait(), None
        if self.grad is None:
            self.grad = total.to(self.policy.params).mul_(self.policy.share)
        elif not self.policy.keeps_full:
            self.grad.add_(total, alpha=self.policy.share)
        elif total.data_ptr() != self.grad.data_ptr():
            self.grad.copy_(total)

    def give_gradient(self) -> dict[str, Tensor]:
        """The finished gradient by name, one-dimensional, for whoever asks to keep; empty where other ranks have it all."""
        grad, self.grad = self.grad, None
        assert grad is not None, "asked for after `settle` of a reduction"
        return self.layout.shard_views(grad, self.index)

    # values on their way

    def take_values(self, values: Mapping[str, Tensor]) -> None:
        """Take this rank's entries of other values; the whole is as it was until it is refreshed."""
        device, dtype = self.shard.device, self.shard.dtype
        self.shard.copy_(self.layout.pack_shard(values, self.index, dtype=dtype, device=device))

    def start_gather(self) -> None:
        """Begin to bring the values of all ranks here, unless they are."""
        if self._gathering is None and not self.whole.is_there:
            self.start_refresh()

    def start_refresh(self) -> None:
        """Begin to bring the values of all ranks here, whatever is here now."""
        if self._gathering is not None:
            return
        self.whole.restore()
        whole = self.whole.alias()
        own = whole[self.layout.shard_range(self.index)]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        self._gathering = self.comm.start_all_gather_(whole, self.axes) if self.is_spread else Work.done(whole)

    def finish_gather(self) -> None:
        """Have the values of all ranks here."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Give the memory of the whole values away where they come on demand; a gather under way is waited for and forgotten."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.is_on_demand:
            self.whole.release()
