"""weft's parameters in transformers' tensors: whole parameters read and written, each entry of each tensor used once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.config.hf.mapping import HFMapping
from weft.config.hf.safetensors_files import TensorEntry
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.match import match_tensors
from weft.hf.placement import ParamSource, hf_tensors
from weft.hf.write import choose_dtypes, write_folder
from weft.models import FAMILIES

STATE = "transformers' model"
MAX_FILE_BYTES = 2**32


@dataclass(frozen=True)
class HFWeights:
    """Where each parameter lies in the tensors of transformers' model.

    Attributes:
        params: by weft's names, without tied aliases.
    """

    params: Mapping[str, ParamSource]

    @staticmethod
    def of(mapping: HFMapping, cfg: ModelConfig, state: Mapping[str, Tensor]) -> HFWeights:
        """The parameters of a model by the rules of its export.

        Args:
            state: tensors by the names of a published folder.

        Raises:
            CheckpointError: the rules leave a tensor or an entry out, or use one twice.
        """
        entries = {}
        for name, tensor in state.items():
            dtype = "F64" if tensor.is_floating_point() else "I64"
            entries[name] = TensorEntry(Path(STATE), dtype, tuple(tensor.shape), 0, 0)
        matched = match_tensors(
            mapping.weights, cfg, entries, ties=FAMILIES[cfg.family].ties(cfg), folder=STATE
        )
        weights = HFWeights(matched.params)
        weights.check_bijection(state)
        return weights

    def check_bijection(self, state: Mapping[str, Tensor]) -> None:
        """Check that every entry of every tensor belongs to exactly one parameter; tied tensors are
        one.

        Raises:
            CheckpointError: one does not.
        """
        counts: dict[int, Tensor] = {}
        names: dict[int, str] = {}
        for name, tensor in state.items():
            counts.setdefault(tensor.data_ptr(), torch.zeros(tensor.shape, dtype=torch.int64))
            names.setdefault(tensor.data_ptr(), name)
        for source in self.params.values():
            for copy in source.copies(Box.whole(source.shape)):
                counts[state[copy.source].data_ptr()][copy.box.slices] += 1
        for pointer, count in counts.items():
            if bool((count != 1).any()):
                what = f"{names[pointer]} is not used once by the parameters of weft"
                times = f"{int(count.min())} to {int(count.max())} times"
                raise CheckpointError(Fault(STATE, what, got=times, need="once"))

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters, or gradients, float64; of the parameters whose tensors are there."""
        found = {}
        for name, source in self.params.items():
            if all(tensor in tensors for tensor in source.tensors):
                found[name] = _read(source, tensors)
        return found

    def write(self, values: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copy whole parameters into the tensors of the model."""
        for name, value in values.items():
            source = self.params[name]
            for copy in source.copies(Box.whole(source.shape)):
                part = value[copy.at]
                region = state[copy.source].detach()[copy.box.slices]
                matrix = part.T if copy.transposed else part
                region.copy_(matrix.reshape(region.shape))


def _read(source: ParamSource, tensors: Mapping[str, Tensor]) -> Tensor:
    whole = torch.empty(source.shape, dtype=torch.float64)
    for copy in source.copies(Box.whole(source.shape)):
        part = tensors[copy.source].detach()[copy.box.slices]
        whole[copy.at] = part.T if copy.transposed else part
    return whole


@dataclass(frozen=True)
class Values:
    """Whole parameters in memory, as a `Source`."""

    values: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        return {name: tuple(value.shape) for name, value in self.values.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a parameter."""
        return self.values[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of a box."""
        return self.values[name][box.slices].clone()


def export(
    folder: Path, values: Source, *, mapping: HFMapping, cfg: ModelConfig, config: Mapping[str, Any]
) -> None:
    """Write a model as `weft export` does."""
    tensors = hf_tensors(
        mapping.weights, cfg, values.shapes, ties=FAMILIES[cfg.family].ties(cfg), where=str(folder)
    )
    write_folder(
        folder,
        choose_dtypes(tensors, values, dtype=None),
        values,
        max_shard_bytes=MAX_FILE_BYTES,
        texts={},
        config=config,
    )
