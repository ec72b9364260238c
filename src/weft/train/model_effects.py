"""What a forward of a user's model does besides computing, at the run's own sizes on the meta device: nothing may.

Note [Effects]
    The chain runs once without memory, with the run's length, micro-batch and number type, where any
    branch on these is taken; once more at a short length, for the gradient, which says which
    parameters the loss uses. Every operation is seen: one that draws random numbers, one that writes
    to a parameter, a buffer or an attribute (through a view or `.data`, too), a gradient hook. What
    Python code changes is seen as in Note [Reachable state].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.dimension import local_update_axes, position_axes
from weft.errors import Fault, PlanError, type_and_message
from weft.layout.plan import Plan
from weft.models.common.batch import Batch, activation_of, forward
from weft.models.common.buffer_updates import (
    BufferRecords,
    RecordingBatchNorm,
    apply_update,
    is_batch_norm,
    record_batch_norm,
    updating_modules,
)
from weft.models.common.dropout_mode import run_block
from weft.models.common.init import path_below
from weft.models.common.uncompiled import keep_compiler_unimported, uncompiled_mode
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.model.token_ids import NamedIds
from weft.train.model_state import State, changed_name, is_generator, state_of

CHANGES = "keeps state outside its parameters: its forward changes it"
NO_CHANGES = "weft.update_buffers for a buffer; no attributes set in forward"
DRAWS = "its forward draws random numbers, which differ between layouts"
NO_DRAWS = "dropout by nn.Dropout, F.dropout or weft.drop_path; constants drawn in the constructor, as a buffer"
HOOKED = "has a gradient hook, which no layout would run on its whole gradient"
NO_HOOK = 'no hook: scale in the forward, or --optim.groups "PATTERN: lr_scale=2"'
STATISTICS = (
    "normalises over the batch, in evaluation, too, where each layout computes another part"
)
KEEP_STATISTICS = "track_running_stats=True: evaluation reads running statistics"
SYNCHRONISED = "normalises over ranks, and no number of samples is given that holds on all layouts"
OWN_FORWARD = "is a subclass of nn.SyncBatchNorm with a forward of its own"
SUBCLASS = "a subclass of nn.BatchNorm2d: batch.statistics_size synchronises it, too"
OF_MICRO_BATCHES = "updates buffers by micro-batches, and BatchNorm by batch.statistics_size"
NO_BATCH_NORM = "is of BatchNorm, which the model has not"
NO_STATISTICS_SIZE = "leave batch.statistics_size out"
SHARED = "updates buffers, and is a module of two blocks, which may be on two ranks"
PARTS = "updates buffers by micro-batches, of which ranks of {axis} have parts"
NO_BUFFER = "is changed by update_buffers, and is no buffer of its module"
REGISTER = "register_buffer for all that it changes"
READS = "is read by update_buffers, at whose time a rank may not hold it"
HAND_OVER = "have the forward hand over its values: weft.update_buffers(self, ..., parameter)"
SITES = "updates buffers by all micro-batches of a step, and sites train apart"
SPARSE = "has sparse gradients, and sums over ranks and shards are of dense ones"
WRITES_WITHOUT_SCHEMA: Mapping[str, tuple[int, ...]] = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}
"""Operations that write to arguments of these places in training, which their schemas do not say."""
IS_TRAINING = 5
"""The place of the argument that says whether they do."""


def check_modules(blocks: Mapping[str, nn.Module], label: str) -> None:
    """Reject modules that compute with the statistics of a batch, or have sparse gradients or gradient hooks.

    Raises:
        PlanError: the first one.
    """
    for block_name, block in blocks.items():
        for path, module in block.named_modules():
            name = f"{label}: {path_below(block_name, path)}"
            is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if is_batch_norm and module.training and not module.track_running_stats:
                raise PlanError(Fault(name, STATISTICS, fix=KEEP_STATISTICS))
            if getattr(module, "sparse", False) and isinstance(
                module, (nn.Embedding, nn.EmbeddingBag)
            ):
                raise PlanError(Fault(name, SPARSE, fix="sparse=False: the same values"))
            if module._backward_hooks or module._backward_pre_hooks:
                raise PlanError(Fault(name, HOOKED, fix=NO_HOOK))
            for own, param in module._parameters.items():
                if param is not None and (
                    param._backward_hooks or param._post_accumulate_grad_hooks
                ):
                    raise PlanError(Fault(f"{name}.{own}", HOOKED, fix=NO_HOOK))


def check_updating(blocks: Mapping[str, nn.Module], plan: Plan, label: str) -> None:
    """Reject a layout on which the ranks of a stage do not see whole micro-batches of all samples, for
    a model that updates buffers; a module that updates buffers of two blocks; and statistics of a number
    of samples that is missing, or that nothing takes.

    Raises:
        PlanError: the first such module.
    """
    block_of: dict[int, str] = {}
    updating: list[nn.Module] = []
    for block_name, block in blocks.items():
        for path, module in updating_modules(block, block_name).items():
            name = f"{label}: {path}"
            updating.append(module)
            _check_statistics(module, plan, name)
            if block_of.setdefault(id(module), block_name) != block_name:
                fix = "a module of its own in each block; its parameters may be shared"
                raise PlanError(Fault(name, SHARED, got=block_of[id(module)], fix=fix))
            if plan.mesh.degree(local_update_axes()) > 1:
                raise PlanError(Fault(name, SITES, fix="a mesh with dp in place of site"))
            axes = [axis for axis in position_axes() if plan.mesh.degree(axis) > 1]
            if plan.sequence_parallel:
                axes.append("parallel.sequence")
            if axes:
                fix = "a mesh with dp or pp in its place"
                raise PlanError(Fault(name, PARTS.format(axis=axes[0]), fix=fix))
    if plan.statistics_size and not any(map(is_batch_norm, updating)):
        raise PlanError(Fault("batch.statistics_size", NO_BATCH_NORM, fix=NO_STATISTICS_SIZE))


def _check_statistics(module: nn.Module, plan: Plan, name: str) -> None:
    """Reject a module that another number of samples updates than a micro-batch or a group has.

    Raises:
        PlanError: for `nn.SyncBatchNorm` with the key that says the number.
    """
    if isinstance(module, nn.SyncBatchNorm):
        if type(module).forward not in (nn.SyncBatchNorm.forward, RecordingBatchNorm.forward):
            raise PlanError(Fault(name, OWN_FORWARD, fix=SUBCLASS))
        if not plan.statistics_size:
            size = plan.micro_size * plan.num_data_ranks
            fix = f"--batch.statistics_size {size}, of all data ranks, or nn.BatchNorm2d"
            raise PlanError(Fault(name, SYNCHRONISED, fix=fix))
    elif plan.statistics_ranks > 1 and not is_batch_norm(module):
        raise PlanError(Fault(name, OF_MICRO_BATCHES, fix=NO_STATISTICS_SIZE))


@dataclass(frozen=True)
class Pure:
    """Runs blocks, and rejects a forward that does more than compute.

    Args:
        label: of the model, for messages.
        ids: notes the ids that the code names.
        packages: installed ones whose code is the model's.
    """

    label: str
    ids: NamedIds
    packages: frozenset[str] = frozenset()

    def __call__(self, name: str, block: nn.Module, x: Any, batch: Batch) -> Any:
        """The block's output.

        Raises:
            PlanError: what it does, with the name of the module.
        """
        record_batch_norm(block)
        records = BufferRecords(updating_modules(block, name))
        before = state_of(block, name, self.packages)
        kept = _kept_storages(block, name)
        with (
            _module_paths(block, name) as running,
            _Effects(self, running, kept),
            _Hooks(self.label, running),
            records.of_microbatch(0),
        ):
            out = run_block(name, block, x, batch)
        after = state_of(block, name, self.packages)
        changed = changed_name(before, after)
        if changed:
            if is_generator(changed, before):
                place = self._drawing_module(name, block, x, batch)
                raise PlanError(Fault(f"{self.label}: {place}", DRAWS, got=changed, fix=NO_DRAWS))
            raise PlanError(Fault(f"{self.label}: {changed}", CHANGES, fix=NO_CHANGES))
        self._check_updates(name, block, records)
        return out

    def _check_updates(self, name: str, block: nn.Module, records: BufferRecords) -> None:
        """Updates of buffers with values change these buffers alone; they are undone.

        Raises:
            PlanError: what else they change, or a parameter that they read.
        """
        params = {
            param.untyped_storage()._cdata: path_below(name, path)
            for path, param in block.named_parameters()
        }
        for path, of_module in records.take().items():
            module = records.modules[path]
            for values in of_module[0]:
                if any(value.is_meta for value in values):
                    continue
                names = {path_below(path, key) for key in module._buffers}
                before = self._state_without(names, block, name)
                with _kept_buffers(module), _ParameterReads(self.label, params):
                    apply_update(module, values)
                    after = self._state_without(names, block, name)
                changed = changed_name(before, after)
                if changed:
                    raise PlanError(Fault(f"{self.label}: {changed}", NO_BUFFER, fix=REGISTER))

    def _state_without(self, names: Collection[str], block: nn.Module, name: str) -> State:
        state = state_of(block, name, self.packages)
        return {key: value for key, value in state.items() if key not in names}

    def _drawing_module(self, name: str, block: nn.Module, x: Any, batch: Batch) -> str:
        """The innermost module whose forward changes a generator."""
        found: list[str] = []
        before: list[dict[str, Any]] = []

        def enter(module: nn.Module, _args: object) -> None:
            before.append(_generators(module, name, self.packages))

        def leave(path: str, module: nn.Module, _args: object, _out: object) -> None:
            if before.pop() != _generators(module, name, self.packages):
                found.append(path)

        handles = []
        for path, module in block.named_modules():
            full_path = path_below(name, path)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(
                module.register_forward_hook(
                    lambda *args, full_path=full_path: leave(full_path, *args)
                )
            )
        try:
            run_block(name, block, x, batch)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else name


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """The buffers of a module have their values again afterwards."""
    buffers = dict(module._buffers)
    values = {key: buffer.clone() for key, buffer in buffers.items() if buffer is not None}
    try:
        yield
    finally:
        module._buffers.update(buffers | values)


def _generators(module: nn.Module, name: str, packages: frozenset[str]) -> dict[str, Any]:
    state = state_of(module, name, packages)
    return {key: value for key, value in state.items() if is_generator(key, state)}


def _kept_storages(block: nn.Module, name: str) -> dict[int, str]:
    """Identity of the storage of each tensor that outlives a forward -> its name."""
    kept: dict[int, str] = {}
    for path, module in block.named_modules():
        for table in (module._parameters, module._buffers, vars(module)):
            for own, value in table.items():
                if type(value) in (Tensor, nn.Parameter):
                    key = value.untyped_storage()._cdata
                    kept[key] = f"{path_below(name, path)}.{own}"
    return kept


@contextmanager
def _module_paths(block: nn.Module, name: str) -> Iterator[list[str]]:
    """The paths of the modules whose forward is running, the innermost last."""
    running = [name]
    handles = []
    for path, module in block.named_modules():
        full_path = path_below(name, path)
        handles.append(
            module.register_forward_pre_hook(
                lambda _module, _args, full_path=full_path: running.append(full_path)
            )
        )
        handles.append(
            module.register_forward_hook(lambda *_: [running.pop(), None][1], always_call=True)
        )
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


@uncompiled_mode
class _Effects(TorchDispatchMode):
    """Rejects operations that draw random numbers, or write to tensors that outlive the forward."""

    def __init__(self, pure: Pure, running: list[str], kept: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._label = pure.label
        self._ids = pure.ids
        self._running = running
        self._kept = kept

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        self._ids.note(func, args)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args):
            name = f"{self._label}: {self._running[-1]}"
            operation = func.overloadpacket.__name__
            raise PlanError(Fault(name, DRAWS, got=operation, fix=NO_DRAWS))
        for tensor in _written(func, args, kwargs or {}):
            place = self._kept.get(tensor.untyped_storage()._cdata)
            if place is not None:
                raise PlanError(Fault(f"{self._label}: {place}", CHANGES, fix=NO_CHANGES))
        return func(*args, **(kwargs or {}))


@uncompiled_mode
class _ParameterReads(TorchDispatchMode):
    """Rejects operations on parameters.

    Args:
        label: of the model, for messages.
        params: identity of the storage of each parameter -> its name.
    """

    def __init__(self, label: str, params: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._label = label
        self._params = params

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        for tensor in tensors_in((args, kwargs)):
            param = self._params.get(tensor.untyped_storage()._cdata)
            if param is not None:
                raise PlanError(Fault(f"{self._label}: {param}", READS, fix=HAND_OVER))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation that may draw does: attention without dropout does not."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("dropout_p", "p", "dropout") and isinstance(value, (int, float)):
            return value > 0
    return "dropout" not in func.overloadpacket.__name__ and "attention" not in str(func)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors to which an operation writes."""
    for place in WRITES_WITHOUT_SCHEMA.get(func.overloadpacket.__name__, ()):
        if args[IS_TRAINING] and isinstance(args[place], Tensor):
            yield args[place]
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from tensors_in(value)


