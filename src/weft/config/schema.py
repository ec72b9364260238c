"""Sections of the run config: frozen models with a default, a range and a one-line description for every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticKnownError

from weft.core.model_config import ModelConfig
from weft.core.precision import Dtype
from weft.core.sequence import DEFAULT_CONTEXT, Context
from weft.layout.recomputation import NEED, read_key
from weft.schedule.catalog import DEFAULT_SCHEDULE, SCHEDULES

MAX_COUNT = 10**12
"""Steps, and other numbers of things that a run does one after the other."""

DEFAULT_RESTARTS = 3
"""Restarts of local ranks after failures; ranks as threads have none."""

Share = Annotated[float, Field(ge=0, lt=1)]

PairLossType = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo", "kto"]
"""Losses of preference pairs, by TRL's names; kto: of single answers with a label."""
REFERENCE_FREE: tuple[PairLossType, ...] = ("simpo", "orpo")

LossName = Literal["cross_entropy", "dpo", "reward", "classify"]
SCORED = ("reward", "classify")
"""Losses, and formats of their data, of the scores of whole texts."""

RecordFormat = Literal[
    "chat", "instruction", "prompt", "preference", "reward", "classify", "unpaired"
]
"""unpaired: completions that are desired or not. reward, classify: texts that are scored as a whole, at their last token."""
DataFormat = Literal["text", "auto"] | RecordFormat

TrackerName = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "csv", "prometheus", "opentelemetry"
]


class ConfigSection(BaseModel):
    """A section of the config: values never change, unknown keys and wrong types are faults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelSection(ModelConfig):
    """The model: its family and preset, then that family's own fields (explicit ones override the
    preset's).

    `weft.config.families.run_type` joins this with a family's Config, so `run.model` is that
    family's config.
    """

    name: str = Field(
        "llama3",
        description="model family, a file or module, or a decoder of transformers: hf:olmo2",
    )
    preset: str | None = Field(
        None, description="named sizes of the family; explicit fields override them"
    )
    from_hf: str | None = Field(
        None, description="folder of a Hugging Face checkpoint to start from"
    )
    digest: str | None = Field(None, description="hash of the model file, written by weft")

    @property
    def label(self) -> str:
        """A short name for folders and messages: the preset, the family, or the name of a file."""
        return self.preset or label_of(self.name)

    @property
    def architecture(self) -> dict[str, Any]:
        """The family's own fields: what decides the shape of the model."""
        return self.model_dump(exclude=set(ModelSection.model_fields))


def label_of(model_name: str) -> str:
    """A family's name, or the name of a model file without its folder."""
    if model_name.endswith(".py"):
        return Path(model_name).stem
    return model_name


class DataConfig(ConfigSection):
    """The data source."""

    source: str = Field(
        "stdlib",
        description="stdlib (this Python's sources), digits, a prepared folder, a file, a folder, a glob, a URL; "
        ".bin holds tokens; .npz, .safetensors, .npy: arrays, for models that name them",
    )
    mix: tuple[str, ...] = Field(
        (), description='instead of one source several with weights: "a/=0.7" "b/=0.3"'
    )
    tokenizer: str = Field(
        "bytes", description="bytes, or a tokenizer.json; a prepared folder has its own"
    )
    round_trip: Literal["exact", "any"] = Field(
        "exact",
        description="texts that come back changed from the tokenizer: exact rejects them, any trains on what is left of them",
    )
    text_field: str = Field(
        "text", description="field of JSON, column of CSV and parquet files that holds the text"
    )
    format: DataFormat = Field(
        "text",
        description="text, or records to fine-tune on (rows of JSON, CSV, parquet); auto: by the fields of the first",
    )
    classes: tuple[str, ...] = Field(
        (), description="names of the classes of `loss classify`, in the order of their numbers"
    )
    chat_template: str | None = Field(
        None,
        description="chatml, alpaca, or a Jinja file that renders messages; None: the tokenizer's own",
    )
    token_dtype: Literal["uint16", "uint32"] = Field(
        "uint16", description="type of the numbers in .bin token files"
    )
    seq_len: int = Field(128, ge=1, le=2**24, description="length of one sequence, tokens")
    packing: Literal["auto", "stream", "documents", "single"] = Field(
        "auto",
        description="stream of text, documents apart from each other, or single: one record; auto: stream, documents of records",
    )
    order: Literal["shuffled", "stored"] = Field(
        "shuffled", description="of samples in an epoch: another one in each, or as they are stored"
    )
    long: Literal["split", "error"] = Field(
        "split", description="documents longer than seq_len: split (records are cut), or error"
    )
    prefetch: int = Field(2, ge=0, le=64, description="steps that are read ahead; 0: none")


