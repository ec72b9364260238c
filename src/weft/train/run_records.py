"""What a run records of itself: the facts in the manifest of a checkpoint, and the first events of events.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoint.format import Facts
from weft.code.identity import CodeIdentity
from weft.comm.text import all_gather_text
from weft.config.lora import adapted_linears
from weft.config.schema import LoraConfig, ModelSection, OptimConfig, label_of
from weft.core.model_config import InputKind, ModelConfig
from weft.data.samples import Samples
from weft.errors import counted
from weft.layout.explain import explain
from weft.layout.plan import Plan
from weft.train.guard_records import GuardState
from weft.train.optim import NamedOptimizer
from weft.train.optimizers.groups import group_lines
from weft.train.step import TrainStep
from weft.train.step_check import ProofRecord
from weft.train.training import Event, StepRange

# Note [There is no random state]
# Starting values are drawn from (seed, parameter), the order of the data from (seed, step), what a model generates from
# (seed, position). No generator advances during training, so there is no generator state to save: the number of finished
# steps is the whole position. The facts in a checkpoint's manifest are checked at a resume, not restored.


def facts_of(
    model: ModelSection,
    config: Mapping[str, Any],
    step: TrainStep,
    samples: Samples,
    *,
    guard: Callable[[], GuardState] = GuardState,
    code: Callable[[], CodeIdentity] = CodeIdentity,
    proof: ProofRecord | None = None,
) -> Callable[[int], Facts]:
    """Returns the facts of a checkpoint's manifest after a number of steps; see Note [There is no
    random state].

    Args:
        config: all keys of the run, as JSON.
        code: of users, with what it has read so far, asked for at each save.
        proof: verdicts so far, read at each save.
    """
    plan = step.model.plan.model_dump(mode="json")
    data = samples.facts()
    global_size = config["batch"]["global_size"]

    def facts_after(num_steps: int) -> Facts:
        scale = step.loss_scale
        loss_scale = None
        if scale.is_dynamic:
            loss_scale = {"value": scale.value, "good_steps": scale.good_steps}
        return Facts(
            step=num_steps,
            seed=config["seed"],
            family=model.name,
            architecture=model.architecture,
            plan=plan,
            run=config,
            optimizer=config["optim"],
            data=data,
            position=guard().position(num_steps, global_size=global_size),
            loss_scale=loss_scale,
            code=dict(code().parts),
            proof=proof.facts() if proof is not None else {},
        )

    return facts_after


def run_event(
    config: Mapping[str, Any], step: TrainStep, samples: Samples, *, kind: InputKind, optimizer: str
) -> Event:
    """The `run` event of events.jsonl: model, data and layout.

    Args:
        config: all keys of the run, as JSON.
        kind: what the model reads.
        optimizer: `optimizer_text`.
    """
    plan = step.model.plan
    model = config["model"]
    return {
        "event": "run",
        "model": model["preset"] or label_of(model["name"]),
        "params": step.num_params,
        "layout": str(plan.mesh),
        "why": explain(plan, kind=kind),
        "schedule": _schedule_text(plan),
        "plan": plan.digest,
        "ranks": plan.mesh.size,
        "device": str(step.model.comm.device),
        "data": samples.facts(),
        "optimizer": optimizer,
        "seed": config["seed"],
        "steps": config["steps"],
        "seq_len": config["data"]["seq_len"],
        "batch_size": config["batch"]["global_size"],
        "out": config["out"],
    }


BASES = {"nf4": "NF4", "nf4_double": "NF4 with scales in 8 bits"}


def optimizer_text(optim: OptimConfig, lora: LoraConfig, model: ModelConfig) -> str:
    """Optimizer and learning rate schedule on one line, and what is trained of a model with adapters."""
    warmup = counted(optim.warmup, "step")
    last = f" to {optim.min_lr:g} x lr = {optim.last_lr:g}"
    if optim.decay == "constant":
        last = ""
    text = f"{optim.name}, lr {optim.lr:g} {optim.decay}{last}, warm-up {warmup}"
    if not lora.rank:
        return text
    num_linears = len(adapted_linears(lora.targets, model.linears()))
    linears = counted(num_linears, "linear")
    magnitudes = " with magnitudes" if lora.dora else ""
    base = "" if lora.quantize == "none" else f", the base in {BASES[lora.quantize]}"
    return f"{text}; trains only adapters{magnitudes} of rank {lora.rank} on {linears}{base}"


def optimizer_group_notes(step: TrainStep, optim: OptimConfig) -> Iterator[Event]:
    """What each group of parameters is updated by, and what the exchange of matrices sends; every
    rank must call it.
    """
    optimizer = step.optimizer
    if not isinstance(optimizer, NamedOptimizer) or not (optim.groups or optim.name == "muon"):
        return
    comm = step.model.comm
    local = {name: list(entries.shape) for name, entries in optimizer.entries.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for text in all_gather_text(comm, json.dumps(local)):
        for name, shape in json.loads(text).items():
            shapes[name] = tuple(shape)
    decay_names = [name for name, shape in shapes.items() if len(shape) >= 2]
    for line in group_lines(optim, shapes, decay_names=decay_names):
        yield note_event(f"optimizer: {line}")
    for traffic in optimizer.matrix_traffic():
        if traffic.sent_bytes:
            axes = "+".join(traffic.axes)
            size = f"{traffic.sent_bytes:,} bytes a step"
            yield note_event(f"optimizer: rank 0 sends {size} over {axes} for whole matrices")


def _schedule_text(plan: Plan) -> str:
    """The pipeline schedule; "" without one."""
    if plan.pipeline_size == 1:
        return ""
    stages = counted(len(plan.stages), "stage")
    return f"{plan.schedule_name}, {stages}, bubble {100 * plan.bubble:.0f}% (predicted)"


def opening_notes(set_aside_paths: Sequence[Path], step_range: StepRange) -> Iterator[Event]:
    """Notes on checkpoints of later steps, and on a run that has no step left."""
    for path in set_aside_paths:
        yield note_event(
            f"a checkpoint of later steps is kept as {path}: these steps are trained again"
        )
    if step_range.start >= step_range.total:
        steps = counted(step_range.total, "step")
        yield note_event(f"all {steps} are done: to train more, raise --steps")


def note_event(text: str) -> Event:
    """A `note` event of events.jsonl."""
    return {"event": "note", "text": text}


def proof_event(proof: Mapping[str, Any]) -> Event:
    """The `proof` event of events.jsonl: the verdict on layout and options before the first step."""
    if proof["verdict"] != "equal":
        text = f"not proved: {proof.get('reason', '')}"
    else:
        if proof["source"] == "cache":
            when = "before, on this machine"
        else:
            when = f"in {proof['seconds']:.1f} s"
        text = f"proved equal to one device, {proof['compared']:,} tensors at reduced size, {when}"
        if proof.get("unhashed"):
            text += f"; proved at each start, since code cannot be hashed: {proof['unhashed']}"
    return {"event": "proof", "text": text, **proof}
