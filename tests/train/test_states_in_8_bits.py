"""Optimizer states in 8 bits: the map of codes, blocks that shards cut, memory, and what a run may ask for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_optimizer_states import resume, run_of, write
from tests.matrix.layouts import Case
from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.config.optimizers import resume_values
from weft.config.rules.values import optimizer_faults
from weft.config.schema import OptimConfig, OptimGroup
from weft.core.axes import Box, blocks_begun_in, boxes, boxes_of_range
from weft.core.mesh import Mesh
from weft.errors import CheckpointError
from weft.parallel.zero.matrix_shards import param_entries
from weft.parallel.zero.param_entries import ParamEntries
from weft.parallel.zero.state_codes import SIGNED, UNSIGNED, StateBlocks, codes_of, values_of
from weft.prove.plain_codes import code_values, rounded_to_8_bits
from weft.testing import run_ranks
from weft.train.build_training import build_step
from weft.train.optim import NamedOptimizer, make_optimizer

SHAPE = (3, 50)
LENGTH = 16
IN_8_BITS = OptimConfig(state_dtype="8bit", state_block=10)
SMALL = {"layers": 2, "microbatches": 2}


def stored(values: Tensor, blocks: StateBlocks, *, dtype: torch.dtype) -> Tensor:
    """The values after they were codes."""
    codes = torch.zeros_like(values, dtype=dtype)
    absmax = blocks.absmax(values)
    blocks.encode(values, absmax, codes)
    return blocks.decode(codes, absmax, dtype=values.dtype)


def random_values(*, is_signed: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of magnitudes over eight decades."""
    generator = torch.Generator().manual_seed(4)
    exponents = -8 * torch.rand(SHAPE, dtype=torch.float64, generator=generator)
    signs = 1 - 2 * torch.randint(0, 2, SHAPE, generator=generator) * is_signed
    return (signs * 10**exponents).to(dtype)


def test_codes_stand_for_squares_and_fourth_powers() -> None:
    signed = torch.arange(-127, 128, dtype=torch.int32).to(SIGNED)
    unsigned = torch.arange(256, dtype=torch.int32).to(UNSIGNED)
    for codes in (signed, unsigned):
        found = values_of(codes, torch.float64)
        right = code_values(has_sign=codes.dtype == SIGNED)
        assert found.tolist() == pytest.approx(right, rel=1e-12)
        assert right[-1] == 1.0
        assert codes_of(found, codes.dtype)[1:].equal(codes[1:])
    assert codes_of(torch.zeros(1), UNSIGNED).item() == 1, "no second moment is 0"
    assert code_values(has_sign=True)[[*range(-127, 128)].index(-64)] == -((64 / 127) ** 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED])
