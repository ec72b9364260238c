"""Owns the list of layouts that are held against one device, and how one of them is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Mesh, every_mesh
from weft.core.model import ModelConfig
from weft.core.plan import Plan, Recompute, canonical, make_stages
from weft.core.schedules import SCHEDULES
from weft.core.sequence import Context, length_unit
from weft.models import FAMILIES
from weft.models.batch import IGNORE, Batch, token_batch, with_later_targets
from weft.prove.layout import run_layout
from weft.prove.oracle import one_device
from weft.prove.trace import Difference, Held, StepTrace, differences, uncovered
from weft.testing import run_ranks

SEQ_LEN = 8
NUM_STEPS = 3
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
GROUPED: dict[str, object] = {"layers": 5, "dim": 32, "heads": 8, "kv_heads": 4, "ffn": 48, "vocab": 53, "tied": True}


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

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

    def __str__(self) -> str:
        flags = "-sp" * self.sequence + "-gqa" * self.grouped + f"-zero{self.zero}" * (self.zero > 0)
        flags += f"-{self.recompute}" * (self.recompute != "none")
        flags += f"-{self.context}" * (self.grid.degree("cp") > 1) + "-docs" * self.documents
        mesh = self.mesh.replace(" ", "_") or "one"
        return (
            f"{self.family}{flags}-{mesh}-{self.schedule}{self.chunks if self.chunks > 1 else ''}-m{self.microbatches}"
        )

    @property
    def grid(self) -> Mesh:
        return Mesh.parse(self.mesh)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        fields = GROUPED if self.grouped else {**CONFIGS, **MIXTURES}[self.family]
        return FAMILIES[self.family].Config(**fields)

    @property
    def plan(self) -> Plan:
        """The plan, 1 sequence a micro-batch."""
        pp = self.grid.degree("pp")
        return Plan(
            mesh=self.grid,
            family=self.family,
            architecture=canonical(self.config.model_dump()),
            stages=make_stages(self.config.block_specs(self.seq_len), pp * self.chunks),
            schedule=self.schedule,
            chunks=self.chunks,
            microbatches=self.microbatches,
            micro_size=1,
            seq_len=self.seq_len,
            sequence_parallel=self.sequence,
            context=self.context,
            zero=self.zero,
            recompute=self.recompute,
            params="float64",
            compute="float64",
            reduce="float64",
            clip=CLIP,
            bucket_bytes=self.bucket_bytes,
        )


CONTEXTS: tuple[Context, ...] = ("ring", "allgather", "ulysses")
HEADS = {"heads", "kv_heads"}


def fits(case: Case) -> bool:
    """Whether the layout is one that weft promises: it divides, and no stage is empty."""
    mesh, config = case.grid, case.config
    pp, tp = mesh.degree("pp"), mesh.degree("tp")
    sizes = config.axis_sizes()
    return (
        pp * case.chunks <= 5
        and all(sizes[axis] % tp == 0 for axis in ("heads", "kv_heads", "ffn") if axis in sizes)
        and (not case.sequence or tp > 1)
        and case.seq_len % length_unit(mesh, sequence_parallel=case.sequence) == 0
        and (
            case.context != "ulysses" or all(sizes[axis] % (tp * mesh.degree("cp")) == 0 for axis in HEADS & set(sizes))
        )
        and (pp > 1 or case.schedule in ("gpipe", "1f1b", "zero_bubble"))
        and not SCHEDULES[case.schedule].faults(ranks=pp, chunks=case.chunks, microbatches=case.microbatches)
    )


def every_case(most_ranks: int = 16) -> Iterator[Case]:
    """Every mesh of up to `most_ranks` ranks over pp, dp, cp and tp, with and without sequence parallelism, by every schedule.

    The ways across cp take turns, and so do sequences of one document and of several.
    """
    meshes = every_mesh(most_ranks, ("pp", "dp", "cp", "tp"))
    turns = itertools.count()
    schedules = [(name, schedule.default_chunks) for name, schedule in SCHEDULES.items()]
    for mesh, family, (schedule, chunks), sequence in itertools.product(meshes, CONFIGS, schedules, (False, True)):
        pp, cp, turn = mesh.degree("pp"), mesh.degree("cp"), next(turns)
        case = Case(
            mesh.text,
            family=family,
            schedule=schedule,
            chunks=chunks,
            sequence=sequence,
            microbatches=pp * (2 if pp < 3 else 1) if schedule == "interleaved" else 3,
            context=CONTEXTS[turn % 3] if cp > 1 else "ring",
            documents=cp > 1 and turn // 2 % 2 == 0,
            seq_len=12 if cp == 3 else SEQ_LEN,
        )
        if fits(case):
            yield case
            grouped = Case(**{**case.__dict__, "grouped": True})
            if family == "llama3" and fits(grouped):
                yield grouped


def sample(number: int, *, seed: int) -> tuple[Case, ...]:
    """A seeded sample of all cases, small worlds and large ones alike."""
    cases = sorted(every_case(), key=str)
    return tuple(random.Random(seed).sample(cases, number))


def batches(case: Case, *, vocab: int = 53) -> tuple[Batch, ...]:
    """One whole batch a step; each sequence has another number of targets that count, one has none."""
    num_sequences, length = case.plan.global_size, case.seq_len
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
    """The same tokens as documents of three tokens on average, in each of which positions start anew."""
    begins = torch.rand(batch.inputs.shape, generator=generator) < 1 / 3
    begins[:, 0] = True
    places = batch.positions.where(begins, 0).cummax(1).values
    return replace(batch, documents=begins.cumsum(1), positions=batch.positions - places)


def adamw(tensors: Mapping[str, Tensor], decayed: Collection[str]) -> torch.optim.Optimizer:
    """torch's AdamW, decay on matrices only."""
    matrices = [tensor for name, tensor in tensors.items() if name in decayed]
    vectors = [tensor for name, tensor in tensors.items() if name not in decayed]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR)


@cache
def truth(case: Case) -> tuple[StepTrace, ...]:
    """One device, for every layout of the same model and batch."""
    return one_device(
        FAMILIES[case.family],
        case.config,
        batches(case),
        seed=SEED,
        dtype=torch.float64,
        optimizer=adamw,
        clip=CLIP,
        lr=LR,
    )


@dataclass(frozen=True)
class RunRank:
    """What every rank does for a case; a value, so that it can be sent to processes."""

    case: Case

    def __call__(self, comm: Comm) -> Held:
        plan = self.case.plan
        return run_layout(
            FAMILIES[self.case.family],
            self.case.config,
            batches(self.case),
            plan=plan,
            comm=comm,
            seed=SEED,
            optimizer=adamw,
            lr=LR,
        )


def on_one_device(case: Case) -> Case:
    """The same model and batch, nothing cut."""
    size = case.plan.global_size
    alike = {name: getattr(case, name) for name in ("family", "grouped", "documents", "seq_len")}
    return Case("", microbatches=size, **alike)


def compare(case: Case, *, transport: str = "threads") -> tuple[list[Difference], list[str]]:
    """All differences between the layout and one device, and the parameters that no rank holds in full."""
    ranks = run_ranks(case.mesh, RunRank(case), transport=transport)  # type: ignore[arg-type]
    right = truth(on_one_device(case))
    assert all(step.grad_norm > CLIP for step in right), "clipping must act in this test"
    return differences(right, ranks, lr=LR), uncovered(right[0].params, ranks)
