"""Generation with a key/value cache equals that of the model without one, on one rank and on many."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from tests.generate.models import (
    CONFIGS,
    DRAWN,
    GREEDY,
    PROMPTS,
    Generation,
    config_of,
    on_ranks,
    worst,
)
from tests.sampling import sampled_pairs
from weft.generate import cache
from weft.generate.decode import Decoder, TextRow, decode
from weft.generate.sample import Sampling, TokenPosition, sample_token

SAME = 1e-9
"""Relative to the largest logit, in float64: some 1e2 operations that round at 1e-16 each."""

ROWS = {
    "in step": Generation(prompts=((1, 2, 3), (9, 8, 7)), sampling=GREEDY),
    "of different length": Generation(sampling=DRAWN),
    "alone": Generation(prompts=PROMPTS[:1], sampling=DRAWN),
}
LAYOUTS = [
    ("llama3", "tp2"), ("llama3", "pp2 tp2"), ("gpt2", "pp2 tp2"), ("qwen3", "pp2 tp2"),
    ("qwen3-moe", "ep2"), ("qwen3-moe", "tp2 ep4"), ("deepseek", "pp2 ep2 tp2"),
]  # fmt: skip
LAYOUTS += [(family, "pp2 tp2") for family in CONFIGS if family not in dict(LAYOUTS)]
MORE_LAYOUTS = [
    ("llama3", "tp4"), ("llama3", "pp3"), ("qwen3-moe", "pp2 ep2"),
    ("deepseek", "ep2"), ("deepseek", "pp3 tp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "rows"), sampled_pairs(list(CONFIGS), list(ROWS)))
def test_cached_decoding_equals_uncached(family: str, rows: str):
    check(family, "", ROWS[rows])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prompt_read_in_parts_equals_one_read(family: str):
    parts = [[(1, 2, 3), (9,)], [(4, 5), (3, 50, 3)], [(6,), (8,)]]

    def in_parts(decoder: Decoder) -> Tensor | None:
        return [decoder.read(part) for part in parts][-1]

    def at_once(decoder: Decoder) -> Tensor | None:
        return decoder.read([sum(row, ()) for row in zip(*parts, strict=True)])

    config = config_of(family)
    (ours,) = on_ranks(config, "", in_parts)
    (right,) = on_ranks(config, "", at_once)
    assert ours is not None
    assert right is not None
    assert worst({0: list(ours)}, {0: list(right)}) < SAME


@pytest.mark.parametrize(("family", "mesh"), LAYOUTS)
def test_every_layout_generates_the_tokens_of_one_device(family: str, mesh: str):
    check(family, mesh, Generation(num_tokens=5, sampling=DRAWN))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), MORE_LAYOUTS)
def test_more_layouts_generate_the_tokens_of_one_device(family: str, mesh: str):
    check(family, mesh, Generation(num_tokens=5, sampling=DRAWN))


def test_one_row_on_two_expert_ranks():
    check("qwen3-moe", "ep2", Generation(prompts=((4, 5, 6),), num_tokens=4))
    check("deepseek", "pp2 ep2", Generation(prompts=((4, 5, 6),), num_tokens=4))


def test_cache_grows_with_the_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "BLOCK", 4)
    check("llama3", "", Generation(num_tokens=12))
    check("llama3", "", Generation(prompts=PROMPTS[:1], num_tokens=12))


@pytest.mark.parametrize(
    ("family", "mesh"), [("llama3", ""), ("qwen3-moe", "ep2"), ("gpt2", "pp2 tp2")]
)
def test_finished_rows_leave_the_batch(family: str, mesh: str):
    config = config_of(family)
    lengths = (2, 6, 1, 4)
    generation = Generation(num_tokens=max(lengths), sampling=DRAWN)
    texts, _ = generation.reference(config)

    def act(decoder: Decoder) -> list[list[int]]:
        rows = [TextRow(prompt, sample=number) for number, prompt in enumerate(PROMPTS)]
        choose = partial(drawn_by, DRAWN)
        alive = [
            [row.sample for row in extended]
            for extended in decode(
                decoder,
                rows,
                choose=choose,
                is_finished=lambda row: len(row.tokens) == lengths[row.sample],
            )
        ]
        assert alive == [[0, 1, 2, 3], [0, 1, 3], [1, 3], [1, 3], [1], [1]]
        return [row.tokens for row in rows]

    for ours in on_ranks(config, mesh, act):
        expected = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        assert ours == expected


def test_cache_memory_is_that_of_its_cells():
    config = config_of("llama3")

    def act(decoder: Decoder) -> tuple[int, ...]:
        decoder.read([(1, 2, 3), (4, 5)])
        decoder.read([(1,), (2,)])
        return tuple(each.num_bytes for each in decoder.caches)

    both = 2
    batch = 2
    kv_heads = 4
    head_size = 4
    float64 = 8
    for degree, mesh in ((1, ""), (2, "tp2")):
        block_entries = (kv_heads // degree) * cache.BLOCK * head_size
        one = both * batch * block_entries * float64
        assert on_ranks(config, mesh, act) == [(one,) * 3] * degree


def drawn_by(sampling: Sampling, logits_V: Tensor, place: TokenPosition) -> int:
    return sample_token(logits_V, sampling, place)


def check(family: str, mesh: str, generation: Generation) -> None:
    """Token for token, and logit for logit, on every rank."""
    config = config_of(family)
    texts, logits = generation.reference(config)
    seen = set()
    for ours, held in on_ranks(config, mesh, generation):
        assert ours == texts
        assert worst(held, logits) < SAME if held else True
        seen |= set(held)
    assert seen == set(logits), "some rank has drawn each row"
