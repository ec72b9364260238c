"""Owns training a byte-level BPE on the very texts that it shall encode."""

from __future__ import annotations

from collections.abc import Iterable

from weft.data.tokenizer import END_NAMES, KEY, library
from weft.errors import DataError, Fault

NUM_BYTES = 256
END = END_NAMES[0]


def train_bpe(texts: Iterable[str], *, vocab: int) -> str:
    """A tokenizer.json of `vocab` ids: the end of a document, all bytes, then what pairs make up most often.

    Raises:
        DataError: the library is missing, or there is no room for pairs.
    """
    if vocab <= NUM_BYTES + 1:
        need = f"above {NUM_BYTES + 1}: every byte and {END}"
        raise DataError(Fault("vocab", "leaves no room for pairs of bytes", str(vocab), need, "--vocab 8192"))
    lib = library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    if tokenizer.get_vocab_size() < vocab:
        got = f"{tokenizer.get_vocab_size()} different tokens in all of it"
        fix = f"--vocab {tokenizer.get_vocab_size()}, or more text"
        raise DataError(Fault(KEY, "there is too little text for so many tokens", got, f"{vocab}", fix))
    return str(tokenizer.to_str())
