"""What the sharding trace rejects, the entries that it lets linears share, and fused weights in checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.parallel.test_traffic import operations_by_name
from tests.parallel.test_user_models import (
    ATTENTION,
    ENDS,
    FFN,
    HEADS,
    KV_HEADS,
    MLP,
    SHAPES,
    TOLERANCE,
    VOCAB,
    D,
    InlineMLP,
    K,
    ParallelBlock,
    Shape,
    compare,
    heads,
    linear,
    micro_batches,
    plan_of,
    user_model,
)
from weft.checkpoint.state import param_values
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.core.model_config import AxisTable
from weft.core.shard import Stacked
from weft.models.common.batch import Batch, forward
from weft.models.common.experts import Dispatch, Experts
from weft.models.common.init import named_parameters
from weft.models.common.layers import Loss
from weft.models.common.moe import Choice, MoE, Router
from weft.parallel.model.fingerprint import fingerprint
from weft.parallel.model.module_copy import copied_module
from weft.parallel.tensor.dims import DimFactor, ShardingError, regroup, whole_dim
from weft.parallel.tensor.sharded_sizes import ShardedNumber, ShardedSize
from weft.testing import run_ranks

PLAIN: AxisTable = {**ATTENTION, **MLP}


class NormOverSharded(InlineMLP):
    """A norm over all features between column and row."""

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(F.rms_norm(self.up(y), (self.up(y).shape[-1],)))


class SoftmaxOverSharded(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.up(y).softmax(-1))


class GateFromOutside(InlineMLP):
    """A gate per token, computed from the residual stream, times sharded features."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(D, 1)

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.up(y) * self.gate(y).sigmoid())


class ScaleOnBothSides(InlineMLP):
    """One scale inside a region and on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def mlp(self, y: Tensor) -> Tensor:
        return self.scale * self.down(self.scale * self.up(y))


class LocalHeadConstants(InlineMLP):
    """A constant for each head, counted from the rank's own first head."""

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        q = heads(self.q(y))
        slopes = torch.arange(q.shape[2], dtype=q.dtype, device=q.device).unsqueeze(-1)
        k = heads(self.k(y))
        v = heads(self.v(y))
        return self.o(self.attend(q * slopes, k, v, batch).flatten(2))


class ScaleOfLocalWidth(InlineMLP):
    """Before, 1/16 on one device and 1/8 on two ranks."""

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.up(y) / self.up.weight.shape[0] ** 0.5)


