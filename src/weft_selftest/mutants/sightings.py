"""What single checks say of a run with a planted fault: the comparison of its first step, and the types of its step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.comm.comm import Comm
from weft.errors import ProofError, WeftError, type_and_message
from weft.prove.live_step.check import LiveStepCheck
from weft.prove.live_step.due import Due
from weft.prove.record import block_of
from weft.prove.subject import LiveTask, ProofCase
from weft.run.run_ranks import run_ranks
from weft.train.event_log import EventLog
from weft.train.loop import run_training
from weft.train.step_check import ProofRecord
from weft_selftest.mutants.fault import Mutant
from weft_selftest.mutants.plant import planted

TypesOf = Callable[[ProofCase], Sequence[str]]
"""Returns the mismatches of types of a run's step, without a value of it."""

TIMEOUT_S = 120.0
NAMED_TENSOR = re.compile(r"of step \d+: (\S+)")
NAMED_AXIS = re.compile(r"\(axis (\w+)\)")
STEP_NUMBERS = ("loss", "number", "gradient")
"""First words of numbers of a whole step, which belong to no block."""


@dataclass(frozen=True)
class Sighting:
    """What a check says of a run.

    Attributes:
        message: the difference that it names, or the error that ended the run; "": nothing.
    """

    message: str

    @property
    def is_seen(self) -> bool:
        """Whether the check rejects the run."""
        return self.message != ""

    @property
    def block(self) -> str:
        """The block of the tensor that is named first; "": none."""
        found = NAMED_TENSOR.search(self.message)
        if found is None or found[1] in STEP_NUMBERS:
            return ""
        return block_of(found[1])

    @property
    def axis(self) -> str:
        """The mesh axis that is named first; "": none."""
        found = NAMED_AXIS.search(self.message)
        return "" if found is None else found[1]


@dataclass(frozen=True)
class CheckedRank:
    """Trains the steps of a run on one rank, and compares the first with one device."""

    case: ProofCase

    def __call__(self, comm: Comm) -> None:
        values = {"steps": self.case.steps, "save.at_end": False}
        training = self.case.training(values)(comm)
        check = LiveStepCheck(
            training,
            LiveTask.of(self.case.run),
            due=Due(first=1),
            record=ProofRecord(),
            is_new=True,
        )
        with EventLog(None, []) as log:
            run_training(dataclasses.replace(training, check=check), log)


def seen_in_first_step(mutant: Mutant, case: ProofCase) -> Sighting:
    """What the comparison of the first step says while a run trains; ranks are threads."""
    with planted(mutant):
        try:
            run_ranks(case.mesh, CheckedRank(case), timeout_s=TIMEOUT_S)
        except ProofError as error:
            return Sighting(str(error))
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            return Sighting(type_and_message(error))
    return Sighting("")


def seen_by_types(mutant: Mutant, case: ProofCase, types_of: TypesOf) -> Sighting:
    """What the types of a run's step say, without a value. Planted code that reads values ends with
    an error of torch there, which says nothing of types.
    """
    with planted(mutant):
        try:
            mismatches = types_of(case)
        except WeftError as error:
            return Sighting(type_and_message(error))
        except Exception:  # noqa: BLE001 - a mutant may fail in any way
            return Sighting("")
    return Sighting("; ".join(mismatches))
