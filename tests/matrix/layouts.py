"""Layouts that are compared with one device, and how one of them is run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from tests.one_device import GivenSamples, check_records, micro_batches, one_device, records_of
from tests.small_models import small_fields
from weft.comm.comm import Comm
from weft.config.families import run_type
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run, plan_of
from weft.config.schema import BatchConfig as BatchSizes
from weft.config.schema import (
    DataConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
)
from weft.core.dimension import sequence_axes
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.sequence import Context
from weft.layout.plan import Plan, Recompute
from weft.models import FAMILIES, Family
from weft.models.common.batch import IGNORE, Batch, token_batch, with_later_targets
from weft.parallel.model.parallelize import ParallelModel
from weft.prove.bounds import Bounds
from weft.prove.report import PhaseBound
from weft.prove.subject import Subject
from weft.train.build import build_model, family_of
from weft.train.optim import matrices
from weft.train.size_limits import SizeLimits
from weft.train.step import TrainStep

SEQ_LEN = 8
NUM_STEPS = 3
"""Steps of a layout in the sweeps of `make matrix`."""
QUICK_STEPS = 2
"""Steps in `make test`: the second uses the parameters and moments that the first has updated."""
SEED = 11
LR = 1e-2
CLIP = 0.1
"""Below the gradient norm of these tiny models, so that clipping acts (asserted in the tests)."""

CONFIGS: dict[str, dict[str, object]] = {
    # vocabulary 53: no tp but 1 divides it; 5 layers: odd; 16 heads so that tp up to 16 divides them
    "gpt2": {"layers": 5, "dim": 32, "heads": 16, "ffn": 48, "vocab": 53, "max_seq_len": 16},
    "llama3": {"layers": 5, "dim": 32, "heads": 16, "kv_heads": 16, "ffn": 48, "vocab": 53},
}
MIXTURES: dict[str, dict[str, object]] = {
    "qwen3": {"layers": 3, "dim": 32, "heads": 8, "kv_heads": 4, "head_size": 6, "ffn": 48, "vocab": 53},
    "qwen3-moe": {
        "layers": 3, "dim": 32, "heads": 4, "kv_heads": 4, "head_size": 8, "vocab": 53,
        "experts": 8, "top_k": 3, "expert_ffn": 16, "balance_loss": 0.3,
    },
    "deepseek": {
        "layers": 4, "first_k_dense": 1, "dim": 32, "heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "ffn": 48, "vocab": 53,
        "experts": 8, "top_k": 2, "expert_ffn": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
        "balance_rate": 0.05, "balance_loss": 0.2, "mtp_depth": 1,
    },
}  # fmt: skip
GROUPED: dict[str, object] = {
    "layers": 5,
    "dim": 32,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 48,
    "vocab": 53,
    "tied": True,
}


TransportName = Literal["threads", "processes"]


@dataclass(frozen=True)
class Case:
    """One layout of one model; `layers` 0: as many as the model has by itself; `split`: layers of
    every stage as words; `dropout`: of the model where it has one, else of adapters; `neftune`: its
    alpha.
    """

    mesh: str
    family: str = "llama3"
    schedule: str = "1f1b"
    chunks: int = 1
    sequence: bool = False
    grouped: bool = False
    microbatches: int = 4
    bucket_bytes: int = 4096
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"
    context: Context = "ring"
    documents: bool = False
    seq_len: int = SEQ_LEN
    micro_size: int = 1
    clip: float = CLIP
    layers: int = 0
    split: str = ""
    dropout: float = 0.0
    neftune: float = 0.0

    def __str__(self) -> str:
        options = {
            "sp": self.sequence,
            "gqa": self.grouped,
            f"zero{self.zero}": self.zero > 0,
            self.recompute: self.recompute != "none",
            self.context: self.grid.degree("cp") > 1,
            "docs": self.documents,
            "free": self.clip != CLIP,
            f"l{self.layers}": self.layers > 0,
            f"b{self.bucket_bytes}": self.bucket_bytes != 4096,
            f"drop{self.dropout}": self.dropout > 0,
            f"noise{self.neftune:g}": self.neftune > 0,
            f"split_{self.split.replace(' ', '_')}": self.split != "",
        }
        words = [self.family]
        words += [option for option, is_set in options.items() if is_set]
        words.append(self.mesh.replace(" ", "_") or "one")
        chunks = str(self.chunks) if self.chunks > 1 else ""
        words.append(self.schedule + chunks)
        micro_size = f"x{self.micro_size}" if self.micro_size > 1 else ""
        words.append(f"m{self.microbatches}{micro_size}")
        return "-".join(words)

    @property
    def grid(self) -> Mesh:
        return Mesh.parse(self.mesh)

    @property
    def fields(self) -> dict[str, object]:
        """The model's own keys."""
        if self.grouped:
            fields = GROUPED
        else:
            known = {**CONFIGS, **MIXTURES}
            fields = known.get(self.family) or small_fields(self.family, dim=32, window=3)
        if self.dropout and not self.lora:
            fields = {**fields, "dropout": self.dropout}
        if not self.layers:
            return fields
        return {**fields, "layers": self.layers}

    @property
    def lora(self) -> dict[str, object]:
        """Adapters, where the family has no dropout of its own."""
        if not self.dropout or "dropout" in FAMILIES[self.family].Config.model_fields:
            return {}
        return {"rank": 3, "dropout": self.dropout}

    @cached_property
    def config(self) -> ModelConfig:
        """The model's config."""
        return FAMILIES[self.family].Config(**self.fields)

    @property
    def run(self) -> Run:
        """The run that a user would ask for."""
        size = self.grid.degree(sequence_axes()) * self.microbatches * self.micro_size
        return run_type(self.family, FAMILIES[self.family].Config).model_validate(
            {
                "mesh": self.mesh,
                "model": {"name": self.family, **self.fields},
                "data": DataConfig(source="tokens.bin", seq_len=self.seq_len),
                "batch": BatchSizes(global_size=size, micro_size=self.micro_size),
                "optim": OptimConfig(lr=LR, warmup=0, clip=self.clip),
                "seed": SEED,
                "neftune": self.neftune,
                "lora": self.lora,
                "parallel": ParallelConfig(
                    sequence=self.sequence,
                    zero=self.zero,
                    context=self.context,
                    recompute=self.recompute,
                ),
                "pipeline": PipelineConfig(
                    schedule=self.schedule,
                    chunks=self.chunks,
                    split=tuple(map(int, self.split.split())),
                ),
                "precision": PrecisionConfig(params="float64", compute="float64", reduce="float64"),
            }
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan, as a user gets it, but for the size of buckets."""
        return plan_of(self.run).model_copy(update={"bucket_bytes": self.bucket_bytes})


def shallow(case: Case) -> Case:
    """The case with two layers, or as many as it has pipeline stages: a step costs half as much."""
    num_stages = case.grid.degree("pp") * case.chunks
    return replace(case, layers=max(2, num_stages))


def fits(case: Case) -> bool:
    """Whether config validation accepts the layout."""
    return not any(check.fails() for check in config_checks(case.run))


def batches(case: Case, *, vocab: int = 53) -> tuple[Batch, ...]:
    """One whole batch a step; each sequence has another number of targets that count, one has none."""
    num_sequences = case.run.batch.global_size
    length = case.seq_len
    generator = torch.Generator().manual_seed(SEED)
    steps = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, vocab, (num_sequences, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        for row in range(num_sequences):
            kept = (length + 5 * row) % (length + 1)  # of 8: 8 (all), 4, 0 (none), 5, 1, 6, 2, 7, 3
            targets[row, kept:] = IGNORE
        batch = token_batch(tokens[:, :-1], targets)
        steps.append(with_later_targets(packed(batch, generator) if case.documents else batch))
    return tuple(steps)


def packed(batch: Batch, generator: torch.Generator) -> Batch:
    """The same tokens as documents of three tokens on average; positions restart in each."""
    begins = torch.rand(batch.inputs.shape, generator=generator) < 1 / 3
    begins[:, 0] = True
    starts = batch.positions.where(begins, 0).cummax(1).values
    documents = begins.cumsum(1)
    positions = batch.positions - starts
    return replace(batch, documents=documents, positions=positions)


def adamw(tensors: Mapping[str, Tensor], decayed: Collection[str]) -> torch.optim.Optimizer:
    """torch's AdamW, decay on matrices only."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, tensor in tensors.items():
        group = matrices if name in decayed else vectors
        group.append(tensor)
    groups: list[dict[str, object]] = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": 0.1})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=LR)


def build_case(
    case: Case, comm: Comm, *, family: Family | None = None, plan: Plan | None = None
) -> ParallelModel:
    """A rank's part of the model; `family` and `plan` replace those of the case."""
    return build_model(
        family or FAMILIES[case.family], case.config, plan or case.plan, comm, seed=SEED
    )


def make_step(
    case: Case,
    comm: Comm,
    *,
    family: Family | None = None,
    plan: Plan | None = None,
    clip: float = CLIP,
) -> TrainStep:
    """The training step of a rank, with torch's AdamW."""
    model = build_case(case, comm, family=family, plan=plan)
    decayed = matrices(model.params)
    return TrainStep(model, make_optimizer=lambda tensors: adamw(tensors, decayed), clip=clip)


def own_micro_batches(case: Case, comm: Comm, *, step: int = 0) -> list[Batch]:
    """The micro-batches of a rank in one step."""
    batch = batches(case)[step]
    return micro_batches(batch, case.plan, comm.rank)


def subject_of(
    case: Case, *, num_steps: int = NUM_STEPS, values: Mapping[str, object] | None = None
) -> Subject:
    """The first steps of a case as a proof compares them; `values` of other keys of the run."""
    run = case.run.with_values({"steps": num_steps, **(values or {})})
    samples = GivenSamples(batches(case)[:num_steps])
    limits = SizeLimits(bucket_bytes=case.bucket_bytes)
    family = family_of(run.model, run.lora, neftune=run.neftune)
    return Subject(run, family, samples, num_steps, limits=limits)


@lru_cache(maxsize=16)
def truth(alone: Case, num_steps: int) -> Bounds:
    """One device, for every layout of the same model and batch."""
    right = one_device(subject_of(alone, num_steps=num_steps))
    if alone.clip == CLIP:
        factors = [
            right.plain.values[step, "clip", "clip factor"] for step in range(1, num_steps + 1)
        ]
        assert max(factors) < 1, "clipping must act in this test"
    return right


def on_one_device(case: Case) -> Case:
    """The same model and batch on one device."""
    return Case(
        "",
        microbatches=case.run.batch.global_size,
        family=case.family,
        grouped=case.grouped,
        documents=case.documents,
        seq_len=case.seq_len,
        clip=case.clip,
        layers=case.layers,
        dropout=case.dropout,
        neftune=case.neftune,
    )


def check(
    case: Case, *, transport: TransportName = "threads", num_steps: int = QUICK_STEPS
) -> Sequence[PhaseBound]:
    """Assert that a layout computes what one device computes."""
    subject = subject_of(case, num_steps=num_steps)
    right = truth(on_one_device(case), num_steps)
    return check_records(subject, records_of(subject, transport=transport), right)
