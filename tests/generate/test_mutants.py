"""Mutants of the key/value cache: each planted fault changes the generated tokens or their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generate.models import Generation, config_of, on_ranks, worst
from tests.generate.test_cached import SAME
from weft.core.attention_mask import AttentionMask
from weft.generate import cache, decode
from weft.generate.cache import DecodeBatch, KVCache

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[str, str, Patch]] = {}
UNEVEN = Generation(num_tokens=4)


def mutant(family: str, mesh: str = "") -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        assert patch.__doc__, "say what goes wrong"
        MUTANTS[patch.__name__] = family, mesh, patch
        return patch

    return register


def later(batch: DecodeBatch) -> bool:
    """Whether it is one behind the prompt."""
    return batch.start != 0


@mutant("llama3")
def keys_are_kept_one_cell_too_early(patch: pytest.MonkeyPatch) -> None:
    """Each new token overwrites the one before it, and its own cell stays empty."""
    right = KVCache.put

    def put(self: KVCache, k: Tensor, v: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        if not later(batch):
            return right(self, k, v, batch)
        earlier = tuple(position - 1 for position in batch.first_positions)
        shifted = replace(batch, cells=batch.cells - 1, first_positions=earlier)
        right(self, k, v, shifted)
        keys = self.keys[:, :, : batch.stop]
        values = self.values[:, :, : batch.stop]
        return keys, values

    patch.setattr(KVCache, "put", put)


@mutant("llama3")
def the_newest_token_does_not_see_itself(patch: pytest.MonkeyPatch) -> None:
    """One cell too few is read."""

    def visible_cells(batch: DecodeBatch, mask: AttentionMask) -> Tensor:
        return torch.arange(batch.stop) < batch.cells[:, None, :, None]

    patch.setattr(DecodeBatch, "visible_cells", visible_cells)


@mutant("gpt2")
def positions_do_not_advance(patch: pytest.MonkeyPatch) -> None:
    """Every token behind the prompt is at position 0 for the model; the cache has it right."""
    patch_positions(patch, lambda positions: positions * 0)


@mutant("qwen3")
def positions_are_one_too_high(patch: pytest.MonkeyPatch) -> None:
    """Behind the prompt every angle is one further."""
    patch_positions(patch, lambda positions: positions + 1)


def patch_positions(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change what blocks see of positions, not what the cache sees."""
    right = cache.decode_batch

    def decode_batch(tokens: Tensor, first_positions: Sequence[int], **rest: Any) -> DecodeBatch:
        batch = right(tokens, first_positions, **rest)
        if later(batch):
            return replace(batch, positions=change(batch.positions))
        return batch

    patch.setattr(decode, "decode_batch", decode_batch)


@mutant("llama3")
def queries_meet_another_head_of_keys(patch: pytest.MonkeyPatch) -> None:
    """Heads that share keys are dealt out in another order than in the prompt."""
    patch_cells(patch, lambda cells: cells.roll(1, dims=1))


@mutant("deepseek")
def rows_see_each_others_cells(patch: pytest.MonkeyPatch) -> None:
    """Each text goes on from another prompt."""
    patch_cells(patch, lambda cells: cells.roll(1, dims=0))


def patch_cells(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    right = KVCache.put

    def put(self: KVCache, k: Tensor, v: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        keys, values = right(self, k, v, batch)
        if later(batch):
            return (change(keys), change(values))
        return (keys, values)

    patch.setattr(KVCache, "put", put)


@mutant("llama3")
def what_lies_behind_a_short_prompt_is_seen(patch: pytest.MonkeyPatch) -> None:
    """Without a mask, cells that were filled up to the longest prompt count as text."""
    patch.setattr(DecodeBatch, "visible_cells", lambda batch, mask: None)


@mutant("llama3")
def logits_are_those_behind_the_longest_prompt(patch: pytest.MonkeyPatch) -> None:
    """A short prompt's next token is chosen behind what it was filled up with."""
    right = decode.Decoder._forward
    patch.setattr(
        decode.Decoder,
        "_forward",
        lambda self, batch, lasts: right(self, batch, [batch.inputs.shape[1] - 1] * len(lasts)),
    )


@mutant("llama3")
def cells_are_lost_where_the_cache_grows(patch: pytest.MonkeyPatch) -> None:
    """A new block is allocated, and the old ones are not copied."""
    patch.setattr(cache, "BLOCK", 4)
    right = cache._grow
    patch.setattr(
        cache,
        "_grow",
        lambda old, new, stop: right(
            None if old is not None and old.shape[2] < stop else old, new, stop
        ),
    )


@mutant("deepseek")
def latent_attention_loses_its_scale_behind_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Scores are divided by the root of the width of values' heads, as if they were those of keys."""
    right = cache.F.scaled_dot_product_attention

    class Wrong:
        @staticmethod
        def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
            unscaled = {**rest, "scale": v.shape[-1] ** -0.5}
            return right(q, k, v, **unscaled)

    patch.setattr(cache, "F", Wrong)


@mutant("qwen3-moe", "ep2")
def tokens_of_expert_ranks_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Each rank's rows get the other's tokens."""
    right = decode._gather_tokens
    patch.setattr(decode, "_gather_tokens", lambda *arguments: right(*arguments)[::-1])


@mutant("llama3", "tp2")
def ranks_draw_at_different_places(patch: pytest.MonkeyPatch) -> None:
    """Tensor ranks go on with tokens of their own."""
    right = Generation.__call__

    def act(self: Generation, decoder: decode.Decoder) -> object:
        if decoder.model.comm.index("tp") == 0:
            return right(self, decoder)
        sampling = replace(self.sampling, temperature=2.0)
        return right(replace(self, sampling=sampling), decoder)

    patch.setattr(Generation, "__call__", act)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_the_comparison(name: str, monkeypatch: pytest.MonkeyPatch):
    family, mesh, change = MUTANTS[name]
    config = config_of(family)
    texts, logits = UNEVEN.reference(config)
    change(monkeypatch)
    differs = False
    for texts_of_rank, logits_of_rank in on_ranks(config, mesh, UNEVEN):
        if texts_of_rank != texts or worst(logits_of_rank, logits) > 1e3 * SAME:
            differs = True
    assert differs, "the comparison stayed green"
