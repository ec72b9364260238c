"""`weft.PipelineParallel` around plain modules."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.errors import DataError, PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.pipeline.module import PipelineParallel
from weft.parallel.zero.fsdp import FullyShardedDataParallel
from weft.testing import run_ranks


def chain() -> list[nn.Module]:
    torch.manual_seed(3)
    widths = (6, 10, 7, 9, 5, 4)
    return [
        nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in itertools.pairwise(widths)
    ]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(24, 6, dtype=torch.float64, generator=generator),
        torch.randn(24, 4, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks"),
    [
        ("pp2", "1f1b", 1),
        ("pp5", "gpipe", 1),
        ("pp2 dp2", "1f1b", 1),
        ("pp2", "interleaved", 2),
        ("dp3", "1f1b", 1),
        ("pp2", "interleaved", None),
        ("pp2 dp2", "zero_bubble", None),
        ("pp2", "zbv", None),
        ("pp2", "dual_pipe_v", None),
    ],
)
def test_pipeline_of_plain_modules_has_the_gradients_of_one_process(
    mesh: str, schedule: str, chunks: int | None
) -> None:
    blocks, (x, y) = chain(), data()
    whole = nn.Sequential(*copy.deepcopy(blocks))
    loss = nn.functional.mse_loss(whole(x), y)
    loss.backward()
    want = dict(whole.named_parameters())

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        num_parts = comm.degree("dp")
        own = comm.index("dp")
        mine = [part.chunk(num_parts)[own] for part in (x, y)]
        pipe = PipelineParallel(
            copy.deepcopy(blocks),
            comm,
            loss=nn.functional.mse_loss,
            example=x[:2],
            microbatches=len(mine[0]) // 2,
            schedule=schedule,
            chunks=chunks,
        )
        value = pipe.step(mine[0], mine[1]).item()
        return value, {
            name.replace(".module", ""): p.grad
            for name, p in pipe.model.params.items()
            if p.grad is not None
        }

    seen: set[str] = set()
    for value, grads in run_ranks(mesh, rank):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name].grad, rtol=1e-11, atol=1e-15)
            seen.add(name)
    assert seen == set(want)


class Tokens(nn.Module):
    """An embedding and a layer: token ids in, activations out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embed(tokens)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [("", "1f1b"), ("pp2", "1f1b"), ("pp2 dp2", "zero_bubble"), ("pp2", "zbv")],
)
def test_inputs_may_be_token_ids(mesh: str, schedule: str) -> None:
    torch.manual_seed(3)
    blocks = [
        Tokens().double(),
        *(nn.Linear(4, 4).double() for _ in range(3)),
        nn.Linear(4, 7).double(),
    ]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (8, 6), generator=generator)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    whole = nn.Sequential(*copy.deepcopy(blocks))
    loss = cross_entropy(whole(inputs), targets)
    loss.backward()
    want = {name: param.grad for name, param in whole.named_parameters()}

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        own = []
        for part in (inputs, targets):
            own.append(part.chunk(comm.degree("dp"))[comm.index("dp")])
        pipe = PipelineParallel(
            copy.deepcopy(blocks),
            comm,
            loss=cross_entropy,
            example=inputs[:2],
            microbatches=len(own[0]) // 2,
            schedule=schedule,
        )
        value = pipe.step(own[0], own[1]).item()
        return value, {
            name.replace(".module", "", 1): param.grad for name, param in pipe.model.params.items()
        }

    seen = set()
    for value, grads in run_ranks(mesh, rank):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-11, atol=1e-15)
        seen.update(grads)
    assert seen == set(want)


def masked_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the targets that are no padding, and their number."""
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    return total, (targets >= 0).sum()


def padded(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids of 8 rows, and targets of which rows have 0 to 5."""
    tokens = torch.randint(0, 7, (8, 6), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate((5, 1, 2, 5, 0, 0, 3, 1)):
        targets[row, length:] = -1
    return tokens[:, :-1], targets


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [("", "1f1b"), ("pp2", "1f1b"), ("pp2 dp2", "zero_bubble"), ("pp2", "zbv")],
)
def test_sums_of_unequal_numbers_of_targets_are_divided_once(mesh: str, schedule: str) -> None:
    torch.manual_seed(3)
    middle = [nn.Linear(4, 4).double() for _ in range(3)]
    blocks = [Tokens().double(), *middle, nn.Linear(4, 7).double()]
    inputs, targets = padded(torch.Generator().manual_seed(1))
    whole = nn.Sequential(*copy.deepcopy(blocks))
    total, count = masked_sum(whole(inputs), targets)
    loss = total / count
    loss.backward()
    want = {name: param.grad for name, param in whole.named_parameters()}

    def rank(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        own = [part.chunk(comm.degree("dp"))[comm.index("dp")] for part in (inputs, targets)]
        pipe = PipelineParallel(
            copy.deepcopy(blocks),
            comm,
            loss=masked_sum,
            example=inputs[:2],
            microbatches=len(own[0]) // 2,
            schedule=schedule,
        )
        losses = [pipe.step(own[0], own[1]).item() for _ in range(2)]
        return losses, {
            name.replace(".module", "", 1): param.grad for name, param in pipe.model.params.items()
        }

    for losses, grads in run_ranks(mesh, rank):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-11, atol=1e-15)


