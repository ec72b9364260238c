"""Local updates (DiLoCo): every H steps of training apart, an outer optimizer joins the model replicas of all sites.

    step            1 ... H            H+1 ... H+d            ... 2H
    site 0          inner steps   ┐    inner steps     ┐      inner steps   ┐
    site 1          inner steps   ┴──> exchange ──────>┴ outer step         ┴──> ...

After step H each site sends its outer gradient, outer parameters minus its own. The mean over sites
(added in the order of sites, then divided) feeds a Nesterov SGD: v = m v + g, outer -= lr (g + m v).
Without delay d each site then goes on from the outer parameters. With a delay the exchange runs
beside d inner steps; then a site keeps the share `mix` of its own parameters and takes the rest
from the outer ones. States of the inner optimizer stay on their site.

Sources: Douillard et al. 2023 (DiLoCo, arXiv 2311.08105), algorithm 1; Douillard et al. 2025
(Streaming DiLoCo, arXiv 2501.18512), algorithm 2, for delay and mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.transport import Work
from weft.core.axes import local_update_axis
from weft.parallel.local_updates.outer_shard import OuterPiece, OuterShard
from weft.parallel.local_updates.wire import WireName, wire_format
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.zero.gradient_reducer import GradientReducer


@dataclass(frozen=True)
class OuterSettings:
    """Settings of the outer optimizer and the exchange.

    Attributes:
        every: inner steps between two exchanges.
        lr: learning rate of the outer Nesterov SGD.
        momentum: its decay rate.
        wire: what outer gradients are sent as.
        overlap: inner steps that run beside an exchange.
        mix: share of its own parameters that a site keeps at a delayed outer step.
    """

    every: int
    lr: float
    momentum: float
    wire: WireName
    overlap: int
    mix: float


@dataclass(frozen=True)
class OuterReport:
    """What one step had to do with other sites.

    Attributes:
        sent_bytes: of this rank's outer gradient, to each other site; 0 where no exchange began.
        waited_s: seconds in which this rank waited for an exchange.
        is_applied: whether the outer optimizer made a step.
    """

    sent_bytes: int
    waited_s: float
    is_applied: bool


@dataclass(frozen=True)
class _OuterState:
    """Outer parameters and their momentum, the entries that this rank exchanges."""

    params: Tensor
    momentum: Tensor


@dataclass
class _Exchange:
    """An exchange under way: the messages of all sites, or their mean."""

    work: Work | None
    mean: Tensor | None = None


class LocalUpdates:
    """The outer optimizer of one rank, and its exchange with the same rank of other sites.

    Attributes:
        site, num_sites: index of this rank's site, and their number.
        num_steps: inner steps that are done.
    """

    def __init__(
        self, model: ParallelModel, reducer: GradientReducer, settings: OuterSettings
    ) -> None:
        axis = local_update_axis(model.comm.mesh)
        assert axis is not None, "the mesh names an axis of local updates"
        self.axis: str = axis
        self.comm = model.comm
        self.settings = settings
        self.shard = OuterShard(model, reducer)
        self.wire = wire_format(settings.wire, self.shard, reducer)
        self.site = model.comm.index(axis)
        self.num_sites = model.comm.degree(axis)
        self.num_steps = 0
        self._state: _OuterState | None = None
        self._exchange: _Exchange | None = None

    # between steps

    @property
    def outer(self) -> _OuterState:
        """Outer parameters and momentum; at first the present parameters."""
        self.before_inner_step()
        assert self._state is not None, "there is a state now"
        return self._state

    def before_inner_step(self) -> None:
        """Take the present parameters as the outer ones, if there are none yet."""
        if self._state is not None:
            return
        # A copy, before the first inner step: all sites begin with the same values.
        self._state = _OuterState(params=self.shard.values(), momentum=self.shard.zeros())

    def reset(self) -> None:
        """Forget outer parameters and momentum: the next step begins with the present parameters."""
        self.wait()
        self._state = None
        self._exchange = None

    def prepare_restore(self, num_steps: int, *, has_exchange: bool) -> None:
        """Allocate what a checkpoint of so many steps is read into."""
        self.wait()
        self.num_steps = num_steps
        self._state = _OuterState(params=self.shard.zeros(), momentum=self.shard.zeros())
        self._exchange = None
        if has_exchange:
            self._exchange = _Exchange(None, mean=self.shard.zeros())

    def wait(self) -> None:
        """Wait for the exchange that is under way, if any."""
        if self._exchange is not None:
            self._mean(self._exchange)

    def stored(self) -> Iterator[tuple[OuterPiece, dict[str, Tensor]]]:
        """The pieces that this rank holds of outer parameters ("outer"), their momentum, and of the
        mean outer gradient under way ("exchange"), live.
        """
        outer = self.outer
        tensors = {"outer": outer.params, "momentum": outer.momentum}
        if self._exchange is not None:
            tensors["exchange"] = self._mean(self._exchange)
        for piece in self.shard.pieces:
            parts = {}
            for name, tensor in tensors.items():
                parts[name] = tensor[piece.in_flat]
            yield piece, parts

    # a step

    @torch.no_grad()
    def after_inner_step(self, on_exchange: Callable[[], None]) -> OuterReport:
        """Count an inner step, and begin or end an exchange where one is due; every rank must call
        it after every step.

        Args:
            on_exchange: called before this rank waits for other sites.
        """
        self.num_steps += 1
        settings = self.settings
        place = self.num_steps % settings.every
        waited_s = 0.0
        sent_bytes = 0
        is_due = place in (0, settings.overlap)
        is_applied = self._exchange is not None and is_due
        if is_applied:
            waited_s += self._apply(on_exchange)
        if place == 0:
            on_exchange()
            sent_bytes = self._start()
            if not settings.overlap:
                waited_s += self._apply(on_exchange)
                is_applied = True
        return OuterReport(sent_bytes, waited_s, is_applied)

    def _start(self) -> int:
        """Start the exchange of outer gradients; returns the bytes of this rank's message."""
        gradient = self.outer.params - self.shard.values()
        # In memory of its own: with a delay the inner steps go on while it is sent.
        message = self.wire.encode(gradient)
        work = self.comm.start_all_gather(message, self.axis)
        self._exchange = _Exchange(work)
        if self.num_sites == 1:
            return 0
        return self.wire.num_bytes

    def _apply(self, on_exchange: Callable[[], None]) -> float:
        """Make the outer step with what the sites have exchanged; returns the seconds of waiting."""
        exchange = self._exchange
        assert exchange is not None, "an exchange is under way"
        on_exchange()
        start = time.perf_counter()
        gradient = self._mean(exchange)
        waited_s = time.perf_counter() - start
        self._exchange = None
        settings = self.settings
        outer = self.outer
        outer.momentum.mul_(settings.momentum)
        outer.momentum.add_(gradient)
        step = gradient.add(outer.momentum, alpha=settings.momentum)
        outer.params.sub_(step, alpha=settings.lr)
        local_share = 0.0
        if settings.overlap:
            local_share = settings.mix
        self.shard.write(outer.params, local_share=local_share)
        return waited_s

    def _mean(self, exchange: _Exchange) -> Tensor:
        """The mean outer gradient over sites, added in their order."""
        if exchange.mean is not None:
            return exchange.mean
        assert exchange.work is not None, "an exchange without a mean is under way"
        gathered = exchange.work.wait()
        message_length = gathered.numel() // self.num_sites
        messages = gathered.view(self.num_sites, message_length)
        # Each site adds all messages in the same order, its own rounded one among them: all get the same bits.
        total = self.shard.zeros()
        for message in messages.unbind():
            total += self.wire.decode(message)
        exchange.mean = total / self.num_sites
        exchange.work = None
        return exchange.mean
