"""`parallel.recompute = "auto"`: the least recomputation with which the ranks fit their memory, chosen before they start.

Note [Choice of recomputation]
    The choice is a function of the config and of the memory of a rank: of the device that `hardware`
    names, for commands that predict; of the smallest GPU here, or of this machine divided among its
    ranks, for those that train. A run records it, as "auto:full:2+selective/none", and a resume
    keeps it while it fits; `--parallel.recompute auto` chooses anew. Of ranks that torchrun or Slurm
    has started rank 0 chooses for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from weft.config.hardware import hardware_of_cuda
from weft.config.run import Run, hardware_of
from weft.core.dimension import pipeline_axis
from weft.errors import ConfigError, Fault, PlanError, counted
from weft.layout.recomputation import AUTO, CHOSEN, KEY, known_policy
from weft.run.forked_answer import FAILURE, Answer
from weft.run.world import detect
from weft.start.auto_mesh import recorded_value
from weft.start.environment import has_gpus
from weft.start.memory_bound import machine_bytes, num_local_ranks
from weft.view.quantity import memory

HEADROOM = 0.1
"""Share of the memory that stays free, as in `weft plan`."""


@dataclass(frozen=True)
class ChosenRecompute:
    """The value of the key that a run records, and one line that says why."""

    value: str
    note: str


class ChooseRecompute(Protocol):
    """Chooses the recomputation of a run that is valid apart from it; `is_flag`: auto is a flag."""

    def __call__(self, run: Run, *, is_flag: bool) -> ChosenRecompute: ...


@dataclass(frozen=True)
class _Memory:
    """What a rank may hold, in bytes, and of what that is a share."""

    num_bytes: float
    name: str


def choose_recompute(run: Run, *, is_flag: bool, before_ranks: bool = False) -> ChosenRecompute:
    """The recomputation that a resumed run has recorded, if it fits and none is asked for by a flag;
    else the least one that fits. See Note [Choice of recomputation].

    Args:
        before_ranks: ranks are started afterwards, on the devices that are here.

    Raises:
        UserError: the memory of the GPUs is not known, or the run cannot be measured.
    """
    choose = partial(_choose_here, run, is_flag=is_flag, before_ranks=before_ranks)
    world = detect(os.environ)
    if world is None:
        return choose()
    from weft.start.shared_choice import choose_once, shared_store  # late: it imports torch

    store = shared_store(world, key=KEY)
    if store is None:
        return choose()
    return ChosenRecompute(**choose_once(lambda: asdict(choose()), store, world, key=KEY))


def choose_recompute_before_ranks(run: Run, *, is_flag: bool) -> ChosenRecompute:
    """`choose_recompute` for a command that starts ranks."""
    return choose_recompute(run, is_flag=is_flag, before_ranks=True)


def _choose_here(run: Run, *, is_flag: bool, before_ranks: bool) -> ChosenRecompute:
    """`choose_recompute` in this process."""
    is_on_gpu = has_gpus(run.device)
    limit = _limit(run, is_on_gpu=is_on_gpu, before_ranks=before_ranks)
    measured_run = run
    if before_ranks:  # attention is that of the device here
        device = "cuda" if is_on_gpu else "cpu"
        measured_run = run.with_values({"device": device, "hardware": None})
    value, path = run.parallel.recompute, None
    if value == AUTO and not is_flag and run.resume is not None:
        value, path = recorded_value(run.resume, run.out, KEY) or (AUTO, None)
    why_anew = ""
    if value.startswith(CHOSEN) and known_policy(value, run.num_stages) is None:
        why_anew = "; anew, as the recorded choice is for other stages"
    elif value != AUTO:
        kept = measured_run.with_values({KEY: value})
        (peak,) = _answer(partial(_peaks, kept), before_ranks=before_ranks)["peaks"]
        if peak <= limit.num_bytes:
            where = f"as in {path}" if path is not None else "as recorded"
            return _chosen(value, f"{where}: {_fit(peak, limit)}; --{KEY} {AUTO} chooses anew")
        why_anew = f"; anew, as the recorded choice needs {memory(peak)}"
    plain = measured_run.with_values({KEY: "none"})
    host_bytes = None
    if is_on_gpu and (before_ranks or detect(os.environ) is not None):
        host_bytes = (1 - HEADROOM) * machine_bytes() / num_local_ranks(run)
    choose = partial(_choice, plain, limit.num_bytes, host_bytes=host_bytes)
    answer = _answer(choose, before_ranks=before_ranks)
    peak = max(answer["peaks"])
    reasons = [_fit(peak, limit) if peak <= limit.num_bytes else _misfit(peak, limit)]
    if answer["policy"] != "none":
        reasons.append(f"{memory(max(answer['without']))} without recomputation")
    reasons.extend(_more_flops(answer["flops"]))
    if answer["copied_gb_s"]:
        reasons.append(f"copies take no time from {answer['copied_gb_s']:.0f} GB/s to the host")
    return _chosen(f"{CHOSEN}{answer['policy']}", ", ".join(reasons) + why_anew)


def _chosen(value: str, reason: str) -> ChosenRecompute:
    policy = value.removeprefix(CHOSEN)
    return ChosenRecompute(value, f"recompute {AUTO} -> {policy} ({reason})")


def _fit(peak: float, limit: _Memory) -> str:
    return f"at most {memory(peak)} a rank of {memory(limit.num_bytes)}, {limit.name}"


def _misfit(peak: float, limit: _Memory) -> str:
    return f"does NOT fit: {memory(peak)} a rank of {memory(limit.num_bytes)}, {limit.name}"


def _more_flops(flops: Sequence[float]) -> list[str]:
    """The FLOPs of the pipeline rank that recomputes most."""
    most = max(flops)
    if most <= 1:
        return []
    where = f" on {pipeline_axis()}{flops.index(most)}" if len(flops) > 1 else ""
    return [f"{100 * (most - 1):.0f}% more FLOPs{where}"]


def _limit(run: Run, *, is_on_gpu: bool, before_ranks: bool) -> _Memory:
    """What a rank may hold.

    Raises:
        ConfigError: the memory of the GPUs is not known.
    """
    share = f"{100 * (1 - HEADROOM):.0f}% of"
    hardware = hardware_of(run)
    if hardware is not None and not before_ranks:
        return _Memory((1 - HEADROOM) * hardware.memory_bytes, f"{share} {hardware.label}")
    if is_on_gpu:
        from weft.run.devices import gpu_names  # late: they import torch
        from weft.start.memory_before import gpu_bytes

        size = gpu_bytes()
        if size is None and hardware is not None:
            size = hardware.memory_bytes
        if size is None:
            what = "auto needs the memory of the GPU, which the table does not have"
            fix = "weft bench compute --write gpu.toml, then --hardware gpu.toml"
            raise ConfigError(Fault(KEY, what, ", ".join(gpu_names()) or "unknown", fix=fix))
        return _Memory((1 - HEADROOM) * size, f"{share} a GPU")
    num_ranks = num_local_ranks(run)
    ranks = counted(num_ranks, "rank")
    name = f"{share} this machine's memory for {ranks}"
    return _Memory((1 - HEADROOM) * machine_bytes() / num_ranks, name)


def _answer(measure: Callable[[], Answer], *, before_ranks: bool) -> Answer:
    """What is measured, in a process of its own where ranks are forked afterwards.

    Raises:
        PlanError: it cannot be measured.
    """
    from weft.start.memory_before import answer_apart  # late: it imports torch

    answer = answer_apart(measure) if before_ranks else measure()
    if FAILURE in answer:
        what = f"auto cannot measure the layout: {answer[FAILURE]}"
        raise PlanError(Fault(KEY, what, fix=f"--{KEY} selective or full"))
    return answer


def _choice(run: Run, limit: float, *, host_bytes: float | None) -> Answer:
    """What is chosen.

    Args:
        host_bytes: memory of the host for the activations of a rank; None: it is not here.
    """
    from weft.planner.measure.measured_run import MeasuredRun  # late: only for this choice
    from weft.planner.recompute_choice import HostMemory
    from weft.planner.recompute_choice import choose_recompute as choose

    host = None
    if host_bytes is not None:
        from weft.run.devices import gpu_names

        devices = [hardware_of_cuda(name) for name in gpu_names()]
        known = [each for each in devices if each is not None and each.host_gb_s]
        if known and len(known) == len(devices):
            host = HostMemory(host_bytes, min(known, key=lambda each: each.host_gb_s))
    choice = choose(MeasuredRun.of(run), limit, host=host)
    return {
        "policy": choice.policy.text,
        "peaks": choice.peaks,
        "without": choice.peaks_without,
        "flops": choice.flops,
        "copied_gb_s": choice.copied_gb_s,
    }


def _peaks(run: Run) -> Answer:
    from weft.planner.measure.measured_run import MeasuredRun  # late: only for this choice
    from weft.planner.recompute_choice import peaks_of

    return {"peaks": [max(peaks_of(MeasuredRun.of(run)))]}
