"""The split backward against torch's own: the same bits and FLOPs in two parts, for any torch code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tests.sampling import sampled
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.models import FAMILIES
from weft.models.common.batch import Batch, chain, token_batch, with_later_targets
from weft.parallel.autograd.split_backward import PRODUCTS, SplitBackward
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.testing import run_ranks

Gradients = list[Tensor | None]


def documents(batch: Batch) -> Batch:
    """Two documents a sequence."""
    half = batch.inputs.shape[1] // 2
    in_second = torch.arange(2 * half) >= half
    positions = batch.positions - in_second * half
    numbers = in_second.long().expand_as(batch.inputs)
    return Batch(batch.inputs, batch.targets, positions, numbers)


def batch_of(config: Any) -> Batch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, config.vocab, (2, 9), generator=generator)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    packed = documents(token_batch(inputs, targets))
    return with_later_targets(packed)


def stages_of(family: str) -> tuple[list[dict[str, nn.Module]], Batch]:
    """The family's tiny model in three stages: embedding; the layers; head and loss."""
    config = FAMILIES[family].Config()
    torch.manual_seed(3)
    blocks = FAMILIES[family].blocks(config)
    for block in blocks.values():
        block.double()
    for param in params_of(blocks):
        nn.init.normal_(param, std=0.1)
    names = list(blocks)
    stages = []
    for names_of_stage in (names[:1], names[1:-2], names[-2:]):
        stages.append({name: blocks[name] for name in names_of_stage})
    return stages, batch_of(config)


def params_of(blocks: dict[str, nn.Module]) -> list[nn.Parameter]:
    """The parameters that are trained."""
    params: list[nn.Parameter] = []
    for block in blocks.values():
        params.extend(block.parameters())
    return [param for param in params if param.requires_grad]


def gradients(params: Iterable[nn.Parameter]) -> Gradients:
    return [param.grad for param in params]


