"""`weft.save` and `weft.load`: modules and optimizers of plain scripts, between wrappers and numbers of ranks, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau

import weft
from tests.programs import programs
from weft.checkpoint.json_values import from_json, to_json
from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.errors import CheckpointError
from weft.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]

AXES = {"up.weight": ("ffn", None), "up.bias": ("ffn",), "down.weight": (None, "ffn")}
Script = tuple[nn.Module, torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices, vectors, a complex scalar, tied weights, and buffers; one of complex numbers, one without entries."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.last = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight
        self.norm = nn.BatchNorm1d(3)
        self.gain = nn.Parameter(torch.tensor(0.5 + 0.1j, dtype=torch.complex128))
        self.register_buffer("phases", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("none", torch.zeros(0, 2))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator, dtype=param.dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).tanh())
        return self.last(self.tied(y)) * self.gain.abs()


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    matrices = [each for each in params if each.ndim == 2]
    rest = [each for each in params if each.ndim != 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": rest}], lr=0.02)


def plain(comm: Comm, seed: int) -> Script:
    net = Net(seed)
    return net, optimizer_of(net.parameters())


def ddp(comm: Comm, seed: int) -> Script:
    net = weft.DistributedDataParallel(Net(seed), comm)
    return net, optimizer_of(net.parameters())


def zero1(comm: Comm, seed: int) -> Script:
    net = weft.DistributedDataParallel(Net(seed), comm)
    params = list(net.parameters())
    groups = [
        {"params": [each for each in params if each.ndim == 2], "weight_decay": 0.3},
        {"params": [each for each in params if each.ndim != 2]},
    ]
    return net, weft.ShardedOptimizer(groups, torch.optim.AdamW, comm, lr=0.02)


def zero3(comm: Comm, seed: int) -> Script:
    net = weft.FullyShardedDataParallel(Net(seed), comm)
    return net, optimizer_of(net.parameters())


def tensor_parallel(comm: Comm, seed: int) -> Script:
    net = weft.parallelize(Net(seed), comm, AXES)
    return net, optimizer_of(net.parameters())


def tensor_parallel_zero3(comm: Comm, seed: int) -> Script:
    net = weft.FullyShardedDataParallel(weft.parallelize(Net(seed), comm, AXES), comm)
    return net, optimizer_of(net.parameters())


LAYOUTS = [
    ("dp1", plain),
    pytest.param("dp2", zero3, marks=pytest.mark.slow),
    ("dp4", zero3),
    pytest.param("dp3", ddp, marks=pytest.mark.slow),
    pytest.param("dp2", zero1, marks=pytest.mark.slow),
    pytest.param("tp2", tensor_parallel, marks=pytest.mark.slow),
    ("dp2 tp2", tensor_parallel_zero3),
]


def train(script: Script, comm: Comm, steps: range) -> None:
    net, optimizer = script
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().mul(torch.arange(3)).mean().backward()
        optimizer.step()


def whole(script: Script) -> list[Tensor]:
    """The values that `weft.save` stores, from a plain module."""
    net, optimizer = script
    values = [each.detach() for each in net.state_dict().values()]
    for param in net.parameters():
        values += [each for _, each in sorted(optimizer.state[param].items())]
    return values


def stored(folder: Path) -> list[Tensor]:
    script = plain(None, 9)  # type: ignore[arg-type]
    weft.load(folder, *script)
    return whole(script)


@pytest.mark.parametrize(("mesh", "make"), LAYOUTS)
def test_what_one_layout_saved_another_one_has_bit_by_bit(
    mesh: str, make: Callable[[Comm, int], Script], tmp_path: Path
) -> None:
    """Saved by 2 ranks with ZeRO 3, loaded and saved again by others, and read into a plain module."""

    def write(comm: Comm) -> None:
        script = zero3(comm, 0)
        train(script, comm, range(3))
        weft.save(tmp_path / "first", *script, values={"step": 3})

    def move(comm: Comm) -> int:
        script = make(comm, 5)
        step = weft.load(tmp_path / "first", *script, comm=comm)["step"]
        weft.save(tmp_path / "second", *script, values={"step": step}, comm=comm)
        train(script, comm, range(3, 5))
        weft.save(tmp_path / "third", *script, comm=comm)
        return step

    run_ranks("dp2", write)
    assert set(run_ranks(mesh, move)) == {3}
    first = stored(tmp_path / "first")
    for one, other in zip(first, stored(tmp_path / "second"), strict=True):
        assert torch.equal(one, other)
    script = plain(None, 9)  # type: ignore[arg-type]
    weft.load(tmp_path / "first", *script)
    train(script, None, range(3, 5))  # type: ignore[arg-type]
    for one, other in zip(whole(script), stored(tmp_path / "third"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [zero3, zero1])
def test_a_script_goes_on_bit_by_bit(make: Callable[[Comm, int], Script], tmp_path: Path) -> None:
    """3 ranks: sums of 2 would be the same in any order."""

    def rank(comm: Comm) -> None:
        script = make(comm, 0)
        train(script, comm, range(2))
        weft.save(tmp_path / "two", *script)
        train(script, comm, range(2, 4))
        weft.save(tmp_path / "four", *script)
        again = make(comm, 1)
        weft.load(tmp_path / "two", *again)
        train(again, comm, range(2, 4))
        weft.save(tmp_path / "again", *again)

    run_ranks("dp3", rank)
    for one, other in zip(stored(tmp_path / "four"), stored(tmp_path / "again"), strict=True):
        assert torch.equal(one, other)


def test_a_pipeline_is_stored_as_the_sequence_of_its_blocks(tmp_path: Path) -> None:
    def blocks() -> list[nn.Module]:
        return [nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)]

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)

    def pipe_of(comm: Comm) -> Script:
        pipe = weft.PipelineParallel(
            blocks(), comm, loss=nn.functional.mse_loss, example=x[:2], microbatches=2
        )
        return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)

    def write(comm: Comm) -> float:
        pipe, optimizer = pipe_of(comm)
        pipe.step(x, x.flip(0))
        optimizer.step()
        weft.save(tmp_path / "one", pipe, optimizer)
        pipe.step(x, x.flip(0))
        optimizer.step()
        return pipe.step(x, x.flip(0)).item()

    def resume(comm: Comm) -> float:
        pipe, optimizer = pipe_of(comm)
        weft.load(tmp_path / "one", pipe, optimizer)
        pipe.step(x, x.flip(0))
        optimizer.step()
        return pipe.step(x, x.flip(0)).item()

    losses = run_ranks("pp2", write)
    assert run_ranks("pp4", resume) == pytest.approx([losses[0]] * 4, rel=1e-14)
    net = nn.Sequential(*blocks())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    weft.load(tmp_path / "one", net, optimizer)
    nn.functional.mse_loss(net(x), x.flip(0)).backward()
    optimizer.step()
    assert nn.functional.mse_loss(net(x), x.flip(0)).item() == pytest.approx(losses[0], rel=1e-14)


def test_a_wrapper_inside_a_module_is_stored_by_plain_names(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        pair = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 2)})
        pair["g"] = weft.FullyShardedDataParallel(pair["g"], comm)
        weft.save(tmp_path / "pair", pair)

    run_ranks("dp2", rank)
    weft.load(tmp_path / "pair", nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 2)}))


def test_values_come_back_as_they_were() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    values = {
        "plateau": ReduceLROnPlateau(optimizer).state_dict(),
        "steps": MultiStepLR(optimizer, [3, 5]).state_dict(),
        "random": torch.get_rng_state(),
        "words": ["a", None, True, 1.5, ("b", 2)],
        "nested": {1: {"weft.kind": 3}},
    }
    found = from_json(to_json(values, where="values"))
    assert torch.equal(found.pop("random"), values.pop("random"))
    assert found == values
    assert found["steps"]["milestones"].elements
    with pytest.raises(
        CheckpointError, match=r"^values.f: cannot be stored in a checkpoint \(got set"
    ):
        to_json({"f": {1}}, where="values")


def test_what_does_not_fit_is_one_line_on_every_rank(tmp_path: Path) -> None:
    weft.save(tmp_path / "net", nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match="is there already, and it is not overwritten"):
        weft.save(tmp_path / "net", nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"^model/bias: is in the checkpoint, and not in the"):
        weft.load(tmp_path / "net", nn.Linear(2, 3, bias=False))
    with pytest.raises(CheckpointError, match="is stored with another shape"):
        weft.load(tmp_path / "net", nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"another dtype .*Fix: model.to\(torch.float32\)"):
        weft.load(tmp_path / "net", nn.Linear(2, 3, dtype=torch.float64))
    net = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(CheckpointError, match=r"has no optimizer of a script. Fix: weft.load\(fo"):
        weft.load(tmp_path / "net", net, optimizer)
    weft.save(tmp_path / "one", net, optimizer)
    with pytest.raises(CheckpointError, match="its groups have other parameters"):
        weft.load(tmp_path / "one", net, torch.optim.AdamW([net.weight]))
    with pytest.raises(CheckpointError, match="has a parameter that the model does not have"):
        weft.save(tmp_path / "two", nn.Linear(2, 3), optimizer)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        weft.load(tmp_path / "three", net)

    def rank(comm: Comm) -> None:
        values = {"bad": object()} if comm.rank == 0 else None
        with pytest.raises(CheckpointError, match=r"values\.bad: cannot be stored"):
            weft.save(tmp_path / "four", nn.Linear(2, 3), values=values, comm=comm)

    run_ranks("dp2", rank)
    assert not list(tmp_path.glob(".tmp*"))


def test_what_a_killed_process_left_is_removed_and_a_flipped_bit_is_found(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-net"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"cut")
    net = nn.Linear(2, 3)
    weft.save(tmp_path / "net", net, values={"step": 7})
    assert not left.exists()
    assert open_checkpoint(tmp_path / "net").manifest.facts.step == 7
    assert open_checkpoint(tmp_path / "net").manifest.digests.keys() == {
        "model/weight",
        "model/bias",
    }
    file = tmp_path / "net" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        weft.load(tmp_path / "net", net)


def test_the_script_of_the_page_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"`resume.py`\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    commands = re.findall(r"^\$ python resume.py (\d) (\d)$", page, flags=re.MULTILINE)
    assert commands == [("2", "4"), ("3", "8")]

    def run(*words: str) -> str:
        done = programs().run(script, *words, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name, calls in {"twice": commands, "once": [("2", "8")]}.items():
        folder = tmp_path / name
        folder.mkdir()
        last = [run(*words) for words in calls][-1]
        assert last.startswith("step 8: loss "), last
        (tmp_path / f"{name}.txt").write_text(last)
    assert (tmp_path / "twice.txt").read_text() == (tmp_path / "once.txt").read_text()


def test_states_in_8_bits_are_saved_and_loaded_as_values(tmp_path: Path) -> None:
    def rank(comm: Comm) -> tuple[dict[str, Any], dict[str, Any], int]:
        torch.manual_seed(0)
        net = weft.DistributedDataParallel(nn.Linear(64, 80), comm)
        optimizer = weft.ShardedOptimizer(
            net.parameters(), torch.optim.AdamW, comm, lr=0.02, state_bits=8
        )

        def step(scale: float) -> None:
            optimizer.zero_grad()
            (net(torch.ones(3, 64)) * scale).square().sum().backward()
            optimizer.step()

        step(1.0)
        weft.save(tmp_path / "saved", net, optimizer)
        saved = net.full_optim_state_dict(optimizer)["state"]
        step(3.0)
        weft.load(tmp_path / "saved", net, optimizer)
        shard = optimizer.shard_of(net.module.weight)
        loaded = net.full_optim_state_dict(optimizer)["state"]
        return saved, loaded, len(optimizer.inner.state[shard])

    for saved, loaded, num_values in run_ranks("dp2", rank):
        assert num_values == 1, "the count of steps; the others are codes again"
        for name, state in saved.items():
            assert set(loaded[name]) == set(state)
            for key, value in state.items():
                assert torch.equal(loaded[name][key], value), (name, key)
