"""One-device reference: the plain model, whole batches, torch's own clipping. Uses none of the parallel code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.models import Family
from weft.models.common.batch import Batch, chain
from weft.models.common.init import init_params, named_parameters, tie
from weft.prove.trace import StepTrace
from weft.train.expert_load import rebalance_routers
from weft.train.optim import StepOptimizer, matrices

OptimizerOf = Callable[[Mapping[str, Tensor], Collection[str]], StepOptimizer]
"""From the tensors to update, by global name, and the names of those with weight decay."""


def plain_model(
    family: Family,
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, nn.Module]:
    """The model on one device, with tied parameters and initial values."""
    blocks = {name: block.to(dtype) for name, block in family.blocks(config).items()}
    tie(blocks, family.ties(config))
    init_params(
        _untied_parameters(blocks, family, config),
        family.init(config),
        seed=seed,
    )
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
    """Train on whole batches, one per step, and record everything."""
    blocks = plain_model(
        family,
        config,
        seed=seed,
        dtype=dtype,
    )
    params = _untied_parameters(blocks, family, config)
    update = optimizer(params, matrices(params))
    max_norm = clip if clip > 0 else float("inf")
    traces = []
    for batch in steps:
        for param in params.values():
            param.grad = None
        out = chain(blocks, batch.inputs, batch)
        loss_sum = out.x if out.loss is None else out.x + out.loss
        loss = loss_sum / batch.num_targets()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params.values(), max_norm)
        for group in update.param_groups:
            group["lr"] = lr
        update.step()
        rebalance_routers(blocks, out.loads)
        traces.append(_trace(loss, norm, params))
    return tuple(traces)


def _untied_parameters(
    blocks: Mapping[str, nn.Module],
    family: Family,
    config: ModelConfig,
) -> dict[str, nn.Parameter]:
    ties = family.ties(config)
    return {name: param for name, param in named_parameters(blocks).items() if name not in ties}


def _trace(
    loss: Tensor,
    norm: Tensor,
    params: Mapping[str, nn.Parameter],
) -> StepTrace:
    grads = {}
    for name, param in params.items():
        if param.grad is not None:
            grads[name] = param.grad.clone()
    values = {name: param.detach().clone() for name, param in params.items()}
    return StepTrace(
        loss=loss.item(),
        grad_norm=norm.item(),
        grads=grads,
        params=values,
    )
