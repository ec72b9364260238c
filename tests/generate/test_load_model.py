"""Each rank reads its own boxes of stored tensors, once, and what does not fit is named."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.generate.models import Memory, config_of, plain, plan_of, stored
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.errors import CheckpointError
from weft.generate.decode import load_model
from weft.models import FAMILIES
from weft.testing import run_ranks


@dataclass(frozen=True)
class Counted(Memory):
    """A source that knows what was read."""

    reads: list[tuple[str, int]] = field(default_factory=list)

    def read(self, name: str, box: Box) -> Tensor:
        self.reads.append((name, box.size))
        return super().read(name, box)


@pytest.mark.parametrize(
    ("family", "mesh"), [("qwen3", "pp2 tp2"), ("deepseek", "ep2 tp2"), ("gpt2", "tp4")]
)
def test_every_rank_reads_its_own_shards_only(family: str, mesh: str):
    config = config_of(family)
    source = stored(config, plain(config))

    def rank(comm: Comm) -> None:
        counted = Counted(source.tensors)
        model = load_model(FAMILIES[family], config, counted, plan=plan_of(config, mesh), comm=comm)
        assert sorted(counted.reads) == sorted(
            (piece.owner, piece.box.size) for piece in model.shards.values()
        )
        for name, piece in model.shards.items():
            expected = source.tensors[piece.owner][piece.box.slices]
            assert torch.equal(model.params[name], expected)
            assert not model.params[name].requires_grad

    run_ranks(mesh, rank)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("layer1.attn.o.weight"),
            "layer1.attn.o.weight: is not in the checkpoint",
        ),
        (
            lambda tensors: tensors.update({"head.norm.weight": torch.ones(33)}),
            r"head.norm.weight: is stored with another shape \(got \(33,\); need \(32,\)\)",
        ),
    ],
)
def test_an_unfit_tensor_is_named(change, message: str):
    config = config_of("llama3")
    tensors = dict(stored(config, plain(config)).tensors)
    change(tensors)
    plan = plan_of(config, "tp2")
    with pytest.raises(CheckpointError, match=message):
        run_ranks(
            "tp2",
            lambda comm: load_model(
                FAMILIES["llama3"], config, Memory(tensors), plan=plan, comm=comm
            ),
        )