def count_flops(act: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops()


def assert_close_or_none(actual: Gradients, expected: Gradients, **tolerances: float) -> None:
    """The same gradients are missing; the others are close, without tolerances equal bit for bit."""
    bounds = tolerances or {"rtol": 0.0, "atol": 0.0}
    for ours, right in zip(actual, expected, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(ours, right, **bounds)


@dataclass(frozen=True)
class StageForward:
    """One stage after its forward, ready for its backward."""

    blocks: dict[str, nn.Module]
    split: SplitBackward | None
    x: Tensor
    out: Any

    def backward(self, gradient: Tensor) -> None:
        """The whole backward, or I, of the output and of the losses within the stage."""
        outputs = [self.out.x]
        grads = [gradient]
        if self.out.loss is not None:
            outputs.append(self.out.loss)
            grads.append(torch.ones_like(self.out.loss))
        torch.autograd.backward(outputs, grads)


class RecordedStep:
    """Gradients and FLOPs of a model of some stages, unsplit or split."""

    def __init__(self, stages: list[dict[str, nn.Module]], batch: Batch, *, split: bool) -> None:
        self.flops: dict[str, list[int]] = {"B": [], "I": [], "W": []}
        self.inputs: Gradients = []
        forwards = self._forward(stages, batch, split=split)
        gradient = torch.ones_like(forwards[-1].out.x)
        for stage in reversed(forwards):
            self._backward(stage, gradient)
            if stage.x.is_floating_point():
                gradient = stage.x.grad
                self.inputs.append(gradient)
        self.params: Gradients = []
        for blocks in stages:
            params = params_of(blocks)
            self.params += gradients(params)
            for param in params:
                param.grad = None

    @property
    def gradients(self) -> Gradients:
        return [*self.inputs, *self.params]

    def _forward(
        self, stages: list[dict[str, nn.Module]], batch: Batch, *, split: bool
    ) -> list[StageForward]:
        forwards = []
        x = batch.inputs
        for blocks in stages:
            split_backward = SplitBackward(params_of(blocks)) if split else None
            with split_backward or nullcontext():
                out = chain(blocks, x, batch)
            forwards.append(StageForward(blocks, split_backward, x, out))
            x = out.x.detach().requires_grad_()
        return forwards

    def _backward(self, stage: StageForward, gradient: Tensor) -> None:
        flops = count_flops(lambda: stage.backward(gradient))
        if stage.split is None:
            self.flops["B"].append(flops)
            return
        self.flops["I"].append(flops)
        for param in params_of(stage.blocks):
            assert param.grad is None, "I leaves every parameter alone"
        self.flops["W"].append(count_flops(stage.split.backward_weights))


@pytest.mark.parametrize("family", sampled(sorted(set(FAMILIES) - {"mnist"})))
def test_both_parts_yield_the_bits_of_the_whole_backward_for_the_same_flops(family: str) -> None:
    stages, batch = stages_of(family)
    whole = RecordedStep(stages, batch, split=False)
    halves = RecordedStep(stages, batch, split=True)
    assert_close_or_none(halves.gradients, whole.gradients)
    flops_of_both = []
    for i, w in zip(halves.flops["I"], halves.flops["W"], strict=True):
        flops_of_both.append(i + w)
    assert flops_of_both == whole.flops["B"]


def test_half_of_the_products_of_a_layer_run_in_w() -> None:
    """I holds dx = dy W, W holds dW = dy^T x of each linear; attention (no weights) is not counted
    by torch on a CPU.
    """
    stages, batch = stages_of("llama3")
    x = torch.randn(2, 8, 128, dtype=torch.float64, requires_grad=True)
    hidden = replace(batch, inputs=x, next_inputs=None, later_targets=None)
    flops = RecordedStep(stages[1:], hidden, split=True).flops
    assert flops["I"] == flops["W"]
    assert min(flops["I"]) > 0


# any code: each takes x[3, 4] and a module of parameters


class Bag(nn.Module):
    """Parameters of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.v = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4))
        self.s = nn.Parameter(torch.randn(()))
        self.experts = nn.Parameter(torch.randn(3, 4, 4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)
        self.group = nn.GroupNorm(2, 4)
        self.conv = nn.Conv1d(1, 2, 3)
        self.table = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 4)
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.double()


class _Custom(torch.autograd.Function):
    """Takes a parameter directly: no mode sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w.t(), x.t() @ dy


def linear_with_bias(bag: Bag, x: Tensor) -> Tensor:
    return F.linear(x, bag.w, bag.b)


def keyword_arguments(bag: Bag, x: Tensor) -> Tensor:
    return F.linear(input=x, weight=bag.w, bias=bag.b)


def operators(bag: Bag, x: Tensor) -> Tensor:
    affine = x @ bag.w.t() + bag.b
    fraction = bag.b / (1 + bag.s**2)
    return affine * bag.s - fraction


def product_from_the_left(bag: Bag, x: Tensor) -> Tensor:
    transposed = bag.w @ x.t()
    return transposed.t()


def weight_used_twice(bag: Bag, x: Tensor) -> Tensor:
    hidden = F.linear(x, bag.w).tanh()
    return F.linear(hidden, bag.w)


def weight_as_product_and_as_sum(bag: Bag, x: Tensor) -> Tensor:
    return F.linear(x, bag.w) + bag.w[:3]


def weight_of_weights(bag: Bag, x: Tensor) -> Tensor:
    up = torch.cat([bag.w, bag.v @ bag.w])
    down = torch.cat([bag.w, bag.v])
    return F.linear(x, up) @ down


def cast_weights(bag: Bag, x: Tensor) -> Tensor:
    weight = bag.w.float()
    bias = bag.b.float()
    return F.linear(x.float(), weight, bias).double()


def weight_normalised(bag: Bag, x: Tensor) -> Tensor:
    lengths = bag.w.norm(dim=1, keepdim=True)
    return F.linear(x, bag.w / lengths)


def written_into(bag: Bag, x: Tensor) -> Tensor:
    y = F.linear(x, bag.w)
    y += bag.b
    y.mul_(bag.s)
    y[0] = bag.b
    return y


def masked_weight(bag: Bag, x: Tensor) -> Tensor:
    made = bag.w.clone()
    ones = torch.ones(4, 4, dtype=torch.float64)
    made.mul_(ones.tril())
    made[0, 0] = 7.0
    return F.linear(x, made, bag.b)


def activation_in_weight(bag: Bag, x: Tensor) -> Tensor:
    made = bag.w.clone()
    before = F.linear(x, bag.w)
    made[0] = x[0]
    return before @ made


def made_weight_used_before_and_after_a_change(bag: Bag, x: Tensor) -> Tensor:
    made = bag.b.clone()
    before = x + made
    made.mul_(bag.s)
    return before + x * made


def without_gradient(bag: Bag, x: Tensor) -> Tensor:
    with torch.no_grad():
        largest = bag.w.abs().amax() + x.abs().amax()
        scale = largest.item()
    return F.linear(x, bag.w / scale)


def lookups(bag: Bag, x: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 2])
    return (
        x
        + bag.table(places)
        + bag.w[places]
        + bag.v.index_select(0, places)
        + bag.experts[1, places]
    )


def mixture(bag: Bag, x: Tensor) -> Tensor:
    rows = x.unbind()
    weights = bag.experts.unbind()
    products = list(map(F.linear, rows, weights))
    one_by_one = torch.stack(products)
    batched = torch.bmm(x.unsqueeze(1), bag.experts)
    return one_by_one + batched.squeeze(1)


def norms(bag: Bag, x: Tensor) -> Tensor:
    normed = bag.norm(x)
    return bag.group(normed) + F.rms_norm(x, (4,), bag.b)


def convolution(bag: Bag, x: Tensor) -> Tensor:
    one_channel = x.unsqueeze(1)
    return bag.conv(one_channel).flatten(1)


def einsum(bag: Bag, x: Tensor) -> Tensor:
    one_weight = torch.einsum("nd,df->nf", x, bag.w)
    each_expert = torch.einsum("nd,edf->nf", x, bag.experts)
    return one_weight + each_expert


def attention_of_torch(bag: Bag, x: Tensor) -> Tensor:
    one_sequence = x[None]
    out, _ = bag.attention(one_sequence, one_sequence, one_sequence, need_weights=False)
    return out[0]


def lstm(bag: Bag, x: Tensor) -> Tensor:
    out, _ = bag.lstm(x)
    return out


def bilinear(bag: Bag, x: Tensor) -> Tensor:
    return bag.bilinear(x, x.tanh())


def addmm(bag: Bag, x: Tensor) -> Tensor:
    rows = x[:, None]
    batched = torch.baddbmm(rows, rows, bag.experts)
    return torch.addmm(bag.b, x, bag.w, beta=2) + batched[:, 0]


def frozen_weight(bag: Bag, x: Tensor) -> Tensor:
    hidden = F.linear(x, bag.frozen)
    return F.linear(hidden, bag.w)


def custom_function(bag: Bag, x: Tensor) -> Tensor:
    hidden = F.linear(x, bag.v)
    return _Custom.apply(hidden, bag.w) * bag.w[0]


def transforms(bag: Bag, x: Tensor) -> Tensor:
    """Gradients of each row, which read weights inside of `vmap` and `grad`."""

    def energy(row: Tensor) -> Tensor:
        return torch.tanh(F.linear(row, bag.w, bag.b)).square().sum()

    forces: Tensor = torch.func.vmap(torch.func.grad(energy))(x)
    return F.linear(forces, bag.w)


def where_and_lists(bag: Bag, x: Tensor) -> Tensor:
    positive = torch.where(x > 0, bag.b, x)
    return positive + torch.stack([x[0], bag.b, bag.b])


def no_weights(bag: Bag, x: Tensor) -> Tensor:
    return x.tanh()


CODE = {
    "linear with a bias": linear_with_bias,
    "keyword arguments": keyword_arguments,
    "operators": operators,
    "product from the left": product_from_the_left,
    "a weight used twice": weight_used_twice,
    "a weight as product and as sum": weight_as_product_and_as_sum,
    "a weight of weights": weight_of_weights,
    "cast weights": cast_weights,
    "weight normalised": weight_normalised,
    "in place on activations": written_into,
    "in place on a made weight": masked_weight,
    "an activation written into a made weight": activation_in_weight,
    "used, changed, used": made_weight_used_before_and_after_a_change,
    "no_grad inside": without_gradient,
    "lookups": lookups,
    "experts": mixture,
    "norms": norms,
    "convolution": convolution,
    "einsum": einsum,
    "attention of torch": attention_of_torch,
    "lstm": lstm,
    "bilinear": bilinear,
    "addmm": addmm,
    "frozen": frozen_weight,
    "a function of its own": custom_function,
    "transforms of torch.func": transforms,
    "where and lists": where_and_lists,
    "no weights": no_weights,
}
"""Title -> a piece of code with parameters, as users write it."""


def backward_of_code(
    function: Callable[[Bag, Tensor], Tensor], *, split: bool, input_has_grad: bool
) -> Gradients:
    """Gradients of x and of all parameters after three micro-batches whose halves interleave."""
    bag = Bag()
    params = list(bag.parameters())
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).cos()
    inputs, splits, outputs = [], [], []
    for factor in (1, 2, 3):
        scaled = (x * factor).requires_grad_(input_has_grad)
        split_backward = SplitBackward(params)
        with split_backward if split else nullcontext():
            out = function(bag, scaled * 1.0)
        inputs.append(scaled)
        splits.append(split_backward)
        outputs.append(out)
    for out in outputs:
        gradient = torch.ones_like(out).cumsum(0)
        out.backward(gradient)
    if split:
        for split_backward in splits:
            split_backward.backward_weights()
    return gradients([*inputs, *params])


