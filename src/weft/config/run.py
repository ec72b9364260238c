"""The run config: all sections of one run, the sizes that follow from them, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from weft.config.hardware import Hardware, find_hardware
from weft.config.schema import (
    MAX_COUNT,
    SCORED,
    AlertConfig,
    BatchConfig,
    ConfigSection,
    DataConfig,
    DpoConfig,
    EvalConfig,
    GuardConfig,
    LogConfig,
    LoraConfig,
    LossName,
    ModelSection,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ProveConfig,
    SaveConfig,
    SiteConfig,
    SupervisionConfig,
    TrackerName,
)
from weft.core.dimension import pipeline_axis, position_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.core.transports import TransportName
from weft.layout.compilation import Compile
from weft.layout.plan import Plan, canonical_json, make_stages, sharding_rule_of
from weft.layout.recomputation import RecomputePolicy, known_policy, read_policy


class Run(ConfigSection):
    """One run, whole: everything that decides what is computed and where."""

    mesh: str = Field(
        "",
        description='axes with degrees, outermost first: "pp2 dp2 tp2"; empty: one rank; auto: the '
        "fastest legal one by prediction",
    )
    seed: int = Field(
        1, ge=0, lt=2**63, description="seed of initial weights, data order and random draws"
    )
    steps: int = Field(200, ge=1, le=MAX_COUNT, description="optimizer steps to train")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="how often the data is read, in place of steps; None: as steps say"
    )
    loss: LossName = Field(
        "cross_entropy",
        description="cross entropy of the targets; dpo, reward on preference pairs; classify labelled texts",
    )
    neftune: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="alpha of NEFTune, noise on the embeddings of tokens in training; 0: none",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="where ranks compute; auto: a GPU for each rank, the CPU if there is no GPU",
    )
    compile: Compile = Field(
        "off",
        description="blocks: torch.compile compiles each block; auto: on GPUs, in layouts that allow it",
    )
    deterministic: bool = Field(
        False,
        description="same bits in every run, and for 1, 2, 4, ... data ranks: sums in a fixed order, one thread a rank",
    )
    hardware: str | None = Field(
        None,
        title="the name of a device, or a hardware file",
        examples=["h100"],
        description="device that predictions are for: h100, a100, ..., or a file (see docs/hardware.md)",
    )
    stack: str | None = Field(
        None,
        title="the name of a set of constants",
        examples=["llm-foundry-2023"],
        description="constants of a software on that device, in predictions; None: those of the device",
    )
    transport: TransportName = Field(
        "process",
        description="ranks as processes or as threads of one process; CPU tensors of processes on one host travel in"
        " shared memory (WEFT_CPU_TRANSPORT=gloo: over gloo)",
    )
    nproc: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        None, description="local ranks to start; None: the mesh's size"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="TCP port for the rendezvous of local ranks; None: a free one"
    )
    sample: int = Field(
        0, ge=0, le=2**24, description="tokens to generate after the last step; 0: none"
    )
    sample_every: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="steps between texts of `sample` tokens; 0: only after the last step",
    )
    track: tuple[TrackerName, ...] = Field(
        (),
        description="trackers that get every number of the run: tensorboard, wandb, mlflow, trackio, csv, "
        "prometheus, opentelemetry",
    )
    report: bool = Field(True, description="write the page report.html into the folder at the end")
    profile: str | None = Field(
        None,
        title="steps FIRST:END",
        examples=["10:13"],
        description="steps to record for `weft trace`; END is not among them: 10:13 are 10, 11 and 12",
    )
    out: str | None = Field(None, description="run folder; None: a fresh one under runs/")
    resume: str | None = Field(
        None,
        description="auto (newest checkpoint in out, if any), a checkpoint, or a run folder; None: start from step 0",
    )
    resume_code: Literal["same", "any"] = Field(
        "same",
        description="code of users' models and optimizers at a resume: that of the checkpoint, or any (this one trains on)",
    )
    model: ModelSection = Field(description="the model")
    data: DataConfig = Field(default_factory=DataConfig, description="the data source")
    batch: BatchConfig = Field(default_factory=BatchConfig, description="sequences a step")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="the layout besides the mesh"
    )
    pipeline: PipelineConfig = Field(
        default_factory=PipelineConfig, description="pipeline schedule"
    )
    site: SiteConfig = Field(
        default_factory=SiteConfig, description="training across sites: local updates"
    )
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="number types")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="low-rank adapters")
    dpo: DpoConfig = Field(default_factory=DpoConfig, description="loss of preference pairs")
    save: SaveConfig = Field(default_factory=SaveConfig, description="checkpoints")
    guard: GuardConfig = Field(
        default_factory=GuardConfig, description="guards against steps that would destroy a run"
    )
    run: SupervisionConfig = Field(
        default_factory=SupervisionConfig, description="supervision of local ranks"
    )
    eval: EvalConfig = Field(
        default_factory=EvalConfig, description="loss on text that is not trained on"
    )
    alert: AlertConfig = Field(default_factory=AlertConfig, description="events that are passed on")
    log: LogConfig = Field(
        default_factory=LogConfig, description="the screen, and numbers of blocks"
    )
    prove: ProveConfig = Field(
        default_factory=ProveConfig, description="proof of the run before its first step"
    )

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, read from its text."""
        return Mesh.parse(self.mesh)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.device_mesh.degree(sequence_axes())

    @property
    def pipeline_size(self) -> int:
        """Number of pipeline ranks."""
        return self.device_mesh.degree(pipeline_axis())

    @property
    def num_micro(self) -> int:
        """Micro-batches a step on every data rank."""
        return self.batch.num_micro(self.num_data_ranks)

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pipeline_size * self.pipeline.chunks

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values of some keys, which must be valid by themselves.

        Args:
            values: dotted key -> value: `{"mesh": "dp2", "pipeline.chunks": 2}`.
        """
        changed = self
        for key, value in values.items():
            section_name, _, name = key.rpartition(".")
            if section_name:
                section: BaseModel = getattr(changed, section_name)
                new_section = section.model_copy(update={name: value})
                changed = changed.model_copy(update={section_name: new_section})
            else:
                changed = changed.model_copy(update={name: value})
        return changed


def hardware_of(run: Run) -> Hardware | None:
    """The device that predictions are for, as it computes matrix products under the precision of
    this config; None where none is named.

    Raises:
        ConfigError: as `find_hardware`.
    """
    if run.hardware is None:
        return None
    device = find_hardware(run.hardware).with_stack(run.stack)
    return device.for_matmul(run.precision.matmul)


LARGE_LOGITS = 2**28
"""Bytes in float32 from which the logits of a micro-batch are not computed whole."""


def has_chunked_losses(run: Run) -> bool:
    """Whether heads compute losses chunk by chunk. Under `auto`: where the logits of the tokens that
    a rank has of a micro-batch are large, and larger than the gradient of the head's weight.
    """
    if run.loss in SCORED:  # their heads have no vocabulary
        return False
    logits = run.parallel.logits
    if logits != "auto":
        return logits == "chunked"
    num_tokens = run.batch.micro_size * run.data.seq_len // run.device_mesh.degree(position_axes())
    if run.model.kind != "tokens" or num_tokens < run.model.architecture.get("dim", 0):
        return False
    vocab = run.model.axis_sizes().get("vocab", 0)
    return 4 * num_tokens * vocab >= LARGE_LOGITS


def recompute_of(run: Run) -> RecomputePolicy:
    """What its layers recompute; nothing where that is not chosen yet."""
    policy = known_policy(run.parallel.recompute, run.num_stages)
    return policy or read_policy("none")


def plan_of(run: Run) -> Plan:
    """The plan that this config asks for.

    Raises:
        PlanError: more stages than layers, or a split that does not add up.
    """
    blocks = run.model.block_specs(run.data.seq_len)
    return Plan(
        mesh=run.device_mesh,
        family=run.model.name,
        architecture=canonical_json(run.model.architecture),
        stages=make_stages(blocks, run.num_stages, split=run.pipeline.split),
        schedule=run.pipeline.schedule,
        schedule_lines=run.pipeline.table,
        chunks=run.pipeline.chunks,
        microbatches=run.num_micro,
        micro_size=run.batch.micro_size,
        statistics_size=run.batch.statistics_size or 0,
        seq_len=run.data.seq_len,
        sequence_parallel=run.parallel.sequence,
        tp_overlap=run.parallel.tp_overlap,
        context=run.parallel.context,
        rule=sharding_rule_of(run.device_mesh, run.model.axis_sizes()),
        zero=run.parallel.zero,
        recompute=recompute_of(run).text,
        compile=run.compile,
        chunked_losses=has_chunked_losses(run),
        params=run.precision.params,
        compute=run.precision.compute,
        reduce=run.precision.reduce,
        clip=run.optim.clip,
    )
