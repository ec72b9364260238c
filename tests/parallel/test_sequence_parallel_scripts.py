"""`weft.parallelize(sequence=...)` on plain modules: losses and gradients, of norms too, are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.comm.comm import Comm
from weft.errors import PlanError
from weft.testing import run_ranks

D, H, V, B, S = 8, 4, 12, 4, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D) for _ in range(4))
        self.q_norm = nn.LayerNorm(D // H)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // H)) for f in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.up, self.down = Attention(), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """With an embedding tied to the output, positions, and a whole head of classes on the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, D), nn.Embedding(S, D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.output = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.classes = nn.Linear(D, 3)
        self.output.weight = self.embed.weight
        self.double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return self.output(x), self.classes(x)


LINEARS = {
    "layers.*.w[qkv].weight": ("heads", None),
    "layers.*.w[qkv].bias": ("heads",),
    "layers.*.wo.weight": (None, "heads"),
    "layers.*.up.weight": ("ffn", None),
    "layers.*.up.bias": ("ffn",),
    "layers.*.down.weight": (None, "ffn"),
}
TABLES = {"embed.weight": ("vocab", None), "output.weight": ("vocab", None)}
WHERE = weft.SequenceParallel(
    modules=("layers", "norm"), regions=("*.attention",), split=("layers.0",), joined=("norm",)
)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    logits, classes = net(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    return loss + F.cross_entropy(classes.flatten(0, 1), tokens.flatten() % 3)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(step))


def train(net: nn.Module, comm: Comm | None) -> list[Tensor]:
    """Losses of the whole batch and norms of all gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    found: list[Tensor] = []
    for step in range(3):
        tokens = tokens_of(step)
        if comm is not None:
            tokens = tokens.chunk(comm.degree("dp"))[comm.index("dp")]
        optimizer.zero_grad()
        loss = loss_of(net, tokens)
        loss.backward()
        found.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()
        mean = loss.detach()
        if comm is not None:
            mean = comm.all_reduce(mean, "dp") / comm.degree("dp")
        found.append(mean)
    return found


DDP, FSDP = weft.DistributedDataParallel, weft.FullyShardedDataParallel
SLOW = pytest.mark.slow
CASES = [
    (None, {}),
    (FSDP, TABLES),
    *(
        pytest.param(*each, marks=SLOW)
        for each in ((None, TABLES), (DDP, {}), (DDP, TABLES), (FSDP, {}))
    ),
]


@pytest.mark.parametrize(("wrap", "tables"), CASES)
def test_a_transformer_trains_as_on_one_process(wrap: Any, tables: Any, tmp_path: Any) -> None:
    alone = Net()
    expected = train(alone, None)

    def rank(comm: Comm) -> list[Tensor]:
        net: Any = weft.parallelize(
            Net(),
            comm,
            {**LINEARS, **tables},
            sequence=WHERE,
            gathered=["output"] if tables else [],
        )
        assert net.embed.weight is net.output.weight
        net = net if wrap is None else wrap(net, comm)
        found = train(net, comm)
        weft.save(tmp_path / "trained", net)
        return found

    for found in run_ranks("dp2 tp2" if wrap else "tp2", rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    loaded = copy.deepcopy(alone)
    weft.load(tmp_path / "trained", loaded)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(
            loaded.get_parameter(name),
            param,
            rtol=1e-12,
            atol=1e-13,
            msg=lambda m, n=name: f"{n} {m}",
        )


def test_a_copy_of_a_sharded_module_sums_the_same_gradients() -> None:
    def rank(comm: Comm) -> None:
        net = weft.parallelize(Net(), comm, LINEARS, sequence=WHERE)
        copied = copy.deepcopy(net)
        for each in (net, copied):
            loss_of(each, tokens_of(0)).backward()
        for (name, one), other in zip(net.named_parameters(), copied.parameters(), strict=True):
            assert one.grad is not other.grad
            assert torch.equal(one.grad, other.grad), name

    run_ranks("tp2", rank)


def test_a_script_may_pass_each_rank_its_part_along_another_dim() -> None:
    """As torch's example of sequence parallelism has it: rows are the sequence, no module splits them."""
    axes = {"0.weight": ("ffn", None), "0.bias": ("ffn",), "2.weight": (None, "ffn")}
    where = weft.SequenceParallel(modules=("*",), split=(), dim=0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
    expected = plain(x)
    expected.square().sum().backward()

    def rank(comm: Comm) -> None:
        net = weft.parallelize(copy.deepcopy(plain), comm, axes, sequence=where)
        y = net(x.chunk(2)[comm.rank])
        torch.testing.assert_close(y, expected.chunk(2)[comm.rank])
        y.square().sum().backward()
        for index in (0, 2):
            for key in ("weight", "bias"):
                whole = plain[index].get_parameter(key).grad
                own = net[index].get_parameter(key).grad
                dim = next((d for d in range(own.dim()) if own.shape[d] != whole.shape[d]), None)
                part = whole if dim is None else whole.chunk(2, dim)[comm.rank]
                torch.testing.assert_close(own.as_subclass(Tensor), part, rtol=1e-12, atol=0)

    plain.zero_grad()
    plain(x).square().sum().backward()
    run_ranks("tp2", rank)


def test_what_would_train_with_other_gradients_is_one_line() -> None:
    def rank(comm: Comm) -> None:
        def sharded(axes: Any = LINEARS, **changes: Any) -> nn.Module:
            where = {"modules": WHERE.modules, "regions": WHERE.regions, "split": WHERE.split}
            how = weft.SequenceParallel(**{**where, "joined": WHERE.joined, **changes})
            return weft.parallelize(Net(), comm, axes, sequence=how)

        with pytest.raises(
            PlanError, match=r"sequence: modules: 'layer' matches no module \(got embed"
        ):
            sharded(modules=("layer",))
        with pytest.raises(
            PlanError, match=r"sequence: split: is not given, and no sharded embedd"
        ):
            sharded(split=None)
        with pytest.raises(
            PlanError, match=r"the length of the sequence does not divide \(got 5; "
        ):
            sharded()(torch.zeros(1, 5, dtype=torch.int64))
        net = sharded(modules=("layers.0", "layers.1.[!n]*", "layers.1.norm2", "norm"))
        with pytest.raises(
            PlanError, match=r"layers\.1\.norm1\.\w+ has another gradient on each rank"
        ):
            loss_of(net, tokens_of(0)).backward()
        with pytest.raises(PlanError, match="names weights alone: a bias follows its weight"):
            weft.parallelize(Net(), comm, {"layers.*.up.*": ("ffn", None)})
        with pytest.raises(
            PlanError, match=r"output\.weight: is whole, and shared with a layer that is"
        ):
            weft.parallelize(Net(), comm, {"embed.weight": ("vocab", None)})

    run_ranks("tp2", rank)
