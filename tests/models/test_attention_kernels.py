"""Attention of one block: each fused kernel == the plain one with all scores, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from weft.models.common import attention_kernels as kernels
from weft.models.common.attention_kernels import Block, BlockOutput, Kernel, Scores


def block_mask(num_queries: int, num_keys: int) -> Tensor:
    """Of 5 keys, query rows 2 and 5 see key 2 only, others one or two keys."""
    of_query = torch.arange(num_queries) % 3
    of_key = torch.arange(num_keys) % 4
    allowed = of_query[:, None] == of_key[None, :]
    return allowed.expand(2, 1, num_queries, num_keys)


def scores_of(kind: str, *, mask: Tensor) -> Scores:
    """Of a kind: "full", "causal" or "mask"."""
    is_masked = kind == "mask"
    return Scores(0.3, causal=kind == "causal", mask=mask if is_masked else None)


@dataclass(frozen=True)
class KernelResults:
    """What a kernel computes of a block, forward and backward."""

    out: Tensor
    lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(kernel: Kernel, block: Block, grad: Tensor, scores: Scores) -> KernelResults:
        out, lse = kernel.forward(block, scores)
        output = BlockOutput(grad, out, lse)
        gradients = kernel.backward(block, output, scores)
        return KernelResults(out, lse, gradients.q, gradients.k, gradients.v)

    def assert_close(self, right: KernelResults, *, tolerance: float) -> None:
        for name, value in vars(self).items():
            expected = getattr(right, name)
            wide = value.to(expected.dtype)
            torch.testing.assert_close(wide, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "kv_heads"), list(product(["full", "causal", "mask"], [4, 2, 1])))
def test_the_cpu_kernel_equals_the_plain_one(kind: str, kv_heads: int) -> None:
    scores = scores_of(kind, mask=block_mask(7, 5))
    generator = torch.Generator().manual_seed(3)

    def drawn(num_heads: int, length: int) -> Tensor:
        shape = (2, num_heads, length, 8)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = drawn(4, 7)
    k = drawn(kv_heads, 5)
    v = drawn(kv_heads, 5)
    grad = drawn(4, 7)
    block = Block(q, k, v)
    fused = KernelResults.of(kernels.CPU, block, grad, scores)
    plain = KernelResults.of(kernels.PLAIN, block, grad, scores)
    fused.assert_close(plain, tolerance=1e-12)


"""Rows 2 and 5 see key 2 only, others one or two keys; row 0 of a causal block is full of what it
may see.
"""


def test_a_query_that_sees_no_key_of_a_block_has_no_weight() -> None:
    rows = [[True, True, False], [False, False, False]]
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
        (kernels.CUDA_CUDNN, "full"),
        (kernels.CUDA_CUDNN, "causal"),
        (kernels.CUDA_EFFICIENT, "full"),
        (kernels.CUDA_EFFICIENT, "causal"),
        (kernels.CUDA_EFFICIENT, "mask"),
    ],
)
def test_cuda_kernels_are_called_as_torch_declares_them(kernel: Kernel, kind: str) -> None:
    """On the meta device, which knows their signatures and shapes; a test on a GPU compares values."""
    mask = block_mask(7, 5).to("meta")
    scores = scores_of(kind, mask=mask)
    q = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 5, 8, dtype=torch.bfloat16, device="meta")
    v = torch.empty_like(k)
    grad = torch.empty_like(q)
    block = Block(q, k, v)
    results = KernelResults.of(kernel, block, grad, scores)
    assert results.out.shape == (2, 4, 7, 8)
    assert results.lse.shape == (2, 4, 7)
    assert results.lse.dtype == torch.float32
    assert results.q.shape == q.shape
    assert results.k.shape == k.shape
    assert results.v.shape == k.shape


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
    mask = allowed.expand(2, 1, 7, 7).cuda()
    scores = scores_of(kind, mask=mask)
    block = Block(q, k, v)
    out, lse = kernels.attend(q, k, v, scores)
    output = BlockOutput(grad, out, lse)
    gradients = kernels.attend_backward(block, output, scores)
    ours = KernelResults(out, lse, gradients.q, gradients.k, gradients.v)
    wide = Block(q.double(), k.double(), v.double())
    right = KernelResults.of(kernels.PLAIN, wide, grad.double(), scores)
    ours.assert_close(right, tolerance=0.05)
