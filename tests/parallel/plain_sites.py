"""Local updates on one device in plain torch: the sites one after the other, torch's own optimizers, whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.config.run import Run
from weft.data.order import samples_of_step
from weft.data.samples import Samples
from weft.models import FAMILIES
from weft.models.common.batch import Batch, forward
from weft.models.common.init import init_params, named_parameters, tie
from weft.train.data_loader import whole_batch

Tensors = dict[str, Tensor]


def to_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(x.dtype)


def to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def to_int8(x: Tensor) -> Tensor:
    """One scale for each row of the last dim; a vector is one row."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = (largest / 127).float().to(x.dtype)
    safe = torch.where(scale > 0, scale, torch.inf)
    return (x / safe).round().clamp(-127, 127) * scale


WIRES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": to_float32,
    "bfloat16": to_bfloat16,
    "int8": to_int8,
}


@dataclass
class PlainSite:
    """One site: a whole model and its optimizer."""

    blocks: dict[str, nn.Module]
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer

    @staticmethod
    def make(run: Run, blocks: dict[str, nn.Module], ties: Mapping[str, str]) -> PlainSite:
        own = dict(copy.deepcopy(nn.ModuleDict(blocks)).items())
        tie(own, ties)
        params = {}
        for name, param in named_parameters(own).items():
            if name not in ties:
                params[name] = param
        optim = run.optim
        matrices = [param for param in params.values() if param.ndim >= 2]
        vectors = [param for param in params.values() if param.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        return PlainSite(own, params, adamw)

    def step(self, batch: Batch, *, lr: float, clip: float) -> tuple[float, float]:
        """Loss and norm of an inner step."""
        self.optimizer.zero_grad()
        num_targets = int(batch.num_targets())
        loss = forward(self.blocks, batch) / num_targets
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.params.values(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss.item(), norm.item()


@dataclass
class PlainRun:
    """What the plain program computed.

    Attributes:
        outer, momentum: after the last step.
        sites: parameters of each site.
        losses, norms: means over sites, by step.
    """

    outer: Tensors = field(default_factory=dict)
    momentum: Tensors = field(default_factory=dict)
    sites: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train_plain(run: Run, samples: Samples, *, num_sites: int, num_steps: int) -> PlainRun:
    """Train `num_steps` steps of `num_sites` sites, one after the other."""
    blocks, ties = initial_blocks(run)
    sites = [PlainSite.make(run, blocks, ties) for _ in range(num_sites)]
    outer = {}
    for name, param in sites[0].params.items():
        start = param.detach().clone()
        outer[name] = nn.Parameter(start)
    site = run.site
    has_momentum = site.momentum > 0
    outer_sgd = torch.optim.SGD(
        outer.values(), lr=site.lr, momentum=site.momentum, nesterov=has_momentum
    )
    found = PlainRun()
    under_way: Tensors = {}
    for step in range(1, num_steps + 1):
        losses = []
        norms = []
        for index, each in enumerate(sites):
            batch = batch_of_site(run, samples, step - 1, index=index, num_sites=num_sites)
            loss, norm = each.step(batch, lr=run.optim.lr, clip=run.optim.clip)
            losses.append(loss)
            norms.append(norm)
        found.losses.append(sum(losses) / num_sites)
        found.norms.append(sum(norms) / num_sites)
        step_of_round = step % site.every
        if step_of_round == 0:
            under_way = mean_outer_gradient(sites, outer, WIRES[site.wire])
        if under_way and step_of_round == site.overlap:
            for name, gradient in under_way.items():
                outer[name].grad = gradient
            outer_sgd.step()
            own_share = site.mix if site.overlap else 0.0
            mix_into_sites(sites, outer, own_share=own_share)
            under_way = {}
    found.outer = detached(outer)
    for each in sites:
        found.sites.append(detached(each.params))
    for name, param in outer.items():
        buffer = outer_sgd.state[param].get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(param)
        found.momentum[name] = buffer
    return found


def detached(params: Mapping[str, nn.Parameter]) -> Tensors:
    return {name: param.detach() for name, param in params.items()}


def initial_blocks(run: Run) -> tuple[dict[str, nn.Module], Mapping[str, str]]:
    """The whole model in float64 with its initial values, and its tied parameters."""
    family = FAMILIES[run.model.name]
    blocks = dict(family.blocks(run.model))
    ties = family.ties(run.model)
    tie(blocks, ties)
    nn.ModuleDict(blocks).to(torch.float64)
    params = named_parameters(blocks)
    starts = {name: param for name, param in params.items() if name not in ties}
    table = family.init(run.model)
    init_params(starts, table, seed=run.seed)
    return blocks, ties


@torch.no_grad()
def mix_into_sites(
    sites: list[PlainSite], outer: Mapping[str, Tensor], *, own_share: float
) -> None:
    """Move the parameters of each site to the outer ones, but for the share that it keeps."""
    for site in sites:
        for name, param in site.params.items():
            param.copy_(own_share * param + (1 - own_share) * outer[name])


@torch.no_grad()
def mean_outer_gradient(
    sites: list[PlainSite], outer: Mapping[str, Tensor], wire: Callable[[Tensor], Tensor]
) -> Tensors:
    found = {}
    for name, start in outer.items():
        total = torch.zeros_like(start)
        for each in sites:
            moved = start.detach() - each.params[name].detach()
            total = total + wire(moved)
        found[name] = total / len(sites)
    return found


def batch_of_site(run: Run, samples: Samples, step: int, *, index: int, num_sites: int) -> Batch:
    """The sequences of one site: consecutive ones, however ranks of a site share them."""
    size = run.batch.global_size
    chosen = samples_of_step(step, global_size=size, num_samples=samples.num_samples, seed=run.seed)
    own = chosen.reshape(num_sites, -1)[index]
    return whole_batch(samples, own, later=run.model.reads_later_targets)
