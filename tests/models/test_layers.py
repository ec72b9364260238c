"""Layers against their formulas: attention masks, rotation, loss; sharded weights work unchanged."""

import math

import pytest
import torch
import torch.nn.functional as F

from weft.models.common.attention import Attend
from weft.models.common.batch import IGNORE, Batch, token_batch
from weft.models.common.layers import Attention, Loss, SwiGLU
from weft.models.common.rope import Llama3Scaling, Rope, rotate
from weft.models.gpt2.model import GeluMLP

DIM, HEADS, KV_HEADS, HEAD_SIZE = 24, 4, 2, 6


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def qkv(batch: int = 2, seq: int = 7):
    q = torch.randn(batch, seq, HEADS, HEAD_SIZE)
    k = torch.randn(batch, seq, KV_HEADS, HEAD_SIZE)
    v = torch.randn(batch, seq, KV_HEADS, HEAD_SIZE)
    return q, k, v


def plain_attention(q, k, v, allowed):
    """softmax(q k^T / sqrt(K)) v for one sequence, head by head, from the formula."""
    num_heads, head_size = q.shape[1:]
    num_kv_heads = k.shape[1]
    heads = []
    for h in range(num_heads):
        g = h * num_kv_heads // num_heads
        products = q[:, h] @ k[:, g].T
        scores = products / math.sqrt(head_size)
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        heads.append(weights @ v[:, g])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("documents", [None, [[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 3]]])
def test_a_token_attends_to_itself_and_earlier_tokens_of_its_document(documents):
    q, k, v = qkv()
    if documents is not None:
        documents = torch.tensor(documents)
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, documents)
    attend = Attend()
    out = attend(q, k, v, batch)
    for b in range(2):
        allowed = torch.ones(7, 7, dtype=torch.bool).tril()
        if documents is not None:
            numbers = documents[b]
            allowed &= numbers[:, None] == numbers[None, :]
        expected = plain_attention(q[b], k[b], v[b], allowed)
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)


def test_packed_documents_with_restarted_positions_equal_documents_alone():
    attention = Attention(
        DIM, heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE, rope=Rope(HEAD_SIZE, theta=100.0)
    )
    x = torch.randn(1, 9, DIM)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    batch = Batch(tokens, tokens, positions, documents)
    packed = attention(x, batch)
    alone = []
    for part in x.split([4, 5], 1):
        own_tokens = torch.zeros(1, part.shape[1], dtype=torch.int64)
        alone.append(attention(part, token_batch(own_tokens, own_tokens)))
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)


