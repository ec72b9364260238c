"""Under cp a block that mixes tokens outside of `Attend` is rejected: it would train on its rank's columns alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.matrix.layouts import Case
from weft.comm.comm import Comm
from weft.config.schema import DpoConfig
from weft.core.attention_mask import AttentionMask
from weft.models import FAMILIES
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.preference import PreferenceLoss
from weft.parallel.context import probe
from weft.parallel.context.probe import check_blocks
from weft.testing import run_ranks

DIM = 12


class OwnAttention(nn.Module):
    """Attention of its own: no seam."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        one_head = self.qkv(x).unflatten(-1, (3, 1, -1))
        q, k, v = one_head.permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class SeamAttention(nn.Module):
    """The same by `Attend`, with dropout, which must not look like mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.dropout = nn.Dropout(0.5)
        self.attend = Attend(mask=AttentionMask(window=3))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        one_head = self.qkv(x).unflatten(-1, (3, 1, -1))
        q, k, v = one_head.unbind(2)
        attended = self.attend(q, k, v, batch).flatten(2)
        return self.dropout(x + attended)


class Convolution(nn.Module):
    """Mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class CountsItself(nn.Module):
    """Learned positions by the place in the tensor, not by batch.positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(20, DIM)
        self.pos = nn.Embedding(20, DIM)

    def forward(self, tokens: Tensor, batch: Batch) -> Tensor:
        positions = torch.arange(tokens.shape[1])
        return self.tok(tokens) + self.pos(positions)


class RotatesByPlace(SeamAttention):
    """Rotates queries and keys by the place in the tensor. Before, it passed: values do not show it."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, -1)).unbind(2)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]
        return x + self.attend(q * angles.cos(), k * angles.cos(), v, batch).flatten(2)


class MeanOverSequence(nn.Module):
    """Adds the mean of the sequence."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + x.mean(1, keepdim=True)


class GatedMLP(nn.Module):
    """Treats every token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("block", [OwnAttention, Convolution, MeanOverSequence, RotatesByPlace])
def test_a_block_that_mixes_tokens_is_rejected(block: type[nn.Module], device: str) -> None:
    with pytest.raises(
        weft.WeftError, match=r"layer1: mixes tokens outside of Attend, or counts positions itself"
    ):
        check_blocks(
            {"layer0": GatedMLP().to(device), "layer1": block().to(device)}, hidden_shape=(DIM,)
        )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_positions_that_a_block_counts_itself_are_rejected(device: str) -> None:
    with pytest.raises(
        weft.WeftError, match=r"embed: mixes tokens outside of Attend, or counts positions itself"
    ):
        check_blocks({"embed": CountsItself().to(device)}, hidden_shape=None)


def test_blocks_that_may_gather_are_named() -> None:
    class Gathering(Convolution):
        may_gather_sequence = True

    blocks = {"layer0": GatedMLP(), "layer1": Gathering(), "layer2": GatedMLP()}
    (name,) = check_blocks(blocks, hidden_shape=(DIM,))
    assert name == "layer1"


def test_a_block_that_is_too_large_to_be_computed_gathers_as_the_others_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gathering(Convolution):
        may_gather_sequence = True

    monkeypatch.setattr(probe, "MOST_ALL", 1)
    blocks = {f"layer{index}": Gathering() for index in range(3)}
    assert list(check_blocks(blocks, hidden_shape=(DIM,))) == list(blocks)


class MixesInAPart(nn.Module):
    """A convolution between layers that treat every token by itself."""

    may_gather_sequence = True
    gatherable_parts = ("before", "mixer", "behind")

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixer, self.behind = GatedMLP(), Convolution(), GatedMLP()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.behind(x + self.mixer(self.before(x, batch), batch), batch)


