"""Where parameters lie in Hugging Face tensors, as boxes, both ways. No torch.

One parameter, for example layer1.attn.k.weight of GPT-2, passes four coordinate systems:

    parameter            without the      transposed         + start of its slice
    [E?, out, in]        expert dim       [in, out]          in the HF tensor [in, 3 out]
    ┌──────────┐                          ┌─────┐            ┌─────┬─────┬─────┐
    │   box    │   ->     [out, in]  ->   │ box │     ->     │  q  │ box │  v  │     transformer.h.1.attn.c_attn.weight
    └──────────┘                          └─────┘            └─────┴─────┴─────┘

`Placement.to_tensor` goes from left to right, `Placement.to_param` from right to left. Import asks
which boxes of HF tensors make up a box of a parameter (`ParamSource.copies`), export which boxes of
parameters make up a box of an HF tensor (`HFTensor.copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.hf.mapping import EXPERT, Slice, WeightMapping, WeightRule
from weft.config.hf.safetensors_files import list_some
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """Entries to copy.

    Attributes:
        source: name of the tensor or parameter that is read.
        box: entries of it.
        transposed: whether they are transposed on the way.
        at: index of the destination, an array that holds just the box that was asked for.
    """

    source: str
    box: Box
    transposed: bool
    at: tuple[slice, ...]


@dataclass(frozen=True)
class Placement:
    """A parameter, or one expert of a stacked one, in an HF tensor.

    Attributes:
        param: name of the parameter; its owner's where it is tied.
        tensor_shape: of the whole HF tensor.
        expert: index in the parameter's first dim; None where the parameter is no stack.
    """

    param: str
    tensor: str
    tensor_shape: Shape
    slice: Slice | None
    transposed: bool
    expert: int | None = None

    @property
    def region(self) -> Box:
        """Entries of the HF tensor that are the parameter's."""
        lo = [0] * len(self.tensor_shape)
        hi = list(self.tensor_shape)
        if self.slice is not None:
            dim = self.slice.dim
            length = hi[dim] // self.slice.count
            start = self.slice.index * length
            lo[dim] = start
            hi[dim] = start + length
        return Box(tuple(lo), tuple(hi))

    @property
    def matrix_shape(self) -> Shape:
        """Shape of the parameter without its expert dim."""
        shape = self.region.shape
        if self.transposed:
            return shape[::-1]
        return shape

    def to_tensor(self, box: Box) -> Box:
        """A box of the parameter, without its expert dim -> the same entries in the HF tensor."""
        return shift(_transpose(box, self.transposed), self.region.lo)

    def to_param(self, box: Box) -> Box:
        """A box of the HF tensor inside `region` -> the same entries in the parameter."""
        to_origin = tuple(-lo for lo in self.region.lo)
        in_region = shift(box, to_origin)
        inner = _transpose(in_region, self.transposed)
        if self.expert is None:
            return inner
        lo = (self.expert, *inner.lo)
        hi = (self.expert + 1, *inner.hi)
        return Box(lo, hi)


