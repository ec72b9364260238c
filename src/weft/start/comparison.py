"""`weft train`: a run's first steps beside their prediction, and its model FLOPs utilization.

Note [Prediction beside the run]
    A process forked from the launcher measures the run on meta tensors, at low priority, while the
    ranks start (see Note [Answer of a forked process]). Rank 0 polls it after every step; once the prediction is there and some
    steps are timed, one `prediction` event compares them. Only the last step of a run waits for it,
    for a few seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from weft.config.hardware import Hardware, find_hardware, hardware_of_cuda
from weft.config.keys import Flat
from weft.config.run import Run, hardware_of, plan_of
from weft.core.node_placement import NodePlacement
from weft.errors import WeftError, counted
from weft.layout.mesh_order import order_problem
from weft.layout.plan import Plan
from weft.layout.utilization import AdapterFlops, Utilization
from weft.run.forked_answer import Answer, ForkedAnswer, RunningAnswer, StartAnswer
from weft.train.allocator_peak import AllocatorPeak
from weft.train.training import Event
from weft.view.quantity import memory, short_time

WARM_UP_STEPS = 2
"""First steps of a run, which allocate and compare signatures: not timed."""
RECORDED_STEP = 2
"""The step whose allocations are recorded."""
TIMED_STEPS = 3
"""Steps whose median is compared."""
NICENESS = 5
PATIENCE_S = 10.0
"""Time that the last step of a run waits for its prediction."""


def start_prediction(
    run: Run, start_answer: StartAnswer = ForkedAnswer, *, placement: NodePlacement | None = None
) -> RunningAnswer | None:
    """Start the prediction of a run whose hardware is named; None where none is.

    Args:
        placement: of the ranks on nodes; None where no launcher has started them, or it is not known.
    """
    hardware = hardware_of(run)
    if hardware is None:
        return None
    return start_answer(partial(predicted, run, hardware, placement), niceness=NICENESS)


def predicted(run: Run, hardware: Hardware, placement: NodePlacement | None = None) -> Answer:
    """The prediction of a run as JSON, or the reason why there is none."""
    from weft.planner.measure.measured_run import MeasuredRun  # late: most runs predict nothing
    from weft.planner.measure.roles import measure, size_problem
    from weft.planner.simulate.order_costs import has_links, mesh_order
    from weft.planner.simulate.predict import predict_measured
    from weft.planner.simulate.site_costs import site_costs
    from weft.planner.simulate.speeds import Speeds

    problem = size_problem(plan_of(run), fixed_order=run.deterministic)
    if problem:
        return {"failure": f"too large to be measured: {problem}"}
    roles = measure(MeasuredRun.of(run))
    known = placement if placement is not None and has_links(hardware, placement) else None
    prediction = predict_measured(roles, Speeds(hardware, known))
    answer = {
        "hardware": hardware.label,
        "source": hardware.efficiency.source,
        "step_s": prediction.step_s.mid,
        "low_s": prediction.step_s.low,
        "high_s": prediction.step_s.high,
        "peak_bytes": prediction.peak_bytes,
        "rank_0_peak_bytes": roles[0].memory.peak,
        "stage_peak_bytes": [role.memory.peak for role in roles],
    }
    sites = site_costs(prediction.roles, run.site, step_s=prediction.step_s.mid)
    if sites is not None:
        answer["outer_every"] = run.site.every
        answer["outer_s"] = sites.exposed_s
    if placement is not None:
        order = mesh_order(roles, hardware, placement)
        note = order_problem(run.device_mesh, placement) if order is None else order.note
        if note:
            answer["mesh_order"] = note
    return answer


@dataclass
class MeasuredAndPredicted:
    """What rank 0 adds to the events of a run: MFU to steps, one comparison with the prediction.

    Attributes:
        utilization: None where the peak of the device is not known.
        prediction: None where nothing is predicted.
        allocator: of rank 0 on the CPU, for its peak in the second step; on CUDA None, as the
            device counts the peaks of all ranks.
        last_step: of the run.
        step_times: of timed steps, without waits for other sites.
        outer_waits: for other sites, in timed steps with an exchange or an outer step.
        awaits_order: whether a note on the order of the mesh's axes may follow from the prediction.
    """

    utilization: Utilization | None
    prediction: RunningAnswer | None
    allocator: AllocatorPeak | None
    last_step: int
    step_times: list[float] = field(default_factory=list)
    outer_waits: list[float] = field(default_factory=list)
    num_steps: int = 0
    rank_0_bytes: int = 0
    awaits_order: bool = False

    def with_machine(self, event: Event, *, memory: Event, mesh_order: str) -> Event:
        """The event; the `run` event with the memory that there is, what is wrong with the order of
        its mesh's axes, and what MFU is a share of, where steps will have it.
        """
        if event["event"] != "run":
            return event
        event = {**event, **memory}
        if mesh_order:
            event = {**event, "mesh_order": mesh_order}
        if self.utilization is None:
            return event
        return {
            **event,
            "model_flops": self.utilization.flops,
            "peak_tflops": self.utilization.peak_tflops,
            "mfu_text": self.utilization.text,
        }

    def events(self, event: Event) -> Iterator[Event]:
        """The event, perhaps with more fields, and what follows it."""
        if event["event"] != "step":
            yield event
            return
        self.num_steps += 1
        self._record_allocations()
        is_timed = self.num_steps > WARM_UP_STEPS
        if is_timed and self.utilization is not None:
            event = {**event, "mfu": self.utilization.mfu(event["step_s"])}
        yield event
        yield from self._order_notes()
        if is_timed:
            self._note_time(event)
        if len(self.step_times) < TIMED_STEPS or self.prediction is None:
            return
        is_last = event["step"] >= self.last_step
        answer = self.prediction.poll(PATIENCE_S if is_last else 0.0)
        if answer is not None:
            self.prediction = None
            yield self._comparison(event, answer)

    def _order_notes(self) -> Iterator[Event]:
        """What the prediction says of the order of the mesh's axes, as soon as it is there."""
        answer = self.prediction.poll() if self.awaits_order and self.prediction else None
        if answer is None:
            return
        self.awaits_order = False
        if "mesh_order" in answer:
            yield {"event": "note", "text": answer["mesh_order"]}

    def _record_allocations(self) -> None:
        """The second step is recorded: the first one allocates what is kept, later ones are timed."""
        if self.allocator is None or self.prediction is None:
            return
        if self.num_steps == 1:
            self.allocator.start()
        elif self.num_steps == RECORDED_STEP:
            self.rank_0_bytes = self.allocator.stop()

    def _note_time(self, event: Event) -> None:
        waited_s = event.get("outer_waited_s")
        if waited_s is not None:
            self.outer_waits.append(waited_s)
        self.step_times.append(event["step_s"] - (waited_s or 0.0))

    def _comparison(self, step: Event, answer: Answer) -> Event:
        if "failure" in answer:
            return {"event": "note", "text": f"no prediction of this run: {answer['failure']}"}
        measured_s = statistics.median(self.step_times)
        event = {
            "event": "prediction",
            "step": step["step"],
            **answer,
            "measured_s": measured_s,
            "measured_bytes": step["mem_bytes"] if self.allocator is None else self.rank_0_bytes,
            "memory_of": "fullest rank" if self.allocator is None else "rank 0",
        }
        if self.outer_waits:
            event["measured_outer_s"] = statistics.fmean(self.outer_waits)
        if self.utilization is not None:
            event["peak_tflops"] = self.utilization.peak_tflops
        return {**event, "text": comparison_text(event, self.utilization)}