@pytest.mark.parametrize("grad", [True, False], ids=["", "no gradient of the input"])
@pytest.mark.parametrize("name", CODE)
def test_any_code_has_the_gradients_of_the_whole_backward(name: str, grad: bool) -> None:
    if name == "no weights" and not grad:
        return
    whole = backward_of_code(CODE[name], split=False, input_has_grad=grad)
    halves = backward_of_code(CODE[name], split=True, input_has_grad=grad)
    assert_close_or_none(halves, whole, rtol=1e-13, atol=1e-14)


def test_no_parameter_is_touched_before_w() -> None:
    """Except by the functions that no mode sees."""
    unseen = (
        "a function of its own",
        "an activation written into a made weight",
        "transforms of torch.func",
    )
    for name, function in CODE.items():
        bag = Bag()
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        split = SplitBackward(bag.parameters())
        with split:
            y = function(bag, x * 1.0)
        y.sum().backward()
        is_touched = any(grad is not None for grad in gradients(bag.parameters()))
        assert is_touched == (name in unseen), name


def test_torchs_own_attention_is_computed_once() -> None:
    """It holds products behind each other, so its weight gradients are computed in I and only put
    in place by W.
    """
    bag = Bag()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    whole, _ = bag.attention(x, x, x, need_weights=False)
    whole_flops = count_flops(whole.sum().backward)
    split = SplitBackward(bag.parameters())
    with split:
        halves, _ = bag.attention(x, x, x, need_weights=False)
    assert count_flops(halves.sum().backward) == whole_flops
    assert count_flops(split.backward_weights) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_too(dtype: torch.dtype) -> None:
    is_cast = dtype == torch.bfloat16

    def run(*, split: bool) -> Gradients:
        bag = Bag().float()
        x = torch.ones(3, 4).cos().requires_grad_()
        split_backward = SplitBackward(bag.parameters())
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast)
        with autocast, split_backward if split else nullcontext():
            hidden = F.linear(x, bag.w, bag.b)
            y = F.linear(bag.norm(hidden), bag.v)
        y.float().sum().backward()
        split_backward.backward_weights()
        return gradients([x, *bag.parameters()])

    assert_close_or_none(run(split=True), run(split=False))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_every_device(device: str) -> None:
    """On CUDA a backward runs in a thread of its own, and so does the backward within it."""
    stages, batch = stages_of("llama3")
    first_layer = {"layer0": stages[1]["layer0"]}
    layer = nn.ModuleDict(first_layer).to(device)
    batch = batch.map(lambda tensor: tensor.to(device))
    counted_up = torch.ones(2, 8, 128, dtype=torch.float64, device=device).cumsum(-1)

    def run(*, split: bool) -> Gradients:
        layer.zero_grad()
        x = counted_up.cos().requires_grad_()
        split_backward = SplitBackward(layer.parameters())
        with split_backward if split else nullcontext():
            y = chain(layer, x, batch).x
        loss = (y**2).sum()
        loss.backward()
        split_backward.backward_weights()
        return gradients([x, *layer.parameters()])

    halves = run(split=True)
    whole = run(split=False)
    torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-12)


