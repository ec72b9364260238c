"""The split backward against torch's own: the same bits and FLOPs in two parts, for any torch code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.models import FAMILIES
from weft.models.common.batch import Batch, chain, token_batch, with_later_targets
from weft.parallel.autograd.split_backward import PRODUCTS, SplitBackward
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.testing import run_ranks

Halves = tuple[list[Tensor | None], list[Tensor | None]]


def documents(batch: Batch) -> Batch:
    """Two documents a sequence."""
    length = batch.inputs.shape[1]
    begins = torch.arange(length) >= length // 2
    places = batch.positions - begins * (length // 2)
    return Batch(batch.inputs, batch.targets, places, begins.long().expand_as(batch.inputs))


def batch_of(config: Any) -> Batch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, config.vocab, (2, 9), generator=generator)
    return with_later_targets(documents(token_batch(tokens[:, :-1], tokens[:, 1:])))


def stages_of(family: str) -> tuple[list[dict[str, nn.Module]], Batch]:
    """The family's tiny model in three stages: embedding; the layers; head and loss."""
    config = FAMILIES[family].Config()
    torch.manual_seed(3)
    blocks = {name: block.double() for name, block in FAMILIES[family].blocks(config).items()}
    for block in blocks.values():
        for param in block.parameters():
            if param.requires_grad:
                nn.init.normal_(param, std=0.1)
    names = list(blocks)
    runs = (names[:1], names[1:-2], names[-2:])
    return [{name: blocks[name] for name in run} for run in runs], batch_of(config)


def params_of(blocks: dict[str, nn.Module]) -> list[nn.Parameter]:
    return [
        param for block in blocks.values() for param in block.parameters() if param.requires_grad
    ]


class RecordedStep:
    """Gradients and FLOPs of a model of some stages, unsplit or split."""

    def __init__(self, stages: list[dict[str, nn.Module]], batch: Batch, *, split: bool) -> None:
        self.flops: dict[str, list[int]] = {"B": [], "I": [], "W": []}
        self.inputs: list[Tensor] = []
        everything = []
        x = batch.inputs
        for blocks in stages:
            halves = SplitBackward(params_of(blocks)) if split else None
            with halves or nullcontext():
                out = chain(blocks, x, batch)
            everything.append((blocks, halves, x, out))
            x = out.x.detach().requires_grad_()
        gradient = torch.ones_like(x)
        for blocks, halves, x, out in reversed(everything):
            roots = [
                (out.x, gradient),
                *([] if out.loss is None else [(out.loss, torch.ones_like(out.loss))]),
            ]
            self._count(
                "I" if split else "B",
                lambda roots=roots: torch.autograd.backward(*zip(*roots, strict=True)),
            )
            if halves is not None:
                assert all(param.grad is None for param in params_of(blocks)), (
                    "I leaves every parameter alone"
                )
                self._count("W", halves.backward_weights)
            if x.is_floating_point():
                self.inputs.append(x.grad)
                gradient = x.grad
        self.params = [param.grad for blocks in stages for param in params_of(blocks)]
        for blocks in stages:
            for param in params_of(blocks):
                param.grad = None

    def _count(self, kind: str, act: Callable[[], None]) -> None:
        with FlopCounterMode(display=False) as counter:
            act()
        self.flops[kind].append(counter.get_total_flops())


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mnist"}))
def test_both_parts_yield_the_bits_of_the_whole_backward_for_the_same_flops(family: str) -> None:
    stages, batch = stages_of(family)
    whole, halves = (
        RecordedStep(stages, batch, split=False),
        RecordedStep(stages, batch, split=True),
    )
    for right, ours in zip(
        [*whole.inputs, *whole.params], [*halves.inputs, *halves.params], strict=True
    ):
        assert (right is None) == (ours is None)
        assert right is None or torch.equal(right, ours)
    assert [
        i + w for i, w in zip(halves.flops["I"], halves.flops["W"], strict=True)
    ] == whole.flops["B"]


def test_half_of_the_products_of_a_layer_run_in_w() -> None:
    """I holds dx = dy W, W holds dW = dy^T x of each linear; attention (no weights) is not counted
    by torch on a CPU.
    """
    stages, batch = stages_of("llama3")
    flops = RecordedStep(
        stages[1:],
        Batch(torch.randn(2, 8, 128, dtype=torch.float64, requires_grad=True), *rest(batch)),
        split=True,
    ).flops
    assert flops["I"] == flops["W"]
    assert min(flops["I"]) > 0


