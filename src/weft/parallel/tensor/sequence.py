"""Sequence parallelism in a plain script: modules that work on this rank's part of the sequence between sharded layers.

Note [Parts of the sequence]
    Between tensor-parallel regions each rank has a part of the sequence (Korthikanti et al. 2022). With
    modules = embed, layers, norm, output and regions = the attention and the MLP of each layer:

        embed ──> parts ── norm ── region: attention ── + ── norm ── region: MLP ── + ──> norm ── output
            reduce-scatter    all-gather   reduce-scatter       ...                         all-gather

    A whole parameter of these modules sees some of the tokens, or of the heads, on each rank, so its gradient
    is summed over the axis. Outside, every rank computes the same; that is checked in the first backward of
    each parameter, since a module that is missing in `modules` would train with the gradients of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError
from weft.parallel.autograd.holders import holders_of
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.parallel.tensor.region import SEQ_DIM, SharedEntries
from weft.parallel.tensor.vocab import VocabParallelEmbedding

UNEQUAL = 1e-3
"""Relative difference from which gradients of ranks are not the same numbers: partial sums differ by far more,
roundings by far less.
"""
KEY = "sequence"


@dataclass(frozen=True)
class SequenceParallel:
    """Where a plain module's activations are sharded along the sequence; see Note [Parts of the sequence].

        weft.parallelize(net, comm, axes, sequence=weft.SequenceParallel(
            modules=("tok_embeddings", "layers", "norm", "output"),
            regions=("layers.*.attention", "layers.*.feed_forward"),
        ))

    Patterns are those of shells; one that names a module means all inside it, too.

    Attributes:
        modules: what works on parts of the sequence, norms and sharded layers. Sharded embeddings and
            row-parallel linears in it yield parts; column-parallel ones take parts.
        regions: modules inside which the sequence is whole and features are sharded: their first argument
            is all-gathered once for all linears in them. A column-parallel linear outside gathers for itself.
        split: modules whose first argument is whole, and of which each rank takes its part. Needed where
            no sharded embedding yields parts; `()` where the script passes each rank its part.
        joined: modules whose output is all-gathered.
        dim: of the sequence in activations; its length is a multiple of the number of ranks.
    """

    modules: tuple[str, ...]
    regions: tuple[str, ...] = ()
    split: tuple[str, ...] | None = None
    joined: tuple[str, ...] = ()
    dim: int = SEQ_DIM

    def works_on_parts(self, path: str) -> bool:
        return _is_inside(path, self.modules)

    def is_in_region(self, path: str) -> bool:
        return _is_inside(path, self.regions)


def shard_sequence(module: nn.Module, how: SequenceParallel, comm: Comm, axis: Axis) -> None:
    """Have a module, whose layers are sharded, work on parts of the sequence, in place.

    Raises:
        PlanError: a pattern that matches no module; nothing that begins the parts.
    """
    modules = dict(module.named_modules())
    _check(how, modules)
    for path, layer in modules.items():
        if how.works_on_parts(path):
            _set_region(layer, how, is_in_region=how.is_in_region(path))
    for path in _matching(modules, how.split or ()):
        modules[path].register_forward_pre_hook(
            _SplitSequence(comm, axis, how.dim), with_kwargs=True
        )
    for path in _matching(modules, how.regions):
        modules[path].register_forward_pre_hook(
            _GatherSequence(comm, axis, how.dim), with_kwargs=True
        )
    for path in _matching(modules, how.joined):
        modules[path].register_forward_hook(_JoinSequence(comm, axis, how.dim))
    for path, layer in modules.items():
        whole = [key for key, p in layer._parameters.items() if p is not None and not holders_of(p)]
        if whole:
            names = tuple(f"{path}.{key}".lstrip(".") for key in whole)
            use = (
                _SumGradient(comm, axis)
                if how.works_on_parts(path)
                else _SameGradient(comm, axis, names)
            )
            layer.forward = _ForwardWith(layer.forward, layer, tuple(whole), use)


def _set_region(layer: nn.Module, how: SequenceParallel, *, is_in_region: bool) -> None:
    """Have a sharded layer take and yield parts of the sequence."""
    if isinstance(layer, (RowParallelLinear, VocabParallelEmbedding)):
        layer.region = replace(layer.region, sequence_parallel=True, dim=how.dim)
    elif isinstance(layer, ColumnParallelLinear) and is_in_region:
        layer.entries = None
    elif isinstance(layer, ColumnParallelLinear):
        layer.region = replace(layer.region, sequence_parallel=True, dim=how.dim)
        layer.entries = SharedEntries(layer.region)


def _check(how: SequenceParallel, modules: dict[str, nn.Module]) -> None:
    for key in ("modules", "regions", "split", "joined"):
        for pattern in getattr(how, key) or ():
            if not _matching(modules, (pattern,)):
                paths = ", ".join(list(modules)[1:6])
                what = f"{pattern!r} matches no module"
                raise PlanError(Fault(f"{KEY}: {key}", what, got=f"{paths}, ..."))
    begins = any(
        isinstance(layer, VocabParallelEmbedding) and how.works_on_parts(path)
        for path, layer in modules.items()
    )
    if how.split is None and not begins:
        fault = Fault(
            f"{KEY}: split",
            "is not given, and no sharded embedding yields parts of the sequence",
            fix="split=(path of the first module that works on parts,), or split=() where the script passes "
            "each rank its part",
        )
        raise PlanError(fault)


def _matching(modules: dict[str, nn.Module], patterns: tuple[str, ...]) -> list[str]:
    return [path for path in modules if any(fnmatchcase(path, each) for each in patterns)]


def _is_inside(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether the module, or one that it is in, matches a pattern."""
    return any(fnmatchcase(each, pattern) for each in _with_parents(path) for pattern in patterns)


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


