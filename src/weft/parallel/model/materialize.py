"""Memory and starting values for a rank's parameters on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.core.machine_memory import total_bytes
from weft.core.model_config import InitTable
from weft.core.shard import Shard
from weft.errors import Fault, PlanError
from weft.models.common.init import init_params
from weft.parallel.model.parallelize import ParallelModel


def materialize_params(
    model: ParallelModel,
    table: InitTable,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    names: Sequence[str] | None = None,
) -> None:
    """Give parameters on the meta device memory and their starting values, which depend on seed,
    name and full shape only.

    `names` are those parameters that shall have them; default: all.

    Raises:
        PlanError: they need more memory than this machine has.
    """
    chosen = list(model.params if names is None else names)
    if device.type == "cpu":
        num_entries = sum(model.params[name].numel() for name in chosen)
        _check_room(num_entries, dtype)
    params: dict[str, nn.Parameter] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, Shard] = {}
    for name in chosen:
        param = model.params[name]
        values = torch.empty(param.shape, device=device, dtype=dtype)
        empty = nn.Parameter(values, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, empty)  # modules and hooks that hold it keep their object
        spec = model.shards[name]
        # By the owner's name: an alias on another pipeline rank draws the numbers of its owner.
        params[spec.owner] = param
        shapes[spec.owner] = spec.shape
        shards[spec.owner] = spec.shard
    init_params(params, table, seed=seed, shapes=shapes, shards=shards)


def _check_room(num_entries: int, dtype: torch.dtype) -> None:
    """Reject parameters of one rank that no allocation on this machine can hold.

    Raises:
        PlanError: they alone need more than all of the machine's memory.
    """
    need_bytes = num_entries * dtype.itemsize
    machine_bytes = total_bytes()
    if need_bytes <= machine_bytes:
        return
    fault = Fault(
        "model",
        "the parameters of this rank alone need more memory than this machine has",
        got=f"{need_bytes:,} bytes for {num_entries:,} parameters",
        need=f"at most {machine_bytes:,} bytes",
        fix="a smaller model, or more machines to shard it over: --parallel.zero 3, or tp and pp in --mesh",
    )
    raise PlanError(fault)
