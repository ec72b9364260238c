"""Owns ZeRO: optimizer states (1), gradients (2) and parameters (3) spread over the ranks that would hold copies of them.

A parameter is a copy on every rank along the axes over which its gradient is summed: exactly there it is spread. So data,
context and expert ranks, and norms under sequence parallelism, all follow the one gradient rule.

    stage   held by a rank all the time                      operations a step and unit
    1       parameters, gradients; its shard of the states   reduce-scatter, all-gather
    2       parameters; its shard of gradients, states       reduce-scatter a micro-batch, all-gather
    3       its shards alone                                 2 all-gathers and a reduce-scatter a micro-batch

Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.parallel.flat import FlatLayout, FlatParams
from weft.parallel.model import ParallelModel

Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class Policy:
    """How parameters are held.

    Attributes:
        zero: 0 keeps everything on every rank (with mixed precision), 1 to 3 as above.
        params: dtype of the values that the optimizer moves.
        compute: dtype in which blocks compute and parameters are gathered.
        reduce: dtype in which gradients are kept and summed over ranks.
    """

    zero: Stage
    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass
class Unit:
    """Parameters of one block that are gathered and reduced together.

    Attributes:
        axes: mesh axes over which the gradient is summed and, from stage 1 on, everything is spread.
        whole: the parameters that the blocks use, in `compute`.
        shard: this rank's entries of the values, in `params`; the optimizer moves them.
        grad: this rank's entries of the finished gradient, in `params`.
        full: gradients of the whole unit under way, in `reduce`; kept between micro-batches up to stage 1.
        is_direct: autograd adds into `full` by itself: `param.grad` is a view of it.
        in_backward: gathered for a backward; a forward played again meanwhile must not give it away.
        missing: parameters whose gradient of this micro-batch has not arrived.
        reducing: the reduction under way.
        gathering: the gather under way.
    """

    stage: int
    axes: tuple[str, ...]
    params: dict[str, nn.Parameter]
    layout: FlatLayout
    index: int
    whole: FlatParams
    shard: Tensor
    grad: Tensor
    full: Tensor | None
    is_direct: bool
    in_backward: bool = False
    missing: set[str] = field(default_factory=set)
    reducing: Work | None = None
    gathering: Work | None = None
    reduced: bool = False


class ShardedParams:
    """All parameters of one rank under a `Policy`.

    Attributes:
        tensors: what the optimizer moves, by global name: this rank's entries, one-dimensional, `.grad` beside them.
        spread: mesh axes over which the entries of each parameter are spread.
    """

    def __init__(self, model: ParallelModel, policy: Policy) -> None:
        self.comm, self.policy = model.comm, policy
        self.units = tuple(_make_units(model, policy))
        self.tensors: dict[str, Tensor] = {}
        self.spread: dict[str, tuple[str, ...]] = {}
        self._armed: set[int] = set()
        self._touched: list[Unit] = []
        for unit in self.units:
            self._register(unit)
        if policy.zero == 3:
            _install_gathers(model, self)

    def _register(self, unit: Unit) -> None:
        grads = unit.layout.shard_views(unit.grad, unit.index)
        for name, entries in unit.layout.shard_views(unit.shard, unit.index).items():
            entries.grad = grads[name]
            self.tensors[name] = entries
            self.spread[name] = unit.axes if self.policy.zero else ()
        for name, param in unit.params.items():
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._arrived(unit, name, param))

    def zero(self) -> None:
        """Make every gradient 0, before the first backward of a step."""
        for unit in self.units:
            for flat in (unit.grad, unit.full):
                if flat is not None:
                    flat.zero_()

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last in this step."""
        self._armed.add(stage)

    def finish(self) -> None:
        """Wait until `grad` of every unit is the sum over all ranks and micro-batches."""
        for unit in self.units:
            if (self.policy.zero <= 1 and not unit.reduced) or (self.policy.zero >= 2 and unit.full is not None):
                self._reduce(unit)
        for unit in self.units:
            self._settle(unit)
            unit.reduced = False
            if self.policy.zero == 3:
                unit.whole.release()
        self._armed.clear()

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by `factor`."""
        for unit in self.units:
            unit.grad.mul_(factor)

    def after_update(self) -> None:
        """Bring the moved values to the blocks: gather them (stages 0 to 2); at stage 3 the blocks ask when they run."""
        if self.policy.zero == 3:
            return
        for unit, following in zip(self.units, (*self.units[1:], None), strict=True):
            unit.gathering = unit.gathering or self._fill(unit)
            if following is not None:
                following.gathering = self._fill(following)
            self._take_in(unit)

    def gradients(self) -> dict[str, Tensor]:
        """Finished gradients by global name, this rank's whole pieces; every rank must ask at the same time."""
        return self._whole(lambda unit: unit.grad)

    def parameters(self) -> dict[str, Tensor]:
        """Values by global name in `params`, this rank's whole pieces; every rank must ask at the same time."""
        return self._whole(lambda unit: unit.shard)

    def _whole(self, of: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit in self.units:
            shard = of(unit)
            flat = self.comm.all_gather(shard, unit.axes) if unit.layout.parts > 1 else shard
            found |= {name: view.clone() for name, view in unit.layout.views(flat).items()}
        return found

    # gradients on their way

    def _arrived(self, unit: Unit, name: str, param: Tensor) -> None:
        """A parameter's gradient of one backward is there: put it where it is summed."""
        if unit.full is None:
            unit.full = torch.zeros(unit.layout.length, dtype=self.policy.reduce, device=param.device)
        if not self._touched:
            self._call_after_this_backward()
        if unit not in self._touched:
            self._touched.append(unit)
        if not unit.is_direct:
            assert param.grad is not None, "the hook runs after the gradient was accumulated"
            unit.layout.views(unit.full)[name].add_(param.grad)
            param.grad = None
        unit.missing.discard(name)
        if not unit.missing:
            self._complete(unit)

    def _call_after_this_backward(self) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_done)

    def _backward_done(self) -> None:
        """The units of this backward that lack a gradient (a parameter that was not used) are complete all the same."""
        for unit in self._touched:
            if unit.missing != set(unit.params):
                self._complete(unit)
        self._touched.clear()

    def _complete(self, unit: Unit) -> None:
        unit.missing = set(unit.params)
        if self.policy.zero >= 2 or unit.stage in self._armed:
            self._reduce(unit)
        if self.policy.zero == 3:
            unit.whole.release()
            unit.in_backward = False

    def _reduce(self, unit: Unit) -> None:
        """Start to sum `full` over the ranks."""
        self._settle(unit)
        assert unit.full is not None or self.policy.zero >= 2, "gradients are kept up to stage 1"
        if unit.full is None:
            return
        if unit.layout.parts > 1 and self.policy.zero:
            unit.reducing = self.comm.start_reduce_scatter(unit.full, unit.axes)
        elif unit.axes:
            unit.reducing = self.comm.start_all_reduce_(unit.full, unit.axes)
        else:
            unit.reducing = Work.done(unit.full)
        unit.reduced = True
        if self.policy.zero >= 2:
            unit.full = None

    def _settle(self, unit: Unit) -> None:
        """Wait for the sum under way and take it in."""
        if unit.reducing is None:
            return
        total = unit.reducing.wait()
        if self.policy.zero >= 2:
            unit.grad.add_(total)
        elif total.data_ptr() != unit.grad.data_ptr():
            unit.grad.copy_(total)
        unit.reducing = None

    # parameters on their way

    def start_gather(self, unit: Unit) -> None:
        """Begin to bring the whole unit here (stage 3)."""
        if unit.gathering is None and not unit.whole.is_there:
            unit.whole.restore()
            unit.gathering = self._fill(unit)

    def finish_gather(self, unit: Unit) -> None:
        """Have the whole unit here."""
        self.start_gather(unit)
        self._take_in(unit)

    def _take_in(self, unit: Unit) -> None:
        if unit.gathering is not None:
            unit.whole.alias().copy_(unit.gathering.wait())
            unit.gathering = None

    def _fill(self, unit: Unit) -> Work | None:
        """Put the values into `whole`: this rank's own at once, the others' when the work is done."""
        values = unit.shard.to(self.policy.compute)
        if unit.layout.parts > 1:
            return self.comm.start_all_gather(values, unit.axes)
        if unit.whole.flat.data_ptr() != values.data_ptr():
            unit.whole.alias().copy_(values)
        return None


