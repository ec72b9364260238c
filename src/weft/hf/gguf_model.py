"""Which models a GGUF file can hold, and how its fields and tensors follow from a Hugging Face folder's. No torch.

llama.cpp computes each architecture with code of its own, so that a field that it does not read is a
difference of numbers: what is not known to be read is rejected here.

Source: the GGUF specification in ggml's docs/gguf.md; llama.cpp's convert_hf_to_gguf.py for the
permutation, the transposed and the stacked tensors.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import CheckpointError, Fault

PACKAGE = "gguf"
CONVERTER = "export without --format, and convert the folder with llama.cpp's own program"
KEY = "format"
ROTATED_IN_PAIRS = frozenset(("llama", "mistral"))
"""Types whose q and k llama.cpp rotates in neighbouring pairs of rows, and not in two halves."""
ARCHITECTURES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
"""Model type of config.json -> GGUF's name of the architecture."""
GEMMA = "gemma3_text"
"""The type whose windows llama.cpp computes, and whose norms multiply by what it stores, not by one more."""
GEMMA_27B_LAYERS = 62
"""By them llama.cpp knows the model whose scores are divided by another root."""
GEMMA_USUAL = {"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0}
"""What llama.cpp before 2026 takes, whatever a file says."""
STORED_BY_INPUT = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
"""GPT-2's linears, [in, out]; GGUF has [out, in]."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(("factor",)),
    "yarn": frozenset(("factor", "original_max_position_embeddings")),
    "llama3": frozenset(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
}
"""Type of a rope scaling -> its keys that GGUF has; llama3 for the architecture llama alone."""


def model_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Why a GGUF file cannot hold the model of this config.json, if it cannot."""
    if importlib.util.find_spec(PACKAGE) is None:
        fix = "pip install 'weft-train[gguf]', or leave --format out"
        yield Fault(KEY, f"{PACKAGE} is not installed", fix=fix)
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        need = f"one of {', '.join(ARCHITECTURES)}"
        yield Fault(KEY, "is not written for this model", got=kind, need=need, fix=CONVERTER)
        return
    (architecture,) = config["architectures"]
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        yield Fault(KEY, "is for models that continue texts", got=architecture, fix=CONVERTER)
    if not config.get("norm_topk_prob", True):
        what = "llama.cpp divides the weights of the chosen experts by their sum"
        yield Fault("model.norm_topk_prob", what, got="False", need="True", fix=CONVERTER)
    if kind == GEMMA:
        size = config["head_dim"]
        if config["num_hidden_layers"] == GEMMA_27B_LAYERS:
            size = config["hidden_size"] // config["num_attention_heads"]
        scalar = config["query_pre_attn_scalar"]
        if scalar != size:
            what = "llama.cpp divides scores by the root of another number"
            key = "model.query_pre_attn_scalar"
            yield Fault(key, what, got=str(scalar), need=str(size), fix=CONVERTER)
    yield from _rope_faults(config)


def _rope_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """A scaling of the rotation that llama.cpp does not compute, or with other constants."""
    scaling = config.get("rope_scaling") or {}
    name = scaling.get("rope_type", "default")
    is_known = name in ROPE_KEYS
    if name == "llama3":
        is_known = ARCHITECTURES[config["model_type"]] == "llama"
    if name == "yarn" and config["model_type"] == GEMMA:
        is_known = False
    constants: dict[str, Any] = {}
    if name == "yarn":
        gain = 0.1 * math.log(scaling["factor"]) + 1.0
        constants = {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "attention_factor": gain,
        }
    others = [
        f"{key} {value}"
        for key, value in scaling.items()
        if key != "rope_type" and key not in ROPE_KEYS.get(name, ()) and value is not None
        if key not in constants or not math.isclose(value, constants[key])
    ]
    if others or not is_known:
        need = "linear, yarn with its usual constants, or llama3 for LLaMA and Mistral"
        if config["model_type"] == GEMMA:
            need = "linear"
        got = ", ".join([name, *others])
        yield Fault("model.rope_scaling", "llama.cpp has no such", got, need, CONVERTER)


def context_length(config: Mapping[str, Any]) -> int:
    """Positions that llama.cpp computes as the model does: it has sliding windows for Gemma alone."""
    length = int(config.get("max_position_embeddings") or config["n_positions"])
    window = config.get("sliding_window") if config["model_type"] != GEMMA else None
    return min(length, int(window)) if window else length


def add_fields(writer: Any, config: Mapping[str, Any]) -> None:
    """The fields of the model, into a `gguf.GGUFWriter`."""
    import gguf

    heads = config.get("num_attention_heads") or config["n_head"]
    dim = config.get("hidden_size") or config["n_embd"]
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(dim)
    writer.add_block_count(num_layers(config))
    writer.add_feed_forward_length(config.get("intermediate_size") or config["n_inner"])
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    head_dim = config.get("head_dim") or dim // heads
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == GEMMA:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    scaling = config.get("rope_scaling") or {}
    name = scaling.get("rope_type", "default")
    if name in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(name))
        writer.add_rope_scaling_factor(scaling["factor"])
    if name == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def num_layers(config: Mapping[str, Any]) -> int:
    """Layers of the model."""
    return int(config.get("num_hidden_layers") or config["n_layer"])


