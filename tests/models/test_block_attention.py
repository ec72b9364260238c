"""Attention of one device in blocks == the formula with all scores, forward and gradients, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention import small_blocks
from weft.core.attention_choice import AttentionDevice
from weft.core.attention_mask import AttentionMask
from weft.models.common import attention_kernels, varlen_attention
from weft.models.common.attention import Attend, FusedAttention, eager_attention
from weft.models.common.attention_spec import AttentionSpec, visible_keys
from weft.models.common.batch import Batch, token_batch

B, S, H, K, W = 2, 37, 4, 8, 6
MASKS = (
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=1),
    AttentionMask(window=5),
    AttentionMask(causal=False, window=5),
    AttentionMask(prefix=9),
    AttentionMask(prefix=9, window=7),
    AttentionMask(prefix=S + 3),
)
ONE_LONG_ROW = [0] * S
UNEVEN = torch.tensor([[0] * 5 + [1] + [2] * 20 + [3] * 11, ONE_LONG_ROW])
MIXED = torch.tensor([[0] * 5 + [1] * 12 + [0] * 20, ONE_LONG_ROW])
DOCUMENTS = {"none": None, "uneven": UNEVEN, "mixed": MIXED}
FEATURES = ("", "softcap", "sinks", "head_bias", "softcap sinks head_bias")


def batch_of(documents: Tensor | None, *, rows: int = B, length: int = S) -> Batch:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return replace(token_batch(ids, ids), documents=documents)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def spec_of(mask: AttentionMask, features: str) -> AttentionSpec:
    return AttentionSpec(
        mask,
        scale=0.3,
        softcap=2.0 if "softcap" in features else None,
        sinks=leaf(H) if "sinks" in features else None,
        head_bias=leaf(H) if "head_bias" in features else None,
    )


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, documents: Tensor | None
) -> Tensor:
    """Of whole sequences, with every score in memory."""
    columns = torch.arange(q.shape[1])
    allowed = torch.ones(1, 1, len(columns), len(columns), dtype=torch.bool)
    seen = visible_keys(spec.mask, columns, columns)
    if seen is not None:
        allowed = allowed & seen
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    distance = columns[:, None] - columns
    return eager_attention(q, k, v, spec, allowed=allowed, distance=distance).transpose(1, 2)


def tensors_of(spec: AttentionSpec, *inputs: Tensor) -> list[Tensor]:
    return [*inputs, *(x for x in (spec.sinks, spec.head_bias) if x is not None)]


def differences(got: Tensor, right: Tensor, leaves: list[Tensor]) -> Iterator[float]:
    """Largest ones of the outputs, and of the gradients of each leaf."""
    grad = torch.randn_like(right)
    yield (got - right).abs().max().item()
    gradients = torch.autograd.grad(got, leaves, grad)
    for ours, theirs in zip(gradients, torch.autograd.grad(right, leaves, grad), strict=True):
        yield (ours - theirs).abs().max().item()


@pytest.mark.parametrize("queries", [4, 64])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_blocks_equal_the_formula(
    mask: AttentionMask, documents: Tensor | None, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S is no multiple of a block; key heads are shared by one, two and four heads of queries."""
    small_blocks(monkeypatch, queries=queries)
    for features, key_heads in product(FEATURES, (4, 2, 1)):
        spec = spec_of(mask, features)
        q, k, v = leaf(B, S, H, K), leaf(B, S, key_heads, K), leaf(B, S, key_heads, W)
        out = FusedAttention()(q, k, v, batch_of(documents), spec)
        right = by_formula(q, k, v, spec, documents)
        leaves = tensors_of(spec, q, k, v)
        assert max(differences(out, right, leaves)) < 1e-11, (features, key_heads)


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[3], MASKS[5]], ids=str)
def test_small_attention_equals_the_formula(mask: AttentionMask) -> None:
    """Where scores are small, one mask tensor is faster."""
    for features, documents in product(FEATURES, DOCUMENTS.values()):
        spec = spec_of(mask, features)
        q, k, v = leaf(B, S, H, K), leaf(B, S, 2, K), leaf(B, S, 2, W)
        out = FusedAttention()(q, k, v, batch_of(documents), spec)
        right = by_formula(q, k, v, spec, documents)
        assert max(differences(out, right, tensors_of(spec, q, k, v))) < 1e-11


@pytest.mark.parametrize("features", FEATURES)
def test_blocks_in_bfloat16_err_as_little_as_the_formula(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both against float64: no more than twice the error of the formula in bfloat16, and a rounding."""
    small_blocks(monkeypatch, queries=4)
    spec = spec_of(AttentionMask(window=7), features)
    wide = [leaf(B, S, heads, K) for heads in (H, 2, 2)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    grad = torch.randn(B, S, H, K, dtype=torch.float64)
    exact_inputs = [x.detach().double().requires_grad_() for x in narrow]
    exact = by_formula(*exact_inputs, spec, UNEVEN)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, grad)

    def errors(out: Tensor) -> list[float]:
        gradients = torch.autograd.grad(out, narrow, grad.bfloat16())
        pairs = zip((out, *gradients), (exact, *exact_gradients), strict=True)
        return [(ours.double() - right).norm().item() for ours, right in pairs]

    narrow_spec = replace(spec, **{
        name: x.detach().bfloat16() for name in ("sinks", "head_bias") if (x := getattr(spec, name)) is not None
    })  # fmt: skip
    ours = errors(FusedAttention()(*narrow, batch_of(UNEVEN), narrow_spec))
    theirs = errors(by_formula(*narrow, narrow_spec, UNEVEN))
    for own, other in zip(ours, theirs, strict=True):
        assert own < 2 * other + 2**-8


class LargestResult(TorchDispatchMode):
    """Notes the most entries that a tensor of any operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("mask", "documents", "features"),
    [
        (AttentionMask(), True, ""),
        (AttentionMask(window=64), False, ""),
        (AttentionMask(window=64), True, "sinks"),
        (AttentionMask(), False, "softcap"),
        (AttentionMask(), False, "head_bias"),
    ],
    ids=str,
)
def test_no_tensor_of_all_queries_and_keys_exists(
    mask: AttentionMask, documents: bool, features: str
) -> None:
    length = 1536
    numbers = torch.arange(length) // 100
    batch = batch_of(numbers[None] if documents else None, rows=1, length=length)
    spec = spec_of(mask, features)
    q, k, v = (leaf(1, length, heads, K, dtype=torch.float32) for heads in (H, 2, 2))
    with LargestResult() as largest:
        FusedAttention()(q, k, v, batch, spec).sum().backward()
    assert largest.most <= length**2 // 4


