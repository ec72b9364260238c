"""Owns parameters that start from stored values, of which each rank reads what it holds: a Hugging Face folder, or what
adapters stand beside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.source import Source
from weft.config.run import Run
from weft.errors import CheckpointError, Fault
from weft.hf.adapters import merge_adapters, stored_lora
from weft.hf.folder import HfFolder
from weft.models import FAMILIES
from weft.models.common.init import named_parameters
from weft.parallel.model.parallelize import ParallelModel, read_shard
from weft.train.adapter_base import base_of_run
from weft.train.meta_init import skeleton
from weft.train.preflight import starts_anew


def source_of(run: Run) -> Source | None:
    """Where a new run takes its values from; None where they are drawn, or come from a checkpoint to go on from.

    Raises:
        CheckpointError: the folder does not hold this model.
    """
    if run.resume is not None:
        return None
    return _base(run) if run.lora.base is not None else _folder(run)


def _folder(run: Run) -> HfFolder | None:
    return None if run.model.from_hf is None else HfFolder(Path(run.model.from_hf), run.model)


def _base(run: Run) -> Source:
    path = base_of_run(run).path
    if path is None:
        raise CheckpointError(Fault("lora.base", "holds no whole checkpoint", repr(run.lora.base)))
    checkpoint = open_checkpoint(path)
    return merge_adapters(checkpoint.section("model"), stored_lora(checkpoint.manifest.facts))


def check_start(run: Run) -> None:
    """Refuse a folder whose tensors are not those of the model; whole, so that one process finds what any rank would.

    Raises:
        CheckpointError: with every tensor that has another shape.
    """
    source = _folder(run) if starts_anew(run) else None
    if source is not None:
        family = FAMILIES[run.model.name]
        whole, ties = named_parameters(skeleton(lambda: family.blocks(run.model))), family.ties(run.model)
        source.check_shapes({name: tuple(param.shape) for name, param in whole.items() if name not in ties})
        source.check_aliases()


def start_from(
    source: Source, model: ParallelModel, names: Iterable[str], *, device: torch.device, dtype: torch.dtype
) -> None:
    """Give parameters on the meta device memory and their stored values, which are rounded to `dtype` once.

    Raises:
        CheckpointError: one is stored in another shape.
    """
    shapes = source.shapes
    for name in names:
        piece, param = model.shards[name], model.params[name]
        if shapes[piece.owner] != piece.shape:
            got, need = str(list(shapes[piece.owner])), str(list(piece.shape))
            raise CheckpointError(Fault(piece.owner, "is stored with another shape", got, need))
        value = read_shard(lambda box, owner=piece.owner: source.read(owner, box), piece.shard).to(  # type: ignore[misc]
            device=device, dtype=dtype
        )
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))
