"""Loading a run config: defaults, preset, TOML file and `--a.b value` flags, later ones win; all faults are reported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from weft.code.identity import CodeIdentity, changed_parts, stored_parts
from weft.code.trust import trust_text
from weft.config import flags
from weft.config.base_files import (
    ConfigFile,
    keys_of_chain,
    merged_keys,
    read_chain,
    with_note_on_base,
    with_source,
)
from weft.config.families import ModelChoice, choose_model, default_model, preset_fields, run_type
from weft.config.finetuning import finetuning_defaults
from weft.config.hf.architectures import is_architecture_name
from weft.config.hf.from_hf import KEY as FROM_HF
from weft.config.hf.from_hf import NO_FOLDER, FolderModel, contradictions, select_folder
from weft.config.hf.mapping import ConfigFamily, Families
from weft.config.keys import Flat, faults_of, keys_of, nest, table_key, unknown_key, whole_number
from weft.config.optimizers import is_user_class
from weft.config.rules.values import (
    EPOCHS,
    STEPS,
    length_is_said_once,
    mesh_can_be_read,
    optimizer_faults,
    rate_faults,
    sizes_are_possible,
    undecodable,
    unexpanded,
)
from weft.config.run import Run
from weft.config.run_files import DIGEST, is_stored, out_of_stored, with_run_file
from weft.config.schedule_keys import schedule_keys
from weft.config.schema import ConfigSection
from weft.config.user_code import (
    canonical_reference,
    file_folder,
    is_file_reference,
    is_reference,
    trust_named,
)
from weft.errors import ConfigError, Fault

DEFAULT_SOURCE = {"tokens": "stdlib", "images": "digits", "arrays": "random"}
"""Kind of model -> data source where none is named."""

NAME = "model.name"
RESUME_CODE = "resume_code"
ALERT_KEYS = ("alert.command", "alert.url")

AUTO_MESH = "auto"
"""As `mesh`: a command chooses it for the devices that are there."""
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
OPTIMIZER = "optim.name"
FOLDER_KEYS = ("out", "resume")
"""Keys of folders in which ~ is the home folder, in a file too."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""A name on the Hugging Face hub: organisation/model, or the model alone."""


Values = TypeVar("Values", bound=ConfigSection)


@dataclass(frozen=True)
class Loaded:
    """A config as far as it could be read: wrong keys have their defaults, so that the others can
    be checked.

    Attributes:
        named: keys that flags or values give.
        auto_mesh: where `mesh = "auto"` stands, if it does; the mesh of `run` is then empty.
    """

    run: Run
    faults: tuple[Fault, ...]
    named: frozenset[str] = frozenset()
    auto_mesh: Literal["file", "flag"] | None = None


@dataclass(frozen=True)
class _Sources:
    """What file and flags say, and the model that they choose.

    Attributes:
        chain: the config file behind its bases.
        values: of keys, which win over the file as flags do.
        run_folder: of the config file, which is a run's where the run has written it.
    """

    file: Flat
    chain: tuple[ConfigFile, ...]
    values: Flat
    words: flags.Words
    folder: FolderModel
    model: ModelChoice
    faults: tuple[Fault, ...]
    run_folder: Path | None


def load(argv: Sequence[str], families: Families) -> Run:
    """The run that `[CONFIG.toml] [--a.b value ...]` describes; later values win.

    Raises:
        ConfigError: with every fault.
    """
    loaded = try_load(argv, families)
    faults = loaded.faults
    if loaded.auto_mesh is not None:
        need, fix = "axes with degrees", "name the mesh, for example --mesh dp2"
        faults += (Fault("mesh", "is not chosen here", got=AUTO_MESH, need=need, fix=fix),)
    if faults:
        raise ConfigError(*faults)
    return loaded.run


