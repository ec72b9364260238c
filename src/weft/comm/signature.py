"""Collective signatures (op, dtype, shape, split sizes) and the check that all members of a group agree."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from weft.comm.transport import Call
from weft.errors import MismatchError

TEXT_BYTES = 192
"""Longest signature text that is exchanged between processes; longer ones are cut."""

NO_SPLIT_SIZES = -1
"""Stands for an absent split size in an encoded signature."""

_VARIABLE_LENGTH = re.compile(r"\d+\*")
_SEND_OR_RECV = re.compile(r"^(send|recv) ")


@lru_cache(maxsize=1024)  # every step repeats the same few signatures
def signature_text(operation: str, dtype: torch.dtype, shape: tuple[int, ...], variable_dim: int | None = None) -> str:
    """Operation, dtype and shape; a star marks the dimension whose length may differ between members.

    >>> signature_text("all_gather", torch.float32, (3, 8), variable_dim=0)
    'all_gather float32[3*, 8]'
    """
    lengths = [str(length) for length in shape]
    if variable_dim is not None:
        lengths[variable_dim] += "*"
    dtype_name = str(dtype).removeprefix("torch.")
    return f"{operation} {dtype_name}[{', '.join(lengths)}]"


@dataclass(frozen=True, slots=True)
class Signature:
    """What one member called: the text of `signature_text`, and its split sizes in elements."""

    text: str
    input_split_sizes: tuple[int, ...] = ()
    output_split_sizes: tuple[int, ...] = ()

    @staticmethod
    def of(call: Call) -> Signature:
        """The signature of `call`."""
        return Signature(call.signature, call.input_split_sizes, call.output_split_sizes)


def check_signatures(axis: str, ranks: Sequence[int], signatures: Sequence[Signature]) -> None:
    """Compare the signatures of `ranks`: equal texts except for starred dimensions, and split sizes that match.

    Raises:
        MismatchError: naming the ranks and what each of them called.
    """
    texts = [signature.text for signature in signatures]
    if len(set(texts)) > 1:
        comparable_texts = {_comparable(text) for text in texts}
        if len(comparable_texts) > 1:
            found = _ranks_by_text(ranks, texts)
            raise MismatchError(f"over {axis}, ranks called different operations, shapes or dtypes: {found}")
    if not _split_sizes_match(signatures):
        found = _ranks_by_text(ranks, [_with_split_sizes(signature) for signature in signatures])
        raise MismatchError(f"over {axis}, split sizes of the ranks do not match: {found}")


def encode_signature(call: Call) -> Tensor:
    """The signature of `call` as uint8[TEXT_BYTES + 16 n] for a group of n members."""
    size = len(call.ranks)
    absent = (NO_SPLIT_SIZES,) * size
    input_sizes = call.input_split_sizes or absent
    output_sizes = call.output_split_sizes or absent
    text = call.signature.encode()[:TEXT_BYTES]
    encoded = struct.pack(_format(size), text, *input_sizes, *output_sizes)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def decode_signature(encoded: Tensor, size: int) -> Signature:
    """Inverse of `encode_signature` for a group of `size` members."""
    text, *split_sizes = struct.unpack(_format(size), bytes(encoded.tolist()))
    decoded_text = text.rstrip(b"\0").decode(errors="replace")
    if split_sizes[0] == NO_SPLIT_SIZES:
        return Signature(decoded_text)
    return Signature(decoded_text, tuple(split_sizes[:size]), tuple(split_sizes[size:]))


def _format(size: int) -> str:
    return f"{TEXT_BYTES}s{2 * size}q"


def _comparable(text: str) -> str:
    without_lengths = _VARIABLE_LENGTH.sub("*", text)
    return _SEND_OR_RECV.sub("message ", without_lengths)


def _split_sizes_match(signatures: Sequence[Signature]) -> bool:
    """Whether what member i sends to member j is what j expects from i, for all i and j."""
    if not signatures[0].input_split_sizes:
        return True
    sent = [signature.input_split_sizes for signature in signatures]
    expected = [signature.output_split_sizes for signature in signatures]
    return sent == list(zip(*expected, strict=True))


def _with_split_sizes(signature: Signature) -> str:
    sizes = f"input_split_sizes {signature.input_split_sizes} output_split_sizes {signature.output_split_sizes}"
    return f"{signature.text} {sizes}"


def _ranks_by_text(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """`ranks 0 2: all_reduce(sum) float32[4]; rank 1: barrier`."""
    ranks_of_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of_text.setdefault(text, []).append(rank)
    parts = [f"{rank_list(members)}: {text}" for text, members in ranks_of_text.items()]
    return "; ".join(parts)


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0 2`, for messages."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {' '.join(map(str, ranks))}"
