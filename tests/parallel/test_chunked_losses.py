"""Losses of a head chunk by chunk equal those of whole logits, forward and backward, also of a sharded vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.config.load import load
from weft.config.run import has_chunked_losses, plan_of
from weft.core.axes import span
from weft.models import FAMILIES
from weft.models.common import compiler, head_output
from weft.models.common.batch import IGNORE
from weft.models.common.head_output import (
    LOGITS,
    ChunkedLosses,
    WholeVocabulary,
    chunk_length,
    use_plain_losses,
)
from weft.models.common.layers import Loss
from weft.parallel.model.chunked_losses import most_in_flight
from weft.parallel.tensor.linear import ColumnParallelLinear
from weft.start.prove_run import prove_config
from weft.testing import run_ranks

VOCAB, DIM = 37, 8
FLOAT64 = [
    word for key in ("params", "compute", "reduce") for word in (f"--precision.{key}", "float64")
]


class Case:
    """A product x W^T + b of some dtype and targets, of which some do not count."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(3)
        self.x = torch.randn(2, 13, DIM, dtype=dtype, requires_grad=True)
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(VOCAB, dtype=dtype))
        self.targets = torch.randint(0, VOCAB, (2, 13))
        self.targets[0, 3:6] = IGNORE
        self.targets[1] = IGNORE

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.weight, self.bias

    def plain(self) -> Tensor:
        """losses_BS from whole logits."""
        logits = F.linear(self.x, self.weight, self.bias)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        losses = F.cross_entropy(
            wide, self.targets.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return losses.view(self.targets.shape)

    def chunked(self, *, is_ahead: bool, is_compiled: bool = False) -> Tensor:
        """losses_BS chunk by chunk."""
        output = ChunkedLosses(WholeVocabulary(), is_ahead, is_compiled=is_compiled)
        return output.losses(*self.operands, self.targets)


def of_sum(losses: Tensor) -> Tensor:
    return 0.3 * losses.sum()


def weighted(losses: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype)
    return (losses * weights.view(losses.shape)).sum()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduced", [of_sum, weighted])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_losses_and_gradients_equal_those_of_whole_logits(
    monkeypatch, is_ahead, reduced, has_bias, is_compiled
):
    """With a bias the gradient of logits has the weights of rows; without one x and dx get them."""
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    head_output._compiled.cache_clear()
    case = Case()
    case.bias.requires_grad_(has_bias)
    want = case.plain()
    got = case.chunked(is_ahead=is_ahead, is_compiled=is_compiled)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    operands = [each for each in case.operands if each.requires_grad]
    want_grads = torch.autograd.grad(reduced(want), operands)
    loss = reduced(got)
    for _ in range(2):  # the second backward finds no gradients of the forward
        grads = torch.autograd.grad(loss, operands, retain_graph=True)
        torch.testing.assert_close(grads, want_grads, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_gradients_are_as_close_as_those_of_whole_logits(dtype, is_ahead):
    """Where W gets rows of zeros, since 37 entries are no multiple of 8."""
    case, exact = Case(dtype), Case()
    exact.targets = case.targets
    for operand, param in zip(exact.operands, case.operands, strict=True):
        operand.data = param.data.double()
    want = torch.autograd.grad(of_sum(exact.plain()), exact.operands)
    plain = torch.autograd.grad(of_sum(case.plain()), case.operands)
    chunked = torch.autograd.grad(of_sum(case.chunked(is_ahead=is_ahead)), case.operands)
    for right, one, other in zip(want, plain, chunked, strict=True):
        assert (one.double() - right).norm() <= 0.02 * right.norm()
        bound = 2 * (one.double() - right).norm() + 2**-9 * right.norm()
        assert (other.double() - right).norm() <= bound


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch):
    case = Case()
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    (want,) = torch.autograd.grad(of_sum(case.plain()), case.x)
    monkeypatch.setattr(torch.Tensor, "addmm_", None)
    (got,) = torch.autograd.grad(of_sum(case.chunked(is_ahead=True)), case.x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_no_whole_logits_are_allocated(is_ahead, monkeypatch):
    monkeypatch.setattr(head_output, "CHUNK_BYTES", 4 * 512 * 8)
    length = chunk_length(600, vocab=512, dim=16)
    assert length == 8
    sizes: list[int] = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in (out,) if isinstance(each, Tensor))
            return out

    x = torch.randn(1, 600, 16, requires_grad=True)
    weight = nn.Parameter(torch.randn(512, 16))
    targets = torch.randint(0, 512, (1, 600))
    with Noted():
        losses = ChunkedLosses(WholeVocabulary(), is_ahead).losses(x, weight, None, targets)
        losses.sum().backward()
    assert max(sizes) == 600 * 16  # x itself; whole logits have 600 * 512


def test_a_target_outside_the_vocabulary_is_rejected():
    case = Case()
    case.targets[0, 0] = VOCAB
    with pytest.raises(IndexError, match="a target is outside the vocabulary of 37"):
        case.chunked(is_ahead=True)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mesh", ["tp2", "tp4"])