@dataclass(frozen=True)
class _Boundary:
    """A change between the whole sequence and parts of it."""

    comm: Comm
    axis: Axis
    dim: int

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """As a hook before a forward: of its first argument that is a tensor."""
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:index], self.change(value), *args[index + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: self.change(value)}
        fault = Fault(KEY, "a module of regions or split is called without a tensor")
        raise PlanError(fault)


class _SplitSequence(_Boundary):
    def change(self, x: Tensor) -> Tensor:
        degree = self.comm.degree(self.axis)
        if x.shape[self.dim] % degree:
            fault = Fault(
                KEY,
                "the length of the sequence does not divide",
                got=str(x.shape[self.dim]),
                need=f"a multiple of {degree}",
                fix="pad the batch",
            )
            raise PlanError(fault)
        return ops.scatter_to_region(x, self.comm, self.axis, self.dim)


class _GatherSequence(_Boundary):
    def change(self, x: Tensor) -> Tensor:
        return ops.all_gather(x, self.comm, self.axis, self.dim)


class _JoinSequence(_Boundary):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather the sequence; called as a hook after a forward."""
        return ops.gather_from_region(output, self.comm, self.axis, self.dim)


@dataclass(frozen=True)
class _SumGradient:
    """A whole parameter's use on parts of the sequence: its gradient is summed over the ranks."""

    comm: Comm
    axis: Axis

    def __call__(self, param: Tensor, key: int) -> Tensor:
        return ops.copy_to_region(param, self.comm, self.axis)


@dataclass
class _SameGradient:
    """A whole parameter's use on the whole sequence: its first gradient is compared over the ranks."""

    comm: Comm
    axis: Axis
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self._unchecked = set(range(len(self.names)))

    def __call__(self, param: Tensor, key: int) -> Tensor:
        if key not in self._unchecked or not param.requires_grad or not torch.is_grad_enabled():
            return param
        used = param.view_as(param)
        used.register_hook(lambda gradient: self._compare(gradient, key))
        return used

    def _compare(self, gradient: Tensor, key: int) -> None:
        self._unchecked.discard(key)
        with torch.no_grad():
            mean = self.comm.all_reduce(gradient.contiguous(), self.axis)
            mean /= self.comm.degree(self.axis)
            squares = torch.stack([(gradient - mean).square().sum(), mean.square().sum()])
            difference, size = self.comm.all_reduce(squares, self.axis).tolist()
        if difference > UNEQUAL**2 * size:
            fault = Fault(
                f"{KEY}: modules",
                f"{self.names[key]} has another gradient on each rank, so it works on parts of the sequence",
                fix="add its module to modules, or give every rank the same inputs",
            )
            raise PlanError(fault)


@dataclass
class _ForwardWith:
    """The forward of a module with other tensors in the place of its whole parameters."""

    forward: Callable[..., Any]
    module: nn.Module
    keys: tuple[str, ...]
    use: Callable[[Tensor, int], Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is in `__dict__` comes before parameters; a wrapper may have put the unsharded one there.
        attributes = self.module.__dict__
        before = {key: attributes[key] for key in self.keys if key in attributes}
        used = {
            key: self.use(getattr(self.module, key), number) for number, key in enumerate(self.keys)
        }
        attributes.update(used)
        try:
            return self.forward(*args, **kwargs)
        finally:
            for key in self.keys:
                del attributes[key]
            attributes.update(before)
