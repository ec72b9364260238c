"""Ring, gathered and ulysses attention == one fused attention on the whole sequence: forward and all three gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.attention import attend_across
from weft.comm.comm import Comm
from weft.core.sequence import Context, zigzag
from weft.models.common.batch import token_batch
from weft.parallel.context.attend import VARIANTS
from weft.testing import run_ranks

TOLERANCE = 1e-11
"""Absolute, for values around 1 in float64, which rounds at 1e-16."""

B, K = 2, 6


@dataclass(frozen=True)
class Whole:
    """One attention over whole sequences: inputs, the gradient of the output, and what one device
    makes of them.
    """

    given: tuple[Tensor, ...]
    grad: Tensor
    documents: Tensor | None
    out: Tensor
    grads: tuple[Tensor, ...]


def whole(
    length: int,
    *,
    heads: int,
    kv_heads: int,
    width: int = K,
    causal: bool = True,
    packed: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Whole:
    generator = torch.Generator().manual_seed(length)

    def draw(heads: int, size: int) -> Tensor:
        return torch.randn(B, length, heads, size, dtype=torch.float64, generator=generator).to(
            dtype
        )

    q = draw(heads, K)
    k = draw(kv_heads, K)
    v = draw(kv_heads, width)
    grad = draw(heads, width)
    if packed:
        documents = (torch.rand(B, length, generator=generator) < 0.2).cumsum(1)
    else:
        documents = None
    return attended((q, k, v), grad, causal=causal, documents=documents, scale=scale)


def attended(
    given: tuple[Tensor, ...],
    grad: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Whole:
    """What torch's own attention makes of it."""
    given = tuple(x.detach().requires_grad_() for x in given)
    length = grad.shape[1]
    seen = torch.ones(1, length, length, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if documents is not None:
        is_same_document = documents[:, :, None] == documents[:, None, :]
        seen = seen & is_same_document
    q, k, v = (x.transpose(1, 2) for x in given)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=True
    ).transpose(1, 2)
    gradients = torch.autograd.grad(out, given, grad)
    return Whole(given, grad, documents, out.detach(), gradients)


def cut(x: Tensor, comm: Comm) -> Tensor:
    """This rank's columns."""
    spans = zigzag(x.shape[1], comm.degree("cp"), comm.index("cp"))
    parts = []
    for span in spans:
        parts.append(x.detach()[:, span.start : span.stop])
    return torch.cat(parts, dim=1)


