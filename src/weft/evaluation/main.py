"""`weft eval` on the ranks: start or join them, load the stored model, and print its loss on the data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weft.comm.comm import Comm
from weft.config.run import Run, plan_of
from weft.data.dataset import open_validation
from weft.data.prepared import tokenizer_of
from weft.data.samples import Samples, num_evaluated
from weft.errors import Fault, PlanError
from weft.generate.decode import load_model
from weft.generate.main import open_source
from weft.generate.model_source import ModelSource
from weft.parallel.model.parallelize import ParallelModel
from weft.run.devices import choose_device
from weft.run.launch import join, launch
from weft.run.rank_setup import open_comm
from weft.run.world import World, detect
from weft.train.build import build_data_loader
from weft.train.build_training import loss_family
from weft.train.evaluate import EvalReport, Evaluation
from weft.view.quantity import short_time


@dataclass(frozen=True)
class EvalJob:
    """A checked evaluation, as every rank gets it.

    Attributes:
        run: with the layout, batch and data of the evaluation, and the model of the source.
        data: name of the data, for the output.
        as_json: whether the result is printed as JSON.
    """

    source: ModelSource
    run: Run
    data: str
    as_json: bool


def evaluate(job: EvalJob, write: Callable[[str], object]) -> int:
    """Evaluate on the ranks that torchrun or Slurm has started, or on local ones started here; the
    exit code.
    """
    mesh = job.run.device_mesh
    main = partial(evaluate_rank, job, write)
    world = detect(os.environ)
    if world is not None:
        return join(main, world, mesh=mesh)
    return launch(main, mesh.size, transport=job.run.transport, device=job.run.device, mesh=mesh)


def evaluate_rank(job: EvalJob, write: Callable[[str], object], world: World) -> None:
    """Entry point of one rank; the first one prints the result."""
    run = job.run
    device = choose_device(run.device, world)
    with open_comm(world, run.device_mesh, device) as comm:
        model = _load(job, comm)
        samples = open_validation(run.data, run.model, source=run.eval.source)
        loader = build_data_loader(
            samples, comm, run.batch, seed=run.seed, later=run.model.reads_later_targets
        )
        num_bytes_V = torch.from_numpy(tokenizer_of(run.data).num_bytes()).to(comm.device)
        evaluation = Evaluation(
            model, loader, most_batches=run.eval.batches, num_bytes_V=num_bytes_V
        )
        report = evaluation()
    if world.rank == 0:
        write(result_text(job, report, samples) + "\n")


def _load(job: EvalJob, comm: Comm) -> ParallelModel:
    """This rank's part of the stored model.

    Raises:
        PlanError: the layout does not compute it, or not in fp8.
    """
    run = job.run
    try:
        return load_model(
            loss_family(run.with_values({"lora": job.source.run.lora})),
            run.model,
            open_source(job.source),
            plan=plan_of(run),
            comm=comm,
        )
    except PlanError as error:
        raise PlanError(*(_with_own_fix(fault, run) for fault in error.faults)) from None


def _with_own_fix(fault: Fault, run: Run) -> Fault:
    """A fault that a run would avoid by leaving linears out of fp8, with what avoids it here."""
    if "--precision.fp8_exclude" not in fault.fix:
        return fault
    return replace(fault, fix=f"--dtype {run.precision.compute}, or another mesh")


def result_text(job: EvalJob, report: EvalReport, samples: Samples) -> str:
    """The result as a line of text, or as JSON."""
    facts = result_facts(job, report, samples)
    if job.as_json:
        return json.dumps(facts)
    bits = report.bits_per_byte
    if bits is None:
        of_bytes = ""
    else:
        of_bytes = f", {bits:.4f} bits per byte"
    loss = f"loss {report.loss:.4f}"
    if report.has_perplexity:
        loss += f" nats, perplexity {report.perplexity:,.2f}"
    if report.accuracy is not None:
        loss += f" nats, accuracy {report.accuracy:.1%}"
    number = f"{report.targets:,} targets in {facts['sequences']:,} sequences"
    return (
        f"{job.source.path} on {job.data}: {loss}{of_bytes}; {number}, {short_time(report.seconds)}"
    )


def result_facts(job: EvalJob, report: EvalReport, samples: Samples) -> dict[str, Any]:
    """The result with its units: loss in nats per target, bits per byte of the targets' text."""
    most = job.run.eval.batches * job.run.batch.global_size
    num_sequences = num_evaluated(samples, job.run.batch.global_size)
    return {
        "model": str(job.source.path),
        "data": job.data,
        "loss": report.loss,
        "perplexity": report.perplexity if report.has_perplexity else None,
        "accuracy": report.accuracy,
        "bits_per_byte": report.bits_per_byte,
        "targets": report.targets,
        "bytes": report.num_bytes,
        "sequences": min(num_sequences, most) if most else num_sequences,
        "seconds": report.seconds,
    }