def test_rows_of_a_batch_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: a sequence may stand in any micro-batch."""
    small_blocks(monkeypatch, queries=8)
    q, k, v = (leaf(B, S, heads, K, dtype=torch.float32) for heads in (H, 2, 2))
    spec = AttentionSpec(AttentionMask(window=9))
    together = FusedAttention()(q, k, v, batch_of(UNEVEN), spec)
    apart = [
        FusedAttention()(q[row], k[row], v[row], batch_of(UNEVEN[row], rows=1), spec)
        for row in (slice(0, 1), slice(1, 2))
    ]
    assert torch.equal(together, torch.cat(apart))


def test_documents_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, queries=8)
    batch = batch_of(UNEVEN)
    runs = batch.document_runs
    assert runs is not None
    assert runs[0] == (range(5), range(5, 6), range(6, 26), range(26, 37))
    assert runs[1] == (range(S),)
    assert batch_of(MIXED).document_runs == (None, (range(S),))
    assert batch.document_runs is runs
    assert batch.document_borders.tolist() == [0, 5, 6, 26, 37, 74]
    moved = batch.map(lambda x: x[:1])
    assert moved.document_runs == runs[:1]


def varlen_by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    borders_k: Tensor,
    *longest: int,
    **options: Any,
) -> Tensor:
    """What torch documents of `varlen_attn`."""
    assert torch.equal(borders, borders_k)
    assert borders.dtype == torch.int32
    left, right = options["window_size"]
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
    found = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        assert stop - start <= min(longest)
        columns = torch.arange(start, stop)
        distance = columns[:, None] - columns
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            allowed &= distance <= left
        if right >= 0:
            allowed &= distance >= -right
        scores = torch.einsum("qhk,thk->hqt", q[columns], k[columns]) * options["scale"]
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        found.append(torch.einsum("hqt,thk->qhk", weights, v[columns]))
    return torch.cat(found)


@pytest.mark.parametrize("documents", ["none", "uneven", "mixed"])
@pytest.mark.parametrize("mask", [*MASKS[2:5], AttentionMask()], ids=str)
def test_varlen_is_called_as_torch_documents_it(
    mask: AttentionMask, documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the formula in place of the kernel, which GPUs alone have."""
    small_blocks(monkeypatch, queries=8)
    calls: list[int] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return varlen_by_formula(*args, **options)

    monkeypatch.setattr(varlen_attention, "varlen_with_windows", lambda: noted)
    spec = AttentionSpec(mask, scale=0.3)
    numbers = DOCUMENTS[documents]
    q, k, v = (leaf(B, S, heads, K).bfloat16() for heads in (H, 2, 2))
    gpu = AttentionDevice("cuda", (9, 0), has_varlen=True)
    out = FusedAttention(gpu)(q, k, v, batch_of(numbers), spec)
    is_masked = numbers is not None or mask.window is not None
    assert len(calls) == (is_masked and documents != "mixed")
    right = by_formula(q.double(), k.double(), v.double(), spec, numbers)
    torch.testing.assert_close(out.double(), right, atol=0.05, rtol=0.02)


def test_this_torch_has_varlen_with_windows_or_it_is_not_chosen() -> None:
    found = attention_kernels.varlen_with_windows()
    assert found is None or found.__name__ == "varlen_attn"


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_repeated_heads_of_keys_give_the_numbers_of_grouped_ones(heads: tuple[int, int]) -> None:
    """float32 on a GPU: the memory-efficient kernel takes no grouped heads."""
    num_heads, key_heads = heads
    gpu = AttentionDevice("cuda", (9, 0))
    q, k, v = leaf(B, S, num_heads, K), leaf(B, S, key_heads, K), leaf(B, S, key_heads, W)
    narrow = [x.detach().float().requires_grad_() for x in (q, k, v)]
    spec = AttentionSpec(scale=0.3)
    out = FusedAttention(gpu)(*narrow, batch_of(None), spec)
    right = by_formula(q, k, v, spec, None)
    grad = torch.randn_like(right)
    gradients = torch.autograd.grad(out, narrow, grad.float())
    exact = torch.autograd.grad(right, (q, k, v), grad)
    for ours, theirs in zip((out, *gradients), (right, *exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan")])
def test_a_scale_that_fused_kernels_cannot_compute_is_rejected_with_the_model(scale: float) -> None:
    with pytest.raises(ValueError, match="needs a factor above 0"):
        Attend(scale=scale)
