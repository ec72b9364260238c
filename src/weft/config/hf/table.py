"""Owns the form of a config table: which key of config.json is which field, which keys must stand at what weft computes.

Every key of a config.json is one of four: a `Key` becomes a field, a `Fixed` key must have a value that weft computes
with, keys of rotary embedding are read by `core/hf/rope.py`, and `HARMLESS` keys change no logit. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Json = Mapping[str, Any]

REQUIRED: Final = object()
"""Default of a key without which a config.json says too little."""


@dataclass(frozen=True)
class Key:
    """A key that becomes a field of the family's Config.

    Attributes:
        theirs: key of config.json.
        ours: field of the Config.
        default: what transformers takes where the key is missing or null; a function is asked with the whole config.json.
        null: the field's value where the key is null, if that is no missing key.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    null: Any = None

    def read(self, config: Json) -> Any:
        """The field's value; `REQUIRED` where nothing tells it."""
        if self.null is not None and self.theirs in config and config[self.theirs] is None:
            return self.null
        value = config.get(self.theirs)
        if value is not None:
            return value
        return self.default(config) if callable(self.default) else self.default

    def write(self, value: Any) -> Any:
        """The key's value."""
        return None if self.null is not None and value == self.null else value


@dataclass(frozen=True)
class Fixed:
    """A key that must be missing, null, or one of these values; the first is written on export.

    Attributes:
        same_as: (config.json) -> the one value that fits, where it follows from other keys.
        is_written: on export; else it is left out.
    """

    theirs: str
    values: tuple[Any, ...] = ()
    same_as: Callable[[Json], Any] | None = None
    is_written: bool = False

    def allowed(self, config: Json) -> tuple[Any, ...]:
        """Values that weft computes with."""
        return self.values if self.same_as is None else (self.same_as(config),)


@dataclass(frozen=True)
class ConfigTable:
    """One family's config.json.

    Attributes:
        family: weft's name of the family.
        architecture: transformers' class, as in `architectures`.
        model_type: as in config.json.
        rope_types: kinds of rotary embedding that the family computes; none: it has no rotary embedding.
        probes: field -> a tensor, named with keys of config.json, whose presence makes the field 1. A person may choose
            another value: config.json does not decide these.
        counts: field -> key that says the same, for export.
        implied: fields that stand at one value in every folder of this architecture.
        harmless: keys that change no logit, besides `HARMLESS`.
        added: keys that transformers wants to see and nobody reads, for export.
    """

    family: str
    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    fixed: tuple[Fixed, ...]
    rope_types: tuple[str, ...] = ()
    probes: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    added: Mapping[str, Any] = field(default_factory=dict)


EVERYWHERE: tuple[Fixed, ...] = (
    Fixed("quantization_config"),
    Fixed("is_encoder_decoder", (False,)),
    Fixed("add_cross_attention", (False,)),
    Fixed("pruned_heads", ({},)),
    Fixed("per_layer_config"),
)
"""Keys of every architecture; without values a key must be missing or null."""

HARMLESS = frozenset(
    """
    architectures model_type auto_map name_or_path transformers_version torch_dtype dtype use_bfloat16
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id tokenizer_class prefix
    use_cache return_dict output_attentions output_hidden_states torchscript gradient_checkpointing is_decoder
    initializer_range attention_dropout chunk_size_feed_forward pretraining_tp tp_plan attn_implementation
    finetuning_task id2label label2id num_labels problem_type task_specific_params
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905 - words, not code
)
"""Keys that change no logit: names, token ids, drop-out (weft has none), starting values, defaults of generation."""