class _Hooks(TorchFunctionMode):
    """Rejects hooks that a forward registers on gradients of tensors."""

    def __init__(self, label: str, running: list[str]) -> None:
        super().__init__()
        self._label = label
        self._running = running

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function."""
        name = getattr(func, "__name__", "")
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            raise PlanError(Fault(f"{self._label}: {self._running[-1]}", HOOKED, fix=NO_HOOK))
        return func(*args, **(kwargs or {}))


def check_effects(blocks: Mapping[str, nn.Module], batch: Batch, pure: Pure) -> None:
    """Run a chain on the meta device; see Note [Effects].

    Raises:
        PlanError: a forward does more than compute, or fails; the loss is no scalar.
    """
    keep_compiler_unimported()
    x: Any = batch.inputs
    for name, block in blocks.items():
        try:
            out = pure(name, block, x, batch)
        except PlanError:
            raise
        except Exception as error:
            what = f"its forward raises {type_and_message(error)}"
            raise PlanError(Fault(f"{pure.label}: {name}", what)) from error
        x = activation_of(out)
    check_scalar(x, pure.label)


def check_scalar(loss: Any, label: str) -> None:
    """Reject a loss that is not one number.

    Raises:
        PlanError: with its shape.
    """
    got = type(loss).__name__
    if isinstance(loss, Tensor):
        got = f"shape {list(loss.shape)}"
        if loss.dim() == 0 and loss.is_floating_point():
            return
    need = "the sum over the targets of the batch, a scalar"
    raise PlanError(Fault(f"{label}: the loss", "is no sum over targets", got=got, need=need))


def check_gradients(blocks: Mapping[str, nn.Module], batch: Batch, label: str) -> None:
    """Every trained parameter takes part in the loss, whose backward is a plain one.

    Raises:
        PlanError: a parameter that does not; or the backward fails.
    """
    loss = forward(blocks, batch)
    trained: dict[str, nn.Parameter] = {}
    for block_name, block in blocks.items():
        for path, param in block.named_parameters():
            if param.requires_grad:
                trained.setdefault(f"{block_name}.{path}", param)
    if not trained:
        return
    try:
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            loss, tuple(trained.values()), allow_unused=True
        )
    except NotImplementedError:  # an operation whose gradient the meta device lacks
        return
    except Exception as error:
        what = f"its backward raises {type_and_message(error)}"
        fix = ""
        if "use_reentrant" in str(error):
            what = "its backward recomputes activations by a nested backward"
            fix = "torch.utils.checkpoint with use_reentrant=False, or --parallel.recompute full"
        raise PlanError(Fault(label, what, fix=fix)) from error
    for name, grad in zip(trained, grads, strict=True):
        if grad is None:
            what = "is a parameter that the loss does not use"
            fix = "remove it, or set requires_grad=False"
            raise PlanError(Fault(f"{label}: {name}", what, fix=fix))
