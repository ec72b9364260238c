"""Tensors of a folder; of a model of several parts those of its text part, by names of its decoder. torch is imported late."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.hf.architectures import PREFIX
from weft.config.hf.read_config import CONFIG
from weft.config.hf.safetensors_files import TensorEntry, list_some, list_tensors, read_json
from weft.config.hf.text_part import text_config_of, whole_config_of
from weft.errors import CheckpointError, Fault, counted


@dataclass(frozen=True)
class TextTensors:
    """The tensors that a folder holds for a model of text.

    Attributes:
        entries: by the names of the decoder.
        notes: what is not read, and what could not be compared.
    """

    entries: Mapping[str, TensorEntry]
    notes: tuple[str, ...] = ()


def list_text_tensors(folder: Path, *, family: str) -> TextTensors:
    """The tensors of a folder; of a model of several parts those of its text part.

    Args:
        family: that will read them.

    Raises:
        CheckpointError: as `list_tensors`; the decoder computes other logits of texts than the whole
            model; transformers cannot build it, or changes tensors as it loads them.
    """
    listed = list_tensors(folder)
    path = folder / CONFIG
    config = read_json(path) if path.exists() else {}
    if whole_config_of(config) is None:
        return TextTensors(listed)
    shapes = tuple((name, entry.shape) for name, entry in listed.items())
    named = _named(json.dumps(config, sort_keys=True), shapes)
    if named.changed:
        what = "transformers changes tensors as it loads them, which weft does not"
        fix = "save it in transformers with save_pretrained(folder, save_original_format=False)"
        got = list_some(sorted(named.changed))
        raise CheckpointError(Fault(str(folder), what, got=got, fix=fix))
    names = dict(named.text)
    if family.startswith(PREFIX):
        names |= named.published
    notes = [named.note] if named.note else []
    others = Counter(_part(name) for name in listed if name not in names)
    if others:
        parts = ", ".join(f"{part} ({number})" for part, number in others.items())
        number = counted(others.total(), "tensor")
        notes.insert(0, f"the text part alone is read, without {number} of {parts}")
    entries = {names[name]: entry for name, entry in listed.items() if name in names}
    entries |= {names[name]: listed[name].transposed(*dims) for name, dims in named.swapped.items()}
    return TextTensors(entries, tuple(notes))


def _part(name: str) -> str:
    """The first words of a tensor's name that say which part it belongs to."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "model" and rest else first


@dataclass(frozen=True)
class _Named:
    """Names of tensors in a folder.

    Attributes:
        text: name -> name in the decoder, of those of the text part.
        published: the same, as transformers writes the decoder, of those that it puts together in
            memory, such as one tensor an expert.
        swapped: name -> two dims that lie in the other order in the whole model's folders.
        changed: those whose values it changes in another way than those of the decoder.
        note: what could not be compared.
    """

    text: Mapping[str, str]
    published: Mapping[str, str]
    swapped: Mapping[str, tuple[int, int]]
    changed: frozenset[str]
    note: str


@functools.lru_cache(maxsize=8)
def _named(config_text: str, listed: tuple[tuple[str, tuple[int, ...]], ...]) -> _Named:
    """The names as transformers changes them; the text part is compared."""
    from weft.hf.check_text_part import check_text_part  # late: they import torch
    from weft.hf.text_places import placed_text

    config = json.loads(config_text)
    whole_config, text = whole_config_of(config), text_config_of(config)
    placed = placed_text(whole_config, text)
    at = placed.at
    loading, own_loading = Renaming(placed.whole), Renaming(placed.decoder)
    names: dict[str, str] = {}
    combined: dict[str, str] = {}
    swapped: dict[str, tuple[int, int]] = {}
    changed = set[str]()
    for name, shape in listed:
        renamed = loading.renamed(name)
        converted, operations = loading.converted(name)
        own = at.own_name(renamed) or at.own_name(converted)
        if own is None:
            continue
        names[name] = own
        if operations is None or loading.leaves(renamed, shape, operations):
            continue
        _, own_operations = own_loading.converted(own)
        if converted != renamed and _words(operations) == _words(own_operations or ()):
            combined[name] = own
        elif (dims := _swapped_dims(operations)) is not None:
            swapped[name] = dims
        else:
            changed.add(name)
    published = own_loading.published() if combined else {}
    found = {name: published[own] for name, own in combined.items() if own in published}
    note = check_text_part(whole_config, text)
    return _Named(names, found, swapped, frozenset(changed), note)


class Renaming:
    """How transformers names the tensors of a folder as it loads them.

    Args:
        lm: a model of transformers, without memory.
    """

    def __init__(self, lm: Any) -> None:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

        transforms = conversion_mapping.get_model_conversion_mapping(lm)
        self._lm = lm
        self._known = lm.state_dict()
        self._renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [
            each for each in transforms if isinstance(each, loading.WeightConverter)
        ]
        self._rename: Any = functools.partial(
            loading.rename_source_key,
            base_model_prefix=lm.base_model_prefix,
            meta_state_dict=self._known,
        )

    def renamed(self, name: str) -> str:
        """The name of a tensor as it is."""
        found: str = self._rename(name, self._renamings, [])[0]
        return found

    def converted(self, name: str) -> tuple[str, tuple[Any, ...] | None]:
        """The name of the parameter that holds a tensor, and what is done to it; None: nothing."""
        found, pattern = self._rename(name, self._renamings, self._converters)
        if pattern is None:
            return found, None
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        return found, tuple(converter.operations)

    def leaves(self, name: str, shape: tuple[int, ...], operations: Iterable[Any]) -> bool:
        """Whether a tensor of a model's own shape stays as it is."""
        is_as_known = name in self._known and tuple(self._known[name].shape) == shape
        return is_as_known and all(getattr(each, "check_dims", False) for each in operations)

    def published(self) -> dict[str, str]:
        """Names of tensors as they are -> as transformers writes them."""
        from weft.models.transformers.stored import stored_tensors

        shapes = {name: tuple(x.shape) for name, x in self._lm.named_parameters()}
        tensors = {tensor for tensor, _, _ in stored_tensors(self._lm, shapes)}
        return {self.renamed(tensor): tensor for tensor in tensors}


def _swapped_dims(operations: tuple[Any, ...]) -> tuple[int, int] | None:
    """The dims that operations swap, where they do nothing else."""
    if [type(each).__name__ for each in operations] != ["Transpose"]:
        return None
    return operations[0].dim0, operations[0].dim1


def _words(operations: Iterable[Any]) -> list[tuple[str, Any]]:
    """Operations as values that can be compared."""
    return [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
