"""Validation of a run config: whether mesh, model, batch, pipeline and sequence fit together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from weft.config import lora, sites, suggestions, unused_keys
from weft.config.checks import Check, Suggestion
from weft.config.hardware import hardware_faults
from weft.config.run import Run
from weft.config.schema import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    GuardConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    SaveConfig,
    label_of,
)
from weft.core.dimension import (
    Dimension,
    LayoutOptions,
    LayoutRequest,
    activation_axes,
    all_axes,
    data_axis,
    default_sharding_rule,
    dimensions,
    pipeline_axis,
    position_axes,
    sequence_axes,
    uneven_axes,
)
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.precision import dtype_faults
from weft.core.sequence import length_unit
from weft.errors import Fault, UserError, counted, did_you_mean
from weft.layout.stages import check_number_of_stages, check_stage_limit, split_by_counts
from weft.schedule.catalog import SCHEDULES, find

MOST_MICROBATCHES = 2**16
"""Largest number of micro-batches of one step on one rank; their schedule is a table."""
NUM_BYTES = 256
"""Number of byte tokens."""


def config_checks(run: Run) -> tuple[Check, ...]:
    """The rules for combinations of keys, bound to the sections of this run; a fault keeps its own
    fix where no suggestion removes it.
    """
    mesh, model, data = run.device_mesh, run.model, run.data
    batch, pipeline, parallel = run.batch, run.pipeline, run.parallel
    seq_len = data.seq_len
    lengths = partial(
        suggestions.lengths,
        mesh,
        model,
        seq_len=seq_len,
        sequence_parallel=parallel.sequence,
    )
    return (
        *_checks_of_dimensions(mesh, model, parallel),
        Check(
            ("mesh", "batch"),
            partial(batch_divides, mesh, batch),
            partial(suggestions.batch_sizes, mesh, batch),
        ),
        Check(
            ("mesh", "model", "pipeline"),
            partial(layers_make_stages, mesh, model, pipeline, seq_len=seq_len),
            partial(suggestions.stages, mesh, model, pipeline, seq_len=seq_len),
        ),
        Check(
            ("mesh", "batch", "pipeline"),
            partial(schedule_takes_sizes, mesh, batch, pipeline),
            partial(suggestions.schedules, mesh, batch, pipeline),
        ),
        Check(
            ("mesh", "data.seq_len", "parallel.sequence"),
            partial(sequence_divides, mesh, model, parallel, seq_len=seq_len),
            lengths,
        ),
        Check(
            ("model", "parallel.sequence"),
            partial(sequence_parallel_has_sequences, model, parallel),
            suggestions.no_sequence_parallelism,
        ),
        Check(
            ("model", "data.seq_len"),
            partial(sequence_fits_model, model, seq_len=seq_len),
            lengths,
        ),
        Check(
            ("model.vocab", "data.source", "data.tokenizer"),
            partial(vocabulary_holds_bytes, model, data),
            _no_suggestions,
        ),
        Check(
            ("precision",),
            partial(number_types_fit, run.precision),
            _no_suggestions,
        ),
        Check(
            ("deterministic", "mesh", "batch", "parallel.zero", "optim"),
            partial(order_is_fixed, mesh, batch, parallel, run.optim, is_wanted=run.deterministic),
        ),
        Check(("mesh", "site"), partial(sites.sites_exist, mesh, run.site)),
        Check(
            ("mesh", "precision", "deterministic"),
            partial(
                sites.sites_take_options,
                mesh,
                run.precision,
                deterministic=run.deterministic,
            ),
        ),
        Check(("loss", "model"), partial(preference_loss_fits, run.loss, model)),
        Check(("eval", "save.best"), partial(evaluations_exist, run.eval, run.save)),
        Check(("guard",), partial(guard_factors_are_above_one, run.guard)),
        Check(("lora", "model"), partial(lora.targets_exist, run.lora, model)),
        Check(("lora", "model"), partial(lora.rank_is_low, run.lora, model)),
        Check(("model", "sample"), partial(unused_keys.sample_is_text, model, run.sample)),
        Check(("data",), partial(unused_keys.sources_are_one_or_mixed, data)),
        Check(
            ("hardware", "mesh"),
            partial(hardware_faults, run.hardware, num_ranks=mesh.size),
        ),
        Check(
            ("transport", "port", "run", "save"),
            partial(
                unused_keys.ranks_are_supervised,
                run.transport,
                run.run,
                run.save,
                port=run.port,
            ),
        ),
        Check(("run",), partial(unused_keys.full_mesh_is_elastic, run.run)),
    )


def _checks_of_dimensions(
    mesh: Mesh,
    model: ModelConfig,
    parallel: ParallelConfig,
) -> Iterator[Check]:
    """The checks that follow from the records of the dimensions."""
    for dimension in dimensions().values():
        axis = dimension.name
        if dimension.params:
            yield Check(
                ("mesh", "model"),
                partial(axis_divides, mesh, model, axis),
                partial(_dividing_degrees, mesh, model, axis),
            )
        if dimension.faults is not None:
            yield Check(
                ("mesh", "model", "parallel"),
                partial(dimension_faults, mesh, model, parallel, mesh_axis=axis),
                partial(_alternatives, mesh, dimension),
            )


def axes_divide(mesh: Mesh, model: ModelConfig) -> Iterator[Fault]:
    """Every logical axis of the model divides by the degree of the mesh axis that shards it."""
    for axis in all_axes():
        yield from axis_divides(mesh, model, axis)


def axis_divides(
    mesh: Mesh,
    model: ModelConfig,
    mesh_axis: str,
) -> Iterator[Fault]:
    """The logical axes that one mesh axis shards divide by its degree."""
    degree = mesh.degree(mesh_axis)
    sizes = _sharded_sizes(model, mesh_axis)
    uneven = [axis for axis, size in sizes.items() if size % degree]
    if not uneven:
        return
    largest = divisors(*sizes.values())[-4:]
    choices = [f"{mesh_axis}{divisor}" for divisor in largest]
    yield Fault(
        "mesh",
        f"{mesh_axis}{degree} does not divide the model's {', '.join(uneven)}",
        got=", ".join(f"{size} {axis}" for axis, size in sizes.items()),
        need="a divisor of each",
        fix=f"use {' or '.join(choices)}",
    )


def _sharded_sizes(model: ModelConfig, mesh_axis: str) -> dict[str, int]:
    """Units of the logical axes that a mesh axis shards into equal parts."""
    sharded = dimensions()[mesh_axis].params
    may_be_uneven = uneven_axes()
    sizes: dict[str, int] = {}
    for axis, size in model.axis_sizes().items():
        if axis in sharded and axis not in may_be_uneven:
            sizes[axis] = size
    return sizes


def dimension_faults(
    mesh: Mesh,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    mesh_axis: str,
) -> Iterator[Fault]:
    """What the record of a dimension rejects, where the mesh has more than one rank along it."""
    find_faults = dimensions()[mesh_axis].faults
    if find_faults is not None and mesh.degree(mesh_axis) > 1:
        yield from find_faults(layout_request(mesh, model, parallel))


def layout_request(
    mesh: Mesh,
    model: ModelConfig,
    parallel: ParallelConfig,
) -> LayoutRequest:
    """The layout of a run, as dimensions read it."""
    rule = default_sharding_rule()
    axis_sizes = model.axis_sizes()
    local_sizes: dict[str, int] = {}
    for axis, size in axis_sizes.items():
        degree = mesh.degree(rule[axis]) if axis in rule else 1
        if size % degree == 0:
            local_sizes[axis] = size // degree
    return LayoutRequest(
        degrees={axis: mesh.degree(axis) for axis in all_axes()},
        model_name=label_of(model.family),
        model_kind=model.kind,
        local_sizes=local_sizes,
        axis_sizes=axis_sizes,
        options=LayoutOptions(
            sequence_parallel=parallel.sequence,
            context=parallel.context,
            zero=parallel.zero,
        ),
    )


def batch_divides(mesh: Mesh, batch: BatchConfig) -> Iterator[Fault]:
    """The global batch is a whole number of micro-batches on every data rank."""
    ranks, micro_size, global_size = (
        mesh.degree(sequence_axes()),
        batch.micro_size,
        batch.global_size,
    )
    unit = ranks * micro_size
    data_ranks = counted(ranks, "data rank")
    if global_size % unit:
        yield Fault(
            "batch.global_size",
            "does not divide into micro-batches",
            got=str(global_size),
            need=f"a multiple of {unit} = {data_ranks} x micro_size {micro_size}",
        )
    elif global_size // unit > MOST_MICROBATCHES:
        yield Fault(
            "batch.micro_size",
            "makes too many micro-batches",
            got=f"{global_size // unit} on each of {data_ranks}",
            need=f"at most {MOST_MICROBATCHES}",
        )


def layers_make_stages(
    mesh: Mesh,
    model: ModelConfig,
    pipeline: PipelineConfig,
    *,
    seq_len: int,
) -> Iterator[Fault]:
    """There is a layer for every stage, and `pipeline.split` counts all of them."""
    num_ranks = mesh.degree(pipeline_axis())
    num_stages = num_ranks * pipeline.chunks
    split = pipeline.split
    if split and len(split) != num_stages:
        chunks = counted(pipeline.chunks, "chunk")
        yield Fault(
            "pipeline.split",
            "names another number of stages",
            got=f"{len(split)}: {as_words(split)}",
            need=f"{num_stages} = {pipeline_axis()}{num_ranks} x {chunks}",
            fix="leave pipeline.split out",
        )
        return
    try:
        check_stage_limit(num_stages)  # before the blocks of thousands of layers are made
        blocks = model.block_specs(seq_len)
        if split:
            split_by_counts(blocks, split)
        else:
            check_number_of_stages(blocks, num_stages)
    except UserError as error:
        key = _stage_key(pipeline)
        for fault in error.faults:
            yield replace(fault, key=key)


def _stage_key(pipeline: PipelineConfig) -> str:
    """The key that decides the number of stages."""
    if pipeline.split:
        return "pipeline.split"
    return "pipeline.chunks" if pipeline.chunks > 1 else "mesh"


def schedule_takes_sizes(
    mesh: Mesh,
    batch: BatchConfig,
    pipeline: PipelineConfig,
) -> Iterator[Fault]:
    """The schedule exists, and has a table for this many ranks, chunks and micro-batches."""
    name = pipeline.schedule
    try:
        schedule = find(name, pipeline.table)
    except UserError as error:
        yield from error.faults
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Fault(
            "pipeline.schedule",
            "cannot read a table there",
            got=f"{name!r}: {error}",
            fix=did_you_mean(name, SCHEDULES),
        )
        return
    faults = schedule.faults(
        ranks=mesh.degree(pipeline_axis()),
        chunks=pipeline.chunks,
        microbatches=max(batch.num_micro(mesh.degree(sequence_axes())), 1),
    )
    batch_is_whole = not any(batch_divides(mesh, batch))
    for fault in faults:
        if batch_is_whole or fault.key == "pipeline.chunks":
            yield fault


def sequence_divides(
    mesh: Mesh,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    seq_len: int,
) -> Iterator[Fault]:
    """A sequence splits into two chunks a context rank and, under sequence parallelism, equal parts
    for the tensor ranks.
    """
    unit = length_unit(mesh, sequence_parallel=parallel.sequence)
    if model.kind != "tokens" or seq_len % unit == 0:
        return
    axes: list[str] = []
    reasons: list[str] = []
    for axis in position_axes():
        if mesh.degree(axis) > 1:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"two chunks for each of {axes[-1]}")
    for axis in activation_axes():
        if parallel.sequence:
            axes.append(f"{axis}{mesh.degree(axis)}")
            reasons.append(f"{axes[-1]} under parallel.sequence")
    yield Fault(
        "data.seq_len",
        f"does not divide by {' x '.join(axes)}",
        got=str(seq_len),
        need=f"a multiple of {unit}: {', '.join(reasons)}",
    )


def sequence_parallel_has_sequences(
    model: ModelConfig, parallel: ParallelConfig
) -> Iterator[Fault]:
    """Sequence parallelism shards activations of sequences."""
    if parallel.sequence and model.kind != "tokens":
        yield Fault(
            "parallel.sequence",
            f"shards activations along the sequence, and {label_of(model.family)} reads {model.kind}",
            got="True",
            need="False",
        )


def sequence_fits_model(model: ModelConfig, *, seq_len: int) -> Iterator[Fault]:
    """The model takes sequences of this length."""
    fault = model.check_seq_len(seq_len)
    if fault is not None:
        yield fault


def vocabulary_holds_bytes(model: ModelConfig, data: DataConfig) -> Iterator[Fault]:
    """Where the default text is read as bytes, the vocabulary has all of them; other sources are
    checked when opened.
    """
    is_default_text = model.kind == "tokens" and data.source == "stdlib" and not data.mix
    if not is_default_text or data.tokenizer != "bytes":
        return
    size = model.axis_sizes().get("vocab", NUM_BYTES)
    if size < NUM_BYTES:
        yield Fault(
            "model.vocab",
            "is smaller than the tokenizer's",
            got=str(size),
            need=f"at least {NUM_BYTES} for bytes",
            fix=f"--model.vocab {NUM_BYTES}",
        )


def number_types_fit(precision: PrecisionConfig) -> Iterable[Fault]:
    """Parameters and gradient sums are at least as precise as the computation."""
    return dtype_faults(
        params=precision.params,
        compute=precision.compute,
        reduce=precision.reduce,
    )


def order_is_fixed(
    mesh: Mesh,
    batch: BatchConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    *,
    is_wanted: bool,
) -> Iterator[Fault]:
    """Deterministic runs: sums over micro-batches and data ranks are one binary tree."""
    if not is_wanted or any(batch_divides(mesh, batch)):
        return
    data = data_axis()
    others = [axis for axis in sequence_axes() if axis != data]
    degree = mesh.degree(data)
    num_micro = batch.global_size // (batch.micro_size * mesh.degree(tuple(others)))
    key, fix = "deterministic", "leave deterministic out"
    if degree & (degree - 1):
        yield Fault(
            key,
            "adds gradients in a binary tree over the data ranks",
            got=f"{data}{degree}",
            need="a power of two",
            fix=fix,
        )
    elif num_micro & (num_micro - 1):
        yield Fault(
            key,
            "adds gradients in a binary tree over the micro-batches of a step",
            got=f"{num_micro} over all data ranks",
            need="a power of two",
            fix=f"change batch.global_size or batch.micro_size, or {fix}",
        )
    names = [name for name, _ in mesh.axes]
    for axis in others:
        is_outside = mesh.degree(axis) > 1 < degree and names.index(axis) < names.index(data)
        if is_outside:
            yield Fault(
                key,
                f"assigns micro-batches to {data} first",
                got=str(mesh),
                need=f"{data} before {axis}",
                fix=f"move {axis} behind {data} in the mesh",
            )
    rules = {optim.name, *(group.optimizer for group in optim.groups)}
    if "adafactor" in rules and parallel.zero:
        yield Fault(
            key,
            "adafactor adds sums of rows and columns over the ranks of ZeRO",
            got=f"parallel.zero {parallel.zero}",
            need="0",
            fix=f"--parallel.zero 0, or {fix}",
        )


def preference_loss_fits(loss: str, model: ModelConfig) -> Iterator[Fault]:
    """The loss of preference pairs is that of the last block alone."""
    if loss != "dpo":
        return
    if model.kind != "tokens":
        yield Fault("loss", f"dpo compares texts, and {model.family} reads {model.kind}", got="dpo")
    for field in ("mtp_depth", "balance_loss"):
        value = getattr(model, field, 0)
        if value:
            what = "dpo has no extra loss: it would be weighed by pairs instead of tokens"
            yield Fault(f"model.{field}", what, f"{value:g}", "0", f"--model.{field} 0")


def evaluations_exist(evaluation: EvalConfig, save: SaveConfig) -> Iterator[Fault]:
    """The best checkpoint and early stopping need evaluations."""
    for key, is_used in (("save.best", save.best), ("eval.patience", evaluation.patience > 0)):
        if is_used and not evaluation.every:
            what = "the run has no evaluations to compare"
            yield Fault(key, what, "eval.every 0", "evaluations", "--eval.every 100")


def guard_factors_are_above_one(guard: GuardConfig) -> Iterator[Fault]:
    """A spike is larger than the losses before it, and a straggler slower than its equals."""
    factors = {
        "spike": (guard.spike, "every loss would be a spike"),
        "stragglers": (guard.stragglers, "every rank would be a straggler"),
    }
    for name, (factor, what) in factors.items():
        if 0 < factor <= 1:
            yield Fault(
                f"guard.{name}",
                what,
                got=f"{factor:g}",
                need="above 1, or 0",
                fix=f"--guard.{name} 3",
            )
    if guard.on_spike == "rollback" and not guard.spike:
        yield Fault(
            "guard.on_spike",
            "no loss counts as a spike",
            got="rollback with guard.spike 0",
            fix="--guard.spike 3, or leave guard.on_spike out",
        )


def divisors(*numbers: int) -> tuple[int, ...]:
    """Common divisors of all `numbers`, ascending."""
    candidates = range(1, min(numbers) + 1)
    return tuple(each for each in candidates if all(number % each == 0 for number in numbers))


def as_words(counts: Sequence[int]) -> str:
    """Numbers as the words of a flag."""
    return " ".join(map(str, counts))


def _no_suggestions() -> Iterable[Suggestion]:
    """None: the fault names a fix itself."""
    return ()


def _dividing_degrees(
    mesh: Mesh,
    model: ModelConfig,
    mesh_axis: str,
) -> Iterator[Suggestion]:
    """Degrees of the axis that divide the sizes it shards."""
    sizes = _sharded_sizes(model, mesh_axis).values()
    yield from suggestions.degrees_of_axis(mesh, mesh_axis, divisors(*sizes))


def _alternatives(mesh: Mesh, dimension: Dimension) -> Iterator[Suggestion]:
    """The alternatives that a dimension names, then smaller degrees of its axis."""
    for key, value in dimension.alternatives:
        yield {key: value}
    yield from suggestions.smaller_degrees(mesh, dimension.name)