class EvalConfig(ConfigSection):
    """Evaluation on text that is not trained on."""

    every: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between evaluations, and one after the last step; 0: none",
    )
    batches: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="batches of global_size sequences an evaluation; 0: the whole source",
    )
    source: str | None = Field(
        None, description="what to evaluate on; None: valid.bin of the prepared data.source"
    )
    patience: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="evaluations in a row without a new lowest loss after which training stops; 0: never",
    )


class LogConfig(ConfigSection):
    """What a run shows on the screen, and what it records besides."""

    every: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between two lines on the screen (events and reports have all); 0: about 50 lines a run",
    )
    blocks: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between two measurements of each block: gradient norm, RMS of parameters and outputs; 0: none",
    )


class AlertConfig(ConfigSection):
    """A program and a URL that get the events of guards, restarts, failures and the end."""

    command: str | None = Field(
        None,
        title="a command with its arguments, run without a shell",
        examples=['"notify-send training"'],
        description="gets each of these events as JSON on its standard input: see docs/runs.md",
    )
    url: str | None = Field(
        None,
        title="a URL of http or https, in which $NAME stands for an environment variable",
        examples=["'$ALERT_URL'"],
        description="gets each of these events as JSON by POST; $NAME: a variable, which is not stored",
    )


class BatchConfig(ConfigSection):
    """Sizes of the global batch and of micro-batches."""

    global_size: int = Field(16, ge=1, le=2**24, description="sequences a step, over all ranks")
    micro_size: int = Field(
        2, ge=1, le=2**24, description="sequences a micro-batch, on one data rank"
    )
    statistics_size: Annotated[int, Field(ge=1, le=2**24)] | None = Field(
        None,
        title="a number of sequences; by default those of a micro-batch",
        examples=["8"],
        description="sequences that BatchNorm normalises together, on neighbouring data ranks",
    )

    @property
    def normalised_size(self) -> int:
        """Sequences that BatchNorm normalises together."""
        return self.statistics_size or self.micro_size

    def statistics_of(self, micro_size: int) -> int | None:
        """`statistics_size` of as many micro-batches of another size."""
        if self.statistics_size is None:
            return None
        return self.statistics_size // self.micro_size * micro_size

    def num_micro(self, num_data_ranks: int) -> int:
        """Micro-batches a step on every data rank."""
        return self.global_size // (num_data_ranks * self.micro_size)


StateDtype = Literal["params", "8bit"]


class OptimGroup(ConfigSection):
    """Settings of the parameters whose names match a pattern; None: those of the run."""

    match: str = Field(min_length=1, description="pattern of parameter names: *norm*, layer?.mlp.*")
    optimizer: str | None = Field(None, description="optimizer of these parameters")
    lr_scale: float = Field(1.0, ge=0, description="learning rate, times optim.lr")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        None, description="weight decay of all of them, vectors too"
    )
    betas: tuple[Share, Share] | None = Field(None, description="decay rates of both moments")
    state_dtype: StateDtype | None = Field(None, description="states of all of them, whatever size")