def test_of_a_sharded_vocabulary(mesh, sequence, is_ahead):
    case = Case()
    case.x = case.x[:, :12].detach().requires_grad_()
    case.targets = case.targets[:, :12]
    want = case.plain()
    want_grads = torch.autograd.grad(of_sum(want), case.operands)

    def rank(comm: Comm):
        degree, index = comm.degree("tp"), comm.index("tp")
        lo, hi = span(VOCAB, degree, index)
        proj = ColumnParallelLinear(
            DIM, VOCAB, comm=comm, sequence_parallel=sequence, dtype=torch.float64
        )
        proj.weight.data, proj.bias.data = case.weight.data[lo:hi], case.bias.data[lo:hi]
        x = case.x.detach()
        if sequence:
            x = x.chunk(degree, 1)[index]
        x = x.clone().requires_grad_()
        shard = proj.vocabulary()
        x_BSD, weight = shard.operands(proj, x)
        losses = ChunkedLosses(shard, is_ahead).losses(x_BSD, weight, proj.bias, case.targets)
        of_sum(losses).backward()
        return losses.detach(), x.grad, proj.weight.grad, proj.bias.grad

    ranks = run_ranks(mesh, rank)
    for losses, *_ in ranks:
        torch.testing.assert_close(losses, want.detach(), rtol=1e-13, atol=1e-13)
    _, dx, d_weight, d_bias = zip(*ranks, strict=True)
    whole_dx = torch.cat(dx, 1) if sequence else dx[0]
    grads = (whole_dx, torch.cat(d_weight), torch.cat(d_bias))
    torch.testing.assert_close(grads, want_grads, rtol=1e-12, atol=1e-13)


def test_a_sharded_vocabulary_sends_three_numbers_a_token():
    def rank(comm: Comm) -> dict[str, tuple[int, int]]:
        proj = ColumnParallelLinear(4, 500, comm=comm, bias=False)
        x = torch.randn(1, 10, 4)
        counter = Counter()
        comm.observers = (counter,)
        shard = proj.vocabulary()
        targets = torch.zeros(1, 10, dtype=torch.int64)
        losses = ChunkedLosses(shard, True).losses(x, proj.weight, None, targets)
        losses.sum().backward()
        return {
            op: (traffic.operations, traffic.payload_bytes)
            for (_, op), traffic in counter.traffic.items()
        }

    want = {"all_reduce": (2 * 3, 4 * 3 * 10)}
    assert run_ranks("tp2", rank) == [want, want]


@pytest.mark.parametrize(
    "words",
    [
        "--mesh tp2 --parallel.sequence True",
        "--mesh pp2 --model.name gpt2",
        "--mesh cp2 --data.packing documents",
        "--mesh dp2 --parallel.zero 3",
        "--mesh tp2 --model.name deepseek --model.mtp_depth 1",
        "--mesh pp2 --pipeline.schedule zero_bubble",
        "--mesh dp2 --pipeline.schedule gpipe --loss dpo",
        "--mesh tp2 --lora.rank 2 --lora.targets proj",
        "--mesh dp2 --model.name hf:qwen2",
    ],
)
def test_layouts_equal_one_device(words):
    run = load([*words.split(), *FLOAT64, "--parallel.logits", "chunked"], FAMILIES)
    report = prove_config(run, steps=1)
    assert report.holds, "\n".join(report.lines())


def run_of(*words: str):
    return load(["--model.preset", "llama3-8b", "--data.seq_len", "8192", *words], FAMILIES)


@pytest.mark.parametrize(
    ("words", "is_chunked"),
    [
        (("--batch.micro_size", "1"), True),
        (("--batch.micro_size", "1", "--mesh", "cp4"), False),  # fewer tokens a rank than dim
        (("--batch.micro_size", "1", "--parallel.logits", "whole"), False),
        (("--model.vocab", "256", "--batch.micro_size", "1"), False),
        (("--data.seq_len", "1024", "--batch.micro_size", "1"), False),
    ],
)
def test_large_logits_are_chunked(words, is_chunked):
    run = run_of(*words)
    assert has_chunked_losses(run) == is_chunked
    assert plan_of(run).chunked_losses == is_chunked


def test_gradients_are_held_only_where_one_micro_batch_is_in_flight():
    tables = {
        name: plan_of(
            run_of("--mesh", "pp2", "--pipeline.schedule", name, "--batch.micro_size", "1")
        ).table
        for name in ("1f1b", "gpipe")
    }
    assert most_in_flight(tables["1f1b"], 1) == 1
    assert most_in_flight(tables["gpipe"], 1) == tables["gpipe"].microbatches > 1


def test_a_loss_of_another_class_gets_logits():
    class Summed(Loss):
        def forward(self, logits: Tensor, batch: object) -> Tensor:
            return logits.sum()

    blocks = FAMILIES["llama3"].blocks(load([], FAMILIES).model)
    head = blocks["head"]
    use_plain_losses({"head": head, "loss": Summed()})
    assert head.head_output is LOGITS
    use_plain_losses(blocks)
    assert head.head_output is not LOGITS
