"""Owns a model's way in and out as a whole: a Hugging Face folder to a run, a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.format import Facts
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.source import Source
from weft.config.hf.compose import config_json, unwritable
from weft.config.hf.describe import CONFIG
from weft.config.lora import adapted_linears
from weft.config.run import Run
from weft.config.toml import dump
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.data.tokenizer import FILE
from weft.errors import CheckpointError
from weft.hf.adapters import lora_of, plain, write_adapters
from weft.hf.folder import HfFolder
from weft.hf.intake import CHUNK_BYTES, write_parameters
from weft.hf.kept import KEPT, find_texts, keep_texts
from weft.hf.logits import Compared, compare
from weft.hf.peft import strange_to_peft
from weft.hf.tables import TABLES
from weft.hf.target import targets
from weft.hf.write import Planned, plan, write_folder
from weft.hf.written import refuse_filled
from weft.models import FAMILIES
from weft.train.start import check_start
from weft.view.quantity import count

NOT_ASKED = Compared(reason="as asked")


@dataclass(frozen=True)
class Done:
    """What was done, in lines for a person, and whether the comparison holds."""

    lines: tuple[str, ...]
    holds: bool


def bring(folder: Path, out: Path, run: Run, *, compares: bool, chunk_bytes: int = CHUNK_BYTES) -> Done:
    """Make the run folder `out` of a folder: the checkpoint of step 0, run.toml, the small files.

    Args:
        run: as `--model.from_hf FOLDER` describes it.

    Raises:
        CheckpointError: a tensor has another shape than config.json makes of it, or the disk refuses.
    """
    check_start(run)
    source = HfFolder(folder, run.model)
    texts = find_texts([folder])
    tokenizer = str(out / KEPT / FILE) if FILE in texts else run.data.tokenizer
    made = run.model_copy(
        update={
            "model": run.model.model_copy(update={"from_hf": None}),
            "data": run.data.model_copy(update={"tokenizer": tokenizer}),
            "out": str(out),
        }
    )
    facts = Facts(
        step=0,
        seed=made.seed,
        family=made.model.name,
        architecture=made.model.architecture,
        plan={},
        run={"model": made.model.model_dump(mode="json"), "data": {"tokenizer": tokenizer}},
    )
    manifest = write_parameters(out, source, facts, chunk_bytes=chunk_bytes)
    keep_texts(out, texts)
    (out / "run.toml").write_text(dump(made), encoding="utf-8")
    found = compare(folder, source, run.model) if compares else NOT_ASKED
    line = f"{folder}: {_size(source)}, {manifest.num_bytes / 1e9:.3g} GB, now {out / FOLDER / 'step-000000'}"
    return Done((line, str(found), f"train it: weft train {out / 'run.toml'} --resume auto"), found.holds)


def send(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: str | None,
    max_shard_bytes: int,
    kept: Iterable[Path],
    compares: bool,
) -> Done:
    """Make a Hugging Face folder of a checkpoint; adapters are merged.

    Args:
        dtype: of the tensors, torch's name; None: as they are stored.
        kept: folders that may have the small files which the model came with.

    Raises:
        CheckpointError: transformers has no such model, the folder is there already, or the disk refuses.
    """
    refuse_filled(folder)
    source, config, _ = _opened(checkpoint)
    texts = find_texts(kept)
    came_with = json.loads(texts.pop(CONFIG, "{}"))
    if faults := tuple(unwritable(config.family, config)):
        raise CheckpointError(*faults)
    ties = FAMILIES[config.family].ties(config)
    found = targets(TABLES[config.family], config, source.shapes, ties=ties, where=str(folder))
    planned = plan(found, source, dtype=getattr(torch, dtype) if dtype else None)
    described = config_json(config.family, config, dtype=main_type(planned), kept=came_with)
    write_folder(folder, planned, source, max_shard_bytes=max_shard_bytes, texts=texts, config=described)
    types = {user.ours: tensor.dtype for tensor in planned for user in tensor.target.users}
    result = compare(folder, source, config, types=types) if compares else NOT_ASKED
    size = sum(tensor.num_bytes for tensor in planned)
    line = f"{folder}: {_size(source)}, {described['torch_dtype']}, {size / 1e9:.3g} GB, {len(planned)} tensors"
    return Done((line, str(result)), result.holds)


def send_adapters(checkpoint: Path, folder: Path, *, base: str | None) -> str:
    """Make a folder of a checkpoint's adapters alone, in PEFT's layout; what was done, in a line.

    Raises:
        CheckpointError: it has none, or the folder is there already.
    """
    refuse_filled(folder)
    _, config, facts = _opened(checkpoint)
    stored = open_checkpoint(checkpoint).section("model")
    lora = lora_of(facts)
    write_adapters(folder, stored, cfg=config, lora=lora, base=base)
    told = (
        f"{folder}: adapters of rank {lora.rank} beside {len(adapted_linears(lora.targets, config.linears()))} linears"
    )
    if strange := strange_to_peft(config, lora):
        told += (
            f"\nPEFT 0.21 with transformers 5 does not find {len(strange)} of them ({strange[0]}, ...): it takes their names for"
            " those of routed experts. To have them there, export the merged model"
        )
    return told


def _opened(path: Path) -> tuple[Source, ModelConfig, Facts]:
    """Parameters of the plain model, its config, and what the checkpoint says of itself."""
    checkpoint = open_checkpoint(path)
    facts = checkpoint.manifest.facts
    config = FAMILIES[facts.family].Config.model_validate_json(json.dumps(facts.architecture))
    return plain(checkpoint.section("model"), lora_of(facts)), config, facts


def main_type(planned: Sequence[Planned]) -> str:
    """The type of most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in planned:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.num_bytes
    return sizes.most_common(1)[0][0]


def _size(source: Source) -> str:
    entries = sum(Box.whole(shape).size for shape in source.shapes.values())
    return f"{count(entries)} parameters"
