"""Owns the list of layouts that are held against one device, and how one of them is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Mesh, every_mesh
from weft.core.model import ModelConfig
from weft.core.plan import Plan, canonical, make_stages
from weft.models import FAMILIES
from weft.models.batch import IGNORE, Batch, token_batch
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

    def __str__(self) -> str:
        flags = "-sp" * self.sequence + "-gqa" * self.grouped + f"-zero{self.zero}" * (self.zero > 0)
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
        fields = GROUPED if self.grouped else CONFIGS[self.family]
        return FAMILIES[self.family].Config(**fields)

    @property
    def plan(self) -> Plan:
        """The plan, 1 sequence a micro-batch."""
        pp = self.grid.degree("pp")
        return Plan(
            mesh=self.grid,
            family=self.family,
            architecture=canonical(self.config.model_dump()),
            stages=make_stages(self.config.block_specs(SEQ_LEN), pp * self.chunks),
            schedule=self.schedule,
            chunks=self.chunks,
            microbatches=self.microbatches,
            micro_size=1,
            seq_len=SEQ_LEN,
            sequence_parallel=self.sequence,
            zero=self.zero,
            params="float64",
            compute="float64",
            reduce="float64",
            clip=CLIP,
            bucket_bytes=self.bucket_bytes,
        )


def fits(case: Case) -> bool:
    """Whether the layout is one that weft promises: it divides, and no stage is empty."""
    mesh, config = case.grid, case.config
    pp, tp = mesh.degree("pp"), mesh.degree("tp")
    sizes = config.axis_sizes()
    return (
        pp * case.chunks <= 5
        and all(sizes[axis] % tp == 0 for axis in ("heads", "kv_heads", "ffn") if axis in sizes)
        and (not case.sequence or (tp > 1 and SEQ_LEN % tp == 0))
        and (case.schedule != "interleaved" or (pp > 1 and case.chunks > 1 and case.microbatches % pp == 0))
        and (case.schedule == "interleaved" or case.chunks == 1)
    )


def every_case(most_ranks: int = 16) -> Iterator[Case]:
    """Every mesh of up to `most_ranks` ranks over pp, dp and tp, with and without sequence parallelism, by three schedules."""
    meshes = every_mesh(most_ranks, ("pp", "dp", "tp"))
    schedules = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
    for mesh, family, (schedule, chunks), sequence in itertools.product(meshes, CONFIGS, schedules, (False, True)):
        pp = mesh.degree("pp")
        case = Case(
            mesh.text,
            family=family,
            schedule=schedule,
            chunks=chunks,
            sequence=sequence,
            microbatches=pp * (2 if pp < 3 else 1) if schedule == "interleaved" else 3,
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


def batches(num_sequences: int, vocab: int) -> tuple[Batch, ...]:
    """One whole batch a step; each sequence has another number of targets that count, one has none."""
    generator = torch.Generator().manual_seed(SEED)
    steps = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, vocab, (num_sequences, SEQ_LEN + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        for row in range(num_sequences):
            kept = (8 + 5 * row) % (SEQ_LEN + 1)  # 8 (all), 4, 0 (none), 5, 1, 6, 2, 7, 3
            targets[row, kept:] = IGNORE
        steps.append(token_batch(tokens[:, :-1], targets))
    return tuple(steps)


def adamw(tensors: Mapping[str, Tensor], decayed: Collection[str]) -> torch.optim.Optimizer:
    """torch's AdamW, decay on matrices only."""
    matrices = [tensor for name, tensor in tensors.items() if name in decayed]
    vectors = [tensor for name, tensor in tensors.items() if name not in decayed]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR)


@cache
def truth(family: str, grouped: bool, num_sequences: int) -> tuple[StepTrace, ...]:
    """One device, for every layout of the same model and batch."""
    case = Case("", family=family, grouped=grouped)
    return one_device(
        FAMILIES[family],
        case.config,
        batches(num_sequences, 53),
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
            batches(plan.global_size, 53),
            plan=plan,
            comm=comm,
            seed=SEED,
            optimizer=adamw,
            lr=LR,
        )


def compare(case: Case, *, transport: str = "threads") -> tuple[list[Difference], list[str]]:
    """All differences between the layout and one device, and the parameters that no rank holds in full."""
    ranks = run_ranks(case.mesh, RunRank(case), transport=transport)  # type: ignore[arg-type]
    right = truth(case.family, case.grouped, case.plan.global_size)
    assert all(step.grad_norm > CLIP for step in right), "clipping must act in this test"
    return differences(right, ranks, lr=LR), uncovered(right[0].params, ranks)
