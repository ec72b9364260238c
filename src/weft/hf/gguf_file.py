"""Writes a model as a GGUF file, which llama.cpp and the programs around it run; one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.checkpoint.disk import new_folder
from weft.checkpoint.source import Source
from weft.config.hf.read_config import config_faults, find_family, read_fields
from weft.config.hf.write_config import config_json
from weft.core.axes import Box
from weft.errors import CheckpointError
from weft.hf.check_logits import NOT_COMPARED, Gguf, LogitsComparison, compare_logits
from weft.hf.export_hf import ExportedModel
from weft.hf.gguf_model import (
    ARCHITECTURES,
    CONVERTER,
    GEMMA_USUAL,
    GGUFTensor,
    add_fields,
    context_length,
    rope_divisors,
    tensors_of,
)
from weft.hf.gguf_tokenizer import Vocabulary, add_vocabulary
from weft.hf.import_hf import TransferResult, count_params
from weft.hf.sidecar import reject_existing
from weft.hf.write import TypedTensor, assemble, main_dtype
from weft.models import FAMILIES
from weft.view.quantity import memory

FILE = "model.gguf"
Q8 = "q8_0"
BLOCK = 32
"""Values of a row that share a scale in `Q8`."""
TYPES: Mapping[str, str] = {
    "float32": "F32",
    "float64": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    Q8: "Q8_0",
}
"""Our name of a type -> GGUF's; llama.cpp computes with no 64 bits."""
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}


def export_gguf(
    model: ExportedModel, folder: Path, *, vocabulary: Vocabulary, dtype: str | None, compares: bool
) -> TransferResult:
    """Write a GGUF file of a model, and compare what transformers reads of it.

    Args:
        model: with the types that are stored.
        dtype: of matrices; None: that of most.

    Raises:
        CheckpointError: the folder is not empty, or a disk error occurs.
    """
    dtype = dtype or main_dtype(model.typed)
    num_bytes = write_gguf(model, folder, vocabulary=vocabulary, dtype=dtype)
    comparison = NOT_COMPARED
    if compares and dtype == Q8:
        comparison = LogitsComparison(reason=f"{Q8} rounds the values")
    elif compares:
        dtypes = dict(model.dtypes)
        by_name = {each.tensor.name: each.tensor for each in model.typed}
        for tensor in _tensors(model):
            if not tensor.is_wide:
                placements = (at for name in tensor.sources for at in by_name[name].placements)
                dtypes.update((at.param, getattr(torch, dtype)) for at in placements)
        comparison = compare_logits(
            folder, model.source, model.cfg, dtypes=dtypes, gguf=Gguf(FILE, model.config)
        )
    lines = [f"{folder / FILE}: {count_params(model.source)}, {dtype}, {memory(num_bytes)}"]
    length = context_length(model.config)
    if length < model.config.get("max_position_embeddings", 0):
        lines.append(f"context of {length:,} positions, the window: llama.cpp has none here")
    others = [name for name, usual in GEMMA_USUAL.items() if model.config.get(name, usual) != usual]
    if others:
        lines.append(f"{', '.join(others)}: read by llama.cpp since 2026, not by earlier ones")
    if vocabulary.note:
        lines.append(vocabulary.note)
    return TransferResult((*lines, str(comparison)), is_equal=comparison.is_equal)


def in_own_terms(model: ExportedModel) -> ExportedModel:
    """A model of transformers' own code with the config.json of weft's family of that architecture,
    which has no settings but those that it computes.

    Raises:
        CheckpointError: the family does not compute the same.
    """
    family, mapping = find_family(model.config, FAMILIES, key="model")
    if mapping.config.whole is not None or family.Config.family == model.cfg.family:
        return model
    faults = tuple(config_faults(model.config, mapping.config, key="model"))
    if faults:
        raise CheckpointError(*(replace(fault, fix=CONVERTER) for fault in faults))
    cfg = family.Config.model_validate(read_fields(model.config, mapping.config))
    dtype = main_dtype(model.typed)
    return replace(model, config=config_json(mapping, cfg, dtype=dtype, original=model.config))


def write_gguf(model: ExportedModel, folder: Path, *, vocabulary: Vocabulary, dtype: str) -> int:
    """Write `folder`/model.gguf of a model without `model_faults`; returns its size in bytes.

    Args:
        dtype: of matrices; norms, biases, routers and positions have 32 bits, and rows that are no
            multiple of 32 long have 16 bits in place of `Q8`.

    Raises:
        CheckpointError: the folder is not empty, or a disk error occurs; what was written is removed
            then.
    """
    import gguf  # an extra

    reject_existing(folder)
    config = model.config
    by_name = {each.tensor.name: each for each in model.typed}
    tensors = _tensors(model)
    need_bytes = sum(4 * Box.whole(tensor.shape).size for tensor in tensors)
    with new_folder(folder, need_bytes=need_bytes) as unfinished:
        path = unfinished / FILE
        writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
        writer.add_name(folder.name)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[TYPES[dtype]]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_fields(writer, config)
        add_vocabulary(writer, vocabulary, chat_template=chat_template_of(model.texts))
        divisors = np.array(rope_divisors(config), dtype=np.float32)
        if divisors.size:
            writer.add_tensor_info(
                "rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes
            )
        for tensor in tensors:
            quant = _quant_type(tensor, dtype)
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, quant)
            num_bytes = int(np.prod(shape))
            writer.add_tensor_info(
                tensor.name, shape, np.dtype(np.uint8), num_bytes, raw_dtype=quant
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors.size:
            writer.write_tensor_data(divisors)
        for tensor in tensors:
            parts = [by_name[name] for name in tensor.sources]
            values = _values(tensor, parts, model.source)
            writer.write_tensor_data(gguf.quants.quantize(values, _quant_type(tensor, dtype)))
        writer.close()
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return path.stat().st_size


def _tensors(model: ExportedModel) -> tuple[GGUFTensor, ...]:
    return tensors_of(model.config, {each.tensor.name: each.tensor.shape for each in model.typed})


def chat_template_of(texts: Mapping[str, str]) -> str | None:
    """The chat template among the small files of a folder."""
    if "chat_template.jinja" in texts:
        return texts["chat_template.jinja"]
    template = json.loads(texts.get("tokenizer_config.json", "{}")).get("chat_template")
    return template if isinstance(template, str) else None


def _quant_type(tensor: GGUFTensor, dtype: str) -> Any:
    """GGUF's type of a tensor."""
    import gguf

    name = "F32" if tensor.is_wide else TYPES[dtype]
    if name == "Q8_0" and tensor.shape[-1] % BLOCK:
        name = "F16"
    return gguf.GGMLQuantizationType[name]


def _values(
    tensor: GGUFTensor, parts: Sequence[TypedTensor], source: Source
) -> NDArray[np.float32]:
    """Float32 values in the order of the file."""
    read = []
    for part in parts:
        value = assemble(part.tensor, source, Box.whole(part.tensor.shape)).float()
        read.append(value.T if tensor.is_transposed else value)
    value = read[0] if len(tensor.shape) == read[0].ndim else torch.stack(read)
    if tensor.num_heads:
        value = _in_pairs(value, tensor.num_heads)
    if tensor.added:
        value = value + tensor.added
    return value.contiguous().numpy()


def _in_pairs(value: Tensor, num_heads: int) -> Tensor:
    """The rows of each head, first half beside second half."""
    halves = value.reshape(num_heads, 2, -1, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)
