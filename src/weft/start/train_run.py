"""`weft train`: start or join the ranks, and run the training loop on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.resume import starts_new
from weft.comm.group import StepGroups
from weft.config.keys import Flat, flatten
from weft.config.lora import adapter_flops
from weft.config.profiled_steps import profiled_steps
from weft.config.run import Run
from weft.config.schema import AlertConfig, TrackerName
from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement
from weft.data.identity import DataIdentity
from weft.errors import EXIT_OK, EXIT_PREEMPTED, WeftError
from weft.layout.mesh_order import order_problem
from weft.layout.utilization import AdapterFlops
from weft.run.devices import DeviceChoice, choose_device
from weft.run.folder_lock import heartbeat, publish_status_board
from weft.run.forked_answer import ForkedAnswer, RunningAnswer, StartAnswer
from weft.run.launch import Supervision, ignore_board, launch, same_attempt
from weft.run.launcher_nodes import placement_of
from weft.run.numerics import expand_segments, numerics
from weft.run.rank_setup import open_comm
from weft.run.signals import StopRequest
from weft.run.worker import OrderlyEnd
from weft.run.worker_group import import_modules_of_ranks
from weft.run.world import Attempt, ThreadRendezvous, World, detect
from weft.start.answer_here import AnswerHere, answer_here
from weft.start.comparison import (
    MeasuredAndPredicted,
    comparison_of,
    slow_compute_note,
    start_prediction,
)
from weft.start.end_event import RecordFolder, end_of_joined_rank, end_of_local_ranks
from weft.start.joined import Watch, run_joined
from weft.start.live_proof import LiveProof
from weft.start.memory_before import check_memory
from weft.start.memory_bound import machine_bytes
from weft.start.proof_before import RunningProof, Verdict, start_proof
from weft.start.report_at_end import report_at_end
from weft.track.alert_process import alerts
from weft.track.sink import tracker_sinks
from weft.track.tracker import TrackedRun
from weft.train.allocator_peak import AllocatorPeak
from weft.train.build import check_initial_parameters
from weft.train.build_training import build_training, step_groups
from weft.train.event_log import EventLog, append_missing_end_event
from weft.train.last_save import check_room
from weft.train.loop import run_training
from weft.train.out_of_memory import AllocatedMemory, held_bytes, named_out_of_memory
from weft.train.run_records import note_event
from weft.train.sample_texts import GenerateText, SampleTexts
from weft.train.step_check import ProofRecord
from weft.train.step_profiler import StepProfiler
from weft.train.training import Training
from weft.train.training_parts import is_restart
from weft.view.live import open_view
from weft.view.progress import View

COMPILES = "torch.compile compiles each kind of block during the first step, which takes longer"
UNRECORDED_END = "killed before it could record its end (found when the run was started again)"

OnEvent = Callable[[Mapping[str, Any], Training], None]
"""Called on every rank with an event of the run, which it must not change, and the training of the rank."""


def train(
    run: Run,
    *,
    generate_text: GenerateText | None = None,
    adapt_attempt: Callable[[int, Attempt], Attempt] = same_attempt,
    on_event: OnEvent | None = None,
    caller: StopRequest | None = None,
) -> int:
    """Train on the ranks that torchrun or Slurm has started, or on local ones started here; returns
    the exit code.

    Args:
        generate_text: called on every rank after the last step, and as often before as the run
            asks for; its text is an event.
        adapt_attempt: see `Supervision`.
        on_event: see `OnEvent`.
        caller: of a run in the process of a script, which stops it by this request: its events are
            not shown.
    """
    world = detect(os.environ)
    has_rank_0 = world is None or world.rank == 0
    if world is None and run.transport == "process":
        import_modules_of_ranks(run.device_mesh)  # once, for the proof and all ranks
    if world is None:
        check_memory(run)
    told = run.alert if has_rank_0 else AlertConfig()
    with alerts(told, Path(run.out) if run.out else None):
        return _train_and_report(
            run,
            world,
            generate_text=generate_text,
            adapt_attempt=adapt_attempt,
            on_event=on_event,
            caller=caller,
        )


def _train_and_report(
    run: Run,
    world: World | None,
    *,
    generate_text: GenerateText | None,
    adapt_attempt: Callable[[int, Attempt], Attempt],
    on_event: OnEvent | None,
    caller: StopRequest | None,
) -> int:
    """Start the proof and the training, and write the page at the end."""
    has_rank_0 = world is None or world.rank == 0
    start_answer = answer_here if caller is not None and world is None else ForkedAnswer
    proof = start_proof(run, os.environ, start_answer) if has_rank_0 else None
    page_folder = Path(run.out) if run.out and run.report and has_rank_0 else None
    with report_at_end(page_folder), _ended(proof):
        return _train(
            run,
            world,
            proof,
            generate_text=generate_text,
            adapt_attempt=adapt_attempt,
            on_event=on_event,
            caller=caller,
            start_answer=start_answer,
        )


def _train(
    run: Run,
    world: World | None,
    proof: RunningProof | Verdict | None,
    *,
    generate_text: GenerateText | None,
    adapt_attempt: Callable[[int, Attempt], Attempt],
    on_event: OnEvent | None,
    caller: StopRequest | None,
    start_answer: StartAnswer,
) -> int:
    if starts_new(run.resume, run.out):
        check_initial_parameters(run.model)
    if world is not None and isinstance(proof, RunningProof):
        proof = proof.wait()  # ranks of a launcher: rank 0 joins the others after it
    out = Path(run.out) if run.out else None
    records = RecordFolder(out, run.save.remote)
    stop_request = caller or StopRequest()
    has_rank_0 = world is None or world.rank == 0
    placement = _placement(world, run.device_mesh)
    prediction = start_prediction(run, start_answer, placement=placement) if has_rank_0 else None
    job = RankJob(
        device=run.device,
        mesh=run.device_mesh,
        step_groups=step_groups(run),
        hardware=run.hardware,
        adapted=adapter_flops(run.lora, run.model, run.data.seq_len),
        prediction=prediction,
        placement=placement,
        proof=proof,
        live=LiveProof.of(run, os.environ),
        profiled=profiled_steps(run.profile),
        track=run.track,
        config=flatten(run.model_dump(mode="json")),
        deterministic=run.deterministic,
        records=records,
        build=partial(build_training, run, makes_copies=True),
        generate_text=generate_text,
        sample_every=run.sample_every,
        on_event=on_event,
        shows_events=caller is None or world is not None,
        line_every=run.log.every,
    )
    main = partial(train_rank, job, stop_request)
    expand_segments()
    run_numerics = numerics(deterministic=run.deterministic, matmul=run.precision.matmul)
    if world is not None:
        with run_numerics, _ended(prediction):
            return run_joined(
                lambda watch, joined: main(joined, watch=watch),
                world,
                mesh=run.device_mesh,
                records=records,
                timeout_s=run.run.timeout_s,
                takes_snapshots=bool(run.save.memory_every),
                is_ending=lambda: stop_request.requested,
            )
    with (
        run_numerics,
        _ended(prediction),
        end_of_local_ranks(records),
        stop_request if run.transport != "process" else nullcontext(),
    ):  # for the main thread only
        code = launch(
            main,
            run.device_mesh.size,
            transport=run.transport,
            device=run.device,
            port=run.port,
            mesh=run.device_mesh,
            out=out,
            supervision=Supervision(
                timeout_s=run.run.timeout_s,
                restarts=run.run.num_restarts,
                snapshots=run.run.num_restarts > 0 and run.save.memory_every != 0,
                on_board=partial(publish_status_board, out) if out else ignore_board,
                adapt_attempt=adapt_attempt,
                check_start=data_identity(run).check,
            ),
        )
    if isinstance(proof, RunningProof):
        proof.wait()  # raises the refusal with which all ranks have ended
    return code


def _placement(world: World | None, mesh: Mesh) -> NodePlacement | None:
    """Where the ranks of a launcher are, if there are as many as the mesh has."""
    if world is None or world.size != mesh.size:
        return None
    return placement_of(os.environ, world)


def data_identity(run: Run) -> DataIdentity:
    """The identity of the data files that the checks before the start have verified."""
    return DataIdentity.of(
        run.data, model=run.model, evaluated_on=run.eval.source if run.eval.every else None
    )


@contextmanager
def _ended(process: RunningAnswer | RunningProof | Verdict | None) -> Iterator[None]:
    """End the process of a prediction or proof when the ranks have ended."""
    try:
        yield
    finally:
        if isinstance(process, ForkedAnswer | AnswerHere | RunningProof):
            process.end()


@dataclass(frozen=True)
class RankJob:
    """What every rank of a run does, equal on all ranks.

    Attributes:
        step_groups: which groups of ranks its steps use.
        hardware: name or file of a device, for MFU.
        adapted: FLOPs of frozen weights and adapters, for MFU.
        prediction: of the run, read by rank 0.
        placement: of the ranks on nodes; None where it is not known, or no launcher has started them.
        proof: of the run, or its verdict, for the records; None: nothing is proved.
        live: which steps are compared while they train.
        profiled: numbers of the steps that are recorded.
        track: trackers of rank 0.
        config: the dotted keys of the run, for trackers.
        records: the run folder, and its URL.
        build: the training run of this rank, from its communication.
        generate_text: called after the last step, and every `sample_every` steps if that is not 0;
            None: not.
        on_event: called on every rank with each event; None: not.
        shows_events: rank 0 shows the events on the terminal.
        line_every: steps between two lines there; 0: chosen from the length of the run.
    """

    device: DeviceChoice
    mesh: Mesh
    step_groups: StepGroups
    hardware: str | None
    adapted: AdapterFlops
    prediction: RunningAnswer | None
    placement: NodePlacement | None
    proof: RunningProof | Verdict | None
    live: LiveProof
    profiled: range
    track: tuple[TrackerName, ...]
    config: Flat
    deterministic: bool
    records: RecordFolder
    build: Callable[..., Training]
    generate_text: GenerateText | None
    sample_every: int
    on_event: OnEvent | None
    shows_events: bool
    line_every: int


@dataclass(frozen=True)
class EventObserver:
    """A view that calls a function with every event of a rank."""

    on_event: OnEvent
    training: Training

    def handle(self, event: Mapping[str, Any]) -> None:
        """Call the user's function with the event."""
        self.on_event(event, self.training)

    def close(self) -> None:
        """Do nothing: no file is open."""


