"""`SynchronizedModule`: a wrapped module whose gradients are synchronised when a backward ends, as torch's wrappers do.

Note [When gradients are synchronised]
    A forward outside of `no_sync()` puts hooks on its outputs. A backward that goes through one of them
    reduces gradients while it runs, and at its end, in a callback of autograd's engine, the rest: when
    `loss.backward()` returns, `.grad` is the mean over the ranks of all that has been accumulated.

        forward ── backward: hook of an output ── gradients arrive, reductions start ── end: finish

    The outputs decide, not the last forward: two forwards with a backward each are both synchronised, and
    a backward through outputs of `no_sync()` alone accumulates. A recomputed forward (checkpointing with
    `use_reentrant`) runs backwards inside the backward; their ends are not the end of the outer one, in
    which the outputs' hooks were called. Where no tensor is found in outputs (an object of a script's own), every
    backward that yields gradients is synchronised, until outputs of another forward say otherwise.
    A backward without a gradient (`torch.autograd.grad` for a penalty) finishes nothing.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError
from weft.parallel.autograd.backward_end import NO_BACKWARD, after_this_backward, backward_id
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.model.buffers import BufferBroadcast
from weft.parallel.zero.global_mean import global_mean
from weft.parallel.zero.gradient_reducer import GradientReducer


class SynchronizedModule(nn.Module):
    """A module on several ranks whose gradients are averaged over them; see Note [When gradients are
    synchronised].

    Attributes:
        module: as it was before wrapping.
        comm: communication with the other ranks.
        axis: the mesh axis (or axes) over which batches differ.
    """

    def __init__(self, module: nn.Module, comm: Comm, *, axis: Axis) -> None:
        super().__init__()
        self.module = module
        self.comm = comm
        self.axis = axis
        self._is_sync_enabled = True
        self._expects_backward = False
        self._must_sync = False
        self._syncs_unhooked = False
        self._in_backward = False
        self._unsynchronized: dict[str, int] = {}
        self._interrupted: frozenset[str] = frozenset()
        self._broadcast_buffers = BufferBroadcast()

    @property
    @abstractmethod
    def _gradient_reducer(self) -> GradientReducer | None:
        """Reduces the gradients; None before the first forward with gradients."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Have the mean over the ranks in every `.grad`; a collective."""

    @abstractmethod
    def _updated_params(self) -> Mapping[str, Tensor]:
        """What an optimizer updates, by name."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: backwards of forwards in here reduce nothing."""
        before = self._is_sync_enabled
        self._is_sync_enabled = False
        try:
            yield
        finally:
            self._is_sync_enabled = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next forward's backward reduces gradients. Scripts set this attribute of torch's
        DistributedDataParallel in place of `no_sync()`.
        """
        return self._is_sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_required: bool) -> None:
        self._is_sync_enabled = is_required

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """The same by the name of FSDP2; call it before the forward."""
        self._is_sync_enabled = requires_gradient_sync

    def global_mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """The mean loss over what counts on all ranks, to call `backward()` on: a batch with padding
        counts fewer targets than that of another rank, and the mean of the ranks' means is another
        number. Every rank must call it.

            loss = F.cross_entropy(net(x), y, ignore_index=-100, reduction="sum")
            net.global_mean(loss, (y != -100).sum()).backward()

        Args:
            total: sum of this rank's losses, scalar.
            count: of its targets; with several backwards a step, of all of them together.
        """
        return global_mean(self.comm, self.axis, total, count)

    def full_optim_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The states of an optimizer of this module's parameters, unsharded, by parameter name, on every
        rank; a collective over all ranks. `load_optim_state_dict` takes it on any number of ranks, and
        `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` for a module that is not
        wrapped.
        """
        from weft.parallel.zero.optimizer_states import (
            optimizer_states,
        )  # late: data parallelism alone has no shards

        return optimizer_states(optimizer, self._named_params(), is_whole=True)

    def optim_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of this rank's shards: for `torch.distributed.checkpoint.save`, or a file for each
        rank.
        """
        from weft.parallel.zero.optimizer_states import optimizer_states

        return optimizer_states(optimizer, self._named_params(), is_whole=False)

    def load_optim_state_dict(self, optimizer: Optimizer, states: Mapping[str, Any]) -> None:
        """Load what `full_optim_state_dict` or, on the same rank, `optim_state_dict` returned.

        Raises:
            DataError: the optimizer has other groups.
        """
        from weft.parallel.zero.optimizer_states import load_optimizer_states

        load_optimizer_states(optimizer, self._named_params(), states)

    def _named_params(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_parameters()

    def finish_gradient_synchronization(self) -> None:
        """Synchronise what no backward has: gradients that were accumulated under `no_sync()` alone, and
        those of a rank whose forward was followed by no backward. Otherwise it does nothing.
        """
        reducer = self._gradient_reducer
        if reducer is None:
            return
        if self._expects_backward or reducer.has_unfinished_gradients:
            self._synchronize_now()

    def _before_forward(self) -> None:
        """Called before each forward with gradients."""
        # A recomputed forward belongs to the backward that is running: nothing begins anew.
        if backward_id() == NO_BACKWARD:
            self._follow_discards()
            self._drop_interrupted()
            self._broadcast_buffers.before_forward(self.module)
        self._check_not_updated()

    def _drop_interrupted(self) -> None:
        """Begin anew where the last backward has raised an error, as out of memory."""
        self._in_backward = False
        reducer = self._gradient_reducer
        if reducer is not None and reducer.is_interrupted:
            self._interrupted = frozenset(reducer.arrived)
            self._must_sync = self._expects_backward = False
            self._unsynchronized = {}
            reducer.drop_interrupted()

    def _check_interrupted(self) -> None:
        """Reject gradients of which a part is that of a backward that raised an error.

        Raises:
            PlanError: the script has not discarded them.
        """
        # late: few scripts go on after an error
        from weft.parallel.zero.sharded_tensor import local_of

        params = self._updated_params()
        for name in sorted(self._interrupted):
            gradient = params[name].grad if name in params else None
            if gradient is not None and bool(local_of(gradient).any()):
                fault = Fault(
                    type(self).__name__,
                    f"the last backward raised an error, and the gradient of {name}, perhaps a part of it, was kept",
                    fix="zero_grad() before the next backward",
                )
                raise PlanError(fault)
        self._interrupted = frozenset()

    def _after_forward(self, outputs: Any) -> bool:
        """Called after each forward with gradients: hooks on its outputs begin its backward. Returns whether
        there are any.
        """
        must_sync = self._is_sync_enabled
        self._expects_backward |= must_sync
        begin = _begin_of(weakref.ref(self), must_sync)
        hooked = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        for tensor in hooked:
            tensor.register_hook(begin)
        self._syncs_unhooked = must_sync and not hooked
        if self._syncs_unhooked:
            self._require_sync()
        return bool(hooked)

    def _require_sync(self) -> None:
        self._must_sync = True
        reducer = self._gradient_reducer
        if reducer is not None:
            reducer.set_requires_gradient_sync(0)

    def _begin_backward(self, must_sync: bool) -> None:
        """Hook of an output: a backward has reached it."""
        if self._interrupted:
            self._check_interrupted()
        if must_sync:
            self._require_sync()
        if not self._in_backward:
            self._follow_discards()
            if self._gradient_reducer is not None:
                self._gradient_reducer.begin_backward()
            self._in_backward = True
            after_this_backward(_end_of(weakref.ref(self)))

    def _end_backward(self) -> None:
        """At the end of a backward in which `_begin_backward` was called."""
        self._in_backward = False
        self._on_gradients()

    def _after_reductions(self) -> None:
        """At the end of each backward, nested ones too, that has yielded gradients."""
        if not self._in_backward:
            self._on_gradients()

    def _on_gradients(self) -> None:
        reducer = self._gradient_reducer
        if reducer is None or not reducer.has_unfinished_gradients:
            return
        if self._must_sync or self._syncs_unhooked:
            self._synchronize_now()
            return
        self._hold_gradients()
        if not self._unsynchronized:
            params = self._updated_params()
            # A later version shows that an optimizer has stepped on gradients of this rank alone.
            self._unsynchronized = {name: param._version for name, param in params.items()}

    def _hold_gradients(self) -> None:
        """Called after a backward that was not synchronised, whose gradients `.grad` may not have."""

    def _follow_discards(self) -> None:
        """Called before the next backward: drop what scripts have zeroed since `_hold_gradients`."""

    @torch.no_grad()
    def _synchronize_now(self) -> None:
        self._check_not_updated()
        self._must_sync = False
        self._expects_backward = False
        self._synchronize()
        self._unsynchronized = {}

    def _check_not_updated(self) -> None:
        """Reject parameters that were updated by gradients of this rank alone.

        Raises:
            PlanError: values have changed since gradients were accumulated under `no_sync()`.
        """
        if not self._unsynchronized:
            return
        params = self._updated_params()
        for name, version in self._unsynchronized.items():
            if name in params and params[name]._version != version:
                fault = Fault(
                    type(self).__name__,
                    f"{name} was updated while gradients under no_sync() were not synchronised yet",
                    fix="run the last forward and backward of a step outside of no_sync(), or call "
                    "finish_gradient_synchronization() before the optimizer's step",
                )
                raise PlanError(fault)


# Hooks on outputs live as long as the graph, and hold no module: see Note [Hooks hold no reducer].
def _begin_of(
    weak_module: weakref.ref[SynchronizedModule], must_sync: bool
) -> Callable[[Tensor], None]:
    def begin(gradient: Tensor) -> None:
        module = weak_module()
        if module is not None:
            module._begin_backward(must_sync)

    return begin


def _end_of(weak_module: weakref.ref[SynchronizedModule]) -> Callable[[], None]:
    def end() -> None:
        module = weak_module()
        if module is not None:
            module._end_backward()

    return end
