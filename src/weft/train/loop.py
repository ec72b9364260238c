"""Owns a rank's training run from the first step to the last: feed, step, journal, sample."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from weft.comm.comm import Comm
from weft.config.lora import adapted_linears
from weft.config.run import Run
from weft.config.toml import dump
from weft.data.dataset import open_data
from weft.data.samples import Samples
from weft.errors import WeftError
from weft.layout.explain import explain
from weft.layout.plan import Plan
from weft.parallel.model.parallelize import ParallelModel
from weft.run.signals import StopRequest
from weft.train.agree import words_of_first
from weft.train.build import build_evaluation, build_feed
from weft.train.evaluate import Evaluation, eval_event
from weft.train.event_log import Journal
from weft.train.facts import facts_of
from weft.train.feed import Feed
from weft.train.lr_schedule import learning_rate
from weft.train.prefetch import ahead
from weft.train.restart import begin, clear
from weft.train.saver import Saver
from weft.train.step import StepReport, TrainStep, silence

CHECKED_STEPS = 2
"""Steps in which members of every group compare what they bring; the steps after repeat the same operations."""

PROMPT = "def "


GenerateText = Callable[[Run, ParallelModel, str], str]
"""(run, the trained model, a prompt) -> `run.sample` tokens of text; called on every rank, equal on every rank."""


def train_on_ranks(
    run: Run,
    comm: Comm,
    journal: Journal,
    leave: StopRequest,
    *,
    generate_text: GenerateText | None = None,
) -> Literal["finished", "stopped"]:
    """Train; every rank of the mesh calls this, the journal of the first one tells.

    Args:
        generate_text: called after the last step where `run.sample` asks for text.

    Raises:
        WeftError: the run was asked to stop, and what it had trained could not be saved.
    """
    run = run.model_copy(update={"out": words_of_first(comm, run.out or "")})  # a fresh folder's name is rank 0's
    samples = open_data(run.data, run.model)
    begun = begin(run, comm, samples)
    step, folder = begun.step, Path(run.out or "")
    journal.supersede("run.toml", dump(run))
    journal.supersede("plan.json", step.model.plan.to_json() + "\n")
    moved = clear(folder, comm, above=begun.steps)
    saver = Saver(step, folder, save=run.save, facts=facts_of(run, step, samples), leave=leave, last=begun.steps)
    for event in (run_event(run, step, samples) | {"start_step": begun.steps}, *begun.events(run, moved)):
        journal.emit(event)
    began, done = time.perf_counter(), begun.steps
    evaluation, feed = build_evaluation(run, step.model), build_feed(run, comm, samples)
    for event in step_events(run, step, feed, start=begun.steps, evaluation=evaluation, saver=saver):
        journal.emit(event)
        done = max(done, int(event.get("step", 0)))
    status: Literal["finished", "stopped"] = "finished" if done >= run.steps else "stopped"
    for event in saver.finish(done, save=bool(run.save.every) or status == "stopped"):
        journal.emit(event)
    if run.sample and status == "finished" and generate_text is not None:
        text = generate_text(run, step.model, PROMPT)
        journal.emit({"event": "sample", "prompt": PROMPT, "text": text})
    journal.emit({"event": "end", "status": status, "steps": done, "seconds": time.perf_counter() - began})
    if status == "stopped":
        journal.emit({"event": "note", "text": farewell(run, done, saver.trouble)})
    return status


def farewell(run: Run, done: int, trouble: str) -> str:
    """How to go on after a stop.

    Raises:
        WeftError: it was not saved.
    """
    if trouble:
        raise WeftError(f"stopped after step {done}, which could not be saved: {trouble}")
    return (
        f"stopped after step {done} and saved. To go on: weft train {shlex.quote(f'{run.out}/run.toml')} --resume auto"
    )


def step_events(
    run: Run,
    step: TrainStep,
    feed: Feed,
    *,
    start: int = 0,
    evaluation: Evaluation | None = None,
    saver: Saver | None = None,
) -> Iterator[dict[str, Any]]:
    """Train step by step after the first `start`; yields the event of each, of each evaluation, and of what is saved.

    It ends early where the saver says that the run is over.
    """
    comm, before, steps = step.model.comm, time.perf_counter(), range(start, run.steps)
    with ahead(feed.batches, steps, most=run.data.prefetch) as batches:
        for index in steps:
            comm.checked = index < start + CHECKED_STEPS
            lr = learning_rate(index, run.optim, run.steps)
            report = step(next(batches), lr=lr, says=saver.word if saver else silence)
            now = time.perf_counter()
            yield step_event(index + 1, report, lr=lr, elapsed_s=now - before)
            before = now
            if evaluation is not None and is_evaluated(run, index + 1):
                yield eval_event(index + 1, evaluation())
                before = time.perf_counter()
            if saver is not None:
                yield from saver.after(index + 1, report.said)
                if saver.is_over(report.said):
                    return


def is_evaluated(run: Run, number: int) -> bool:
    """Whether an evaluation follows step `number` (the first is 1)."""
    return bool(run.eval.every) and (number % run.eval.every == 0 or number == run.steps)


def run_event(run: Run, step: TrainStep, samples: Samples) -> dict[str, Any]:
    """What is trained, on what, and how it is laid out."""
    plan = step.model.plan
    return {
        "event": "run",
        "model": run.model.preset or run.model.name,
        "params": step.num_params,
        "layout": str(plan.mesh),
        "why": explain(plan),
        "schedule": schedule_text(plan),
        "plan": plan.digest,
        "ranks": plan.mesh.size,
        "device": str(step.model.comm.device),
        "data": samples.facts(),
        "optimizer": optimizer_text(run),
        "seed": run.seed,
        "steps": run.steps,
        "seq_len": run.data.seq_len,
        "batch_size": run.batch.global_size,
        "out": run.out,
    }


def optimizer_text(run: Run) -> str:
    """What moves, and how, in a few words."""
    optim, lora = run.optim, run.lora
    text = f"{optim.name}, lr {optim.lr:g} {optim.decay}, warm-up {optim.warmup} steps"
    if not lora.rank:
        return text
    return f"{text}; moves adapters of rank {lora.rank} beside {len(adapted_linears(lora.targets, run.model.linears()))} linears alone"


def schedule_text(plan: Plan) -> str:
    """The pipeline in a few words; nothing where there is none."""
    if plan.mesh.degree("pp") == 1:
        return ""
    return f"{plan.schedule}, {len(plan.stages)} stages, bubble {100 * plan.bubble:.0f}% (predicted)"


def step_event(number: int, report: StepReport, *, lr: float, elapsed_s: float) -> dict[str, Any]:
    """One line of events.jsonl. Loss and norm at full precision; `tokens` counts targets over all ranks."""
    return {
        "event": "step",
        "step": number,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": lr,
        "tokens": report.targets,
        "tokens_per_s": report.targets / elapsed_s,
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
        "step_s": elapsed_s,
        "mem_bytes": max(report.mem_bytes),
        "stage_mem_bytes": list(report.mem_bytes),
        **({} if report.expert_load is None else {"expert_load": report.expert_load}),
    }
