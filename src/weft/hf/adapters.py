"""Owns stored adapters: where a checkpoint has some, the model with them merged, and they alone in PEFT's file layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from weft.checkpoint.disk import new_folder, write_whole
from weft.checkpoint.format import Facts
from weft.checkpoint.source import Source
from weft.config.lora import LORA_A, LORA_B, adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.peft import CONFIG, WEIGHT, WEIGHTS, Target, adapter_config, targets_of
from weft.hf.tables import TABLES
from weft.hf.written import refuse_filled
from weft.models.common.lora import added

BAND = 256
"""Rows of B A that are computed at a time."""


def lora_of(facts: Facts) -> LoraConfig:
    """The adapters that a checkpoint holds; of rank 0 where it holds none."""
    return LoraConfig.model_validate(facts.run.get("lora", {}), strict=False)


def plain(source: Source, lora: LoraConfig) -> Source:
    """The parameters of the plain model: those of `source`, with its adapters merged where it has some."""
    return Merged(source, lora) if lora.rank else source


class Merged:
    """A model with its adapters merged, as a `Source`: W + (alpha / rank) B A, of any box little more than it needs.

    Note [The same bits in every box]
        A matrix product of other sizes may add in another order. So that every layout starts from the same bits, B A is
        computed in bands of `BAND` whole rows, counted from the tensor's first, of which a box then takes its part.
    """

    def __init__(self, source: Source, lora: LoraConfig) -> None:
        self._source, self._scale = source, lora.alpha / lora.rank
        self.adapted = frozenset(name for each in source.shapes if (name := adapted_linear(each)) is not None)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter of the plain model."""
        return {name: shape for name, shape in self._source.shapes.items() if adapted_linear(name) is None}

    def dtype(self, name: str) -> torch.dtype:
        """As the plain one is stored."""
        return self._source.dtype(name)

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, computed in float32 at least."""
        weight, linear = self._source.read(name, box), name.removesuffix(WEIGHT)
        if linear not in self.adapted or linear == name or not box.size:
            return weight
        a = _whole(self._source, linear + LORA_A)
        for lo in range(box.lo[0] // BAND * BAND, box.hi[0], BAND):
            rows = slice(max(lo, box.lo[0]), min(lo + BAND, box.hi[0]))
            here = slice(rows.start - box.lo[0], rows.stop - box.lo[0])
            delta = self._band(linear, a, lo)[rows.start - lo : rows.stop - lo, box.slices[1]]
            weight[here] = added(weight[here], delta, scale=self._scale)
        return weight

    def _band(self, linear: str, a: Tensor, lo: int) -> Tensor:
        """Whole rows of B A from `lo` on."""
        height, rank = self._source.shapes[linear + LORA_B]
        b = self._source.read(linear + LORA_B, Box((lo, 0), (min(lo + BAND, height), rank)))
        wide = torch.promote_types(b.dtype, torch.float32)
        return b.to(wide) @ a.to(wide)


def write_adapters(folder: Path, source: Source, *, cfg: ModelConfig, lora: LoraConfig, base: str | None) -> None:
    """Write the adapters of a model alone, as PEFT reads them; `PeftModel.from_pretrained(model, folder)` takes them in.

    Args:
        folder: not there yet, or empty; it gets its name when all of it is on the disk.
        source: holds them, by our names.
        base: name or folder of the model in transformers that they belong to, if it is known.

    Raises:
        CheckpointError: the model has no adapters, its family has no counterpart in transformers, the folder is not
            empty, or the disk refuses.
    """
    if not lora.rank:
        fix = "export the model itself, or train with --lora.rank 8"
        raise CheckpointError(Fault(str(folder), "the model has no adapters to write", fix=fix))
    if cfg.family not in TABLES:
        raise CheckpointError(
            Fault("model.name", "has no counterpart in transformers", repr(cfg.family), f"one of {', '.join(TABLES)}")
        )
    refuse_filled(folder)
    weights = save(adapter_tensors(source, cfg=cfg, lora=lora), metadata={"format": "pt"})
    text = json.dumps(adapter_config(cfg, lora, base=base), indent=2, sort_keys=True) + "\n"
    with new_folder(folder, need_bytes=len(weights)) as beside:
        write_whole(beside / WEIGHTS, weights)
        write_whole(beside / CONFIG, text.encode())


def adapter_tensors(source: Source, *, cfg: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """All adapters, by the names that PEFT gives their tensors."""
    found: dict[str, Tensor] = {}
    for target in targets_of(cfg, lora):
        a, b = factors(target, source)
        found |= {f"{target.prefix}.lora_A.weight": a, f"{target.prefix}.lora_B.weight": b}
    return found


def factors(target: Target, source: Source) -> tuple[Tensor, Tensor]:
    """A and B of one of their linears; see Note [Several linears in one] in save/peft.py."""
    firsts, seconds = ([_whole(source, name + end) for name in target.ours] for end in (LORA_A, LORA_B))
    if target.parts == 1:
        return firsts[0], seconds[0]
    height, rank = seconds[0].shape
    b = seconds[0].new_zeros(target.parts * height, len(seconds) * rank)
    for column, (place, second) in enumerate(zip(target.places, seconds, strict=True)):
        b[place * height : (place + 1) * height, column * rank : (column + 1) * rank] = second
    return torch.cat(firsts), b


def _whole(source: Source, name: str) -> Tensor:
    return source.read(name, Box.whole(source.shapes[name]))