def _make_units(model: ParallelModel, policy: Policy) -> Iterator[Unit]:
    """Parameters of equal stage, block, reduce axes; a parameter tied to one on another pipeline rank stands alone, so that
    both ranks cut it alike."""
    far = {link.name for link in model.far_ties}
    names = [name for name, param in model.params.items() if param.requires_grad]

    def key(name: str) -> tuple[int, str, tuple[str, ...], str]:
        return model.stage_of[name], name.partition(".")[0], model.pieces[name].reduce, name if name in far else ""

    order = {name: place for place, name in enumerate(names)}
    for (stage, _, axes, _), group in groupby(sorted(names, key=lambda name: (key(name), order[name])), key=key):
        yield _make_unit({name: model.params[name] for name in group}, model.comm, policy, stage=stage, axes=axes)


def _make_unit(
    params: dict[str, nn.Parameter], comm: Comm, policy: Policy, *, stage: int, axes: tuple[str, ...]
) -> Unit:
    parts = comm.degree(axes) if policy.zero else 1
    index = comm.index(axes) if policy.zero else 0
    layout = FlatLayout.of({name: tuple(param.shape) for name, param in params.items()}, parts)
    device = next(iter(params.values())).device
    mine = layout.shard_range(index)
    values = layout.pack(params, dtype=policy.params, device=device)
    whole = FlatParams(params, layout, dtype=policy.compute)
    is_shared = policy.zero < 3 and policy.params == policy.compute
    shard = whole.flat[mine] if is_shared else values[mine].clone()
    if policy.zero == 3:
        whole.release()
    full = torch.zeros(layout.length, dtype=policy.reduce, device=device) if policy.zero <= 1 else None
    is_direct = full is not None and policy.compute == policy.reduce
    if full is not None and is_direct:
        for name, view in layout.views(full).items():
            params[name].grad = view
    is_kept = full is not None and policy.reduce == policy.params
    grad = full[mine] if full is not None and is_kept else values.new_zeros(layout.shard_length)
    return Unit(
        stage=stage,
        axes=axes,
        params=params,
        layout=layout,
        index=index,
        whole=whole,
        shard=shard,
        grad=grad,
        full=full,
        is_direct=is_direct,
        missing=set(params),
    )


