"""Functions that mutants replace, and in which their collectives start: renaming one is an error here."""

from __future__ import annotations

import re
from pathlib import Path

import weft
from weft.prove.mutants.all_mutants import all_mutants
from weft.prove.mutants.fault import CollectiveFault
from weft.prove.mutants.plant import planted
from weft.prove.mutants.trial import MutantResult
from weft.prove.report import ProofReport


def test_every_mutant_can_be_planted():
    for mutant in all_mutants().values():
        with planted(mutant):
            pass


def test_every_collective_fault_names_a_function_of_weft():
    root = Path(weft.__file__).parent
    defined = set()
    for file in root.rglob("*.py"):
        defined.update(re.findall(r"\b(?:def|class) (\w+)", file.read_text(encoding="utf-8")))
    for mutant in all_mutants().values():
        for fault in mutant.faults:
            if isinstance(fault, CollectiveFault) and fault.site:
                missing = [name for name in fault.site.split(".") if name not in defined]
                assert not missing, (mutant.name, fault.site)


def test_an_error_of_the_planted_code_is_no_detection():
    mutant = next(iter(all_mutants().values()))
    error = "TypeError: replace() should be called on dataclass instances"
    report = ProofReport("dp2", "llama3", 0, 1, (), error=error)
    result = MutantResult(mutant, effect="loss", report=report, seconds=0.0)
    assert not result.is_detected
    assert result.message == f"the planted code fails: {error}"