class ScaleOfLocalHeads(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        hidden = self.up(y)
        return self.down(hidden) * (1 / hidden.size(-1))


class RootOfLocalEntries(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        return super().mlp(y) / math.sqrt(self.up.weight.numel())


class InPlace(InlineMLP):
    """Changes outputs of linears in place. Before, autograd refused: they were views."""

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.up(y).mul_(0.5).relu_()).add_(1)


class HalfOfSharded(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        up = self.up(y)
        first = up[..., : FFN // 4]
        rest = up[..., FFN // 4 :].relu()
        return self.down(torch.cat((first, rest), dim=-1))


class IndexOfSharded(InlineMLP):
    """By numbers of features that only one rank has. An index of whole dims is T5's bias in user_models."""

    def mlp(self, y: Tensor) -> Tensor:
        order = torch.arange(FFN // 2, device=y.device)
        return self.down(self.up(y)[..., order])


class ProductByHand(InlineMLP):
    """The row-parallel product without its module."""

    def mlp(self, y: Tensor) -> Tensor:
        return self.up(y) @ self.down.weight.t()


class ShardedUpdate(InlineMLP):
    """Before, each rank's buffer had the mean of its own features."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def mlp(self, y: Tensor) -> Tensor:
        hidden = self.up(y)
        weft.update_buffers(self, hidden.mean((0, 1)))
        return self.down(hidden) + self.mean

    def update_buffers(self, mean: Tensor) -> None:
        self.mean.copy_(mean.mean())


class Depthwise(InlineMLP):
    """A causal convolution of each feature with itself, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FFN, FFN, 3, groups=FFN)

    def mlp(self, y: Tensor) -> Tensor:
        x = F.pad(self.up(y).transpose(1, 2), (2, 0))
        conv = F.conv1d(x, self.conv.weight, self.conv.bias, groups=x.shape[1])
        return self.down(F.silu(conv).transpose(1, 2))


class InList(InlineMLP):
    """Calls a linear by a list. Before, the one that was replaced: its input gradient was not summed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.up, F.gelu]

    def mlp(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(y)
        return self.down(y)


class InClosure(InlineMLP):
    """An MLP as a function that closes over its modules, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        up = self.up
        self.hidden = lambda y: F.gelu(up(y) * self.scale)

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.hidden(y))


class ConvolutionOverSharded(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        x = self.up(y).transpose(1, 2)
        return self.down(F.conv1d(x, x.new_ones(FFN, x.shape[1], 1)).transpose(1, 2))


class EmbeddedValues(InlineMLP):
    """A value of each head by the token, as in nanochat."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Embedding(VOCAB, KV_HEADS * K)

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        v = heads(self.v(y)) + heads(self.values(batch.inputs))
        return self.o(self.attend(heads(self.q(y)), heads(self.k(y)), v, batch).flatten(2))


class DoubledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OwnLinear(InlineMLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = DoubledLinear(D, FFN)


class MeanOverSequence(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        return super().mlp(y) + y.mean(1, keepdim=True)


class ShiftedSequence(InlineMLP):
    def mlp(self, y: Tensor) -> Tensor:
        shifted = F.pad(y[:, :-1], (0, 0, 1, 0))
        return super().mlp(y) + shifted


REJECTED: dict[Callable[[], nn.Module], str] = {
    NormOverSharded: "rms_norm over a sharded dim",
    SoftmaxOverSharded: "softmax over a sharded dim",
    GateFromOutside: "an activation from outside a tensor-parallel region meets a sharded one",
    ScaleOnBothSides: "parameter layer0.scale is used both inside and outside tensor-parallel regions",
    LocalHeadConstants: "mul of a sharded dim with a whole one of 2 entries",
    ScaleOfLocalWidth: "div computes with the local size of a sharded dim",
    ScaleOfLocalHeads: "mul computes with the local size of a sharded dim",
    RootOfLocalEntries: "float() or math computes with the local size of a sharded dim",
    HalfOfSharded: "slice of a sharded dim",
    IndexOfSharded: "index over a sharded dim",
    ProductByHand: "sums over a sharded dim outside a row-parallel nn.Linear",
    ConvolutionOverSharded: "convolution over sharded channels",
    OwnLinear: "DoubledLinear overrides Linear.forward",
    ShardedUpdate: "a sharded value is handed to weft.update_buffers",
}


def rejection(block: Callable[[], nn.Module], layout: str, axes: AxisTable = PLAIN) -> str:
    """The message, which is one line."""
    shape = Shape(block, {**axes, "layer*.gate.weight": ("one", "embed"), "layer*.scale": ()})
    blocks = user_model(shape)

    def rank(comm: Comm) -> None:
        axes = {**ENDS, **shape.axes}
        weft.parallelize(copy.deepcopy(blocks), plan_of(layout), comm, axes=axes)

    with pytest.raises(weft.WeftError) as caught:
        run_ranks(plan_of(layout).mesh.text, rank)
    message, *rest = str(caught.value).splitlines()
    for line in rest:
        assert line.startswith("raised by rank")
    return message


@pytest.mark.parametrize("layout", ["tp2", "tp2, sequence parallel"])
@pytest.mark.parametrize("block", REJECTED, ids=lambda block: block.__name__)
def test_what_would_compute_other_numbers_on_shards_is_rejected(
    block: Callable[[], nn.Module], layout: str
) -> None:
    if block is ScaleOnBothSides and "sequence" in layout:  # both uses give partial gradients there
        shape = Shape(block, {**PLAIN, "layer*.scale": ()})
        assert compare(shape, layout) < TOLERANCE
    elif block is GateFromOutside and "sequence" in layout:
        assert "its forward fails on a rank's shards" in rejection(block, layout)
    else:
        assert REJECTED[block] in rejection(block, layout)


@pytest.mark.parametrize(
    ("block", "word"),
    [(MeanOverSequence, "mean over a sharded dim"), (ShiftedSequence, "slice of a sharded dim")],
)
def test_sequence_parallelism_rejects_what_mixes_positions_outside_regions(
    block: Callable[[], nn.Module], word: str
) -> None:
    message = rejection(block, "tp2, sequence parallel")
    assert word in message
    assert message.endswith("Fix: --parallel.sequence False")


@pytest.mark.parametrize("layout", ["tp2", "tp2, sequence parallel"])
def test_outputs_of_parallel_linears_may_be_changed_in_place(layout: str) -> None:
    assert compare(Shape(InPlace, PLAIN), layout) < TOLERANCE


@pytest.mark.parametrize("layout", ["tp2", "tp2, sequence parallel"])
@pytest.mark.parametrize(
    ("block", "axes"),
    [
        (Depthwise, {"layer*.conv.weight": ("ffn", "one", "taps"), "layer*.conv.bias": ("ffn",)}),
        (EmbeddedValues, {"layer*.values.weight": ("entry", "kv_heads")}),
        (InList, {}),
    ],
)
def test_features_may_be_convolved_looked_up_and_computed_by_a_list(
    block: Callable[[], nn.Module], axes: AxisTable, layout: str
) -> None:
    assert compare(Shape(block, {**PLAIN, **axes}), layout) < TOLERANCE


def test_a_copy_has_functions_over_its_own_modules() -> None:
    """Before, the trace of a copy followed the modules of the block: partial gradients were not summed."""
    block = InClosure().double()
    copied = copied_module(block, {})
    y = torch.randn(2, D, dtype=torch.float64)
    before = block.hidden(y)
    with torch.no_grad():
        copied.scale.fill_(3.0)
        copied.up.weight.zero_()
        copied.up.bias.fill_(1.0)
    assert torch.equal(block.hidden(y), before)
    assert torch.equal(copied.hidden(y), F.gelu(torch.full_like(before, 3.0)))
    assert fingerprint(block) is None
    assert fingerprint(InlineMLP()) is not None


def test_parameters_of_other_modules_than_the_traced_ones_are_rejected() -> None:
    message = rejection(
        InClosure, "tp2"
    )  # its blocks are copies, whose functions call the first ones
    assert "reads a parameter by something else than its modules" in message


def test_an_embedding_is_not_sharded_along_both_dims() -> None:
    axes = {**PLAIN, "layer*.values.weight": ("vocab", "kv_heads")}
    assert "sharded along both dims over tp" in rejection(EmbeddedValues, "tp2", axes)


def test_a_compiled_block_is_rejected() -> None:
    """Before, a KeyError."""
    blocks = user_model(SHAPES["inline MLP"])
    blocks["layer0"] = torch.compile(blocks["layer0"], backend="eager")

    def rank(comm: Comm) -> None:
        weft.parallelize(dict(blocks), plan_of("tp2"), comm, axes={**ENDS, **PLAIN})

    with pytest.raises(weft.WeftError, match="layer0: is compiled, and tensor parallelism"):
        run_ranks("tp2", rank)


@pytest.mark.parametrize(
    "text",
    ["s / 2", "1 / s", "2 * s", "s // 3", "-s", "s % 3", "s * 0.1", "s**-0.5", "2**-s", "round(s / 3)", "sum([s, 1])"],
)  # fmt: skip
def test_arithmetic_with_the_size_of_a_shard_stays_marked(text: str) -> None:
    size = ShardedSize(16)
    found = eval(text, {"s": size})
    assert isinstance(found, (ShardedSize, ShardedNumber))
    assert found == eval(text, {"s": 16})


class PositionsOnDefaultDevice(InlineMLP):
    """Positions made without the device of an input."""

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        q = heads(self.q(y))
        angles = torch.arange(q.shape[1], dtype=q.dtype)[:, None, None]
        k = heads(self.k(y))
        v = heads(self.v(y))
        out = self.attend(q * angles.cos(), k, v, batch)
        return self.o(out.flatten(2))


class InterleavedQKV(InlineMLP):
    """q, k and v of each head side by side in one weight, reshaped with the sizes of the input."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        out = 3 * HEADS * K
        self.qkv = linear(D, out)

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        batch_size, length, _ = y.shape
        qkv = self.qkv(y).view(batch_size, length, -1, 3 * K)
        q, k, v = qkv.chunk(3, dim=-1)
        return self.o(self.attend(q, k, v, batch).flatten(2))


class InterleavedQKVOfFixedHeads(InterleavedQKV):
    """The same with the length of the input in a size that torch itself rejects."""

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv(y)
        num_heads = qkv.shape[-1] // (3 * K)
        of_heads = qkv.view(*y.shape[:2], num_heads, 3 * K)
        q, k, v = of_heads.chunk(3, dim=-1)
        return self.o(self.attend(q, k, v, batch).flatten(2))


INTERLEAVED: AxisTable = {
    "layer*.qkv.weight": ("heads", "embed"),
    "layer*.o.weight": ("embed", "heads"),
    **MLP,
}


@pytest.mark.parametrize("layout", ["tp2", "tp2, sequence parallel"])
def test_a_tensor_on_another_device_is_rejected_with_the_call_to_change(layout: str) -> None:
    message = rejection(PositionsOnDefaultDevice, layout)
    assert "device meta. Fix: create tensors on the device of an input" in message
    assert "torch.arange(n, device=x.device)" in message


@pytest.mark.parametrize("block", [InterleavedQKV, InterleavedQKVOfFixedHeads])
def test_sizes_of_the_input_of_a_region_are_rejected_under_sequence_parallelism(
    block: Callable[[], nn.Module],
) -> None:
    assert compare(Shape(block, INTERLEAVED), "tp2") < TOLERANCE
    message = rejection(block, "tp2, sequence parallel", INTERLEAVED)
    assert "take sizes from tensors inside the region" in message
    assert "Stacked" not in message


class SmoothedLoss(Loss):
    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2), batch.targets.flatten(), reduction="sum", label_smoothing=0.1
        )


class DeclaredSmoothedLoss(SmoothedLoss):
    @property
    def requirements(self) -> frozenset[str]:
        return frozenset({"cross_entropy", "label_smoothing"})


class OwnLoss(nn.Module):
    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            SmoothedLoss,
            "loss: SmoothedLoss overrides Loss.forward without declaring its requirements",
        ),
        (
            DeclaredSmoothedLoss,
            "loss: the vocabulary-parallel loss does not support label_smoothing",
        ),
        (OwnLoss, "log_softmax over a sharded dim.*so its input must be whole: in AXES name None"),
    ],
)
def test_a_loss_that_the_vocabulary_parallel_one_does_not_compute_is_rejected(
    loss: Callable[[], nn.Module], message: str
) -> None:
    blocks = user_model(SHAPES["inline MLP"])

    def rank(comm: Comm) -> None:
        chain = {**copy.deepcopy(blocks), "loss": loss()}
        weft.parallelize(chain, plan_of("tp2"), comm, axes={**ENDS, **PLAIN})

    with pytest.raises(weft.WeftError, match=message):
        run_ranks("tp2", rank)


