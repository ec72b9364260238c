"""Recomputation: bytes that a block saves; what runs again and how often; results are bit-equal."""

from __future__ import annotations

import gc
from collections import Counter as Count
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.live import Live
from tests.matrix.layouts import LR, Case, make_step, own_micro_batches
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.layout.recomputation import RecomputeMode, read_policy
from weft.models import FAMILIES
from weft.models.common import compiler
from weft.models.common.batch import Batch, token_batch
from weft.parallel.autograd.split_backward import SplitBackward
from weft.parallel.model.compiled_block import compiled_block
from weft.parallel.recompute.blocks import FullRecompute, RecomputedBlock, recompute_blocks
from weft.parallel.recompute.recomputed_tensor import memory_of
from weft.parallel.recompute.selective import SelectiveRecompute
from weft.testing import run_ranks

B, S, D, H, G, FFN = 2, 32, 64, 8, 4, 176
K = D // H
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


def llama_layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    family = FAMILIES["llama3"]
    return family.blocks(family.Config(layers=1, dim=D, heads=H, kv_heads=G, ffn=FFN))["layer0"].to(
        dtype
    )


def recomputed(block: nn.Module, mode: RecomputeMode) -> nn.Module:
    return recompute_blocks({"layer0": block}, {"layer0": mode})["layer0"]


def some_batch() -> Batch:
    tokens = torch.zeros(B, S, dtype=torch.int64)
    return token_batch(tokens, tokens)