def rope_divisors(config: Mapping[str, Any]) -> list[float]:
    """By what Llama 3's scaling divides each frequency of the rotation; empty under another scaling.

    Source: Meta's llama-models, `apply_scaling`.
    """
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return []
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, low, high = (scaling[f"{name}factor"] for name in ("", "low_freq_", "high_freq_"))
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / dim)
        share = (original / wavelength - low) / (high - low)  # of the unscaled frequency
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        sources: names of the folder's tensors: one, or one for each expert, which are stacked.
        shape: rows first, as numpy has it.
        is_transposed: whether the folder's tensor is stored as [in, out].
        num_heads: heads whose rows go from halves to neighbouring pairs; 0: rows stay.
        is_wide: whether it is stored in 32 bits, whatever the type of the others.
        added: to each value.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    is_transposed: bool
    num_heads: int
    is_wide: bool
    added: float


def tensors_of(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> tuple[GGUFTensor, ...]:
    """The tensors of the file, in the order of the folder's.

    Args:
        shapes: of the folder's tensors by name.

    Raises:
        CheckpointError: with a tensor that has no name there.
    """
    import gguf

    kind = config["model_type"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(arch, num_layers(config))
    sources: dict[str, list[str]] = {}
    for name in sorted(shapes, key=_by_expert):
        stacked = names.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        if stacked is None:
            raise CheckpointError(Fault(KEY, "has no name for a tensor", got=name, fix=CONVERTER))
        sources.setdefault(stacked, []).append(name)
    heads = {"q": config.get("num_attention_heads"), "k": config.get("num_key_value_heads")}
    found = []
    for stacked, parts in sources.items():
        shape = tuple(shapes[parts[0]])
        is_transposed = kind == "gpt2" and STORED_BY_INPUT.search(parts[0]) is not None
        if is_transposed:
            shape = shape[::-1]
        if EXPERT.search(parts[0]):
            shape = (len(parts), *shape)
        projection = re.search(r"\.([qk])_proj\.", parts[0])
        is_paired = kind in ROTATED_IN_PAIRS and projection is not None
        found.append(
            GGUFTensor(
                stacked,
                tuple(parts),
                shape,
                is_transposed,
                num_heads=int(heads[projection[1]] or 0) if is_paired and projection else 0,
                is_wide=len(shape) == 1 or "ffn_gate_inp" in stacked or "position" in stacked,
                added=float(kind == GEMMA and parts[0].endswith("norm.weight")),
            )
        )
    return tuple(found)


def _by_expert(name: str) -> tuple[str, int]:
    """Sorts experts by their number."""
    match = EXPERT.search(name)
    return EXPERT.sub(".experts.", name), int(match[1]) if match else 0