class OptimConfig(ConfigSection):
    """Optimizer and learning rate schedule."""

    name: str = Field(
        "adamw",
        description="adamw, sgd, lion, muon, adafactor, or a class: package.module:Class, file.py:Class",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        title="a table: [optim.options] in TOML, --optim.options.NAME VALUE",
        description="options of the optimizer by name: see docs/optimizers.md",
    )
    groups: tuple[OptimGroup, ...] = Field(
        (),
        title='groups such as "*norm*: weight_decay=0"',
        description='settings by name pattern, first match wins: "*norm*: weight_decay=0" "embed*: lr_scale=0.1"',
        examples=['"*norm*: weight_decay=0"'],
    )
    on_change: Literal["reject", "fresh"] = Field(
        "reject",
        description="a resumed checkpoint of another optimizer: reject, or begin with fresh state",
    )
    lr: float = Field(3e-3, gt=0, description="peak learning rate, per step")
    min_lr: float = Field(
        0.1,
        ge=0,
        le=1,
        description="learning rate at the end of the decay, as a share of lr, 0 to 1",
    )
    warmup: int = Field(20, ge=0, le=MAX_COUNT, description="steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="rate after the warm-up"
    )
    cooldown: Share = Field(0.2, description="share of all steps in the final decay of wsd, 0 to 1")
    weight_decay: float = Field(
        0.1, ge=0, description="weight decay of matrices, per unit of learning rate"
    )
    betas: tuple[Share, Share] = Field(
        (0.9, 0.95), description="adamw, lion: decay rates of both moments, 0 to 1"
    )
    eps: float = Field(1e-8, gt=0, description="adamw: added to the root of the second moment")
    momentum: Share = Field(0.9, description="sgd: decay rate of the gradient's sum, 0 to 1")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    state_dtype: StateDtype = Field(
        "params",
        description="states of large matrices outside embed*: as precision.params, or 8bit",
    )
    state_block: int = Field(
        256, ge=2, le=MAX_COUNT, description="entries of a row that share the scale of their 8 bits"
    )

    @property
    def last_lr(self) -> float:
        """Learning rate at the end of the decay, without digits that are rounding: 0.0003 of 0.003."""
        return float(f"{self.min_lr * self.lr:.15g}")

    @field_validator("groups", mode="before")
    @classmethod
    def _read_groups(cls, value: Any) -> Any:
        """Groups given as text, as on the command line."""
        if not isinstance(value, tuple | list):
            raise ValueError('is no list of groups; try [{match = "*norm*", weight_decay = 0.0}]')
        groups = []
        for item in value:
            if isinstance(item, str):
                group = read_group(item)
            else:
                group = item
            if isinstance(group, dict):
                _check_group(group)
            groups.append(group)
        return tuple(groups)


GROUP_EXAMPLE = '"*norm*: weight_decay=0"'


def _check_group(group: dict[str, Any]) -> None:
    settings = list(OptimGroup.model_fields)
    for name in group:
        if name not in settings:
            known = ", ".join(settings)
            raise ValueError(f"{name!r} is no setting of a group ({known}); try {GROUP_EXAMPLE}")
    if "match" not in group:
        raise ValueError(f"a group has no pattern, match; try {GROUP_EXAMPLE}")


def read_group(text: str) -> dict[str, Any]:
    """The keys of a group: `embed*: lr_scale=0.1 betas=0.9/0.95`.

    Raises:
        ValueError: it is no such text.
    """
    pattern, _, settings = text.partition(": ")
    if not settings.strip():
        raise ValueError(f"{text!r} is no group; try {GROUP_EXAMPLE}")
    group: dict[str, Any] = {"match": pattern.strip()}
    for word in settings.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name in ("lr_scale", "weight_decay", "betas"):
            group[name] = _numbers(name, value)
        else:
            group[name] = value
    return group


def _numbers(name: str, text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(number) for number in text.split("/"))
    except ValueError:
        raise ValueError(f"{name}={text} is no number; try {GROUP_EXAMPLE}") from None
    if name == "betas":
        return numbers
    return numbers[0]


def _recompute(text: str) -> str:
    try:
        return read_key(text)
    except ValueError:
        raise PydanticKnownError("literal_error", {"expected": NEED}) from None


