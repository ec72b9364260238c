"""Export: a checkpoint becomes a Hugging Face folder, or a folder of its LoRA adapters in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.format import Facts
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.source import Source
from weft.config.hf.read_config import CONFIG
from weft.config.hf.safetensors_files import read_json
from weft.config.hf.text_part import text_config_of, whole_config_of
from weft.config.hf.write_config import config_json, unwritable
from weft.config.lora import adapted_linears
from weft.config.schema import LoraConfig
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, counted
from weft.hf.adapters import merge_adapters, stored_lora, write_adapters
from weft.hf.check_logits import NOT_COMPARED, compare_logits
from weft.hf.combined_adapters import combine
from weft.hf.import_hf import TransferResult, count_params
from weft.hf.match import mapping_of
from weft.hf.peft import unexpected_keys
from weft.hf.placement import hf_tensors
from weft.hf.sidecar import read_sidecars, reject_existing
from weft.hf.text_places import PlacedText, placed_text
from weft.hf.write import TypedTensor, choose_dtypes, main_dtype, write_folder
from weft.models import FAMILIES
from weft.view.quantity import memory


@dataclass(frozen=True)
class _StoredModel:
    """A checkpoint's model, its config, and the checkpoint's facts.

    Attributes:
        source: without adapters: they are merged where it has some.
        with_adapters: as they are stored, or the sum of those of several runs.
        lora: config of these adapters.
    """

    source: Source
    with_adapters: Source
    lora: LoraConfig
    cfg: ModelConfig
    facts: Facts


@dataclass(frozen=True)
class Merge:
    """Whose adapters are added to those of a checkpoint.

    Attributes:
        others: further checkpoints.
        weights: of the checkpoint and of these; none: all 1.
    """

    others: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()


ALONE = Merge()


@dataclass(frozen=True)
class ExportedModel:
    """A checkpoint in terms of a Hugging Face folder.

    Attributes:
        typed: tensors of the folder.
        config: content of config.json.
        texts: name -> content of further small files.
        note: what of the model that was imported is not there.
    """

    source: Source
    cfg: ModelConfig
    typed: tuple[TypedTensor, ...]
    config: Mapping[str, Any]
    texts: Mapping[str, str]
    note: str = ""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Parameter -> type of its tensor."""
        return {at.param: each.dtype for each in self.typed for at in each.tensor.placements}


def describe_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: str | None,
    sidecar_folders: Iterable[Path],
    merge: Merge = ALONE,
) -> ExportedModel:
    """A checkpoint as a Hugging Face folder would have it; adapters are merged.

    Args:
        folder: where it will be written, for messages.
        dtype: of the tensors, torch's name; None: as they are stored.
        sidecar_folders: folders that may have the small files that the model was imported with.

    Raises:
        CheckpointError: transformers has no such model, or the folder exists already.
    """
    reject_existing(folder)
    model = _open_model(checkpoint, merge)
    source = model.source
    cfg = model.cfg
    texts = read_sidecars(sidecar_folders)
    whole = json.loads(texts.pop(CONFIG, "{}"))
    original = text_config_of(whole)
    faults = tuple(unwritable(cfg, FAMILIES))
    if faults:
        raise CheckpointError(*faults)
    mapping = mapping_of(cfg.family)
    ties = FAMILIES[cfg.family].ties(cfg)
    tensors = hf_tensors(mapping.weights, cfg, source.shapes, ties=ties, where=str(folder))
    typed = choose_dtypes(tensors, source, dtype=getattr(torch, dtype) if dtype else None)
    classes = (model.facts.run.get("data") or {}).get("classes", ())
    config = config_json(mapping, cfg, dtype=main_dtype(typed), original=original, classes=classes)
    note = f"the text part alone, as {config['architectures'][0]}" if original is not whole else ""
    return ExportedModel(source, cfg, typed, config, texts, note)


def export_hf(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: str | None,
    max_shard_bytes: int,
    sidecar_folders: Iterable[Path],
    compares: bool,
    merge: Merge = ALONE,
) -> TransferResult:
    """Write a Hugging Face folder of a checkpoint; adapters are merged.

    Args:
        dtype: of the tensors, torch's name; None: as they are stored.
        sidecar_folders: folders that may have the small files that the model was imported with.
        compares: whether to end with a comparison with transformers.

    Raises:
        CheckpointError: transformers has no such model, the folder exists already, or a disk
            error occurs.
    """
    model = describe_checkpoint(
        checkpoint, folder, dtype=dtype, sidecar_folders=sidecar_folders, merge=merge
    )
    write_folder(
        folder,
        model.typed,
        model.source,
        max_shard_bytes=max_shard_bytes,
        texts=model.texts,
        config=model.config,
    )
    comparison = NOT_COMPARED
    if compares:
        comparison = compare_logits(folder, model.source, model.cfg, dtypes=model.dtypes)
    num_bytes = sum(each.num_bytes for each in model.typed)
    size = f"{memory(num_bytes)}, {len(model.typed)} tensors"
    line = f"{folder}: {count_params(model.source)}, {model.config['torch_dtype']}, {size}"
    lines = tuple(filter(None, (line, model.note, str(comparison))))
    return TransferResult(lines, is_equal=comparison.is_equal)


def export_adapters(
    checkpoint: Path, folder: Path, *, base: str | None, merge: Merge = ALONE
) -> str:
    """Write a checkpoint's adapters alone, in PEFT's layout; returns a report for the user.

    Args:
        base: name or folder of the base model in transformers, if it is known.

    Raises:
        CheckpointError: it has none, or the folder exists already.
    """
    reject_existing(folder)
    model = _open_model(checkpoint, merge)
    lora = model.lora
    placed = placed_in(base)
    write_adapters(
        folder,
        model.with_adapters,
        cfg=model.cfg,
        lora=lora,
        base=base,
        place=placed.at.whole_name if placed else None,
    )
    num_linears = len(adapted_linears(lora.targets, model.cfg.linears()))
    report = f"{folder}: adapters of rank {lora.rank} on {counted(num_linears, 'linear')}"
    if placed:
        report += f" of the text part of {type(placed.whole).__name__}"
    unexpected = unexpected_keys(model.cfg, lora)
    if unexpected:
        report += (
            f"\nPEFT 0.21 with transformers 5 does not find {len(unexpected)} of them ({unexpected[0]}, ...): it takes"
            " their names for those of routed experts. To have them there, export the merged model"
        )
    return report


def placed_in(base: str | None) -> PlacedText | None:
    """The text part of a base model, if that is a folder of a model of several parts."""
    path = Path(base or "") / CONFIG
    config = read_json(path) if base and path.is_file() else {}
    whole_config = whole_config_of(config)
    return None if whole_config is None else placed_text(whole_config, text_config_of(config))


def _open_model(path: Path, merge: Merge) -> _StoredModel:
    checkpoint = open_checkpoint(path)
    facts = checkpoint.manifest.facts
    config_type = FAMILIES[facts.family].Config
    cfg = config_type.model_validate_json(json.dumps(facts.architecture))
    stored: Source = checkpoint.section("model")
    lora = stored_lora(facts)
    if merge != ALONE:
        combined = combine((path, *merge.others), merge.weights)
        stored, lora = combined, combined.lora
    return _StoredModel(merge_adapters(stored, lora), stored, lora, cfg, facts)
