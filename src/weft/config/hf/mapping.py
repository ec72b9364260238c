"""What a family's hf.py declares: how config.json and the tensors of a Hugging Face folder map to a weft model. No torch.

    HFMapping
    ├─ config: ConfigMapping      keys of config.json <-> fields of the family's Config
    └─ weights: WeightMapping     tensors of safetensors files <-> parameters

Every key of a config.json is one of four: a `Key` becomes a field, a `Fixed` key must have a value
that weft computes with, the keys of rotary embedding are read by a `RopeMapping`, and ignored keys
change no logit. Any other is rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from weft.config.keys import Flat
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import Fault

Json = Mapping[str, Any]

REQUIRED: Final = object()
"""Default of a key that a config.json must have."""

EXPERT = "{expert}"
"""Placeholder in a tensor name: one tensor for each expert, stacked in one parameter."""


@dataclass(frozen=True)
class Key:
    """A key of config.json that becomes a field of the family's Config.

    Attributes:
        default: what transformers takes where the key is missing or null; a function gets the whole
            config.json.
        null: the field's value where the key is present and null, if that differs from a missing
            key.
        may_be_none: whether None is a value of the field.
    """

    hf_key: str
    field: str
    default: Any = REQUIRED
    null: Any = None
    may_be_none: bool = False

    def read(self, config: Json) -> Any:
        """The field's value; `REQUIRED` where config.json lacks it."""
        if self.null is not None and self.hf_key in config and config[self.hf_key] is None:
            return self.null
        value = config.get(self.hf_key)
        if value is not None:
            return value
        if callable(self.default):
            return self.default(config)
        return self.default

    def write(self, value: Any) -> Any:
        """The key's value."""
        is_null = self.null is not None and value == self.null
        return None if is_null else value


@dataclass(frozen=True)
class Fixed:
    """A key that must be missing, null, or one of these values; the first is written on export.

    Attributes:
        same_as: (config.json) -> the one allowed value, where it follows from other keys.
        is_written: on export; else it is left out.
    """

    hf_key: str
    values: tuple[Any, ...] = ()
    same_as: Callable[[Json], Any] | None = None
    is_written: bool = False

    def allowed(self, config: Json) -> tuple[Any, ...]:
        """Values that weft computes with."""
        if self.same_as is None:
            return self.values
        return (self.same_as(config),)


class RopeMapping(Protocol):
    """Reads and writes the keys of rotary embedding."""

    @property
    def hf_keys(self) -> tuple[str, ...]:
        """Keys of config.json that it reads."""

    def faults(self, config: Json, *, key: str) -> Iterator[Fault]:
        """Settings that weft computes differently, or not at all; `key` names the file."""

    def fields(self, config: Json) -> Flat:
        """Fields of the family's Config, for a config.json without faults."""

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """Keys of config.json."""

    def unwritable(self, cfg: ModelConfig) -> Iterator[Fault]:
        """Fields that transformers computes differently."""


class WholeConfig(Protocol):
    """Reads and writes config.json as a whole, where the model is transformers' own code."""

    def faults(self, config: Json, *, key: str) -> Iterator[Fault]:
        """Why this folder has no such model; `key` names the file."""

    def fields(self, config: Json) -> Flat:
        """Fields of the family's Config, for a config.json without faults."""

    def write(self, cfg: Any) -> dict[str, Any]:
        """Keys of config.json."""

    def has_key(self, name: str) -> bool:
        """Whether transformers' config declares a key: it ignores all others."""


@dataclass(frozen=True)
class UncomputedSetting(Fault):
    """A setting of config.json that a family of weft's does not compute, and transformers' own code may.

    Attributes:
        setting: the key that transformers reads it from.
    """

    setting: str = field(default="", kw_only=True)


def no_faults(cfg: ModelConfig) -> Iterable[Fault]:
    """Default of `ConfigMapping.unwritable`: every config can be written."""
    return ()


