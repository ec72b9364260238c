"""Dropout by counter: quality of its numbers, independence of shards, gradients, and every function of torch that drops out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.attention import small_blocks
from weft import Attend, DropPath, drop_path
from weft.core.attention_mask import AttentionMask
from weft.core.entry_places import DimEntries, DimShard, ShardingRank, held_entries
from weft.data.order import draw_keys
from weft.errors import PlanError
from weft.models.common.attention_spec import visible_keys
from weft.models.common.batch import Batch, token_batch, token_example
from weft.models.common.dropout import DropoutDraws, call_key, drop, times_factors
from weft.models.common.dropout_mode import CounterDropout, may_drop
from weft.models.user_specs import measure_blocks
from weft.parallel.model.dropout_blocks import BlockName, DroppingBlock
from weft.prove.raw_batch import with_draw_keys

P = 0.3
SIX_SIGMA = 6.0
"""Chance of a deviation of six standard deviations: 2e-9."""


def keys_of(num: int, *, first: int = 0, seed: int = 0) -> Tensor:
    return torch.from_numpy(draw_keys(np.arange(first, first + num), seed=seed))


def kept(
    keys: Tensor, shape: tuple[int, ...], *, p: float = P, block: str = "layer0", call: int = 0
) -> Tensor:
    dims = tuple(map(DimEntries.whole, shape))
    return DropoutDraws(p, keys, call_key(block, call), dims).factors(torch.float32) > 0


def deviation(found: Tensor, probability: float) -> float:
    """Of the mean of independent yes-or-no numbers, in standard deviations."""
    sigma = math.sqrt(probability * (1 - probability) / found.numel())
    return abs(float(found.double().mean()) - probability) / sigma


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_as_many_entries_are_dropped_as_p_says(p: float) -> None:
    assert deviation(kept(keys_of(16), (512, 128), p=p), 1 - p) < SIX_SIGMA


def test_every_row_and_column_is_dropped_as_often() -> None:
    found = kept(keys_of(64), (128, 128))
    for dim in range(3):
        others = tuple(d for d in range(3) if d != dim)
        means = found.double().mean(others)
        sigma = math.sqrt(P * (1 - P) * found.shape[dim] / found.numel())
        deviations = (means - (1 - P)) / sigma
        assert float(deviations.abs().max()) < SIX_SIGMA
        assert 0.5 < float(deviations.square().mean()) < 2


@pytest.mark.parametrize(
    "pair",
    [
        lambda m: (m[:, :, 1:], m[:, :, :-1]),  # the next feature
        lambda m: (m[:, :, 2:], m[:, :, :-2]),
        lambda m: (m[:, :, 64:], m[:, :, :-64]),
        lambda m: (m[:, 1:], m[:, :-1]),  # the next column
        lambda m: (m[:, 1:, 1:], m[:, :-1, :-1]),
        lambda m: (m[1:], m[:-1]),  # the next sequence
        lambda m: (m[8:], m[:-8]),  # the next step
    ],
)
def test_neighbours_are_independent(pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    one, other = pair(kept(keys_of(32), (64, 256)))
    assert deviation(one & other, (1 - P) ** 2) < SIX_SIGMA


@pytest.mark.parametrize(
    "change",
    [{"block": "layer1"}, {"block": "layer10"}, {"call": 1}, {"keys": keys_of(16, seed=1)}],
)
def test_blocks_calls_and_seeds_are_independent(change: dict[str, Any]) -> None:
    shape = (64, 256)
    one, other = kept(keys_of(16), shape), kept(**{"keys": keys_of(16), "shape": shape, **change})
    assert deviation(one & other, (1 - P) ** 2) < SIX_SIGMA


def test_bits_are_those_of_their_definition() -> None:
    """In whole numbers of Python, entry by entry."""

    def finalized(word: int) -> int:
        word %= 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    def bits(key: int, row: int, column: int) -> int:
        golden = 0x9E3779B97F4A7C15
        first = finalized(row * golden + key)
        second = finalized(first + golden)
        word = (column * 0x9E3779B1 + first) % 2**32
        word = (word ^ (word >> 16)) * 0x7FEB352D % 2**32
        word ^= first >> 32
        word = (word ^ (word >> 15)) * 0x846CA68B % 2**32
        word ^= second % 2**32
        return word ^ (word >> 16)

    sequences = keys_of(3, first=2**40)
    call = call_key("embed", 2)
    found = DropoutDraws(P, sequences, call, (DimEntries.whole(5), DimEntries.whole(7)))
    factors = found.factors(torch.float64)
    for place in itertools.product(range(3), range(5), range(7)):
        sequence, row, column = place
        key = finalized(int(sequences[sequence]) * 0x9E3779B97F4A7C15 + call)
        # as signed numbers, of which those from p x 2^32 - 2^31 on are kept
        word = bits(key, row, column)
        is_kept = (word + 2**31) % 2**32 >= round(P * 2**32)
        assert bool(factors[place] > 0) == is_kept


def test_keys_of_ranks_are_those_of_the_proof() -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64)
    batch = with_draw_keys(token_batch(ids, ids), range(2**33, 2**33 + 4), seed=7)
    assert torch.equal(batch.draw_keys, keys_of(4, first=2**33, seed=7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.7, 1.0])
def test_what_is_kept_is_scaled_as_by_torch(dtype: torch.dtype, p: float) -> None:
    ones = torch.ones(2, 2048, dtype=dtype)
    theirs = F.dropout(ones, p).unique()
    x = torch.linspace(-3, 3, 4096, dtype=dtype).view_as(ones)
    with CounterDropout("layer0", keys_of(2)):
        assert torch.equal(F.dropout(ones, p).unique(), theirs)
        y = F.dropout(x, p)
    is_kept = y != 0
    assert torch.equal(y[is_kept], (x * theirs[-1])[is_kept])


SHARDS = {
    "features": ((DimShard(), DimShard(), DimShard(sharded=True)), ShardingRank(0, 1, 1, 2)),
    "stacked features": (
        (DimShard(), DimShard(), DimShard(sharded=True, parts=(4, 2))),
        ShardingRank(0, 1, 1, 2),
    ),
    "columns": ((DimShard(), DimShard(columns=True)), ShardingRank(1, 2)),
    "columns of sequence parallelism": (
        (DimShard(), DimShard(columns=True, sharded=True)),
        ShardingRank(1, 2, 1, 2),
    ),
    "both": (
        (DimShard(), DimShard(columns=True), DimShard(sharded=True)),
        ShardingRank(1, 2, 0, 2),
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_has_the_factors_of_the_whole(name: str) -> None:
    shards, rank = SHARDS[name]
    whole = torch.rand(3, 16, 12, dtype=torch.float64) + 1
    with CounterDropout("layer0", keys_of(3)):
        right = F.dropout(whole, P)
    local, expected = whole, right
    for place, shard in enumerate(shards):
        degree = rank.context_degree if shard.columns else 1
        degree *= rank.tensor_degree if shard.sharded else 1
        num_local = whole.shape[place] // degree
        spans = held_entries(shard, num_local, rank).spans
        index = torch.tensor(list(itertools.chain.from_iterable(spans)))
        if degree > 1:
            local, expected = local.index_select(place, index), expected.index_select(place, index)
    with CounterDropout("layer0", keys_of(3), calls=(shards,), rank=rank):
        assert torch.equal(F.dropout(local, P), expected)


def test_a_sequence_has_its_factors_in_any_micro_batch() -> None:
    x = torch.ones(4, 8, 6)
    keys = keys_of(4)
    with CounterDropout("layer0", keys):
        whole = F.dropout(x, P)
    parts = []
    for row in range(4):
        with CounterDropout("layer0", keys[row : row + 1]):
            parts.append(F.dropout(x[row : row + 1], P))
    assert torch.equal(torch.cat(parts), whole)


def test_rows_of_tokens_have_the_factors_of_sequences() -> None:
    x = torch.ones(4, 8, 6)
    with CounterDropout("layer0", keys_of(4)):
        whole = F.dropout(x, P)
    with CounterDropout("layer0", keys_of(4)):
        assert torch.equal(F.dropout(x.flatten(0, 1), P).view(x.shape), whole)


def test_the_gradient_has_the_same_factors_and_nothing_is_saved() -> None:
    x = torch.ones(2, 8, 6, requires_grad=True)
    saved: list[Tensor] = []
    with (
        saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None),
        CounterDropout("layer0", keys_of(2)),
    ):
        y = F.dropout(x, P)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not saved


def test_gradients_are_right_to_the_second_order() -> None:
    draws = DropoutDraws(P, keys_of(2), 1, (DimEntries.whole(3), DimEntries.whole(4)))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: drop(t, draws, t.shape).square(), x)
    assert torch.autograd.gradgradcheck(lambda t: drop(t, draws, t.shape).pow(3), x)


FUNCTIONS = {
    "nn.Dropout": lambda x: nn.Dropout(P)(x),
    "nn.Dropout in place": lambda x: nn.Dropout(P, inplace=True)(x.clone()),
    "F.dropout": lambda x: F.dropout(x, P),
    "torch.dropout": lambda x: torch.dropout(x, P, True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), P, True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_drop_entries_are_alike(name: str) -> None:
    x = torch.ones(4, 8, 6)
    with CounterDropout("layer0", keys_of(4)):
        right = F.dropout(x, P)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with CounterDropout("layer0", keys_of(4)) as mode:
        assert torch.equal(FUNCTIONS[name](x), right)
    assert mode.num_calls == 1
    assert torch.equal(torch.get_rng_state(), before), "torch's generator is not used"


@pytest.mark.parametrize(
    ("function", "shape", "num_parts"),
    [
        (nn.Dropout1d(P), (4, 50, 6), 200),
        (nn.Dropout2d(P), (4, 50, 3, 2), 200),
        (nn.Dropout3d(P), (4, 50, 3, 2, 2), 200),
        (DropPath(P), (200, 5, 6), 200),
        (lambda x: drop_path(x, P), (200, 30), 200),
    ],
)
def test_whole_channels_or_sequences_are_dropped(
    function: Any, shape: tuple[int, ...], num_parts: int
) -> None:
    x = torch.ones(shape, requires_grad=True)
    with CounterDropout("layer0", keys_of(shape[0])):
        y = function(x)
    parts = y.detach().reshape(num_parts, -1)
    assert set(parts.unique().tolist()) == {0.0, float(np.float32(1) / np.float32(1 - P))}
    assert torch.equal(parts, parts[:, :1].expand_as(parts))
    assert deviation(parts[:, 0] > 0, 1 - P) < SIX_SIGMA
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_nothing_is_dropped_in_evaluation() -> None:
    x = torch.ones(4, 8, 6)
    with torch.no_grad(), CounterDropout("layer0", None):
        for function in FUNCTIONS.values():
            assert torch.equal(function(x), x)
        assert torch.equal(DropPath(P)(x), x)
        q = torch.randn(4, 2, 8, 6)
        right = F.scaled_dot_product_attention(q, q, q)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=P), right)


def test_modules_in_evaluation_and_p_of_0_are_no_calls() -> None:
    x = torch.ones(4, 8, 6)
    with CounterDropout("layer0", keys_of(4)) as mode:
        for module in (nn.Dropout(P).eval(), nn.Dropout(0.0), DropPath(P).eval()):
            assert torch.equal(module(x), x)
    assert mode.num_calls == 0


def test_a_training_forward_without_keys_is_rejected() -> None:
    with CounterDropout("layer0", None), pytest.raises(PlanError, match=r"layer0: .* no keys"):
        F.dropout(torch.ones(4, 8), P)


def test_a_tensor_without_sequences_first_is_rejected() -> None:
    with (
        CounterDropout("layer0", keys_of(3)),
        pytest.raises(PlanError, match=r"layer0: drops entries of a tensor whose first dim"),
    ):
        F.dropout(torch.ones(4, 8), P)


def test_alpha_drop_out_is_rejected_by_name() -> None:
    with CounterDropout("layer0", keys_of(4)), pytest.raises(PlanError, match="alpha dropout"):
        nn.AlphaDropout(P)(torch.ones(4, 8))


def test_a_block_that_is_rejected_says_what_to_change_and_nothing_else() -> None:
    batch = token_example(2, 8)

    class Dropping(nn.AlphaDropout):
        def forward(self, ids: Tensor, batch: Batch) -> Tensor:
            return super().forward(F.one_hot(ids, 4).float())

    blocks = {"head": Dropping(P)}
    with pytest.raises(PlanError) as caught:
        measure_blocks(blocks, batch, name="mine")
    assert str(caught.value) == (
        "head: alpha dropout draws random numbers, which would differ between layouts. "
        "Fix: nn.Dropout in its place"
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_drops_the_weights_that_one_would_drop_by_hand(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 8, 6, dtype=torch.float64) for _ in range(3))
    weights = q @ k.transpose(-1, -2) / math.sqrt(6)
    if is_causal:
        weights = weights.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf"))
    with CounterDropout("layer0", keys_of(2)):
        by_hand = F.dropout(weights.softmax(-1), P) @ v
    with CounterDropout("layer0", keys_of(2)):
        theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=is_causal)
    attend = Attend(mask=AttentionMask(causal=is_causal), dropout=P)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with CounterDropout("layer0", keys_of(2)):
        ours = attend(*(x.transpose(1, 2) for x in (q, k, v)), token_batch(ids, ids))
    torch.testing.assert_close(theirs, by_hand, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.transpose(1, 2), by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(causal=False), AttentionMask(window=3)], ids=str
)
def test_gradients_of_attention_are_those_by_hand(
    mask: AttentionMask, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks of queries, shared key heads, and packed documents."""
    small_blocks(monkeypatch, queries=chunk)
    q, k, v = (
        torch.randn(2, 8, heads, 6, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    ids = torch.zeros(2, 8, dtype=torch.int64)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8])
    batch = replace(token_batch(ids, ids), documents=documents)
    allowed = documents[:, None, :, None] == documents[:, None, None, :]
    columns = torch.arange(8)
    seen = visible_keys(mask, columns, columns)
    allowed = allowed if seen is None else allowed & seen

    def by_hand() -> Tensor:
        wide_k, wide_v = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ wide_k.transpose(-1, -2) * 6**-0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return (F.dropout(weights, P) @ wide_v).transpose(1, 2)

    found = []
    for function in (by_hand, lambda: Attend(mask=mask, dropout=P)(q, k, v, batch)):
        with CounterDropout("layer0", keys_of(2)):
            out = function()
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for right, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_attention_keeps_no_scores() -> None:
    q = torch.randn(2, 64, 4, 8, requires_grad=True)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    hooks = saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, CounterDropout("layer0", keys_of(2)):
        Attend(dropout=P)(q, q, q, token_batch(ids, ids))
    assert max(sizes) == q.numel()