class ParallelConfig(ConfigSection):
    """Options of the layout besides the mesh."""

    sequence: bool = Field(
        False, description="shard activations along the sequence over tp, outside its regions"
    )
    tp_overlap: bool = Field(
        False,
        description="with sequence: send parts of the sequence over tp while others are multiplied",
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="ZeRO stage: shards 1 optimizer states, 2 gradients too, 3 parameters too"
    )
    context: Context = Field(
        DEFAULT_CONTEXT, description="how attention reads keys and values across cp"
    )
    recompute: Annotated[str, AfterValidator(_recompute)] = Field(
        "none",
        title=NEED,
        examples=["full:12"],
        description="activations that are recomputed in the backward: none, selective, full; offload: kept in host "
        "memory; full:12: in the first 12 layers of each stage; auto: as few as the memory needs",
    )
    logits: Literal["auto", "whole", "chunked"] = Field(
        "auto",
        description="whole: the head computes the logits of all tokens; chunked: their losses, some "
        "tokens at a time; auto: chunked where logits are large",
    )


class PipelineConfig(ConfigSection):
    """Pipeline schedule and stages."""

    schedule: str = Field(
        DEFAULT_SCHEDULE,
        description=f"order of the actions: {', '.join(SCHEDULES)}, or a file with a table",
    )
    table: tuple[str, ...] = Field(
        (), description="lines of that file, which a run records; empty: they are read from it"
    )
    chunks: int = Field(
        1, ge=1, le=256, description="model chunks a pipeline rank (stages = pp x chunks)"
    )
    split: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        description="layers of every stage, first to last (0: only the embedding, or only the head); "
        "empty: balanced by FLOPs",
    )


class SiteConfig(ConfigSection):
    """Training across sites: local updates along the mesh axis site."""

    every: int = Field(20, ge=1, le=MAX_COUNT, description="inner steps between two outer steps")
    lr: float = Field(0.7, gt=0, description="learning rate of the outer Nesterov SGD")
    momentum: Share = Field(0.9, description="decay rate of the outer momentum, 0 to 1")
    wire: Literal["float32", "bfloat16", "int8"] = Field(
        "float32", description="type of outer gradients on the link between sites"
    )
    overlap: int = Field(
        0, ge=0, le=MAX_COUNT, description="inner steps that run beside an exchange; below every"
    )
    mix: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of its own parameters that a site keeps at an overlapped outer step",
    )
    gbit_s: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="speed of the link between two sites, for predictions; 0: not known",
    )


class PrecisionConfig(ConfigSection):
    """Number types of parameters, computation and gradients."""

    params: Dtype = Field(
        "float32", description="type of the parameters that the optimizer updates"
    )
    compute: Dtype = Field("float32", description="type of activations and matrix products")
    reduce: Dtype = Field("float32", description="type in which gradients are summed over ranks")
    matmul: Literal["ieee", "tf32"] = Field(
        "ieee",
        description="float32 matrix products on GPUs: exact, or rounded to 10 bits and faster",
    )
    linears: Literal["default", "fp8"] = Field(
        "default",
        description="products of the layers' linears and experts: as compute says, or of rows in 8-bit floats",
    )
    fp8_exclude: tuple[str, ...] = Field(
        (),
        description="linears not in fp8, by name or pattern as lora.targets; output projections and routers never are",
    )


class LoraConfig(ConfigSection):
    """Low-rank adapters of linears; all other parameters are frozen."""

    rank: int = Field(
        0, ge=0, le=2**16, description="width of every adapter; 0: none, the whole model is trained"
    )
    alpha: float = Field(
        16.0, gt=0, description="the output of an adapter is scaled by alpha / rank"
    )
    targets: tuple[str, ...] = Field(
        (),
        description="linears with adapters, by name or pattern: q v, or layer1.attn.*; nothing: all of attention and MLPs",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that an entry of an adapter's input is dropped"
    )
    dora: bool = Field(
        False, description="DoRA: a trained magnitude for each output of an adapted linear"
    )
    quantize: Literal["none", "nf4", "nf4_double"] = Field(
        "none",
        description="how the frozen linears are held: as computed with; nf4: in 4.5 bits a weight (QLoRA); nf4_double: 4.13",
    )
    base: str | None = Field(
        None,
        description="run or checkpoint whose parameters are frozen; None: model.from_hf, or random initial values",
    )


