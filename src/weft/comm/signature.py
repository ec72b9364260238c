"""Owns what a rank brings to an operation, as text, and the check that all members brought what fits together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from weft.errors import MismatchError

_FREE = re.compile(r"\d+\*")
_ENDS = re.compile(r"^(send|recv) ")


@lru_cache(maxsize=1024)
def brings(what: str, dtype: torch.dtype, shape: tuple[int, ...], free: int | None = None) -> str:
    """`all_gather float32[3*, 8]`: the star marks the dimension that may differ among members.

    >>> brings("all_gather", torch.float32, (3, 8), free=0)
    'all_gather float32[3*, 8]'

    Remembered: every step asks for the same few.
    """
    lengths = [f"{length}*" if dim == free else str(length) for dim, length in enumerate(shape)]
    return f"{what} {str(dtype).removeprefix('torch.')}[{', '.join(lengths)}]"


@dataclass(frozen=True, slots=True)
class Brought:
    """What one member brought: the text of `brings`, and how many elements it gives to and takes from each member."""

    text: str
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()


def check(axis: str, ranks: Sequence[int], brought: Sequence[Brought]) -> None:
    """Compare what the members `ranks` brought: texts alike but for starred dimensions, gives that meet takes.

    Raises:
        MismatchError: naming the ranks and what each brought.
    """
    if len({each.text for each in brought}) > 1 and len({_comparable(each.text) for each in brought}) > 1:
        told = _who_brought_what(ranks, [each.text for each in brought])
        raise MismatchError(f"over {axis}, ranks brought different operations, shapes or dtypes: {told}")
    gives, takes = tuple(each.gives for each in brought), tuple(each.takes for each in brought)
    if gives[0] and gives != tuple(zip(*takes, strict=True)):
        told = _who_brought_what(ranks, [f"{each.text} giving {each.gives} taking {each.takes}" for each in brought])
        raise MismatchError(f"over {axis}, ranks disagree about the elements of each piece: {told}")


def _comparable(text: str) -> str:
    return _ENDS.sub("message ", _FREE.sub("*", text))


def _who_brought_what(ranks: Sequence[int], texts: Sequence[str]) -> str:
    bringers: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        bringers.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' * (len(who) > 1)} {' '.join(map(str, who))}: {text}" for text, who in bringers.items())