def try_load(
    argv: Sequence[str], families: Families, values: Mapping[str, Any] = NO_VALUES
) -> Loaded:
    """Read as much of a config as possible; faults are returned beside it.

    Args:
        values: of keys, as a TOML file has them; they win over the file that `argv` names.
    """
    sources = _read_sources(argv, families, values)
    of_run = run_type(sources.model.name, families[sources.model.name].Config)
    known = keys_of(of_run)
    asked, named, key_faults = _asked(
        sources.file, sources.values, sources.words, known=known, chain=sources.chain
    )
    rates = tuple(rate_faults(asked))
    contradicting = contradictions(sources.folder, asked)
    schedule = schedule_keys(asked, named)
    merged: Flat = {
        **_defaults(sources.model, families),
        **schedule.defaults,
        **sources.folder.defaults,
        **_known(finetuning_defaults(asked, sources.folder.defaults), known),
        **asked,
        **sources.folder.decided,
        **schedule.decided,
        "model.name": sources.model.name,
        "model.preset": sources.model.preset,
        **_source_digest(families[sources.model.name], asked),
    }
    run, invalid = _validate(of_run, merged)
    changed = tuple(_changed_file(sources, families, merged))
    too_large = tuple(sizes_are_possible(run.model))
    if too_large:
        run = run.with_values({"model": type(run.model)()})
    optimizer = tuple(optimizer_faults(run.optim))
    if optimizer:
        run = run.with_values({"optim": type(run.optim)()})
    auto_mesh: Literal["file", "flag"] | None = None
    if run.mesh == AUTO_MESH:
        auto_mesh = "flag" if "mesh" in named else "file"
        run = run.with_values({"mesh": ""})
    mesh_faults = tuple(mesh_can_be_read(run.mesh))
    if mesh_faults:
        run = run.with_values({"mesh": ""})
    faults = (
        *sources.faults,
        *key_faults,
        *undecodable(asked),
        *unexpanded(asked),
        *contradicting,
        *length_is_said_once(sources.file, named),
        *rates,
        *schedule.faults,
        *changed,
        *(fault if fault.key in named else with_source(fault, sources.chain) for fault in invalid),
        *too_large,
        *optimizer,
        *mesh_faults,
    )
    return Loaded(run=run, faults=faults, named=frozenset(named), auto_mesh=auto_mesh)


def check_other_keys(
    argv: Sequence[str], families: Families, values: Mapping[str, Any] = NO_VALUES
) -> None:
    """Check the keys outside of the model's section where the model is code of a user or of
    transformers: its import takes seconds.

    Raises:
        ConfigError: with every fault of these keys alone.
    """
    layers = _read_layers(argv, values)
    name = layers.first.get(NAME, layers.file.get(NAME))
    is_imported = is_reference(name) or is_architecture_name(name)
    if layers.faults or not (is_imported or FROM_HF in {**layers.file, **layers.first}):
        return
    stand_in = default_model(families).name
    of_run = run_type(stand_in, families[stand_in].Config)
    known = keys_of(of_run)
    others = (_without_model(layers.file), _without_model(layers.values))
    words = flags.without(layers.words, "model.")
    asked, named, faults = _asked(*others, words, known=known, chain=layers.chain)
    run, invalid = _validate(of_run, asked)
    mesh_faults = () if run.mesh == AUTO_MESH else tuple(mesh_can_be_read(run.mesh))
    sources = (
        fault if fault.key in named else with_source(fault, layers.chain) for fault in invalid
    )
    faults = (*faults, *sources, *optimizer_faults(run.optim), *mesh_faults)
    if faults:
        raise ConfigError(*faults)


def _asked(
    file: Flat,
    values: Flat,
    words: flags.Words,
    *,
    known: Mapping[str, FieldInfo],
    chain: tuple[ConfigFile, ...],
) -> tuple[Flat, Flat, tuple[Fault, ...]]:
    """What file, values and flags say for known keys, what values and flags say, and the keys that
    are unknown or cannot be read.
    """
    given = flags.read(words, known)
    named = {**values, **given.values}
    is_table = partial(table_key, known=known)
    unknown = [
        with_source(unknown_key(key, known), chain)
        for key in {**file, **values}
        if key not in known and not is_table(key)
    ]
    asked: Flat = {}
    for key, value in {**file, **named}.items():
        if key == OPTIMIZER and is_user_class(str(value)):
            file_name, _, name = str(value).rpartition(":")
            asked[key] = f"{canonical_reference(file_name)}:{name}"
        elif key in FOLDER_KEYS and isinstance(value, str):
            asked[key] = os.path.expanduser(value)
        elif key in known:
            asked[key] = whole_number(value, known[key].annotation)
        elif is_table(key):
            asked[key] = value
    if RESUME_CODE not in named:  # an answer to one resume, not to the later ones of its run
        asked.pop(RESUME_CODE, None)
    if STEPS in named and EPOCHS not in named:
        asked.pop(EPOCHS, None)
    return asked, named, tuple(map(with_note_on_base, (*unknown, *given.faults)))