def test_attention_whose_heads_are_cut_sums_to_the_whole():
    def attention(heads: int, kv_heads: int) -> Attention:
        return Attention(
            DIM,
            heads=heads,
            kv_heads=kv_heads,
            head_size=HEAD_SIZE,
            rope=Rope(HEAD_SIZE, theta=100.0),
        )

    whole = attention(HEADS, KV_HEADS)
    x = torch.randn(2, 7, DIM)
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    batch = token_batch(tokens, tokens)
    total = torch.zeros_like(x)
    for half in (0, 1):
        cut = attention(HEADS, KV_HEADS)  # built whole, like a rank's: only its weights are cut
        for name in "qkvo":
            weight = getattr(whole, name).weight
            getattr(cut, name).weight = torch.nn.Parameter(
                weight.detach().chunk(2, 1 if name == "o" else 0)[half]
            )
        total = total + cut(x, batch)
    torch.testing.assert_close(total, whole(x, batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mlp", [GeluMLP, SwiGLU])
def test_mlp_whose_features_are_cut_sums_to_the_whole(mlp):
    whole = mlp(DIM, 10)
    x = torch.randn(2, 3, DIM)
    total = torch.zeros_like(x)
    for half in (0, 1):
        cut = mlp(DIM, 10)
        for name, linear in whole.named_children():
            is_down = name == "down"
            part = getattr(cut, name)
            weights = linear.weight.detach().chunk(2, 1 if is_down else 0)
            part.weight = torch.nn.Parameter(weights[half])
            if linear.bias is not None:
                bias = linear.bias.detach()
                own_bias = bias / 2 if is_down else bias.chunk(2)[half]
                part.bias = torch.nn.Parameter(own_bias)
        total = total + cut(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-12, atol=1e-12)


def test_rotation_keeps_lengths_and_makes_scores_depend_on_distance_only():
    rope = Rope(8, theta=100.0)
    q = torch.randn(8)
    k = torch.randn(8)

    def turned(x, position: int):
        turn = rope(torch.tensor([[position]]))
        rotated = rotate(x.view(1, 1, 1, 8), turn)
        return rotated.flatten()

    assert torch.equal(turned(q, 0), q)
    # the angles are float32: sine and cosine are off by up to 6e-8 each, their squares sum to 1 within 4 x that
    torch.testing.assert_close(turned(q, 9).norm(), q.norm(), rtol=2.4e-7, atol=0.0)
    # position x frequency is rounded too, up to 19 x 6e-8 radians here, in q and in k
    near = turned(q, 9) @ turned(k, 4)
    far = turned(q, 19) @ turned(k, 14)
    largest = (q.norm() * k.norm()).item()
    atol = 4 * 19 * 6e-8 * largest
    torch.testing.assert_close(near, far, rtol=0.0, atol=atol)
    other_distance = turned(q, 9) @ turned(k, 5)
    assert abs(near - other_distance) > 0.01


def test_rotation_has_no_state_that_a_cast_or_an_empty_start_could_spoil():
    rope = Rope(8, theta=100.0)
    positions = torch.arange(1000)[None]
    before = rope(positions)
    rope.to(torch.bfloat16).to_empty(device="cpu")
    for a, b in zip(before, rope(positions), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float32
    assert not list(rope.buffers())
    x_BSHK = torch.randn(1, 1000, 2, 8).bfloat16()
    dtype = rotate(x_BSHK, before).dtype
    assert dtype == torch.bfloat16


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_ramps_between():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    wavelengths = torch.tensor([10.0, 2048.0, 8192 / 2.5, 8192.0, 100_000.0])
    plain = 2 * math.pi / wavelengths
    ratio = scaling(plain) / plain
    torch.testing.assert_close(
        ratio, torch.tensor([1.0, 1.0, 0.5 / 8 + 0.5, 1 / 8, 1 / 8]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(2, 5), (6,)])
def test_loss_is_the_sum_over_the_targets_that_count(shape):
    logits = torch.randn(*shape, 11)
    targets = torch.randint(11, shape)
    targets.view(-1)[1] = IGNORE
    batch = Batch(targets, targets, targets)
    loss = Loss()(logits, batch)
    log_probs = logits.log_softmax(-1).flatten(0, -2)
    expected = torch.zeros(())
    for i, target in enumerate(targets.flatten().tolist()):
        if target != IGNORE:
            expected = expected - log_probs[i, target]
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    assert batch.num_targets() == targets.numel() - 1
    of_torch = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    assert torch.equal(loss, of_torch)


def test_loss_of_a_batch_without_targets_is_zero_with_zero_gradients():
    logits = torch.randn(2, 5, 11, requires_grad=True)
    targets = torch.full((2, 5), IGNORE)
    loss = Loss()(logits, Batch(targets, targets, targets))
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_loss_is_accumulated_in_float32_at_least(dtype, wide):
    logits = torch.randn(1, 3, 11).to(dtype)
    targets = torch.randint(11, (1, 3))
    loss = Loss()(logits, Batch(targets, targets, targets))
    assert loss.dtype == wide
    wide_logits = logits.to(wide)[0]
    expected = F.cross_entropy(wide_logits, targets[0], reduction="sum")
    assert torch.equal(loss, expected)


def test_map_reaches_every_tensor_of_a_batch():
    x = torch.arange(12).view(3, 4)
    batch = Batch(x, x + 1, x + 2, x + 3)
    cut = batch.map(lambda field: field[1:])
    later_rows = x[1:]
    assert torch.equal(cut.inputs, later_rows)
    assert torch.equal(cut.targets, later_rows + 1)
    assert torch.equal(cut.positions, later_rows + 2)
    assert torch.equal(cut.documents, later_rows + 3)
    unchanged = Batch(x, x, x).map(lambda field: field)
    assert unchanged.documents is None