def test_an_embedding_that_rescales_its_rows_is_rejected() -> None:
    blocks = user_model(SHAPES["inline MLP"])
    blocks["embed"].tok.max_norm = 1.0

    def rank(comm: Comm) -> None:
        weft.parallelize(copy.deepcopy(blocks), plan_of("tp2"), comm, axes={**ENDS, **PLAIN})

    with pytest.raises(weft.WeftError, match="supports none of max_norm"):
        run_ranks("tp2", rank)


def doubled(_: nn.Module, args: tuple[Tensor, ...], *result: Tensor) -> tuple[Tensor] | Tensor:
    return 2 * result[0] if result else (2 * args[0],)


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
@pytest.mark.parametrize("path", ["layer0.up", "layer1.down", "embed.tok"])
def test_hooks_of_a_module_that_a_parallel_one_replaces_are_rejected(
    path: str, register: str
) -> None:
    """Before, they were dropped: other numbers, without an error."""
    blocks = user_model(SHAPES["inline MLP"])
    getattr(nn.ModuleDict(blocks).get_submodule(path), register)(doubled)

    def rank(comm: Comm) -> None:
        weft.parallelize(copy.deepcopy(blocks), plan_of("tp2"), comm, axes={**ENDS, **PLAIN})

    with pytest.raises(weft.WeftError, match=r"has hooks, and the parallel one") as caught:
        run_ranks("tp2", rank)
    assert str(caught.value).startswith(f"{path}.weight: ")


