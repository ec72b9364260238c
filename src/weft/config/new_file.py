"""The text of a new config file: keys of a run with values and descriptions, further ones as comments. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from weft.config import toml
from weft.config.keys import Flat, flatten, keys_of, table_key


def new_file_text(
    file: str, run: BaseModel, keys: Sequence[str], suggestions: Mapping[str, object]
) -> str:
    """The text of a file.

    Args:
        file: its name, as a word of a shell.
        keys: that it sets, to the values of the run.
        suggestions: keys that it shows as comments, with values for them.
    """
    values = flatten(run.model_dump(mode="json", exclude_none=True))
    shown: Flat = {key: values[key] for key in keys}
    shown.update({key: value for key, value in suggestions.items() if key not in shown})
    lines = [
        "# A training run, written by `weft init`.",
        f"# A flag overrides a key of this file: weft train {file} --optim.lr 1e-3",
        "# All keys, with their defaults: weft train --help",
        "",
    ]
    for section, names in _sections(shown):
        if section:
            lines.extend(("", f"[{section}]"))
        for name in names:
            key = f"{section}.{name}" if section else name
            is_set = key in keys
            lines.append(_line(name, shown[key], _description(run, key), is_set=is_set))
    return "\n".join((*lines, ""))


def _sections(shown: Flat) -> Iterator[tuple[str, list[str]]]:
    """Keys without a section, then each section with its keys."""
    found: dict[str, list[str]] = {"": []}
    for key in shown:
        section, _, name = key.rpartition(".")
        found.setdefault(section, []).append(name)
    yield from ((section, names) for section, names in found.items() if names)


def _description(run: BaseModel, key: str) -> str:
    known = keys_of(type(run))
    field = known.get(key) or known.get(table_key(key, known) or "")
    return (field.description or "") if field is not None else ""


def _line(name: str, value: object, description: str, *, is_set: bool) -> str:
    comment = f"  # {description}" if description else ""
    return f"{'' if is_set else '# '}{name} = {toml.value(value)}{comment}"
