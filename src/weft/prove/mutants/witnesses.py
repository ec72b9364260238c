"""Which checks see a planted fault alone: the first step of a run that trains, and the types of its step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.comm import Comm
from weft.config.load import load
from weft.errors import ProofError, type_and_message
from weft.models import FAMILIES
from weft.planner.certificate.certificate import certify
from weft.planner.measure.measured_run import MeasuredRun
from weft.prove.live_step.check import Due, LiveStepCheck
from weft.prove.mutants.effect import TIMEOUT_S, layout_words
from weft.prove.mutants.fault import Mutant, MutantLayout
from weft.prove.mutants.plant import planted
from weft.prove.subject import LiveTask, ProofCase
from weft.run.run_ranks import run_ranks
from weft.train.event_log import EventLog
from weft.train.loop import run_training
from weft.train.step_check import ProofRecord

STEPS = 1


@dataclass(frozen=True)
class Sighting:
    """What a check says of a run with a fault.

    Attributes:
        message: the difference that it names, or the error that ended the run; "": nothing.
    """

    message: str

    @property
    def is_seen(self) -> bool:
        """Whether the check rejects the run."""
        return self.message != ""


def small_run(layout: MutantLayout, folder: Path) -> ProofCase:
    """A small run of a layout, with the number types of a run as users start it.

    Args:
        folder: has the texts.
    """
    return ProofCase(load([*layout_words(layout, folder, types="own")], FAMILIES), STEPS)


def seen_in_first_step(mutant: Mutant, case: ProofCase, out: Path) -> Sighting:
    """What the comparison of the first step says while a run trains; ranks are threads.

    Args:
        out: run folder.
    """
    values = {"out": str(out), "steps": case.steps, "save.at_end": False}
    with planted(mutant):
        try:
            run_ranks(case.mesh, CheckedRank(case, values), timeout_s=TIMEOUT_S)
        except ProofError as error:
            return Sighting(str(error))
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            return Sighting(type_and_message(error))
    return Sighting("")


@dataclass(frozen=True)
class CheckedRank:
    """Trains the steps of a run on one rank and compares the first with one device."""

    case: ProofCase
    values: dict[str, Any]

    def __call__(self, comm: Comm) -> None:
        training = self.case.training(self.values)(comm)
        check = LiveStepCheck(
            training,
            LiveTask.of(self.case.run),
            due=Due(first=1),
            record=ProofRecord(),
            is_new=True,
        )
        with EventLog(None, []) as log:
            run_training(dataclasses.replace(training, check=check), log)


def seen_by_types(mutant: Mutant, case: ProofCase) -> Sighting:
    """What the types of the run's step say, without a value."""
    with planted(mutant):
        try:
            certificate = certify(MeasuredRun.of(case.run))
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            return Sighting(type_and_message(error))
    return Sighting("; ".join(finding.text for finding in certificate.mismatches))
