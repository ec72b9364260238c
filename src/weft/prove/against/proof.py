"""Prove a run against transformers: the layout trains as in any proof, the other side is a loop over transformers' class."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.config.hf.mapping import HFMapping
from weft.config.schema import ModelSection
from weft.core.axes import Box, local_update_axis
from weft.errors import CheckpointError
from weft.models.common.init import init_params
from weft.prove.against.float64 import float32_modules
from weft.prove.against.hf_model import HFModel, exported_model, loaded_model, untouched_model
from weft.prove.against.hf_reference import HFReference, Noise
from weft.prove.against.hf_weights import HFWeights, Values
from weft.prove.against.starting_values import (
    StartingValues,
    compare_starting_values,
    difference_at_start,
)
from weft.prove.against.support import LIBRARY, compared_config
from weft.prove.arithmetic import magnifies_noise
from weft.prove.bounds import Bounds
from weft.prove.local_updates import sites_note
from weft.prove.proof import prove
from weft.prove.report import Difference, Pass, ProofReport
from weft.prove.subject import Subject, Task
from weft.run.run_ranks import arithmetic_of_ranks

NOISE_SEEDS = (1, 2)
SIDE_START = "mtp"
FAULT_OF_BOTH = (
    "`weft prove` without --against says equal: the fault is in weft's model, its starting values "
    "or its export, on the layout and on one device alike; or in transformers"
)
FAULT_OF_LAYOUT = "`weft prove` without --against differs as well: repair that first"


def prove_against(subject: Subject, *, mapping: HFMapping, configured: ModelSection) -> ProofReport:
    """Compare the layout of a run with transformers, in float64.

    Args:
        mapping: how transformers names the model.
        configured: the model before its sizes were reduced.

    """
    start = time.perf_counter()
    compared = subject.in_float64()
    if local_update_axis(subject.mesh) is not None:
        compared = compared.inside_site()
    opinion = SecondOpinion(compared, mapping, configured)
    try:
        with arithmetic_of_ranks():
            opinion.compute()
    except CheckpointError as error:
        return _report_of_export(compared, error)
    report = prove(compared, bounds_of=opinion.bounds)
    report = replace(report, against=opinion.text, notes=(*report.notes, *opinion.notes(subject)))
    if not report.error:
        report = _with_starting_values(report, opinion.starting)
        if not report.holds:
            report = _attributed(report, compared)
    return replace(report, seconds=time.perf_counter() - start)


def _report_of_export(subject: Subject, error: CheckpointError) -> ProofReport:
    """The report of a model whose exported tensors transformers does not take for its own."""
    differences = []
    for fault in error.faults:
        relation = f"not as {LIBRARY} reads it: {fault}"
        differences.append(difference_at_start("export", "", relation))
    return ProofReport(
        layout=subject.layout_text,
        model=subject.model_text,
        ranks=subject.mesh.size,
        steps=0,
        passes=(Pass("float64", "names", (), tuple(differences)),),
        against=f"{LIBRARY} {version(LIBRARY)}",
    )


def _with_starting_values(report: ProofReport, found: StartingValues | None) -> ProofReport:
    """The report with the differences of starting values before all others."""
    if found is None:
        return report
    first, *others = report.passes
    first = replace(first, differences=(*found.differences, *first.differences))
    return replace(report, passes=(first, *others), notes=(*report.notes, found.note))


def _attributed(report: ProofReport, subject: Subject) -> ProofReport:
    """The report of a failed comparison, which says on which side weft's own reference is."""
    # A layout that differs from weft's own reference, too, has its fault in the layout.
    if not prove(subject).holds:
        return replace(report, notes=(*report.notes, FAULT_OF_LAYOUT))
    passes = []
    for each in report.passes:
        differences = tuple(map(_without_axis, each.differences))
        passes.append(replace(each, differences=differences))
    return replace(report, passes=tuple(passes), notes=(*report.notes, FAULT_OF_BOTH))


def _without_axis(difference: Difference) -> Difference:
    """A difference that does not come from an axis of the mesh."""
    return replace(difference, axis="", collective="")