def comparison_text(event: Event, utilization: Utilization | None) -> str:
    """A `prediction` event for the reader."""
    measured_s = event["measured_s"]
    low = short_time(event["low_s"])
    high = short_time(event["high_s"])
    step = f"predicted {short_time(event['step_s'])} ({low} to {high})"
    is_inside = event["low_s"] <= measured_s <= event["high_s"]
    word = "inside" if is_inside else "OUTSIDE"
    lines = [
        f"prediction for {event['hardware']} (constants: {event['source']}):",
        f"  step   {step}, measured {short_time(measured_s)}: {word} the range",
        _memory_line(event),
    ]
    if "outer_every" in event:
        lines.append(_sites_line(event))
    if utilization is not None:
        mfu_percent = 100 * utilization.mfu(measured_s)
        lines.append(f"  MFU    {mfu_percent:.2g}%: {utilization.text}")
    return "\n".join(lines)


def _memory_line(event: Event) -> str:
    """The same on both sides: tensors at the peak of a step, as torch's allocator counts them."""
    place = event["memory_of"]
    predicted_bytes = event["rank_0_peak_bytes" if place == "rank 0" else "peak_bytes"]
    line = (
        f"  memory predicted {memory(predicted_bytes)} of tensors on {place}, measured "
        f"{memory(event['measured_bytes'])} (peak of torch's allocator in a step)"
    )
    if predicted_bytes < event["peak_bytes"]:
        line += f"; predicted {memory(event['peak_bytes'])} on the fullest rank"
    return line


def _sites_line(event: Event) -> str:
    """The wait for other sites, which is no part of the step above."""
    steps = counted(event["outer_every"], "step")
    if event["outer_s"] is None:
        return (
            f"  sites  a wait every {steps} is not predicted: the link is not known (site.gbit_s)"
        )
    wait = short_time(event["outer_s"])
    line = f"  sites  predicted wait {wait} every {steps} besides"
    if "measured_outer_s" not in event:
        return f"{line}, none measured so far"
    measured = short_time(event["measured_outer_s"])
    return f"{line}, measured {measured}"


def comparison_of(
    plan: Plan,
    hardware: str | None,
    *,
    adapted: AdapterFlops,
    cuda_name: str | None,
    prediction: RunningAnswer | None,
    allocator: AllocatorPeak | None,
    last_step: int,
    awaits_order: bool = False,
) -> MeasuredAndPredicted:
    """The comparison of a run.

    Args:
        hardware: as in the config.
        adapted: FLOPs of frozen weights and adapters.
        cuda_name: of the rank's CUDA device; None on the CPU, which has no peak in the table.
        allocator, last_step, awaits_order: see `MeasuredAndPredicted`.
    """
    device = _device(hardware, cuda_name)
    utilization = None
    if device is not None:
        utilization = Utilization.of(plan, peak_tflops=device.bf16_tflops, adapted=adapted)
    return MeasuredAndPredicted(
        utilization, prediction, allocator, last_step, awaits_order=awaits_order
    )


def slow_compute_note(config: Flat, cuda_name: str) -> str:
    """What a run on a GPU that computes in float32 would gain by bfloat16; "" if that is not known."""
    device = hardware_of_cuda(cuda_name)
    if device is None:
        return ""
    matmul: Literal["ieee", "tf32"] = "tf32" if config["precision.matmul"] == "tf32" else "ieee"
    note = device.for_matmul(matmul).slow_compute_note(str(config["precision.compute"]))
    return note.removeprefix("note: ")


def _device(hardware: str | None, cuda_name: str | None) -> Hardware | None:
    """The device of the config, or else the CUDA device if the table has it."""
    if hardware is not None:
        with suppress(WeftError):  # checked before the start
            return find_hardware(hardware)
    return None if cuda_name is None else hardware_of_cuda(cuda_name)
