"""NaN and infinity: the step stops on all ranks before the update and names block and rank; no checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.layouts import CLIP, LR, Case, adamw, batches, build_case
from tests.matrix.plain import HALF
from tests.one_device import micro_batches
from tests.tiny_run import TINY
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.errors import EXIT_FAILED, NonFiniteError
from weft.testing import run_ranks
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS
from weft.train.loop_texts import non_finite_advice
from weft.train.optim import matrices
from weft.train.step import TrainStep

Spoil = Callable[[TrainStep], None]


def message_of_step(case: Case, spoil: Spoil, comm: Comm, **plan_updates: Any) -> str:
    """The error of one step after `spoil`, which must leave the parameters as they are."""
    plan = case.plan.model_copy(update=plan_updates)
    model = build_case(case, comm, plan=plan)
    decay_names = matrices(model.params)
    step = TrainStep(model, make_optimizer=lambda tensors: adamw(tensors, decay_names), clip=CLIP)
    spoil(step)
    params = step.grads.sharded_params
    before = {name: tensor.clone() for name, tensor in params.items()}
    batch = batches(case)[0]
    with pytest.raises(NonFiniteError) as error:
        step(micro_batches(batch, plan, comm.rank), lr=LR)
    for name, tensor in step.grads.sharded_params.items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), f"{name} was updated"
    return str(error.value)


def poison(name: str, *, rank: int) -> Spoil:
    """One NaN in the first entry of a parameter on one rank."""

    def spoil(step: TrainStep) -> None:
        if step.model.comm.rank == rank and name in step.grads.sharded_params:
            with torch.no_grad():
                step.grads.sharded_params[name].reshape(-1)[0] = torch.nan
        step.grads.after_optimizer_step()  # copies in the compute dtype follow

    return spoil


def overflow_gradient(name: str, *, rank: int) -> Spoil:
    """An infinite gradient of one parameter on one rank; the forward is untouched."""

    def spoil(step: TrainStep) -> None:
        if step.model.comm.rank == rank and name in step.model.params:
            step.model.params[name].register_hook(lambda grad: grad * torch.inf)

    return spoil


OUTPUTS = {
    "dp2": (
        Case("dp2", microbatches=2, layers=2),
        "layer1.mlp.down.weight",
        1,
        "block 'layer1' on rank 1 (dp1)",
    ),
    "tp2": (
        Case("tp2", microbatches=2, layers=2),
        "layer0.attn.q.weight",
        1,
        "block 'layer0' on rank 0 (tp0)",
    ),
    "pp2": (
        Case("pp2", microbatches=2, layers=2),
        "layer1.attn.q.weight",
        1,
        "block 'layer1' on rank 1 (pp1)",
    ),
    "one rank": (
        Case("", microbatches=2, layers=2),
        "layer0.attn.q.weight",
        0,
        "block 'layer0' on rank 0",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_nan_in_the_forward_names_the_first_block_and_rank_on_all_ranks(name: str) -> None:
    case, param, rank, where = OUTPUTS[name]
    messages = run_ranks(
        case.mesh, lambda comm: message_of_step(case, poison(param, rank=rank), comm)
    )
    assert len(set(messages)) == 1, "every rank raises the same"
    assert f"first in the output of {where}" in messages[0]
    assert "the loss is nan and the gradient norm is nan" in messages[0]


def test_an_infinite_gradient_names_the_block_whose_backward_made_it() -> None:
    case = Case("dp2", microbatches=2, layers=2)
    spoil = overflow_gradient("layer1.attn.q.weight", rank=1)
    messages = run_ranks(case.mesh, lambda comm: message_of_step(case, spoil, comm))
    assert len(set(messages)) == 1
    assert "first in the gradient of block 'layer1' on one of ranks 0 1" in messages[0]
    assert "the loss is nan" not in messages[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_that_arises_once_is_named_with_the_rank_that_had_it(rank: int) -> None:
    """Its gradient is on all ranks after the reduction, and its forward is finite again."""

    def spoil_once(step: TrainStep) -> None:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            handle.remove()
            return output * torch.nan

        if step.model.comm.rank == rank:
            handle = step.model.blocks["layer1"].register_forward_hook(hook)

    case = Case("dp2", microbatches=2, layers=2)
    messages = run_ranks(case.mesh, lambda comm: message_of_step(case, spoil_once, comm))
    assert len(set(messages)) == 1
    assert f"in the loss of rank {rank} (dp{rank}); its forward is finite" in messages[0]


def test_a_loss_that_is_not_finite_is_no_overflow_of_the_loss_scale() -> None:
    case = Case("dp2", microbatches=2, layers=2)
    spoil = poison("layer0.mlp.down.weight", rank=0)
    messages = run_ranks(case.mesh, lambda comm: message_of_step(case, spoil, comm, **vars(HALF)))
    assert "first in the output of block 'layer0' on rank 0 (dp0)" in messages[0]


TINY_RUN = (*TINY, *("--optim.warmup", "0", "--optim.decay", "constant", "--optim.eps", "1e-30"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def diverge(text: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    """Events of a run that must fail."""
    keys = (
        "--data.source",
        str(text),
        "--out",
        str(out),
        "--save.every",
        "1",
        "--steps",
        "30",
        "--mesh",
        "dp2",
    )
    assert main(["train", *TINY_RUN, *keys, *words]) == EXIT_FAILED
    return list(read_events(out / EVENTS))


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def test_a_diverging_run_stops_with_exit_1_and_keeps_its_last_finite_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    events = diverge(text, out, "--optim.lr", "1e30")
    message = capsys.readouterr().err
    last_step = max(event["step"] for event in events if event["event"] == "step")
    newest = checkpoint_path(out, last_step)
    assert f"step {last_step + 1}: the loss is " in message
    assert "Stopped before the update" in message
    assert f"The newest checkpoint is {newest}" in message
    assert events[-1]["event"] == "end"
    assert events[-1]["status"] == "failed"
    assert events[-1]["steps"] == last_step
    assert next(checkpoints(out)) == (last_step, newest)
    section = open_checkpoint(newest).section("model")
    for name, shape in section.shapes.items():
        assert is_finite(section.read(name, Box.whole(shape))), name


def test_parameters_that_are_not_finite_are_never_saved_and_push_out_no_older_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert (
        main(
            [
                "train",
                *TINY_RUN,
                "--data.source",
                str(text),
                "--out",
                str(out),
                "--steps",
                "1",
                "--save.keep",
                "1",
            ]
        )
        == 0
    )
    keys = ("--save.keep", "1", "--optim.lr", "1e39", "--resume", "auto")
    events = diverge(text, out, *keys)
    (failure,) = [event for event in events if event["event"] == "save_failed"]
    assert failure["step"] == 2
    assert "holds values that are not finite" in failure["why"]
    assert [step for step, _ in checkpoints(out)] == [1]
    assert events[-1]["status"] == "failed"


def checkpoint_folders(run_folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(run_folder, step).mkdir(parents=True)


def test_the_advice_names_an_older_checkpoint_than_that_of_the_failed_step(tmp_path: Path) -> None:
    checkpoint_folders(tmp_path, 2, 4)
    older = checkpoint_path(tmp_path, 2)
    newest = checkpoint_path(tmp_path, 4)
    command = f"weft train {tmp_path}/run.toml --resume"
    assert non_finite_advice(tmp_path, 4, peak_lr=1e-3) == (
        f"The newest checkpoint is {newest}, whose parameters already give this non-finite result. "
        f"Resume from {older} with a lower --optim.lr: {command} {older} --optim.lr 0.0001"
    )
    assert non_finite_advice(tmp_path, 5, peak_lr=1e30).endswith(
        f"{command} {newest} --optim.lr 0.001"
    )


@pytest.mark.parametrize("steps", [(), (1,)])
def test_without_an_older_checkpoint_the_advice_is_to_start_again(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    checkpoint_folders(tmp_path, *steps)
    assert non_finite_advice(tmp_path, 1, peak_lr=1e-3).endswith(
        "Start again with a lower --optim.lr: "
        f"weft train {tmp_path}/run.toml --out {tmp_path}-2 --optim.lr 0.0001"
    )
