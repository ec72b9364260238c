"""Owns what `model.from_hf` does to a config: family and fields come from the folder, and nobody may say otherwise.

Text is read with the folder's tokenizer, unless another is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.config.families import Families
from weft.config.hf.describe import Described, describe
from weft.config.keys import Flat
from weft.errors import CheckpointError, Fault

KEY = "model.from_hf"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Choice:
    """The folder of a config, read.

    Attributes:
        family: None where there is no folder, or the config needs none.
        fields: dotted key -> what stands there unless a person says otherwise.
        decided: those of them that a person may only repeat.
        keeps_file: the model fields of the config file still count, as the flags did not choose another folder.
    """

    folder: str = ""
    family: str | None = None
    fields: Flat = field(default_factory=dict)
    decided: Flat = field(default_factory=dict)
    keeps_file: bool = True


NOTHING = Choice()


def choose(file: Flat, flags: Flat, families: Families) -> tuple[Choice, tuple[Fault, ...]]:
    """What the folder says that file or flags name, and what is wrong with it.

    A folder that is gone is no fault of a config that says everything itself, as the run.toml of a run does: whoever goes
    on with that run from a checkpoint does not need the folder.
    """
    folder = flags.get(KEY, file.get(KEY))
    if not isinstance(folder, str):
        return NOTHING, ()
    try:
        found = describe(Path(folder))
    except CheckpointError as error:
        if _says_all(asked := file | flags, families):
            return Choice(folder, str(asked["model.name"]), decided={"model.preset": None}), ()
        return NOTHING, tuple(replace(fault, key=KEY, what=f"{fault.key}: {fault.what}") for fault in error.faults)
    keeps = flags.get(KEY, folder) == file.get(KEY, folder)
    return _choice(folder, found, keeps_file=keeps), ()


def contradictions(choice: Choice, asked: Mapping[str, object]) -> Iterator[Fault]:
    """Keys that a person set otherwise than the folder has them."""
    for key, value in choice.decided.items():
        given = asked.get(key, value)
        if given != value:
            need = "nothing" if value is None else str(value)
            yield Fault(key, f"contradicts {choice.folder}", str(given), need, f"leave {key} out")


def _choice(folder: str, found: Described, *, keeps_file: bool) -> Choice:
    decided = {f"model.{name}": value for name, value in found.fields.items()}
    names = {"model.name": found.family, "model.preset": None}
    tokenizer = Path(folder) / TOKENIZER
    own = {"data.tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    return Choice(
        folder=folder,
        family=found.family,
        fields=own | decided | {f"model.{name}": value for name, value in found.open.items()},
        decided=names | decided,
        keeps_file=keeps_file,
    )


def _says_all(asked: Flat, families: Families) -> bool:
    name = asked.get("model.name")
    return name in families and all(f"model.{field}" in asked for field in families[str(name)].Config.model_fields)
