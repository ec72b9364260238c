"""Owns reading a Slurm host list: `gpu[01-04,07],login` names five nodes and `login`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from weft.errors import Fault, LaunchError

WORD = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Every host of a list, in order: `node[08-10,12]-ib` is node08-ib node09-ib node10-ib node12-ib.

    Numbers keep the zeros before them; a word may hold several brackets, the last one runs fastest.

    Raises:
        LaunchError: the text is no host list.
    """
    words = WORD.findall(text)
    if not words or ",".join(words) != text:
        raise _unreadable(text)
    return tuple(itertools.chain.from_iterable(_hosts(word, text) for word in words))


def _hosts(word: str, text: str) -> Iterator[str]:
    parts = [[plain] if plain else list(_numbers(ranges, text)) for ranges, plain in PART.findall(word)]
    return map("".join, itertools.product(*parts))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _unreadable(text: str) -> LaunchError:
    return LaunchError(Fault("SLURM_JOB_NODELIST", "cannot be read", repr(text), "host names like node[01-04,07]"))
