"""How far the rows that a model looks up may move: as far as the entries of its tables, and no further."""

from __future__ import annotations

import shlex

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.prove.faults import small_run
from weft.config.load import load
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.prove.bounds import MOST_RATES
from weft.prove.looked_up_rows import free_rows
from weft.prove.proof import prove, reference_bounds
from weft.prove.reference_trace import TensorKey
from weft.prove.subject import Subject, reduced_case

IDS_BS = torch.tensor([[1, 4, 1]])
BATCH = token_batch(IDS_BS, IDS_BS)
MUON = (
    "--model.name qwen3 --mesh tp2 --seed 478 --steps 6 --model.layers 2 --model.dim 32 --model.heads 8"
    " --model.kv_heads 2 --model.head_size 8 --model.ffn 48 --model.max_seq_len 64 --model.vocab 256"
    " --model.tied True --data.seq_len 24 --batch.micro_size 1 --batch.global_size 8 --optim.name muon"
    " --optim.clip 0 --optim.warmup 0 --parallel.sequence True --precision.compute bfloat16"
)


class Tables(nn.Module):
    """Rows of a table, changed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 2)
        self.pos = nn.Embedding(5, 2)
        self.change = change

    def forward(self, ids_BS: Tensor, batch: object) -> Tensor:
        rows: Tensor = self.tok(ids_BS)
        match self.change:
            case "scaled":
                return 3 * rows
            case "with positions":
                positions = torch.arange(ids_BS.shape[1])
                return rows + F.embedding(positions, self.pos.weight)
            case "normalised":
                return rows / rows.norm(dim=-1, keepdim=True)
            case "negative":
                return -rows
        return rows


@pytest.mark.parametrize("change", ["as they are", "scaled", "with positions"])
def test_looked_up_rows_move_by_what_their_entries_move(change: str) -> None:
    block = Tables(change)
    values = {path: param.detach() for path, param in block.named_parameters()}
    free = {path: torch.rand(5, 2, dtype=torch.float64) for path in values}
    rows = free_rows("embed", block, values=values, free=free, batch=BATCH)
    expected = free["tok.weight"][IDS_BS]
    if change == "scaled":
        expected = 3 * expected
    if change == "with positions":
        expected = expected + free["pos.weight"][:3]
    assert rows is not None
    torch.testing.assert_close(rows, expected)
    assert torch.equal(block.tok.weight, values["tok.weight"]), "the block itself is as before"


@pytest.mark.parametrize("change", ["normalised", "negative"])
def test_blocks_that_do_more_than_look_up_have_no_such_bound(change: str) -> None:
    block = Tables(change)
    values = {path: param.detach() for path, param in block.named_parameters()}
    free = {path: torch.rand(5, 2, dtype=torch.float64) for path in values}
    assert free_rows("embed", block, values=values, free=free, batch=BATCH) is None


def test_rows_are_bounded_by_few_learning_rates_of_steps_before() -> None:
    subject = Subject.of(small_run("--precision.compute bfloat16"), steps=2)
    bounds = reference_bounds(subject, skipped=frozenset())
    (key,) = bounds.free_outputs
    assert key == TensorKey(2, "forward", "embed.output")
    rows = bounds.free_outputs[key]
    assert rows.shape == bounds.plain.values[key].shape
    assert float(rows.max()) <= MOST_RATES * bounds.plain.lrs[1] * (1 + 1e-6)


def test_an_update_that_rounding_flips_on_a_layout_alone_is_no_fault() -> None:
    """One entry of a token's row, whose update by AdamW has another sign: 12% of the row's largest, where
    perturbed runs have flipped entries of other rows, and moved this output by 1%.
    """
    run = load(shlex.split(MUON), FAMILIES)
    report = prove(reduced_case(run, steps=2).opened())
    assert report.holds, "\n".join(report.lines())
