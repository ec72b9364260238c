"""Optimizers: bit for bit those of torch, weight decay on matrices only, states by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.config.schema import OptimConfig
from weft.train.optim import make_optimizer, matrices

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
OPTIMS = {
    "adamw": OptimConfig(name="adamw", lr=3e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
    "sgd": OptimConfig(name="sgd", lr=3e-2, weight_decay=0.1, momentum=0.0),
    "sgd with momentum": OptimConfig(name="sgd", lr=3e-2, weight_decay=0.1, momentum=0.9),
}
FASTEST_EXACT = {"adamw": {"fused": True}, "sgd": {"foreach": False}}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 7, bias=False)
    ).to(dtype)


def gradients(of: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in of.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def torchs_own(of: nn.Module, optim: OptimConfig, **how) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in of.parameters() if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in of.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, **how)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, **how)


def trained(of: nn.Module, optimizer) -> list[torch.Tensor]:
    for step, lr in enumerate((1e-2, 3e-2, 2e-2, 1e-3)):
        gradients(of, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return [param.detach() for param in of.parameters()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optim", OPTIMS.values(), ids=OPTIMS)
def test_updates_equal_torchs_own_optimizer_to_the_bit(optim, dtype):
    ours = model(dtype)
    theirs = model(dtype)
    options = FASTEST_EXACT[optim.name]
    own_optimizer = make_optimizer(dict(ours.named_parameters()), optim)
    torchs_optimizer = torchs_own(theirs, optim, **options)
    got = trained(ours, own_optimizer)
    want = trained(theirs, torchs_optimizer)
    for own_param, torchs_param in zip(got, want, strict=True):
        assert torch.equal(own_param, torchs_param)


@pytest.mark.parametrize("optim", OPTIMS.values(), ids=OPTIMS)
def test_updates_equal_torchs_plain_loop_to_rounding(optim):
    ours = model(torch.float64)
    theirs = model(torch.float64)
    optimizer = make_optimizer(dict(ours.named_parameters()), optim)
    got = trained(ours, optimizer)
    want = trained(theirs, torchs_own(theirs, optim, foreach=False))
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-15)


def test_only_matrices_decay():
    of = model(torch.float32)
    params = dict(of.named_parameters())
    assert matrices(params) == {"0.weight", "2.weight", "3.weight"}
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = make_optimizer(params, OptimConfig(lr=0.5, weight_decay=0.1))
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in params.items():
        torch.testing.assert_close(
            param.detach(), before[name] * (0.95 if param.ndim >= 2 else 1.0)
        )


def test_named_parameters_decay_where_names_are_given():
    flat = nn.Parameter(torch.ones(3))
    bias = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(
        {"flat": flat, "bias": bias}, OptimConfig(lr=0.5, weight_decay=0.1), decay_names={"flat"}
    )
    for param in (flat, bias):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert flat.tolist() == [pytest.approx(0.95)] * 3
    assert bias.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optim", OPTIMS.values(), ids=OPTIMS)
def test_a_cut_parameter_moves_as_the_whole_one_to_the_bit(optim, dtype):
    torch.manual_seed(5)
    whole = nn.Parameter(torch.randn(101, 7, dtype=dtype))
    pieces = {}
    for number, piece in enumerate(whole.detach().tensor_split(3)):
        pieces[f"w{number}"] = nn.Parameter(piece.clone())
    of_whole = make_optimizer({"w": whole}, optim)
    of_pieces = make_optimizer(pieces, optim)
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        grads = whole.grad.tensor_split(3)
        for piece, grad in zip(pieces.values(), grads, strict=True):
            piece.grad = grad.clone()
        of_whole.step()
        of_pieces.step()
    joined = torch.cat([piece.detach() for piece in pieces.values()])
    assert torch.equal(whole, joined)


def test_state_is_there_from_the_start_under_the_parameters_name():
    params = dict(model(torch.float32).named_parameters())
    state = make_optimizer(params, OPTIMS["adamw"]).state
    assert state.keys() == params.keys()
    for moments in state.values():
        assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for moment in moments.values():
            assert not moment.any()


def test_a_parameter_without_gradient_stays_and_keeps_its_clock():
    a = nn.Parameter(torch.ones(2, 2))
    b = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer({"a": a, "b": b}, OPTIMS["adamw"])
    a.grad = torch.ones(2, 2)
    optimizer.step()
    assert b.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert optimizer.state["a"]["step"].item() == 1.0
    assert optimizer.state["b"]["step"].item() == 0.0
