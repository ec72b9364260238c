"""A user's own blocks under every kind of layout: each shape equals one device within 1e-9, or is rejected in one line.

`python -m tests.parallel.test_user_models` prints the table of shapes and layouts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.sampling import sampled_pairs
from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.core.model_config import AxisTable
from weft.core.shard import Stacked
from weft.layout.plan import Plan, Stage
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.common.init import named_parameters
from weft.models.common.layers import Embed, Head, Loss, RegionInput
from weft.parallel.model.parallelize import read_shard
from weft.parallel.pipeline.player import Player
from weft.parallel.zero.grouping import make_gradient_reducer
from weft.testing import run_ranks

D, HEADS, KV_HEADS, K, FFN, VOCAB, S = 16, 4, 2, 4, 24, 19, 8
TOLERANCE = 1e-9

ATTENTION: AxisTable = {
    "layer*.q.weight": ("heads", "embed"),
    "layer*.[kv].weight": ("kv_heads", "embed"),
    "layer*.o.weight": ("embed", "heads"),
}
MLP: AxisTable = {
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
}
ENDS: AxisTable = {
    "embed.tok.weight": ("vocab", "embed"),
    "*norm.weight": ("norm",),
    "head.proj.weight": ("vocab", "embed"),
}


def linear(into: int, out: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(into, out, bias=bias)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, K))


class InlineMLP(nn.Module):
    """Attention in place, then an MLP in place: both regions begin in one module, each at its own
    norm.
    """

    def __init__(self, *, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(D)
        self.mlp_norm = nn.RMSNorm(D)
        self.q, self.k, self.v = (
            linear(D, HEADS * K),
            linear(D, kv_heads * K),
            linear(D, kv_heads * K),
        )
        self.o, self.up, self.down = (
            linear(HEADS * K, D),
            linear(D, FFN, bias=True),
            linear(FFN, D, bias=True),
        )
        self.attend = Attend()

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        return self.o(
            self.attend(heads(self.q(y)), heads(self.k(y)), heads(self.v(y)), batch).flatten(2)
        )

    def mlp(self, y: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(y)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attn_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class ParallelBlock(InlineMLP):
    """Attention and MLP read the same norm and are added together (GPT-J, PaLM)."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attn_norm(x)
        return x + self.attention(y, batch) + self.mlp(y) + 0.1 * self.mlp_norm(x)


class FusedQKV(InlineMLP):
    """q, k and v in one weight, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        out = (HEADS + 2 * KV_HEADS) * K
        self.qkv = linear(D, out)

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv(y)
        unit = qkv.shape[-1] // (HEADS + 2 * KV_HEADS)
        kv_width = KV_HEADS * unit
        q, k, v = qkv.split((HEADS * unit, kv_width, kv_width), dim=-1)
        out = self.attend(heads(q), heads(k), heads(v), batch)
        return self.o(out.flatten(2))


class FusedGateUp(InlineMLP):
    """gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = linear(D, 2 * FFN)
        del self.up

    def mlp(self, y: Tensor) -> Tensor:
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class UsedTwice(InlineMLP):
    """The same MLP twice in one forward: on different tensors, and its first linear once more on
    the same one.
    """

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attn_norm(x), batch)
        y = self.mlp_norm(x)
        x = x + self.mlp(y)
        side = self.down(torch.tanh(self.up(y)))
        return x + self.mlp(self.mlp_norm(x)) + side


class PerHeadBias(InlineMLP):
    """One slope per head of distance in the scores, one vector per head on q, and a norm shared by
    all heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.1, 0.4, HEADS))
        self.q_bias = nn.Parameter(0.1 * torch.randn(HEADS, K))
        self.q_norm = nn.RMSNorm(K)
        self.attend = Attend(head_bias=self.slope)

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        q = self.q_norm(heads(self.q(y)) + self.q_bias)
        k = heads(self.k(y))
        v = heads(self.v(y))
        return self.o(self.attend(q, k, v, batch).flatten(2))


class SingleKVHead(InlineMLP):
    """Multi-query attention: one key/value head."""

    def __init__(self) -> None:
        super().__init__(kv_heads=1)


class DeclaredSingleKVHead(SingleKVHead):
    """The same, with k and v whole on every rank, inside a declared region."""

    def __init__(self) -> None:
        super().__init__()
        self.region_input = RegionInput()

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        return super().attention(self.region_input(y), batch)


class DeclaredWholeKV(InlineMLP):
    """Grouped heads of keys and values, whole on every rank, inside a declared region."""

    def __init__(self) -> None:
        super().__init__()
        self.region_input = RegionInput()

    def attention(self, y: Tensor, batch: Batch) -> Tensor:
        return super().attention(self.region_input(y), batch)


class ResidualScale(InlineMLP):
    """A learned scale of each residual branch, beside parameters that act inside the same module's
    regions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7, 1.3]))
        self.k_norm = nn.RMSNorm(K)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.attn_norm(x)
        q = heads(self.q(y))
        k = self.k_norm(heads(self.k(y)))
        v = heads(self.v(y))
        attended = self.attend(q, k, v, batch)
        attn_scale = self.scale[0]
        mlp_scale = self.scale[1]
        x = x + attn_scale * self.o(attended.flatten(2))
        return x + mlp_scale * self.mlp(self.mlp_norm(x))


