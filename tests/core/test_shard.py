"""Shards of parameters with `Stacked` dims: they cover every entry once, and their boxes follow the local tensor's order."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.mesh import Mesh
from weft.core.shard import Shard, Stacked, shard_of
from weft.errors import PlanError

RULE = {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "experts": "ep"}
QKV = Stacked(("heads", 4), ("kv_heads", 2), ("kv_heads", 2))
GATE_UP = Stacked(("ffn", 4), ("ffn", 4))


@dataclass(frozen=True)
class Weight:
    """A parameter with its logical axes, on a mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | Stacked, ...]
    mesh: str

    def shard(self, rank: int) -> Shard:
        mesh = Mesh.parse(self.mesh)
        return shard_of("w", self.shape, self.axes, rule=RULE, mesh=mesh, rank=rank)

    def shards(self) -> list[Shard]:
        """Of all ranks."""
        size = Mesh.parse(self.mesh).size
        return [self.shard(rank) for rank in range(size)]


CASES = {
    "qkv tp2": Weight((16, 3), (QKV, "embed"), "tp2"),
    "qkv bias tp2": Weight((24,), (QKV,), "tp2"),
    "gate_up tp4": Weight((16, 2), (GATE_UP, "embed"), "tp4"),
    "experts' gate_up": Weight((4, 8, 3), ("experts", GATE_UP, "embed"), "ep2 tp2"),
    "stacked input": Weight((3, 8), ("embed", GATE_UP), "tp2"),
    "not sharded": Weight((8, 3), (QKV, "embed"), "dp2"),
}


def local(whole: np.ndarray, shard: Shard) -> np.ndarray:
    parts = [whole[box.slices] for box in shard.boxes]
    return np.concatenate(parts, axis=shard.dim)


@pytest.mark.parametrize("case", [case for case in CASES if case != "not sharded"])
def test_shards_of_all_ranks_cover_every_entry_once(case: str) -> None:
    weight = CASES[case]
    counts = np.zeros(weight.shape, dtype=int)
    for shard in weight.shards():
        for box in shard.boxes:
            counts[box.slices] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_boxes_of_a_range_are_the_local_entries_in_order(case: str, data: st.DataObject) -> None:
    weight = CASES[case]
    num_entries = math.prod(weight.shape)
    whole = np.arange(num_entries).reshape(weight.shape)
    shard = data.draw(st.sampled_from(weight.shards()))
    start = data.draw(st.integers(0, shard.size))
    stop = data.draw(st.integers(start, shard.size))
    own = local(whole, shard)
    assert own.shape == shard.shape
    found: list[int] = []
    for box in shard.boxes_of_range(start, stop):
        entries = whole[box.slices]
        found.extend(entries.flatten().tolist())
    expected = own.flatten()[start:stop]
    assert found == expected.tolist()


def test_a_rank_holds_its_heads_of_each_part() -> None:
    whole = np.arange(16)  # 4 heads of q, 2 of k, 2 of v, head size 2
    weight = Weight((16,), (QKV,), "tp2")
    first = local(whole, weight.shard(0)).tolist()
    assert first == [0, 1, 2, 3, 8, 9, 12, 13]
    second = local(whole, weight.shard(1)).tolist()
    assert second == [4, 5, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("length", "axis", "message"),
    [
        (
            15,
            QKV,
            "w: Stacked units of heads+kv_heads+kv_heads do not fit the dim (got 15; need a multiple of 8, the units of all "
            "parts)",
        ),
        (
            6,
            Stacked(("heads", 4), ("kv_heads", 1), ("kv_heads", 1)),
            "w: part 'kv_heads' of a Stacked dim does not divide (got 1 units; need a multiple of 2, the ranks along tp)",
        ),
        (
            8,
            Stacked(("heads", 1), ("experts", 1)),
            "parts of heads+experts are sharded over different mesh axes",
        ),
    ],
)
def test_sizes_that_do_not_match_are_rejected(length: int, axis: Stacked, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        shard_of("w", (length,), (axis,), rule=RULE, mesh=Mesh.parse("tp2"), rank=0)
