"""The peak memory of the ranks on this machine, measured on the meta device before they start, if it may be too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from weft.commands.environment import has_gpus
from weft.commands.memory_bound import (
    local_activations,
    local_states,
    machine_bytes,
    num_local_ranks,
)
from weft.config.hardware import hardware_of_cuda
from weft.config.run import Run, plan_of
from weft.core.dimension import pipeline_axis
from weft.errors import ConfigError, Fault, counted
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure, size_problem
from weft.run.devices import fork_problem, gpu_names
from weft.run.forked_answer import FAILURE, Answer, ForkedAnswer
from weft.view.quantity import memory

MEASURED_FROM = 0.25
"""A run is measured where its states and activations are estimated to need more than this share of
the memory: smaller ones start at once.
"""


def check_memory(run: Run) -> None:
    """Compare the peaks of the local ranks with the memory of this machine, or with a GPU's.

    Raises:
        ConfigError: they are larger.
    """
    is_on_gpu = has_gpus(run.device)
    available = _gpu_bytes() if is_on_gpu else machine_bytes()
    if available is None:
        return
    num_sharing = num_local_ranks(run) if is_on_gpu else 1
    estimate = local_states(run, run.parallel.zero) + local_activations(run)
    if estimate / num_sharing < MEASURED_FROM * available:
        return
    peaks = _measured(run)
    if peaks:
        fault = memory_fault(run, peaks, available, is_on_gpu=is_on_gpu)
        if fault is not None:
            raise ConfigError(fault)


def memory_fault(
    run: Run, peaks: Mapping[str, int], available: float, *, is_on_gpu: bool
) -> Fault | None:
    """What is too large: the fullest rank for its GPU; else all ranks of this machine together,
    whose peaks come at about the same time.

    Args:
        peaks: bytes by pipeline coordinate.
    """
    mesh = run.device_mesh
    rows = [str(mesh.index(rank, pipeline_axis())) for rank in range(num_local_ranks(run))]
    largest = max(peaks[row] for row in rows)
    needed = largest if is_on_gpu else sum(peaks[row] for row in rows)
    if needed <= available:
        return None
    ranks = counted(len(rows), "rank")
    return Fault(
        "memory",
        "a rank needs more than its GPU has" if is_on_gpu else "the ranks need more than there is",
        got=memory(needed) if is_on_gpu else f"{memory(needed)} for {ranks}",
        need=f"at most {memory(available)}",
        fix=f"{' or '.join(_smaller(run))}; weft explain shows what each part needs",
    )


def _smaller(run: Run) -> Iterator[str]:
    """What makes the ranks smaller, of what is not chosen yet."""
    if run.parallel.zero < 3 and run.num_data_ranks > 1:
        yield "--parallel.zero 3"
    if run.parallel.recompute != "full":
        yield "--parallel.recompute full"
    if run.batch.micro_size > 1:
        yield "--batch.micro_size 1"
    yield "a smaller model"


def _gpu_bytes() -> float | None:
    """Memory of the smallest GPU of this machine; None where the table does not have them all."""
    found = [hardware_of_cuda(name) for name in gpu_names()]
    sizes = [each.memory_bytes for each in found if each is not None]
    return min(sizes) if sizes and len(sizes) == len(found) else None


def _measured(run: Run) -> Mapping[str, int]:
    """The peak of each pipeline coordinate; nothing where a run cannot be measured. Ranks that are
    forked afterwards must not inherit the threads of a backward: it runs in a process of its own.
    """
    if size_problem(plan_of(run), fixed_order=run.deterministic):
        return {}
    measured = partial(_peaks, run)
    if fork_problem():
        return measured()
    forked = ForkedAnswer(measured)
    try:
        answer = forked.wait()
    finally:
        forked.end()
    return {} if FAILURE in answer else answer


def _peaks(run: Run) -> Answer:
    roles = measure(MeasuredRun.of(run))
    return {str(role.row): role.memory.peak for role in roles}