def hook_order(*, split: bool) -> list[str]:
    """Names of parameters in the order in which their hooks run; two weights are tied."""
    stages, batch = stages_of("gpt2")
    layer = stages[1]
    attention = layer["layer0"].attn
    attention.k.weight = attention.q.weight
    x = torch.randn(2, 8, 128, dtype=torch.float64, requires_grad=True)
    seen: list[str] = []
    for name, param in nn.ModuleDict(layer).named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    split_backward = SplitBackward(params_of(layer))
    with split_backward if split else nullcontext():
        y = chain(layer, x, batch).x
    y.sum().backward()
    assert bool(seen) != split, "I touches no parameter"
    split_backward.backward_weights()
    return seen


def linear_weights(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith("weight") and "norm" not in name]


def test_hooks_on_parameters_run_once_in_w_in_the_order_of_the_whole_backward() -> None:
    """A tied weight too: two uses, one hook. Gradient buckets build on this."""
    whole = hook_order(split=False)
    halves = hook_order(split=True)
    assert len(halves) == len(set(halves))
    assert set(halves) == set(whole)
    assert linear_weights(halves) == linear_weights(whole)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def distinct_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind the tensors."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return storages


def held_bytes(holders: weakref.WeakSet[Holder], params: list[nn.Parameter]) -> int:
    """Bytes of distinct memory that saved tensors hold alive, parameters left out."""
    gc.collect()
    held = distinct_storages(holder.tensor for holder in holders)
    for address in distinct_storages(params):
        held.pop(address, None)
    return sum(held.values())


