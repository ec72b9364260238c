"""A parameter group: parameters that are all-gathered, whose gradients are reduced and whose shards are updated together.

    zero    unsharded_params (compute)   unsharded_grad (reduce)     sharded_param, sharded_grad (params)
    0, 1    always allocated             always allocated            this rank's entries; under 0 all of them
    2       always allocated             until it is reduced         this rank's entries
    3       while its block runs         until it is reduced         this rank's entries

Where dtypes agree and the unsharded tensor is always allocated, the sharded one is a view into it.
Under ZeRO 0 in one dtype, parameters stay in their own memory: there is neither `unsharded_params`
nor `sharded_param`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.transport import Communicator, Work
from weft.core.zero_stages import ZERO_THAT_GATHERS
from weft.errors import CommError, Fault, PlanError
from weft.parallel.zero.fixed_order import FixedOrderSum, Leaf, StageSums, TreeSum
from weft.parallel.zero.flat_params import FlatLayout, FlatParams
from weft.parallel.zero.sharding_policy import ShardingPolicy

FIRST_LEAF = Leaf(0, 0)
FIXED_ORDER_ALIGNMENT = 64
"""Entries of which each parameter's place in flat memory is a multiple, where bits are fixed: products
take other kernels, and add in another order, where a matrix does not begin as one in memory of its own.
"""
WHOLE_SHARD = ""
"""Key of the tree over reduced shards, where every backward is reduced."""


class ParamGroup:
    """Some parameters of one rank: all trained or all frozen.

    Attributes:
        axes: mesh axes over which the gradient is summed and, from ZeRO 1 on, the group is sharded.
        replicate_axes: further mesh axes over which the gradient is summed, along which shards are copies.
        stage: the local pipeline stage whose backward completes the gradients.
        num_stages: the most local pipeline stages that use one parameter.
        index: of this rank's shard.
        layout_of: layout of its parameters on a rank, from their shapes there.
        unsharded_params: the parameters that modules use, in `policy.compute`; None where they stay
            in their own memory.
        sharded_param: this rank's entries of the values, in `policy.params`; the optimizer updates
            them. None likewise.
        unsharded_grad: gradients accumulated on this rank, in `policy.reduce`; None while not
            allocated.
        sharded_grad: this rank's entries of the reduced gradient, in `policy.params`; None where
            there is none.
        missing: parameters without a gradient from the backward that is running.
        is_reduced: whether a reduction has started since the last `finish_step`.
        leaf: stage and micro-batch whose backward runs, for sums in a fixed order.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        comm: Comm,
        policy: ShardingPolicy,
        *,
        axes: tuple[str, ...],
        replicate_axes: tuple[str, ...] = (),
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.params = dict(params)
        self.comm = comm
        self.policy = policy
        self.axes = axes
        self.replicate_axes = replicate_axes
        self.stage = stage
        self.num_stages = num_stages
        self.index = 0
        num_shards = 1
        if policy.zero:
            self.index = comm.index(axes)
            num_shards = comm.degree(axes)
        alignment = FIXED_ORDER_ALIGNMENT if policy.fixed_order else 1
        self.layout_of = partial(FlatLayout.of, num_shards=num_shards, alignment=alignment)
        self.layout = self.layout_of({name: tuple(param.shape) for name, param in params.items()})
        self.missing: set[str] = set()
        self.expect_gradients()
        self.is_reduced = False
        self.unsharded_grad: Tensor | None = None
        self.sharded_grad: Tensor | None = None
        self._grad_views: dict[str, Tensor] = {}
        self._is_zeroed = False  # by `zero_grad`, not by a script
        self._reducing: Work | FixedOrderSum | StageSums | None = None
        self._replica_sum: Work | None = None
        self.leaf = FIRST_LEAF
        self._reducing_leaf = FIRST_LEAF
        self._trees: dict[str, TreeSum] = defaultdict(TreeSum)
        self._gathering: Work | None = None
        self._gathered_version: int | None = None  # of the shard, when it was gathered last
        self._num_backwards = 0  # of blocks, whose inputs have no gradients yet
        self._is_complete = False  # since the last of these has begun
        self.unsharded_params: FlatParams | None = None
        self.sharded_param: Tensor | None = None
        if not self._keeps_param_memory:
            self._flatten_params()
        if self.is_trained and policy.keeps_sharded_grad:
            self._allocate_grads()

    @property
    def is_trained(self) -> bool:
        """Whether parameters have gradients: all of them, unless scripts freeze some later."""
        return any(param.requires_grad for param in self.params.values())

    def expect_gradients(self) -> None:
        """A backward begins: no gradient has arrived yet."""
        self.missing = {name for name, param in self.params.items() if param.requires_grad}

    @property
    def _keeps_param_memory(self) -> bool:
        """Whether the parameters stay in their own memory. Frozen ones may have to be cast there
        although the policy has one dtype.
        """
        first = next(iter(self.params.values()))
        return self.policy.keeps_param_memory and first.dtype == self.policy.compute

    @property
    def reduces_each_leaf(self) -> bool:
        """Whether what the backward of each stage yields is reduced by itself, at its end: several
        stages use a parameter, and the order of their backwards must not matter.
        """
        return self.num_stages > 1 and self.policy.sums_reduced

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold other entries."""
        return self.layout.num_shards > 1

    @property
    def reshards(self) -> bool:
        """Whether the unsharded parameters are freed while no module uses them."""
        return self.policy.zero >= ZERO_THAT_GATHERS and self.is_sharded

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The memory of this rank's values between their uses, where they are in flat memory."""
        return () if self.sharded_param is None else (self.sharded_param,)

    @property
    def flat(self) -> Tensor | None:
        """The memory of the unsharded parameters; None where each stays in its own."""
        return None if self.unsharded_params is None else self.unsharded_params.flat

    @property
    def _shares_param_memory(self) -> bool:
        """Whether the sharded parameter is a view into the unsharded ones."""
        has_one_dtype = self.policy.params == self.policy.compute
        return has_one_dtype and not self.reshards

    def _own_entries(self, unsharded: Tensor) -> Tensor:
        """This rank's entries of an unsharded flat tensor, as a view."""
        own_slice = self.layout.shard_slice(self.index)
        return unsharded[own_slice]

    @property
    def _device(self) -> torch.device:
        first = next(iter(self.params.values()))
        return first.device

    def _flatten_params(self) -> None:
        """Move the parameters into flat memory: the shard first, so that no two copies of all of
        them are allocated.
        """
        policy = self.policy
        if not self._shares_param_memory:
            self.sharded_param = self.layout.pack_shard(
                self.params, self.index, dtype=policy.params, device=self._device
            )
        self.unsharded_params = FlatParams(
            self.params, self.layout, dtype=policy.compute, fills_freed=policy.fills_freed_params
        )
        if self._shares_param_memory:
            self.sharded_param = self._own_entries(self.unsharded_params.flat)
        else:
            self.reshard()

    def _allocate_grads(self) -> None:
        policy = self.policy
        if policy.keeps_unsharded_grad:
            self._allocate_unsharded_grad()
        if policy.accumulates_in_place:
            for name in self._grad_views:
                self.set_grad(name)
        if self.unsharded_grad is not None and policy.shares_grad_memory:
            self.sharded_grad = self._own_entries(self.unsharded_grad)
        else:
            self.sharded_grad = torch.zeros(
                self.layout.shard_length, dtype=policy.params, device=self._device
            )

    def _allocate_unsharded_grad(self) -> Tensor:
        grad = torch.zeros(self.layout.length, dtype=self.policy.reduce, device=self._device)
        self.unsharded_grad = grad
        self._grad_views = self.layout.views(grad)
        return grad

    def optimizer_params(self) -> dict[str, Tensor]:
        """What an optimizer updates, by parameter name: this rank's entries, `.grad` set; without
        empty ones.
        """
        if self.sharded_param is None:
            return dict(self.params)
        found: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        if self.sharded_grad is not None:
            gradients = self.layout.shard_views(self.sharded_grad, self.index)
        values = self.layout.shard_views(self.sharded_param, self.index)
        for name, entries in values.items():
            if entries.numel() > 0:
                entries.grad = gradients.get(name)
                found[name] = entries
        return found

    # gradients

    def zero_grad(self) -> None:
        """Set every gradient to 0, before the first backward of a step.

        Where autograd adds to the unsharded gradient itself, the first gradient of the step is copied
        there instead: one pass over the memory in place of a fill and an addition. Parameters that
        get none have 0 once the group is reduced.
        """
        policy = self.policy
        if policy.accumulates_in_place:
            for name in self._grad_views:
                self.params[name].grad = None
            self._is_zeroed = True
        elif self.unsharded_grad is not None:
            self.unsharded_grad.zero_()
        if self.sharded_grad is not None and not policy.shares_grad_memory:
            self.sharded_grad.zero_()
        self._trees.clear()
        if policy.fixed_order and self.sharded_param is None:
            for param in self.params.values():
                param.grad = None

    def accumulate_grad(self, name: str, param: Tensor) -> bool:
        """Add what autograd left in `param.grad` to the unsharded gradient; whether it was the last
        one missing.

        Raises:
            CommError: the group was reduced already, and is reduced once a step.
            PlanError: the parameter was read while its memory was freed.
        """
        policy = self.policy
        if self.is_reduced and policy.keeps_unsharded_grad:
            raise CommError(
                f"gradient of {name} arrived after its group was reduced: a backward of this step used other parameters "
                f"than the one before it, or two backwards synchronised; run all but the last under no_sync(), "
                f"use ZeRO 2, or a schedule whose backward is not split"
            )
        grad = param.grad
        # Autograd calls the hook without a gradient where it has found none but zeros.
        if grad is None and not _has_hooks_of_scripts(param):
            self.missing.discard(name)
            return not self.missing
        if grad is None:
            fault = Fault(
                name,
                "has no .grad any more when it is reduced: a hook has set it to None",
                fix="update after loss.backward(), which reduces gradients; or FullyShardedDataParallel, whose hooks "
                "see reduced gradients",
            )
            raise PlanError(fault)
        # Gradients are reduced in flat memory, which has an entry for each of the parameter's.
        if grad.is_sparse:
            grad = grad.to_dense()
        self._check_read_unsharded(name, grad)
        self.missing.discard(name)
        if policy.sums_microbatches:
            # The tree takes the tensor and adds into it, so `.grad` must not be it.
            tree = self._trees[name]
            tree.add(self.leaf, grad.to(policy.reduce))
            param.grad = None
            return not self.missing
        if self.unsharded_grad is None:
            self._allocate_unsharded_grad()
        view = self._grad_views[name]
        if not policy.accumulates_in_place:
            # The gradient in the compute dtype is freed here, before the next one arrives.
            view.add_(grad)
            param.grad = None
        elif not _is_same_memory(grad, view):
            # it was set to None between steps, and autograd allocated a new one; or cast with the parameter
            view.copy_(grad)
            self.set_grad(name)
        return not self.missing

    def drop_interrupted(self) -> None:
        """Forget what a backward has yielded that has raised an error, once the reduction under way has ended."""
        self.wait_reduce()
        if not self.policy.accumulates_in_place:  # else scripts see and zero the memory itself
            self.unsharded_grad = None
            self._grad_views = {}
            self.sharded_grad = None
            if self.is_trained and self.policy.keeps_sharded_grad:
                self._allocate_grads()
        self.expect_gradients()
        self.is_reduced = False

    def discard_grad(self, name: str) -> None:
        """Set the unsharded gradient of a parameter to 0, where there is one."""
        if self.unsharded_grad is not None:
            self._grad_views[name].zero_()

    def _check_read_unsharded(self, name: str, grad: Tensor) -> None:
        """Reject the gradient of a parameter that the forward read as NaN: outside of its block."""
        params = self.unsharded_params
        if params is None or params.is_exposed or not bool(grad.isnan().any()):
            return
        fault = Fault(
            name,
            "was used outside of the forward of its block, where under zero=3 it is NaN",
            fix="call the module that has it, pass blocks=[...] of which one calls all that uses it, or "
            "checkpoint a part of a block with use_reentrant=False",
        )
        raise PlanError(fault)

    def start_reduce(self) -> None:
        """Start the sum over ranks of the unsharded gradient; parameters without a gradient
        contribute zeros.
        """
        policy = self.policy
        # That of an earlier backward: its sum has to be added before its handle is replaced.
        self.wait_reduce()
        if policy.accumulates_in_place:
            self._zero_unset_grads()
        unsharded = self.unsharded_grad
        if unsharded is None:
            unsharded = self._allocate_unsharded_grad()
        if policy.scales_before_reduction:
            unsharded.mul_(policy.grad_scale)
        if policy.sums_microbatches:
            self._reducing = self._start_stage_sums(unsharded)
        else:
            self._reducing = self._start_collective(unsharded)
        # The sum is added when it is waited for; by then the backward of another leaf may run.
        self._reducing_leaf = self.leaf
        self.is_reduced = True
        if not policy.keeps_unsharded_grad:
            # The reduction holds the memory until it is waited for; the next backward of this step gets memory of its own.
            self.unsharded_grad = None
            self._grad_views = {}

    def _start_stage_sums(self, unsharded: Tensor) -> Work | FixedOrderSum | StageSums:
        """Reduce the sums of all micro-batches: in the unsharded gradient; where several stages use
        a parameter, those of the later ones in memory of their own.
        """
        flats = [unsharded]
        flats.extend(torch.zeros_like(unsharded) for _ in range(1, self.num_stages))
        views = [self._grad_views, *(self.layout.views(flat) for flat in flats[1:])]
        for name, tree in self._trees.items():
            for place, stage_sum in enumerate(tree.take_stages()):
                views[place][name].copy_(stage_sum)
        sums = [self._start_collective(flat) for flat in flats]
        return sums[0] if len(sums) == 1 else StageSums(sums)

    def _zero_unset_grads(self) -> None:
        """Set the views of parameters to 0 whose `.grad` was set to None between steps and that
        have had no gradient since; to gradients that were set by hand. `.grad` stays None where a
        script has set it to None, so that its optimizer leaves the parameter as it is.
        """
        for name, view in self._grad_views.items():
            param = self.params[name]
            grad = param.grad
            if grad is None:
                view.zero_()
                if self._is_zeroed:
                    self.set_grad(name)
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)

    def _start_collective(self, unsharded: Tensor) -> Work | FixedOrderSum:
        """Reduce-scatter where the group is sharded, else all-reduce."""
        comm = self.comm
        axes = self.axes
        if self.policy.fixed_order and comm.degree((*axes, *self.replicate_axes)) > 1:
            return FixedOrderSum(
                comm,
                unsharded,
                axes,
                self.replicate_axes,
                is_sharded=self.is_sharded,
                data_first=self.policy.keeps_unsharded_grad,
            )
        if self.is_sharded and self.policy.shares_grad_memory:
            return comm.start_reduce_scatter_(unsharded, axes)
        if self.is_sharded:
            # Under ZeRO 3 all-gathers run in the backward, too, and calls of one communicator wait for each other.
            communicator: Communicator = "reductions" if self.reshards else "group"
            return comm.start_reduce_scatter(unsharded, axes, communicator=communicator)
        if axes:
            return comm.start_all_reduce_(unsharded, axes)
        return Work.done(unsharded)

    @property
    def reducing_bytes(self) -> int:
        """Bytes of the reduction under way: the whole gradient, and this rank's shard of the sum."""
        if self._reducing is None:
            return 0
        whole = self.layout.length
        shard = whole // self.comm.degree(self.axes) if self.is_sharded else 0
        return (whole + shard) * self.policy.reduce.itemsize

    def is_reduce_completed(self) -> bool:
        """Whether `wait_reduce` would return at once."""
        return self._reducing is None or self._reducing.is_completed()

    def wait_reduce(self) -> None:
        """Wait for the reduction under way and add its result to the sharded gradient."""
        if self._reducing is None:
            return
        self.start_replica_sum()
        if self._replica_sum is not None:
            total = self._replica_sum.wait()
            self._replica_sum = None
        else:
            total = self._reducing.wait()
        self._reducing = None
        policy = self.policy
        scale = 1.0 if policy.scales_before_reduction else policy.grad_scale
        # In place and in one dtype the sum is in the sharded gradient already, a view of it:
        # then only the scale is left.
        if policy.sums_reduced:
            tree = self._trees[WHOLE_SHARD]
            tree.add(self._reducing_leaf, total)
        elif self.sharded_grad is None:
            grad = total.to(policy.params)
            self.sharded_grad = grad.mul_(scale)
        elif policy.fixed_order:
            self.sharded_grad.copy_(total)
        elif not policy.keeps_unsharded_grad:
            self.sharded_grad.add_(total, alpha=scale)
        else:
            if not policy.shares_grad_memory:
                self.sharded_grad.copy_(total)
            if scale != 1.0:
                self.sharded_grad.mul_(scale)

    def start_replica_sum(self) -> None:
        """Start the sum of reduced shards over the ranks that have copies of them, once the reduction
        under way has ended; nothing where there are no copies.
        """
        if self._reducing is None:
            return
        if not isinstance(self._reducing, Work):  # sums in a fixed order
            self._reducing.start_replica_sum()
        elif self.replicate_axes and self._replica_sum is None:
            total = self._reducing.wait()
            self._replica_sum = self.comm.start_all_reduce_(total, self.replicate_axes)

    def finish_step(self) -> None:
        """Reduce what has not been reduced in this step, and expect the gradients of the next one."""
        has_unreduced = self.unsharded_grad is not None and not self.policy.keeps_unsharded_grad
        assert self.is_reduced, "every group is reduced before the step ends"
        assert not has_unreduced, "so are the gradients of its last backward"
        self.wait_reduce()
        if self.policy.fixed_order:
            self._finish_fixed_order()
        self.expect_gradients()
        self.is_reduced = False
        self._is_zeroed = False

    def _finish_fixed_order(self) -> None:
        """Have the sum of all micro-batches in the sharded gradient."""
        tree = self._trees.get(WHOLE_SHARD)
        if tree is not None:
            total = tree.take()
            if total is not None and self.sharded_grad is not None:
                self.sharded_grad.copy_(total)
        if self.sharded_param is None:
            for name in self.params:
                self.set_grad(name)

    def take_reduced_grads(self) -> dict[str, Tensor]:
        """The reduced gradient by parameter name, one-dimensional; it is the caller's from here on."""
        grad = self.sharded_grad
        assert grad is not None, "called after `finish_step`"
        self.sharded_grad = None
        return self.layout.shard_views(grad, self.index)

    def gather_grads(self) -> dict[str, Tensor]:
        """The reduced gradients by parameter name, unsharded, in new memory; a collective over
        `axes`.
        """
        assert self.sharded_grad is not None, "reduced gradients stay allocated"
        return self._gather(self.sharded_grad)

    def set_grad(self, name: str) -> Tensor:
        """Have `.grad` be the memory of a parameter's unsharded gradient, where autograd accumulates in place: as a
        tensor of its own, which scripts may detach, and cast with the module.
        """
        param, view = self.params[name], self._grad_views[name]
        gradient = None if param.grad is None or param.grad.is_sparse else param.grad
        if gradient is None or not _is_same_memory(gradient, view):
            gradient = view.data  # no view, with versions of its own: a graph may have saved it
            param.grad = gradient
        return gradient

    # values

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's entries of `values`; the unsharded parameters change at the next
        all-gather.
        """
        assert self.sharded_param is not None, "only groups in flat memory are loaded by shards"
        packed = self.layout.pack_shard(
            values, self.index, dtype=self.sharded_param.dtype, device=self._device
        )
        self.sharded_param.copy_(packed)

    def replace_shard(
        self, shards: Mapping[str, Tensor], policy: ShardingPolicy
    ) -> dict[str, Tensor]:
        """Hold these values, this rank's entries of each parameter, perhaps in another dtype or on another
        device; the unsharded parameters change at the next all-gather.

        Returns:
            The entries in flat memory, by parameter name.
        """
        self._wait_all_gather()
        self.policy = policy
        for name, param in self.params.items():
            # of the whole shape, in one entry's memory: flat memory is allocated below
            param.data = shards[name].new_zeros(()).expand(param.shape)
        self._flatten_params()
        assert self.sharded_param is not None, "set when the parameters are flattened"
        views = self.layout.shard_views(self.sharded_param, self.index)
        for name, view in views.items():
            view.copy_(shards[name])
        return views

    def gather_params(self) -> dict[str, Tensor]:
        """The values by parameter name in `policy.params`, unsharded, in new memory; a collective
        over `axes`.

        Raises:
            PlanError: a script has written a parameter while its memory is freed.
        """
        self.check_unwritten()
        if self.sharded_param is not None:
            return self._gather(self.sharded_param)
        found: dict[str, Tensor] = {}
        for name, param in self.params.items():
            values = param.detach()
            found[name] = values.clone()
        return found

    def check_unwritten(self) -> None:
        """Check that no parameter was written while its memory is freed.

        Raises:
            PlanError: one was.
        """
        if self.unsharded_params is not None:
            self.unsharded_params.check_unwritten()

    def _gather(self, shard: Tensor) -> dict[str, Tensor]:
        flat = shard
        if self.is_sharded:
            flat = self.comm.all_gather(shard, self.axes)
        found: dict[str, Tensor] = {}
        for name, view in self.layout.views(flat).items():
            found[name] = view.clone()
        return found

    def start_unshard(self) -> None:
        """Start the all-gather of the parameters, unless they are allocated."""
        if self.unsharded_params is not None and not self.unsharded_params.is_allocated:
            self.start_all_gather()

    def start_all_gather(self) -> None:
        """Start the all-gather of the parameters, whether or not they are allocated."""
        if self._gathering is not None or self.unsharded_params is None:
            return
        self.unsharded_params.allocate()
        unsharded = self.unsharded_params.alias()
        if self.sharded_param is not None:
            self._gathered_version = self.sharded_param._version
        if self.sharded_param is not None and not self._shares_param_memory:
            own_entries = self._own_entries(unsharded)
            # Cast here, so that the other ranks are sent the compute dtype.
            own_entries.copy_(self.sharded_param)
        if not self.is_sharded:
            self._gathering = Work.done(unsharded)
            return
        with self._names_in_errors():
            self._gathering = self.comm.start_all_gather_(unsharded, self.axes)

    def drop_outdated(self) -> None:
        """Reshard where the shard was written since it was gathered: for a block that has not run then."""
        if self.sharded_param is not None and self._gathered_version != self.sharded_param._version:
            self.reshard()

    def unshard(self) -> None:
        """Have the unsharded parameters allocated and filled."""
        self.start_unshard()
        self._wait_all_gather()

    def reshard(self) -> None:
        """Free the unsharded parameters under ZeRO 3, once an all-gather under way has ended."""
        self._wait_all_gather()
        self._num_backwards = 0
        if self.reshards and self.unsharded_params is not None:
            self.unsharded_params.free()

    def begin_backward(self) -> None:
        """The backward of a block begins, which reads the unsharded parameters."""
        self._is_complete = False
        self._num_backwards += 1

    def end_backward(self) -> None:
        """The inputs of the block have their gradients: reshard, unless gradients of parameters are missing."""
        # `reshard` sets it to 0, and hooks of inputs may still follow.
        self._num_backwards = max(0, self._num_backwards - 1)
        if self._is_complete or not self.is_trained:
            self.reshard_after_backwards()

    def reshard_after_backwards(self) -> None:
        """Reshard once no backward of a block reads the parameters: their gradients have arrived, and those of
        inputs may still be computed from frozen or detached ones.
        """
        self._is_complete = True
        if self._num_backwards == 0:
            self.reshard()

    def _wait_all_gather(self) -> None:
        if self._gathering is not None:
            with self._names_in_errors():
                self._gathering.wait()
            self._gathering = None
            if self.unsharded_params is not None:
                self.unsharded_params.expose()

    @contextmanager
    def _names_in_errors(self) -> Iterator[None]:
        """Add to errors of an all-gather which parameters it was of."""
        try:
            yield
        except CommError as error:
            names = ", ".join(self.params)
            error.add_note(
                f"while this rank all-gathered {names}: every rank must run the same blocks in the same order"
            )
            raise


def _has_hooks_of_scripts(param: Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called by others than the reducer."""
    return len(getattr(param, "_post_accumulate_grad_hooks", None) or {}) > 1


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same entry of one storage; tensors on the meta device have no addresses."""
    is_same_storage: bool = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_same_storage and one.storage_offset() == other.storage_offset()
