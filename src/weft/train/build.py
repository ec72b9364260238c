"""Build model, training step, data loader and step range of one rank from sections of a run config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.config.fp8 import fp8_linears
from weft.config.schema import (
    BatchConfig,
    LoraConfig,
    ModelSection,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    SiteConfig,
)
from weft.core.dimension import local_update_axes, plain_data_axes, position_axes, sequence_axes
from weft.core.model_config import ModelConfig
from weft.data.logprob_files import FOLDER
from weft.data.samples import Samples
from weft.hf.folder import HfFolder
from weft.layout.plan import Plan
from weft.models import FAMILIES, Family
from weft.models.common.batch import example_of
from weft.models.common.fp8_linears import with_fp8
from weft.models.common.lora import adapted
from weft.models.common.neftune import noisy
from weft.models.common.nf4 import check_borders, has_double_blocks, quantized_matrices
from weft.parallel.local_updates.outer_step import OuterSettings
from weft.parallel.model.materialize import materialize_params
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.parallel.model.recorded_buffers import with_records
from weft.train.data_loader import DataLoader
from weft.train.init_from import (
    check_hf_folder,
    initialize_from,
    lazy_blocks,
    lora_base,
    place_buffers,
)
from weft.train.optim import StepOptimizer, learning_rate, make_optimizer, matrices
from weft.train.reference_logprobs import References
from weft.train.run_start import StartState
from weft.train.step import TrainStep
from weft.train.training import StepRange


def build_model(
    family: Family,
    config: ModelConfig,
    plan: Plan,
    comm: Comm,
    *,
    seed: int,
    source: Source | None = None,
    fixed_order: bool = False,
) -> ParallelModel:
    """This rank's shards of the model; the whole model is never in memory.

    Parameters have their initial values, except under ZeRO 3 and those that are held in 4 bits:
    these `model.materialize` initialises block by block.

    Args:
        source: holds initial values; parameters that it does not hold are drawn.
        fixed_order: whether sums have the same bits whatever the number of data ranks.
    """
    blocks = lazy_blocks(family, config)
    example = None
    if config.kind != "tokens":
        example = example_of(config, plan.micro_size, plan.seq_len)
    model = parallelize(
        blocks, plan, comm, axes=family.axes(config), ties=family.ties(config), example=example
    )
    compute: torch.dtype = getattr(torch, plan.compute)
    model = with_records(model, fixed_order=fixed_order)
    dtype: torch.dtype = getattr(torch, plan.params)
    place_buffers(model.blocks.values(), device=comm.device, dtype=compute, updated=dtype)
    table = family.init(config)
    stored = frozenset(source.shapes) if source else frozenset()

    def initialize(names: Sequence[str]) -> None:
        drawn_names: list[str] = []
        stored_names: list[str] = []
        for name in names:
            is_stored = model.shards[name].owner in stored
            (stored_names if is_stored else drawn_names).append(name)
        materialize_params(
            model, table, seed=seed, device=comm.device, dtype=dtype, names=drawn_names
        )
        if source:
            initialize_from(source, model, stored_names, device=comm.device, dtype=dtype)

    dims = quantized_matrices(family, config)
    quantized = {name: dims[name] for name in model.params if name in dims}
    double = has_double_blocks(family)
    for name, dim in quantized.items():
        shard = model.shards[name]
        check_borders(name, shard.shard, shard.shape[dim], dim=dim, double=double)
    if plan.zero < 3:
        initialize([name for name in model.params if name not in quantized])
    return replace(model, materialize=initialize, quantized=quantized, has_double_blocks=double)


def family_of(
    model: ModelSection,
    lora: LoraConfig,
    *,
    neftune: float = 0.0,
    precision: PrecisionConfig | None = None,
) -> Family:
    """The family of a model, with its adapters and the noise on its embeddings, if any.

    Args:
        precision: of a training run; None: linears compute in the type of their operands.
    """
    in_fp8 = fp8_linears(precision, model) if precision is not None else ()
    return noisy(adapted(with_fp8(FAMILIES[model.name], in_fp8), lora), neftune)


def check_initial_parameters(model: ModelSection) -> None:
    """Check the Hugging Face folder that a new run starts from, in one process, before ranks start.

    Raises:
        CheckpointError: with every tensor of another shape than the model's.
    """
    if model.from_hf is not None:
        check_hf_folder(Path(model.from_hf), FAMILIES[model.name], model)


def initial_source(model: ModelSection, *, base: str | None) -> Source | None:
    """Where a new run reads initial values; None if they are drawn.

    Args:
        base: run or checkpoint with the parameters that adapters extend (`lora.base`).

    Raises:
        CheckpointError: the source does not hold this model.
    """
    if base is not None:
        return lora_base(base)
    if model.from_hf is not None:
        return HfFolder(Path(model.from_hf), model)
    return None


@dataclass(frozen=True)
class StepConfig:
    """What a training step is built from, besides its plan and ranks.

    Attributes:
        family: with adapters and the loss of the run.
        source: holds initial values; None if they are drawn, or a checkpoint replaces them.
        fixed_order: whether gradients are added in an order that does not depend on the ranks.
        outer: settings of the outer step, where the mesh has an axis of local updates.
        has_rewards, estimates_kl: as of `TrainStep`.
    """

    family: Family
    model: ModelSection
    optim: OptimConfig
    seed: int
    source: Source | None
    fixed_order: bool
    outer: OuterSettings
    has_rewards: bool = False
    estimates_kl: bool = False


def build_configured_step(config: StepConfig, plan: Plan, comm: Comm) -> TrainStep:
    """The training step of this rank under a plan, with initial parameters."""
    model = build_model(
        config.family,
        config.model,
        plan,
        comm,
        seed=config.seed,
        source=config.source,
        fixed_order=config.fixed_order,
    )
    decay_names = matrices(model.params)

    def optimizer(tensors: Mapping[str, Tensor]) -> StepOptimizer:
        return make_optimizer(tensors, config.optim, decay_names=decay_names)

    return TrainStep(
        model,
        make_optimizer=optimizer,
        clip=config.optim.clip,
        fixed_order=config.fixed_order,
        outer=config.outer,
        has_rewards=config.has_rewards,
        estimates_kl=config.estimates_kl,
    )


def outer_settings(site: SiteConfig) -> OuterSettings:
    """The settings of the outer step of a run."""
    return OuterSettings(
        every=site.every,
        lr=site.lr,
        momentum=site.momentum,
        wire=site.wire,
        overlap=site.overlap,
        mix=site.mix,
    )


FixedOrder = Literal["ranks of micro-batches", "micro-batches of ranks"]
"""See `weft.parallel.zero.fixed_order`."""


def fixed_order_of(parallel: ParallelConfig, *, deterministic: bool) -> FixedOrder | None:
    """How a run assigns micro-batches to ranks, so that the bits of their sums do not depend on the
    number of ranks.
    """
    if not deterministic:
        return None
    return "micro-batches of ranks" if parallel.zero >= 2 else "ranks of micro-batches"


def build_data_loader(
    samples: Samples,
    comm: Comm,
    batch: BatchConfig,
    *,
    seed: int,
    later: bool,
    fixed_order: FixedOrder | None = None,
) -> DataLoader:
    """The loader of this rank's micro-batches.

    Args:
        fixed_order: which micro-batches a rank gets, where gradients are added in a fixed order.
        later: whether the model also reads targets of later positions (multi-token prediction).
    """
    num_groups = comm.degree(local_update_axes())  # each site: consecutive samples, by any layout
    if fixed_order == "ranks of micro-batches":
        num_groups = comm.degree(plain_data_axes())
    return DataLoader(
        samples,
        global_size=batch.global_size,
        micro_size=batch.micro_size,
        seed=seed,
        index=comm.index(sequence_axes()),
        degree=comm.degree(sequence_axes()),
        outer=num_groups,
        device=comm.device,
        later=later,
        context_index=comm.index(position_axes()),
        context_degree=comm.degree(position_axes()),
    )


def build_step_range(optim: OptimConfig, *, start: int = 0, total: int, prefetch: int) -> StepRange:
    """Steps, learning rates and prefetching of a run of `total` steps that has done `start`."""
    return StepRange(
        start=start,
        total=total,
        learning_rate=partial(learning_rate, optim=optim, total_steps=total),
        prefetch=prefetch,
    )


@dataclass(frozen=True)
class RunSteps:
    """What the steps of a run need on this rank.

    Attributes:
        step: with the parameters and optimizer states that the run starts from.
        start: where these come from.
        step_range: the steps that are left, and their learning rates.
        references: add reference log-probabilities to preference pairs; None where the loss needs
            none.
    """

    samples: Samples
    step: TrainStep
    start: StartState
    loader: DataLoader
    step_range: StepRange
    references: References | None = None


def folder_of_references(start: StartState, run_folder: Path) -> Path:
    """The run folder whose reference log-probabilities a resumed run reads: that of its checkpoint,
    or its own, where that is a snapshot in memory.
    """
    if start.path is None:
        return run_folder
    source = Path(start.path).parent.parent
    if (source / FOLDER).is_dir():
        return source
    return run_folder
