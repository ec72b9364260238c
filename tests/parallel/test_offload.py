"""Offloaded activations: equal bits, when copies begin and what waits for them, what is left on the device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from tests.live import Live
from tests.matrix.layouts import LR, Case, make_step, own_micro_batches
from tests.one_device import PATIENCE_S
from tests.parallel.test_recompute import llama_layer, recomputed, some_batch, some_input
from weft.comm.comm import Comm
from weft.config.load import load
from weft.models import FAMILIES
from weft.parallel.model import parallelize
from weft.parallel.model.compiled_block import compiled_block
from weft.parallel.recompute import offload
from weft.parallel.recompute.blocks import recompute_blocks
from weft.parallel.recompute.offload import MetaCopying, Wait, host_copying
from weft.parallel.recompute.recomputed_tensor import memory_of
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure, step_copied
from weft.start.memory_before import host_fault
from weft.testing import run_ranks


def unwritten(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan") if like.is_floating_point() else 1)


@dataclass
class LateCopying:
    """Copies of tensors on the CPU that are made only when something waits for them, or when a later
    copy of the same stream is waited for; until then the target holds NaN.
    """

    waits: int = 0
    started: list[int] = field(default_factory=list)
    queue: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=list)

    def host_memory(self, source: Tensor) -> Tensor:
        return unwritten(source)

    def device_memory(self, copy: Tensor) -> Tensor:
        return unwritten(copy)

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        self.started.append(len(sources))
        self.queue.append((sources, targets))
        number = len(self.started)

        def wait() -> None:
            self.waits += 1
            while self.queue and len(self.started) - len(self.queue) < number:
                for source, target in zip(*self.queue.pop(0), strict=True):
                    target.copy_(source)

        return wait


@pytest.fixture(autouse=True)
def all_sizes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave the device, too."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


def chain_of(number: int, copying: LateCopying | MetaCopying | None) -> tuple[nn.Module, ...]:
    torch.manual_seed(3)
    blocks = {f"layer{index}": llama_layer(torch.float64) for index in range(number)}
    modes = dict.fromkeys(blocks, "offload")
    return tuple(recompute_blocks(blocks, modes, copying).values())


def gradients(blocks: tuple[nn.Module, ...], num_microbatches: int = 2) -> list[Tensor]:
    """As 1F1B has them: a micro-batch more runs forward before the backward of each."""
    inputs = [some_input(torch.float64) for _ in range(num_microbatches)]
    outputs = []
    for number, x in enumerate(inputs):
        y = x * 1.5
        for block in blocks:
            y = block(y, some_batch())
        outputs.append(y)
        if number:
            outputs.pop(0).square().sum().backward()
    outputs.pop().square().sum().backward()
    params = [param for block in blocks for param in block.parameters()]
    return [each.grad for each in (*inputs, *params) if each.grad is not None]


def test_offloaded_blocks_have_the_bits_of_plain_ones() -> None:
    copying = LateCopying()
    plain = gradients(chain_of(3, None))
    offloaded = gradients(chain_of(3, copying))
    assert len(plain) == len(offloaded)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    # each of 3 blocks of 2 micro-batches, out and back: in the first backward the last one leaves, too
    assert len(copying.started) == 2 * 3 + 2 * 3


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not")
def test_offloaded_compiled_blocks_have_the_bits_of_compiled_ones() -> None:
    def compiled(copying: LateCopying | None) -> list[Tensor]:
        torch.manual_seed(3)
        blocks = {f"layer{number}": llama_layer(torch.float64) for number in range(2)}
        whole = {name: compiled_block(name, each, drops_out=False) for name, each in blocks.items()}
        modes = dict.fromkeys(blocks, "offload")
        return gradients(tuple(recompute_blocks(whole, modes, copying).values()))

    copying = LateCopying()
    plain = compiled(None)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled(copying), strict=True))
    assert len(copying.started) == 2 * 2 + 2 * 2


def test_a_backward_that_does_not_wait_reads_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = LateCopying()
    blocks = chain_of(3, copying)
    start = copying.start

    def without_wait(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Wait:
        wait = start(sources, targets)
        is_back = len(copying.started) > len(blocks)
        return (lambda: None) if is_back else wait

    monkeypatch.setattr(copying, "start", without_wait)
    assert any(bool(each.isnan().any()) for each in gradients(blocks, 1))


def test_memory_of_a_backward_that_fails_is_freed_behind_the_copies_into_it() -> None:
    copying = LateCopying()
    blocks = chain_of(4, copying)
    y = some_input(torch.float64) * 1.5
    for number, block in enumerate(blocks):
        y = block(y, some_batch())
        if number == 1:
            y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.square().sum().backward()
    assert copying.queue, "the block before the failure is on its way back"
    del y
    gc.collect()
    assert not copying.queue


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_copies_back_are_one_block_ahead() -> None:
    copying = LateCopying()
    blocks = chain_of(4, copying)
    y = some_input(torch.float64) * 1.5
    outs = []
    for block in blocks:
        y = block(y, some_batch())
        outs.append(y)
    assert len(copying.started) == 4
    seen: list[int] = []
    for out in outs:
        out.register_hook(lambda _: seen.append(len(copying.started)))
    y.sum().backward()
    # the last block is still on the device; at its backward that of the third one begins, and so on
    assert seen == [4, 5, 6, 7]


def test_two_blocks_are_on_the_device_at_most() -> None:
    held = {}
    for number in (2, 6):
        blocks = chain_of(number, LateCopying())
        live = Live()
        x = some_input(torch.float64)
        with live:
            y = x * 1.5
            for block in blocks:
                y = block(y, some_batch())
        chain = blocks[0].chain
        kept = [*(param for block in blocks for param in block.parameters()), x, y]
        held[number] = live.num_bytes(but=kept) - chain.host_bytes
        assert chain.host_bytes > 0
        y.sum().backward()
        del y, live
        assert chain.host_bytes == 0
    assert held[6] < 1.3 * held[2]


def test_a_tensor_that_is_changed_in_place_is_an_error() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, batch: object) -> Tensor:
            h = x * 2.0
            y = h * h
            h.add_(1.0)
            return y

    (block,) = recompute_blocks({"a": InPlace()}, {"a": "offload"}, LateCopying()).values()
    y = block(some_input(), some_batch())
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_parameters_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = LateCopying()
    (block,) = chain_of(1, copying)
    block(some_input(torch.float64) * 1.5, some_batch())
    (call,) = block.chain._leaving
    leaving = {memory_of(storage.source) for storage in call._storages.values()}
    assert leaving
    assert leaving.isdisjoint(map(memory_of, block.parameters()))
    monkeypatch.setattr(offload, "LEAST_BYTES", 2**30)
    block(some_input(torch.float64) * 1.5, some_batch())
    assert copying.started[-1] == 0


def test_on_the_cpu_blocks_are_as_they_are() -> None:
    layer = llama_layer()
    assert host_copying(torch.device("cpu")) is None
    assert recomputed(layer, "offload") is layer


LAYOUTS = (
    Case("dp2", zero=3),
    Case("pp2 tp2", sequence=True, zero=1),
    Case("pp2", schedule="interleaved", chunks=2),
    Case("pp2", schedule="zero_bubble"),
    Case("cp2", documents=True),
    Case("ep2", family="deepseek"),
)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_offloaded_steps_have_the_bits_of_plain_ones(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    copyings: list[LateCopying] = []

    def late_copying(_: torch.device) -> LateCopying:
        copyings.append(LateCopying())
        return copyings[-1]

    monkeypatch.setattr(parallelize, "host_copying", late_copying)
    results = {}
    for mode in ("none", "offload"):
        changed = replace(
            case, layers=max(2, 2 * case.grid.degree("pp") * case.chunks), recompute=mode
        )

        def numbers(comm: Comm, changed: Case = changed) -> list[float]:
            step = make_step(changed, comm)
            reports = [
                step(own_micro_batches(changed, comm, step=number), lr=LR) for number in range(3)
            ]
            return [each for report in reports for each in (report.loss, report.grad_norm)]

        results[mode] = run_ranks(changed.mesh, numbers)
    assert results["none"] == results["offload"]
    assert len(copyings) == case.grid.size
    assert all(copying.waits > 0 for copying in copyings)


WIDE = "--model.layers 6 --model.dim 256 --data.seq_len 2048 --batch.micro_size 1 --batch.global_size 4"


def test_explain_counts_what_is_on_the_host_and_not_on_the_device() -> None:
    run = load([*WIDE.split(), "--hardware", "h100", "--mesh", "pp2"], FAMILIES)
    memories = {}
    for mode in ("none", "offload"):
        changed = run.with_values({"parallel.recompute": mode})
        roles = measure(MeasuredRun.of(changed))
        memories[mode] = [role.memory for role in roles]
        copied = [step_copied(role.step, role.row) for role in roles]
    assert [memory.host for memory in memories["none"]] == [0, 0]
    first, last = memories["offload"]
    assert first.host > 1.9 * last.host  # two micro-batches are under way, and one
    assert copied == [2 * first.host, 4 * last.host]  # each of four micro-batches once
    plain, _ = memories["none"]
    spared = plain.peak - first.peak
    # Of six blocks three are on the device: the last of the newest forward, the one whose backward runs, and the next.
    assert 0.45 * first.host < spared < 0.6 * first.host


def test_on_the_cpu_explain_counts_everything_as_it_is() -> None:
    run = load([*WIDE.split(), "--device", "cpu", "--parallel.recompute", "offload:2"], FAMILIES)
    (role,) = measure(MeasuredRun.of(run))
    (plain,) = measure(MeasuredRun.of(run.with_values({"parallel.recompute": "none"})))
    assert (role.memory.peak, role.memory.host) == (plain.memory.peak, 0)


def test_activations_that_the_host_does_not_hold_are_rejected() -> None:
    run = load(["--mesh", "dp2"], FAMILIES)
    assert host_fault(run, {"0": 2**30}, 2 * 2**30) is None
    fault = host_fault(run, {"0": 2**30}, 2 * 2**30 - 1)
    assert "larger than the memory of their host (got 2.00 GiB for 2 ranks" in str(fault)
