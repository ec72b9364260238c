"""Attention of one block: each fused kernel == the plain one with all scores, forward and backward."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from weft.parallel.context import kernels
from weft.parallel.context.kernels import Block, BlockOutput, Kernel, Scores

MASK = (torch.arange(7)[:, None] % 3 == torch.arange(5)[None, :] % 4).expand(2, 1, 7, 5)
"""Rows 2 and 5 see key 2 only, others one or two keys; row 0 of a causal block is full of what it
may see.
"""


def kernel_grads(
    kernel: Kernel, scores: Scores, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).to(dtype)
        for heads, length in ((4, 7), (kv_heads, 5), (kv_heads, 5), (4, 7))
    )
    block = Block(q, k, v)
    out, lse = kernel.forward(block, scores)
    forward = BlockOutput(grad, out, lse)
    gradients = kernel.backward(Block(q, k, v), forward, scores)
    return out, lse, gradients.q, gradients.k, gradients.v


@pytest.mark.parametrize(("kind", "kv_heads"), list(product(["full", "causal", "mask"], [4, 2, 1])))
def test_the_cpu_kernel_equals_the_plain_one(kind: str, kv_heads: int) -> None:
    scores = Scores(0.3, causal=kind == "causal", mask=MASK if kind == "mask" else None)
    fused, plain = (
        kernel_grads(kernel, scores, kv_heads, torch.float64)
        for kernel in (kernels.CPU, kernels.PLAIN)
    )
    for mine, right in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_no_key_of_a_block_has_no_weight() -> None:
    rows = [
        [True, True, False],
        [False, False, False],
    ]
    mask = torch.tensor(rows).expand(1, 1, 2, 3)
    q = torch.ones(1, 1, 2, 4)
    k = torch.ones(1, 1, 3, 4)
    v = torch.ones(1, 1, 3, 4)
    out, lse = kernels.attend(q, k, v, Scores(0.5, mask=mask))
    seen, unseen = lse[0, 0].tolist()
    assert seen == pytest.approx(2 + math.log(2.0))
    assert unseen == float("-inf")
    values = out[0, 0, 1].tolist()
    assert values == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (kernels.CUDA_FLASH, "full"),
        (kernels.CUDA_FLASH, "causal"),
        (kernels.CUDA_EFFICIENT, "full"),
        (kernels.CUDA_EFFICIENT, "causal"),
        (kernels.CUDA_EFFICIENT, "mask"),
    ],
)
def test_cuda_kernels_are_called_as_torch_declares_them(kernel: Kernel, kind: str) -> None:
    """On the meta device, which knows their signatures and shapes; a test on a GPU compares values."""
    mask = MASK.to("meta") if kind == "mask" else None
    scores = Scores(0.3, causal=kind == "causal", mask=mask)
    q = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 5, 8, dtype=torch.bfloat16, device="meta")
    block = Block(q, k, torch.empty_like(k))
    out, lse = kernel.forward(block, scores)
    assert out.shape == (2, 4, 7, 8)
    assert lse.shape == (2, 4, 7)
    assert lse.dtype == torch.float32
    output = BlockOutput(torch.empty_like(q), out, lse)
    dq, dk, dv, _ = kernel.backward(block, output, scores)
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert dv.shape == k.shape


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "kv_heads"), list(product(["full", "causal", "mask"], [4, 2, 1])))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_kernels_equal_the_plain_one(dtype: torch.dtype, kind: str, kv_heads: int) -> None:
    """Within a few roundings of the type (of TF32 in float32), of values up to 4."""
    generator = torch.Generator("cuda").manual_seed(3)

    def drawn(heads: int) -> torch.Tensor:
        shape = (2, heads, 7, 20)
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    q = drawn(4)
    k = drawn(kv_heads)
    v = drawn(kv_heads)
    grad = drawn(4)
    columns = torch.arange(7)
    of_query = columns[:, None] % 3
    of_key = columns[None, :] % 4
    allowed = of_query >= of_key
    mask = allowed.expand(2, 1, 7, 7).cuda() if kind == "mask" else None
    scores = Scores(0.3, causal=kind == "causal", mask=mask)
    out, lse = kernels.attend(q, k, v, scores)
    forward = BlockOutput(grad, out, lse)
    block = Block(q, k, v)
    gradients = kernels.attend_backward(block, forward, scores)
    mine = (out, lse, *gradients[:3])
    wide = Block(q.double(), k.double(), v.double())
    right_out, right_lse = kernels.PLAIN.forward(wide, scores)
    right_output = BlockOutput(grad.double(), right_out, right_lse)
    right_gradients = kernels.PLAIN.backward(wide, right_output, scores)
    right = (right_out, right_lse, *right_gradients[:3])
    for ours, theirs in zip(mine, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)
