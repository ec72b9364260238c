"""Pairs and labelled texts with drawn tokens, for proofs whose run has other data: rows of one to three, some of them cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import SCORED, LossName
from weft.data.conversations import PAIR, Conversations, ConversationSamples
from weft.data.records import UNPAIRED
from weft.data.tokens import TokenStream

SEED = 5
SOURCE = "drawn pairs"
PAIRS_A_SEQUENCE = 3
"""Pairs for each sequence of a step: more rows than a step reads."""
MIN_PAIRS = 12


def drawn_records(
    *,
    vocab: int,
    seq_len: int,
    global_size: int,
    loss: LossName,
    num_classes: int,
    has_labels: bool = False,
) -> ConversationSamples:
    """Pairs of a prompt with two answers of different lengths, one pair of eight longer than a
    sequence; or labelled texts, one of eight as long as a sequence.

    Args:
        has_labels: whether the first answer is desired or not, and the other one another record's.
    """
    group = 1 if num_classes else PAIR
    generator = np.random.default_rng(SEED)
    num_pairs = max(MIN_PAIRS, PAIRS_A_SEQUENCE * global_size)
    parts: list[NDArray[np.int64]] = []
    masks: list[NDArray[np.uint8]] = []
    for number in range(num_pairs):
        longest = seq_len if number % 8 == 7 else max(seq_len // 5, 2)
        prompt = generator.integers(vocab, size=generator.integers(1, max(seq_len // 8, 2)))
        for _ in range(group):
            answer = generator.integers(vocab, size=generator.integers(2, longest + 1))
            parts.append(np.concatenate((prompt, answer)))
            counts = 1 + (has_labels and number % 3 == 0)
            masks.append(np.repeat(np.array([0, counts], np.uint8), (len(prompt), len(answer))))
    bounds = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    stream = TokenStream((Path(SOURCE),), (np.concatenate(parts),), vocab=vocab, documents=bounds)
    if num_classes:
        for mask in masks:
            mask[0] = 1 + generator.integers(num_classes)
    known = UNPAIRED if has_labels else loss if loss in SCORED else ""
    data = Conversations(stream, np.concatenate(masks), group=group, format=known)
    return ConversationSamples(data, seq_len, SOURCE)
