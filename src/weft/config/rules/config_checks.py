"""The checks of a run config: every rule for combinations of keys, bound to the sections of a run, with values to try instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from weft.config.rules import layout, sections, suggestions, unused_keys
from weft.config.rules.checks import Check, Suggestion
from weft.config.run import Run, plan_of, recompute_of
from weft.config.schema import ParallelConfig
from weft.core.dimension import Dimension, dimensions
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.errors import Fault


def config_checks(run: Run) -> tuple[Check, ...]:
    """The rules for combinations of keys, bound to the sections of this run; a fault keeps its own
    fix where no suggestion removes it.
    """
    mesh = run.device_mesh
    model = run.model
    data = run.data
    batch = run.batch
    pipeline = run.pipeline
    parallel = run.parallel
    seq_len = data.seq_len
    lengths = partial(
        suggestions.lengths, mesh, model, seq_len=seq_len, sequence_parallel=parallel.sequence
    )
    return (
        *_checks_of_dimensions(mesh, model, parallel),
        Check(
            reads=("mesh", "batch"),
            find=partial(layout.batch_divides, mesh, batch),
            suggest=partial(suggestions.batch_sizes, mesh, batch),
        ),
        Check(
            reads=("mesh", "batch", "model"),
            find=partial(layout.statistics_are_of_ranks, mesh, batch, model),
            suggest=partial(suggestions.sizes_of_statistics, mesh, batch),
        ),
        Check(
            reads=("mesh", "model", "pipeline"),
            find=partial(layout.layers_make_stages, mesh, model, pipeline, seq_len=seq_len),
            suggest=partial(suggestions.stages, mesh, model, pipeline, seq_len=seq_len),
        ),
        Check(
            reads=("mesh", "batch", "pipeline"),
            find=partial(layout.schedule_takes_sizes, mesh, batch, pipeline),
            suggest=partial(suggestions.schedules, mesh, batch, pipeline),
        ),
        Check(
            reads=("mesh", "data.seq_len", "parallel.sequence"),
            find=partial(layout.sequence_divides, mesh, model, parallel, seq_len=seq_len),
            suggest=lengths,
        ),
        Check(
            reads=("model", "parallel.sequence"),
            find=partial(layout.sequence_parallel_has_sequences, model, parallel),
            suggest=suggestions.no_sequence_parallelism,
        ),
        Check(
            reads=("model", "data.seq_len"),
            find=partial(sections.sequence_fits_model, model, seq_len=seq_len),
            suggest=lengths,
        ),
        Check(
            reads=("model.vocab", "data.source", "data.tokenizer"),
            find=partial(sections.vocabulary_holds_bytes, model, data),
            suggest=_no_suggestions,
        ),
        Check(
            reads=("precision",),
            find=partial(sections.number_types_fit, run.precision),
            suggest=_no_suggestions,
        ),
        Check(
            reads=("deterministic", "mesh", "batch", "parallel.zero", "optim"),
            find=partial(
                layout.order_is_fixed, mesh, batch, parallel, run.optim, is_wanted=run.deterministic
            ),
        ),
        Check(
            reads=("parallel", "precision", "pipeline"),
            find=partial(products_take_chunks, run),
            suggest=_no_suggestions,
        ),
        Check(
            reads=("compile", "mesh", "batch", "pipeline", "parallel.recompute"),
            find=partial(blocks_can_be_compiled, run),
        ),
        Check(
            reads=("mesh", "pipeline.chunks", "parallel.recompute"),
            find=partial(stages_can_recompute, run),
            suggest=_no_suggestions,
        ),
        Check(("mesh", "site"), partial(layout.sites_exist, mesh, run.site)),
        Check(
            reads=("mesh", "precision", "deterministic"),
            find=partial(
                layout.sites_take_options, mesh, run.precision, deterministic=run.deterministic
            ),
        ),
        Check(("loss", "model"), partial(sections.preference_loss_fits, run.loss, model)),
        Check(("loss", "model", "data"), partial(sections.scores_fit, run.loss, model, data)),
        Check(("neftune", "model"), partial(sections.noise_is_of_tokens, run.neftune, model)),
        Check(("dpo",), partial(unused_keys.pair_loss_reads_keys, run.dpo)),
        Check(("eval", "save.best"), partial(sections.evaluations_exist, run.eval, run.save)),
        Check(("guard",), partial(sections.guard_factors_are_above_one, run.guard)),
        Check(("lora", "model"), partial(sections.targets_exist, run.lora, model)),
        Check(("lora", "model"), partial(sections.rank_is_low, run.lora, model)),
        Check(("precision", "model"), partial(sections.fp8_names_exist, run.precision, model)),
        Check(("lora", "model"), partial(sections.base_is_quantizable, run.lora, model)),
        Check(
            ("profile", "steps"), partial(sections.profile_faults, run.profile, num_steps=run.steps)
        ),
        Check(
            reads=("model", "sample"),
            find=partial(unused_keys.sample_is_text, model, run.sample, seq_len=seq_len),
        ),
        Check(("model", "data"), partial(unused_keys.text_options_are_of_text, model, data)),
        Check(("alert",), partial(sections.secret_faults, run.alert)),
        Check(("data",), partial(unused_keys.sources_are_one_or_mixed, data)),
        Check(("hardware", "stack"), partial(sections.stack_faults, run.hardware, run.stack)),
        Check(
            reads=("hardware", "mesh"),
            find=partial(sections.hardware_faults, run.hardware, num_ranks=mesh.size),
        ),
        Check(
            reads=("transport", "port", "run", "save"),
            find=partial(
                unused_keys.ranks_are_supervised, run.transport, run.run, run.save, port=run.port
            ),
        ),
        Check(("run",), partial(unused_keys.full_mesh_is_elastic, run.run)),
    )


def _checks_of_dimensions(
    mesh: Mesh, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[Check]:
    """The checks that follow from the records of the dimensions."""
    for dimension in dimensions().values():
        axis = dimension.name
        if dimension.params:
            yield Check(
                reads=("mesh", "model"),
                find=partial(layout.axis_divides, mesh, model, axis),
                suggest=partial(_dividing_degrees, mesh, model, axis),
            )
        if dimension.faults is not None:
            yield Check(
                reads=("mesh", "model", "parallel"),
                find=partial(layout.dimension_faults, mesh, model, parallel, mesh_axis=axis),
                suggest=partial(_alternatives, mesh, model, parallel, dimension),
            )


def _no_suggestions() -> Iterable[Suggestion]:
    """Suggest nothing: the fault names a fix itself."""
    return ()


def _dividing_degrees(mesh: Mesh, model: ModelConfig, mesh_axis: str) -> Iterator[Suggestion]:
    """Degrees of the axis that divide the sizes it shards."""
    sizes = layout.sharded_sizes(model, mesh_axis).values()
    yield from suggestions.degrees_of_axis(mesh, mesh_axis, layout.divisors(*sizes))


def _alternatives(
    mesh: Mesh, model: ModelConfig, parallel: ParallelConfig, dimension: Dimension
) -> Iterator[Suggestion]:
    """The alternatives that a dimension names, then smaller degrees of its axis that it takes."""
    for key, value in dimension.alternatives:
        yield {key: value}
    for suggestion in suggestions.smaller_degrees(mesh, dimension.name):
        smaller = Mesh.parse(suggestion["mesh"])
        if not any(layout.dimension_faults(smaller, model, parallel, mesh_axis=dimension.name)):
            yield suggestion


def stages_can_recompute(run: Run) -> Iterator[Fault]:
    """A policy of recomputation for each stage names as many as there are."""
    return recompute_of(run).faults(run.num_stages)


def blocks_can_be_compiled(run: Run) -> Iterator[Fault]:
    """Compiled blocks: the layout leaves their inside as it is."""
    if run.compile == "blocks":
        yield from plan_of(run).compile_faults()


def products_take_chunks(run: Run) -> Iterator[Fault]:
    """Products of tensor-parallel linears in chunks of whole sequences."""
    key, off = "parallel.tp_overlap", "--parallel.tp_overlap False"
    if not run.parallel.tp_overlap:
        return
    if not run.parallel.sequence:
        what = "sends parts of sequences, which ranks have under sequence parallelism"
        yield Fault(
            key,
            what,
            got="True",
            need="parallel.sequence True",
            fix=f"--parallel.sequence True, or {off}",
        )
    if run.precision.linears == "fp8":
        what = "multiplies parts of the sequence, and linears in fp8 have scales over ranks"
        yield Fault(
            key, what, got="True", need="False", fix=f"{off}, or --precision.linears default"
        )
    if plan_of(run).splits_backward:
        what = f"does not go with {run.pipeline.schedule}, which splits the backward of each block in two"
        fix = f"{off}, or --pipeline.schedule 1f1b or interleaved"
        yield Fault(key, what, got="True", need="False", fix=fix)