def train_rank(
    job: RankJob, stop_request: StopRequest, world: World, *, watch: Watch | None = None
) -> None:
    """Entry point of one rank.

    Args:
        watch: of a rank of torchrun or Slurm, which do not look for hung ranks, nor write the `end`
            event of a killed rank 0.

    Raises:
        OrderlyEnd: with code 75, if the run was asked to stop and has saved.
    """
    device = choose_device(job.device, world)
    if job.deterministic:
        torch.set_num_threads(1)  # kernels add in another order on other numbers of threads
    with (
        stop_request,
        open_comm(
            world, job.mesh, device, deterministic=job.deterministic, steps=job.step_groups
        ) as comm,
        _verdict_of(job.proof) as verdict,
        nullcontext() if watch is None else end_of_joined_rank(job.records, world),
        open_event_log(
            job.records.out,
            world,
            has_launcher=watch is None,
            views=[open_view(every=job.line_every)] if job.shows_events else [],
        ) as log,
        heartbeat(log.out),
        nullcontext() if watch is None else watch(comm, log),
        _reported_error(world),
    ):
        record = ProofRecord(before=verdict or {})
        with named_out_of_memory(comm, dict):
            training = job.build(
                comm,
                stop_requested=lambda: stop_request.requested,
                attempt=world.attempt,
                proof=record,
            )
        if not is_restart(world.attempt):
            check_room(training)
        training = job.live.attached(training, record, is_restart=is_restart(world.attempt))
        training = with_profiler(training, job.profiled)
        training = with_samples(training, job.generate_text, every=job.sample_every)
        if job.on_event is not None:
            log.views = (*log.views, EventObserver(job.on_event, training))
        if log.out is not None:
            log.views = (*log.views, *tracker_sinks(job.track, TrackedRun(log.out, job.config)))
        with_more = None
        if world.rank == 0:
            comparison = _comparison(job, training, device)
            with_more = comparison.events
            mesh_order = ""
            if job.placement is not None and job.prediction is None:
                mesh_order = order_problem(job.mesh, job.placement)
                if mesh_order:
                    log.emit({"event": "note", "text": mesh_order})
            opening_events = (
                comparison.with_machine(
                    event, memory=_memory_of(device, world), mesh_order=mesh_order
                )
                for event in training.opening_events
            )
            training = replace(training, opening_events=tuple(opening_events))
            if device.type == "cuda":
                note = slow_compute_note(job.config, cuda_name_of(device))
                if note:
                    log.emit({"event": "note", "text": note})
            if training.step.model.plan.compiles_blocks(device.type):
                log.emit({"event": "note", "text": COMPILES})
        with named_out_of_memory(comm, partial(held_bytes, training.step)):
            outcome = run_training(training, log, with_more=with_more)
    if outcome == "stopped":
        raise OrderlyEnd(EXIT_PREEMPTED)


