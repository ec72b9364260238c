"""Config files that name another one as their `base`: the chain of files, and their keys under each other. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.config import toml
from weft.config.families import choose_model
from weft.config.hf.from_hf import KEY as FROM_HF
from weft.config.hf.mapping import Families
from weft.config.keys import Flat
from weft.config.run_files import OWN_KEYS, is_of_run
from weft.errors import ConfigError, Fault

BASE = "base"
"""Key of a config file: the file whose keys its own override."""
MAX_FILES = 16
"""Files of a chain: a longer one is a mistake."""
MODEL_NAMES = ("model.name", "model.preset")


@dataclass(frozen=True)
class ConfigFile:
    """One file of a chain.

    Attributes:
        keys: its own, without `base`.
    """

    path: str
    keys: Flat


def read_chain(path: str) -> tuple[ConfigFile, ...]:
    """A config file behind the chain of its bases, the one that is overridden by all others first.

    A base that is the config of a run lends its keys without the folder of that run.

    Raises:
        ConfigError: a file is missing or no TOML, or the chain is a cycle or too long; the line
            names the file that names it.
    """
    chain = [ConfigFile(path, toml.read(path))]
    seen = {os.path.realpath(path)}
    while BASE in chain[-1].keys:
        named_by = chain[-1]
        found = _base_path(named_by)
        if os.path.realpath(found) in seen:
            names = " -> ".join([*(each.path for each in chain), found])
            raise ConfigError(Fault(BASE, "is a cycle", got=names, fix="remove one of these bases"))
        if len(chain) == MAX_FILES:
            got, need = f"more behind {named_by.path}", f"at most {MAX_FILES} files"
            raise ConfigError(Fault(BASE, "is too long a chain", got=got, need=need))
        seen.add(os.path.realpath(found))
        chain.append(ConfigFile(found, _read_base(found, named_by.path)))
    return tuple(_without_base(each) for each in reversed(chain))


def _base_path(file: ConfigFile) -> str:
    """The path of a file's base, which is relative to the folder of the file.

    Raises:
        ConfigError: it is no path, or the file is one of a run folder, which holds all keys.
    """
    base = file.keys[BASE]
    fix = 'for example base = "small.toml"'
    if not isinstance(base, str) or not base or "\0" in base:
        what, need = f"of {file.path} is no path", "the name of a TOML file"
        raise ConfigError(Fault(BASE, what, got=repr(base), need=need, fix=fix))
    if is_of_run(Path(file.path)):
        what = f"is not read from {file.path}, which lies in a run folder"
        fix = "copy the file out of the folder, or remove this key"
        raise ConfigError(Fault(BASE, what, got=repr(base), fix=fix))
    return os.path.normpath(Path(file.path).parent / Path(base).expanduser())


def _read_base(path: str, named_by: str) -> Flat:
    """The keys of a base.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        keys = toml.read(path)
    except ConfigError as error:
        fix = f"check base in {named_by}"
        faults = [
            replace(fault, key=BASE, what=f"of {named_by}: {fault.what}", fix=fix)
            for fault in error.faults
        ]
        raise ConfigError(*faults) from None
    if is_of_run(Path(path)):
        return {key: value for key, value in keys.items() if key not in OWN_KEYS}
    return keys


def _without_base(file: ConfigFile) -> ConfigFile:
    return replace(file, keys={key: value for key, value in file.keys.items() if key != BASE})


def keys_of_chain(chain: Sequence[ConfigFile]) -> Flat:
    """The keys of all files; those of later files win."""
    return {key: value for file in chain for key, value in file.keys.items()}


def read_with_bases(path: str) -> Flat:
    """The keys of a file and of its bases; its own win.

    Raises:
        ConfigError: as `read_chain`.
    """
    return keys_of_chain(read_chain(path))


def merged_keys(chain: Sequence[ConfigFile], families: Families) -> Flat:
    """As `keys_of_chain`, where a file that chooses another model than its bases replaces their
    model with all its fields, as a flag does.
    """
    merged: Flat = {}
    for file in chain:
        if not _keeps_model(merged, file.keys, families):
            merged = {key: merged[key] for key in merged if not key.startswith("model.")}
        merged = {**merged, **file.keys}
    return merged


def _keeps_model(base: Flat, own: Flat, families: Families) -> bool:
    """Whether the model fields of a base still count below another file's keys."""
    if FROM_HF in base or FROM_HF in own:
        names = (FROM_HF, *MODEL_NAMES)
        return all(own[key] == base.get(key) for key in names if key in own)
    try:
        return choose_model(base, own, families).keeps_file
    except ConfigError:  # reported where the model is chosen
        return True


def source_of(key: str, chain: Sequence[ConfigFile]) -> str:
    """The file of a chain whose value of a key counts."""
    return next(file.path for file in reversed(chain) if key in file.keys)


def with_source(fault: Fault, chain: Sequence[ConfigFile]) -> Fault:
    """A fault of a key with the file that has it, where there are several."""
    if len(chain) < 2 or not any(fault.key in file.keys for file in chain):
        return fault
    return replace(fault, what=f"{fault.what} in {source_of(fault.key, chain)}")


def with_note_on_base(fault: Fault) -> Fault:
    """The fault of a key; of `base`, which is a key of files alone, it says so."""
    if fault.key != BASE:
        return fault
    fix = 'write base = "other.toml" into the file, or name that file in place of this flag'
    return replace(fault, what="is a key of config files", fix=fix)
