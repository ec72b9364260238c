"""Adapters of several runs on one base, as one adapter whose product is the weighted sum of theirs.

    A = [A1; A2]    B = [w1 s1 B1, w2 s2 B2]    B A = w1 s1 B1 A1 + w2 s2 B2 A2    s = alpha / rank

The sum is exact: that of PEFT's `add_weighted_adapter(combination_type="cat")`. Sums of the factors
themselves ("linear") have the products of one adapter's A and another's B in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.format import Manifest
from weft.checkpoint.quantized import NF4_SECTIONS
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.checkpoint.resume import check_model
from weft.checkpoint.source import Source
from weft.config.hf.mapping import SCORES
from weft.config.lora import LORA_A, LORA_B, adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault, counted
from weft.hf.adapters import stored_lora

MODEL = "model"


@dataclass(frozen=True)
class WeightedAdapter:
    """The adapters of one run.

    Attributes:
        source: the run's parameters.
        weight: of their products in the sum.
    """

    source: Source
    lora: LoraConfig
    weight: float

    @property
    def scale(self) -> float:
        """Factor of B in the sum."""
        return self.weight * self.lora.alpha / self.lora.rank


def combined_lora(parts: Sequence[WeightedAdapter]) -> LoraConfig:
    """The config of the sum: of all ranks together, at a scale of 1."""
    rank = sum(part.lora.rank for part in parts)
    targets: tuple[str, ...] = ()
    if all(part.lora.targets for part in parts):
        targets = tuple(dict.fromkeys(name for part in parts for name in part.lora.targets))
    return LoraConfig(rank=rank, alpha=float(rank), targets=targets)


@dataclass(frozen=True)
class CombinedAdapters:
    """The parameters of the first run with the sum of all adapters in place of its own, as a `Source`.
    A linear that some runs do not adapt has zeros for them.
    """

    parts: Sequence[WeightedAdapter]

    @property
    def lora(self) -> LoraConfig:
        """The config of the sum."""
        return combined_lora(self.parts)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        first = self.parts[0].source.shapes
        found = {name: shape for name, shape in first.items() if adapted_linear(name) is None}
        rank = self.lora.rank
        for part in self.parts:
            for name, shape in part.source.shapes.items():
                if name.endswith(LORA_A):
                    found[name] = (rank, shape[1])
                elif name.endswith(LORA_B):
                    found[name] = (shape[0], rank)
        return found

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the entries that `read` returns."""
        found = [part.source.dtype(name) for part in self.parts if name in part.source.shapes]
        if adapted_linear(name) is None:
            return found[0]
        dtype = found[0]
        for other in found[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of a box; of factors the whole ones are read."""
        if adapted_linear(name) is None:
            return self.parts[0].source.read(name, box)
        shape = self.shapes[name]
        is_product = name.endswith(LORA_B)
        whole = torch.zeros(shape, dtype=self.dtype(name))
        start = 0
        for part in self.parts:
            stop = start + part.lora.rank
            if name in part.source.shapes:
                factor = part.source.read(name, Box.whole(part.source.shapes[name]))
                if is_product:
                    whole[:, start:stop] = part.scale * factor
                else:
                    whole[start:stop] = factor
            start = stop
        return whole[box.slices].clone()


def combine(paths: Sequence[Path], weights: Sequence[float]) -> CombinedAdapters:
    """The parameters of the first checkpoint, with the weighted sum of all adapters.

    Args:
        weights: of each checkpoint; none: all 1.

    Raises:
        CheckpointError: a checkpoint without adapters, of another model or base, with magnitudes, or
            with a head that is trained beside adapters; or another number of weights.
    """
    if weights and len(weights) != len(paths):
        got, need = f"{len(weights)} for {counted(len(paths), 'run')}", f"{len(paths)}"
        fix = "one number for RUN, then one for each run of --merge"
        raise CheckpointError(Fault("weights", "are not one a run", got=got, need=need, fix=fix))
    checkpoints = [open_checkpoint(path) for path in paths]
    faults = [fault for each in checkpoints for fault in _faults(each, checkpoints[0])]
    if faults:
        raise CheckpointError(*faults)
    return CombinedAdapters(
        tuple(
            WeightedAdapter(each.section(MODEL), stored_lora(each.manifest.facts), weight)
            for each, weight in zip(checkpoints, weights or [1.0] * len(paths), strict=True)
        )
    )


def _faults(checkpoint: Checkpoint, first: Checkpoint) -> Iterator[Fault]:
    """Why the adapters of a checkpoint cannot be added to those of the first one."""
    path, facts, of_first = checkpoint.path, checkpoint.manifest.facts, first.manifest.facts
    check_model(path, facts, family=of_first.family, architecture=of_first.architecture)
    lora = stored_lora(facts)
    if not lora.rank:
        yield Fault(str(path), "has no adapters to add", fix="runs with --lora.rank alone")
    elif lora.dora:
        what = "has magnitudes (lora.dora), which have no weighted sum"
        yield Fault(str(path), what, fix="export it alone, and train others from it: --lora.base")
    elif not SCORES.isdisjoint(checkpoint.section(MODEL).shapes):
        what = "has a head that is trained as a whole, and each run has one of its own"
        yield Fault(str(path), what, fix="export each run alone")
    else:
        own, right = _base_digests(checkpoint.manifest), _base_digests(first.manifest)
        differing = [name for name in {**right, **own} if own.get(name) != right.get(name)]
        if differing or not own:
            what = (
                f"extends another base than {first.path}" if own else "has no digests of its base"
            )
            fix = "adapters that were trained from one base, in one precision.compute and lora.quantize"
            yield Fault(str(path), what, got=", ".join(differing[:1]), fix=fix)


def _base_digests(manifest: Manifest) -> dict[str, int]:
    """Digests of the frozen parameters, by stored name."""
    return {
        name: digest
        for name, digest in manifest.digests.items()
        if name.startswith((f"{MODEL}/", *NF4_SECTIONS)) and adapted_linear(name) is None
    }
