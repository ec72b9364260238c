"""Values as YAML text: block style, every string quoted, so that no value is read as another type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ESCAPES = {char: f"\\u{ord(char):04x}" for char in "\x7f\x85\u2028\u2029\ufeff"}
"""Characters that JSON leaves as they are and YAML reads as line breaks or rejects."""


def yaml_text(value: Mapping[str, Any]) -> str:
    """One YAML document. ASCII texts of several lines become literal blocks."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    """The lines of a mapping or a sequence."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    else:
        for item in value:
            lines = list(_lines(item)) if _is_block(item) else [_scalar(item)]
            yield f"- {lines[0]}"
            yield from map(_indent, lines[1:])


def _entry(key: str, item: Any) -> Iterator[str]:
    if _is_block(item):
        yield key
        yield from map(_indent, _lines(item))
    elif isinstance(item, str) and _fits_literal_block(item):
        yield f"{key} |"
        yield from map(_indent, item.removesuffix("\n").split("\n"))
    else:
        yield f"{key} {_scalar(item)}"


def _is_block(item: Any) -> bool:
    is_collection = isinstance(item, (Mapping, Sequence)) and not isinstance(item, str)
    return is_collection and bool(item)


def _fits_literal_block(text: str) -> bool:
    """Whether a literal block reads back as this text."""
    ends_once = text.endswith("\n") and not text.endswith("\n\n")
    is_plain = text.isascii() and text.replace("\n", "").isprintable()
    return ends_once and is_plain and not text.startswith((" ", "\n"))


def _indent(line: str) -> str:
    return f"  {line}" if line else ""


def _scalar(item: Any) -> str:
    """JSON is YAML, but for some characters."""
    text = json.dumps(item, ensure_ascii=False)
    return "".join(ESCAPES.get(char, char) for char in text)
