"""Compares the logits of weft's model and transformers' for the same weights and tokens, in float32."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.source import Source
from weft.config.hf.read_config import CONFIG
from weft.config.hf.safetensors_files import read_json
from weft.config.hf.text_part import whole_config_of
from weft.core.axes import Box
from weft.core.machine_memory import available_bytes
from weft.core.model_config import ModelConfig
from weft.errors import WeftError, type_and_message
from weft.hf.text_places import whole_class
from weft.models import FAMILIES
from weft.models.common.batch import forward, token_batch, with_later_targets
from weft.models.common.init import named_parameters, tie
from weft.view.quantity import memory

NUM_SEQUENCES = 2
SEQ_LEN = 32
SEED = 0
TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit, that float32 explains.

Rounding is 6e-8 an operation; both sides sum some thousand terms in other orders, in up to a
hundred layers. Tiny models show 1e-6. Two rules that are exchanged show 0.1 and more."""
MEMORY_SHARE = 0.8
"""Share of the free memory that both models may take."""

Dtypes = Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Gguf:
    """A file in a folder, and the content of the config.json that it was written from."""

    file: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class LogitsComparison:
    """Outcome of a comparison; `reason` where nothing was compared."""

    difference: float = 0.0
    largest: float = 0.0
    reason: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the difference is within the tolerance, or nothing was compared."""
        return bool(self.reason) or self.difference <= TOLERANCE * self.largest

    def __str__(self) -> str:
        if self.reason:
            return f"not compared: {self.reason}"
        size = f"{self.difference:.1e} (largest logit {self.largest:.3g}; float32)"
        verdict = "" if self.is_equal else ": NOT the same model"
        return f"largest logit difference to transformers: {size}{verdict}"


NOT_COMPARED = LogitsComparison(reason="as asked")


def compare_logits(
    folder: Path,
    source: Source,
    cfg: ModelConfig,
    *,
    dtypes: Dtypes | None = None,
    gguf: Gguf | None = None,
) -> LogitsComparison:
    """Logits of the folder in transformers and of `source` in weft.

    Args:
        dtypes: parameter -> the type that its values were rounded to on their way to the folder.
        gguf: what transformers reads in place of safetensors.

    Raises:
        WeftError: transformers cannot load the folder.
    """
    if importlib.util.find_spec("transformers") is None:
        return LogitsComparison(reason="transformers is not installed")
    num_entries = sum(Box.whole(shape).size for shape in source.shapes.values())
    need_bytes = 2 * 4 * num_entries
    free_bytes = available_bytes()
    if need_bytes > MEMORY_SHARE * free_bytes:
        sizes = f"{memory(need_bytes)} in float32, {memory(free_bytes)} are free"
        return LogitsComparison(reason=f"both models take {sizes}")
    seq_len = min(SEQ_LEN, getattr(cfg, "max_seq_len", SEQ_LEN))
    vocab = cfg.axis_sizes()["vocab"]
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(vocab, (NUM_SEQUENCES, seq_len), generator=generator)
    with torch.no_grad():
        labels = getattr(cfg, "labels", 0)
        try:
            expected = hf_logits(folder, tokens, labels=labels, gguf=gguf)
        except ForwardError as error:
            return LogitsComparison(reason=str(error))
        found = weft_logits(source, cfg, tokens, dtypes=dtypes or {})
        if labels:
            found = found[:, -1]
    difference = (found - expected).abs().max()
    return LogitsComparison(difference=difference.item(), largest=expected.abs().max().item())


class ForwardError(WeftError):
    """transformers loads a model, and cannot run it on texts."""


def hf_logits(folder: Path, tokens: Tensor, *, labels: int = 0, gguf: Gguf | None = None) -> Tensor:
    """Logits of transformers, float32; of a model with labels those of the last token, [B, L]."""
    import transformers  # an extra, and seconds to import

    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    is_scored = labels > 0
    auto_model: Any = transformers.AutoModelForCausalLM
    if is_scored:
        auto_model = transformers.AutoModelForSequenceClassification
    elif gguf is None:
        config = whole_config_of(read_json(folder / CONFIG))
        auto_model = auto_model if config is None else whole_class(config)
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    bars: AbstractContextManager[object] = nullcontext()
    if gguf is not None:
        # Its reader takes some fields from defaults of the class (n_positions, head_dim) and not
        # from the file, so that the config is given.
        config = transformers.AutoConfig.for_model(**gguf.config)
        options.update(gguf_file=gguf.file, config=config)
        bars = redirect_stderr(io.StringIO())  # progress of its own
    try:
        with bars:
            model: Any = auto_model.from_pretrained(folder, **options)
    except Exception as error:
        raise WeftError(f"{folder}: transformers cannot load it: {error}") from error
    model.eval()
    if is_scored:  # of the last token; one text at a time needs no token of padding
        return torch.cat([model(input_ids=row[None], use_cache=False).logits for row in tokens])
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        name = type(model).__name__
        raise ForwardError(f"{name} fails in transformers: {type_and_message(error)}") from error
    return logits


def weft_logits(source: Source, cfg: ModelConfig, tokens: Tensor, *, dtypes: Dtypes) -> Tensor:
    """Logits of weft's model with the stored values, float32."""
    blocks = load_model(source, cfg, dtypes=dtypes)
    del blocks["loss"]
    batch = token_batch(tokens, tokens)
    if cfg.reads_later_targets:
        batch = with_later_targets(batch)
    return forward(blocks, batch)


def load_model(source: Source, cfg: ModelConfig, *, dtypes: Dtypes) -> dict[str, nn.Module]:
    """The whole model on the CPU, float32, with stored values."""
    family = FAMILIES[cfg.family]
    with torch.device("meta"):
        blocks = family.blocks(cfg)
    for block in blocks.values():
        block._apply(_with_memory)  # not to_empty: constant buffers keep their values
    ties = family.ties(cfg)
    tie(blocks, ties)
    for name, param in named_parameters(blocks).items():
        if name not in ties:
            value = source.read(name, Box.whole(source.shapes[name]))
            dtype = dtypes.get(name, value.dtype)
            param.data = value.to(dtype).float()
    return blocks


def _with_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