@dataclass(frozen=True)
class _Layers:
    """What a config file, values and flags say, before a model is chosen; as in `_Sources`.

    Attributes:
        first: of values and flags: what decides about the model.
    """

    file: Flat
    chain: tuple[ConfigFile, ...]
    values: Flat
    words: flags.Words
    first: Flat
    faults: tuple[Fault, ...]


def _read_layers(argv: Sequence[str], given_values: Mapping[str, Any]) -> _Layers:
    words, word_faults = _with_model_file(flags.split(argv))
    words, of_folder = with_run_file(words)
    chain, file_faults = _read_files(words.loose)
    file = keys_of_chain(chain)
    if chain:
        file.update(of_folder | out_of_stored(words.loose, file))
    values = dict(given_values)
    first = {**values, **flags.first_words(words)}
    for layer in (file, first):
        if is_reference(layer.get(NAME)):
            layer[NAME] = canonical_reference(layer[NAME])
    return _Layers(file, chain, values, words, first, (*word_faults, *file_faults))


def _read_sources(
    argv: Sequence[str], families: Families, given_values: Mapping[str, Any]
) -> _Sources:
    """File and flags, with the keys of the model left out where it is wrong or another one is
    chosen.
    """
    layers = _read_layers(argv, given_values)
    file, chain, values, words = layers.file, layers.chain, layers.values, layers.words
    first, file_faults = layers.first, layers.faults
    is_from_run = any(is_stored([each.path], file) for each in chain)
    is_unknown = is_from_run and first.get(RESUME_CODE) != "any"
    _trust_named(first, {} if is_unknown else file)
    if len(chain) > 1:
        file = _of_one_model(file, chain, families)
    folder, folder_faults = select_folder(file, first, families)
    folder_name = str(first.get(FROM_HF, file.get(FROM_HF)))
    if HUB_NAME.fullmatch(folder_name) and not Path(folder_name).exists():
        folder_faults = tuple(replace(fault, fix=_download(folder_name)) for fault in folder_faults)
    model, choice_faults = _choose_model(file, first, folder, families)
    if folder_faults or choice_faults:
        words = flags.without(words, "model.")
        values = _without_model(values)
        folder = NO_FOLDER
    if folder_faults or choice_faults or not model.keeps_file:
        file = _without_model(file)
    return _Sources(
        file=file,
        chain=chain,
        values=values,
        words=words,
        folder=folder,
        model=model,
        faults=(*file_faults, *folder_faults, *choice_faults),
        run_folder=Path(words.loose[0]).parent if words.loose else None,
    )


def _without_model(layer: Flat) -> Flat:
    return {key: value for key, value in layer.items() if not _is_of_model(key)}


def _is_of_model(key: str) -> bool:
    return key.startswith("model.")


def _trust_named(*layers: Flat) -> None:
    """Trust the code, and what alerts run, that the user names: in flags, or in a config file that
    weft has not written.
    """
    for layer in layers:
        for key in (NAME, OPTIMIZER):
            trust_named(layer.get(key, ""))
        for key in ALERT_KEYS:
            if isinstance(layer.get(key), str):
                trust_text(key, layer[key])


def _with_model_file(words: flags.Words) -> tuple[flags.Words, tuple[Fault, ...]]:
    """The words with a model file, `my_model.py`, as its flag."""
    files = [word for word in words.loose if is_file_reference(word)]
    if not files:
        return words, ()
    named = [" ".join(given) for name, given in words.flags if name == NAME]
    faults: tuple[Fault, ...] = ()
    if len(files) > 1 or named:
        got = " ".join([*files, *named])
        faults = (Fault(NAME, "more than one model", got=got, fix="name one"),)
    with_flag = flags.Words(
        loose=tuple(word for word in words.loose if word not in files),
        flags=((NAME, (files[0],)), *(flag for flag in words.flags if flag[0] != NAME)),
    )
    return with_flag, faults


