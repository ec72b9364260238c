"""Owns on which device a rank computes."""

from __future__ import annotations

from typing import Literal

import torch

from weft.errors import Fault, LaunchError

Choice = Literal["auto", "cpu", "cuda"]


def choose_device(choice: Choice, *, local_rank: int, local_size: int) -> torch.device:
    """The device of one rank: GPU number `local_rank` where every local rank gets one of its own, else the CPU.

    NCCL carries what happens between GPUs and gloo what happens between CPUs; neither lets two ranks share a GPU.

    Raises:
        LaunchError: cuda is asked for, and there are not enough GPUs.
    """
    if choice == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus >= local_size:
        return torch.device("cuda", local_rank)
    if choice == "auto":
        return torch.device("cpu")
    got = f"{num_gpus} GPUs for {local_size} ranks here"
    raise LaunchError(Fault("device", "not enough GPUs", got, "one for each rank", "use fewer ranks, or --device cpu"))
