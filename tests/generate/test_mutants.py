"""The comparison can fail: each way in which a cache goes wrong, put in on purpose, changes what is written or its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generate.models import Grow, config_of, on_ranks, worst
from tests.generate.test_cached import SAME
from weft.generate import cache, decode, rows
from weft.generate.cache import Cache, Look

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[str, str, Patch]] = {}
UNEVEN = Grow(num_tokens=4)


def mutant(family: str, mesh: str = "") -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        assert patch.__doc__, "say what goes wrong"
        MUTANTS[patch.__name__] = family, mesh, patch
        return patch

    return register


def later(look: Look) -> bool:
    """Whether it is one behind the prompt."""
    return look.start != 0


@mutant("llama3")
def keys_are_kept_one_cell_too_early(patch: pytest.MonkeyPatch) -> None:
    """Each new token overwrites the one before it, and its own cell stays empty."""
    right = Cache.put

    def put(self: Cache, k: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
        if not later(look):
            return right(self, k, v, look)
        shifted = replace(look, positions=look.positions - 1, start=None)
        return right(self, k, v, shifted)

    patch.setattr(Cache, "put", put)


@mutant("llama3")
def the_newest_token_does_not_see_itself(patch: pytest.MonkeyPatch) -> None:
    """One cell too few is read."""

    def mask(look: Look) -> Tensor:
        return torch.arange(look.stop) < look.positions[:, None, :, None]

    patch.setattr(Look, "mask", property(mask))


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
    right_look, right_put, right_mask = cache.look_at, Cache.put, Look.mask.fget
    true: dict[int, Tensor] = {}

    def look_at(tokens: Tensor, firsts: Sequence[int]) -> Look:
        look = right_look(tokens, firsts)
        if not later(look):
            return look
        changed = replace(look, positions=change(look.positions))
        true[id(changed.positions)] = look.positions
        kept.append(changed)
        return changed

    def seen(look: Look) -> Look:
        return replace(look, positions=true.get(id(look.positions), look.positions))

    kept: list[Look] = []
    patch.setattr(decode, "look_at", look_at)
    patch.setattr(Cache, "put", lambda self, k, v, look: right_put(self, k, v, seen(look)))
    patch.setattr(Look, "mask", property(lambda look: right_mask(seen(look))))


@mutant("llama3")
def queries_meet_another_head_of_keys(patch: pytest.MonkeyPatch) -> None:
    """Heads that share keys are dealt out in another order than in the prompt."""
    patch_cells(patch, lambda cells: cells.roll(1, dims=1))


@mutant("deepseek")
def rows_see_each_others_cells(patch: pytest.MonkeyPatch) -> None:
    """Each text goes on from another prompt."""
    patch_cells(patch, lambda cells: cells.roll(1, dims=0))


def patch_cells(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    right = Cache.put

    def put(self: Cache, k: Tensor, v: Tensor, look: Look) -> tuple[Tensor, Tensor]:
        keys, values = right(self, k, v, look)
        return (change(keys), change(values)) if later(look) else (keys, values)

    patch.setattr(Cache, "put", put)


@mutant("llama3")
def what_lies_behind_a_short_prompt_is_seen(patch: pytest.MonkeyPatch) -> None:
    """Without a mask, cells that were filled up to the longest prompt count as text."""
    patch.setattr(Look, "mask", property(lambda look: None))


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
    """A new block comes, and the old ones are not copied."""
    patch.setattr(cache, "BLOCK", 4)
    right = cache._grown
    patch.setattr(
        cache,
        "_grown",
        lambda old, new, stop: right(None if old is not None and old.shape[2] < stop else old, new, stop),
    )


@mutant("deepseek")
def latent_attention_loses_its_scale_behind_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Scores are divided by the root of the width of values' heads, as if they were those of keys."""
    right = cache.F.scaled_dot_product_attention

    class Wrong:
        @staticmethod
        def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
            return right(q, k, v, **{**rest, "scale": v.shape[-1] ** -0.5})

    patch.setattr(cache, "F", Wrong)


@mutant("qwen3-moe", "ep2")
def tokens_of_expert_ranks_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Each rank's rows get the other's tokens."""
    right = rows._tell_all
    patch.setattr(rows, "_tell_all", lambda *arguments: right(*arguments)[::-1])


@mutant("llama3", "tp2")
def ranks_draw_at_different_places(patch: pytest.MonkeyPatch) -> None:
    """Tensor ranks go on with tokens of their own."""
    right = Grow.__call__

    def act(self: Grow, decoder: decode.Decoder) -> object:
        if decoder.model.comm.index("tp") == 0:
            return right(self, decoder)
        return right(replace(self, sampling=replace(self.sampling, temperature=2.0)), decoder)

    patch.setattr(Grow, "__call__", act)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch):
    family, mesh, change = MUTANTS[name]
    config = config_of(family)
    texts, logits = UNEVEN.truth(config)
    change(monkeypatch)
    seen = [(ours != texts, worst(held, logits)) for ours, held in on_ranks(config, mesh, UNEVEN)]
    assert any(other or error > 1e3 * SAME for other, error in seen), "the comparison stayed green"
