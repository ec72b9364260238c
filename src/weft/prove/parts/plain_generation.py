"""Generation by its definition, on one device: each token from a forward of the whole text so far, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.generate.sample import Sampling, TokenPosition, uniform
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, activation_of
from weft.models.common.dropout_mode import run_block
from weft.models.common.init import named_parameters, tie
from weft.prove.parts.prompts import Prompt
from weft.prove.parts.watched_decoder import TokenPlace

ONLY_TRAINED = ("loss", "mtp")
"""Beginnings of the names of blocks that a text does not need."""


@dataclass(frozen=True)
class PlainTexts:
    """What one device generates.

    Attributes:
        tokens: of each prompt, the new ones.
        outputs: (prompt, position of the token that follows) -> block -> what it computes for the
            last token; the last block's are logits_V.
    """

    tokens: tuple[tuple[int, ...], ...]
    outputs: Mapping[TokenPlace, Mapping[str, Tensor]]


def plain_blocks(family: Family, config: ModelConfig, source: Source) -> dict[str, nn.Module]:
    """The blocks that generate text, in float64, with stored values."""
    blocks = dict(family.blocks(config))
    ties = family.ties(config)
    tie(blocks, ties)
    for name, param in named_parameters(blocks).items():
        if name not in ties:
            value = source.read(name, Box.whole(tuple(source.shapes[name])))
            param.data = value.double()
            param.requires_grad_(False)
    for block in blocks.values():
        block.double()
    return {name: block for name, block in blocks.items() if is_generating(name)}


def is_generating(block: str) -> bool:
    """Whether a text needs a block."""
    return not block.startswith(ONLY_TRAINED)


def generate_plainly(
    blocks: Mapping[str, nn.Module],
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    has_documents: bool,
) -> PlainTexts:
    """Continue the prompts.

    Args:
        has_documents: whether all texts are documents of one sequence in a forward, as in training;
            else each is a sequence.
    """
    texts = [list(prompt.tokens) for prompt in prompts]
    outputs: dict[TokenPlace, Mapping[str, Tensor]] = {}
    most_new = max(prompt.num_new for prompt in prompts)
    for number in range(most_new):
        unfinished = [row for row, prompt in enumerate(prompts) if number < prompt.num_new]
        found = _last_outputs(blocks, [texts[row] for row in unfinished], has_documents)
        for row, of_blocks in zip(unfinished, found, strict=True):
            place = TokenPlace(row, len(texts[row]))
            outputs[place] = of_blocks
            *_, logits_V = of_blocks.values()
            at = TokenPosition(sample=row, position=place.position)
            texts[row].append(_sampled(logits_V, sampling, at))
    tokens = []
    for text, prompt in zip(texts, prompts, strict=True):
        num_given = len(prompt.tokens)
        tokens.append(tuple(text[num_given:]))
    return PlainTexts(tuple(tokens), outputs)


def _last_outputs(
    blocks: Mapping[str, nn.Module], texts: Sequence[Sequence[int]], has_documents: bool
) -> list[dict[str, Tensor]]:
    """What the blocks compute for the last token of each text."""
    sequences = [texts] if has_documents else [[text] for text in texts]
    found = []
    for sequence in sequences:
        outputs = plain_outputs(blocks, sequence)
        end = 0
        for text in sequence:
            end += len(text)
            found.append({name: x_SD[end - 1] for name, x_SD in outputs.items()})
    return found


@torch.no_grad()
def plain_outputs(
    blocks: Mapping[str, nn.Module], texts: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """The output of each block that returns one tensor, [S, D], of one sequence, whose documents are the
    texts, one after the other.
    """
    tokens = [token for text in texts for token in text]
    positions = [position for text in texts for position in range(len(text))]
    documents = [number for number, text in enumerate(texts) for _ in text]
    batch = Batch(
        inputs=torch.tensor([tokens]),
        targets=torch.full((1, len(tokens)), IGNORE),
        positions=torch.tensor([positions]),
        documents=torch.tensor([documents]) if len(texts) > 1 else None,
    )
    x = batch.inputs
    found = {}
    for name, block in blocks.items():
        x = activation_of(run_block(name, block, x, batch))
        if isinstance(x, Tensor):
            found[name] = x[0]
    return found


def _sampled(logits_V: Tensor, sampling: Sampling, at: TokenPosition) -> int:
    """The first token at which the sum of probabilities passes the point of this position."""
    weights = torch.exp((logits_V - logits_V.max()) / sampling.temperature)
    point = uniform(sampling.seed, at) * float(weights.sum())
    total = 0.0
    for token, weight in enumerate(weights.tolist()):
        total += weight
        if total > point:
            return token
    return len(weights) - 1