def largest_difference(
    case: Whole, comm: Comm, act: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> float:
    """Of this rank's columns of the output and of the three gradients."""
    own = tuple(cut(x, comm).requires_grad_() for x in case.given)
    out = act(*own)
    grads = torch.autograd.grad(out, own, cut(case.grad, comm))
    worst = 0.0
    for mine, right in zip((out, *grads), (case.out, *case.grads), strict=True):
        difference = (mine - cut(right, comm)).abs().max()
        worst = max(worst, difference.item())
    return worst


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_ring_attention_is_one_fused_attention(degree: int, causal: bool, packed: bool) -> None:
    case = whole(6 * degree, heads=4, kv_heads=2, causal=causal, packed=packed)  # chunks of 3: odd

    def rank(comm: Comm) -> float:
        documents = None if case.documents is None else cut(case.documents, comm)
        return largest_difference(
            case,
            comm,
            lambda q, k, v: weft.ring_attention(q, k, v, comm, causal=causal, documents=documents),
        )

    assert max(run_ranks(f"cp{degree}", rank)) < TOLERANCE


@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_equals_attention_on_one_device(
    variant: Context, degree: int, packed: bool
) -> None:
    case = whole(6 * degree, heads=24, kv_heads=12, packed=packed)
    inputs_BS = torch.zeros(B, 6 * degree, dtype=torch.int64)
    batch = token_batch(inputs_BS, torch.zeros(B, 6 * degree, dtype=torch.int64))
    batch = replace(batch, documents=case.documents)

    def rank(comm: Comm) -> float:
        attend = attend_across(variant, comm)
        own = batch.columns(index=comm.index("cp"), degree=degree)
        return largest_difference(case, comm, lambda q, k, v: attend(q, k, v, own))

    assert max(run_ranks(f"cp{degree}", rank)) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_of_own_columns_alone_are_rejected(variant: Context) -> None:
    """Numbers that a model counts itself begin anew on each rank."""
    case = whole(12, heads=4, kv_heads=4, packed=True)
    inputs_BS = torch.zeros(B, 12, dtype=torch.int64)
    batch = replace(token_batch(inputs_BS, inputs_BS), documents=case.documents)

    def rank(comm: Comm) -> None:
        attend = attend_across(variant, comm)
        own = batch.columns(index=comm.index("cp"), degree=2)
        alone = replace(own, whole_documents=None)
        largest_difference(case, comm, lambda q, k, v: attend(q, k, v, alone))

    with pytest.raises(weft.WeftError, match="under cp a rank sees its columns alone"):
        run_ranks("cp2", rank)


@pytest.mark.parametrize("width", [4, 9])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_may_be_narrower_or_wider_than_keys_and_scores_may_have_a_scale(
    variant: Context, width: int
) -> None:
    case = whole(12, heads=4, kv_heads=4, width=width, scale=0.7)
    batch = token_batch(
        torch.zeros(B, 12, dtype=torch.int64), torch.zeros(B, 12, dtype=torch.int64)
    )

    def rank(comm: Comm) -> float:
        attend = attend_across(variant, comm, scale=0.7)
        own = batch.columns(index=comm.index("cp"), degree=2)
        return largest_difference(case, comm, lambda q, k, v: attend(q, k, v, own))

    assert max(run_ranks("cp2", rank)) < TOLERANCE


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_lower_precision_the_ring_rounds_as_one_fused_attention_does(
    dtype: torch.dtype, degree: int
) -> None:
    """Against float64 on the same inputs. A block's gradients are rounded once each before they are
    summed in float32, a whole attention's once: measured, the ring errs 0.5 to 1.5 times as much as
    one fused attention in the same type."""
    one = whole(64, heads=4, kv_heads=2, dtype=dtype)
    in_float64 = tuple(x.detach().double() for x in one.given)
    truth = attended(in_float64, one.grad.double())
    given = replace(truth, given=one.given, grad=one.grad)
    ring = max(
        run_ranks(
            f"cp{degree}",
            lambda comm: largest_difference(
                given, comm, lambda q, k, v: weft.ring_attention(q, k, v, comm)
            ),
        )
    )
    fused_errors = []
    for mine, right in zip((one.out, *one.grads), (truth.out, *truth.grads), strict=True):
        fused_errors.append((mine - right).abs().max().item())
    assert ring < 2 * max(fused_errors)


def test_ring_attention_crosses_processes() -> None:
    assert max(run_ranks("cp3", ring_of_three, transport="processes")) < TOLERANCE


def ring_of_three(comm: Comm) -> float:
    case = whole(18, heads=4, kv_heads=2)
    return largest_difference(case, comm, lambda q, k, v: weft.ring_attention(q, k, v, comm))


@dataclass(frozen=True)
class Shapes:
    """Of queries, keys and values: sequences, own columns, heads, head size."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]


OTHER_COLUMNS = Shapes(q=(2, 4, 4, 8), k=(2, 6, 4, 8), v=(2, 6, 4, 8))
THREE_KEY_HEADS = Shapes(q=(2, 4, 4, 8), k=(2, 4, 3, 8), v=(2, 4, 3, 8))
OTHER_KEY_SIZE = Shapes(q=(2, 4, 4, 8), k=(2, 4, 4, 6), v=(2, 4, 4, 8))
ODD_COLUMNS = Shapes(q=(2, 3, 4, 8), k=(2, 3, 4, 8), v=(2, 3, 4, 8))


def attend_to_zeros(shapes: Shapes, *, causal: bool) -> None:
    """Ring attention on two ranks."""

    def rank(comm: Comm) -> None:
        q = torch.zeros(shapes.q)
        k = torch.zeros(shapes.k)
        v = torch.zeros(shapes.v)
        weft.ring_attention(q, k, v, comm, causal=causal)

    run_ranks("cp2", rank)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (OTHER_COLUMNS, "columns differ"),
        (THREE_KEY_HEADS, "heads do not fit together"),
        (OTHER_KEY_SIZE, "heads do not fit together"),
        (ODD_COLUMNS, "an odd number of columns"),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(shapes: Shapes, message: str) -> None:
    with pytest.raises(weft.WeftError, match=message):
        attend_to_zeros(shapes, causal=True)


def test_without_a_causal_mask_an_odd_number_of_columns_is_accepted() -> None:
    attend_to_zeros(ODD_COLUMNS, causal=False)
