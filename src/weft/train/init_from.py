"""Initial parameters: modules on the meta device, and values read from stored tensors (a Hugging Face folder, a checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.resume import find_checkpoint
from weft.checkpoint.source import Source
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.adapters import merge_adapters, stored_lora
from weft.hf.folder import HfFolder
from weft.models import Family, builders_of
from weft.models.common.buffer_updates import updating_modules
from weft.models.common.init import named_parameters
from weft.models.common.lazy_blocks import LazyBlocks
from weft.parallel.model.parallelize import ParallelModel, read_shard

T = TypeVar("T")


class SkipInit(TorchFunctionMode):
    """While active, functions of `torch.nn.init` return their tensor unchanged.

    Values on the meta device do not exist, and drawing them is expensive: `nn.init.normal_` there
    goes through `torch._refs`, which imports torch._dynamo (829 modules, a second of computing in
    every rank).
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            if args:
                return args[0]
            return kwargs["tensor"]
        return func(*args, **kwargs)


def meta_modules(make: Callable[[], T]) -> T:
    """What `make()` builds, on the meta device: shapes without values, nothing allocated or drawn."""
    with torch.device("meta"), SkipInit():
        return make()


def lazy_blocks(family: Family, config: ModelConfig) -> Mapping[str, nn.Module]:
    """The blocks of a model on the meta device, built at access where the family has builders."""
    builders = builders_of(family, config)
    if builders is None:
        return meta_modules(lambda: family.blocks(config))
    return LazyBlocks(builders, meta_modules)


def place_buffers(
    blocks: Iterable[nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype,
    updated: torch.dtype | None = None,
) -> None:
    """Move the buffers of a user's modules to the device of a rank, and floating-point ones to the
    dtype of compute; weft's own models have none.

    Args:
        updated: dtype of parameters, for buffers that training updates, which are float32 at least;
            None: as `dtype`.
    """
    for block in blocks:
        updating = {id(module) for module in updating_modules(block, "").values()}
        for module in block.modules():
            own = dtype
            if id(module) in updating:
                own = torch.promote_types(updated or dtype, torch.float32)
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    wide = own if buffer.is_floating_point() else buffer.dtype
                    module._buffers[name] = buffer.to(device=device, dtype=wide)


def lora_base(base: str) -> Source:
    """Parameters of the checkpoint that `lora.base` means; adapters that it has are merged into
    them.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    path = find_checkpoint(base).path
    if path is None:
        raise CheckpointError(
            Fault(
                "lora.base",
                "holds no valid checkpoint",
                got=repr(base),
                fix="name a run that has saved, or one of its checkpoints",
            )
        )
    checkpoint = open_checkpoint(path)
    return merge_adapters(checkpoint.section("model"), stored_lora(checkpoint.manifest.facts))


def check_hf_folder(folder: Path, family: Family, config: ModelConfig) -> None:
    """Check the shapes of all tensors of a Hugging Face folder, in one process, before ranks start.

    Raises:
        CheckpointError: with every tensor of another shape than the model's.
    """
    source = HfFolder(folder, config)
    ties = family.ties(config)
    shapes = {}
    for name, param in named_parameters(meta_modules(lambda: family.blocks(config))).items():
        if name not in ties:
            shapes[name] = tuple(param.shape)
    source.check_shapes(shapes)
    source.check_aliases()


def initialize_from(
    source: Source,
    model: ParallelModel,
    names: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Allocate parameters that are on the meta device and load their stored values, rounded to
    `dtype` once.

    Raises:
        CheckpointError: a tensor is stored with another shape.
    """
    shapes = source.shapes
    for name in names:
        param = model.params[name]
        owner = model.shards[name].owner
        shape = model.shards[name].shape
        if shapes[owner] != shape:
            what = "is stored with another shape"
            raise CheckpointError(
                Fault(owner, what, got=str(list(shapes[owner])), need=str(list(shape)))
            )
        stored = read_shard(partial(source.read, owner), model.shards[name].shard)
        value = stored.to(device=device, dtype=dtype)
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))
