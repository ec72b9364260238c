"""What a proof compares: a run unpacked into the training that one device repeats, its layout and texts; smaller cases of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.config.changed_runs import command_of, in_float64, inside_site
from weft.config.other_layouts import on_mesh
from weft.config.run import Run, has_chunked_losses
from weft.config.schema import (
    BatchConfig,
    DpoConfig,
    LossName,
    ModelSection,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    SiteConfig,
)
from weft.config.small_runs import is_valid, reduced
from weft.config.smaller_cases import Reduction, reductions
from weft.core.attention_choice import AttentionLimits
from weft.core.mesh import Mesh
from weft.data.conversations import ConversationSamples
from weft.data.dataset import open_data
from weft.data.samples import Samples
from weft.errors import Fault, PlanError
from weft.models import FAMILIES, Family
from weft.models.common.buffer_updates import updates_buffers
from weft.prove.arithmetic import NumberTypes, Perturbation, perturbations
from weft.prove.drawn_pairs import SOURCE as DRAWN_PAIRS
from weft.prove.drawn_pairs import drawn_records
from weft.prove.inner_precision import InnerPrecision, inner_precision
from weft.prove.raw_batch import MaskedSamples
from weft.prove.rows import Rows, open_rows
from weft.prove.small_sizes import accepts_sizes
from weft.run.world import Attempt
from weft.train.build import family_of, initial_source
from weft.train.build_training import DPO, build_training, loss_family
from weft.train.init_from import lazy_blocks
from weft.train.size_limits import SizeLimits
from weft.train.training import Evaluator, Training

LIMITS = SizeLimits(
    shared_entries=64,
    bucket_bytes=2**14,
    attention=AttentionLimits(0, shortest_run=4, most_scores=0, least_queries=4),
)
"""In the sizes of a proof replicas share the writing of all tensors but vectors, and gradients are
reduced in several buckets.
"""
CROSS_ENTROPY: LossName = "cross_entropy"
HALF_BATCHES = 5
"""Of an epoch at reduced size: it ends within the third step."""
UNCLIPPED = 1e6
"""Factor of the largest gradient norm in a step that is not clipped."""
MAIN_SIZES = ("layers", "dim", "vocab")
"""Sizes of a model that a report shows."""


@dataclass(frozen=True)
class Task:
    """The training that one device repeats: what a run computes, whatever its layout.

    Attributes:
        family: with adapters.
        source: holds initial values; None if they are drawn.
        steps: of the learning rate schedule.
        loss: which one.
        dpo: constants of the loss of preference pairs; None: another loss.
        has_token_losses: whether heads hand on the losses of targets, not logits.
        quantize: how frozen linears are held, as `lora.quantize`.
        first_unclipped: step from which the largest gradient norm is so large that nothing is
            clipped, so that a proof compares both cases; None: none.
    """

    family: Family
    model: ModelSection
    samples: Samples
    source: Source | None
    batch: BatchConfig
    optim: OptimConfig
    types: NumberTypes
    seed: int
    steps: int
    loss: LossName = "cross_entropy"
    dpo: DpoConfig | None = None
    has_token_losses: bool = False
    quantize: str = "none"
    first_unclipped: int | None = None

    def clip_of(self, step: int) -> float:
        """The largest gradient norm of a step, from 1."""
        if self.first_unclipped is None or step < self.first_unclipped:
            return self.optim.clip
        return self.optim.clip * UNCLIPPED


@dataclass(frozen=True)
class LiveTask:
    """What a step of a run computes, whatever its layout, for a comparison while it trains.

    Attributes:
        family: with adapters and the loss of the run.
        base: run with the parameters that adapters extend, as `lora.base`.
        quantize: how frozen linears are held, as `lora.quantize`.
        repeat: returns the command that compares the first step of the run tensor by tensor.
    """

    family: Family
    model: ModelSection
    precision: PrecisionConfig
    seq_len: int
    seed: int
    base: str | None
    quantize: str
    optim: OptimConfig
    repeat: Callable[[], str]

    @staticmethod
    def of(run: Run) -> LiveTask:
        """The task of a run."""
        return LiveTask(
            family=loss_family(run),
            model=run.model,
            precision=run.precision,
            seq_len=run.data.seq_len,
            seed=run.seed,
            base=run.lora.base,
            quantize=run.lora.quantize,
            optim=run.optim,
            repeat=partial(command_of, run, FAMILIES, steps=1),
        )

    @cached_property
    def types(self) -> NumberTypes:
        """The number types, and the coarsest to which a user's model casts inside."""
        compute = NumberTypes.of(self.precision).compute
        inner = inner_precision(self.family, self.model, dtype=compute, seq_len=self.seq_len)
        return NumberTypes.of(self.precision, inner=inner.dtype)

    @property
    def is_user_model(self) -> bool:
        """Whether the model is not one of weft's own."""
        return FAMILIES.is_user_model(self.model.name)

    def open_source(self) -> Source | None:
        """Where initial values are stored; None if they are drawn."""
        return initial_source(self.model, base=self.base)