class CappedDispatch(Dispatch):
    def forward(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: nn.Module
    ) -> Tensor:
        first = experts_NK[:, :1]
        weights = weights_NK[:, :1]
        return super().forward(x_ND, first, weights, experts)


class DeclaredCappedDispatch(CappedDispatch):
    @property
    def requirements(self) -> frozenset[str]:
        return frozenset({"capacity"})


@pytest.mark.parametrize(
    ("dispatch", "message"),
    [
        (
            CappedDispatch,
            "mixture: CappedDispatch overrides Dispatch.forward without declaring its requirements",
        ),
        (DeclaredCappedDispatch, "expert parallelism does not support capacity"),
    ],
)
def test_a_dispatch_that_expert_parallelism_does_not_compute_is_rejected(
    dispatch: Callable[[int], nn.Module], message: str
) -> None:
    def rank(comm: Comm) -> None:
        choice = Choice(num_experts=4, top_k=2, scoring="softmax")
        mixture = MoE(router=Router(D, choice), experts=Experts(D, FFN, num_experts=4))
        mixture.dispatch = dispatch(4)
        blocks = {**user_model(SHAPES["inline MLP"]), "layer1": mixture}
        experts: AxisTable = {
            "*.experts.*": ("experts", "ffn", "embed"),
            "*.router.proj.weight": ("router", "embed"),
        }
        plan = plan_of("tp2").model_copy(update={"mesh": comm.mesh})
        weft.parallelize(blocks, plan, comm, axes={**ENDS, **PLAIN, **experts})

    with pytest.raises(weft.WeftError) as caught:
        run_ranks("ep2", rank)
    assert message.removeprefix("mixture: ") in str(caught.value)
    assert str(caught.value).startswith("layer1.dispatch: ")


