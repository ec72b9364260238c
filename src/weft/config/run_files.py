"""Config files of run folders: which they are, the folder that they mean, and paths that hold from any working folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.code.identity import CODE_FILE
from weft.config import toml
from weft.config.flags import Words
from weft.config.keys import Flat
from weft.errors import WeftError

RUN_FILE = "run.toml"
DIGEST = "model.digest"
STORED_NAME = re.compile(r"run(-\d+)?\.toml")
FILES_OF_RUNS = (CODE_FILE, "plan.json", "events.jsonl", "ckpt", "manifest.json")
"""A config beside one of these is that of a run."""
AUTO = "auto"
NAMES: Mapping[str, frozenset[str]] = {
    "data.source": frozenset({"stdlib", "digits"}),
    "data.tokenizer": frozenset({"bytes"}),
    "data.chat_template": frozenset({"chatml", "alpaca"}),
    "eval.source": frozenset({"stdlib", "digits"}),
    "model.from_hf": frozenset(),
    "lora.base": frozenset(),
}
"""Keys whose values are paths, but these."""
MIX = "data.mix"


OWN_KEYS = ("out", "resume")
"""Keys that differ between any two runs."""


def stored_config(folder: Path) -> Flat:
    """The dotted keys of the run of a folder; none if they cannot be read."""
    try:
        return toml.read(str(folder / RUN_FILE))
    except (WeftError, OSError):
        return {}


def different_keys(configs: Sequence[Flat]) -> list[str]:
    """Keys whose values are not the same in all runs, in the order of the first run that has them."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if key not in OWN_KEYS and len({repr(config.get(key)) for config in configs}) > 1
    ]


def is_stored(files: Sequence[str], file: Flat) -> bool:
    """Whether a config file is a stored one: its name, its folder or its keys are those of a run.

    Args:
        files: the config files that a command names.
        file: the keys of the first.
    """
    if not files:
        return False
    path = Path(files[0])
    return STORED_NAME.fullmatch(path.name) is not None or DIGEST in file or is_of_run(path)


def is_of_run(path: Path) -> bool:
    """Whether a config lies beside what a run has written."""
    return any((path.parent / name).exists() for name in FILES_OF_RUNS)


def with_run_file(words: Words) -> tuple[Words, Flat]:
    """The words with the config of a run folder in place of the folder, and the key that resumes it."""
    files = [os.path.join(word, RUN_FILE) for word in words.loose if os.path.isdir(word)]
    if len(files) != 1 or len(words.loose) > 1 or not os.path.isfile(files[0]):
        return words, {}
    return replace(words, loose=(files[0],)), {"resume": AUTO}


def out_of_stored(files: Sequence[str], file: Flat) -> Flat:
    """The run folder that a stored config lies in, in place of the one that it names: it may have
    been moved or copied.
    """
    if not files or STORED_NAME.fullmatch(Path(files[0]).name) is None:
        return {}
    path, out = Path(files[0]), file.get("out")
    if not isinstance(out, str) or "://" in out or not is_of_run(path):
        return {}
    old = os.path.realpath(os.path.expanduser(out))
    if old == os.path.realpath(path.parent):
        return {}
    return {"out": str(path.parent), **_inside(old, path.parent.absolute(), file)}


def _inside(old: str, new: Path, file: Flat) -> Flat:
    """The paths of a config that lead into the old run folder, as they are in the new one."""
    found: Flat = {}
    for key in NAMES:
        value = file.get(key)
        if isinstance(value, str) and os.path.realpath(value).startswith(f"{old}{os.sep}"):
            found[key] = str(new / os.path.relpath(os.path.realpath(value), old))
    return found


def absolute_paths(values: Mapping[str, object]) -> Flat:
    """Keys whose values are relative paths, with absolute ones: a stored config holds from any
    working folder.

    Args:
        values: dotted keys of a run.
    """
    found: Flat = {}
    for key, names in NAMES.items():
        value = values.get(key)
        if isinstance(value, str) and value not in names and _is_path(value):
            found[key] = os.path.abspath(value)
    mix = values.get(MIX)
    if isinstance(mix, (list, tuple)) and mix:
        found[MIX] = tuple(map(_absolute_part, map(str, mix)))
    return found


def _absolute_part(part: str) -> str:
    """A part of a mix, SOURCE=WEIGHT."""
    source, equals, weight = part.rpartition("=")
    is_relative = equals and source not in NAMES["data.source"] and _is_path(source)
    return f"{os.path.abspath(source)}={weight}" if is_relative else part


def _is_path(value: str) -> bool:
    """Whether a text is a relative path, or a pattern of such paths, that names something here."""
    return (
        "://" not in value
        and not os.path.isabs(value)
        and (os.path.exists(value) or glob.has_magic(value))
    )