def test_attention_of_shared_heads_and_of_masks_drops_weights() -> None:
    q = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 8, 6, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(8, 8, dtype=torch.float64)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    with CounterDropout("layer0", keys_of(2)):
        weights = (q @ wide_k.transpose(-1, -2) * 0.5 + bias).softmax(-1)
        by_hand = F.dropout(weights, P) @ wide_v
    with CounterDropout("layer0", keys_of(2)):
        found = F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p=P, scale=0.5, enable_gqa=True
        )
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_of_torch_drops_by_counter(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=P, batch_first=True).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def run() -> Tensor:
        with CounterDropout("layer0", keys_of(3)) as mode:
            out, _ = attention(x, x, x, need_weights=need_weights)
        assert mode.num_calls == 1
        return out

    assert torch.equal(run(), run())
    with torch.no_grad(), CounterDropout("layer0", None):
        undropped, _ = attention(x, x, x, need_weights=need_weights)
    assert not torch.allclose(run(), undropped)


def test_outside_of_a_run_torchs_generator_decides() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    q = torch.randn(2, 8, 4, 6)
    for function in (
        lambda: Attend(dropout=P)(q, q, q, token_batch(ids, ids)),
        lambda: DropPath(P)(torch.ones(64, 2)),
    ):
        torch.manual_seed(0)
        first, second = function(), function()
        torch.manual_seed(0)
        assert torch.equal(function(), first)
        assert not torch.equal(first, second)