def test_linears_that_read_the_same_tensor_share_one_entry() -> None:
    """q, k, v and up of a parallel block: two sums forward (o, down), one sum of input gradients
    backward.
    """
    blocks = user_model(Shape(ParallelBlock, PLAIN))
    batch = micro_batches_of_one_device()

    def rank(comm: Comm) -> dict[str, int]:
        model = weft.parallelize(
            copy.deepcopy(blocks), plan_of("tp2"), comm, axes={**ENDS, **PLAIN}
        )
        counter = Counter()
        comm.observers = (counter,)
        x = torch.randn(2, 8, D, dtype=torch.float64, requires_grad=True)
        loss = model.stages[0]["layer0"](x, batch).sum()
        loss.backward()
        return operations_by_name(counter)

    assert run_ranks("tp2", rank) == [{"all_reduce": 3}] * 2


def micro_batches_of_one_device() -> Batch:
    ranks = run_ranks("", lambda comm: micro_batches(plan_of("tp2"), comm))
    return ranks[0][0]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["inline MLP", "parallel block", "layer used twice"])
def test_entries_are_right_under_recomputation(name: str, recompute: str) -> None:
    for layout in ("tp2", "tp2, sequence parallel"):
        assert compare(name, layout, recompute=recompute) < TOLERANCE


@pytest.mark.parametrize("name", ["inline MLP", "parallel block", "fused qkv", "layer used twice"])
def test_entries_are_right_with_a_split_backward_and_several_micro_batches_in_flight(
    name: str,
) -> None:
    for layout in ("tp2", "tp2, sequence parallel"):
        assert compare(name, layout, mesh="pp2 tp2", schedule="zero_bubble") < TOLERANCE


@pytest.mark.parametrize("name", ["fused qkv", "fused gate-up"])
def test_boxes_that_a_checkpoint_gets_of_a_fused_weight_make_up_the_whole_one(name: str) -> None:
    shape = SHAPES[name]
    blocks = user_model(shape)
    whole = {param_name: param.detach() for param_name, param in named_parameters(blocks).items()}

    def rank(comm: Comm) -> list[tuple[str, object, Tensor]]:
        model = weft.parallelize(
            copy.deepcopy(blocks), plan_of("tp2"), comm, axes={**ENDS, **shape.axes}
        )
        items = [item for local in param_values(model) for item in local.write_items()]
        pieces = []
        for item in items:
            param_name = item.name.removeprefix("model/")
            pieces.append((param_name, item.box, item.tensor.clone()))
        return pieces

    found = {}
    for param_name, tensor in whole.items():
        found[param_name] = torch.full_like(tensor, torch.nan)
    for items in run_ranks("tp2", rank):
        for param_name, box, values in items:
            found[param_name][box.slices] = values
    for param_name, tensor in whole.items():
        assert torch.equal(found[param_name], tensor), param_name