def with_profiler(training: Training, steps: range) -> Training:
    """The training run of this rank with the recorder of these steps; a note where all of them are
    done already.
    """
    num_done = training.step_range.start
    if not steps or steps[-1] <= num_done:
        events = training.opening_events
        if steps and num_done < training.step_range.total:
            text = f"profile: steps {steps.start}:{steps.stop} are done: this run begins after step {num_done}"
            events = (*events, note_event(text))
        return replace(training, opening_events=events)
    profiler = StepProfiler(
        training.step, steps, run_folder=training.run_folder, files=training.files
    )
    return replace(training, profiler=profiler, on_phase=profiler.observed(training.on_phase))


def with_samples(training: Training, generate: GenerateText | None, *, every: int) -> Training:
    """The training run of this rank with the texts that its model generates, if it does."""
    if generate is None:
        return training
    last_step = training.step_range.total
    samples = SampleTexts(training.step.model, generate, every=every, last_step=last_step)
    return replace(training, samples=samples)


@contextmanager
def _verdict_of(proof: RunningProof | Verdict | None) -> Iterator[Verdict | None]:
    """The verdict, once it is known. See Note [Proof beside the start of ranks].

    Raises:
        OrderlyEnd: the run must not start; the process that started the ranks reports why.
    """
    if not isinstance(proof, RunningProof):
        yield proof
        return
    try:
        verdict = proof.wait()
    except WeftError:
        raise OrderlyEnd(EXIT_OK) from None
    yield verdict


