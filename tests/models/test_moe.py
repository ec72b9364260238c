"""Mixtures of experts against the formulas written out token by token, and the contracts of their seams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core import expert_choice
from weft.core.expert_choice import ExpertDevice, ExpertKernelChoice
from weft.models.common.batch import IGNORE, Batch, Extra, token_batch
from weft.models.common.experts import (
    Dispatch,
    ExpertLoads,
    Experts,
    PlannedKernels,
    expert_linear,
    sort_by_expert,
)
from weft.models.common.layers import SwiGLU
from weft.models.common.moe import Balance, Choice, MoE, Router, rebalance

DIM, FFN = 6, 10

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""Sums of some 10 terms near 1 in float64, where one operation rounds by 1e-16."""


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_experts(num_experts: int) -> Experts:
    return Experts(DIM, FFN, num_experts=num_experts)


def make_choices(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """top_k different experts for each token."""
    if not num_tokens:
        return torch.zeros(0, top_k, dtype=torch.int64)
    rows = [torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]
    return torch.stack(rows)


def one_expert(experts: Experts, index: int, x: Tensor) -> Tensor:
    activated = F.silu(experts.gate[index] @ x)
    hidden = activated * (experts.up[index] @ x)
    return experts.down[index] @ hidden


def dense_loop(x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: Experts) -> Tensor:
    """Token by token, choice by choice, from the formula."""
    rows = []
    for x, chosen, weights in zip(x_ND, experts_NK.tolist(), weights_NK, strict=True):
        rows.append(
            sum(w * one_expert(experts, e, x) for e, w in zip(chosen, weights, strict=True))
        )
    return torch.stack(rows)


@given(st.integers(1, 9), st.integers(1, 7), st.data())
def test_dispatch_equals_a_dense_loop_with_every_gradient(num_tokens: int, num_experts: int, data):
    """Few tokens and many experts too: experts without a token have gradient zero, not none."""
    top_k = data.draw(st.integers(1, num_experts))
    torch.manual_seed(0)
    experts = make_experts(num_experts)
    chosen = make_choices(num_tokens, num_experts, top_k)
    gradients = []
    for run in (Dispatch(num_experts), dense_loop):
        torch.manual_seed(1)
        x = torch.randn(num_tokens, DIM, requires_grad=True)
        weights = torch.rand(num_tokens, top_k, requires_grad=True)
        experts.zero_grad()
        y = run(x, chosen, weights, experts)
        y.backward(torch.randn_like(y))
        gradients.append(
            [y.detach(), x.grad, weights.grad, *(p.grad.clone() for p in experts.parameters())]
        )
    torch.testing.assert_close(*gradients, **EXACT)


def test_a_rank_without_tokens_has_zero_gradients():
    experts = make_experts(3)
    x = torch.randn(0, DIM, requires_grad=True)
    nowhere = make_choices(0, 3, 2)
    y = Dispatch(3)(x, nowhere, torch.rand(0, 2), experts)
    assert y.shape == (0, DIM)
    y.sum().backward()
    assert x.grad.shape == (0, DIM)
    for p in experts.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


def test_sorting_puts_slots_by_expert_and_then_by_token():
    sorting = sort_by_expert(torch.tensor([[2, 0], [0, 1], [0, 2]]), 4)
    assert sorting.slots.tolist() == [1, 2, 4, 3, 0, 5]
    assert sorting.counts.tolist() == [3, 1, 2, 0]
    x = torch.arange(3.0).unsqueeze(1)
    values = sorting.spread(x).flatten().tolist()
    assert values == [0, 1, 2, 1, 0, 2]
    weights = torch.tensor([[1.0, 2.0]] * 3)
    actual = sorting.collect(sorting.spread(x), weights)
    assert torch.equal(actual, 3 * x)


def test_work_of_the_host_does_not_grow_with_tokens():
    """No loop over tokens: eight times the tokens are as many operations."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    moe = make_moe()
    counts = []
    for num_tokens in (64, 512):
        x = torch.randn(2, num_tokens // 2, DIM, requires_grad=True)
        with Count() as count:
            out = moe(x, flat_batch(x))
            loss = out.x.sum() + out.loss
            loss.backward()
        assert out.load.min() > 0, "an expert without tokens costs less"
        counts.append(count.operations)
    assert counts[0] == counts[1]


def test_two_runs_are_bit_equal():
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        moe = make_moe()
        x = torch.randn(3, 40, DIM, requires_grad=True)
        out = moe(x, flat_batch(x))
        total = out.x.sum() + out.loss
        total.backward()
        gradients = [p.grad for p in moe.parameters() if p.requires_grad]
        runs.append([out.x, out.loss, x.grad, *gradients])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_experts_cut_along_their_features_sum_to_the_whole_and_along_their_number_follow_each_other():
    whole = make_experts(4)
    x = torch.randn(9, DIM)
    counts = torch.tensor([3, 0, 4, 2])
    loads = ExpertLoads(counts)
    y = whole(x, loads)
    by_features = torch.zeros_like(y)
    by_number = []
    for half in (0, 1):
        cut = make_experts(4)
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            weight = getattr(whole, name).detach()
            own_features = weight.chunk(2, dim)[half]
            setattr(cut, name, torch.nn.Parameter(own_features))
        by_features += cut(x, loads)
        few = make_experts(4)
        own_experts = slice(2 * half, 2 * half + 2)
        for name in ("gate", "up", "down"):
            weight = getattr(whole, name).detach()
            setattr(few, name, torch.nn.Parameter(weight[own_experts]))
        own_tokens = x.split([3, 6])[half]
        by_number.append(few(own_tokens, ExpertLoads(counts[own_experts])))
    torch.testing.assert_close(by_features, y, **EXACT)
    torch.testing.assert_close(torch.cat(by_number), y, **EXACT)


def test_experts_start_as_linears_would():
    experts = Experts(400, 100, num_experts=5)
    for weight in experts.parameters():
        bound = weight.shape[2] ** -0.5
        assert 0.99 * bound < weight.abs().max() <= bound


# ── routing ──


def naive_choice(scores: list[float], *, top_k: int, n_group: int, topk_group: int) -> list[int]:
    """DeepSeek-V3's text, expert by expert."""
    size = len(scores) // n_group
    strength = []
    for g in range(n_group):
        scores_of_group = scores[g * size : (g + 1) * size]
        of_group = sorted(scores_of_group, reverse=True)
        strength.append(sum(of_group[:2]))
    best_groups = sorted(range(n_group), key=lambda g: -strength[g])[:topk_group]
    allowed = []
    for g in best_groups:
        allowed.extend(range(g * size, (g + 1) * size))
    return sorted(allowed, key=lambda e: -scores[e])[:top_k]


@given(st.sampled_from([(8, 4), (12, 3), (6, 6), (6, 1), (16, 2)]), st.booleans(), st.data())
def test_group_limited_choice_equals_a_naive_one(sizes: tuple[int, int], negative: bool, data):
    num_experts, n_group = sizes
    topk_group = data.draw(st.integers(1, n_group))
    top_k = data.draw(st.integers(1, topk_group * num_experts // n_group))
    choice = Choice(
        num_experts=num_experts,
        top_k=top_k,
        scoring="sigmoid",
        n_group=n_group,
        topk_group=topk_group,
    )
    torch.manual_seed(0)
    scores = torch.rand(5, 4, num_experts) - int(negative)  # a bias may make all of them negative
    chosen = choice.experts(scores).flatten(0, 1).tolist()
    kinds = {"top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    expected = [naive_choice(row, **kinds) for row in scores.flatten(0, 1).tolist()]
    assert chosen == expected


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_weights_are_scores_without_bias_normalised_and_scaled(scoring, normalise):
    choice = Choice(
        num_experts=4, top_k=2, scoring=scoring, norm_topk_prob=normalise, routed_scaling_factor=2.5
    )
    router = Router(DIM, choice)
    x = torch.randn(1, 1, DIM)
    logits = router.proj.weight @ x.flatten()
    if scoring == "sigmoid":
        router.bias.data = torch.tensor([0.0, 9.0, 0.0, 8.0])
        scores = logits.sigmoid()
        chosen = [1, 3]
    else:
        scores = logits.exp() / logits.exp().sum()
        chosen = scores.argsort(descending=True)[:2].tolist()
    routing = router(x)
    assert routing.experts.flatten().tolist() == chosen, "the bias chooses"
    weights = scores[chosen]
    if normalise:
        weights = weights / weights.sum()
    torch.testing.assert_close(routing.weights.flatten(), 2.5 * weights, **EXACT)
    torch.testing.assert_close(routing.scores.flatten(), scores, **EXACT)


def test_softmax_routing_has_no_bias_and_the_bias_of_sigmoid_routing_no_gradient():
    choice = Choice(num_experts=4, top_k=2, scoring="softmax")
    assert Router(DIM, choice).bias is None
    router = Router(DIM, Choice(num_experts=4, top_k=2, scoring="sigmoid"))
    loss = router(torch.randn(2, 3, DIM)).weights.sum()
    loss.backward()
    assert router.bias.grad is None
    assert router.proj.weight.grad is not None


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_routing_is_computed_in_float32_at_least_and_tokens_keep_their_dtype(dtype, wide):
    moe = make_moe().to(dtype)
    x = torch.randn(2, 3, DIM).to(dtype)
    routing = moe.router(x)
    assert routing.scores.dtype == wide
    assert routing.weights.dtype == wide
    wide_weight = moe.router.proj.weight.to(wide)
    scores = (x.to(wide) @ wide_weight.T).sigmoid()
    six_products = 1e-6  # in float32, 6e-8 each
    torch.testing.assert_close(routing.scores, scores, rtol=six_products, atol=0.0)
    out = moe(x, flat_batch(x))
    assert out.x.dtype == dtype
    assert out.loss.dtype == wide
    assert out.load.dtype == torch.int64


def test_bias_goes_one_step_up_under_the_mean_and_down_over_it():
    bias = torch.tensor([0.5, 0.5, -1.0, 0.0])
    uneven = torch.tensor([0, 10, 3, 7])
    even = torch.tensor([5, 5, 5, 5])
    changed = rebalance(bias, uneven, rate=0.25)
    assert changed.tolist() == [0.75, 0.25, -0.75, -0.25]
    unchanged = rebalance(bias, even, rate=0.25)
    assert unchanged.tolist() == bias.tolist()
    assert bias.tolist() == [0.5, 0.5, -1.0, 0.0], "a new value"


def test_load_just_off_the_mean_is_seen_where_floats_would_round_it_away():
    load = torch.tensor([2**60, 2**60 + 1, 2**60 - 1])
    assert rebalance(torch.zeros(3, dtype=torch.float32), load, rate=1.0).tolist() == [
        0.0,
        -1.0,
        1.0,
    ]


def test_rebalancing_evens_out_a_router_that_prefers_some_experts():
    torch.manual_seed(0)
    router = Router(DIM, Choice(num_experts=8, top_k=2, scoring="sigmoid"))
    x = torch.randn(4, 64, DIM) + torch.randn(DIM)  # tokens have a direction in common

    def load() -> Tensor:
        return router(x).experts.flatten().bincount(minlength=8)

    before = load()
    for _ in range(300):
        router.bias.copy_(rebalance(router.bias, load(), rate=0.01))
    assert before.max() > 1.5 * before.double().mean()
    assert load().max() < 1.2 * before.double().mean()


# ── balance ──


def naive_balance(scores_SE: Tensor, top_k: int) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3 for one sequence, weight 1."""
    num_tokens, num_experts = scores_SE.shape
    total = torch.zeros(())
    for i in range(num_experts):
        chosen = sum(
            i in sorted(range(num_experts), key=lambda e: -row[e])[:top_k]
            for row in scores_SE.tolist()
        )
        f = num_experts / (top_k * num_tokens) * chosen
        shares = []
        for t in range(num_tokens):
            shares.append(scores_SE[t, i] / scores_SE[t].sum())
        p = sum(shares) / num_tokens
        total = total + f * p
    return total


def flat_batch(x_BSD: Tensor, targets: Tensor | None = None) -> Batch:
    tokens = torch.zeros(x_BSD.shape[:2], dtype=torch.int64)
    return token_batch(tokens, tokens if targets is None else targets)


def scores_and_batch(
    num_sequences: int = 3, seq: int = 6, num_experts: int = 5
) -> tuple[Tensor, Batch]:
    """Scores, and a batch of which each sequence has another number of targets that count, one
    none.
    """
    scores = torch.rand(num_sequences, seq, num_experts, requires_grad=True)
    targets = torch.zeros(num_sequences, seq, dtype=torch.int64)
    for row in range(num_sequences):
        targets[row, 2 * row :] = IGNORE
    return scores, flat_batch(scores, targets)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_balance_loss_is_the_papers_for_each_sequence_as_often_as_it_has_targets(top_k):
    scores, batch = scores_and_batch()
    loss = Balance(top_k=top_k, weight=0.25)(scores, batch)
    expected = 0.0
    for row in range(3):
        num_targets = 2 * row
        expected = expected + 0.25 * num_targets * naive_balance(scores[row], top_k)
    torch.testing.assert_close(loss, expected, **EXACT)
    (gradient,) = torch.autograd.grad(loss, scores)
    (expected_gradient,) = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(gradient, expected_gradient, **EXACT)


def test_balance_loss_of_even_scores_is_its_weight_for_each_target():
    _, batch = scores_and_batch(num_experts=4)
    even = torch.full((3, 6, 4), 0.3)
    # every choice of 4 of 4 experts is even too
    torch.testing.assert_close(
        Balance(top_k=4, weight=0.5)(even, batch), 0.5 * batch.num_targets(), **EXACT
    )


def test_balance_loss_does_not_depend_on_how_sequences_are_batched():
    scores, batch = scores_and_batch()
    balance = Balance(top_k=2, weight=1.0)
    first = balance(scores[:2], batch.rows(slice(0, 2)))
    second = balance(scores[2:3], batch.rows(slice(2, 3)))
    torch.testing.assert_close(first + second, balance(scores, batch), **EXACT)


def test_balance_losses_of_the_parts_of_cut_sequences_add_up_to_the_whole():
    """The seam's contract for sharded sequences: only counts are summed over ranks."""
    scores, batch = scores_and_batch()
    cuts = (slice(0, 1), slice(1, 4), slice(4, 6))

    class Whole(Balance):
        def sums(self, counts_BE: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
            chosen = F.one_hot(scores.topk(2).indices, 5).sum((1, 2))
            return chosen, (batch.targets != IGNORE).sum(1)

    balance = Whole(top_k=2, weight=1.0)
    total = 0.0
    for cut in cuts:
        part = batch.map(lambda x, cut=cut: x[:, cut])
        total = total + balance(scores[:, cut], part)
    whole = Balance(top_k=2, weight=1.0)(scores, batch)
    torch.testing.assert_close(total, whole, **EXACT)
    (gradient,) = torch.autograd.grad(total, scores)
    (whole_gradient,) = torch.autograd.grad(whole, scores)
    torch.testing.assert_close(gradient, whole_gradient, **EXACT)


def test_balance_loss_of_weight_0_costs_nothing():
    assert Balance(top_k=2, weight=0.0)(*scores_and_batch()) is None


# ── the layer ──


def make_moe(**choice) -> MoE:
    choice = Choice(**({"num_experts": 4, "top_k": 2, "scoring": "sigmoid"} | choice))
    router = Router(DIM, choice, rate=1e-3)
    shared = SwiGLU(DIM, FFN)
    return MoE(
        router=router, experts=make_experts(choice.num_experts), shared=shared, balance_weight=0.1
    )


def test_layer_adds_the_shared_expert_and_returns_loss_and_load():
    moe = make_moe()
    x = torch.randn(2, 7, DIM)
    batch = flat_batch(x)
    out = moe(x, batch)
    routing = moe.router(x)
    experts = routing.experts.flatten(0, 1)
    weights = routing.weights.flatten(0, 1)
    routed = dense_loop(x.flatten(0, 1), experts, weights, moe.experts).view_as(x)
    expected = routed + moe.shared(x)
    torch.testing.assert_close(out.x, expected, **EXACT)
    expected = moe.balance(routing.scores, batch)
    torch.testing.assert_close(out.loss, expected, rtol=0.0, atol=0.0)
    load = experts.flatten().bincount(minlength=4)
    assert out.load.tolist() == load.tolist()


def test_packed_documents_do_not_change_a_layer():
    """Attention alone looks at documents; a sequence is what the data calls a sequence."""
    moe = make_moe()
    x = torch.randn(2, 7, DIM)
    batch = flat_batch(x)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2]] * 2)
    plain = moe(x, batch)
    packed = moe(x, replace(batch, documents=documents))
    for one, other in zip(plain, packed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 4), (5, 7), (16, 4)])
