"""Where parameters lie in Hugging Face tensors, as boxes, both ways. No torch.

One parameter, for example layer1.attn.k.weight of GPT-2, passes four coordinate systems:

    parameter            without the      transposed         + start of its slice
    [E?, out, in]        expert dim       [in, out]          in the HF tensor [in, 3 out]
    ┌──────────┐                          ┌─────┐            ┌─────┬─────┬─────┐
    │   box    │   ->     [out, in]  ->   │ box │     ->     │  q  │ box │  v  │     transformer.h.1.attn.c_attn.weight
    └──────────┘                          └─────┘            └─────┴─────┴─────┘

A stack of experts, or a parameter whose parts several tensors hold, has a placement for each of them.

`Placement.to_tensor` goes from left to right, `Placement.to_param` from right to left. Import asks
which boxes of HF tensors make up a box of a parameter (`ParamSource.copies`), export which boxes of
parameters make up a box of an HF tensor (`HFTensor.copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.hf.mapping import EXPERT, WeightMapping, WeightRule
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
    """A parameter, or a part of it such as one expert of a stack, in an HF tensor.

    Attributes:
        param: name of the parameter; its owner's where it is tied.
        tensor_shape: of the whole HF tensor.
        region: entries of the HF tensor that are the parameter's.
        at: where they lie in the parameter, with one dim more where the tensor is one entry of its
            first dim; None: they are the whole parameter.
    """

    param: str
    tensor: str
    tensor_shape: Shape
    region: Box
    transposed: bool
    at: Box | None = None

    @property
    def matrix_shape(self) -> Shape:
        """Shape of the part, without the expert dim of a stack."""
        shape = self.region.shape
        if self.transposed:
            return shape[::-1]
        return shape

    @property
    def _is_entry(self) -> bool:
        return self.at is not None and len(self.at.lo) > len(self.region.lo)

    def to_tensor(self, box: Box) -> Box:
        """A box of the parameter inside `at` -> the same entries in the HF tensor."""
        if self.at is not None:
            box = box.shifted(tuple(-lo for lo in self.at.lo))
        if self._is_entry:
            box = Box(box.lo[1:], box.hi[1:])
        return _transpose(box, self.transposed).shifted(self.region.lo)

    def to_param(self, box: Box) -> Box:
        """A box of the HF tensor inside `region` -> the same entries in the parameter."""
        to_origin = tuple(-lo for lo in self.region.lo)
        inner = _transpose(box.shifted(to_origin), self.transposed)
        if self.at is None:
            return inner
        if self._is_entry:
            inner = Box((0, *inner.lo), (1, *inner.hi))
        return inner.shifted(self.at.lo)


@dataclass(frozen=True)
class ParamSource:
    """The HF tensors that make up one parameter: one, or several parts such as experts of a stack.

    Attributes:
        rule: the first of those that place them.
    """

    rule: WeightRule
    placements: tuple[Placement, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the parameter lies in one tensor."""
        return self.placements[0].at is None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the HF tensors."""
        return tuple(placement.tensor for placement in self.placements)

    @property
    def shape(self) -> Shape:
        """The shape of the parameter."""
        parts = [placement.at.hi for placement in self.placements if placement.at is not None]
        return tuple(map(max, zip(*parts, strict=True))) or self.placements[0].matrix_shape

    def copies(self, box: Box) -> Iterator[Copy]:
        """The HF tensors' entries that make up a box of the parameter."""
        for placement in self.placements:
            inside = box if placement.at is None else placement.at & box
            if placement.at is None or inside.size:
                yield Copy(
                    source=placement.tensor,
                    box=placement.to_tensor(inside),
                    transposed=placement.transposed,
                    at=() if placement.at is None else inside.within(box),
                )


@dataclass(frozen=True)
class HFTensor:
    """One tensor of an exported folder.

    Attributes:
        keep_float32: never stored in fewer than 32 bits.
        is_integer: stored as whole numbers.
    """

    name: str
    shape: Shape
    placements: tuple[Placement, ...]
    keep_float32: bool
    is_integer: bool = False

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


def placements(
    rule: WeightRule, owner: str, tensors: Iterable[str], tensor_shape: Shape
) -> Iterator[Placement]:
    """A parameter in the tensors of a rule, which all have one shape.

    Args:
        owner: name of the parameter; of a tied one, its owner's.
    """
    region = Box.whole(tensor_shape) if rule.part is None else rule.part.region
    if rule.slice is not None:
        dim, count = rule.slice.dim, rule.slice.count
        length = tensor_shape[dim] // count
        lo, hi = list(region.lo), list(region.hi)
        lo[dim], hi[dim] = rule.slice.index * length, (rule.slice.index + 1) * length
        region = Box(tuple(lo), tuple(hi))
    inner = region.shape[::-1] if rule.transposed else region.shape
    at = None if rule.part is None else rule.part.at
    for index, tensor in enumerate(tensors):
        if EXPERT in rule.tensor:
            at = Box((index, *(0 for _ in inner)), (index + 1, *inner))
        yield Placement(owner, tensor, tensor_shape, region, rule.transposed, at)


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
    placed: dict[str, list[Placement]] = {}
    wide: set[str] = set()
    integers: set[str] = set()
    for rule in rules:
        owner = ties.get(rule.param, rule.param)
        for placement in _placements(rule, owner, shapes[owner]):
            placed.setdefault(placement.tensor, []).append(placement)
            if rule.keep_float32:
                wide.add(placement.tensor)
            if rule.is_integer:
                integers.add(placement.tensor)
    found = []
    for name, parts in placed.items():
        found.append(
            HFTensor(
                name=name,
                shape=parts[0].tensor_shape,
                placements=tuple(parts),
                keep_float32=name in wide,
                is_integer=name in integers,
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
    names = [rule.tensor]
    if is_stacked:
        names = [rule.tensor.replace(EXPERT, str(expert)) for expert in range(shape[0])]
    return placements(rule, owner, names, tensor_shape)


def _tensor_shape(matrix_shape: Shape, rule: WeightRule) -> Shape:
    """Shape of the HF tensor, from that of the parameter without its expert dim."""
    if rule.part is not None:
        return rule.part.tensor_shape
    shape = list(matrix_shape)
    if rule.transposed:
        shape.reverse()
    if rule.slice is not None:
        dim = rule.slice.dim
        shape[dim] *= rule.slice.count
    return tuple(shape)


def _transpose(box: Box, transposed: bool) -> Box:
    if not transposed:
        return box
    return Box(lo=box.lo[::-1], hi=box.hi[::-1])
