"""Noise on embeddings (NEFTune): its size by the formula of the paper, its place in each model, the same on any shard."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.small_models import TEXT_FAMILIES, small_config
from weft.core.entry_places import DimShard, ShardingRank
from weft.data.order import draw_keys
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.models.common.batch import Batch, token_batch
from weft.models.common.dropout_mode import CounterDropout, may_drop, run_block
from weft.models.common.embedding_noise import embedding_noise
from weft.models.common.neftune import noisy

ALPHA = 5.0


def keys_of(num: int) -> Tensor:
    return torch.from_numpy(draw_keys(np.arange(num), seed=3))


def noise_of(x: Tensor, alpha: float = ALPHA, **options: Any) -> Tensor:
    with CounterDropout("embed", keys_of(len(x)), **options):
        return embedding_noise(x, alpha) - x


def test_noise_is_uniform_of_the_amplitude_of_the_paper() -> None:
    """alpha / sqrt(L d) x uniform(-1, 1), as transformers' hook draws it."""
    noise = noise_of(torch.zeros(8, 64, 128, dtype=torch.float64))
    amplitude = ALPHA / math.sqrt(64 * 128)
    assert 0.9999 * amplitude < float(noise.abs().max()) <= amplitude
    sigma = 1 / math.sqrt(noise.numel())
    assert abs(float((noise / amplitude).mean())) < 6 * sigma
    assert abs(float((noise / amplitude).square().mean()) - 1 / 3) < 6 * sigma
    quarters = torch.histc(noise / amplitude, bins=4, min=-1, max=1) / noise.numel()
    assert (quarters - 0.25).abs().max() < 6 * sigma
    assert noise.unique().numel() > 0.99 * noise.numel()
    assert len({tuple(row) for row in noise[:, :4, 0].tolist()}) == 8


def test_the_length_is_that_of_each_document_without_padding() -> None:
    documents = torch.tensor([[0] * 4 + [1] * 9 + [2] * 3, [7] * 16])
    x = torch.zeros(2, 16, 6, dtype=torch.float64)
    whole = noise_of(x)
    lengths = torch.tensor([[4.0] * 4 + [9.0] * 9 + [3.0] * 3, [16.0] * 16], dtype=torch.float64)
    expected = whole * (16 / lengths).sqrt().unsqueeze(-1)
    torch.testing.assert_close(noise_of(x, documents_BT=documents), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_round_the_sum_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 6).to(dtype)
    with CounterDropout("embed", keys_of(2)):
        found = embedding_noise(x, ALPHA)
    exact = x.double() + noise_of(torch.zeros(2, 8, 6, dtype=torch.float64))
    torch.testing.assert_close(found, exact.to(dtype))


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("tensor_index", [0, 1])
def test_a_part_of_the_columns_has_the_noise_of_the_whole(
    tensor_index: int, has_documents: bool
) -> None:
    """cp2 with sequence parallelism over tp2: rank 1 of cp holds the columns 4 to 11 of 16."""
    documents = torch.arange(16).expand(3, 16) // 5 if has_documents else None
    x = torch.randn(3, 16, 6, dtype=torch.float64)
    whole = noise_of(x, documents_BT=documents)
    columns = slice(4 + 4 * tensor_index, 8 + 4 * tensor_index)
    part = noise_of(
        x[:, columns],
        documents_BT=documents,
        calls=((DimShard(), DimShard(columns=True, sharded=True), DimShard()),),
        rank=ShardingRank(1, 2, tensor_index, 2),
    )
    torch.testing.assert_close(part, whole[:, columns], rtol=0, atol=1e-15)


def batch_of(vocab: int) -> Batch:
    tokens = torch.randint(0, vocab, (2, 8), generator=torch.Generator().manual_seed(0))
    return replace(token_batch(tokens, tokens), draw_keys=keys_of(2))


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_every_family_adds_it_to_what_its_embedding_yields(name: str) -> None:
    """As a hook on transformers' input embedding: Gemma's scale comes before it."""
    config = small_config(name)
    family = noisy(FAMILIES[name], ALPHA)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = family.blocks(config)
    batch = batch_of(config.axis_sizes()["vocab"])
    embed = blocks["embed"].double()
    assert may_drop(embed)
    with torch.no_grad():
        plain = embed(batch.inputs, batch)
        found = run_block("embed", embed, batch.inputs, batch)
        right = noise_of(torch.zeros_like(plain))
    torch.testing.assert_close(found - plain, right, rtol=1e-12, atol=1e-15)
    evaluated = replace(batch, draw_keys=None)
    with torch.no_grad():
        assert torch.equal(run_block("embed", embed, batch.inputs, evaluated), plain)


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
def test_it_is_added_where_transformers_adds_it(name: str) -> None:
    """A hook on `get_input_embeddings()` of transformers' own model sees the noise in its result."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        name, vocab_size=53, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    from weft.models.common.embedding_noise import with_noise

    model = transformers.AutoModelForCausalLM.from_config(config)
    embedding = model.get_input_embeddings()
    tokens = batch_of(53).inputs
    with torch.no_grad():
        plain = embedding(tokens)
        with_noise(embedding, ALPHA)
        assert torch.equal(embedding(tokens), plain)
        with CounterDropout("embed", keys_of(2)):
            found = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(found - plain, noise_of(torch.zeros_like(plain)), rtol=0, atol=1e-6)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(53, 4)
        self.other = nn.Embedding(53, 4)


class TwoTablesFamily:
    @staticmethod
    def blocks(_config: object) -> dict[str, nn.Module]:
        return {"embed": TwoTables()}


def test_an_embedding_that_is_not_clear_is_rejected_by_name() -> None:
    family: Any = TwoTablesFamily()
    with pytest.raises(PlanError, match="neftune: which embedding of the block embed"):
        noisy(family, ALPHA).blocks(small_config("llama3"))