@dataclass(frozen=True)
class ParamSource:
    """The HF tensors that make up one parameter: one, or one for each expert of a stack."""

    rule: WeightRule
    placements: tuple[Placement, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether each tensor is one entry of the parameter's first dim."""
        return self.placements[0].expert is not None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the HF tensors."""
        return tuple(placement.tensor for placement in self.placements)

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        inner = self.placements[0].matrix_shape
        if self.is_stacked:
            return (len(self.placements), *inner)
        return inner

    def copies(self, box: Box) -> Iterator[Copy]:
        """The HF tensors' entries that make up a box of the parameter."""
        if not self.is_stacked:
            placement = self.placements[0]
            yield Copy(
                source=placement.tensor,
                box=placement.to_tensor(box),
                transposed=placement.transposed,
                at=(),
            )
            return
        inner = Box(lo=box.lo[1:], hi=box.hi[1:])
        first = box.lo[0]
        last = box.hi[0]
        for row, placement in enumerate(self.placements[first:last]):
            yield Copy(
                source=placement.tensor,
                box=placement.to_tensor(inner),
                transposed=placement.transposed,
                at=(slice(row, row + 1),),
            )


@dataclass(frozen=True)
class HFTensor:
    """One tensor of an exported folder.

    Attributes:
        keep_float32: never stored in fewer than 32 bits.
    """

    name: str
    shape: Shape
    placements: tuple[Placement, ...]
    keep_float32: bool

    def copies(self, box: Box) -> Iterator[Copy]:
        """The parameters' entries that make up a box of the tensor."""
        for placement in self.placements:
            overlap = placement.region & box
            if overlap.size:
                yield Copy(
                    source=placement.param,
                    box=placement.to_param(overlap),
                    transposed=placement.transposed,
                    at=overlap.within(box),
                )


def param_source(rule: WeightRule, tensors: tuple[str, ...], tensor_shape: Shape) -> ParamSource:
    """The source of a parameter whose tensors all have one shape."""
    is_stacked = EXPERT in rule.tensor
    placements = []
    for index, tensor in enumerate(tensors):
        placements.append(
            Placement(
                param=rule.param,
                tensor=tensor,
                tensor_shape=tensor_shape,
                slice=rule.slice,
                transposed=rule.transposed,
                expert=index if is_stacked else None,
            )
        )
    return ParamSource(rule, tuple(placements))


def hf_tensors(
    mapping: WeightMapping,
    cfg: Any,
    shapes: Mapping[str, Shape],
    *,
    ties: Mapping[str, str],
    where: str,
) -> tuple[HFTensor, ...]:
    """All tensors of a folder that holds a model, in the order of the rules.

    Args:
        shapes: of the parameters; tied ones under their owner's name.
        where: names the folder in messages.

    Raises:
        CheckpointError: rules and parameters do not match: each parameter is to be used exactly
            once.
    """
    rules = []
    for rule in mapping.expand(cfg):
        is_alias = rule.param in ties
        if not is_alias or rule.write_alias:
            rules.append(rule)
    _check_params(rules, shapes, ties=ties, where=where)
    placements: dict[str, list[Placement]] = {}
    wide: set[str] = set()
    for rule in rules:
        owner = ties.get(rule.param, rule.param)
        for placement in _placements(rule, owner, shapes[owner]):
            placements.setdefault(placement.tensor, []).append(placement)
            if rule.keep_float32:
                wide.add(placement.tensor)
    found = []
    for name, parts in placements.items():
        found.append(
            HFTensor(
                name=name,
                shape=parts[0].tensor_shape,
                placements=tuple(parts),
                keep_float32=name in wide,
            )
        )
    return tuple(found)


def _check_params(
    rules: list[WeightRule], shapes: Mapping[str, Shape], *, ties: Mapping[str, str], where: str
) -> None:
    mapped = {rule.param for rule in rules if rule.param not in ties}
    missing = sorted(mapped - set(shapes))
    if missing:
        raise CheckpointError(
            Fault(where, "holds no tensor of these names", got=list_some(missing))
        )
    unmapped = sorted(set(shapes) - mapped)
    if unmapped:
        what = "holds tensors that a Hugging Face folder has no place for"
        raise CheckpointError(Fault(where, what, got=list_some(unmapped)))


def _placements(rule: WeightRule, owner: str, shape: Shape) -> Iterator[Placement]:
    """The HF tensors that a parameter of this shape is written to."""
    is_stacked = EXPERT in rule.tensor
    tensor_shape = _tensor_shape(shape[1:] if is_stacked else shape, rule)
    experts: Iterable[int | None] = (None,)
    if is_stacked:
        experts = range(shape[0])
    for expert in experts:
        yield Placement(
            param=owner,
            tensor=rule.tensor.replace(EXPERT, str(expert)),
            tensor_shape=tensor_shape,
            slice=rule.slice,
            transposed=rule.transposed,
            expert=expert,
        )


def _tensor_shape(matrix_shape: Shape, rule: WeightRule) -> Shape:
    """Shape of the HF tensor, from that of the parameter without its expert dim."""
    shape = list(matrix_shape)
    if rule.transposed:
        shape.reverse()
    if rule.slice is not None:
        dim = rule.slice.dim
        shape[dim] *= rule.slice.count
    return tuple(shape)


def shift(box: Box, offset: Shape) -> Box:
    """The box moved by so many entries in each dim."""
    lo: list[int] = []
    hi: list[int] = []
    for start, stop, distance in zip(box.lo, box.hi, offset, strict=True):
        lo.append(start + distance)
        hi.append(stop + distance)
    return Box(tuple(lo), tuple(hi))


def _transpose(box: Box, transposed: bool) -> Box:
    if not transposed:
        return box
    return Box(lo=box.lo[::-1], hi=box.hi[::-1])
