"""`weft prove --what`: which parts are asked for, the reduced run of each, and the report of their proofs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from weft.config.changed_runs import changes
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.errors import Fault, UserError, did_you_mean
from weft.prove.parts.names import ALL, PARTS, RECORDED, Coverage, Part
from weft.prove.parts.support import is_of_run, part_faults
from weft.prove.report import ProofReport
from weft.prove.rows import Rows

KEY = "--what"
DPO = "dpo"
SKIPPED_NOTE = "not provable: {}: {}"


def take_what(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words after `--what`, separated by spaces or commas, and all other words."""
    if KEY not in words:
        return [], list(words)
    start = words.index(KEY)
    stop = start + 1
    while stop < len(words) and _names_parts(words[stop], is_first=stop == start + 1):
        stop += 1
    named = ",".join(words[start + 1 : stop])
    return [name for name in named.split(",") if name], [*words[:start], *words[stop:]]


def _names_parts(word: str, *, is_first: bool) -> bool:
    """Whether a word belongs to `--what`: the first that follows does, and further known names."""
    if word.startswith("--"):
        return False
    return is_first or all(name in (*PARTS, ALL) for name in word.split(","))


def named_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts of these names, in the order of their proofs.

    Raises:
        UserError: a name is not known.
    """
    known = (*PARTS, ALL)
    need = f"any of {', '.join(known)}"
    if not names:
        fix = f"for example {KEY} resume"
        raise UserError(Fault(KEY, "names no part of a run", got="nothing", need=need, fix=fix))
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known)
            raise UserError(Fault(KEY, "no such part of a run", got=name, need=need, fix=fix))
    if ALL in names:
        return PARTS
    return tuple(part for part in PARTS if part in names)


def parts_of(run: Run) -> tuple[Part, ...]:
    """The parts that a run has."""
    mesh = run.device_mesh
    return tuple(part for part in PARTS if is_of_run(part, run.model, mesh=mesh, loss=run.loss))


def prove_run_parts(
    run: Run,
    names: Sequence[str],
    *,
    steps: int,
    full: bool = False,
    rows: Rows = "own",
    to: str | None = None,
) -> ProofReport:
    """Prove the named parts of a run.

    Args:
        names: as `take_what` returns them; with "all" what a run has not is left out.
        full: with the sizes of the run; else with reduced ones, and short rows.
        to: mesh on which the run is continued.

    Raises:
        UserError: a part cannot be proved for this run.
    """
    notes: list[str] = []
    runs: dict[Part, Run] = {}
    for part in named_parts(names):
        changed = _run_of(part, run)
        faults = tuple(_faults(part, changed, steps))
        if faults and ALL not in names:
            raise UserError(*faults)
        if faults:
            notes.append(SKIPPED_NOTE.format(part, faults[0]))
        else:
            runs[part] = changed
    from weft.prove.parts.part_proof import prove_parts  # late: it imports torch
    from weft.prove.subject import ProofCase, reduced_case

    cases = {}
    for part, changed in runs.items():
        cases[part] = ProofCase(changed, steps, rows) if full else reduced_case(changed, steps)
    report = prove_parts(cases, to=to)
    first = next(iter(cases))
    coverage = Coverage.of(tuple(cases), parts=parts_of(run), is_trained=False)
    return replace(
        report,
        reduced=changes(runs[first], cases[first].run),
        notes=(*report.notes, *notes),
        covered=coverage.covered,
        uncovered=coverage.uncovered,
    )


def trained_coverage(run: Run) -> Coverage:
    """What a proof without `--what` covers."""
    parts = parts_of(run)
    proved: Collection[Part] = [part for part in parts if part in (DPO, "sites")]
    return Coverage.of(proved, parts=parts, is_trained=True)


def recorded_coverage(run: Run) -> Coverage:
    """What a comparison with recorded steps covers."""
    found = Coverage.of((), parts=parts_of(run), is_trained=False)
    return replace(found, covered=(RECORDED,))


def _run_of(part: Part, run: Run) -> Run:
    """The run of which a part is proved: pairs are documents of a sequence."""
    if part != DPO or run.loss == DPO:
        return run
    packing = "documents" if run.data.format == "text" else run.data.packing
    return run.with_values({"loss": DPO, "data.packing": packing})


def _faults(part: Part, run: Run, steps: int) -> Iterator[Fault]:
    faults = tuple(part_faults(part, run.model, mesh=run.device_mesh, steps=steps))
    yield from faults
    if part == DPO and not faults:
        yield from run_checks(run, config_checks)
