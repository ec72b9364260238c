"""Layouts of a run compared with the proof's one-device reference, tensor by tensor, on whole batches that a test gives."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.dimension import position_axes, sequence_axes
from weft.core.model_config import ModelConfig
from weft.data.order import Ints
from weft.data.samples import SampleArrays
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import Batch
from weft.models.common.init import init_params, named_parameters, tie
from weft.prove.bounds import Bounds
from weft.prove.judge import Judge
from weft.prove.localise import key_of
from weft.prove.places import FlatPlace
from weft.prove.proof import reference
from weft.prove.record import RankRecord
from weft.prove.reference_trace import ReferenceTrace, TensorKey
from weft.prove.report import PhaseBound
from weft.prove.subject import Subject
from weft.prove.trained_part import TrainedPart
from weft.testing import run_ranks
from weft.train.data_loader import DataLoader

TOLERANCE = 1e-9
"""Relative; float64 rounds at 1e-16 and three steps of AdamW amplify it by some orders."""
PATIENCE_S = 600.0
"""A layout of 32 ranks takes 40 s of one core, and others may use it."""
SAMPLE_FIELDS = ("inputs", "targets", "positions", "documents")


@dataclass(frozen=True)
class GivenSamples:
    """The sequences of given whole batches, one a step, as samples in their order."""

    steps: tuple[Batch, ...]

    @property
    def num_samples(self) -> int:
        """Number of sequences."""
        return sum(len(batch.inputs) for batch in self.steps)

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Sample i is at place i."""
        return places

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with these numbers, flattened to one batch dimension."""
        numbers = torch.from_numpy(samples.ravel())
        fields = {}
        for name in SAMPLE_FIELDS:
            parts = [getattr(batch, name) for batch in self.steps]
            if parts[0] is not None:
                fields[name] = torch.cat(parts)[numbers].numpy()
        return SampleArrays(**fields)

    def place(self, sample: int) -> dict[str, object]:
        """Its number."""
        return {"sample": sample}

    def facts(self) -> dict[str, object]:
        """Where they come from."""
        return {"source": "given", "samples": self.num_samples}


def micro_batches(batch: Batch, plan: Plan, rank: int) -> list[Batch]:
    """A rank's micro-batches of a step's whole batch, as training loads them."""
    mesh = plan.mesh
    loader = DataLoader(
        GivenSamples((batch,)),
        global_size=plan.global_size,
        micro_size=plan.micro_size,
        seed=0,
        index=mesh.index(rank, sequence_axes()),
        degree=mesh.degree(sequence_axes()),
        device=torch.device("cpu"),
        later=batch.later_targets is not None,
        context_index=mesh.index(rank, position_axes()),
        context_degree=mesh.degree(position_axes()),
    )
    return loader.batches(0)


def plain_model(
    family: Family, config: ModelConfig, *, seed: int, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The blocks of a model on one device, with tied parameters and initial values."""
    blocks = {name: block.to(dtype) for name, block in family.blocks(config).items()}
    ties = family.ties(config)
    tie(blocks, ties)
    params = named_parameters(blocks)
    untied = {name: param for name, param in params.items() if name not in ties}
    init_params(untied, family.init(config), seed=seed)
    return blocks


def one_device(subject: Subject) -> Bounds:
    """What one device computes in float64; a layout may differ by 1e-9, whatever its optimizer."""
    alone = reference(subject)
    assert alone.types.is_exact, "other types have bounds of their own"
    return Bounds(alone.run_all(subject.steps), (), alone.types)


def gradients(trace: ReferenceTrace, step: int) -> dict[str, Tensor]:
    """Whole clipped gradients of a step, by global name of the parameter."""
    end = " clipped gradient"
    return {
        key.tensor.removesuffix(end): x
        for key, x in trace.values.items()
        if key.step == step and key.tensor.endswith(end)
    }


@dataclass(frozen=True)
class TrainedRank:
    """Trains the run of a subject on a rank as `weft train` does; what the rank computes.

    Attributes:
        out: run folder.
    """

    subject: Subject
    out: str

    def __call__(self, comm: Comm) -> RankRecord:
        record = RankRecord(comm.rank)
        TrainedPart(self.out, self.subject.steps).train(self.subject, comm, record=record)
        return record


def records_of(subject: Subject, *, transport: str = "threads") -> Sequence[RankRecord]:
    """What each rank of the layout computes."""
    # A save after each step, which a proof adds, would take most of the time here.
    rarely = subject.with_values({"save.every": 1000})
    with tempfile.TemporaryDirectory() as out:
        rank = TrainedRank(rarely, out)
        return run_ranks(subject.mesh, rank, transport=transport, timeout_s=PATIENCE_S)


def unseen(records: Sequence[RankRecord], trace: ReferenceTrace) -> list[TensorKey]:
    """Gradients, moments and parameters with entries that no rank has recorded."""
    seen = {
        key: torch.zeros(x.shape, dtype=torch.bool)
        for key, x in trace.values.items()
        if key.phase in ("reduce", "clip", "moments", "update") and x.dim()
    }
    for record in records:
        for site, observed in record.values.items():
            mask = seen.get(key_of(site))
            if mask is not None:
                assert isinstance(observed.place, FlatPlace)
                for box in observed.place.boxes:
                    mask[box.slices] = True
    return [key for key, mask in seen.items() if not mask.all()]


def check_records(
    subject: Subject, records: Sequence[RankRecord], right: Bounds | None = None
) -> Sequence[PhaseBound]:
    """Assert that ranks have computed what one device computes: every batch, activation, loss,
    gradient, moment and parameter, and that they have recorded all of these.

    Args:
        right: of one device; None: it is computed.
    """
    right = right or one_device(subject)
    assert not unseen(records, right.plain)
    judge = Judge(
        subject.mesh, records, right, has_sharded_activations=subject.has_sharded_activations
    )
    wrong = judge.compare()
    texts = "\n".join(map(str, wrong[:3]))
    assert not wrong, f"{subject.layout_text}: the first of {len(wrong)} differences:\n{texts}"
    assert not judge.found.uncompared
    phases = judge.found.phase_bounds()
    assert max(phase.bound for phase in phases) <= TOLERANCE
    return phases