@dataclass(frozen=True)
class Shape:
    """A user's block and its axis table."""

    block: Callable[[], nn.Module]
    axes: AxisTable


QKV = Stacked(("heads", HEADS), ("kv_heads", KV_HEADS), ("kv_heads", KV_HEADS))
WHOLE_KV: AxisTable = {**ATTENTION, "layer*.[kv].weight": ("kv", "embed")}
SHAPES = {
    "inline MLP": Shape(InlineMLP, {**ATTENTION, **MLP}),
    "parallel block": Shape(ParallelBlock, {**ATTENTION, **MLP}),
    "fused qkv": Shape(
        FusedQKV,
        {"layer*.qkv.weight": (QKV, "embed"), "layer*.o.weight": ("embed", "heads"), **MLP},
    ),
    "fused gate-up": Shape(
        FusedGateUp,
        {
            **ATTENTION,
            **MLP,
            "layer*.gate_up.weight": (Stacked(("ffn", FFN), ("ffn", FFN)), "embed"),
        },
    ),
    "layer used twice": Shape(UsedTwice, {**ATTENTION, **MLP}),
    "per-head bias": Shape(
        PerHeadBias,
        {
            **ATTENTION,
            **MLP,
            "layer*.slope": ("heads",),
            "layer*.attend.head_bias": ("heads",),
            "layer*.q_bias": ("heads", "head_size"),
        },
    ),
    "one key/value head": Shape(SingleKVHead, {**ATTENTION, **MLP}),
    "one key/value head, whole": Shape(SingleKVHead, {**WHOLE_KV, **MLP}),
    "one key/value head, declared": Shape(DeclaredSingleKVHead, {**WHOLE_KV, **MLP}),
    "several key/value heads, whole, declared": Shape(DeclaredWholeKV, {**WHOLE_KV, **MLP}),
    "residual scale": Shape(ResidualScale, {**ATTENTION, **MLP, "layer*.scale": ("branch",)}),
    "undeclared fused qkv": Shape(
        FusedQKV,
        {"layer*.qkv.weight": ("heads", "embed"), "layer*.o.weight": ("embed", "heads"), **MLP},
    ),
    "undeclared fused gate-up": Shape(
        FusedGateUp, {**ATTENTION, **MLP, "layer*.gate_up.weight": ("ffn", "embed")}
    ),
}
LAYOUTS = {
    "tp2": ("tp2", False, 0),
    "tp2, sequence parallel": ("tp2", True, 0),
    "cp2": ("cp2", False, 0),
    "pp2": ("pp2", False, 0),
    "dp2, ZeRO 3": ("dp2", False, 3),
}
REJECTED = {
    "one key/value head": "its forward fails on a rank's shards",
    "one key/value head, whole": "an activation from outside a tensor-parallel region meets a sharded one",
    "undeclared fused qkv": "no parts of a Stacked axis",
    "undeclared fused gate-up": "no parts of a Stacked axis",
}
"""Shapes that tensor parallelism rejects, and a word of the message."""


def user_model(shape: Shape) -> dict[str, nn.Module]:
    torch.manual_seed(3)
    blocks = {
        "embed": Embed(VOCAB, D),
        "layer0": shape.block(),
        "layer1": shape.block(),
        "head": Head(nn.RMSNorm(D), linear(D, VOCAB)),
        "loss": Loss(),
    }
    return {name: block.double() for name, block in blocks.items()}


def whole_batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (4, S + 1), generator=generator)
    return token_batch(tokens[:, :-1], tokens[:, 1:])