@dataclass(frozen=True)
class SecondOpinion:
    """The training of a run by transformers.

    Args:
        subject: in float64, inside one site.
        mapping: how transformers names the model.
        configured: the model before its sizes were reduced.
    """

    subject: Subject
    mapping: HFMapping
    configured: ModelSection

    @cached_property
    def task(self) -> Task:
        """What one device trains."""
        return self.subject.task()

    @cached_property
    def references(self) -> list[HFReference]:
        """The training, and perturbed repetitions of it, from which bounds are derived."""
        first = self._reference()
        found = [first]
        first.run(self.subject.steps)
        for seed in NOISE_SEEDS:
            other = self._reference() if self._is_perturbed else None
            if other is not None:
                other.run(self.subject.steps, self._noise(other.hf, seed))
                found.append(other)
        return found

    def compute(self) -> None:
        """Train; before the ranks of the layout start, so that what is not supported stops here."""
        assert self.references, "computed"

    def bounds(self, subject: Subject, *, skipped: frozenset[int]) -> Bounds:
        """The traces, as `weft.prove.proof.reference_bounds`; float64 skips no step."""
        plain, *perturbed = (reference.trace for reference in self.references)
        return Bounds(plain, tuple(perturbed), subject.types)

    # the model

    @cached_property
    def starting(self) -> StartingValues | None:
        """The starting values beside those of transformers; None where they are stored ones."""
        if self.task.source is not None:
            return None
        return compare_starting_values(
            {name: self._values[name] for name in self._untouched},
            self._untouched,
            num_layers=self.task.model.architecture["layers"],
        )

    @cached_property
    def _config(self) -> dict[str, object]:
        return compared_config(self.mapping, self.task.model, self.configured)

    @cached_property
    def _depth(self) -> int:
        return int(self.task.model.architecture.get("mtp_depth", 0))

    @cached_property
    def _untouched(self) -> dict[str, Tensor]:
        """The values that transformers starts from, by weft's names."""
        torch.manual_seed(self.task.seed)
        hf = untouched_model(self._config, self._depth)
        return HFWeights.of(self.mapping, self.task.model, hf.published).read(hf.published)

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        """The drawn starting values of the run."""
        values = {name: torch.empty_like(value) for name, value in self._untouched.items()}
        init_params(values, self.task.family.init(self.task.model), seed=self.task.seed)
        return values

    def _reference(self) -> HFReference:
        task = self.task
        source = task.source or Values(self._values)
        hf = self._loaded(source)
        weights = HFWeights.of(self.mapping, task.model, hf.published)
        side = {}
        for name in weights.params:
            if name.startswith(SIDE_START):
                side[name] = source.read(name, Box.whole(source.shapes[name]))
        weights.write(side, hf.published)
        blocks = tuple(task.family.blocks(task.model))
        return HFReference(task, hf, weights, blocks)

    def _loaded(self, source: Source) -> HFModel:
        """The model with the starting values of the run, read by transformers from a folder: the one
        that the run starts from, or one that weft writes.
        """
        folder = self.task.model.from_hf
        if folder is not None:
            return loaded_model(Path(folder), self._config, self._depth)
        return exported_model(
            source, mapping=self.mapping, cfg=self.task.model, config=self._config
        )

    # its rounding; see Note [float32 in transformers]

    @cached_property
    def float32_names(self) -> tuple[str, ...]:
        """Modules that compute in float32 still."""
        hf = untouched_model(self._config, 0)
        length = self.subject.run.data.seq_len
        tokens = torch.zeros((1, length), dtype=torch.int64)
        return float32_modules(hf.model, lambda: hf.model(input_ids=tokens, use_cache=False))

    @property
    def _is_perturbed(self) -> bool:
        return bool(self.float32_names) or magnifies_noise(self.task.optim)

    def _noise(self, hf: HFModel, seed: int) -> Noise:
        if self.float32_names:
            modules = tuple(map(hf.model.get_submodule, self.float32_names))
            return Noise(modules, torch.finfo(torch.float32).eps, seed)
        inner = tuple(module for module in hf.modules if not any(True for _ in module.children()))
        return Noise(inner, torch.finfo(torch.float64).eps, seed)

    # texts

    @property
    def text(self) -> str:
        """What the layout is compared with."""
        optimizer = self.references[0].optimizer_text
        return f"{LIBRARY} {version(LIBRARY)} ({self.mapping.architecture}, {optimizer})"

    def notes(self, subject: Subject) -> Iterator[str]:
        """What is not transformers' own, and what is not compared."""
        yield f"not by {LIBRARY}: {', '.join(self._by_definition())}"
        if not subject.types.is_exact:
            yield f"compared in float64; the run computes in {subject.types_text}"
        if self.float32_names:
            names = ", ".join(self.float32_names[:3])
            yield f"{LIBRARY} rounds to float32 in {names}: bounds are derived from such noise"
        if local_update_axis(subject.mesh) is not None:
            yield sites_note(subject.mesh)

    def _by_definition(self) -> Iterator[str]:
        yield "tokens and their order, learning rates"
        sizes = self.task.model.architecture
        if sizes.get("balance_loss"):
            yield "the balance loss (by its equations, from the routers' logits)"
        if sizes.get("balance_rate") and self.references[0].forward.loads:
            yield "the balancing bias (by its rule, from the routers' choices)"
