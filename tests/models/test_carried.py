"""What layers of transformers are handed beside the hidden state: the stream of blocks holds it, and nothing that none takes."""

from __future__ import annotations

import torch

from weft.models.transformers.carried import CarriedTensors, SharedEntry

BATCH, LENGTH = 2, 5
CARRIED = CarriedTensors(
    hidden=(6,),
    shapes=((3,), (4,), (2, 8)),
    arguments=({1: 0, "embeds": 1}, {"embeds": 1}, {}),
    shared=(SharedEntry("shared", "full", 1, (2,)),),
)
"""Of three layers: the first takes two tensors, the second one of them, the third what the second leaves."""


def tensors_of(carried: CarriedTensors) -> dict[int, torch.Tensor]:
    shapes = enumerate(carried.shapes)
    return {number: torch.randn(BATCH, LENGTH, *shape) for number, shape in shapes}


def test_each_layer_gets_what_it_and_later_ones_take() -> None:
    x, tensors = torch.randn(BATCH, LENGTH, 6), tensors_of(CARRIED)
    for first, width, numbers in ((0, 13, [0, 1]), (1, 10, [1]), (2, 22, [2]), (3, 6, [])):
        stream = CARRIED.pack(x, tensors, first)
        assert stream.shape == (BATCH, LENGTH, width)
        hidden, found = CARRIED.unpack(stream, first)
        assert torch.equal(hidden, x)
        assert sorted(found) == numbers
        assert all(torch.equal(found[number], tensors[number]) for number in numbers)


def test_a_stream_of_several_hidden_states_begins_with_the_batch() -> None:
    """As those of Gemma 3n, [4, B, S, D]."""
    carried = CarriedTensors(hidden=(4, 6), batch_dim=1, shapes=((3,),), arguments=({1: 0}, {1: 0}))
    x, tensors = torch.randn(4, BATCH, LENGTH, 6), tensors_of(carried)
    stream = carried.pack(x, tensors, 1)
    assert stream.shape == (BATCH, LENGTH, 27)
    hidden, _ = carried.unpack(stream, 1)
    assert torch.equal(hidden, x)
    assert carried.pack(x, {}, 2).shape == (BATCH, LENGTH, 4, 6)


def test_keys_that_a_layer_leaves_are_in_the_mapping_of_later_ones() -> None:
    keys = torch.randn(BATCH, 2, LENGTH, 8)
    tensors: dict[int, torch.Tensor] = {}
    CARRIED.take_shared(1, tensors, {"shared": {"full": (keys,)}})
    assert tensors[2].shape == (BATCH, LENGTH, 2, 8)
    for index, names in ((1, []), (2, ["full"])):
        shared: dict[str, tuple[torch.Tensor, ...]] = {}
        CARRIED.give_shared(index, tensors, {"shared": shared})
        assert list(shared) == names
    assert torch.equal(shared["full"][0], keys)