def plan_of(layout: str, mesh_text: str | None = None) -> Plan:
    text, sequence_parallel, zero = LAYOUTS[layout]
    mesh = Mesh.parse(mesh_text or text)
    names = ("embed", "layer0", "layer1", "head", "loss")
    is_cut = mesh.degree("pp") == 2
    cuts = (names[:2], names[2:]) if is_cut else (names,)
    out = ("batch", "seq", D)
    return Plan(
        mesh=mesh,
        family="custom",
        architecture="{}",
        stages=tuple(
            Stage(blocks=cut, out=() if cut is cuts[-1] else out, flops=1.0) for cut in cuts
        ),
        microbatches=2,
        micro_size=1 if text == "dp2" else 2,
        seq_len=S,
        sequence_parallel=sequence_parallel,
        zero=zero,
        params="float64",
        compute="float64",
        reduce="float64",
    )


def on_one_device(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    blocks = user_model(shape)
    loss = forward(blocks, whole_batch())
    loss.backward()
    gradients = {name: param.grad for name, param in named_parameters(blocks).items()}
    return loss.item(), gradients


def micro_batches(plan: Plan, comm: Comm) -> list[Batch]:
    local = whole_batch().columns(index=comm.index("cp"), degree=comm.degree("cp"))
    first = comm.index("dp") * plan.microbatches * plan.micro_size
    batches: list[Batch] = []
    for i in range(plan.microbatches):
        start = first + i * plan.micro_size
        rows = slice(start, start + plan.micro_size)
        batches.append(local.rows(rows))
    return batches


def relative_error(actual: Tensor, expected: Tensor, *, scale: Tensor) -> float:
    """The largest difference, relative to the largest entry of `scale`."""
    difference = (actual - expected).abs().max()
    return (difference / scale.abs().max()).item()


@dataclass(frozen=True)
class RankDifference:
    """How far the loss and the gradients of a rank are from those of one device; what it holds."""

    worst: float
    names: set[str]


def compare(of: str | Shape, layout: str, *, mesh: str | None = None, **options: object) -> float:
    """Largest difference between the layout and one device, over the loss and all gradients.

    `mesh` and `options` replace those of the layout's plan.
    """
    shape = SHAPES[of] if isinstance(of, str) else of
    plan = plan_of(layout, mesh).model_copy(update=options)
    loss, grads = on_one_device(shape)
    blocks = user_model(shape)  # not on the ranks: threads share the random state

    def rank(comm: Comm) -> RankDifference:
        axes = {**ENDS, **shape.axes}
        model = weft.parallelize(copy.deepcopy(blocks), plan, comm, axes=axes)
        reducer = make_gradient_reducer(model)
        player = Player(model, before_last_backward=reducer.set_requires_gradient_sync)
        reducer.zero_grad()
        one = torch.tensor(1.0, dtype=torch.float64)
        played = player.play(micro_batches(plan, comm), one)
        reducer.finish()
        found = comm.all_reduce(played.loss.detach(), ("dp", "cp", "pp"))
        worst = abs(found.item() - loss) / abs(loss)
        full_gradients = reducer.full_gradients()
        for name, grad in full_gradients.items():
            whole = grads[name]
            shard = model.shards[name].shard
            want = read_shard(lambda box, whole=whole: whole[box.slices], shard)
            error = relative_error(grad, want, scale=whole)
            worst = max(worst, error)
        return RankDifference(worst, set(full_gradients))

    ranks = run_ranks(plan.mesh.text, rank)
    held: set[str] = set()
    for each in ranks:
        held |= each.names
    assert held == names_of_owners(shape), "a parameter has no gradient anywhere"
    return max(each.worst for each in ranks)


def names_of_owners(shape: Shape) -> set[str]:
    """Names of the parameters, of a shared one its first."""
    owners = {}
    params = named_parameters(user_model(shape))
    for name, param in reversed(params.items()):
        owners[id(param)] = name
    return set(owners.values())


@pytest.mark.parametrize(("name", "layout"), sampled_pairs(list(SHAPES), list(LAYOUTS)))
def test_user_model_equals_one_device_or_is_rejected_in_one_line(name: str, layout: str) -> None:
    if layout.startswith("tp") and name in REJECTED:
        with pytest.raises(weft.WeftError) as caught:
            compare(name, layout)
        message = str(caught.value).splitlines()[0]
        assert "cannot be sharded over tp" in message
        assert REJECTED[name] in message
    else:
        assert compare(name, layout) < TOLERANCE


def main() -> None:
    """Print the table of shapes and layouts."""
    cells = [f"{layout:>24}" for layout in LAYOUTS]
    print(f"{'':30}" + "".join(cells))  # noqa: T201 - the table
    for name in SHAPES:
        cells = []
        for layout in LAYOUTS:
            try:
                cells.append(f"{compare(name, layout):.1e}")
            except weft.WeftError:
                cells.append("rejected")
        print(f"{name:30}" + "".join(f"{cell:>24}" for cell in cells))  # noqa: T201 - the table


if __name__ == "__main__":
    main()