@pytest.mark.parametrize("family", ["llama3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_between_i_and_w_only_inputs_of_products_and_gradients_of_their_outputs_are_saved(
    family: str,
) -> None:
    """Attention's q, k, v and log-sum-exp, the activation function's inputs and the norms' are
    freed after I.
    """
    stages, batch = stages_of(family)
    layer = {"layer0": stages[1]["layer0"]}
    config = FAMILIES[family].Config()
    params = params_of(layer)
    holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Holder:
        holder = Holder(tensor)
        holders.add(holder)
        return holder

    x = torch.randn(2, 8, config.dim, dtype=torch.float64, requires_grad=True)
    split = SplitBackward(params)
    with saved_tensors_hooks(pack, lambda holder: holder.tensor), split:
        y = chain(layer, x, batch).x
    held_before_i = held_bytes(holders, params)
    y.backward(torch.ones_like(y))
    del y

    column_bytes = 2 * 8 * 8  # of one feature of all tokens
    head_size = config.dim // config.heads
    kv = getattr(config, "kv_heads", config.heads) * head_size
    # the normed x twice, attention's output, the middle of the MLP
    input_features = 3 * config.dim + config.ffn
    held_after_i = held_bytes(holders, params)
    assert held_after_i == column_bytes * input_features
    assert held_after_i < 0.6 * held_before_i

    # gradients of the outputs of o, down and q; of k and v; of up (and gate)
    num_up = 2 if family == "llama3" else 1
    output_features = 3 * config.dim + 2 * kv + num_up * config.ffn
    output_bytes = column_bytes * output_features
    # gradients of norms and biases are computed in I
    vector_bytes = sum(8 * param.numel() for param in params if param.ndim == 1)
    pending = distinct_storages(wgrad.gradient for wgrad in split._pending_wgrads)
    pending_bytes = sum(pending.values())
    assert output_bytes <= pending_bytes <= output_bytes + vector_bytes

    split.backward_weights()
    assert held_bytes(holders, params) == 0
    assert not split._pending_wgrads


class CountedLinears:
    """A column and a row parallel linear whose operations between ranks are counted by action."""

    def __init__(self, comm: Comm, *, sequence: bool) -> None:
        self.counter = Counter()
        self.operations: dict[str, int] = {}
        counted = Comm(comm.mesh, comm.rank, comm.transport, observers=(self.counter,))
        torch.manual_seed(0)
        options = {"comm": counted, "sequence_parallel": sequence, "dtype": torch.float64}
        self.column = ColumnParallelLinear(6, 8, **options)
        self.row = RowParallelLinear(8, 6, **options)
        self.params = [*self.column.parameters(), *self.row.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.column(x))
        return self.row(hidden)

    def count(self, action: str, act: Callable[[], None]) -> None:
        before = self.counter.total().operations
        act()
        after = self.counter.total().operations
        self.operations[action] = after - before

    def gradients_of_a_step(self, *, split: bool) -> Gradients:
        counted_up = torch.ones(2, 2, 6, dtype=torch.float64).cumsum(0)
        x = counted_up.requires_grad_()
        if split:
            split_backward = SplitBackward(self.params)
            with split_backward:
                y = self.forward(x)
            self.count("I", y.sum().backward)
            self.count("W", split_backward.backward_weights)
        else:
            y = self.forward(x)
            self.count("B", y.sum().backward)
        found = gradients([x, *self.params])
        for param in self.params:
            param.grad = None
        return found


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_collectives_belong_to_i_and_run_once(sequence: bool) -> None:
    def rank(comm: Comm) -> tuple[dict[str, int], Gradients, Gradients]:
        linears = CountedLinears(comm, sequence=sequence)
        whole = linears.gradients_of_a_step(split=False)
        halves = linears.gradients_of_a_step(split=True)
        return linears.operations, whole, halves

    for operations, whole, halves in run_ranks("tp2", rank):
        assert operations == {"B": 1 + sequence, "I": 1 + sequence, "W": 0}
        assert_close_or_none(halves, whole)


class FunctionRecorder(SplitBackward):
    """The mode, with a record of every function of torch that it sees."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params)
        self.seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_every_product_is_a_function_that_the_mode_sees() -> None:
    """A name that torch resolves to another function would silently not be deferred."""
    bag = Bag()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    recorder = FunctionRecorder(bag.parameters())
    with recorder:
        for function in CODE.values():
            function(bag, x * 1.0)
    products = {
        F.linear,
        torch.einsum,
        F.embedding,
        Tensor.index_select,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
    }
    assert products <= recorder.seen
    others = {F.bilinear, F.conv1d, Tensor.__getitem__, Tensor.matmul}
    assert others <= recorder.seen & PRODUCTS


def test_the_weight_gradients_of_a_grouped_product_are_left_for_later() -> None:
    """Of `F.grouped_mm`, which calls another function of torch."""
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 16, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    found = []
    for split in (None, SplitBackward([weight])):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with split or nullcontext():
            y = F.grouped_mm(x, weight.mT, offs=ends)
        y.backward(torch.ones(6, 8))
        if split is not None:
            assert weight.grad is None
            split.backward_weights()
        found.append([x.grad, weight.grad])
        weight.grad = None
    assert_close_or_none(*found)
