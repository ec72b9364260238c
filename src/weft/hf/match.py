"""Owns the matching of files with a table: every tensor of the files is used exactly once, or is named. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from weft.config.hf.files import DTYPES, Entry, some
from weft.errors import CheckpointError, Fault
from weft.hf.recipe import Recipe
from weft.hf.table import EXPERT, Row, WeightTable


@dataclass(frozen=True)
class Matched:
    """Files and table, matched.

    Attributes:
        entries: their tensors, by the names of the table.
        recipes: of our tensors, by our names.
        repeated: of aliases that stand in the files beside their owner, and must hold the same.
    """

    entries: Mapping[str, Entry]
    recipes: Mapping[str, Recipe]
    repeated: Mapping[str, Recipe]


def match(
    table: WeightTable, cfg: Any, listed: Mapping[str, Entry], *, ties: Mapping[str, str], folder: str
) -> Matched:
    """How the tensors of a folder make up the parameters of a model.

    Raises:
        CheckpointError: tensors that are missing, left over, or of a shape or type that does not fit; all at once.
    """
    entries = prefixed(listed, table)
    rows = _chosen_rows(table, cfg, entries)
    aliases = {name: row for name, row in rows.items() if name in ties}
    faults: list[Fault] = []
    found = _recipes((row for name, row in rows.items() if name not in ties), entries, cfg, folder, faults)
    repeated = _recipes((row for row in aliases.values() if row.theirs in entries), entries, cfg, folder, faults)
    used = {theirs for recipe in (*found.values(), *repeated.values()) for theirs in recipe.theirs}
    passed = (*table.redundant, *table.left_out(cfg))
    left = [name for name in entries if name not in used and not any(fnmatchcase(name, each) for each in passed)]
    if left:
        faults.append(Fault(folder, "holds tensors that the model has no place for", some(left)))
    faults += _shared_faults(found.values(), folder)
    if faults:
        raise CheckpointError(*faults)
    return Matched(entries, found, repeated)


def prefixed(entries: Mapping[str, Entry], table: WeightTable) -> dict[str, Entry]:
    """Entries under the names of the table, where an older file has left their head out."""
    if not table.prefix or any(name.startswith(table.prefix) for name in entries):
        return dict(entries)
    whole = {row.theirs for row in table.rows if not row.theirs.startswith(table.prefix)}
    return {name if name in whole else table.prefix + name: entry for name, entry in entries.items()}


def _chosen_rows(table: WeightTable, cfg: Any, entries: Mapping[str, Entry]) -> dict[str, Row]:
    places = table.places(cfg)
    published = {row.ours: row for each in table.rows for row in each.at(places)}
    packed = {row.ours: row for each in table.packed for row in each.at(places) if row.theirs in entries}
    return published | packed


def _recipes(
    rows: Iterable[Row], entries: Mapping[str, Entry], cfg: Any, folder: str, faults: list[Fault]
) -> dict[str, Recipe]:
    """Recipes of these rows as far as they can be made; what is wrong goes to `faults`."""
    found, missing = {}, []
    for row in rows:
        names = _names(row, cfg)
        if absent := [name for name in names if name not in entries]:
            missing += absent
            continue
        fault = _unfit(row, [entries[name] for name in names], names)
        if fault:
            faults.append(fault)
        else:
            found[row.ours] = Recipe(row, entries[names[0]].shape, len(names) if EXPERT in row.theirs else 0)
    if missing:
        what = f"{len(missing)} tensor{'s are' if len(missing) > 1 else ' is'} missing"
        faults.append(Fault(folder, what, need=some(dict.fromkeys(missing))))
    return found


def _names(row: Row, cfg: Any) -> list[str]:
    if EXPERT not in row.theirs:
        return [row.theirs]
    return [row.theirs.replace(EXPERT, str(expert)) for expert in range(cfg.experts)]


def _unfit(row: Row, found: list[Entry], names: list[str]) -> Fault | None:
    """Why these tensors cannot be what the row says."""
    first = found[0]
    for entry, name in zip(found, names, strict=True):
        if entry.dtype not in DTYPES:
            fix = "quantized weights have to be turned into bfloat16 first"
            return Fault(str(entry.file), f"{name} is of a type that parameters cannot have", entry.dtype, fix=fix)
        if entry.shape != first.shape or entry.dtype != first.dtype:
            got, need = (f"{each.dtype} {list(each.shape)}" for each in (entry, first))
            return Fault(str(entry.file), f"{name} differs from {names[0]}", got, need)
    share = row.share
    if row.transposed and len(first.shape) != 2:
        return Fault(str(first.file), f"{names[0]} is no matrix", str(list(first.shape)))
    if share and (len(first.shape) <= share.dim or first.shape[share.dim] % share.parts):
        return Fault(str(first.file), f"{names[0]} does not divide by {share.parts}", str(list(first.shape)))
    return None


def _shared_faults(recipes: Iterable[Recipe], folder: str) -> Iterator[Fault]:
    """Each of their tensors is used whole: by one of ours, or by as many as it has parts."""
    users: dict[str, list[Row]] = {}
    for recipe in recipes:
        for name in recipe.theirs:
            users.setdefault(name, []).append(recipe.row)
    for name, rows in users.items():
        shares = [row.share for row in rows]
        parts = shares[0].parts if shares[0] else 1
        if sorted(share.index if share else 0 for share in shares) != list(range(parts)):
            yield Fault(
                folder, f"{name} is not used exactly once", ", ".join(row.ours for row in rows), f"{parts} parts"
            )
