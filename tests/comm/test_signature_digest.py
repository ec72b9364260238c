"""Digests of signatures agree exactly if the signatures match."""

import random

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.signature import Signature, check_signatures, digests_agree, signature_digest
from weft.comm.transport import Call
from weft.errors import MismatchError
from weft.testing import run_ranks

NUM_RANKS = 9
RANKS = tuple(range(NUM_RANKS))


def calls(text: str, sizes: list[list[int]]) -> list[Call]:
    """An all-to-all in which rank i sends `sizes[i][j]` elements to rank j."""
    made = []
    for rank in RANKS:
        expected = tuple(sizes[source][rank] for source in RANKS)
        made.append(
            Call(
                "all_to_all",
                "ep",
                RANKS,
                rank,
                text,
                input_split_sizes=tuple(sizes[rank]),
                output_split_sizes=expected,
            )
        )
    return made


def with_call(made: list[Call], index: int, **changes: object) -> list[Call]:
    fields = {name: getattr(made[index], name) for name in Call.__dataclass_fields__}
    fields.update(changes)
    return [*made[:index], Call(**fields), *made[index + 1 :]]


def verdicts(made: list[Call]) -> tuple[set[bool], bool]:
    """What the members conclude from digests, and whether the signatures really match."""
    digests = [signature_digest(call) for call in made]
    total = torch.stack(digests).sum(0)
    concluded = {digests_agree(digest, total, NUM_RANKS) for digest in digests}
    try:
        check_signatures("ep", RANKS, [Signature.of(call) for call in made])
    except MismatchError:
        return concluded, False
    return concluded, True


def test_digests_conclude_what_the_comparison_of_texts_does():
    draws = random.Random(0)
    for _ in range(60):
        sizes = [[draws.randrange(4) for _ in RANKS] for _ in RANKS]
        text = "all_to_all float32[3*, 8]"
        good = calls(text, sizes)
        assert verdicts(good) == ({True}, True)
        index = draws.randrange(NUM_RANKS)
        peer = draws.randrange(NUM_RANKS)
        other_length = with_call(good, index, signature="all_to_all float32[7*, 8]")
        assert verdicts(other_length) == ({True}, True)
        other_dtype = with_call(good, index, signature="all_to_all bfloat16[3*, 8]")
        assert verdicts(other_dtype) == ({False}, False)
        sent = list(good[index].input_split_sizes)
        sent[peer] += 1
        other_size = with_call(good, index, input_split_sizes=tuple(sent))
        assert verdicts(other_size) == ({False}, False)


def test_a_mismatch_among_many_processes_names_ranks_and_calls():
    def main(comm: Comm) -> str:
        comm.all_reduce(torch.ones(4), "dp")
        length = 5 if comm.rank == 3 else 4
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.ones(length), "dp")
        return str(caught.value)

    (message,) = set(run_ranks(f"dp{NUM_RANKS}", main, transport="processes"))
    assert "rank 3: all_reduce(sum) float32[5]" in message
    assert "ranks 0 1 2 4 5 6 7 8: all_reduce(sum) float32[4]" in message
