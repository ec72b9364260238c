"""Blocks of one device: each query once, with every key that it sees; and which kernel is chosen."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.attention_choice import (
    AttentionCall,
    AttentionDevice,
    KernelName,
    choose_block_kernel,
    choose_kernel,
    masked_queries,
    scored_queries,
)
from weft.core.attention_mask import AttentionMask, Feature
from weft.core.query_blocks import have_disjoint_keys, query_blocks, row_blocks

CPU = AttentionDevice("cpu")
HOPPER = AttentionDevice("cuda", (9, 0), has_varlen=True, has_cudnn=True)
OLD_TORCH = AttentionDevice("cuda", (9, 0))
TURING = AttentionDevice("cuda", (7, 5), has_varlen=True)


@st.composite
def masks(draw: st.DrawFn) -> AttentionMask:
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 12))
    prefix = draw(st.integers(0, 12)) if causal else 0
    return AttentionMask(causal=causal, window=window, prefix=prefix)


@given(masks(), st.integers(0, 9), st.integers(1, 20), st.integers(1, 25))
def test_each_query_stands_in_one_block_with_all_its_keys(
    mask: AttentionMask, start: int, length: int, most: int
) -> None:
    document = range(start, start + length)
    blocks = list(query_blocks(mask, document, most=most))
    queries = [query for block in blocks for query in block.queries]
    assert queries == list(document)
    for block in blocks:
        assert 0 < len(block.queries) <= most
        for query in block.queries:
            seen = {key for key in document if mask.allows(query, key)}
            assert seen <= set(block.keys)
            if block.kind == "full":
                assert seen == set(block.keys)
            elif block.kind == "triangle":
                assert seen == set(range(block.keys.start, query + 1))
        if block.kind == "partial" and mask.window and not mask.prefix:
            reach = 1 if mask.causal else 2
            assert len(block.keys) <= len(block.queries) + reach * (mask.window - 1)


def call(
    dtype: str = "bfloat16",
    *,
    mask: AttentionMask | None = None,
    length: int = 8192,
    **options: object,
) -> AttentionCall:
    values: dict[str, object] = {
        "rows": 1, "heads": 32, "key_heads": 8, "head_size": 64, "mask": mask or AttentionMask(), **options
    }  # fmt: skip
    return AttentionCall(dtype, length=length, **values)  # type: ignore[arg-type]


WINDOW = AttentionMask(window=1024)
PACKED = {"has_documents": True}


@pytest.mark.parametrize(
    ("device", "given_call", "kernel"),
    [
        (CPU, call(), "flash"),
        (CPU, call("float64"), "flash"),
        (CPU, call(**PACKED), "blocks"),
        (CPU, call(length=64, **PACKED), "masked"),
        (CPU, call(mask=AttentionMask(window=9000)), "flash"),
        (CPU, call(features=frozenset({"sinks"})), "blocks"),
        (CPU, call(length=64, features=frozenset({"sinks"})), "plain"),
        (CPU, call(length=64, features=frozenset({"dropout"})), "blocks"),
        (HOPPER, call(), "flash"),
        (HOPPER, call("float32"), "efficient"),
        (HOPPER, call("float64"), "blocks"),
        (HOPPER, call(mask=WINDOW), "varlen"),
        (HOPPER, call(**PACKED), "varlen"),
        (HOPPER, call("float32", **PACKED), "blocks"),
        (HOPPER, call(mask=AttentionMask(prefix=100)), "blocks"),
        (HOPPER, call(head_size=512, **PACKED), "blocks"),
        (HOPPER, call(features=frozenset({"softcap"})), "blocks"),
        (OLD_TORCH, call(**PACKED), "blocks"),
        (TURING, call(), "efficient"),
        (TURING, call(**PACKED), "blocks"),
    ],
)
def test_the_kernel_of_a_call(
    device: AttentionDevice, given_call: AttentionCall, kernel: KernelName
) -> None:
    choice = choose_kernel(given_call, device)
    assert choice.kernel == kernel
    assert choice.why


def test_a_kernel_that_is_missing_is_named() -> None:
    assert "this torch has no varlen_attn" in str(choose_kernel(call(**PACKED), OLD_TORCH))
    assert "takes float32" in str(choose_kernel(call("float32", **PACKED), HOPPER))


@pytest.mark.parametrize(
    ("device", "dtype", "has_mask", "needs_scores", "kernel"),
    [
        (CPU, "float64", True, False, "flash"),
        (CPU, "float32", False, True, "plain"),
        (HOPPER, "bfloat16", False, False, "cudnn"),
        (OLD_TORCH, "bfloat16", False, False, "flash"),
        (TURING, "float16", False, False, "efficient"),
        (HOPPER, "bfloat16", True, False, "efficient"),
        (HOPPER, "float32", False, False, "efficient"),
        (HOPPER, "float64", False, False, "plain"),
    ],
)
def test_the_kernel_of_a_block(
    device: AttentionDevice, dtype: str, has_mask: bool, needs_scores: bool, kernel: KernelName
) -> None:
    found = choose_block_kernel(dtype, 64, device, has_mask=has_mask, needs_scores=needs_scores)
    assert found == kernel


@pytest.mark.parametrize("device", [CPU, HOPPER, OLD_TORCH], ids=str)
@pytest.mark.parametrize("features", [(), ("softcap",), ("dropout", "sinks")], ids=str)
@pytest.mark.parametrize("mask", [AttentionMask(), WINDOW, AttentionMask(prefix=9)], ids=str)
@pytest.mark.parametrize("length", [100, 2048, 32768])
def test_scores_in_memory_stay_below_64_mb(
    device: AttentionDevice, features: tuple[Feature, ...], mask: AttentionMask, length: int
) -> None:
    """Of one head of 4 bytes each at least 32 queries have scores."""
    given_call = call("float32", mask=mask, length=length, features=frozenset(features))
    choice = choose_kernel(given_call, device)
    if choice.kernel in ("plain", "masked"):
        assert given_call.score_bytes <= 2**26
    if choice.kernel != "blocks" or not given_call.needs_scores:
        return
    for block in row_blocks(given_call, device, None):
        num_keys = block.keys.stop - block.keys.start
        num_queries = block.queries.stop - block.queries.start
        scores = given_call.rows * given_call.heads * num_queries * num_keys
        assert 4 * scores <= max(2**26, 4 * 32 * given_call.heads * num_keys)


def test_a_document_on_its_own_is_one_triangle() -> None:
    packed = call("float32", **PACKED)
    runs = ((range(100), range(100, 8192)), (range(8192),))
    blocks = row_blocks(packed, CPU, runs)
    assert [(block.rows.start, block.keys, block.kind) for block in blocks] == [
        (0, slice(0, 100), "triangle"),
        (0, slice(100, 8192), "triangle"),
        (1, slice(0, 8192), "triangle"),
    ]
    assert have_disjoint_keys(blocks)
    one_each = row_blocks(packed, CPU, runs[1:] * 2)
    assert [(block.rows, block.keys) for block in one_each] == [(slice(0, 1), slice(0, 8192))]
    near = row_blocks(call("float32", mask=WINDOW), CPU, None)
    assert all(one.queries.stop == after.queries.start for one, after in pairwise(near))
    assert not have_disjoint_keys(near)


def test_runs_of_queries_grow_with_what_fits() -> None:
    assert masked_queries(2**20, CPU) == 64
    assert masked_queries(1024, CPU) == 4096
    assert scored_queries(2**30, CPU) == 32
    assert scored_queries(2**10, CPU) == 512
