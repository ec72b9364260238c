"""Owns whether the parts of a run fit together: mesh, model, batch, pipeline, sequence; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.config import suggestions
from weft.config.checks import Check, nothing
from weft.config.run import Run
from weft.core.axes import EXPERT_RULE, TENSOR_RULE, Rule
from weft.core.precision import dtype_faults
from weft.core.sequence import length_unit
from weft.errors import Fault, UserError, did_you_mean
from weft.layout.stages import split_by_cost, split_by_counts
from weft.schedule.catalog import SCHEDULES, find

RULE: Rule = {**TENSOR_RULE, **EXPERT_RULE}
UNEVEN_AXES = ("vocab",)
"""Logical axes that are cut into parts of unequal length where their mesh axis does not divide them."""
MOST_MICRO = 2**16
"""Micro-batches of one step on one rank; their schedule is a table."""
BYTES = 256
"""Number of different byte tokens."""


def axes_divide(run: Run) -> Iterable[Fault]:
    """Every logical axis of the model divides by the degree of the mesh axis that cuts it."""
    return (*heads_divide(run), *experts_divide(run))


def heads_divide(run: Run) -> Iterable[Fault]:
    """Heads and feed-forward features divide over tp."""
    return _axis_divides(run, "tp")


def experts_divide(run: Run) -> Iterable[Fault]:
    """Experts divide over ep."""
    return _axis_divides(run, "ep")


def _axis_divides(run: Run, mesh_axis: str) -> Iterable[Fault]:
    degree, own = run.device_mesh.degree(mesh_axis), _cut_sizes(run, mesh_axis)
    if uneven := [axis for axis, size in own.items() if size % degree]:
        works = " or ".join(f"{mesh_axis}{number}" for number in divisors(*own.values())[-4:])
        got = ", ".join(f"{size} {axis}" for axis, size in own.items())
        what = f"{mesh_axis}{degree} does not divide the model's {', '.join(uneven)}"
        yield Fault("mesh", what, got, "a divisor of each", f"use {works}")


def _cut_sizes(run: Run, mesh_axis: str) -> dict[str, int]:
    """Units of the logical axes that a mesh axis cuts into even parts."""
    sizes = run.model.axis_sizes()
    return {axis: size for axis, size in sizes.items() if RULE.get(axis) == mesh_axis and axis not in UNEVEN_AXES}


def experts_exist(run: Run) -> Iterable[Fault]:
    """Only a mixture of experts has something to spread over ep."""
    degree = run.device_mesh.degree("ep")
    if degree > 1 and "experts" not in run.model.axis_sizes():
        what = f"ep{degree} spreads experts, and {run.model.name} has none"
        yield Fault("mesh", what, repr(run.mesh), "a mixture of experts such as deepseek", f"dp{degree} instead")


def batch_divides(run: Run) -> Iterable[Fault]:
    """The global batch is a whole number of micro-batches on every data rank."""
    ranks, micro, size = run.num_data_ranks, run.batch.micro_size, run.batch.global_size
    if size % (ranks * micro):
        need = f"a multiple of {ranks * micro} = {ranks} data rank{'s' * (ranks > 1)} x micro_size {micro}"
        yield Fault("batch.global_size", "does not divide into micro-batches", str(size), need)
    elif size // (ranks * micro) > MOST_MICRO:
        got = f"{size // (ranks * micro)} on each of {ranks} data ranks"
        yield Fault("batch.micro_size", "makes too many micro-batches", got, f"at most {MOST_MICRO}")


def layers_make_stages(run: Run) -> Iterable[Fault]:
    """There is a layer for every stage, and `pipeline.split` names all of them."""
    blocks, split = run.model.block_specs(run.data.seq_len), run.pipeline.split
    if split and len(split) != run.num_stages:
        need = f"{run.num_stages} = pp{run.device_mesh.degree('pp')} x {run.pipeline.chunks} chunks"
        got = f"{len(split)}: {words(split)}"
        yield Fault("pipeline.split", "names another number of stages", got, need, "leave pipeline.split out")
        return
    try:
        if split:
            split_by_counts(blocks, split)
        else:
            split_by_cost(blocks, run.num_stages)
    except UserError as error:
        key = "pipeline.split" if split else "pipeline.chunks" if run.pipeline.chunks > 1 else "mesh"
        yield from (replace(fault, key=key) for fault in error.faults)


def schedule_takes_sizes(run: Run) -> Iterable[Fault]:
    """The schedule exists, and there is a table for this many ranks, chunks and micro-batches."""
    try:
        schedule = find(run.pipeline.schedule)
    except UserError as error:
        return error.faults
    except (OSError, UnicodeDecodeError) as error:
        fix = did_you_mean(run.pipeline.schedule, SCHEDULES)
        return (
            Fault("pipeline.schedule", "cannot read a table there", f"{run.pipeline.schedule!r}: {error}", fix=fix),
        )
    faults = schedule.faults(
        ranks=run.device_mesh.degree("pp"), chunks=run.pipeline.chunks, microbatches=max(run.num_micro, 1)
    )
    is_whole = not any(batch_divides(run))
    return tuple(fault for fault in faults if is_whole or fault.key == "pipeline.chunks")


def sequence_divides(run: Run) -> Iterable[Fault]:
    """Each sequence is cut into two chunks a cp rank, and under sequence parallelism each tp rank holds an equal part."""
    cp, tp, length = run.device_mesh.degree("cp"), run.device_mesh.degree("tp"), run.data.seq_len
    unit = length_unit(run.device_mesh, sequence_parallel=run.parallel.sequence)
    if run.model.kind == "tokens" and length % unit:
        why = [f"two chunks for each of cp{cp}"] * (cp > 1) + [
            f"tp{tp} under parallel.sequence"
        ] * run.parallel.sequence
        what = f"does not divide by {' x '.join([f'cp{cp}'] * (cp > 1) + [f'tp{tp}'] * run.parallel.sequence)}"
        need = f"a multiple of {unit}: {', '.join(why)}"
        yield Fault("data.seq_len", what, str(length), need)


def parts_are_of_sequences(run: Run) -> Iterable[Fault]:
    """Sequence parallelism cuts activations of sequences."""
    if run.parallel.sequence and run.model.kind != "tokens":
        what = f"cuts activations along the sequence, and {run.model.name} reads {run.model.kind}"
        yield Fault("parallel.sequence", what, "True", "False")


def context_has_sequences(run: Run) -> Iterable[Fault]:
    """Only sequences can be cut along their length."""
    if (degree := run.device_mesh.degree("cp")) > 1 and run.model.kind != "tokens":
        what = f"cp cuts sequences, and {run.model.name} reads {run.model.kind}"
        yield Fault("mesh", what, f"cp{degree}", "no cp")


def heads_change_for_columns(run: Run) -> Iterable[Fault]:
    """Ulysses gives every cp rank a share of the heads that a tp rank holds."""
    cp, tp = run.device_mesh.degree("cp"), run.device_mesh.degree("tp")
    sizes = {axis: size for axis, size in run.model.axis_sizes().items() if axis in ("heads", "kv_heads")}
    own = {axis: size // tp for axis, size in sizes.items()}
    if run.parallel.context != "ulysses" or any(axes_divide(run)) or not any(size % cp for size in own.values()):
        return
    got = ", ".join(f"{size} {axis}" for axis, size in own.items()) + (f" on each of tp{tp}" if tp > 1 else "")
    what = f"ulysses deals heads out over cp{cp}, which does not divide {', '.join(a for a in own if own[a] % cp)}"
    yield Fault("parallel.context", what, got, "a divisor of each")


def sequence_fits_model(run: Run) -> Iterable[Fault]:
    """The model takes sequences of this length."""
    fault = run.model.check_seq_len(run.data.seq_len)
    return () if fault is None else (fault,)


def vocabulary_holds_bytes(run: Run) -> Iterable[Fault]:
    """Where the default text is read as bytes, the model knows all of them; other sources are looked at when they are opened."""
    size = run.model.axis_sizes().get("vocab", BYTES)
    is_text = run.model.kind == "tokens" and run.data.source == "stdlib" and not run.data.mix
    if run.data.tokenizer == "bytes" and is_text and size < BYTES:
        fix = f"--model.vocab {BYTES}"
        yield Fault("model.vocab", "is smaller than the tokenizer's", str(size), f"at least {BYTES} for bytes", fix)


def number_types_fit(run: Run) -> Iterable[Fault]:
    """Nothing is kept or summed with fewer digits than it is computed with."""
    kinds = run.precision
    return dtype_faults(params=kinds.params, compute=kinds.compute, reduce=kinds.reduce)


def divisors(*numbers: int) -> tuple[int, ...]:
    """Numbers that divide all of `numbers`, ascending."""
    return tuple(each for each in range(1, min(numbers) + 1) if not any(number % each for number in numbers))


def words(counts: Sequence[int]) -> str:
    """Numbers as the words of a flag."""
    return " ".join(map(str, counts))


CHECKS = (
    Check(
        ("mesh", "model"),
        heads_divide,
        lambda run: suggestions.meshes(run, "tp", divisors(*_cut_sizes(run, "tp").values())),
    ),
    Check(
        ("mesh", "model"),
        experts_divide,
        lambda run: suggestions.meshes(run, "ep", divisors(*_cut_sizes(run, "ep").values())),
    ),
    Check(("mesh", "model"), experts_exist, lambda run: suggestions.meshes(run, "ep", [1])),
    Check(("mesh", "batch"), batch_divides, suggestions.batches),
    Check(("mesh", "model", "pipeline"), layers_make_stages, suggestions.stages),
    Check(("mesh", "batch", "pipeline"), schedule_takes_sizes, suggestions.schedules),
    Check(("mesh", "data.seq_len", "parallel.sequence"), sequence_divides, suggestions.lengths),
    Check(("model", "parallel.sequence"), parts_are_of_sequences, suggestions.no_sequence_parallelism),
    Check(("mesh", "model"), context_has_sequences, lambda run: suggestions.meshes(run, "cp", [1])),
    Check(("mesh", "model", "parallel.context"), heads_change_for_columns, suggestions.contexts),
    Check(("model", "data.seq_len"), sequence_fits_model, suggestions.lengths),
    Check(("model.vocab", "data.source", "data.tokenizer"), vocabulary_holds_bytes, nothing),
    Check(("precision",), number_types_fit, nothing),
)
"""A fault's own fix stands where none of the mends passes."""