@pytest.mark.parametrize("shared", ["", "up", "down"])
def test_a_block_or_linear_used_under_two_names_is_one_set_of_parameters(shared: str) -> None:
    """Before, a block's parameters were sharded twice, and the second block with a shared
    column-parallel linear had no entry to its region: its other gradients were wrong.
    """
    blocks = user_model(SHAPES["inline MLP"])
    if shared:
        setattr(blocks["layer1"], shared, getattr(blocks["layer0"], shared))
    else:
        blocks["layer1"] = blocks["layer0"]
    one_device = copy.deepcopy(blocks)
    batch = micro_batches_of_one_device()
    forward(one_device, batch).backward()
    want = {name: param.grad for name, param in named_parameters(one_device).items()}

    def rank(comm: Comm) -> float:
        model = weft.parallelize(
            copy.deepcopy(blocks), plan_of("tp2"), comm, axes={**ENDS, **PLAIN}
        )
        for name in model.params:
            assert not name.startswith(f"layer1.{shared}")
        loss = forward(model.stages[0], batch)
        loss.backward()
        differences = []
        for name, param in model.params.items():
            grad = param.grad
            if model.shards[name].reduce_axes:
                grad = comm.all_reduce(grad, "tp")
            local = want[name][model.shards[name].box.slices]
            differences.append((grad - local).abs().max().item())
        return max(differences)

    assert max(run_ranks("tp2", rank)) < TOLERANCE


def test_attention_computed_in_place_is_followed_through_its_products() -> None:
    class InPlace(InlineMLP):
        def by_head(self, y: Tensor) -> list[Tensor]:
            """q, k and v, [B, heads, S, K]."""
            projected = []
            for projection in (self.q, self.k, self.v):
                projected.append(heads(projection(y)).transpose(1, 2))
            return projected

        def attention(self, y: Tensor, batch: Batch) -> Tensor:
            q, k, v = self.by_head(y)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o(out.transpose(1, 2).flatten(2))

    class ByHand(InPlace):
        def attention(self, y: Tensor, batch: Batch) -> Tensor:
            q, k, v = self.by_head(y)
            group_size = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(group_size, dim=1)
            v = v.repeat_interleave(group_size, dim=1)
            scores = q @ k.transpose(-1, -2)
            out = scores.softmax(-1) @ v
            return self.o(out.transpose(1, 2).flatten(2))

    for block in (InPlace, ByHand):
        for layout in ("tp2", "tp2, sequence parallel"):
            assert compare(Shape(block, PLAIN), layout) < TOLERANCE
    one = {"micro_size": 1, "microbatches": 4}
    assert compare(Shape(ByHand, PLAIN), "tp2", **one) < TOLERANCE


class TwelveInterleavedHeads(InlineMLP):
    """q, k and v of each of 12 heads side by side: a third of the rows holds four whole heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = linear(D, 3 * 12 * K)
        self.o = linear(12 * K, D)

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(y).unflatten(-1, (-1, 3 * K)).chunk(3, dim=-1)
        return self.o(self.attend(q, k, v, batch).flatten(2))


class GateOfOtherOrder(InlineMLP):
    """Features of one linear times those of another, which ranks hold in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = linear(D, FFN)

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(self.up(y) * self.halves(y))


