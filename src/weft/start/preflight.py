"""What a training run does before it starts, from the sections of its config: the layout after a restart, notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from weft.checkpoint.folder import checkpoints
from weft.checkpoint.resume import AUTO, starts_new
from weft.config.elastic import elastic_note, fit_to_ranks
from weft.config.finetuning import defaults_note
from weft.config.fp8 import fp8_notes
from weft.config.hf.architectures import PREFIX
from weft.config.hf.read_config import CONFIG, uncomputed_settings
from weft.config.hf.safetensors_files import read_json
from weft.config.hf.text_part import text_config_of
from weft.config.optimizers import is_user_class
from weft.config.rules.config_checks import config_checks
from weft.config.rules.unused_keys import full_mesh_is_elastic, samples_are_on, switched_off
from weft.config.rules.values import rate_notes
from weft.config.run import Run, recompute_of
from weft.config.schema import LoraConfig, ModelSection, OptimConfig, SiteConfig
from weft.core.axes import local_update_axis
from weft.core.mesh import Mesh
from weft.errors import LaunchError, counted
from weft.hf.text_tensors import list_text_tensors
from weft.models import FAMILIES
from weft.run.agent import restart_number
from weft.run.world import detect
from weft.start import environment, remote_folder
from weft.start.rules.run_folders import resumes_in
from weft.start.run_folder import is_started_again

DROPOUT_KEYS = (
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "dropout"),
    *("attention_dropout", "hidden_dropout", "embedding_dropout"),
)
"""Keys of config.json."""


def _leaves_rest_to_adamw(optim: OptimConfig) -> bool:
    """Whether an optimizer updates whole matrices alone; torch is imported only for users' classes."""
    if not is_user_class(optim.name):
        return optim.name == "muon"
    from weft.train.optimizers.groups import needs_matrices  # imports torch

    return needs_matrices(optim.name)


def after_restart(run: Run) -> Run:
    """The run as it goes on when its agent (torchrun, Slurm) has started the ranks again: from the
    newest checkpoint of its own folder, if there is one; an elastic run on the ranks that there are.
    """
    if run.run.elastic and not any(full_mesh_is_elastic(run.run)):
        run = _on_ranks_here(run)
    run = with_local_folder(run)
    if not run.out:
        return run
    out = Path(run.out)
    if resumes_in(out, run.resume) or not is_started_again(out, is_elastic=run.run.elastic):
        return run
    if run.resume is None or _has_checkpoint(out, run.save.remote):
        return run.with_values({"resume": AUTO})
    return run


def _has_checkpoint(out: Path, remote: str | None) -> bool:
    """Whether a run folder, or its copy at a URL, has a checkpoint."""
    return any(checkpoints(out)) or remote_folder.has_copy(remote)


def _on_ranks_here(run: Run) -> Run:
    """An elastic run on the best layout for the ranks that there are."""
    full_mesh = run.run.full_mesh or run.mesh
    full = run.with_values({"mesh": full_mesh, "run.full_mesh": ""})

    def is_valid(mesh: str) -> bool:
        checks = config_checks(full.with_values({"mesh": mesh}))
        return not any(check.fails() for check in checks)

    if not is_valid(full_mesh):
        # its faults are reported now, and not when all ranks are back
        return full.with_values({"nproc": None})
    layout = _elastic_layout(full_mesh, run.nproc, is_valid=is_valid)
    return run.with_values(layout)


def with_local_folder(run: Run) -> Run:
    """The run with a local folder, if its `out` is a URL."""
    return run.with_values(remote_folder.local_keys(run.out, run.save.remote))


def _elastic_layout(
    full_mesh: str, nproc: int | None, *, is_valid: Callable[[str], bool]
) -> Mapping[str, str]:
    """The keys that choose the best layout for the ranks that there are, at most the full one;
    nothing where none fits.
    """
    full_layout = {"mesh": full_mesh, "run.full_mesh": ""}
    try:
        world = detect(os.environ)
    except LaunchError:  # `world_faults` reports it
        return {}
    size = world.size if world is not None else nproc
    if size is None:
        return full_layout
    mesh = Mesh.parse(full_mesh)
    fitting = fit_to_ranks(mesh, size, is_valid=is_valid)
    if fitting is None:
        return {}
    if size == mesh.size:
        return full_layout
    return {"mesh": fitting, "run.full_mesh": full_mesh}


def _offload_notes(run: Run) -> Iterator[str]:
    """Offloaded activations on CPUs."""
    if "offload" in recompute_of(run).modes and not environment.has_gpus(run.device):
        yield "parallel.recompute offload saves nothing on CPUs: their memory is the host's"