def test_a_step_without_a_target_has_no_gradient_and_a_loss_of_some_counts_is_rejected() -> None:
    inputs = torch.randint(0, 7, (4, 5))

    def some(logits: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        total, count = masked_sum(logits, targets)
        return (total, count) if int(count) else total

    def rank(comm: Comm) -> None:
        for loss in (masked_sum, some):
            pipe = PipelineParallel(
                [Tokens(), nn.Linear(4, 7)], comm, loss=loss, example=inputs[:2], microbatches=2
            )
            if loss is masked_sum:
                assert pipe.step(inputs, torch.full_like(inputs, -1)).item() == 0
                assert all(not param.grad.any() for param in pipe.parameters())
            else:
                targets = torch.full_like(inputs, -1)
                targets[0] = 1
                with pytest.raises(
                    PlanError, match=r"some micro-batches alone \(got none for 1 of 2"
                ):
                    pipe.step(inputs, targets)

    run_ranks("pp2", rank)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
@pytest.mark.parametrize("backwards", [1, 2])
def test_the_global_mean_of_padded_batches_is_that_of_one_process(
    wrapper: type[nn.Module], backwards: int
) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(Tokens().double(), nn.Linear(4, 7).double())
    inputs, targets = padded(torch.Generator().manual_seed(1))
    whole = copy.deepcopy(module)
    total, count = masked_sum(whole(inputs), targets)
    loss = total / count
    loss.backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()

    def rank(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        net = wrapper(copy.deepcopy(module), comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        x, y = (part.chunk(4)[comm.rank] for part in (inputs, targets))
        own_count = (y >= 0).sum()
        value = 0.0
        for number, (xs, ys) in enumerate(zip(x.chunk(backwards), y.chunk(backwards), strict=True)):
            is_last = number == backwards - 1
            with nullcontext() if is_last else net.no_sync():
                sum_here, _ = masked_sum(net(xs), ys)
                part = net.global_mean(sum_here, own_count)
                part.backward()
                value += part.item()
        net.finish_gradient_synchronization()
        optimizer.step()
        return value, net.full_state_dict()

    for value, state in run_ranks("dp4", rank):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, expected in whole.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-11, atol=1e-14)


class PartlyUsed(nn.Module):
    """A linear that every rank uses, one that the first data rank uses, one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.uses_first = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.first(x) if self.uses_first else y


@pytest.mark.parametrize("mesh", ["", "pp2", "dp2", "pp2 dp2"])
def test_parameters_that_no_rank_used_have_no_gradient(mesh: str) -> None:
    torch.manual_seed(3)
    blocks = [PartlyUsed().double(), nn.Linear(4, 4).double()]
    x = torch.randn(8, 4, dtype=torch.float64)

    def rank(comm: Comm) -> list[dict[str, Tensor | None]]:
        own = copy.deepcopy(blocks)
        own[0].uses_first = comm.index("dp") == 0
        pipe = PipelineParallel(
            own, comm, loss=nn.functional.mse_loss, example=x[:2], microbatches=2
        )
        steps = []
        for _ in range(2):
            pipe.step(x[:4], torch.zeros_like(x[:4]))
            grads = {}
            for name, param in pipe.model.params.items():
                grads[name] = None if param.grad is None else param.grad.clone()
            steps.append(grads)
        return steps

    for first, second in run_ranks(mesh, rank):
        for name, grad in first.items():
            assert (grad is None) == ("never" in name), name
            if grad is not None:
                assert grad.any(), name
                assert grad.equal(second[name]), name


def test_a_stage_that_ends_with_integers_is_rejected() -> None:
    blocks = [nn.Identity(), nn.Embedding(7, 4), nn.Linear(4, 4)]

    def rank(comm: Comm) -> None:
        PipelineParallel(
            blocks,
            comm,
            loss=cross_entropy,
            example=torch.zeros(2, 5, dtype=torch.int64),
            microbatches=1,
        )

    with pytest.raises(
        PlanError,
        match=r"blocks\[0\]: ends a stage, and its output cannot carry a gradient .*int64",
    ):
        run_ranks("pp3", rank)


@pytest.mark.parametrize(
    ("mesh", "num_inputs", "num_targets", "message"),
    [
        ("", 7, 7, r"inputs: its samples do not divide .*7 samples.*a multiple of 4"),
        ("pp2", 8, 4, r"targets: has another number of samples .*4; need 8"),
        ("pp2", 16, 16, r"inputs: its micro-batches have another shape .*\[4, 6\]; need \[2, 6\]"),
    ],
)
def test_a_step_of_other_shapes_is_rejected_before_anything_is_sent(
    mesh: str, num_inputs: int, num_targets: int, message: str
) -> None:
    x, y = data()

    def rank(comm: Comm) -> None:
        pipe = PipelineParallel(
            copy.deepcopy(blocks), comm, loss=nn.functional.mse_loss, example=x[:2], microbatches=4
        )
        pipe.step(x[:num_inputs], y[:num_targets])

    blocks = chain()
    with pytest.raises(PlanError, match=message):
        run_ranks(mesh, rank)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(out * self.scale, targets)


def test_a_state_dict_is_that_of_the_chain_and_goes_on_under_another_layout() -> None:
    """The first and last linear share a weight; the state is of the first layout, trained on by others."""
    x, y = data()[1].chunk(2)
    linears = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    linears[3].weight = linears[0].weight
    whole = nn.Sequential(*copy.deepcopy(linears))
    whole_loss = Scaled()
    optimizer = torch.optim.SGD([*whole.parameters(), *whole_loss.parameters()], lr=0.1)
    expected: list[dict[str, Tensor]] = []
    for _ in range(2):
        optimizer.zero_grad()
        whole_loss(whole(x), y).backward()
        optimizer.step()
        state = {**whole.state_dict(), **whole_loss.state_dict(prefix="loss.")}
        expected.append({name: value.clone() for name, value in state.items()})

    def step(comm: Comm, schedule: str, start: dict[str, Tensor] | None) -> dict[str, Tensor]:
        blocks = copy.deepcopy(linears)
        example = x[:3]
        pipe = PipelineParallel(
            blocks, comm, loss=Scaled(), example=example, microbatches=4, schedule=schedule
        )
        if start is not None:
            pipe.load_full_state_dict(start)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(x, y)
        optimizer.step()
        return pipe.full_state_dict()

    first = run_ranks("pp2", lambda comm: step(comm, "interleaved", None))
    for state in first:
        torch.testing.assert_close(state, expected[0], rtol=1e-11, atol=1e-15)
    for state in run_ranks("pp4", lambda comm: step(comm, "1f1b", first[1])):
        torch.testing.assert_close(state, expected[1], rtol=1e-11, atol=1e-15)
    with pytest.raises(DataError, match=r"missing or unknown keys: 0.bias"):
        run_ranks("pp1", lambda comm: step(comm, "1f1b", {}))


class Split(nn.Module):
    """tokens -> hidden states, the tokens, a mask of them and a constant, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        return {"x": x, "tokens": tokens, "mask": tokens > 2, "scales": [x.mean(-1), None]}


class Mix(nn.Module):
    """Reads them all, and hands on a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, state: Any) -> Any:
        x = torch.tanh(self.linear(state["x"])) * state["mask"].unsqueeze(-1)
        return x + state["scales"][0].unsqueeze(-1), state["tokens"], state["x"]


class Join(nn.Module):
    """Takes the tuple as its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor, tokens: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x + skipped), tokens


def loss_of_two(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, tokens = output
    return ((logits - targets.unsqueeze(-1)).square().sum(-1) * (tokens + 1)).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("mesh", ["pp1", "pp3", "pp3 dp2"])
def test_stages_hand_on_several_tensors(mesh: str, schedule: str) -> None:
    if schedule == "interleaved" and mesh != "pp1":
        pytest.skip("three blocks are one for each rank")
    tokens = torch.arange(40).view(8, 5) * 5 % 7
    targets = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5)

    def blocks() -> list[nn.Module]:
        made: list[nn.Module] = [Split(), Mix(), Join()]
        for number, param in enumerate(param for block in made for param in block.parameters()):
            with torch.no_grad():
                param.copy_(
                    torch.linspace(-1, 1, param.numel()).sin().mul(number + 1).view(param.shape)
                )
        return made

    split, mix, join = blocks()
    expected = loss_of_two(join(*mix(split(tokens))), targets)
    expected.backward()
    gradients = {
        f"{index}.{name}": param.grad
        for index, block in enumerate((split, mix, join))
        for name, param in block.named_parameters()
    }

    def rank(comm: Comm) -> dict[str, Tensor]:
        part = (
            slice(None)
            if comm.degree("dp") == 1
            else slice(4 * comm.index("dp"), 4 * comm.index("dp") + 4)
        )
        own_tokens, own_targets = tokens[part], targets[part]
        pipe = PipelineParallel(
            blocks(),
            comm,
            loss=loss_of_two,
            example=own_tokens[:2],
            microbatches=len(own_tokens) // 2,
            schedule=schedule,
            chunks=1 if schedule != "interleaved" else None,
        )
        loss = pipe.step(own_tokens, own_targets)
        torch.testing.assert_close(loss, expected.detach().double(), rtol=1e-12, atol=0)
        return {
            name.replace(".module.", "."): param.grad
            for name, param in pipe.model.params.items()
            if param.grad is not None
        }

    seen: set[str] = set()
    for found in run_ranks(mesh, rank):
        for name, gradient in found.items():
            seen.add(name)
            torch.testing.assert_close(
                gradient.as_subclass(Tensor), gradients[name], rtol=1e-11, atol=1e-14
            )
    assert seen == set(gradients)


class FailingBackward(torch.autograd.Function):
    """Raises an error in one of its backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backwards_left: list[int]) -> Tensor:
        ctx.backwards_left = backwards_left
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.backwards_left[0] -= 1
        if ctx.backwards_left[0] == 0:
            raise MemoryError("of this backward")
        return dy, None


class Failing(nn.Module):
    def __init__(self, backwards_left: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5).double()
        self.last = nn.Linear(5, 4).double()
        self.backwards_left = backwards_left

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(FailingBackward.apply(self.first(x), self.backwards_left))
        return y


def summed_loss(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return nn.functional.mse_loss(x, y, reduction="sum"), y.numel()


@pytest.mark.parametrize("mesh", ["pp1", "dp2"])
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, summed_loss])
def test_a_step_after_one_that_raised_an_error_equals_the_first(
    mesh: str, failing: int, loss: Any
) -> None:
    x, y = data()

    def rank(comm: Comm) -> list[tuple[Tensor, list[Tensor]]]:
        found = []
        for backwards_left in ([-1], [failing]):
            block = Failing(backwards_left)
            pipe = PipelineParallel([block], comm, loss=loss, example=x[:12], microbatches=2)
            if backwards_left == [failing]:
                with pytest.raises(MemoryError, match="of this backward"):
                    pipe.step(x, y)
            total = pipe.step(x, y)
            found.append((total, [param.grad for param in pipe.parameters()]))
        return found

    for (first, first_grads), (second, second_grads) in run_ranks(mesh, rank):
        assert torch.equal(first, second)
        for one, other in zip(first_grads, second_grads, strict=True):
            assert torch.equal(one, other)


def test_a_step_after_one_that_raised_an_error_is_rejected_on_several_stages() -> None:
    x, y = data()

    def rank(comm: Comm) -> None:
        pipe = PipelineParallel(
            chain(), comm, loss=nn.functional.mse_loss, example=x[:12], microbatches=2
        )

        def fail(module: nn.Module, args: Any) -> None:
            raise MemoryError("of this forward")

        for stage in pipe.stages:
            stage.register_forward_pre_hook(fail)
            next(stage.children()).register_forward_pre_hook(fail)
        if comm.index("pp") == 0:
            with pytest.raises(MemoryError, match="of this forward"):
                pipe.step(x, y)
            with pytest.raises(PlanError, match="the last step raised an error"):
                pipe.step(x, y)

    run_ranks("pp2", rank)


def test_a_state_of_other_shapes_is_rejected() -> None:
    def rank(comm: Comm) -> None:
        x, _ = data()
        pipe = PipelineParallel(
            chain(), comm, loss=nn.functional.mse_loss, example=x[:12], microbatches=2
        )
        state = {key: value[:1] for key, value in pipe.full_state_dict().items()}
        with pytest.raises(DataError, match=r"state: 0.0.weight: has another shape \(got \[1, 6\]"):
            pipe.load_full_state_dict(state)

    run_ranks("pp1", rank)


class ScaledByPlainTensor(nn.Module):
    """A block with a tensor that is neither a parameter nor a buffer, and one that its forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.scale = torch.full((6,), 2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(6, dtype=torch.float64)  # on torch's default device
        y: Tensor = self.linear(x * ones) * self.scale
        return y


def test_blocks_may_have_tensors_that_are_plain_attributes() -> None:
    torch.manual_seed(1)
    blocks = [ScaledByPlainTensor(), ScaledByPlainTensor()]
    x, _ = data()
    expected = nn.functional.mse_loss(nn.Sequential(*copy.deepcopy(blocks))(x), x)

    def rank(comm: Comm) -> Tensor:
        pipe = PipelineParallel(
            copy.deepcopy(blocks), comm, loss=nn.functional.mse_loss, example=x[:12], microbatches=2
        )
        return pipe.step(x, x)

    for loss in run_ranks("pp2", rank):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