@pytest.mark.parametrize(
    ("block", "row", "message"),
    [
        (
            TwelveInterleavedHeads,
            {"layer*.qkv.weight": (Stacked(*[("heads", 12)] * 3), "embed")},
            "a row-parallel linear reads features in another order than its own",
        ),
        (
            GateOfOtherOrder,
            {"layer*.halves.weight": (Stacked(*[("ffn", FFN // 2)] * 2), "embed")},
            "mul of sharded dims that ranks hold in different orders",
        ),
    ],
)
def test_features_in_another_order_than_declared_are_rejected(
    block: Callable[[], nn.Module], row: AxisTable, message: str
) -> None:
    """Before, both were trained with other numbers."""
    assert message in rejection(block, "tp2", {**PLAIN, **row})


def test_a_view_keeps_the_dim_of_one_sequence_before_sharded_heads() -> None:
    """Before, the sharded unit was in the first dim: pairs of one sequence could not be turned."""
    for num_heads in (1, 2):
        heads = (DimFactor(num_heads, sharded=True),)
        pairs = (whole_dim(1), heads, whole_dim(8), whole_dim(4), whole_dim(2))
        turned = regroup(pairs, (1, num_heads, 8, 8), inferred=None, name="view")
        assert turned[:2] == (whole_dim(1), heads)


def test_a_product_of_one_sequence_keeps_its_heads_sharded() -> None:
    """Before, [H, S, K] as [1, H, S, K] had the sharded unit in the new dim: rejected later."""
    for num_heads in (1, 4):
        x = ((DimFactor(num_heads, sharded=True),), whole_dim(8), whole_dim(3))
        assert regroup(x, (1, num_heads, 8, 3), inferred=None, name="view") == (whole_dim(1), *x)
    bias = ((DimFactor(8, sharded=True),),)
    by_head = ((DimFactor(1, sharded=True),), whole_dim(8))
    assert regroup(bias, (1, 8), inferred=0, name="view") == by_head


def test_the_parts_of_one_head_are_no_units() -> None:
    """Rows of q, k and v of each head, of which a rank has one: the three were taken for the heads."""
    x = (whole_dim(2), whole_dim(8), (DimFactor(48, sharded=True),))
    _, _, *by_parts = regroup(x, (2, 8, 1, 3, 16), inferred=None, name="view")
    assert by_parts == [(DimFactor(1, sharded=True),), whole_dim(3), whole_dim(16)]
    _, _, *inferred = regroup(x, (2, 8, 1, 3, 16), inferred=3, name="view")
    assert inferred[0] == whole_dim(1)


def test_two_dims_of_one_entry_before_a_unit_are_rejected_unless_one_is_inferred() -> None:
    """A softmax over the rank's heads was accepted where the other dim was taken for them: all ones."""
    x = (whole_dim(2), whole_dim(8), (DimFactor(4, sharded=True),))
    with pytest.raises(ShardingError, match="two dims of 1, one of which counts the rank's units"):
        regroup(x, (2, 8, 1, 1, 4), inferred=None, name="view")
    head = (DimFactor(1, sharded=True),)
    for place, units in ((2, (head, whole_dim(1))), (3, (whole_dim(1), head))):
        found = regroup(x, (2, 8, 1, 1, 4), inferred=place, name="view")
        assert found[2:] == (*units, whole_dim(4))
    of_one_token = (whole_dim(2), whole_dim(1), (DimFactor(4, sharded=True),))
    _, token, *unit = regroup(
        of_one_token, (2, 1, 1, 4), inferred=None, name="view", has_tokens=True
    )
    assert [token, *unit] == [whole_dim(1), head, whole_dim(4)]


def test_a_view_that_infers_another_dim_than_the_sharded_one_is_rejected() -> None:
    """view(B, -1, heads, size) by the number of all heads takes half of the sequence for them."""
    x = (whole_dim(2), whole_dim(8), (DimFactor(16, sharded=True),))
    with pytest.raises(ShardingError, match="view infers another dim than the sharded one"):
        regroup(x, (2, 4, 4, 8), inferred=1, name="view")
    sharded_heads = (DimFactor(2, sharded=True),)
    by_heads = (whole_dim(2), whole_dim(8), sharded_heads, whole_dim(8))
    assert regroup(x, (2, 8, 2, 8), inferred=2, name="view") == by_heads
    assert regroup(x, (2, 8, 2, 8), inferred=1, name="view") == by_heads


def test_a_view_that_drops_ones_from_the_end_keeps_the_other_dims() -> None:
    """An einsum over one sequence views [1, H, S, S, 1] as [1, H, S, S]: the unit was in dim 0."""
    for num_heads in (1, 2):
        kept = (whole_dim(1), (DimFactor(num_heads, sharded=True),), whole_dim(8), whole_dim(8))
        sizes = (1, num_heads, 8, 8)
        for dropped in ((), (whole_dim(1),)):
            assert regroup((*kept, *dropped), sizes, inferred=None, name="view") == kept
            assert regroup((*kept, *dropped), sizes, inferred=1, name="view") == kept
