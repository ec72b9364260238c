"""Owns the way from a TOML file and `--a.b value` flags to a `Run`: layers, later wins, all faults in one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from weft.config import flags, toml
from weft.config.families import Families, Pick, default_pick, pick, preset_fields, run_type
from weft.config.hf.from_hf import NO_FOLDER, FolderModel, contradictions, select_folder
from weft.config.keys import Flat, faults_of, keys_of, nest, unknown_key
from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.errors import ConfigError, Fault, MeshError
from weft.schedule.catalog import SCHEDULES

SOURCE_OF = {"tokens": "stdlib", "images": "digits"}
"""Kind of model -> the source that it reads when none is named."""

MOST_RANKS, MOST_LAYERS, MOST_UNITS = 2**20, 10_000, 2**31


@dataclass(frozen=True)
class Loaded:
    """A config as far as it could be read: keys at fault stand at their defaults, so that the others can be checked."""

    run: Run
    faults: tuple[Fault, ...]


def load(argv: Sequence[str], families: Families) -> Run:
    """The run that `[CONFIG.toml] [--a.b value ...]` describes; what comes later wins.

    Raises:
        ConfigError: with every fault.
    """
    loaded = try_load(argv, families)
    if loaded.faults:
        raise ConfigError(*loaded.faults)
    return loaded.run


def try_load(argv: Sequence[str], families: Families) -> Loaded:
    """Read what can be read of a config, and say all that is wrong with it."""
    words = flags.split(argv)
    file, file_faults = _read_file(words.loose)
    first = flags.first_words(words)
    folder, model_faults = select_folder(file, first, families)
    chosen, pick_faults = _pick_model(file, first, folder, families)
    model_faults += pick_faults
    if model_faults:
        words, folder = flags.without(words, "model."), NO_FOLDER
    if model_faults or not chosen.keeps_file:
        file = {key: value for key, value in file.items() if not key.startswith("model.")}
    of_run = run_type(chosen.name, families[chosen.name].Config)
    known = keys_of(of_run)
    given = flags.read(words, known)
    unknown = tuple(unknown_key(key, known) for key in file if key not in known)
    asked = {key: value for key, value in (file | given.values).items() if key in known}
    other = tuple(contradictions(folder, asked))
    run, wrong = _validate(
        of_run, _defaults(chosen, asked, families) | folder.defaults | asked | folder.decided | _names(chosen)
    )
    run, large = _bound_model(run)
    run, mesh_faults = _read_mesh(run)
    return Loaded(run, (*file_faults, *model_faults, *unknown, *given.faults, *other, *wrong, *large, *mesh_faults))


def _read_file(paths: Sequence[str]) -> tuple[Flat, tuple[Fault, ...]]:
    if len(paths) > 1:
        fix = "give one; text with spaces needs quotes, and keys begin with two dashes"
        return {}, (Fault("config", "more than one config file", " ".join(paths), fix=fix),)
    try:
        return (toml.read(paths[0]) if paths else {}), ()
    except ConfigError as error:
        return {}, error.faults


def _pick_model(file: Flat, first: Flat, folder: FolderModel, families: Families) -> tuple[Pick, tuple[Fault, ...]]:
    if folder.family is not None:
        return Pick(folder.family, None, keeps_file=folder.keeps_file), ()
    try:
        return pick(file, first, families), ()
    except ConfigError as error:
        return default_pick(families), error.faults


def _defaults(chosen: Pick, asked: Flat, families: Families) -> Flat:
    """What stands where nothing is asked for, as far as it follows from the model or from other keys."""
    source = SOURCE_OF[families[chosen.name].Config.kind]
    schedule = SCHEDULES.get(str(asked.get("pipeline.schedule")))
    chunks = {"pipeline.chunks": schedule.default_chunks} if schedule else {}
    return {"data.source": source} | chunks | preset_fields(chosen, families)


def _names(chosen: Pick) -> Flat:
    return {"model.name": chosen.name, "model.preset": chosen.preset}


def _validate(of_run: type[Run], flat: Flat) -> tuple[Run, tuple[Fault, ...]]:
    """The run, and what is wrong with its values; a key at fault falls to its default, a model with all its keys."""
    try:
        return of_run.model_validate(nest(flat), strict=True), ()
    except ValidationError as error:
        faults = tuple(faults_of(error, keys_of(of_run)))
    tables = {"model." if fault.key.startswith("model") else fault.key for fault in faults}
    sound = {key: value for key, value in flat.items() if not key.startswith(tuple(tables))}
    return of_run.model_validate(nest(sound), strict=True), faults


def _read_mesh(run: Run) -> tuple[Run, tuple[Fault, ...]]:
    faults: tuple[Fault, ...] = ()
    try:
        size = Mesh.parse(run.mesh).size
        if size > MOST_RANKS:
            faults = (Fault("mesh", "is too large", f"{size} ranks", f"at most {MOST_RANKS}"),)
    except MeshError as error:
        faults = error.faults
    return (run.model_copy(update={"mesh": ""}) if faults else run), faults


def _bound_model(run: Run) -> tuple[Run, tuple[Fault, ...]]:
    """Sizes that nobody has are slips; told here, before anything is built that large."""
    default = type(run.model)()
    faults = []
    for name, value in run.model.architecture.items():
        most = MOST_LAYERS if name == "layers" else MOST_UNITS
        if isinstance(value, int) and value > most:
            fix = f"for example --model.{name} {getattr(default, name)}"
            faults.append(Fault(f"model.{name}", "out of range", str(value), f"at most {most}", fix))
    return (run.model_copy(update={"model": default}) if faults else run), tuple(faults)
