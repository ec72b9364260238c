"""`DistributedDataParallel`: gradients of any module averaged over ranks in buckets, in a plain script."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm, comm_or_world
from weft.core.mesh import Axis, axis_names
from weft.parallel.data_parallel.torch_options import TorchOptions
from weft.parallel.dp import AXIS as DP
from weft.parallel.model.buffers import broadcast_first, stored_buffers
from weft.parallel.zero.buckets import BUCKET_BYTES, bucket_reducer
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.synchronized import SynchronizedModule
from weft.parallel.zero.wrapped_params import (
    check_not_wrapped,
    copied_state,
    mark_wrapped,
    reject_pickle,
    wrapper_of,
)

if TYPE_CHECKING:
    from weft.parallel.data_parallel.join import Attendance

WRAPPER_NAME = "DistributedDataParallel"


class DistributedDataParallel(SynchronizedModule):
    """The same module on every rank of `axis`; gradients are averaged over the ranks while the
    backward still runs. Takes the place of torch's DistributedDataParallel:

        net = weft.DistributedDataParallel(net)
        net(x).mean().backward()        # .grad is the mean over the ranks
        optimizer.step()

    Starts from the first rank's parameters and buffers. Several backwards a step add up, also under
    `no_sync()`. After each synchronised backward every rank has the first rank's buffers, as under
    torch's DistributedDataParallel: running statistics of BatchNorm are those of its samples, and a batch is
    normalised by the statistics of its own rank (`weft.SyncBatchNorm`: by those of all). Gradients are
    views into flat buckets; setting them to None between steps is allowed. Parameters may be frozen,
    unfrozen, added, replaced, moved and cast later: buckets are made anew at the next forward. A
    parameter that no rank has used since the last step keeps the `.grad` it had, as under torch's with
    `find_unused_parameters`: None at first and after `zero_grad()`, so that optimizers leave it as it
    is; zeros after `zero_grad(set_to_none=False)` of a gradient, so that weight decay shrinks it.
    `copy.deepcopy` copies the module, in a wrapper of its own over the same ranks. A script may go on after
    a backward that raised an error on every rank, once it has called `zero_grad()`.

    Args:
        module: any module; its forward is called as it is.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which batches differ.
        bucket_bytes: gradients are reduced in buckets of about this size.
        torch_options: those of torch's DistributedDataParallel, so that a script need not change them:
            `bucket_cap_mb` in place of `bucket_bytes`; `broadcast_buffers=False` leaves buffers to each rank;
            with `device_ids` of one device inputs are moved there. `output_device`,
            `find_unused_parameters`, `gradient_as_bucket_view`, `static_graph`, `check_reduction` and
            `skip_all_reduce_unused_params` are true of any module here, and change nothing.

    Raises:
        PlanError: a parameter belongs to a wrapped module already; an optimizer has stepped on gradients
            of this rank alone; a backward follows one that raised an error, whose gradients are kept.

    Source: Li et al. 2020, PyTorch Distributed.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        bucket_bytes: int = BUCKET_BYTES,
        **torch_options: Any,
    ) -> None:
        check_not_wrapped(module, WRAPPER_NAME)
        options = TorchOptions.of(torch_options, bucket_bytes=bucket_bytes)
        first = next(module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        comm = comm_or_world(comm, axis=axis, device=device)
        broadcast_module(module, comm, axis)
        self._wrap(module, comm, axis=axis, options=options)

    def _wrap(self, module: nn.Module, comm: Comm, *, axis: Axis, options: TorchOptions) -> None:
        super().__init__(module, comm, axis=axis)
        self._options = options
        self._attendance: Attendance | None = None
        self._divides_by_present = False
        self._reducer: GradientReducer | None = None
        self._bucketed: tuple[Any, ...] = ()
        self._overlaps = False
        mark_wrapped(module.parameters(), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        module = copy.deepcopy(self.module, memo)
        copied._wrap(module, self.comm, axis=self.axis, options=self._options)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rejected: a file has no communication.

        Raises:
            PlanError: by pickle and torch.save.
        """
        reject_pickle(WRAPPER_NAME)

    @property
    def _gradient_reducer(self) -> GradientReducer | None:
        return self._reducer

    def _updated_params(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        args, kwargs = self._options.on_device((args, kwargs))
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._before_forward()
        self._make_buckets()
        if self._attendance is not None and self._is_sync_enabled:
            self._attendance.take(has_batch=True)
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs)
        return outputs

    def _make_buckets(self) -> None:
        """Have every trained parameter in a bucket; anew where parameters were added, replaced, frozen,
        unfrozen, moved or cast since. Every rank has made the same changes.
        """
        trained = {
            name: each for name, each in self.module.named_parameters() if each.requires_grad
        }
        found = tuple((id(each), each.dtype, each.device) for each in trained.values())
        if self._reducer is not None and found == self._bucketed:
            return
        gradients = {name: param.grad for name, param in trained.items()}
        arrived: set[str] = set()
        if self._reducer is not None:
            arrived = self._reducer.arrived & trained.keys()
            self._reducer.remove_hooks()
            self._broadcast_added(trained)
        mark_wrapped(trained.values(), self)
        axes = axis_names(self.axis) if self.comm.degree(self.axis) > 1 else ()
        self._reducer = bucket_reducer(
            trained,
            self.comm,
            reduce_axes=dict.fromkeys(trained, axes),
            bucket_bytes=self._options.bucket_bytes,
            grad_scale=1.0 / self.comm.degree(self.axis),
        )
        # Gradients of earlier backwards under `no_sync()` go on counting as used.
        self._reducer.arrived |= arrived
        self._overlaps = False
        self._reducer.call_after_backward(weakref.WeakMethod(self._after_reductions))
        self._bucketed = found
        for name, param in trained.items():
            param.grad = gradients[name]  # None until some rank has used the parameter

    @torch.no_grad()
    def _broadcast_added(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Give parameters that were added since the last forward the first rank's values."""
        for param in trained.values():
            if wrapper_of(param) is not self:
                self.comm.broadcast_(param, self.axis, root=0)

    def _require_sync(self) -> None:
        """Reduce buckets during the backward; after it in the first one, and where a backward yields several
        gradients for a parameter: one that reentrant checkpoints recompute at several places.
        """
        self._must_sync = True
        if self._overlaps:
            super()._require_sync()

    def _synchronize(self) -> None:
        reducer = self._reducer
        assert reducer is not None, "called after a forward with gradients"
        reducer.start_remaining()
        used = reducer.used_on_any_rank(self.axis)
        reducer.finish()
        self._overlaps = not reducer.has_repeated
        attendance = self._attendance
        if attendance is not None and self._divides_by_present:
            reducer.scale(1.0 / attendance.share)
        for group in reducer.groups:
            for name in group.params:
                if name in used:
                    group.set_grad(name)
        if self._options.broadcasts_buffers:
            root = 0 if attendance is None or not attendance.present else attendance.present[0]
            self._broadcast_buffers(self.module, self.comm, self.axis, root=root)

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Let ranks have unequal numbers of batches: one that has none left takes part in the others'
        reductions with gradients of zero until all are done, and ends with their parameters.

            with net.join():
                for x, y in own_batches:
                    ...

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of all ranks; else
                by that of the ranks that still have batches.

        Source: torch.nn.parallel.DistributedDataParallel.join, whose arguments it takes.
        """
        from weft.parallel.data_parallel.join import Attendance  # late: few scripts join

        self._attendance = Attendance(self.comm, self.axis)
        self._divides_by_present = not divide_by_initial_world_size
        try:
            yield
            self._make_buckets()
            self._take_part_until_all_are_done(self._attendance)
        finally:
            self._attendance = None

    def _take_part_until_all_are_done(self, attendance: Attendance) -> None:
        attendance.take(has_batch=False)
        while attendance.present:
            self.module.zero_grad()
            self._synchronize_now()
            attendance.take(has_batch=False)
        root = attendance.last_present[0]
        for tensor in (*self.module.parameters(), *stored_buffers(self.module)):
            self.comm.broadcast_(tensor.detach(), self.axis, root=root)

    def full_state_dict(self) -> dict[str, Tensor]:
        """A copy of the module's state dict, which later steps do not change; every rank holds all of
        it.
        """
        return copied_state(self.module)


@torch.no_grad()
def broadcast_module(module: nn.Module, comm: Comm, axis: Axis) -> None:
    """Give every rank the first rank's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast_first(tensor, comm, axis)
