"""Checks of a Hugging Face folder before torch is imported: tensors, shapes, finite values, small files, tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft.config.hf.safetensors_files import INTEGERS, TensorEntry
from weft.core.model_config import ModelConfig
from weft.data.tokenizer import FILE, FileTokenizer, open_tokenizer
from weft.errors import CheckpointError, DataError, Fault
from weft.hf.match import MatchedFolder, match_folder
from weft.hf.sidecar import read_sidecars
from weft.small_files import UnreadableFile, open_regular

MAX_SCANNED_BYTES = 2**28
"""Bytes of weights that are searched for NaN here; the import itself looks at every value."""
CHUNK_BYTES = 2**22

EXPONENT_MASKS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""Type of a tensor -> the integer type of its bits, and the exponent that NaN and infinity have."""


def weight_faults(folder: Path, cfg: ModelConfig) -> Iterator[Fault]:
    """What is wrong with the weights of a folder for this model, as far as can be seen cheaply."""
    try:
        matched = match_folder(folder, cfg)
        shape_faults = tuple(_shape_faults(folder, matched, cfg))
        yield from shape_faults or _nonfinite_faults(matched)
    except CheckpointError as error:
        yield from error.faults


def import_faults(folder: Path, cfg: ModelConfig) -> Iterator[Fault]:
    """What is wrong with the small files that an import copies."""
    try:
        names = read_sidecars([folder])
        if FILE in names:
            tokenizer = open_tokenizer(str(folder / FILE), within=folder)
            vocab = cfg.axis_sizes()["vocab"]
            if isinstance(tokenizer, FileTokenizer) and tokenizer.base_vocab > vocab:
                what = "has more tokens than the vocabulary of the model"
                got = f"{tokenizer.base_vocab} tokens"
                yield Fault(
                    str(folder / FILE),
                    what,
                    got=got,
                    need=f"at most {vocab}",
                    fix="use the tokenizer of this model",
                )
    except CheckpointError as error:
        yield from error.faults
    except DataError as error:
        for fault in error.faults:
            yield replace(fault, key=str(folder / FILE), fix="remove it, or download it again")


def _shape_faults(folder: Path, matched: MatchedFolder, cfg: ModelConfig) -> Iterator[Fault]:
    """Weights of linears and of the embedding of another shape than config.json makes of them."""
    expected: dict[str, tuple[int, ...]] = {}
    for linear, sides in cfg.linears().items():
        expected[f"{linear}.weight"] = sides
    vocab = cfg.axis_sizes()["vocab"]
    dim = cfg.model_dump()["dim"]
    expected["embed.tok.weight"] = (vocab, dim)
    for name, shape in expected.items():
        source = matched.params.get(name)
        if source is None or source.shape == shape:
            continue
        yield Fault(
            str(folder),
            f"{source.rule.tensor}: config.json makes another shape of it",
            got=str(list(source.shape)),
            need=str(list(shape)),
            fix="correct config.json, or download the folder again",
        )


def _nonfinite_faults(matched: MatchedFolder) -> Iterator[Fault]:
    """The first tensor that holds NaN or infinity."""
    num_left = MAX_SCANNED_BYTES
    for source in matched.params.values():
        for name in source.tensors:
            entry = matched.entries[name]
            if num_left <= 0:
                return
            num_left -= entry.stop - entry.start
            if not is_finite(entry):
                yield nonfinite_fault(entry.file, name)
                return


def nonfinite_fault(file: Path, tensor: str) -> Fault:
    """The fault of a tensor with NaN or infinity."""
    return Fault(str(file), f"{tensor} holds NaN or infinity", fix="download the file again")


def is_finite(entry: TensorEntry) -> bool:
    """Whether a stored tensor holds neither NaN nor infinity.

    Raises:
        CheckpointError: its file cannot be read.
    """
    if entry.dtype in INTEGERS:
        return True
    bits, mask = EXPONENT_MASKS[entry.dtype]
    try:
        with open_regular(entry.file, within=entry.file.parent) as file:
            file.seek(entry.start)
            num_left = entry.stop - entry.start
            while num_left:
                chunk = file.read(min(CHUNK_BYTES, num_left))
                num_left -= len(chunk)
                exponents = np.frombuffer(chunk, bits) & np.array(mask, bits)
                if bool((exponents == mask).any()):
                    return False
                if not chunk:
                    return True
        return True
    except UnreadableFile as error:
        raise CheckpointError(error.fault()) from None