def _install_gathers(model: ParallelModel, sharded: ShardedParams) -> None:
    """Gather each block's units before its forward and backward, the next block's beside it; release them after."""
    by_param = {id(param): unit for unit in sharded.units for param in unit.params.values()}
    for stage in model.stages.values():
        blocks = list(stage.values())
        needs = [_units_of(block, by_param) for block in blocks]
        for place, block in enumerate(blocks):
            after = needs[place + 1] if place + 1 < len(blocks) else ()
            before = needs[place - 1] if place else ()
            _install_gather(block, sharded, needs[place], after=after, before=before)


def _units_of(block: nn.Module, by_param: Mapping[int, Unit]) -> tuple[Unit, ...]:
    found = {id(unit): unit for param in block.parameters() if (unit := by_param.get(id(param))) is not None}
    return tuple(found.values())


def _install_gather(
    block: nn.Module,
    sharded: ShardedParams,
    units: tuple[Unit, ...],
    *,
    after: tuple[Unit, ...],
    before: tuple[Unit, ...],
) -> None:
    def enter(_: nn.Module, args: Any) -> None:
        for unit in units:
            sharded.finish_gather(unit)
        if not any(unit.in_backward for unit in units):
            for unit in after:
                sharded.start_gather(unit)

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        for unit in units:
            if not unit.in_backward and not any(unit is other for other in after):
                unit.whole.release()
        y = out if isinstance(out, Tensor) else out.x
        if y.requires_grad:
            y.register_hook(lambda _: begin_backward())

    def begin_backward() -> None:
        for unit in units:
            unit.in_backward = True
            sharded.finish_gather(unit)
        for unit in before:
            sharded.start_gather(unit)

    if units:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
