"""Collective signatures (op, dtype, shape, split sizes) and the check that all members of a group agree."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from weft.comm.transport import Call
from weft.core.mesh import rank_list
from weft.errors import MismatchError

TEXT_BYTES = 192
"""Longest signature text that is exchanged between processes; longer ones are cut."""

NO_SPLIT_SIZES = -1
"""Stands for an absent split size in an encoded signature."""

_VARIABLE_LENGTH = re.compile(r"\d+\*")
_SEND_OR_RECV = re.compile(r"^(send|recv) ")


@lru_cache(maxsize=1024)  # every step repeats the same few signatures
def signature_text(
    operation: str, dtype: torch.dtype, shape: tuple[int, ...], variable_dim: int | None = None
) -> str:
    """Operation, dtype and shape; a star marks the dimension whose length may differ between
    members.

    >>> signature_text("all_gather", torch.float32, (3, 8), variable_dim=0)
    'all_gather float32[3*, 8]'
    """
    lengths = [str(length) for length in shape]
    if variable_dim is not None:
        lengths[variable_dim] += "*"
    dtype_name = str(dtype).removeprefix("torch.")
    shape_text = ", ".join(lengths)
    return f"{operation} {dtype_name}[{shape_text}]"


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


NO_SIGNATURE = Signature("")
"""Of operations that are compared with no other."""


def check_signatures(axis: str, ranks: Sequence[int], signatures: Sequence[Signature]) -> None:
    """Compare the signatures of `ranks`: equal texts except for starred dimensions, and split sizes
    that match.

    Raises:
        MismatchError: naming the ranks and what each of them called.
    """
    texts = [signature.text for signature in signatures]
    if not _texts_match(texts):
        found = _ranks_by_text(ranks, texts)
        raise MismatchError(
            f"over {axis}, ranks called different operations, shapes or dtypes: {found}"
        )
    if not _split_sizes_match(signatures):
        texts = [_with_split_sizes(signature) for signature in signatures]
        found = _ranks_by_text(ranks, texts)
        raise MismatchError(f"over {axis}, split sizes of the ranks do not match: {found}")


@dataclass(frozen=True, slots=True)
class MemberCall:
    """What the member at `place` of a group called."""

    place: int
    signature: Signature


def calls_agree(one: MemberCall, other: MemberCall) -> bool:
    """Whether two members of a group agree: the comparison of `check_signatures`, without the
    other members.
    """
    if not _texts_match([one.signature.text, other.signature.text]):
        return False
    return _receives(one, other) and _receives(other, one)


def _receives(receiver: MemberCall, sender: MemberCall) -> bool:
    """Whether the receiver expects as many elements as the sender sends to it."""
    sent = sender.signature.input_split_sizes
    expected = receiver.signature.output_split_sizes
    if not sent and not expected:
        return True
    num_members = min(len(sent), len(expected))
    last_place = max(receiver.place, sender.place)
    if last_place >= num_members:
        return False
    return sent[receiver.place] == expected[sender.place]


def encode_signature(call: Call) -> Tensor:
    """The signature of `call` as uint8[TEXT_BYTES + 16 n] for a group of n members."""
    size = len(call.ranks)
    absent = (NO_SPLIT_SIZES,) * size
    input_sizes = call.input_split_sizes or absent
    output_sizes = call.output_split_sizes or absent
    # cut at TEXT_BYTES below: two that differ only behind it count as equal here
    text = call.signature.encode()
    encoded = struct.pack(_format(size), text[:TEXT_BYTES], *input_sizes, *output_sizes)
    # tensors on read-only memory draw a warning
    writable = bytearray(encoded)
    return torch.frombuffer(writable, dtype=torch.uint8)


def decode_signature(encoded: Tensor, size: int) -> Signature:
    """Inverse of `encode_signature` for a group of `size` members."""
    packed = bytes(encoded.tolist())
    padded_text, *split_sizes = struct.unpack(_format(size), packed)
    text = padded_text.rstrip(b"\0").decode(errors="replace")
    if split_sizes[0] == NO_SPLIT_SIZES:
        return Signature(text)
    return Signature(
        text,
        input_split_sizes=tuple(split_sizes[:size]),
        output_split_sizes=tuple(split_sizes[size:]),
    )


# Note [Digests of signatures]
# Exchanging texts costs every member of a group of n ranks 192 + 16 n bytes from each of the others: 8.6 GB for 16,384
# ranks. Two numbers that are summed over the group say whether all signatures agree. The first is a hash of the text:
# if all are equal, the sum is n times the own one. The second is the sum of h(i, j, elements) over what this rank i
# sends to each j, minus the sum of h(j, i, elements) over what it expects from each j: the total is 0 if every rank
# expects what is sent. The hashes have 40 bits, so that sums over a million ranks are exact in int64. Only if they
# disagree, the texts are exchanged, for the message.

DIGEST_MODULUS = 2**40


def signature_digest(call: Call) -> Tensor:
    """Two numbers of this member's signature, int64[2]: see Note [Digests of signatures]."""
    text = comparable_text(call.signature)
    text_digest = hashlib.sha256(text.encode()).digest()
    text_hash = int.from_bytes(text_digest[:5], "big")
    own = call.index
    difference = 0
    for member, num_elements in enumerate(call.input_split_sizes):
        difference += _hash_of_transfer(own, member, num_elements)
    for member, num_elements in enumerate(call.output_split_sizes):
        difference -= _hash_of_transfer(member, own, num_elements)
    return torch.tensor([text_hash, difference % DIGEST_MODULUS], dtype=torch.int64)


def digests_agree(own: Tensor, total: Tensor, size: int) -> bool:
    """Whether the signatures of all `size` members agree, from this member's digest and the sum of
    all.
    """
    own_text_hash, _ = own.tolist()
    text_hashes, differences = total.tolist()
    has_equal_texts = text_hashes == size * own_text_hash
    has_matching_sizes = differences % DIGEST_MODULUS == 0
    return bool(has_equal_texts and has_matching_sizes)


def _hash_of_transfer(source: int, destination: int, num_elements: int) -> int:
    packed = struct.pack("3q", source, destination, num_elements)
    digest = hashlib.blake2b(packed, digest_size=5)
    return int.from_bytes(digest.digest(), "big")


def _format(size: int) -> str:
    return f"{TEXT_BYTES}s{2 * size}q"


def _texts_match(texts: Sequence[str]) -> bool:
    """Whether the texts are equal but for starred dimensions, and send counting as recv."""
    if len(set(texts)) == 1:
        return True
    comparable = {comparable_text(text) for text in texts}
    return len(comparable) == 1


def comparable_text(text: str) -> str:
    """The text without what may differ between members."""
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
    sent, expected = signature.input_split_sizes, signature.output_split_sizes
    return f"{signature.text} input_split_sizes {sent} output_split_sizes {expected}"


def _ranks_by_text(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """`ranks 0 2: all_reduce(sum) float32[4]; rank 1: barrier`."""
    ranks_of_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of_text.setdefault(text, []).append(rank)
    return "; ".join(f"{rank_list(members)}: {text}" for text, members in ranks_of_text.items())
