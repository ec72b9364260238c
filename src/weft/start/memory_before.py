"""The peak memory of the ranks on this machine, measured on the meta device before they start, if it may be too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from weft.config.hardware import hardware_of_cuda
from weft.config.run import Run, plan_of
from weft.core.dimension import pipeline_axis
from weft.errors import ConfigError, Fault, counted
from weft.layout.recomputation import KEY as RECOMPUTE
from weft.run.devices import fork_problem, gpu_names
from weft.run.forked_answer import FAILURE, Answer, ForkedAnswer
from weft.start.environment import has_gpus
from weft.start.memory_bound import local_activations, local_states, machine_bytes, num_local_ranks
from weft.start.messages import print_messages
from weft.view.quantity import memory

MEASURED_FROM = 0.25
"""A run is measured where its states and activations are estimated to need more than this share of
the memory: smaller ones start at once.
"""


def check_memory(run: Run) -> None:
    """Compare the peaks of the local ranks with the memory of this machine, or with a GPU's; where
    they cannot be measured, what the config alone says, and say so.

    Raises:
        ConfigError: they are larger.
    """
    is_on_gpu = has_gpus(run.device)
    available = gpu_bytes() if is_on_gpu else machine_bytes()
    if available is None:
        return
    num_sharing = num_local_ranks(run) if is_on_gpu else 1
    estimate = local_states(run, run.parallel.zero) + local_activations(run)
    if estimate / num_sharing < MEASURED_FROM * available:
        return
    from weft.planner.measure.roles import size_problem  # late: small runs are not measured

    problem = size_problem(plan_of(run), fixed_order=run.deterministic)
    measured = run.with_values({"device": "cuda"}) if is_on_gpu else run
    answer: Answer = {FAILURE: problem} if problem else _measured(measured)
    if FAILURE not in answer:
        fault = memory_fault(run, answer["peaks"], available, is_on_gpu=is_on_gpu)
        fault = fault or host_fault(run, answer["host"], machine_bytes())
    else:
        ranks = counted(num_local_ranks(run) // num_sharing, "rank")
        states = local_states(run, run.parallel.zero) / num_sharing
        got = f"at least {memory(states)} for {ranks}"
        fault = None
        if states > available:
            fault = _too_large(run, got, available, is_on_gpu=is_on_gpu)
        print_messages((_unmeasured(answer[FAILURE], ranks, estimate / num_sharing, available),))
    if fault is not None:
        raise ConfigError(fault)


def _unmeasured(why: str, ranks: str, estimate: float, available: float) -> str:
    """That the peaks of a run are not known, and what is known."""
    return (
        f"note: memory: the peaks of the ranks are not known before the start: {why}; states and "
        f"activations of {ranks} are estimated at {memory(estimate)} of {memory(available)}"
    )


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
    ranks = "1 rank" if is_on_gpu else counted(len(rows), "rank")
    return _too_large(run, f"{memory(needed)} for {ranks}", available, is_on_gpu=is_on_gpu)


def host_fault(run: Run, host: Mapping[str, int], available: float) -> Fault | None:
    """Offloaded activations of the ranks on this machine that are larger than its memory.

    Args:
        host: bytes by pipeline coordinate.
    """
    mesh = run.device_mesh
    num_ranks = num_local_ranks(run)
    needed = sum(host[str(mesh.index(rank, pipeline_axis()))] for rank in range(num_ranks))
    if needed <= available:
        return None
    return Fault(
        RECOMPUTE,
        "the activations of the ranks are larger than the memory of their host",
        got=f"{memory(needed)} for {counted(num_ranks, 'rank')}",
        need=f"at most {memory(available)}",
        fix=f"--{RECOMPUTE} offload:N with fewer layers, or --{RECOMPUTE} full",
    )


def _too_large(run: Run, got: str, available: float, *, is_on_gpu: bool) -> Fault:
    return Fault(
        "memory",
        "a rank is larger than its GPU" if is_on_gpu else "the ranks are larger than the memory",
        got=got,
        need=f"at most {memory(available)}",
        fix=f"{' or '.join(_smaller(run))}; the same words after `weft explain` show what each part needs",
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


def gpu_bytes() -> float | None:
    """Memory of the smallest GPU of this machine; None where the table does not have them all."""
    found = [hardware_of_cuda(name) for name in gpu_names()]
    sizes = [each.memory_bytes for each in found if each is not None]
    return min(sizes) if sizes and len(sizes) == len(found) else None


def _measured(run: Run) -> Answer:
    """The peak of each pipeline coordinate, or why they cannot be measured."""
    return answer_apart(partial(_peaks, run))


def answer_apart(measure: Callable[[], Answer]) -> Answer:
    """What a function measures, or why it cannot. Ranks that are forked afterwards must not inherit
    the threads of a backward: it runs in a process of its own.
    """
    if fork_problem():
        return measure()
    forked = ForkedAnswer(measure)
    try:
        return forked.wait()
    finally:
        forked.end()


def _peaks(run: Run) -> Answer:
    from weft.planner.measure.measured_run import MeasuredRun  # late: see above
    from weft.planner.measure.roles import measure

    roles = measure(MeasuredRun.of(run))
    return {
        "peaks": {str(role.row): role.memory.peak for role in roles},
        "host": {str(role.row): role.memory.host for role in roles},
    }