@dataclass(frozen=True)
class Subject:
    """What is proved.

    Attributes:
        run: the run, with the sizes that are compared; the layout trains it whole.
        family: its model family, with adapters.
        samples: its data.
        steps: optimizer steps; the last one follows a checkpoint that is written and read back.
        first_unclipped: as of `Task`.
        limits: of the training run of the layout.
    """

    run: Run
    family: Family
    samples: Samples
    steps: int
    first_unclipped: int | None = None
    limits: SizeLimits = LIMITS

    @staticmethod
    def of(run: Run, *, steps: int, rows: Rows = "own") -> Subject:
        """The subject of a run, whose data is opened; some targets of text are masked, as those of
        records are. Where a loss of preference pairs has data without pairs, these are drawn.
        """
        samples = open_rows(
            run.data,
            run.model,
            rows=rows,
            num_samples=max(HALF_BATCHES * run.batch.global_size // 2, 1),
        )
        family = family_of(run.model, run.lora, neftune=run.neftune, precision=run.precision)
        last_of_several = steps if steps > 1 else None
        subject = Subject(run, family, samples, steps, first_unclipped=last_of_several)
        if run.model.kind != "tokens":
            return subject
        if run.loss != CROSS_ENTROPY:
            return subject._with_records()
        if isinstance(samples, ConversationSamples):
            return subject
        return replace(subject, samples=MaskedSamples(samples))

    def _with_records(self) -> Subject:
        """The same on preference pairs, or on labelled texts."""
        if isinstance(self.samples, ConversationSamples):
            return self
        run = self.run
        records = drawn_records(
            vocab=run.model.axis_sizes()["vocab"],
            seq_len=run.data.seq_len,
            global_size=run.batch.global_size,
            loss=run.loss,
            num_classes=len(run.data.classes),
            has_labels=run.loss == DPO and run.dpo.has_labels,
        )
        return replace(self, samples=records)

    @staticmethod
    def of_recorded(run: Run, *, steps: int) -> Subject:
        """The subject of a run as it was trained: its data is as it is."""
        family = family_of(run.model, run.lora, neftune=run.neftune, precision=run.precision)
        return Subject(run, family, open_data(run.data, run.model), steps)

    # the same model and data in another run

    def with_values(self, values: Mapping[str, Any]) -> Subject:
        """The subject with other values of some keys: `{"site.every": 2}`."""
        return replace(self, run=self.run.with_values(values))

    def in_float64(self) -> Subject:
        """The same in float64.

        Raises:
            PlanError: a user's model does not compute in float64.
        """
        subject = replace(self, run=in_float64(self.run))
        if subject.inner.error:
            what = f"does not compute in float64: {subject.inner.error}"
            fix = "x.to(self.weight.dtype), the type of a parameter, in place of x.float()"
            raise PlanError(Fault(f"{self.model.label}: {subject.inner.block}", what, fix=fix))
        return subject

    def inside_site(self) -> Subject:
        """The layout of one site, without local updates."""
        return replace(self, run=inside_site(self.run))

    def on_mesh(self, mesh: str) -> Subject | None:
        """The same run, with its global batch, on another mesh; None where that is not valid."""
        if Mesh.parse(mesh) == self.mesh:
            return self
        changed = on_mesh(self.run, mesh)
        return None if changed is None else replace(self, run=changed)

    @property
    def has_fp8(self) -> bool:
        """Whether linears compute in fp8."""
        return self.run.precision.linears == "fp8"

    @property
    def has_drawn_pairs(self) -> bool:
        """Whether its preference pairs are not those of the run."""
        return self.samples.facts().get("source") == DRAWN_PAIRS

    @property
    def mesh(self) -> Mesh:
        """The ranks of the layout."""
        return self.run.device_mesh

    @property
    def model(self) -> ModelSection:
        """The config of the model."""
        return self.run.model

    @property
    def optim(self) -> OptimConfig:
        """The config of the optimizer."""
        return self.run.optim

    @property
    def site(self) -> SiteConfig:
        """The config of local updates."""
        return self.run.site

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning rate schedule."""
        return self.run.steps

    @property
    def types(self) -> NumberTypes:
        """The number types."""
        return NumberTypes.of(self.run.precision, inner=self.inner.dtype)

    @cached_property
    def inner(self) -> InnerPrecision:
        """The casts inside a user's model."""
        compute = NumberTypes.of(self.run.precision).compute
        seq_len = self.run.data.seq_len
        return inner_precision(self.family, self.model, dtype=compute, seq_len=seq_len)

    @property
    def has_sharded_activations(self) -> bool:
        """Whether activations between blocks are sharded along the sequence."""
        return self.run.parallel.sequence

    def task(self) -> Task:
        """The training that one device repeats; stored initial values are opened."""
        run = self.run
        return Task(
            family=self.family,
            model=run.model,
            samples=self.samples,
            source=initial_source(run.model, base=run.lora.base),
            batch=run.batch,
            optim=run.optim,
            types=self.types,
            seed=run.seed,
            steps=run.steps,
            loss=run.loss,
            dpo=run.dpo if run.loss == DPO else None,
            has_token_losses=has_chunked_losses(run),
            quantize=run.lora.quantize,
            first_unclipped=self.first_unclipped,
        )

    def perturbations(self) -> Sequence[Perturbation]:
        """The perturbed versions of its reference, from which bounds are derived."""
        blocks = (
            lazy_blocks(self.family, self.model) if FAMILIES.is_user_model(self.model.name) else {}
        )
        return perturbations(
            self.types,
            self.run.optim,
            micro_size=self.run.batch.micro_size,
            has_batch_norm=updates_buffers(dict(blocks.items())),
        )

    def build_training(
        self, comm: Comm, *, out: str, resume: str | None, attempt: Attempt | None = None
    ) -> Training:
        """The training run of one rank of the layout; every rank must call it.

        Args:
            out: run folder.
            resume: as the key; what is resumed is not clipped any more, see `Task.first_unclipped`.
            attempt: of a supervised rank.
        """
        # Training goes on after a save, which must leave everything as it was: after each step, where
        # the run does not say when.
        saves_every = (self.run.save.every or 1) if resume is None and self.steps > 1 else 0
        values = {"out": out, "resume": resume, "save.every": saves_every, "save.wait_s": 0.0}
        run = self.run.with_values(values)
        if resume is not None and self.first_unclipped is not None:
            run = run.with_values({"optim.clip": run.optim.clip * UNCLIPPED})
        return build_training(
            run,
            comm,
            stop_requested=lambda: False,
            attempt=attempt,
            samples=self.samples,
            limits=self.limits,
        )

    # texts of the report

    @property
    def layout_text(self) -> str:
        """Mesh and options that differ from their defaults."""
        parallel = _changed_options("parallel", self.run.parallel)
        pipeline = _changed_options("pipeline", self.run.pipeline)
        return ", ".join([str(self.mesh), *parallel, *pipeline])

    @property
    def model_text(self) -> str:
        """Family, main sizes and batch."""
        run = self.run
        sizes = run.model.architecture
        words = [f"{key} {sizes[key]}" for key in MAIN_SIZES if key in sizes]
        batch = f"batch {run.batch.global_size}"
        if run.model.kind == "tokens":
            batch = f"{batch} x {run.data.seq_len}"
        words.append(batch)
        return f"{run.model.name} ({', '.join(words)})"

    @property
    def types_text(self) -> str:
        """Number types: "float32", or "bfloat16, parameters float32, sums float32"."""
        precision = self.run.precision
        linears = ", linears in fp8" if self.has_fp8 else ""
        if precision.params == precision.compute == precision.reduce:
            return f"{precision.compute}{linears}"
        sums = f"parameters {precision.params}, sums {precision.reduce}"
        return f"{precision.compute}{linears}, {sums}"


@dataclass(frozen=True)
class ProofCase:
    """A run to prove, whose data is not opened.

    Attributes:
        run: with the sizes that are compared.
        steps: to compare.
        rows: of the run's data.
    """

    run: Run
    steps: int
    rows: Rows = "own"

    def opened(self) -> Subject:
        """The subject, whose data is opened.

        Raises:
            UserError: the data cannot be read.
        """
        return Subject.of(self.run, steps=self.steps, rows=self.rows)

    @property
    def mesh(self) -> Mesh:
        """The ranks of the layout."""
        return self.run.device_mesh

    @property
    def family_name(self) -> str:
        """The model family."""
        return self.run.model.name

    @property
    def compute_dtype(self) -> str:
        """The type in which the layout computes: "float32"."""
        return self.run.precision.compute

    @property
    def command(self) -> str:
        """The command line that proves exactly this case."""
        words = command_of(self.run, FAMILIES, steps=self.steps)
        return words if self.rows == "own" else f"{words} --rows {self.rows}"

    def training(self, values: Mapping[str, Any]) -> Callable[[Comm], Training]:
        """Builds the training run of one rank, with other values of some keys."""
        run = self.run.with_values(values)
        return partial(build_training, run, stop_requested=lambda: False)

    def reductions(self) -> Iterator[CaseReduction]:
        """The ways to make the case smaller; see `weft.config.smaller_cases.reductions`."""
        for reduction in reductions(self.run, accepts_sizes):
            yield partial(_smaller_cases, reduction)


def reduced_case(run: Run, steps: int) -> ProofCase:
    """The case that proves a run with reduced sizes."""
    return ProofCase(reduced(run, accepts_sizes), steps, rows="short")


CaseReduction = Callable[[ProofCase], Iterator[ProofCase]]
"""One way to make a case smaller: valid cases to try, the smallest first."""


def _smaller_cases(reduction: Reduction, case: ProofCase) -> Iterator[ProofCase]:
    for run in reduction(case.run):
        smaller = replace(case, run=run)
        if smaller != case and is_valid(run):
            yield smaller


def _changed_options(section: str, values: ParallelConfig | PipelineConfig) -> list[str]:
    """The options of a section that differ from their defaults, as `section.key value`."""
    default = type(values)()
    words = []
    for key in type(values).model_fields:
        value = getattr(values, key)
        is_content = key == "table"  # of the schedule file, which is named
        if value != getattr(default, key) and not is_content:
            words.append(f"{section}.{key} {value}")
    return words


def shortened(
    training: Training, *, total: int, saves: bool, evaluator: Evaluator | None = None
) -> Training:
    """A training run up to step `total`, without what only watches it.

    Args:
        saves: whether it saves a checkpoint at its end.
    """
    return replace(
        training,
        step_range=replace(training.step_range, total=total),
        save_at_end=saves,
        stragglers=None,
        evaluator=evaluator,
        files={},
    )