def _source_digest(family: ConfigFamily, asked: Flat) -> Flat:
    """The digest of a user's model file, where the config does not say which it had, or another one
    is accepted.
    """
    digest = getattr(family, "digest", None)
    is_given = DIGEST in asked and asked.get(RESUME_CODE) != "any"
    return {} if is_given or digest is None else {DIGEST: digest}


def _changed_file(sources: _Sources, families: Families, values: Flat) -> Iterator[Fault]:
    """The model file is another one than that of the run whose config this is."""
    family = families[sources.model.name]
    current = getattr(family, "digest", None)
    if current in (None, values.get(DIGEST)):
        return
    what = "the model file has changed since the run started"
    if sources.run_folder is not None:
        folder = file_folder(sources.model.name)
        names = changed_parts(
            stored_parts(sources.run_folder), getattr(family, "code", CodeIdentity()), folder=folder
        )
        what = f"{what}: {', '.join(names)}" if names else what
    fix = "restore it, or --resume_code any to train on with this code"
    yield Fault(DIGEST, what, got=current, need=str(values[DIGEST]), fix=fix)


def _of_one_model(file: Flat, chain: Sequence[ConfigFile], families: Families) -> Flat:
    """The keys of a file without fields of a model that only one of its bases chooses."""
    with_names = [replace(each, keys=_with_canonical_name(each.keys)) for each in chain]
    kept = merged_keys(with_names, families)
    return {key: value for key, value in file.items() if key in kept or not _is_of_model(key)}


def _with_canonical_name(keys: Flat) -> Flat:
    name = keys.get(NAME)
    return {**keys, NAME: canonical_reference(str(name))} if is_reference(name) else keys


def _read_files(paths: Sequence[str]) -> tuple[tuple[ConfigFile, ...], tuple[Fault, ...]]:
    if len(paths) > 1:
        fix = "give one; text with spaces needs quotes, and keys begin with two dashes"
        return (), (Fault("config", "more than one config file", got=" ".join(paths), fix=fix),)
    try:
        return (read_chain(paths[0]) if paths else ()), ()
    except ConfigError as error:
        return (), error.faults


def _download(hub_name: str) -> str:
    """How to get the folder of a model on the Hugging Face hub."""
    folder = hub_name.rpartition("/")[2]
    return f"only local folders are read: hf download {hub_name} --local-dir {folder}, then --{FROM_HF} {folder}"


def _choose_model(
    file: Flat, first: Flat, folder: FolderModel, families: Families
) -> tuple[ModelChoice, tuple[Fault, ...]]:
    if folder.family is not None:
        return ModelChoice(folder.family, None, keeps_file=folder.keeps_file), ()
    try:
        return choose_model(file, first, families), ()
    except ConfigError as error:
        return default_model(families), error.faults


def _defaults(model: ModelChoice, families: Families) -> Flat:
    """Defaults that follow from the model."""
    values: Flat = {"data.source": DEFAULT_SOURCE[families[model.name].Config.kind]}
    values.update(preset_fields(model, families))
    return values


def _known(flat: Flat, known: Mapping[str, object]) -> Flat:
    """Those of the keys that the run has: a family may lack some."""
    return {key: value for key, value in flat.items() if key in known}


def _validate(of_run: type[Values], flat: Flat) -> tuple[Values, tuple[Fault, ...]]:
    """The config, and what is wrong with its values; a wrong key gets its default, a wrong model all
    its defaults.
    """
    try:
        return of_run.model_validate(nest(flat), strict=True), ()
    except ValidationError as error:
        faults = tuple(faults_of(error, keys_of(of_run)))
    wrong = tuple("model." if fault.key.startswith("model") else fault.key for fault in faults)
    valid = {key: value for key, value in flat.items() if not key.startswith(wrong)}
    return of_run.model_validate(nest(valid), strict=True), faults