@dataclass(frozen=True)
class ConfigMapping:
    """One family's config.json.

    Attributes:
        rope: None where the family has no rotary embedding.
        probes: field -> a tensor name, formatted with keys of config.json, whose presence makes the
            field 1. These fields are suggestions: a user may set another value.
        counts: field -> key with the same value, written on export.
        implied: fields with one value in every folder of this architecture.
        ignored: keys that change no logit, besides `IGNORED`.
        constants: keys that transformers requires and that have no meaning here, written on export.
        unwritable: (config) -> fields that transformers computes differently.
        whole: in place of all of these.
    """

    keys: tuple[Key, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    rope: RopeMapping | None = None
    probes: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    constants: Mapping[str, Any] = field(default_factory=dict)
    unwritable: Callable[[Any], Iterable[Fault]] = no_faults
    whole: WholeConfig | None = None


FIXED_EVERYWHERE: tuple[Fixed, ...] = (
    Fixed("quantization_config"),
    Fixed("is_encoder_decoder", (False,)),
    Fixed("add_cross_attention", (False,)),
    Fixed("pruned_heads", ({},)),
    Fixed("per_layer_config"),
    Fixed("use_mrope", (False,)),
    Fixed("rope_interleaved", (False,)),
)
"""Keys of every architecture; without values a key must be missing or null."""

IGNORED = frozenset(
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
    unsloth_fixed unsloth_version is_llama_config transformers.js_config neftune_noise_alpha model_max_length unk_token_id
    n_special predict_special_tokens output_past
    """.split()  # noqa: SIM905 - words, not code
)
"""Keys that change no logit: names, token ids, dropout (0, unless --model.dropout says so), starting values, defaults
of generation, notes of the tools that wrote the file.
"""


IndexPairs = tuple[tuple[int, int], ...]
"""(index in weft's name, index in the tensor's name) of each place: `((0, 61),)` for mtp0, stored
as layer 61.
"""

IndexSets = Mapping[str, IndexPairs]
"""Placeholder of a name, such as `layer`, -> the indices that it stands for."""


@dataclass(frozen=True)
class Slice:
    """Part `index` of `count` equal parts of an HF tensor, split along `dim` as it is stored."""

    index: int
    count: int
    dim: int


@dataclass(frozen=True)
class TensorPart:
    """Entries of a parameter that a tensor holds, where either of them has others as well.

    Attributes:
        at: entries of the parameter.
        region: the same in the tensor, without the first dim of the parameter where the tensor is
            one entry of it.
        tensor_shape: of the tensor.
    """

    at: Box
    region: Box
    tensor_shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightRule:
    """A parameter, and the HF tensor that holds it.

        WeightRule("layer{layer}.attn.q.weight", "model.layers.{layer}.self_attn.q_proj.weight")

    `{layer}` names an index set of the mapping; a rule without braces holds once. With `{expert}`
    in `tensor` alone, the parameter is the stack of these tensors: expert e is param[e].

    Attributes:
        slice: the part of the tensor that is the parameter, where a tensor holds several.
        part: the part of the parameter that the tensor holds; a parameter of several parts has as many
            rules.
        transposed: the parameter is the transpose of (that part of) the tensor.
        keep_float32: never stored in fewer than 32 bits, whatever the dtype of the others.
        is_integer: whether the tensor holds whole numbers.
        write_alias: a tied alias that is written although its owner is, too.
    """

    param: str
    tensor: str
    slice: Slice | None = None
    part: TensorPart | None = None
    transposed: bool = False
    keep_float32: bool = False
    is_integer: bool = False
    write_alias: bool = False

    def expand(self, indices: IndexSets) -> Iterator[WeightRule]:
        """The rule for each index of its set, with complete names but for `{expert}`."""
        for set_name, pairs in indices.items():
            placeholder = f"{{{set_name}}}"
            if placeholder not in self.tensor:
                continue
            for weft_index, hf_index in pairs:
                param = self.param.replace(placeholder, str(weft_index))
                tensor = self.tensor.replace(placeholder, str(hf_index))
                yield replace(self, param=param, tensor=tensor)
            return
        yield self


def same_indices(indices: Iterable[int]) -> IndexPairs:
    """Places with one index for both names."""
    return tuple((index, index) for index in indices)


def every_layer(cfg: Any) -> IndexSets:
    """Default index sets: `{layer}` stands for all layers."""
    return {"layer": same_indices(range(cfg.layers))}


def uses_all(cfg: Any) -> tuple[str, ...]:
    """Default of `WeightMapping.unused`: every tensor is used."""
    return ()


HEAD = "head.proj.weight"
SCORE = WeightRule("head.score.weight", "score.weight")
"""Of a model with labels, in place of the head for the vocabulary."""
SCORES = frozenset((SCORE.param, "head.lm.score.weight"))
"""Names of its parameter: in weft's own families, and where transformers' code is trained."""
SCORE_SUFFIX = "ForSequenceClassification"
"""Of transformers' classes with such a head."""


class OwnRules(Protocol):
    """Rules of a model whose parameters have transformers' names."""

    def rules(self, cfg: Any) -> Iterable[WeightRule]:
        """The tensors of a folder as transformers writes it."""

    def packed(self, cfg: Any) -> Iterable[WeightRule]:
        """One tensor a parameter, as transformers has them in memory."""


@dataclass(frozen=True)
class WeightMapping:
    """One family's tensors.

    Attributes:
        rules: tensors as they are published; also what is written.
        packed: rules that replace those of the same parameter where their tensor is in the files:
            experts as transformers holds them in memory.
        index_sets: (config) -> index sets of all placeholders.
        ignored: patterns of tensors that hold no weight.
        unused: (config) -> patterns of tensors that this config does not use.
        prefix: start of tensor names that older files leave out.
        own: in place of `rules` and `packed`, where parameters have transformers' names.
    """

    rules: tuple[WeightRule, ...] = ()
    packed: tuple[WeightRule, ...] = ()
    index_sets: Callable[[Any], IndexSets] = every_layer
    ignored: tuple[str, ...] = ()
    unused: Callable[[Any], tuple[str, ...]] = uses_all
    prefix: str = ""
    own: OwnRules | None = None

    def expand_packed(self, cfg: Any) -> Iterator[WeightRule]:
        """The rules in `packed`, with complete names."""
        if self.own is not None:
            yield from self.own.packed(cfg)
        indices = self.index_sets(cfg)
        for rule in self.packed:
            yield from rule.expand(indices)

    def expand(self, cfg: Any) -> Iterator[WeightRule]:
        """All rules of a model, with complete names but for `{expert}`."""
        if self.own is not None:
            yield from self.own.rules(cfg)
        indices = self.index_sets(cfg)
        is_scored = bool(getattr(cfg, "labels", 0))
        for rule in self.rules:
            yield from (SCORE if is_scored and rule.param == HEAD else rule).expand(indices)


@dataclass(frozen=True)
class HFMapping:
    """A family in Hugging Face's format.

    Attributes:
        architecture: transformers' class, as in `architectures` of config.json.
        model_type: as in config.json.
        scored: transformers' class with a head for labels, where its name is another one.
    """

    architecture: str
    model_type: str
    config: ConfigMapping
    weights: WeightMapping
    scored: str = ""

    @property
    def scored_architecture(self) -> str:
        """transformers' class with a head for labels."""
        return self.scored or self.architecture.removesuffix("ForCausalLM") + SCORE_SUFFIX


class ConfigFamily(Protocol):
    """The config side of a model family; `weft.models.Family` extends it by the model side."""

    @property
    def Config(self) -> type[ModelConfig]:  # noqa: N802 (a class: the family's own type)
        """Type of the family's fields."""

    @property
    def PRESETS(self) -> Mapping[str, ModelConfig]:  # noqa: N802 (a constant of the module)
        """The configs of the family by name of a size."""

    @property
    def hf(self) -> HFMapping | None:
        """Hugging Face's format; None: transformers has no such family."""


Families = Mapping[str, ConfigFamily]


def name_rules(
    param_prefix: str, tensor_prefix: str, names: Mapping[str, str]
) -> tuple[WeightRule, ...]:
    """Rules below two prefixes: name of the parameter -> name of the tensor."""
    return tuple(
        WeightRule(param=f"{param_prefix}.{param}", tensor=f"{tensor_prefix}.{tensor}")
        for param, tensor in names.items()
    )