def cuda_name_of(device: torch.device) -> str:
    """The name that CUDA gives a device."""
    return torch.cuda.get_device_name(device)


def _memory_of(device: torch.device, world: World) -> dict[str, Any]:
    """The memory of the device of rank 0, and how many ranks of its size share it: processes on a
    CPU do, while what is measured of threads is of all of them.
    """
    if device.type == "cuda":
        num_bytes = AllocatedMemory.of(device).total
        return {"memory_bytes": num_bytes, "memory_ranks": 1}
    is_thread = isinstance(world.rendezvous, ThreadRendezvous)
    return {"memory_bytes": machine_bytes(), "memory_ranks": 1 if is_thread else world.local_size}


def _comparison(job: RankJob, training: Training, device: torch.device) -> MeasuredAndPredicted:
    """What rank 0 adds to the events of its run."""
    is_cuda = device.type == "cuda"
    allocator = None
    if job.prediction is not None and not is_cuda:
        from weft.planner.measure.rank_step import kept_bytes  # late: most runs predict nothing

        allocator = AllocatorPeak(partial(kept_bytes, training.step))
    return comparison_of(
        training.step.model.plan,
        job.hardware,
        adapted=job.adapted,
        cuda_name=cuda_name_of(device) if is_cuda else None,
        prediction=job.prediction,
        allocator=allocator,
        last_step=training.step_range.total,
        awaits_order=job.placement is not None,
    )


@contextmanager
def _reported_error(world: World) -> Iterator[None]:
    """Report an error at once, before connections are closed and files are written."""
    try:
        yield
    except Exception as error:
        if world.attempt is not None:
            world.attempt.report_error(error)
        raise


def open_event_log(
    out: Path | None, world: World, *, has_launcher: bool, views: Sequence[View]
) -> EventLog:
    """The run folder and the views on rank 0; an event log without outputs on other ranks.

    An earlier attempt in the same folder that was killed without an `end` event gets one.

    Args:
        has_launcher: whether the process that started the ranks writes the `end` event after an
            error.
        views: on the terminal, of rank 0.
    """
    if world.rank > 0:
        return EventLog(None)
    if out is None:
        return EventLog(None, views)
    is_restart = world.attempt is not None and world.attempt.restart is not None
    if not is_restart:
        append_missing_end_event(out, error=UNRECORDED_END)
    return EventLog(out, views, ends_on_error=world.attempt is None or not has_launcher)
