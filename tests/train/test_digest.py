"""Digests of the training state: a flipped bit is found on its rank, in any tensor, under any layout; no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.matrix.layouts import CLIP, LR, Case, batches, build_case
from tests.one_device import micro_batches
from tests.spoiled_runs import events_of, words_of, write_text
from weft.checkpoint.folder import checkpoints
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED
from weft.testing import run_ranks
from weft.train import build_training
from weft.train.digest import (
    ReplicatedTensor,
    StateDigests,
    StateFault,
    digest,
    digest_weights,
    first_ranks,
)
from weft.train.optim import make_optimizer, matrices
from weft.train.step import TrainStep

WEIGHTS = digest_weights(torch.device("cpu"))
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, *, entry: int, bit: int) -> None:
    """Flip one bit of one entry in place."""
    num_bits = 8 * tensor.element_size()
    is_sign = bit == num_bits - 1
    dtype = INTEGERS[tensor.element_size()]
    number = -1 << bit if is_sign else 1 << bit
    mask = torch.tensor(number).to(dtype)
    flat = tensor.detach().view(dtype).view(-1)
    flat[entry] = flat[entry] ^ mask


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool]),
    st.integers(1, 300),
    st.integers(0, 5),
    st.data(),
)
def test_every_flipped_bit_changes_the_digest_and_equal_bits_give_equal_digests(
    dtype: torch.dtype, length: int, offset: int, data: st.DataObject
) -> None:
    memory = torch.arange(length + offset).remainder(2).to(dtype)
    tensor = memory[offset:]
    before = digest(tensor, WEIGHTS)
    assert digest(tensor.clone(), WEIGHTS) == before
    if dtype == torch.bool:
        num_bits = 1
    else:
        num_bits = 8 * tensor.element_size()
    entry = data.draw(st.integers(0, length - 1))
    bit = data.draw(st.integers(0, num_bits - 1))
    if dtype == torch.bool:
        raw = tensor.view(torch.uint8)
    else:
        raw = tensor
    flip(raw, entry=entry, bit=bit)
    assert digest(tensor, WEIGHTS) != before


def test_digests_depend_on_places_also_beyond_one_row_of_weights() -> None:
    values = torch.arange(400_000, dtype=torch.float32)
    first = values[0:2]
    second = values[262_144:262_146]
    exchanged = values.clone()
    exchanged[0:2] = second
    exchanged[262_144:262_146] = first
    assert digest(values, WEIGHTS) != digest(exchanged, WEIGHTS)
    four = torch.zeros(4)
    five = torch.zeros(5)
    assert digest(four, WEIGHTS) != digest(five, WEIGHTS)


def test_the_first_rank_of_every_group_is_known_without_listing_groups() -> None:
    mesh = Mesh.parse("pp2 dp3 cp2 tp2")
    classes = (("dp",), ("cp",), ("dp", "tp"), ("dp", "cp", "tp"))
    leaders = first_ranks(mesh, classes)
    for rank in range(mesh.size):
        expected = [mesh.group(rank, axes)[0] for axes in classes]
        assert leaders[rank].tolist() == expected


def trained(case: Case, comm: Comm) -> TrainStep:
    """A step object after one step."""
    model = build_case(case, comm)
    decay_names = matrices(model.params)
    step = TrainStep(
        model,
        make_optimizer=lambda tensors: make_optimizer(
            tensors, OptimConfig(), decay_names=decay_names
        ),
        clip=CLIP,
    )
    for batch in batches(case)[:1]:
        step(micro_batches(batch, case.plan, comm.rank), lr=LR)
    return step


def tensor_of(digests: StateDigests, prefix: str) -> ReplicatedTensor:
    """The first tensor of the state under a prefix with entries."""
    for each in digests._tensors():
        if each.name.startswith(prefix) and each.tensor.numel():
            return each
    raise AssertionError(f"no tensor {prefix}")


LAYOUTS = {
    "dp3": Case("dp3", microbatches=1, layers=2),
    "dp2 tp2": Case("dp2 tp2", microbatches=1, layers=2),
    "pp2 dp3": Case("pp2 dp3", microbatches=2, layers=2),
    "dp3 tp2, zero 1": Case("dp3 tp2", microbatches=1, layers=2, zero=1),
    "dp2 cp2, zero 2": Case("dp2 cp2", microbatches=1, layers=2, zero=2),
    "dp2 tp2, zero 3": Case("dp2 tp2", microbatches=1, layers=2, zero=3),
    "ep2 dp2, mixture": Case("dp2 ep2", family="deepseek", microbatches=1, layers=3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_of_a_correct_run_agree_and_nothing_changes_between_updates(name: str) -> None:
    case = LAYOUTS[name]

    def faults(comm: Comm) -> tuple[StateFault | None, bool]:
        step = trained(case, comm)
        digests = StateDigests(step.state(), every=1)
        fault = digests.compare(1)
        batch = batches(case)[1]
        has_changed: list[bool] = []
        step(
            micro_batches(batch, case.plan, comm.rank),
            lr=LR,
            status=lambda: int(has_changed.append(digests.has_changed()) or 0),
        )
        return fault, has_changed[0]

    expected = [(None, False)] * case.grid.size
    assert run_ranks(case.mesh, faults) == expected


def flipped(prefix: str, rank: int, *, bit: int = 0) -> Callable[[StateDigests], None]:
    def spoil(digests: StateDigests) -> None:
        if digests.comm.rank == rank:
            flip(tensor_of(digests, prefix).tensor, entry=0, bit=bit)

    return spoil


REPLICAS = [
    ("dp3", "model/layer0.attn.q", (2,)),
    ("dp3", "optim/exp_avg/layer1.mlp.down", (1,)),
    ("dp3", "optim/exp_avg_sq/layer1.mlp.down", (0,)),
    ("dp2 tp2", "model/layer0.attn.q", (0, 2)),
    ("pp2 dp3", "optim/exp_avg/", (4,)),
    ("dp3 tp2, zero 1", "compute/layer0.attn.q", (3,)),
    ("dp2 cp2, zero 2", "compute/layer0.attn.q", (1,)),
    ("dp2 tp2, zero 3", "model/layer0.attn_norm", None),
    ("ep2 dp2, mixture", "model/layer1.mlp.router.bias", (3,)),
]


@pytest.mark.parametrize(("name", "prefix", "ranks"), REPLICAS)
def test_a_replica_that_differs_is_named_or_both_of_two(
    name: str, prefix: str, ranks: tuple[int, ...] | None
) -> None:
    case = LAYOUTS[name]
    rank = ranks[-1] if ranks else 1

    def fault(comm: Comm) -> tuple[StateFault | None, str, tuple[int, ...]]:
        state = trained(case, comm).state()
        digests = StateDigests(state, every=1)
        flipped(prefix, rank, bit=3)(digests)
        if comm.rank == rank:
            each = tensor_of(digests, prefix)
        else:
            each = None
        if each:
            group = comm.mesh.group(rank, each.axes)
        else:
            group = ()
        return digests.compare(7), each.name if each else "", group

    results = run_ranks(case.mesh, fault)
    found = results[0][0]
    _, tensor, group = results[rank]
    assert found is not None
    assert {result[0] for result in results} == {found}, "every rank has the same fault"
    assert found.tensors == (tensor,)
    assert found.ranks == ((rank,) if len(group) > 2 else group)
    if ranks:
        assert found.ranks == ranks
    first = found.ranks[0]
    place = case.grid.coord_text(first)
    assert f"step 7: rank {first} ({place})" in found.text


@pytest.mark.parametrize("prefix", ["model/", "optim/exp_avg_sq/", "optim/step/"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2 cp2, zero 2", marks=pytest.mark.slow),
        "dp2 tp2, zero 3",
        pytest.param("dp2 tp2", marks=pytest.mark.slow),
    ],
)
def test_a_bit_that_flips_between_two_updates_is_found_without_a_replica(
    name: str, prefix: str
) -> None:
    case = LAYOUTS[name]

    def fault(comm: Comm) -> tuple[bool, StateFault]:
        state = trained(case, comm).state()
        digests = StateDigests(state, every=1)
        assert digests.compare(7) is None
        flipped(prefix, 1, bit=3)(digests)
        has_changed = digests.has_changed()
        return has_changed, digests.changed_fault(8)

    results = run_ranks(case.mesh, fault)
    actual = [has_changed for has_changed, _ in results]
    assert actual == [rank == 1 for rank in range(4)]
    found = results[0][1]
    assert {fault for _, fault in results} == {found}
    assert found.ranks == (1,)
    assert found.tensors[0].startswith(prefix)
    assert "changed between two updates: a bit flipped in memory" in found.text


def test_a_run_whose_replicas_differ_stops_before_the_save_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_digests = build_training.build_digests

    def spoiled(run: object, step: TrainStep) -> StateDigests | None:
        digests = build_digests(run, step)
        compare = digests.compare

        def compare_spoiled(number: int) -> StateFault | None:
            if number == 4 and step.model.comm.rank == 2:
                flip(step.model.params["layer0.attn.q.weight"], entry=3, bit=40)
            return compare(number)

        digests.compare = compare_spoiled
        return digests

    monkeypatch.setattr(build_training, "build_digests", spoiled)
    text = write_text(tmp_path)
    out = tmp_path / "run"
    keys = ("--mesh", "dp4", "--guard.digest_every", "100", "--save.every", "2", "--steps", "9")
    argv = ["train", *words_of(text, out, *keys)]
    assert main(argv) == EXIT_FAILED
    message = capsys.readouterr().err
    assert "step 4: rank 2 (dp2) differs from its replicas: model/layer0.attn.q.weight" in message
    assert f"Go on from {out}/ckpt/step-000002: weft train {out}/run.toml --resume auto" in message
    assert [step for step, _ in checkpoints(out)] == [2]
    (guard,) = [event for event in events_of(out) if event["event"] == "guard"]
    assert guard["kind"] == "digest"
    assert guard["step"] == 4
    assert guard["ranks"] == [2]
