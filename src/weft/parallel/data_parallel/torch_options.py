"""Options of torch's DistributedDataParallel that scripts pass: what weft's makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import Fault, PlanError, did_you_mean
from weft.parallel.autograd.tree import map_leaves

TRUE_ALREADY = frozenset(
    {
        "output_device",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "check_reduction",
        "skip_all_reduce_unused_params",
        "dim",
    }
)
"""What they ask for holds for every module: they change nothing."""
READ = ("device_ids", "broadcast_buffers", "bucket_cap_mb")
MB = 1024 * 1024


@dataclass(frozen=True)
class TorchOptions:
    """Options of a DistributedDataParallel.

    Attributes:
        bucket_bytes: size of a bucket of gradients.
        broadcasts_buffers: whether every rank gets the first rank's buffers.
        device: to which inputs are moved; None: they stay where they are.
    """

    bucket_bytes: int
    broadcasts_buffers: bool = True
    device: torch.device | None = None

    @staticmethod
    def of(given: Mapping[str, Any], *, bucket_bytes: int) -> TorchOptions:
        """Those that a script has passed by name.

        Raises:
            PlanError: one that cannot be followed.
        """
        for key, value in given.items():
            if key == "process_group" and value is None:
                continue
            is_known = key in READ or key in TRUE_ALREADY
            if key == "output_device":  # outputs stay where the module is
                is_known = value is None or [value] == list(given.get("device_ids") or ())
            if not is_known:
                _reject(key, value)
        megabytes = given.get("bucket_cap_mb")
        return TorchOptions(
            bucket_bytes=bucket_bytes if megabytes is None else int(megabytes * MB),
            broadcasts_buffers=bool(given.get("broadcast_buffers", True)),
            device=_device(given.get("device_ids")),
        )

    def on_device(self, inputs: Any) -> Any:
        """The inputs, moved to the device where one was named."""
        if self.device is None:
            return inputs
        return map_leaves(inputs, Tensor, lambda tensor: tensor.to(self.device))


def _device(ids: Any) -> torch.device | None:
    if not ids:
        return None
    if len(ids) > 1:
        fault = Fault(
            "device_ids",
            "names several devices, and a rank has one",
            got=str(list(ids)),
            fix="weft.DataParallel(net, devices), or a rank for each device",
        )
        raise PlanError(fault)
    (device,) = ids
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _reject(key: str, value: Any) -> None:
    """Raise PlanError for an option without a meaning here."""
    fixes = {
        "output_device": "leave it out, or the device of device_ids",
        "process_group": "comm=weft.init(mesh), and axis= for a part of the ranks",
        "device_mesh": "comm=weft.init(mesh), and axis= for a part of the ranks",
        "mixed_precision": "torch.autocast, or FullyShardedDataParallel(compute=, reduce=)",
        "delay_all_reduce_named_params": "leave it out: the reductions of all overlap with the backward",
    }
    fault = Fault(
        f"DistributedDataParallel: {key}",
        "is no option of weft's",
        got=str(value),
        fix=fixes.get(key) or did_you_mean(key, (*READ, *sorted(TRUE_ALREADY))) or "leave it out",
    )
    raise PlanError(fault)
