"""Operations of users' models on sharded sequences: results are sharded, gradients of parameters are partial sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from weft.parallel.tensor.dims import DimFactor, whole_dims, with_dim
from weft.planner.certificate.axis_types import PARTIAL, of_dims, replicated
from weft.planner.certificate.type_mode import TypeMode

F = torch.nn.functional
B, S, D, H = 4, 6, 8, 2


@dataclass(frozen=True)
class Operation:
    """Of x and parameters.

    Attributes:
        run: called with x and the parameters.
        x: shape; its first dim is sharded.
        params: shapes of parameters, replicated.
    """

    run: Callable[..., Tensor]
    x: tuple[int, ...] = (B, S, D)
    params: tuple[tuple[int, ...], ...] = ()


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    angles = torch.ones(S, D // 2, device="meta")
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.float().reshape(B, S, D // 2, 2))
    return torch.view_as_real(pairs * turns).flatten(2)


def ranks_of(x: Tensor) -> Tensor:
    return x.detach().argsort(-1)


def one_of(x: Tensor) -> Tensor:
    """Ids of the sequences of a rank."""
    return x.detach()[..., 0].long()


def written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    return out


def masked(x: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool, device="meta").tril()
    scores = (heads(x) @ heads(x).transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ heads(x)


def scanned(x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    out = []
    for place in range(S):
        state = 0.9 * state + x[:, place]
        out.append(state)
    return torch.stack(out, 1)


OPERATIONS: dict[str, Operation] = {
    "linear": Operation(F.linear, params=((5, D), (5,))),
    "conv1d": Operation(F.conv1d, params=((5, S, 3), (5,))),
    "conv1d by group": Operation(
        lambda x, w: F.conv1d(x.mT, w, padding=2, groups=D), params=((D, 1, 3),)
    ),
    "conv2d": Operation(F.conv2d, (B, 3, 6, 6), ((5, 3, 3, 3), (5,))),
    "conv_transpose1d": Operation(F.conv_transpose1d, params=((S, 5, 3), (5,))),
    "pooling": Operation(lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2)),
    "pooling in 2 dims": Operation(
        lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 3),
        (B, 3, 6, 6),
    ),
    "interpolate": Operation(lambda x: F.interpolate(x, scale_factor=2)),
    "einsum": Operation(lambda x, w: torch.einsum("bsd,hdk->bhsk", x, w), params=((H, D, 3),)),
    "einsum of two": Operation(lambda x: torch.einsum("bsd,btd->bst", x, x)),
    "bmm": Operation(lambda x: x @ x.mT),
    "a stack of products": Operation(
        lambda x, a, b: x + (x @ a.mT) @ b.mT, params=((3, D), (D, 3))
    ),
    "baddbmm": Operation(lambda x: torch.baddbmm(x @ x.mT, x, x.mT)),
    "cumsum": Operation(lambda x: x.cumsum(1)),
    "cumprod": Operation(lambda x: x.cumprod(1)),
    "cummax": Operation(lambda x: x.cummax(1).values),
    "logcumsumexp": Operation(lambda x: x.logcumsumexp(1)),
    "logsumexp": Operation(lambda x: x.logsumexp(-1)),
    "gather": Operation(lambda x: x.gather(-1, ranks_of(x))),
    "take_along_dim": Operation(lambda x: x.take_along_dim(ranks_of(x), -1)),
    "scatter": Operation(lambda x: torch.zeros_like(x).scatter(-1, ranks_of(x), x)),
    "scatter_add": Operation(lambda x: torch.zeros_like(x).scatter_add(-1, ranks_of(x), x)),
    "scatter of a number": Operation(lambda x: x.scatter(-1, ranks_of(x)[..., :1], 0.0)),
    "where": Operation(lambda x: torch.where(x > 0, x, 2 * x)),
    "masked_fill": Operation(masked),
    "topk": Operation(lambda x: x.topk(2, -1).values),
    "sort": Operation(lambda x: x.sort(-1).values),
    "max": Operation(lambda x: x.max(-1).values + x.min(-1).values + x.amax(-1)),
    "median": Operation(lambda x: x.median(-1).values),
    "kthvalue": Operation(lambda x: x.kthvalue(2, -1).values),
    "softmax": Operation(lambda x: x.softmax(-1) + x.log_softmax(-1)),
    "softmin": Operation(lambda x: F.softmin(x, -1)),
    "gumbel": Operation(lambda x: F.gumbel_softmax(x)),
    "embedding": Operation(lambda x, w: F.embedding(one_of(x), w), params=((7, D),)),
    "embedding_bag": Operation(
        lambda x, w: F.embedding_bag(one_of(x), w, mode="sum"), params=((7, D),)
    ),
    "mean of embeddings": Operation(lambda x, w: F.embedding_bag(one_of(x), w), params=((7, D),)),
    "one_hot": Operation(lambda x, w: F.one_hot(one_of(x), 7).float() @ w, params=((7, D),)),
    "attention": Operation(
        lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)
    ),
    "attention with a bias": Operation(
        lambda x, w: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=w),
        params=((1, H, S, S),),
    ),
    "attention of latents": Operation(
        lambda x, w: F.scaled_dot_product_attention(
            w.unsqueeze(0).expand(B, -1, -1), x, x
        ),
        params=((3, D),),
    ),
    "multi_head_attention": Operation(
        lambda x, *params: F.multi_head_attention_forward(
            x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), D, H, params[0], params[1], None, None, False,
            0.0, params[2], params[3],
        )[0].transpose(0, 1),
        params=((3 * D, D), (3 * D,), (D, D), (D,)),
    ),
    "rotation of complex numbers": Operation(rotated),
    "fft": Operation(lambda x: torch.fft.rfft(x, dim=1).abs()),
    "fourier mixing": Operation(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real),
    "layer_norm": Operation(lambda x, w, b: F.layer_norm(x, (D,), w, b), params=((D,), (D,))),
    "rms_norm": Operation(lambda x, w: F.rms_norm(x, (D,), w), params=((D,),)),
    "rms by hand": Operation(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, params=((D,),)
    ),
    "group_norm": Operation(lambda x, w, b: F.group_norm(x, 2, w, b), params=((S,), (S,))),
    "normalize": Operation(lambda x: F.normalize(x, dim=-1)),
    "norm": Operation(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1)),
    "var": Operation(lambda x: x.var(-1) + x.std(-1)),
    "weight_norm": Operation(
        lambda x, v, g: F.linear(x, torch._weight_norm(v, g)), params=((5, D), (5, 1))
    ),
    "activations": Operation(
        lambda x: F.gelu(x) + F.silu(x) + F.mish(x) + F.elu(x) + F.hardswish(x) + F.softplus(x) + F.leaky_relu(x)
        + F.relu(x) ** 2 + F.logsigmoid(x) + x.sigmoid() + x.tanh() + x.erf() + x.exp().clamp(max=3) + F.selu(x) + F.relu6(x)
    ),
    "prelu": Operation(F.prelu, params=((S,),)),
    "glu": Operation(lambda x: F.glu(x)),
    "dropout": Operation(lambda x: F.dropout(x, 0.1)),
    "cdist": Operation(lambda x: torch.cdist(x, x + 1)),
    "cosine_similarity": Operation(lambda x: F.cosine_similarity(x, 2 * x, -1)),
    "outer": Operation(lambda x: x.unsqueeze(-1) * x.unsqueeze(-2)),
    "tril": Operation(lambda x: (x @ x.mT).tril()),
    "triu by index": Operation(lambda x: (x @ x.mT)[:, *torch.triu_indices(S, S, device="meta")]),
    "pad": Operation(lambda x: F.pad(x, (0, 0, 2, 0))[:, :-2]),
    "pad by reflection": Operation(lambda x: F.pad(x, (1, 1), mode="reflect")),
    "roll": Operation(lambda x: x.roll(1, 1)),
    "flip": Operation(lambda x: x.flip(1)),
    "unfold": Operation(lambda x: x.unfold(1, 3, 1)),
    "patches": Operation(lambda x: F.unfold(x, 2, stride=2), (B, 3, 6, 6)),
    "pixel_shuffle": Operation(lambda x: F.pixel_shuffle(x, 2), (B, 4, 3, 3)),
    "slices": Operation(lambda x: torch.cat((x[:, ::2], x[:, 1::2]), 1)),
    "chunk": Operation(lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1]),
    "select": Operation(lambda x: x[:, -1]),
    "index": Operation(lambda x: x[:, torch.zeros(3, dtype=torch.long, device="meta")]),
    "index_add": Operation(
        lambda x: torch.zeros_like(x).index_add(1, torch.zeros(S, dtype=torch.long, device="meta"), x)
    ),
    "write to a slice": Operation(written),
    "repeat_interleave": Operation(lambda x: x.repeat_interleave(2, 1)),
    "tile": Operation(lambda x: x.repeat(1, 2, 1)),
    "tokens for each expert": Operation(
        lambda x, w: torch.bmm(x.flatten(0, 1).repeat(2, 1).view(2, -1, D), w).sum(0),
        params=((2, D, 3),),
    ),
    "diagonal": Operation(lambda x: (x @ x.mT).diagonal(dim1=-2, dim2=-1)),
    "diag_embed": Operation(lambda x: torch.diag_embed(x)),
    "tensordot": Operation(lambda x, w: torch.tensordot(x, w, dims=1), params=((D, 3),)),
    "a learned position": Operation(lambda x, w: x + w[:S], params=((9, D),)),
    "a learned token": Operation(
        lambda x, w: torch.cat((w.expand(B, -1, -1), x), 1), params=((1, 1, D),)
    ),
    "a gate by head": Operation(
        lambda x, w: (heads(x) * w[:, None, None]).transpose(1, 2).flatten(2), params=((H,),)
    ),
    "a loop over tokens": Operation(scanned),
    "lerp": Operation(lambda x, w: torch.lerp(x, x.roll(1, 1), w), params=((D,),)),
    "addcmul": Operation(lambda x, w: torch.addcmul(x, x, w, value=0.5), params=((D,),)),
    "a power": Operation(lambda x, w: x.abs().pow(w), params=((D,),)),
    "atan2": Operation(lambda x: torch.atan2(x, 1 + x)),
    "maximum": Operation(lambda x, w: torch.maximum(x, w), params=((D,),)),
    "matrix inverse": Operation(lambda x: torch.linalg.inv(x @ x.mT)),
    "solve": Operation(lambda x: torch.linalg.solve_triangular(x @ x.mT, x, upper=False)),
    "checkpointed": Operation(
        lambda x, w: torch.utils.checkpoint.checkpoint(
            lambda y: F.silu(F.linear(y, w)), x, use_reentrant=False
        ),
        params=((5, D),),
    ),
    "lstm": Operation(
        lambda x, *params: torch.lstm(
            x, (x.new_zeros(1, B, 3), x.new_zeros(1, B, 3)), params, True, 1, 0.0, True, False, True
        )[0],
        params=((12, D), (12, 3), (12,), (12,)),
    ),
    "cross_entropy of each": Operation(
        lambda x: F.cross_entropy(x.mT, one_of(x), reduction="none")
    ),
    "kl_div": Operation(lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="none")),
    "bce": Operation(
        lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none")
    ),
    "huber": Operation(lambda x: F.huber_loss(x, 2 * x, reduction="none") + F.smooth_l1_loss(x, 2 * x, reduction="none")),
}  # fmt: skip


def sharded(mode: TypeMode, shape: tuple[int, ...]) -> Tensor:
    """Of each rank's own first entries."""
    x = torch.empty(shape, device="meta")
    dims = with_dim(whole_dims(shape), 0, (DimFactor(shape[0], sharded=True),))
    return mode.set(x, (of_dims(dims),))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_sharded_sequences_is_typed(name: str) -> None:
    operation = OPERATIONS[name]
    mode = TypeMode(("dp",))
    x = sharded(mode, operation.x).requires_grad_()
    params = [torch.empty(shape, device="meta", requires_grad=True) for shape in operation.params]
    with mode:
        out = operation.run(x, *params)
        out.backward(sharded(mode, tuple(out.shape)))
    assert [finding.text for finding in mode.findings.values()] == []
    assert mode.type_of(out, "dp").text == "sharded in dim 0"
    if x.grad is not None:
        assert mode.type_of(x.grad, "dp").text == "sharded in dim 0"
    for param in params:
        assert param.grad is not None
        assert mode.type_of(param.grad, "dp").text == "partial"


