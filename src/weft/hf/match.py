"""Matches the tensors of a folder with a family's weight rules: every tensor is used exactly once, or is named. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weft.config.hf.mapping import (
    EXPERT,
    SCORE,
    SCORES,
    HFMapping,
    Slice,
    WeightMapping,
    WeightRule,
)
from weft.config.hf.read_config import hf_mappings
from weft.config.hf.safetensors_files import DTYPES, INTEGERS, TensorEntry, list_some
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError, Fault
from weft.hf.placement import ParamSource, Placement, placements
from weft.hf.text_tensors import list_text_tensors
from weft.models import FAMILIES

MIN_COUNTED = 512
"""Layers or experts whose missing tensors are named one by one."""


@dataclass(frozen=True)
class MatchedFolder:
    """The tensors of a folder, and the parameters that they make up.

    Attributes:
        entries: tensors by name, as the rules name them.
        params: parameter -> its source.
        aliases: tied parameter that the files repeat beside its owner -> its source; it must hold
            the same.
        notes: what of the folder is not read.
    """

    entries: Mapping[str, TensorEntry]
    params: Mapping[str, ParamSource]
    aliases: Mapping[str, ParamSource]
    notes: tuple[str, ...] = ()


def mapping_of(family: str) -> HFMapping:
    """Hugging Face's format of a family.

    Raises:
        CheckpointError: transformers has no such model.
    """
    mapping = FAMILIES[family].hf
    if mapping is None:
        need = f"one of {', '.join(hf_mappings(FAMILIES))}"
        raise CheckpointError(
            Fault(
                "model.name",
                "has no counterpart in transformers",
                got=repr(family),
                need=need,
                fix="export a run of such a family",
            )
        )
    return mapping


def match_folder(folder: Path, cfg: ModelConfig) -> MatchedFolder:
    """How the tensors of a folder make up the parameters of this model; no tensor is read.

    Raises:
        CheckpointError: tensors that are missing, left over or do not fit, files that are missing
            or damaged.
    """
    found = list_text_tensors(folder, family=cfg.family)
    matched = match_tensors(
        mapping_of(cfg.family).weights,
        cfg,
        found.entries,
        ties=FAMILIES[cfg.family].ties(cfg),
        folder=str(folder),
    )
    return replace(matched, notes=found.notes)


def match_tensors(
    mapping: WeightMapping,
    cfg: Any,
    listed: Mapping[str, TensorEntry],
    *,
    ties: Mapping[str, str],
    folder: str,
) -> MatchedFolder:
    """How tensors make up the parameters of a model.

    Raises:
        CheckpointError: tensors that are missing, left over, or of a shape or type that does not
            fit; all at once.
    """
    entries = add_prefix(listed, mapping)
    _check_size(cfg, entries, folder)
    rules = _select_rules(mapping, cfg, entries)
    if SCORE.tensor not in entries:  # of a language model: the head for labels is drawn
        rules = [rule for rule in rules if rule.param not in SCORES]
    owner_rules = [rule for rule in rules if rule.param not in ties]
    alias_rules = [rule for rule in rules if rule.param in ties and rule.tensor in entries]
    matching = _Matching(entries=entries, cfg=cfg, folder=folder)
    params = matching.find_sources(owner_rules)
    aliases = matching.find_sources(alias_rules)
    head_of_vocabulary = ("lm_head.weight",) if getattr(cfg, "labels", 0) else ()
    ignored = (*mapping.ignored, *mapping.unused(cfg), *head_of_vocabulary)
    matching.check_all_used([*params.values(), *aliases.values()], ignored)
    matching.faults.extend(_slice_faults(params.values(), folder))
    if matching.faults:
        raise CheckpointError(*matching.faults)
    return MatchedFolder(entries=entries, params=params, aliases=aliases)


def _check_size(cfg: Any, entries: Mapping[str, TensorEntry], folder: str) -> None:
    """Check that there are as many tensors as layers and experts, before their names are made.

    Raises:
        CheckpointError: there are not.
    """
    for name in ("layers", "experts"):
        number = getattr(cfg, name, 0)
        if number > max(len(entries), MIN_COUNTED):
            what = f"{number} {name}, and only {len(entries)} tensors"
            raise CheckpointError(Fault(folder, what, fix="correct config.json"))


@dataclass
class _Matching:
    """A match in progress: faults are collected and raised together."""

    entries: Mapping[str, TensorEntry]
    cfg: Any
    folder: str
    faults: list[Fault] = field(default_factory=list)

    def find_sources(self, rules: Iterable[WeightRule]) -> dict[str, ParamSource]:
        """Sources of the parameters of these rules, without those at fault."""
        found: dict[str, list[Placement]] = {}
        first: dict[str, WeightRule] = {}
        missing: dict[str, None] = {}
        for rule in rules:
            tensors = self._tensor_names(rule)
            absent = [tensor for tensor in tensors if tensor not in self.entries]
            if absent:
                missing.update(dict.fromkeys(absent))
                continue
            entries = [self.entries[tensor] for tensor in tensors]
            fault = _misfit(rule, entries, tensors)
            if fault is None:
                first.setdefault(rule.param, rule)
                parts = placements(rule, rule.param, tensors, entries[0].shape)
                found.setdefault(rule.param, []).extend(parts)
            else:
                self.faults.append(fault)
        if missing:
            self.faults.append(_missing_fault(missing, self.folder))
        return {param: ParamSource(first[param], tuple(parts)) for param, parts in found.items()}

    def check_all_used(self, sources: Iterable[ParamSource], ignored: Iterable[str]) -> None:
        """Add a fault for tensors that no parameter uses."""
        used = {tensor for source in sources for tensor in source.tensors}
        patterns = tuple(ignored)
        unused = []
        for name in self.entries:
            is_ignored = any(fnmatchcase(name, pattern) for pattern in patterns)
            if name not in used and not is_ignored:
                unused.append(name)
        if unused:
            what = "holds tensors that the model has no place for"
            self.faults.append(
                Fault(
                    self.folder,
                    what,
                    got=list_some(unused),
                    fix="remove them, or correct config.json",
                )
            )

    def _tensor_names(self, rule: WeightRule) -> tuple[str, ...]:
        if EXPERT not in rule.tensor:
            return (rule.tensor,)
        return tuple(rule.tensor.replace(EXPERT, str(expert)) for expert in range(self.cfg.experts))


def add_prefix(
    entries: Mapping[str, TensorEntry], mapping: WeightMapping
) -> dict[str, TensorEntry]:
    """Entries under the names of the rules, where an older file has left out their prefix."""
    prefix = mapping.prefix
    if not prefix or any(name.startswith(prefix) for name in entries):
        return dict(entries)
    unprefixed = {rule.tensor for rule in mapping.rules if not rule.tensor.startswith(prefix)}
    found = {}
    for name, entry in entries.items():
        if name in unprefixed:
            rule_name = name
        else:
            rule_name = prefix + name
        found[rule_name] = entry
    return found


def _select_rules(
    mapping: WeightMapping, cfg: Any, entries: Mapping[str, TensorEntry]
) -> list[WeightRule]:
    """The rules of each parameter: the packed one where its tensor is in the files, else the
    published ones.
    """
    rules: dict[str, list[WeightRule]] = {}
    for rule in mapping.expand(cfg):
        rules.setdefault(rule.param, []).append(rule)
    for rule in mapping.expand_packed(cfg):
        if rule.tensor in entries:
            rules[rule.param] = [rule]
    return [rule for each in rules.values() for rule in each]


def _missing_fault(missing: Collection[str], folder: str) -> Fault:
    count = "1 tensor is"
    if len(missing) > 1:
        count = f"{len(missing)} tensors are"
    return Fault(
        folder,
        f"{count} missing",
        need=list_some(missing),
        fix="download the folder again, with all files",
    )


def _misfit(rule: WeightRule, entries: list[TensorEntry], names: tuple[str, ...]) -> Fault | None:
    """Why these tensors cannot be the parameter of the rule."""
    first = entries[0]
    for entry, name in zip(entries, names, strict=True):
        where = str(entry.file)
        if entry.dtype not in (INTEGERS if rule.is_integer else DTYPES):
            what = f"{name} is of a type that parameters cannot have"
            fix = "quantized weights have to be turned into bfloat16 first"
            return Fault(where, what, got=entry.dtype, fix=fix)
        if entry.shape != first.shape or entry.dtype != first.dtype:
            got = f"{entry.dtype} {list(entry.shape)}"
            need = f"{first.dtype} {list(first.shape)}"
            return Fault(where, f"{name} differs from {names[0]}", got=got, need=need)
    where = str(first.file)
    got = str(list(first.shape))
    if rule.transposed and len(first.shape) != 2:
        return Fault(where, f"{names[0]} is no matrix", got=got)
    if rule.part is not None and rule.part.tensor_shape != first.shape:
        need = str(list(rule.part.tensor_shape))
        return Fault(where, f"{names[0]}: config.json makes another shape of it", got, need)
    if rule.slice is not None and not _divides(first.shape, rule.slice):
        return Fault(where, f"{names[0]} does not divide by {rule.slice.count}", got=got)
    return None


def _divides(shape: tuple[int, ...], part: Slice) -> bool:
    """Whether a tensor of this shape has equal parts along the dim of the slice."""
    if part.dim >= len(shape):
        return False
    length = shape[part.dim]
    return length % part.count == 0


def _slice_faults(sources: Iterable[ParamSource], folder: str) -> Iterator[Fault]:
    """Each entry of a tensor is used once: by one parameter, or by those that share it."""
    users: dict[str, list[Placement]] = {}
    for source in sources:
        for placement in source.placements:
            users.setdefault(placement.tensor, []).append(placement)
    for tensor, parts in users.items():
        regions = {part.region for part in parts}
        num_used = sum(part.region.size for part in parts)
        if len(regions) < len(parts) or num_used != math.prod(parts[0].tensor_shape):
            params = ", ".join(part.param for part in parts)
            yield Fault(folder, f"{tensor} is not used exactly once", got=params)
