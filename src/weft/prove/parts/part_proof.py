"""The proof of the parts of a run that `weft prove --what` names, one after the other, as one report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from weft.config.other_layouts import elastic_mesh, other_meshes
from weft.core.axes import local_update_axis, without_local_updates
from weft.errors import Fault, PlanError
from weft.prove.local_updates import SiteProof, sites_note
from weft.prove.parts.continuation import continuations
from weft.prove.parts.export import ExportProof
from weft.prove.parts.generation import generation_passes
from weft.prove.parts.names import PARTS, Part
from weft.prove.parts.resume import resume_passes
from weft.prove.proof import Failed, Judged, prove
from weft.prove.report import Difference, Pass, ProofReport
from weft.prove.subject import ProofCase, Subject
from weft.run.run_ranks import arithmetic_of_ranks

INSIDE_NOTE = "compared inside a site ({}): {}"


@dataclass
class Outcome:
    """What has been found so far.

    Attributes:
        passes: comparisons.
        error: that ended the run of a layout; "" where none did.
        failure: where it came.
        notes: what was not compared, and why.
    """

    passes: list[Pass] = field(default_factory=list)
    error: str = ""
    failure: Difference | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs so far."""
        return not self.error and not any(each.differences for each in self.passes)

    def take(self, results: Iterator[Pass | Judged | Failed]) -> None:
        """Take results until one differs."""
        for result in results:
            if isinstance(result, Judged):
                self.notes.extend(result.notes)
                result = result.result
            if isinstance(result, Failed):
                self.error = result.text
                self.failure = result.difference
                return
            self.passes.append(result)
            if result.differences:
                return


@dataclass(frozen=True)
class PartProof:
    """The proof of one part.

    Attributes:
        to: mesh on which a run is continued and imported; None: some others.
    """

    subject: Subject
    to: str | None

    def resume(self, found: Outcome) -> None:
        """Resumes, snapshots in memory, restarts, an elastic change."""
        subject = self._inside_site(found, "resumes")
        run = subject.run
        others = tuple(other_meshes(run)) if self.to is None else (self._to(subject),)
        how = continuations(
            run.mesh,
            num_ranks=subject.mesh.size,
            others=others,
            elastic=elastic_mesh(run) if self.to is None else None,
        )
        found.take(resume_passes(subject, how))

    def generate(self, found: Outcome) -> None:
        """Generation with caches."""
        found.take(generation_passes(self._inside_site(found, "generation")))

    def export(self, found: Outcome) -> None:
        """Export and import."""
        subject = self._inside_site(found, "export")
        others = tuple(other_meshes(subject.run)) if self.to is None else (self._to(subject),)
        proof = ExportProof(subject, others)
        found.notes.extend(proof.notes)
        found.take(proof.passes())

    def dpo(self, found: Outcome) -> None:
        """The training on preference pairs."""
        report = prove(self.subject)
        found.passes.extend(report.passes)
        found.error = report.error
        found.failure = report.failure
        found.notes.extend(report.notes)

    def sites(self, found: Outcome) -> None:
        """Outer steps; what is inside a site is compared by the proof without `--what`."""
        found.notes.append(sites_note(self.subject.mesh))
        found.take(iter([SiteProof.of(self.subject).compare()]))

    def _to(self, subject: Subject) -> str:
        """The mesh that is asked for.

        Raises:
            PlanError: the compared run is not valid on it.
        """
        assert self.to is not None, "asked for"
        if subject.on_mesh(self.to) is None:
            what = f"the run, as it is compared ({subject.model_text}), is not valid on this mesh"
            fix = "another mesh, or --full, which keeps the sizes of the run"
            raise PlanError(Fault("--to", what, got=self.to, fix=fix))
        return self.to

    def _inside_site(self, found: Outcome, what: str) -> Subject:
        """The layout of one site, where there are sites."""
        mesh = self.subject.mesh
        if local_update_axis(mesh) is None:
            return self.subject
        inner = without_local_updates(mesh)
        found.notes.append(INSIDE_NOTE.format(inner, what))
        return self.subject.inside_site()


PROOFS: Mapping[Part, Callable[[PartProof, Outcome], None]] = {
    "resume": PartProof.resume,
    "generate": PartProof.generate,
    "export": PartProof.export,
    "dpo": PartProof.dpo,
    "sites": PartProof.sites,
}


def prove_parts(cases: Mapping[Part, ProofCase], *, to: str | None = None) -> ProofReport:
    """Prove parts of a run, until one differs.

    Args:
        cases: part -> the run of which it is proved, with the sizes that are compared.
        to: mesh on which the run is continued and imported; None: some others.

    Raises:
        UserError: a part cannot be proved for this run, or its data cannot be read.
    """
    start = time.perf_counter()
    found = Outcome()
    parts = [part for part in PARTS if part in cases]
    subjects = {part: cases[part].opened() for part in parts}
    with arithmetic_of_ranks():
        for part, subject in subjects.items():
            if found.is_equal:
                PROOFS[part](PartProof(subject, to), found)
    described = subjects[parts[0]]
    command = f"{cases[parts[0]].command} --what {' '.join(parts)}"
    return ProofReport(
        layout=described.layout_text,
        model=described.model_text,
        ranks=described.mesh.size,
        steps=described.steps,
        passes=tuple(found.passes),
        error=found.error,
        failure=found.failure,
        seconds=time.perf_counter() - start,
        command=command if to is None else f"{command} --to {shlex.quote(to)}",
        notes=tuple(dict.fromkeys(found.notes)),
    )
