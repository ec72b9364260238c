"""Functions that mutants replace, and in which their collectives start: renaming one is an error here."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import torch

import weft
from weft.prove.report import ProofReport
from weft.testing import run_ranks
from weft.train.step_stats import LEAST_TARGETS, RankStats, total_stats
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.changes import ChangedTotals
from weft_selftest.mutants.fault import CollectiveFault, FunctionFault
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.trial import MutantResult


def function_of(target: str) -> object:
    """The function that a target names, "module:Class.name"."""
    module_name, _, path = target.partition(":")
    found = importlib.import_module(module_name)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return found


def test_every_mutant_can_be_planted_and_leaves_the_function_that_it_replaced():
    for mutant in all_mutants().values():
        targets = [fault.target for fault in mutant.faults if isinstance(fault, FunctionFault)]
        before = [function_of(target) for target in targets]
        with planted(mutant):
            for target, function in zip(targets, before, strict=True):
                assert function_of(target) is not function, (mutant.name, target)
        after = [function_of(target) for target in targets]
        assert after == before, mutant.name


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


def test_a_step_without_targets_has_loss_0_and_counts_none():
    def totals(comm):
        zero = torch.zeros((), dtype=torch.float64)
        local = RankStats(loss=zero, grad_sq_norm=zero, mem_bytes=5, expert_load=zero, status=0)
        targets = torch.full((), LEAST_TARGETS, dtype=torch.float64)
        read = total_stats(comm, local, targets).read()
        return read.loss, read.targets

    assert run_ranks("dp2", totals) == [(0.0, 0)] * 2
    assert run_ranks("site2", totals) == [(0.0, 0)] * 2


def test_changed_totals_are_those_of_the_step_but_for_the_change():
    def totals(comm):
        one = torch.ones((), dtype=torch.float64)
        local = RankStats(
            loss=3 * one, grad_sq_norm=4 * one, mem_bytes=5, expert_load=0 * one, status=0
        )
        pending = total_stats(comm, local, one)
        changed = ChangedTotals(pending, lambda numbers: replace(numbers, grad_norm=7.0), 8 * one)
        read = changed.read()
        return read.loss, read.grad_norm, read.mem_bytes, float(changed.grad_norm_tensor)

    assert run_ranks("dp1", totals, transport="threads") == [(3.0, 7.0, (5,), 8.0)]