def test_blocks_say_whether_they_may_drop() -> None:
    assert may_drop(nn.Sequential(nn.Linear(2, 2), nn.Dropout(P)))
    assert not may_drop(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert may_drop(Attend(dropout=P))
    assert not may_drop(Attend())

    class Users(nn.Linear):
        pass

    assert may_drop(Users(2, 2))
    declared = nn.Dropout(P)
    declared.drops_out = False
    assert not may_drop(declared)


def test_code_of_others_that_drops_nothing_runs_without_the_mode_from_its_second_forward() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = with_draw_keys(token_batch(ids, ids), range(2), seed=0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = 0.0
            self.modes = 0

        def forward(self, x: Tensor, _: object) -> Tensor:
            self.modes = torch._C._len_torch_function_stack()
            return F.dropout(x, self.dropout)

    block = Block()
    plain = DroppingBlock("layer0", block, None, ShardingRank())
    seen = []
    for p in (0.0, 0.0, P, P, 0.0, 0.0):
        block.dropout = p
        plain(torch.ones(2, 8), batch)
        seen.append(block.modes)
    assert seen == [1, 0, 1, 1, 1, 0]
    assert BlockName("layer0") == BlockName("layer1")


def test_any_number_of_a_module_of_others_shows_that_it_begins_to_drop() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = with_draw_keys(token_batch(ids, ids), range(2), seed=0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = 0.0
            self.inner = nn.Dropout(P)
            self.inner.eval()

        def forward(self, x: Tensor, _: object) -> Tensor:
            return self.inner(F.dropout(x, self.rate))

    for change in ({"rate": P}, {"training": True}):
        found = []
        for seed in (0, 1):
            block = Block()
            dropping = DroppingBlock("layer0", block, None, ShardingRank())
            for _ in range(2):
                assert dropping(torch.ones(2, 8), batch).equal(torch.ones(2, 8))
            for name, value in change.items():
                setattr(block if name == "rate" else block.inner, name, value)
            torch.manual_seed(seed)
            found.append(dropping(torch.ones(2, 8), batch))
        assert not found[0].equal(torch.ones(2, 8))
        assert found[0].equal(found[1]), "torch's generator drew the mask"


def test_factors_that_broadcast_are_multiplied() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = times_factors(x, lambda dtype: torch.tensor([[2.0], [0.0]], dtype=dtype))
    y.sum().backward()
    assert x.grad.tolist() == [[2.0] * 3, [0.0] * 3]
