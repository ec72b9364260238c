"""`model.from_hf`: family and fields of a config come from a Hugging Face folder; other keys may only repeat them.

Text is read with the folder's tokenizer, unless another is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.config.hf.mapping import Families
from weft.config.hf.read_config import DescribedModel, describe_folder
from weft.config.keys import Flat
from weft.config.user_code import canonical_reference, is_reference
from weft.errors import CheckpointError, ConfigError, Fault

KEY = "model.from_hf"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class FolderModel:
    """The model that `model.from_hf` selects.

    Attributes:
        family: None where there is no folder, or the config needs none.
        defaults: dotted key -> its value unless the user sets another.
        decided: dotted key -> its value, which the user may only repeat.
        keeps_file: the model fields of the config file still count, as the flags did not select
            another folder.
    """

    folder: str = ""
    family: str | None = None
    defaults: Flat = field(default_factory=dict)
    decided: Flat = field(default_factory=dict)
    keeps_file: bool = True


NO_FOLDER = FolderModel()


def select_folder(
    file: Flat, flags: Flat, families: Families
) -> tuple[FolderModel, tuple[Fault, ...]]:
    """The model of the folder that file or flags name, and what is wrong with it.

    A missing folder is no fault if the config sets every field itself, as the run.toml of a run
    does: a run that resumes from a checkpoint does not need the folder.
    """
    folder = flags.get(KEY, file.get(KEY))
    if not isinstance(folder, str):
        return NO_FOLDER, ()
    asked = {**file, **flags}
    if "://" in folder and not _sets_all_fields(asked, families):
        need = "a folder of this machine"
        fix = "download the folder, and name it here"
        return NO_FOLDER, (Fault(KEY, "is a URL", got=repr(folder), need=need, fix=fix),)
    try:
        found = describe_folder(Path(folder), _candidates(asked, families))
    except CheckpointError as error:
        if _sets_all_fields(asked, families):
            return FolderModel(folder, str(asked["model.name"]), decided={"model.preset": None}), ()
        faults = [
            replace(fault, key=KEY, what=f"{fault.key}: {fault.what}") for fault in error.faults
        ]
        return NO_FOLDER, tuple(faults)
    keeps_file = flags.get(KEY, folder) == file.get(KEY, folder)
    return _folder_model(folder, found, keeps_file=keeps_file), ()


def _candidates(asked: Flat, families: Families) -> Families:
    """The families that a folder may be of: weft's own, and before them the user's model that the
    config names.
    """
    name = asked.get("model.name")
    if not isinstance(name, str) or name in list(families) or name not in families:
        return families
    try:
        named = families[name]
    except ConfigError:
        return families  # reported where the model is chosen
    return {name: named, **families}


def contradictions(model: FolderModel, asked: Mapping[str, object]) -> Iterator[Fault]:
    """Keys that the user set to another value than the folder."""
    for key, value in model.decided.items():
        given = asked.get(key, value)
        if key == "model.name" and is_reference(given):
            given = canonical_reference(str(given))
        if given != value:
            yield Fault(
                key,
                f"contradicts {model.folder}",
                got=str(given),
                need="nothing" if value is None else str(value),
                fix=f"leave {key} out",
            )


def _folder_model(folder: str, found: DescribedModel, *, keeps_file: bool) -> FolderModel:
    fields = {f"model.{name}": value for name, value in found.fields.items()}
    suggested = {f"model.{name}": value for name, value in found.suggested.items()}
    tokenizer = Path(folder) / TOKENIZER
    if tokenizer.is_file():
        data = {"data.tokenizer": str(tokenizer)}
    else:
        data = {}
    return FolderModel(
        folder=folder,
        family=found.family,
        defaults={**data, **fields, **suggested},
        decided={"model.name": found.family, "model.preset": None, **fields},
        keeps_file=keeps_file,
    )


def _sets_all_fields(asked: Flat, families: Families) -> bool:
    """Whether the config names a family and sets each of its fields; TOML has no None."""
    name = asked.get("model.name")
    if name not in families:
        return False
    fields = families[str(name)].Config.model_fields
    optional = {field for field, info in fields.items() if info.default is None}
    return all(f"model.{field}" in asked for field in fields if field not in optional)
