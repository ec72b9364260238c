"""Owns the one-device truth: the plain model, the whole batch at once, torch's own clipping and optimizer. No part of it
passes through the parallel code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.models import Family
from weft.models.common.batch import Batch, chain
from weft.models.common.init import init_params, named_parameters, tie
from weft.prove.trace import StepTrace
from weft.train.balance import rebalance_routers
from weft.train.optim import Optimizer, matrices

OptimizerOf = Callable[[Mapping[str, Tensor], Collection[str]], Optimizer]
"""From the tensors to move, by global name, and the names of those that feel weight decay."""


def plain_model(family: Family, config: ModelConfig, *, seed: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The model on one device, ties made, with its starting values."""
    blocks = {name: block.to(dtype) for name, block in family.blocks(config).items()}
    ties = family.ties(config)
    tie(blocks, ties)
    params = {name: param for name, param in named_parameters(blocks).items() if name not in ties}
    init_params(params, family.init(config), seed=seed)
    return blocks


def one_device(
    family: Family,
    config: ModelConfig,
    steps: Sequence[Batch],
    *,
    seed: int,
    dtype: torch.dtype,
    optimizer: OptimizerOf,
    clip: float,
    lr: float,
) -> tuple[StepTrace, ...]:
    """Train on whole batches, one a step, and record everything."""
    blocks = plain_model(family, config, seed=seed, dtype=dtype)
    params = {name: p for name, p in named_parameters(blocks).items() if name not in family.ties(config)}
    update = optimizer(params, matrices(params))
    traces = []
    for batch in steps:
        for param in params.values():
            param.grad = None
        out = chain(blocks, batch.inputs, batch)
        loss = (out.x if out.loss is None else out.x + out.loss) / batch.num_targets()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params.values(), clip if clip > 0 else float("inf"))
        for group in update.param_groups:
            group["lr"] = lr
        update.step()
        rebalance_routers(blocks, out.loads)
        traces.append(
            StepTrace(
                loss=loss.item(),
                grad_norm=norm.item(),
                grads={name: p.grad.clone() for name, p in params.items() if p.grad is not None},
                params={name: p.detach().clone() for name, p in params.items()},
            )
        )
    return tuple(traces)