class GuardConfig(ConfigSection):
    """Guards against steps that would destroy a run."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="loss, norm or gradient not finite: stop, skip the update, or go back to the newest checkpoint",
    )
    max_failures: int = Field(
        8,
        ge=1,
        description="failed steps in a row that skip and rollback allow: one more stops the run",
    )
    spike: float = Field(
        0.0,
        ge=0,
        description="a loss above spike x the median of the last 32 is a spike; 0: not looked for",
    )
    on_spike: Literal["report", "rollback"] = Field(
        "report", description="a spike: report it, or go back to the newest checkpoint"
    )
    digest_every: int = Field(
        0,
        ge=0,
        description="steps between comparisons of replicas, bit by bit; also before each save; 0: none",
    )
    stragglers: float = Field(
        3.0,
        ge=0,
        description="report ranks that work this many times as long as their equals; 0: none",
    )


class SupervisionConfig(ConfigSection):
    """Processes of ranks: hangs, restarts, garbage collection."""

    timeout_s: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="seconds without progress after which a rank is hung; 0: 2 s to 1 min in steps (docs/faults.md)",
    )
    restarts: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        None,
        description="how often ranks are started again after a failure or hang, from the newest snapshot or checkpoint; None: 3",
    )
    elastic: bool = Field(
        False,
        description="with fewer ranks than the mesh has (torchrun, Slurm, nproc), use the best smaller layout",
    )
    gc_every: int = Field(
        10,
        ge=0,
        le=MAX_COUNT,
        description="steps between collections of Python's garbage, after the same steps on all ranks; 0: when Python does",
    )
    full_mesh: str = Field(
        "", description="elastic: mesh to return to when its ranks are back; empty: mesh"
    )

    @property
    def num_restarts(self) -> int:
        """How often local ranks are started again."""
        if self.restarts is None:
            return DEFAULT_RESTARTS
        return self.restarts


class ProveConfig(ConfigSection):
    """Proof of a run before its first step."""

    before: Literal["auto", "always", "never"] = Field(
        "auto",
        description="prove code, layout and options at reduced size first (unless this machine has, always, never), "
        "and the first step as it is",
    )
    during: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="compare every n-th step with one device before its update; 0: the first one alone",
    )


class DpoConfig(ConfigSection):
    """Direct preference optimization and its relatives: `loss dpo` on pairs of answers."""

    loss_type: PairLossType = Field(
        "sigmoid",
        description="sigmoid (DPO), hinge, ipo; without a reference model simpo, orpo; kto: single answers",
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="factor of margins in nats, 1 / (2 beta) the target margin of ipo, weight of the odds ratio of orpo",
    )
    gamma: float = Field(0.5, ge=0, description="target margin of simpo, after the factor beta")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="probability that the answers of a pair are exchanged; of sigmoid and simpo",
    )
    desirable_weight: float = Field(
        1.0, ge=0, description="of kto: factor of desired answers' loss"
    )
    undesirable_weight: float = Field(1.0, ge=0, description="of kto: factor of the others' loss")

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities are compared with those of the initial model."""
        return self.loss_type not in REFERENCE_FREE

    @property
    def has_labels(self) -> bool:
        """Whether single answers are compared, each of which is desired or not."""
        return self.loss_type == "kto"


class SaveConfig(ConfigSection):
    """When checkpoints are written, and which are kept."""

    every: int = Field(
        0, ge=0, le=MAX_COUNT, description="steps between checkpoints; 0: none before the end"
    )
    memory_every: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="steps between snapshots in memory, from which ranks restart; 0: none; None: under 2% of the time",
    )
    at_end: bool = Field(
        True, description="save after the last step; a run that is asked to stop is always saved"
    )
    wait_s: float = Field(
        600.0,
        ge=0,
        description="how long the last step is saved again while its disk is full; the state is then kept in memory",
    )
    keep: int = Field(2, ge=1, le=MAX_COUNT, description="newest checkpoints that are kept")
    remote: str | None = Field(
        None,
        description="URL to which checkpoints are copied (fsspec: s3://, gs://, file://); an out that is a URL sets it",
    )
    best: bool = Field(
        False,
        description="save after each evaluation with a new lowest loss, and keep that checkpoint: RUN/best",
    )