def test_codes_are_the_nearest_values_and_stay_what_they_are(
    codes: torch.dtype, dtype: torch.dtype
) -> None:
    values = random_values(is_signed=codes == SIGNED, dtype=dtype)
    blocks = StateBlocks.of(ParamEntries.whole(SHAPE), LENGTH)
    once = stored(values, blocks, dtype=codes)
    assert torch.equal(stored(once, blocks, dtype=codes), once)
    key = "exp_avg" if codes == SIGNED else "exp_avg_sq"
    right = rounded_to_8_bits(key, values, LENGTH)
    rounding = max(1e-12, 8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(once, right, rtol=rounding, atol=0.0)


def test_a_second_moment_is_not_rounded_to_zero() -> None:
    """A step would be divided by `eps` alone."""
    values = torch.tensor([[1.0, 1e-30, 0.0, 0.5]], dtype=torch.float64)
    blocks = StateBlocks.of(ParamEntries.whole((1, 4)), LENGTH)
    found = stored(values, blocks, dtype=UNSIGNED)
    assert found[0].tolist() == pytest.approx([1.0, 255**-4, 255**-4, 0.5], rel=0.01)
    assert not stored(values * 0, blocks, dtype=UNSIGNED).any()


def test_every_block_begins_in_one_of_the_boxes_that_cover_a_tensor() -> None:
    whole = Box.whole(SHAPE)
    parts = [
        *boxes_of_range(whole, 0, 37),
        *boxes_of_range(whole, 37, 119),
        *boxes_of_range(whole, 119, 150),
    ]
    begun = [blocks_begun_in(part, LENGTH) for part in parts]
    assert sum(box.size for box in begun) == 3 * math.ceil(50 / LENGTH)
    spread = boxes(SHAPE, ("", "x"), rule={"x": "tp"}, mesh=Mesh.parse("tp3"))
    assert sum(blocks_begun_in(box, LENGTH).size for box in spread) == 12


def test_blocks_are_cut_where_a_shard_ends_within_them() -> None:
    whole = Box.whole(SHAPE)
    of_ranks = (boxes_of_range(whole, 0, 40), boxes_of_range(whole, 40, 150))
    for index, own in enumerate(([2], [0])):
        entries = ParamEntries(
            SHAPE, (), ("dp",), index, lambda rank: of_ranks[rank], num_holders=2
        )
        blocks = StateBlocks.of(entries, LENGTH)
        assert blocks.cut.tolist() == [2], "entries 32 to 47 of the first row"
        assert blocks.own_cut[0].tolist() == own
    assert StateBlocks.of(ParamEntries.whole(SHAPE), LENGTH).cut.tolist() == []


@pytest.mark.parametrize(
    "case", [Case("dp2 tp2", zero=3, **SMALL), Case("dp2 tp2", zero=1, **SMALL)], ids=str
)
def test_all_ranks_have_one_view_of_where_entries_are(case: Case) -> None:
    """Also where tp divides unevenly: ZeRO then cuts the shards of tp ranks at other entries."""

    def rank(comm: Comm) -> dict[str, list[tuple[Box, ...]]]:
        step = build_step(case.run, comm)
        found = {}
        for name, entries in param_entries(step.model, step.grads).items():
            own = step.grads.sharded_params.get(name, torch.zeros(0))
            assert sum(box.size for box in entries.own_boxes) == own.numel()
            found[name] = [entries.boxes_at(index) for index in range(entries.num_holders)]
        return found

    first, *others = run_ranks(case.mesh, rank)
    for name, holders in first.items():
        if len(holders) == case.grid.size:
            assert all(other[name] == holders for other in others), name


def test_two_bytes_hold_the_moments_of_an_entry() -> None:
    params = {"layer0.weight": torch.zeros(64, 512), "layer0.bias": torch.zeros(512)}
    optimizer = make_optimizer(params, OptimConfig(state_dtype="8bit"))
    sizes = {name: sum(x.nbytes for x in state.values()) for name, state in optimizer.state.items()}
    num_blocks = 64 * 512 // 256
    assert sizes["layer0.weight"] == 2 * 64 * 512 + 2 * 4 * num_blocks + 4
    assert sizes["layer0.bias"] == 2 * 4 * 512 + 4


def test_embeddings_vectors_and_small_matrices_keep_the_type_of_parameters() -> None:
    shapes = {
        "embed.tok": (64, 64),
        "layer0.a": (64, 64),
        "layer0.b": (64, 63),
        "layer0.c": (9999,),
    }
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(params, OptimConfig(state_dtype="8bit"))
    assert list(optimizer.state_blocks()) == ["layer0.a"]
    group = OptimGroup(match="embed*", state_dtype="8bit")
    other = OptimGroup(match="layer0.a", state_dtype="params")
    optimizer = make_optimizer(params, OptimConfig(state_dtype="8bit", groups=(group, other)))
    assert list(optimizer.state_blocks()) == ["embed.tok"]


def test_a_resume_on_another_layout_has_the_same_codes(tmp_path: Path) -> None:
    """Codes and scales have places in the whole parameter, and are not rounded again."""
    case = Case("dp2 tp2", zero=2, **SMALL)
    write(tmp_path, case, IN_8_BITS)
    stored_tensors = open_checkpoint(tmp_path / "step-000001")
    names = [each for each in stored_tensors.manifest.tensors if each.endswith("mlp.up.weight")]
    assert {stored_tensors.manifest.tensors[each].dtype for each in names} == {
        "float64", "int8", "uint8", "float32",
    }  # fmt: skip
    for other in (Case("", layers=2, microbatches=4), Case("pp2", layers=2, microbatches=4)):

        def rank(comm: Comm, case: Case = other) -> int:
            step = build_step(run_of(case, IN_8_BITS), comm)
            step.restore(stored_tensors)
            assert isinstance(step.optimizer, NamedOptimizer)
            num_compared = 0
            for name, state in step.optimizer.state.items():
                for key, tensor in state.items():
                    section = stored_tensors.section(f"optim/{key}")
                    shape = section.shapes[name]
                    right = section.read(name, Box.whole(shape))
                    assert torch.equal(tensor.view(shape), right), (name, key)
                    num_compared += tensor.dtype in (SIGNED, UNSIGNED)
            return num_compared

        assert sum(run_ranks(other.mesh, rank)) > 20


def test_states_of_other_bits_or_blocks_are_not_read(tmp_path: Path) -> None:
    case = Case("dp2", **SMALL)
    write(tmp_path, case, IN_8_BITS)
    with pytest.raises(CheckpointError, match=r"another optimizer .* --optim\.on_change fresh"):
        resume(tmp_path, case, OptimConfig())
    with pytest.raises(CheckpointError, match="stored with another shape"):
        resume(tmp_path, case, IN_8_BITS.model_copy(update={"state_block": 5}))
    values = [
        resume_values(optim.model_dump(mode="json"))
        for optim in (OptimConfig(), IN_8_BITS, IN_8_BITS.model_copy(update={"state_block": 5}))
    ]
    assert values[0] != values[1] != values[2]
    older = {"name": "adamw", "groups": []}
    assert resume_values(older) == values[0], "a config of before there were 8 bits"


def test_adafactor_has_no_8_bits() -> None:
    faults = [
        str(fault) for fault in optimizer_faults(OptimConfig(name="adafactor", state_dtype="8bit"))
    ]
    assert faults == [
        "optim.state_dtype: adafactor keeps sums of rows and columns, which have no 8 bits "
        "(got 8bit; need params). Fix: leave it out, or --optim.name adamw"
    ]
    group = OptimGroup(match="head*", state_dtype="8bit")
    (fault,) = optimizer_faults(OptimConfig(name="adafactor", groups=(group,)))
    assert fault.key == "optim.groups"


def test_a_skipped_update_on_the_device_changes_nothing() -> None:
    params = {"layer0.weight": torch.nn.Parameter(torch.randn(64, 512))}
    params["layer0.weight"].grad = torch.randn(64, 512)
    optimizer = make_optimizer(params, OptimConfig(state_dtype="8bit"))
    optimizer.step(skip=torch.zeros(()))
    before = {key: x.clone() for key, x in optimizer.state["layer0.weight"].items()}
    kept = params["layer0.weight"].detach().clone()
    optimizer.step(skip=torch.ones(()))
    assert torch.equal(params["layer0.weight"], kept)
    for key, value in optimizer.state["layer0.weight"].items():
        assert torch.equal(value, before[key]), key


def test_blocks_of_zeros_stay_zero_where_denormals_are_flushed() -> None:
    """First moments of an adapter are zero in the first step; 0 over a flushed denormal is NaN."""
    was_flushed = (torch.tensor(2.0**-1040, dtype=torch.float64) * 1.0 == 0).item()
    torch.set_flush_denormal(True)
    try:
        right = rounded_to_8_bits("exp_avg", torch.zeros(SHAPE, dtype=torch.float64), LENGTH)
    finally:
        torch.set_flush_denormal(was_flushed)
    assert torch.equal(right, torch.zeros_like(right))