def written_twice(x: Tensor) -> Tensor:
    """Writes into parts of a tensor, as recurrences over chunks do."""
    out = torch.zeros_like(x)
    out[:, :3] = x[:, :3]
    out[:, 3:] = x[:, 3:] * 2
    return out


LINEAR_BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "writes into parts": written_twice,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "a number's place": lambda x: x.masked_fill(x > 0, 0.0),
    "topk": lambda x: x.topk(2, -1).values,
    "triangular": lambda x: torch.linalg.solve_triangular(
        torch.eye(S, device="meta").expand(B, S, S), x, upper=False
    ),
}


@pytest.mark.parametrize("name", LINEAR_BACKWARDS)
def test_a_gradient_that_ranks_share_stays_partial(name: str) -> None:
    """Under cp, what works on whole sequences has a share of the gradient on each rank."""
    mode = TypeMode(("cp",))
    x = mode.set(torch.empty((B, S, D), device="meta"), (replicated((B, S, D)),)).requires_grad_()
    with mode:
        out = LINEAR_BACKWARDS[name](x)
        out.backward(mode.set(torch.empty_like(out), (PARTIAL,)))
    assert [finding.text for finding in mode.findings.values()] == []
    assert x.grad is not None
    assert mode.type_of(x.grad, "cp").text == "partial"