def some_input(dtype: torch.dtype = torch.float32) -> Tensor:
    return (
        torch.randn(B, S, D, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()
    )


def saved_by_layer(mode: RecomputeMode, dtype: torch.dtype) -> int:
    """Bytes that the layer's forward leaves allocated, besides its parameters, its input and its
    output.
    """
    layer = llama_layer(dtype)
    x = some_input(dtype)
    batch = some_batch()
    live = Live()
    given = (x, *layer.parameters(), batch.positions)
    block = recomputed(layer, mode)
    with live:
        y = block(x, batch)
    return live.num_bytes(but=(y, *given))


# Features a token that a layer saves, besides its input (entries of the compute dtype):
#     selective   the residual between attention and MLP, rotated q and k, v, attention's output, gate, up
#     none        those, each norm's normalised input and output, silu(gate), silu(gate) * up
# and of each head and token the log-sum-exp, of each token a cosine and sine of K / 2 angles; 1 / rms of two norms too
SELECTIVE = D + (H * K + 2 * G * K) + H * K + 2 * FFN
NONE = SELECTIVE + 4 * D + 2 * FFN
STATS = H + K


@pytest.mark.parametrize(
    ("mode", "numbers"), [("none", NONE + STATS + 2), ("selective", SELECTIVE + STATS), ("full", 0)]
)
def test_a_layer_saves_what_the_formula_says(mode: RecomputeMode, numbers: int) -> None:
    assert saved_by_layer(mode, torch.float32) == 4 * B * S * numbers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's own code
def test_a_compiled_layer_saves_what_selective_recomputation_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for a number of each token and norm, its root mean square."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    block = compiled_block("layer0", llama_layer(), drops_out=False, recompute="selective")
    x = some_input()
    given = {memory_of(tensor) for tensor in (x, *block.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[memory_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, some_batch())
    num_bytes = sum(size for memory, size in saved.items() if memory not in given)
    assert num_bytes == 4 * B * S * (SELECTIVE + STATS + 2)
    y.sum().backward()


def test_in_bfloat16_selective_saves_no_float32_copies_of_norms() -> None:
    # the norm that torch composes on the CPU makes float32 of its input: 3 x D x 4 bytes a norm and token
    entry_bytes = 2 * SELECTIVE + 4 * STATS
    assert saved_by_layer("selective", torch.bfloat16) == B * S * entry_bytes
    assert saved_by_layer("none", torch.bfloat16) >= B * S * (
        2 * (SELECTIVE + 2 * FFN) + 2 * 2 * 4 * D
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_bit_equal_to_those_without_recomputation(
    mode: RecomputeMode, dtype: torch.dtype
) -> None:
    def gradients(mode: RecomputeMode) -> list[Tensor]:
        layer = llama_layer(dtype)
        x = some_input(dtype)
        block = recomputed(layer, mode)
        out = block(x, some_batch())
        out.square().sum().backward()
        return [x.grad, *(param.grad for param in layer.parameters())]

    found = gradients(mode)
    expected = gradients("none")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Calls(TorchDispatchMode):
    """Counts what torch computes, backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Count[str] = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_backward(mode: RecomputeMode) -> Count[str]:
    y = recomputed(llama_layer(), mode)(some_input(), some_batch())
    with Calls() as calls:
        y.backward(torch.ones_like(y))
    return calls.of


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS, NORMS = 7, 2


def test_full_repeats_the_forward_once_and_stops_before_the_last_product() -> None:
    plain = calls_of_backward("none")
    calls = calls_of_backward("full")
    assert plain["mm"] == 2 * PRODUCTS
    assert calls["mm"] - plain["mm"] == PRODUCTS - 1
    assert plain[ATTENTION] == 0
    assert calls[ATTENTION] == 1


def test_selective_repeats_each_norm_once_and_no_matrix_product_or_attention() -> None:
    plain = calls_of_backward("none")
    calls = calls_of_backward("selective")
    assert calls["mm"] == plain["mm"]
    assert calls[ATTENTION] == 0
    assert calls["rsqrt"] - plain["rsqrt"] == NORMS, "not once for each linear that reads the norm"


def kept_over_time(mode: RecomputeMode, *, is_split: bool) -> tuple[int, int]:
    """Bytes that are left after the forward, and after the backward of the input (all of it, or I
    where it is split).
    """
    layer = llama_layer()
    x = some_input()
    batch = some_batch()
    live = Live()
    given = (x, *layer.parameters(), batch.positions)
    split = SplitBackward(layer.parameters()) if is_split else None
    gc.disable()  # what only the garbage collector would free counts as saved
    try:
        with live, split or nullcontext():
            y = recomputed(layer, mode)(x, batch)
        before = live.num_bytes(but=(y, *given))
        with live:
            y.backward(torch.ones_like(y))
        after = live.num_bytes(
            but=(
                y,
                *given,
                *(g for g in (x.grad, *(p.grad for p in layer.parameters())) if g is not None),
            )
        )
    finally:
        gc.enable()
    return before, after


@pytest.mark.parametrize("mode", MODES)
def test_after_the_backward_nothing_is_allocated(mode: RecomputeMode) -> None:
    assert kept_over_time(mode, is_split=False)[1] == 0


def test_under_a_split_backward_neither_forward_nor_i_saves_more() -> None:
    left = {mode: kept_over_time(mode, is_split=True) for mode in MODES}
    whole = {mode: kept_over_time(mode, is_split=False) for mode in MODES}
    actual = [before for before, _ in left.values()]
    expected = [before for before, _ in whole.values()]
    assert actual == expected
    count = len({after for _, after in left.values()})
    assert count == 1


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_that_is_retained_runs_backward_twice(mode: RecomputeMode) -> None:
    layer = llama_layer()
    x = some_input()
    y = recomputed(layer, mode)(x, some_batch()).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_without_gradients_nothing_is_saved() -> None:
    block = recomputed(llama_layer(), "full")
    with torch.no_grad():
        assert not block(some_input(), some_batch()).requires_grad


def test_embedding_head_and_loss_are_not_recomputed() -> None:
    modes = read_policy("full").of_blocks(0, ("embed", "layer0", "mtp0", "head", "loss"))
    assert [name for name, mode in modes.items() if mode == "full"] == ["layer0", "mtp0"]


def test_each_layer_of_a_stage_has_its_own_mode() -> None:
    case = Case("pp2", layers=4, recompute="full:1+selective/none:1+full")

    def modes(comm: Comm) -> dict[str, str]:
        blocks = make_step(case, comm).model.blocks
        return {
            name: block.mode if isinstance(block, RecomputedBlock) else "none"
            for name, block in blocks.items()
            if name.startswith("layer")
        }

    first, second = run_ranks(case.mesh, modes)
    assert first == {"layer0": "full", "layer1": "selective"}
    assert second == {"layer2": "none", "layer3": "full"}


def test_a_recomputed_result_that_is_modified_in_place_is_saved_as_it_is() -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    with SelectiveRecompute():
        h = F.silu(x)
        h.add_(1.0)
        y = F.linear(h, weight)
    y.sum().backward()
    expected = (F.silu(x) + 1).sum(0).expand(8, 8)
    assert torch.allclose(weight.grad, expected)


def test_an_argument_modified_in_place_after_the_forward_is_an_error_as_in_autograd() -> None:
    x = torch.randn(4, 8, requires_grad=True) * 1
    weight = torch.randn(8, 8, requires_grad=True)
    with SelectiveRecompute():
        y = F.linear(F.silu(x), weight)
    with torch.no_grad():
        x.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_views_of_recomputed_results_are_views_of_the_repeated_one() -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64)
    weight.requires_grad_()

    def act() -> Tensor:
        left, right = F.gelu(x).t().chunk(2, dim=0)
        first = F.linear(right.t(), weight).sum()
        second = (left.t() @ weight.t()).square().sum()
        return first + second

    with SelectiveRecompute():
        y = act()
    got = torch.autograd.grad(y, (x, weight))
    want = torch.autograd.grad(act(), (x, weight))
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


def test_an_in_place_activation_is_not_repeated() -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def act() -> Tensor:
        h = x * 2.0
        return (F.silu(h, inplace=True) * x).sum()

    with SelectiveRecompute():
        y = act()
    (gradient,) = torch.autograd.grad(y, x)
    (right,) = torch.autograd.grad(act(), x)
    assert torch.equal(gradient, right)


def test_a_repeated_forward_that_saves_fewer_tensors_is_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    turns = iter((True, False))

    def call() -> Tensor:
        return x.sin().exp() if next(turns) else x * 1.0

    with pytest.raises(AssertionError, match="fewer tensors"):
        FullRecompute(call).run().sum().backward()


def all_reduces_of_a_step(mode: RecomputeMode) -> int:
    case = Case("tp2", family="gpt2", microbatches=1, recompute=mode)

    def rank(comm: Comm) -> int:
        step = make_step(case, comm, clip=1.0)
        counter = Counter()
        comm.observers = (counter,)
        step(own_micro_batches(case, comm), lr=LR)
        return counter.traffic["tp", "all_reduce"].operations

    return run_ranks(case.mesh, rank)[0]


def test_full_repeats_one_of_two_forward_collectives_of_a_layer_selective_none() -> None:
    layers = Case("tp2", family="gpt2").config.layers
    plain = all_reduces_of_a_step("none")
    assert all_reduces_of_a_step("selective") == plain
    assert all_reduces_of_a_step("full") == plain + layers, (
        "no node of the block needs the all-reduce at its end"
    )