def rest(batch: Batch) -> tuple[Any, ...]:
    return batch.targets, batch.positions, batch.documents


# any code: each takes x[3, 4] and a module of parameters


class Bag(nn.Module):
    """Parameters of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.b, self.s = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.experts, self.frozen = (
            nn.Parameter(torch.randn(3, 4, 4)),
            nn.Parameter(torch.randn(4, 4)),
        )
        self.unused = nn.Parameter(torch.randn(4))
        self.norm, self.group = nn.LayerNorm(4), nn.GroupNorm(2, 4)
        self.conv, self.table = nn.Conv1d(1, 2, 3), nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.bilinear = nn.LSTM(4, 4), nn.Bilinear(4, 4, 4)
        self.frozen.requires_grad = False
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


def written_into(bag: Bag, x: Tensor) -> Tensor:
    y = F.linear(x, bag.w)
    y += bag.b
    y.mul_(bag.s)
    y[0] = bag.b
    return y


def masked_weight(bag: Bag, x: Tensor) -> Tensor:
    made = bag.w.clone()
    made.mul_(torch.ones(4, 4, dtype=torch.float64).tril())
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
        scale = (bag.w.abs().amax() + x.abs().amax()).item()
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
    each = [
        F.linear(row, weight) for row, weight in zip(x.unbind(), bag.experts.unbind(), strict=True)
    ]
    return torch.stack(each) + torch.bmm(x.unsqueeze(1), bag.experts).squeeze(1)


CODE: dict[str, Callable[[Bag, Tensor], Tensor]] = {
    "linear with a bias": lambda bag, x: F.linear(x, bag.w, bag.b),
    "keyword arguments": lambda bag, x: F.linear(input=x, weight=bag.w, bias=bag.b),
    "operators": lambda bag, x: (x @ bag.w.t() + bag.b) * bag.s - bag.b / (1 + bag.s**2),
    "product from the left": lambda bag, x: (bag.w @ x.t()).t(),
    "a weight used twice": lambda bag, x: F.linear(F.linear(x, bag.w).tanh(), bag.w),
    "a weight as product and as sum": lambda bag, x: F.linear(x, bag.w) + bag.w[:3],
    "a weight of weights": lambda bag, x: F.linear(x, torch.cat([bag.w, bag.v @ bag.w])) @ torch.cat([bag.w, bag.v]),
    "cast weights": lambda bag, x: F.linear(x.float(), bag.w.float(), bag.b.float()).double(),
    "weight normalised": lambda bag, x: F.linear(x, bag.w / bag.w.norm(dim=1, keepdim=True)),
    "in place on activations": written_into,
    "in place on a made weight": masked_weight,
    "an activation written into a made weight": activation_in_weight,
    "used, changed, used": made_weight_used_before_and_after_a_change,
    "no_grad inside": without_gradient,
    "lookups": lookups,
    "experts": mixture,
    "norms": lambda bag, x: bag.group(bag.norm(x)) + F.rms_norm(x, (4,), bag.b),
    "convolution": lambda bag, x: bag.conv(x.unsqueeze(1)).flatten(1),
    "einsum": lambda bag, x: torch.einsum("nd,df->nf", x, bag.w) + torch.einsum("nd,edf->nf", x, bag.experts),
    "attention of torch": lambda bag, x: bag.attention(x[None], x[None], x[None], need_weights=False)[0][0],
    "lstm": lambda bag, x: bag.lstm(x)[0],
    "bilinear": lambda bag, x: bag.bilinear(x, x.tanh()),
    "addmm": lambda bag, x: torch.addmm(bag.b, x, bag.w, beta=2) + torch.baddbmm(x[:, None], x[:, None], bag.experts)[:, 0],
    "frozen": lambda bag, x: F.linear(F.linear(x, bag.frozen), bag.w),
    "a function of its own": lambda bag, x: _Custom.apply(F.linear(x, bag.v), bag.w) * bag.w[0],
    "where and lists": lambda bag, x: torch.where(x > 0, bag.b, x) + torch.stack([x[0], bag.b, bag.b]),
    "no weights": lambda bag, x: x.tanh(),
}  # fmt: skip


def halves_of(code: Callable[[Bag, Tensor], Tensor], *, split: bool, grad: bool = True) -> Halves:
    """Gradients of x and of all parameters after three micro-batches whose halves interleave."""
    bag = Bag()
    params = list(bag.parameters())
    inputs = [
        torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).cos() * n for n in (1, 2, 3)
    ]
    inputs = [x.requires_grad_(grad) for x in inputs]
    parts = [SplitBackward(params) for _ in inputs]
    outs = []
    for x, part in zip(inputs, parts, strict=True):
        with part if split else nullcontext():
            outs.append(code(bag, x * 1.0))
    for out in outs:
        torch.autograd.backward(out, torch.ones_like(out).cumsum(0))
    for part in parts if split else ():
        part.backward_weights()
    return [x.grad for x in inputs], [param.grad for param in params]


@pytest.mark.parametrize("grad", [True, False], ids=["", "no gradient of the input"])
@pytest.mark.parametrize("name", CODE)
def test_any_code_has_the_gradients_of_the_whole_backward(name: str, grad: bool) -> None:
    if name == "no weights" and not grad:
        return
    right, ours = (
        halves_of(CODE[name], split=False, grad=grad),
        halves_of(CODE[name], split=True, grad=grad),
    )
    for one, other in zip(right[0] + right[1], ours[0] + ours[1], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-13, atol=1e-14)


def test_no_parameter_is_touched_before_w() -> None:
    """Except by the functions that no mode sees."""
    for name, code in CODE.items():
        bag = Bag()
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        split = SplitBackward(bag.parameters())
        with split:
            y = code(bag, x * 1.0)
        y.sum().backward()
        early = any(param.grad is not None for param in bag.parameters())
        assert early == (
            name in ("a function of its own", "an activation written into a made weight")
        ), name


def test_torchs_own_attention_is_computed_once() -> None:
    """It holds products behind each other, so its weight gradients are computed in I and only put
    in place by W.
    """
    bag = Bag()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    counted = {}
    for kind in ("B", "I"):
        split = SplitBackward(bag.parameters())
        with split if kind == "I" else nullcontext():
            y, _ = bag.attention(x, x, x, need_weights=False)
        for half, act in ((kind, y.sum().backward), ("W", split.backward_weights)):
            with FlopCounterMode(display=False) as counter:
                act()
            counted[half] = counter.get_total_flops()
    assert (counted["I"], counted["W"]) == (counted["B"], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_too(dtype: torch.dtype) -> None:
    def run(*, split: bool) -> list[Tensor | None]:
        bag = Bag().float()
        x = torch.ones(3, 4).cos().requires_grad_()
        part = SplitBackward(bag.parameters())
        is_cast = dtype == torch.bfloat16
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast),
            part if split else nullcontext(),
        ):
            y = F.linear(bag.norm(F.linear(x, bag.w, bag.b)), bag.v)
        y.float().sum().backward()
        part.backward_weights()
        return [x.grad, *(param.grad for param in bag.parameters())]

    for one, other in zip(run(split=False), run(split=True), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_every_device(device: str) -> None:
    """On CUDA a backward runs in a thread of its own, and so does the backward within it."""
    stages, batch = stages_of("llama3")
    layer = nn.ModuleDict({"layer0": stages[1]["layer0"]}).to(device)
    batch = batch.map(lambda tensor: tensor.to(device))
    gradients = {}
    for split in (False, True):
        layer.zero_grad()
        x = (
            torch.ones(2, 8, 128, dtype=torch.float64, device=device)
            .cumsum(-1)
            .cos()
            .requires_grad_()
        )
        part = SplitBackward(layer.parameters())
        with part if split else nullcontext():
            y = chain(layer, x, batch).x
        (y**2).sum().backward()
        part.backward_weights()
        gradients[split] = [x.grad, *(param.grad for param in layer.parameters())]
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_hooks_on_parameters_run_once_in_w_in_the_order_of_the_whole_backward() -> None:
    """A tied weight too: two uses, one hook. Gradient buckets build on this."""
    orders = {}
    for split in (False, True):
        layer, batch = stages_of("gpt2")[0][1], batch_of(FAMILIES["gpt2"].Config())
        layer["layer0"].attn.k.weight = layer["layer0"].attn.q.weight
        x = torch.randn(2, 8, 128, dtype=torch.float64, requires_grad=True)
        seen: list[str] = []
        for name, param in nn.ModuleDict(layer).named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda _, name=name, seen=seen: seen.append(name)
            )
        part = SplitBackward(params_of(layer))
        with part if split else nullcontext():
            y = chain(layer, x, batch).x
        y.sum().backward()
        assert bool(seen) != split, "I touches no parameter"
        part.backward_weights()
        orders[split] = seen
    assert len(orders[True]) == len(set(orders[True]))
    assert set(orders[True]) == set(orders[False])
    matrices = [
        [name for name in order if name.endswith("weight") and "norm" not in name]
        for order in orders.values()
    ]
    assert matrices[0] == matrices[1]


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def held_bytes(holders: weakref.WeakSet[Holder], params: list[nn.Parameter]) -> int:
    """Bytes of distinct memory that saved tensors hold alive, parameters left out."""
    gc.collect()
    own = {param.untyped_storage().data_ptr() for param in params}
    storages = {
        holder.tensor.untyped_storage().data_ptr(): holder.tensor.untyped_storage()
        for holder in holders
    }
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)


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
    everything = held_bytes(holders, params)
    y.backward(torch.ones_like(y))
    del y
    tokens, kv = 2 * 8 * 8, getattr(config, "kv_heads", config.heads) * (config.dim // config.heads)
    products = 3 * config.dim + config.ffn  # normed x twice, attention's output, the MLP's middle
    assert held_bytes(holders, params) == tokens * products < 0.6 * everything
    gated = 2 if family == "llama3" else 1
    flowing = tokens * (
        3 * config.dim + 2 * kv + gated * config.ffn
    )  # dy of o, down and q; of k and v; of up (and gate)
    vectors = (
        sum(param.numel() for param in params if param.ndim == 1) * 8
    )  # gradients of norms, computed in I
    pending = {
        each.gradient.untyped_storage().data_ptr(): each.gradient.untyped_storage()
        for each in split._pending_wgrads
    }
    assert flowing <= sum(storage.nbytes() for storage in pending.values()) <= flowing + vectors
    split.backward_weights()
    assert held_bytes(holders, params) == 0
    assert not split._pending_wgrads


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_collectives_belong_to_i_and_run_once(sequence: bool) -> None:
    def rank(comm: Comm) -> tuple[dict[str, int], list[list[Tensor]]]:
        counter = Counter()
        comm = Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,))
        torch.manual_seed(0)
        options = {"comm": comm, "sequence_parallel": sequence, "dtype": torch.float64}
        column, row = ColumnParallelLinear(6, 8, **options), RowParallelLinear(8, 6, **options)
        params = [*column.parameters(), *row.parameters()]
        counts, gradients = {}, []
        for kind in ("B", "I"):
            x = torch.ones(2, 2, 6, dtype=torch.float64).cumsum(0).requires_grad_()
            split = SplitBackward(params)
            with split if kind == "I" else nullcontext():
                y = row(torch.tanh(column(x)))
            for half, act in ((kind, y.sum().backward), ("W", split.backward_weights)):
                before = counter.total().operations
                act()
                counts[half] = counter.total().operations - before
            gradients.append([x.grad, *(param.grad for param in params)])
            for param in params:
                param.grad = None
        return counts, gradients

    for counts, (whole, halves) in run_ranks("tp2", rank):
        assert counts == {"B": 1 + sequence, "I": 1 + sequence, "W": 0}
        assert all(map(torch.equal, whole, halves))


def test_every_product_is_a_function_that_the_mode_sees() -> None:
    """A name that torch resolves to another function would silently not be deferred."""
    bag, x = Bag(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    met: set[Any] = set()

    class Watch(SplitBackward):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            met.add(func)
            return super().__torch_function__(func, types, args, kwargs)

    with Watch(bag.parameters()):
        for code in CODE.values():
            code(bag, x * 1.0)
    assert {
        F.linear,
        torch.einsum,
        F.embedding,
        Tensor.index_select,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
    } <= met
    assert {F.bilinear, F.conv1d, Tensor.__getitem__, Tensor.matmul} <= met & PRODUCTS