class MixesInTwoParts(MixesInAPart):
    """The same behind a mean: no part alone is enough."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True), batch)


@pytest.mark.parametrize(("block", "part"), [(MixesInAPart, "mixer"), (MixesInTwoParts, "")])
def test_the_part_of_a_block_that_mixes_is_found(block: type[nn.Module], part: str) -> None:
    (found,) = check_blocks({"layer0": block()}, hidden_shape=(DIM,)).values()
    assert found.part == part


def test_three_ranks_share_a_sequence() -> None:
    """Documents were checked on 8 columns, which 3 ranks do not divide."""
    check_blocks({"layer0": SeamAttention()}, hidden_shape=(DIM,), length=36, degree=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_blocks_that_mix_through_attend_pass_unchanged(dtype: torch.dtype) -> None:
    blocks = {"layer0": SeamAttention().to(dtype), "layer1": GatedMLP().to(dtype)}
    implementation = blocks["layer0"].attend.implementation
    before = [param.clone() for param in blocks["layer0"].parameters()]
    check_blocks(blocks, hidden_shape=(DIM,))
    assert blocks["layer0"].attend.implementation is implementation
    assert blocks["layer0"].dropout.training
    for pair in zip(before, blocks["layer0"].parameters(), strict=True):
        assert torch.equal(*pair)


@pytest.mark.parametrize(
    "family", sorted(name for name, known in FAMILIES.items() if known.Config.kind == "tokens")
)
def test_families_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not checked in use; here they are."""
    monkeypatch.setattr(probe, "_is_tested", lambda module: False)
    with torch.device("meta"):
        blocks = FAMILIES[family].blocks(FAMILIES[family].Config())
    others = ("mtp", "loss")
    main = {name: block for name, block in blocks.items() if not name.startswith(others)}
    check_blocks(main, hidden_shape=None)


def test_a_loss_of_pairs_behind_blocks_of_a_user_is_not_run() -> None:
    """It cannot be run on tokens alone: the run was rejected."""
    check_blocks({"layer0": GatedMLP(), "loss": PreferenceLoss(DpoConfig())}, hidden_shape=(DIM,))


def test_a_block_that_takes_no_short_sequences_is_named() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor, batch: Batch) -> Tensor:
            return x.view(2, 64, DIM)

    with pytest.raises(
        weft.WeftError,
        match=r"layer0: the check for context parallelism cannot run it on 64 sequences of 8 tokens: shape",
    ):
        check_blocks({"layer0": Fixed()}, hidden_shape=(DIM,))


@pytest.mark.parametrize("mesh", ["cp2", "pp2 cp2"])
def test_parallelize_rejects_own_attention_in_a_model(mesh: str) -> None:
    def rank(comm: Comm) -> None:
        case = Case(mesh)
        blocks = FAMILIES["llama3"].blocks(case.config)
        blocks["layer3"].attn = OwnAttention(case.config.dim)
        qkv_axes = {
            "layer3.attn.qkv.weight": ("whole", "whole"),
            "layer3.attn.qkv.bias": ("whole",),
        }
        weft.parallelize(blocks, case.plan, comm, axes={**FAMILIES["llama3"].AXES, **qkv_axes})

    with pytest.raises(weft.WeftError, match="layer3: mixes tokens outside of Attend"):
        run_ranks(mesh, rank)


def test_answers_that_are_kept_keep_no_block_and_no_tensor() -> None:
    block = SeamAttention()
    left = weakref.ref(block), weakref.ref(block.qkv.weight)
    check_blocks({"layer0": block}, hidden_shape=(DIM,))
    del block
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_a_tensor_that_gets_the_id_of_a_freed_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the answer for the freed block would be that for one that mixes tokens."""
    monkeypatch.setattr(probe, "MOST_TABLE_ENTRIES", 4)
    monkeypatch.setattr(probe, "id", lambda tensor: 7, raising=False)

    class Mixture(nn.Module):
        def __init__(self, mixing: Tensor) -> None:
            super().__init__()
            self.register_buffer("mixing", mixing)

        def forward(self, x: Tensor, batch: Batch) -> Tensor:
            return x if self.mixing.equal(torch.eye(8)) else x + x.mean(1, keepdim=True)

    block = Mixture(torch.eye(8))
    check_blocks({"layer0": block}, hidden_shape=(DIM,))
    del block
    with pytest.raises(weft.WeftError, match="layer0"):
        check_blocks({"layer0": Mixture(torch.ones(8, 8))}, hidden_shape=(DIM,))
