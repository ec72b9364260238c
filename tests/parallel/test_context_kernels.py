"""Attention of one block: each fused kernel == the plain one with all scores, forward and backward."""

from __future__ import annotations

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
    out, lse = kernel.forward(Block(q, k, v), scores)
    gradients = kernel.backward(Block(q, k, v), BlockOutput(grad, out, lse), scores)
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
    mask = torch.tensor([[True, True, False], [False, False, False]]).expand(1, 1, 2, 3)
    q, k, v = (torch.ones(1, 1, length, 4) for length in (2, 3, 3))
    out, lse = kernels.attend(q, k, v, Scores(0.5, mask=mask))
    assert lse[0, 0].tolist() == [pytest.approx(2 + torch.tensor(2.0).log().item()), float("-inf")]
    assert out[0, 0, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        *((kernels.CUDA_FLASH, kind) for kind in ("full", "causal")),
        *((kernels.CUDA_EFFICIENT, kind) for kind in ("full", "causal", "mask")),
    ],
)
def test_cuda_kernels_are_called_as_torch_declares_them(kernel: Kernel, kind: str) -> None:
    """On the meta device, which knows their signatures and shapes; a test on a GPU compares values."""
    scores = Scores(0.3, causal=kind == "causal", mask=MASK.to("meta") if kind == "mask" else None)
    q, grad = (torch.empty(2, 4, 7, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 2, 5, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    out, lse = kernel.forward(Block(q, k, v), scores)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 7, 8), (2, 4, 7), torch.float32)
    gradients = kernel.backward(Block(q, k, v), BlockOutput(grad, out, lse), scores)
    assert [x.shape for x in gradients[:3]] == [x.shape for x in (q, k, v)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "kv_heads"), list(product(["full", "causal", "mask"], [4, 2, 1])))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_kernels_equal_the_plain_one(dtype: torch.dtype, kind: str, kv_heads: int) -> None:
    """Within a few roundings of the type (of TF32 in float32), of values up to 4."""
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, length, 20, generator=generator, device="cuda", dtype=dtype)
        for heads, length in ((4, 7), (kv_heads, 7), (kv_heads, 7), (4, 7))
    )
    mask = (torch.arange(7)[:, None] % 3 >= torch.arange(7)[None, :] % 4).expand(2, 1, 7, 7).cuda()
    scores = Scores(0.3, causal=kind == "causal", mask=mask if kind == "mask" else None)
    out, lse = kernels.attend(q, k, v, scores)
    mine_backward = kernels.attend_backward(Block(q, k, v), BlockOutput(grad, out, lse), scores)
    mine = out, lse, *mine_backward[:3]
    wide = Block(q.double(), k.double(), v.double())
    right_out, right_lse = kernels.PLAIN.forward(wide, scores)
    right_output = BlockOutput(grad.double(), right_out, right_lse)
    gradients = kernels.PLAIN.backward(wide, right_output, scores)
    right = right_out, right_lse, *gradients[:3]
    for ours, theirs in zip(mine, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)