def training_notes(run: Run) -> tuple[str, ...]:
    """Remarks on the environment, and on what a new run trains."""
    found = [
        *environment.notes(run.device_mesh, run.device),
        *_elastic_notes(run.device_mesh, run.run.full_mesh),
        *_remote_notes(run.save.remote, run.out),
        *environment.launcher_notes(run.port, run.save.memory_every, restarts=run.run.restarts),
    ]
    unused_keys = switched_off(
        loss=run.loss,
        dpo=run.dpo,
        evaluation=run.eval,
        lora=run.lora,
        guard=run.guard,
        data=run.data,
        optim=run.optim,
        supervision=run.run,
        save=run.save,
        leaves_rest_to_adamw=_leaves_rest_to_adamw(run.optim),
    )
    found.extend(map(str, unused_keys))
    found.extend(map(str, samples_are_on(sample=run.sample, sample_every=run.sample_every)))
    found.extend(rate_notes(run.optim))
    found.extend(fp8_notes(run.precision, run.model))
    found.extend(_offload_notes(run))
    found.extend(_prediction_notes(run.hardware, run.site))
    found.extend(_outer_step_notes(run.device_mesh, run.site, num_steps=run.steps))
    if restart_number(os.environ) and not run.resume:
        found.append("started again by the agent without a checkpoint in --out: from step 0")
    if starts_new(run.resume, run.out):
        found.extend(_random_base_notes(run.model, run.lora))
        found.extend(_dropout_notes(run.model))
        found.extend(_code_notes(run.model))
        found.extend(_text_part_notes(run.model))
        defaults = defaults_note(
            run.model, run.optim, seq_len=run.data.seq_len, lora_rank=run.lora.rank
        )
        if defaults is not None:
            found.append(defaults)
    return tuple(found)


def _elastic_notes(mesh: Mesh, full_mesh: str) -> Iterator[str]:
    if full_mesh:
        yield elastic_note(mesh, Mesh.parse(full_mesh))


def _remote_notes(remote: str | None, out: str | None) -> Iterator[str]:
    if remote:
        yield f"checkpoints are copied to {remote}; the run folder is {out}"


def _prediction_notes(hardware: str | None, site: SiteConfig) -> Iterator[str]:
    if hardware is not None:
        yield f"hardware: the first steps are compared with the prediction for {hardware}"
    elif site.gbit_s:
        yield "site.gbit_s: predictions read it alone, and no hardware is named"


def _outer_step_notes(mesh: Mesh, site: SiteConfig, *, num_steps: int) -> Iterator[str]:
    """Steps at the end that no outer step follows."""
    num_left = num_steps % site.every
    if local_update_axis(mesh) is not None and num_left:
        steps = counted(num_left, "step")
        yield f"site.every: the last {steps} of steps {num_steps} are in no outer step"


def _dropout_notes(model: ModelSection) -> Iterator[str]:
    """Dropout that the settings of a folder name and weft's own families leave out."""
    if model.from_hf is None or model.name.startswith(PREFIX):  # transformers' own code drops out
        return
    config = read_json(Path(model.from_hf) / CONFIG)
    named = [f"{key} {config[key]}" for key in DROPOUT_KEYS if config.get(key)]
    sizes = model.architecture
    if not named or sizes.get("dropout"):
        return
    fix = f"--model.name {PREFIX}{config.get('model_type')} trains with it"
    if "dropout" in sizes:
        fix = f"--model.dropout {named[0].split()[-1]} trains with it"
    yield f"{CONFIG} names {', '.join(named)}; nothing is dropped here: {fix}"


def _code_notes(model: ModelSection) -> Iterator[str]:
    """Settings of a folder for which transformers' own code trains a family that weft has."""
    if model.from_hf is None or not model.name.startswith(PREFIX):
        return
    config = text_config_of(read_json(Path(model.from_hf) / CONFIG))
    settings = "; ".join(uncomputed_settings(config, FAMILIES))
    if settings:
        yield f"{CONFIG}: {settings}: transformers' own code trains it, as {model.name}"


def _text_part_notes(model: ModelSection) -> Iterator[str]:
    """What is not read of the folder of a model of several parts; the checks have listed it."""
    if model.from_hf is not None:
        yield from list_text_tensors(Path(model.from_hf), family=model.name).notes


def _random_base_notes(model: ModelSection, lora: LoraConfig) -> Iterator[str]:
    if lora.rank and model.from_hf is None and lora.base is None:
        yield (
            "the base model of the LoRA adapters has random weights; "
            "set --model.from_hf or --lora.base to a trained model"
        )