def test_a_dry_run_takes_the_load_as_even(num_tokens: int, num_experts: int):
    with torch.device("meta"):
        moe = make_moe(num_experts=num_experts)
        x = torch.empty(1, num_tokens, DIM, requires_grad=True)
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
        out = moe(x, Batch(tokens, tokens, tokens))
        total = out.x.sum() + out.loss
        total.backward()
    assert isinstance(out, Extra)
    assert out.x.shape == x.shape
    assert out.load.shape == (num_experts,)
    for param in moe.parameters():
        assert param.grad is not None or not param.requires_grad


# ── grouped products ──


WIDTHS = (16, 24)
"""Widths of experts that `grouped_mm` takes in every type."""
LOADS = ((3, 0, 9, 4), (0, 0, 16, 0), (1, 1, 1, 13))


@dataclass
class Products:
    """Operands of one product of experts, and what it gives."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor

    def run(self, counts: Sequence[int], product: Callable[..., Tensor]) -> list[Tensor]:
        """The product and the gradients of all operands."""
        operands = [each for each in (self.x, self.weight, self.bias) if each is not None]
        leaves = [each.clone().requires_grad_() for each in operands]
        x, weight, *bias = leaves
        y = product(x, weight, ExpertLoads(torch.tensor(counts)), bias_EM=bias[0] if bias else None)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]


def make_products(dtype: torch.dtype, num_tokens: int, *, has_bias: bool) -> Products:
    inner, columns = WIDTHS
    torch.manual_seed(0)
    return Products(
        torch.randn(num_tokens, inner).to(dtype),
        torch.randn(4, columns, inner).to(dtype),
        torch.randn(4, columns).to(dtype) if has_bias else None,
        torch.randn(num_tokens, columns).to(dtype),
    )


def by_expert(x: Tensor, weight: Tensor, loads: ExpertLoads, *, bias_EM: Tensor | None) -> Tensor:
    """Token by token, from the formula."""
    experts = torch.arange(len(weight)).repeat_interleave(loads.counts)
    rows = [weight[e] @ token for e, token in zip(experts.tolist(), x, strict=True)]
    y = torch.stack(rows)
    return y if bias_EM is None else y + bias_EM[experts]


@contextmanager
def calls_of_grouped() -> Iterator[list[str]]:
    """Names of the calls of `grouped_mm` while it is open."""
    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._grouped_mm.default:
                calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Calls():
        yield calls


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("counts", LOADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_products_are_those_of_each_expert_within_rounding(
    dtype, counts, has_bias, monkeypatch
):
    """Each entry is a sum of n products: its error is at most (n + 2) eps of the sum of their sizes,
    of which float32 accumulation needs far less, and rounding to the type adds one eps.
    """
    name = str(dtype).removeprefix("torch.")
    monkeypatch.setitem(expert_choice.GROUPED_BYTES, name, dtype.itemsize)
    made = make_products(dtype, sum(counts), has_bias=has_bias)
    with calls_of_grouped() as calls:
        found = made.run(counts, expert_linear)
    assert len(calls) == (5 if has_bias else 3)
    wide = Products(*(each if each is None else each.double() for each in vars(made).values()))
    exact = wide.run(counts, by_expert)
    sizes = Products(*(each if each is None else each.abs() for each in vars(wide).values())).run(
        counts, by_expert
    )
    eps = torch.finfo(dtype).eps
    most_terms = 26  # 24 columns, and a bias
    for got, expected, size in zip(found, exact, sizes, strict=True):
        assert got.dtype == dtype
        bound = (most_terms * torch.finfo(torch.float32).eps + 2 * eps) * size
        assert ((got.double() - expected).abs() <= bound).all()
    weight_gradient = found[2]
    for expert, count in enumerate(counts):
        assert bool(weight_gradient[expert].any()) == (count > 0)


@pytest.mark.parametrize("counts", LOADS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_products_in_float64_are_those_of_each_expert(counts, has_bias):
    made = make_products(torch.float64, sum(counts), has_bias=has_bias)
    found = made.run(counts, expert_linear)
    torch.testing.assert_close(found, made.run(counts, by_expert), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_gradient_of_a_transposed_weight_has_its_layout(dtype):
    weight = torch.randn(4, *WIDTHS).to(dtype).requires_grad_()
    x = torch.randn(8, WIDTHS[0]).to(dtype)
    y = expert_linear(x, weight.mT, ExpertLoads(torch.tensor([3, 0, 4, 1])))
    y.backward(torch.ones_like(y))
    assert weight.grad.is_contiguous()


def test_experts_without_values_have_an_even_load_and_no_host_wait():
    experts = Experts(*WIDTHS, num_experts=4).to("meta", torch.bfloat16)
    x = torch.empty(10, WIDTHS[0], device="meta", dtype=torch.bfloat16)
    choices: list[ExpertKernelChoice] = []
    planned = PlannedKernels(ExpertDevice("cuda", (9, 0)), choices.append)
    counts = torch.empty(4, device="meta", dtype=torch.int64)
    with calls_of_grouped() as calls:
        y = experts(x, ExpertLoads(counts, planned=planned))
        y.backward(torch.empty_like(y))
    assert y.shape == x.shape
    assert len(calls) == 7  # x has no gradient
    assert set(map(str, choices)) == {"grouped (bfloat16 on cuda)"}
    with calls_of_grouped() as calls:
        assert experts(x, ExpertLoads(counts)).shape == x.shape
    assert calls == []
