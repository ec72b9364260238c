"""LoRA adapters of a checkpoint: merged into the model, or written alone in PEFT's layout."""

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
from weft.config.hf.mapping import SCORE, SCORES
from weft.config.lora import LORA_A, LORA_B, LORA_M, adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.match import mapping_of
from weft.hf.peft import (
    CONFIG,
    WEIGHT,
    WEIGHTS,
    AdapterTarget,
    Place,
    adapter_config,
    adapter_targets,
)
from weft.hf.sidecar import reject_existing
from weft.models.common.lora import add_product

BAND = 256
"""Rows of B A that are computed at a time."""


def stored_lora(facts: Facts) -> LoraConfig:
    """The adapters of a checkpoint; rank 0 where it has none."""
    return LoraConfig.model_validate(facts.run.get("lora", {}), strict=False)


def merge_adapters(source: Source, lora: LoraConfig) -> Source:
    """The parameters of the model without adapters: those of `source`, with its adapters merged
    where it has some.
    """
    if lora.rank:
        return MergedSource(source, lora)
    return source


class MergedSource:
    """A model with its adapters merged, as a `Source`: W + (alpha / rank) B A, computed for the box
    that is read.

    Note [The same bits in every box]
        A matrix product of other sizes may add in another order. So that every layout starts from
        the same bits, B A is computed in bands of `BAND` whole rows, counted from the tensor's
        first, of which a box then takes its part.
    """

    def __init__(self, source: Source, lora: LoraConfig) -> None:
        self._source = source
        self._scale = lora.alpha / lora.rank
        self.adapted = set()
        for name in source.shapes:
            linear = adapted_linear(name)
            if linear is not None:
                self.adapted.add(linear)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter of the model without adapters."""
        return {
            name: shape
            for name, shape in self._source.shapes.items()
            if adapted_linear(name) is None
        }

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the frozen weight is stored."""
        return self._source.dtype(name)

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, computed in float32 at least."""
        weight = self._source.read(name, box)
        linear = name.removesuffix(WEIGHT)
        is_adapted = linear in self.adapted and linear != name
        if not is_adapted or not box.size:
            return weight
        a = _read_whole(self._source, linear + LORA_A)
        first_row = box.lo[0]
        end_row = box.hi[0]
        columns = box.slices[1]
        first_band = first_row // BAND * BAND
        for band_start in range(first_band, end_row, BAND):
            start = max(band_start, first_row)
            stop = min(band_start + BAND, end_row)
            band = self._product_rows(linear, a, band_start)
            rows = slice(start - first_row, stop - first_row)
            own = slice(start - band_start, stop - band_start)
            magnitude = self._magnitudes(linear, start, stop)
            if magnitude is None:
                weight[rows] = add_product(weight[rows], band[own, columns], scale=self._scale)
                continue
            whole = self._source.read(name, Box(lo=(start, 0), hi=(stop, band.shape[1])))
            merged = add_product(whole, band[own], scale=self._scale, magnitude=magnitude)
            weight[rows] = merged[:, columns]
        return weight

    def _magnitudes(self, linear: str, start: int, stop: int) -> Tensor | None:
        """What DoRA adds to the norms of some rows; None without it."""
        name = linear + LORA_M
        if name not in self._source.shapes:
            return None
        return self._source.read(name, Box(lo=(start,), hi=(stop,)))

    def _product_rows(self, linear: str, a: Tensor, start: int) -> Tensor:
        """One band of whole rows of B A."""
        name = linear + LORA_B
        height, rank = self._source.shapes[name]
        band = Box(lo=(start, 0), hi=(min(start + BAND, height), rank))
        b = self._source.read(name, band)
        dtype = torch.promote_types(b.dtype, torch.float32)
        wide_a = a.to(dtype)
        wide_b = b.to(dtype)
        return wide_b @ wide_a


def write_adapters(
    folder: Path,
    source: Source,
    *,
    cfg: ModelConfig,
    lora: LoraConfig,
    base: str | None,
    place: Place | None = None,
) -> None:
    """Write the adapters of a model alone; `PeftModel.from_pretrained(model, folder)` loads them.

    Args:
        folder: does not exist yet, or is empty; it gets its name when all of it is on the disk.
        source: holds them, by weft's names.
        base: name or folder of the base model in transformers, if it is known.
        place: where the model is in the base, if that has several parts.

    Raises:
        CheckpointError: the model has no adapters, its family has no counterpart in transformers,
            the folder is not empty, or a disk error occurs.
    """
    if not lora.rank:
        fix = "export the model itself, or train with --lora.rank 8"
        raise CheckpointError(Fault(str(folder), "the model has no adapters to write", fix=fix))
    mapping_of(cfg.family)
    reject_existing(folder)
    weights = save(
        adapter_tensors(source, cfg=cfg, lora=lora, place=place), metadata={"format": "pt"}
    )
    facts = adapter_config(cfg, lora, base=base, place=place)
    config = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    with new_folder(folder, need_bytes=len(weights)) as unfinished:
        write_whole(unfinished / WEIGHTS, weights)
        write_whole(unfinished / CONFIG, config.encode())


def adapter_tensors(
    source: Source, *, cfg: ModelConfig, lora: LoraConfig, place: Place | None = None
) -> dict[str, Tensor]:
    """All adapters, by the names that PEFT gives their tensors."""
    found: dict[str, Tensor] = {}
    for target in adapter_targets(cfg, lora, place=place):
        a, b = combined_factors(target, source)
        found[f"{target.prefix}.lora_A.weight"] = a
        found[f"{target.prefix}.lora_B.weight"] = b
        if lora.dora:
            found[f"{target.prefix}.lora_magnitude_vector"] = _magnitudes(target, source)
    for name in SCORES.intersection(source.shapes):  # trained as a whole
        found[f"base_model.model.{SCORE.tensor}"] = _read_whole(source, name)
    return found


def _magnitudes(target: AdapterTarget, source: Source) -> Tensor:
    """The norms of the rows of one HF linear's weight, with what is added to them.

    Raises:
        CheckpointError: only some of the linears in it have adapters.
    """
    if len(target.linears) != target.num_parts:
        what = f"{target.module} holds {target.num_parts} linears, and {len(target.linears)} have magnitudes"
        fix = "export the merged model, or train with other lora.targets"
        raise CheckpointError(Fault("lora.targets", what, fix=fix))
    parts = []
    for linear in target.linears:
        added = _read_whole(source, linear + LORA_M)
        weight = _read_whole(source, linear + WEIGHT).to(added.dtype)
        parts.append(torch.linalg.vector_norm(weight, dim=1) + added)
    return torch.cat(parts)


def combined_factors(target: AdapterTarget, source: Source) -> tuple[Tensor, Tensor]:
    """A and B of one HF linear; see Note [Several linears in one] in hf/peft.py."""
    a_factors: list[Tensor] = []
    b_factors: list[Tensor] = []
    for linear in target.linears:
        a_factors.append(_read_whole(source, linear + LORA_A))
        b_factors.append(_read_whole(source, linear + LORA_B))
    if target.num_parts == 1:
        return a_factors[0], b_factors[0]
    height, rank = b_factors[0].shape
    combined_height = target.num_parts * height
    combined_rank = len(b_factors) * rank
    combined_b = b_factors[0].new_zeros(combined_height, combined_rank)
    first_column = 0
    for part, b in zip(target.parts, b_factors, strict=True):
        first_row = part * height
        rows = slice(first_row, first_row + height)
        columns = slice(first_column, first_column + rank)
        combined_b[rows, columns] = b
        first_column += rank
    combined_a = torch.cat(a_factors)
    return combined_a, combined_b


def _read_whole(source: Source, name: str) -> Tensor:
    return source.read(name, Box.whole(source.shapes[name]))
