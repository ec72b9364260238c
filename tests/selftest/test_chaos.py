"""`weft chaos`: its report, and real runs with injected faults on two layouts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.programs import WEFT, programs
from weft.cli import main
from weft.config.load import load
from weft.config.rules.config_checks import config_checks
from weft.models import FAMILIES
from weft_selftest.chaos.chaos_layout import LAYOUTS, ChaosLayout
from weft_selftest.chaos.chaos_report import (
    ChaosReport,
    FaultOutcome,
    TrialResult,
    num_restarts,
    outcomes_of,
)
from weft_selftest.chaos.fault_plan import PlannedFault

KILL = PlannedFault(number=0, kind="kill", phase="forward", rank=1, step=4)
CLOCK = PlannedFault(number=1, kind="clock", phase="data", rank=0, step=8)
STOP = PlannedFault(number=2, kind="stop", phase="save", rank=2, step=12)
LEDGER = [
    {"attempt": 0, "resumed_at_s": 1.0, "step": 1},
    {"attempt": 0, "fault": 0, "at_s": 2.0, "num_done": 3},
    {"attempt": 1, "detected_at_s": 2.25},
    {"attempt": 1, "resumed_at_s": 3.0, "step": 3},
    {"attempt": 1, "fault": 1, "at_s": 4.0, "num_done": 7},
    {"attempt": 1, "fault": 2, "at_s": 5.0, "num_done": 12},
]
RESTART = {"event": "restart", "attempt": 1, "source": "memory", "reason": "rank 1: killed"}


def report_of(*outcomes: FaultOutcome, num_unexplained: int = 0, **fields: Any):
    known = {"end": "finished", "is_identical": True, "restarts": (RESTART,), "seconds": 1.0}
    trial = TrialResult(
        layout="dp3",
        num_ranks=3,
        steps=20,
        outcomes=outcomes,
        num_unexplained=num_unexplained,
        **{**known, **fields},
    )
    return ChaosReport(num_faults=len(outcomes), seed=0, trials=(trial,))


def test_times_and_lost_steps_are_those_between_injection_detection_and_the_next_step():
    kill, clock, stop = outcomes_of((KILL, CLOCK, STOP), LEDGER, [RESTART], end="failed")
    assert kill.detection_s == 0.25
    assert kill.recovery_s == 0.75
    assert kill.steps_lost == 1
    assert kill.is_survived is True
    assert kill.source == "memory"
    assert kill.reason == "rank 1: killed"
    assert clock.is_injected is True
    assert clock.is_restarted is False
    assert clock.detection_s is None
    assert stop.is_injected is True
    assert stop.is_survived is False
    assert stop.is_restarted is False
    faults = (PlannedFault(9, "kill", "end", 0, 90),)
    (later,) = outcomes_of(faults, LEDGER, [], end="failed")
    assert not later.is_injected


def test_a_restart_after_a_fault_that_should_be_tolerated_is_needless():
    step_of_fault = {**LEDGER[1], "fault": 1}
    ledger = [LEDGER[0], step_of_fault, *LEDGER[2:4]]
    _, clock = outcomes_of((KILL, CLOCK), ledger, [RESTART], end="finished")
    assert clock.is_needless_restart
    assert not report_of(clock).holds("no_needless_restart")


def test_a_flipped_bit_without_effect_is_not_the_cause_of_a_later_restart():
    flipped = PlannedFault(number=0, kind="corrupted_message", phase="reduce", rank=0, step=4)
    later = {**LEDGER[1], "fault": 1, "at_s": 2.2}
    stop = PlannedFault(number=1, kind="stop", phase="data", rank=0, step=8)
    ledger = [*LEDGER[:2], later, *LEDGER[2:4]]
    first, second = outcomes_of((flipped, stop), ledger, [RESTART], end="finished")
    assert first.is_survived is True
    assert first.is_restarted is False
    assert second.detection_s == pytest.approx(0.05)


def test_claims_and_the_table():
    (kill,) = outcomes_of((KILL,), LEDGER[:4], [RESTART], end="finished")
    report = report_of(kill)
    claims = ("bit_identical", "no_hang", "survived", "injected", "no_needless_restart")
    for claim in claims:
        assert report.holds(claim)
    assert "| kill | 1 | 1 | 1 | 0.25, 0.25 | 0.75, 0.75 | 1, 1 |" in report.lines(claims)
    found = json.loads(json.dumps(report.to_json(claims)))
    assert found["detection_s"] == {"median": 0.25, "max": 0.25}
    assert found["injected"] == 1
    assert found["survived"] == 1
    assert found["hung"] == 0
    assert not report_of(kill, is_identical=False).holds("bit_identical")
    assert not report_of(kill, end="hung").holds("no_hang")
    assert not report_of(FaultOutcome(KILL)).holds("injected")
    assert not report_of(kill, num_unexplained=1).holds("no_needless_restart")
    assert num_restarts(LEDGER) == 1


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_default_layouts_are_valid(text, tmp_path):
    layout = ChaosLayout.parse(text)
    (tmp_path / "text.txt").write_text("text " * 400)
    words = layout.words(tmp_path / "run", config=[], source=tmp_path / "text.txt")
    run = load(words, FAMILIES)
    assert not [check for check in config_checks(run) if check.fails()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "kil"], "error: kinds: is unknown (got 'kil'"),
        (["--phases", "never"], "error: phases: is unknown"),
        (["--assert", "fast"], "error: assert: is unknown"),
        (["--layout"], "error: layout: has no value"),
        (["--layout", "dp"], "error: "),
        (["--faults", "0"], "error: faults: "),
    ],
)
def test_bad_options_are_faults(words, message, capsys):
    assert main(["chaos", *words]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("layouts", "kinds"),
    [
        (["dp3"], "kill,clock"),
        pytest.param(
            ["dp3", "pp2 tp2"],
            "kill,stop,segfault,exception,out_of_memory,full_disk,lost_link,clock,"
            "corrupted_message,corrupted_file",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2 faults", "10 faults"],
)
def test_faults_leave_every_bit_as_without_them(layouts, kinds):
    num_faults = len(kinds.split(","))
    words = ["chaos", "--json", "--faults", str(num_faults), "--seed", "2", "--kinds", kinds]
    for layout in layouts:
        words += ["--layout", layout]
    done = programs().run(WEFT, *words, timeout=200)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    expected = dict.fromkeys(found["claims"], True)
    assert found["claims"] == expected, json.dumps(found, indent=1)
    survived = (found["injected"], found["survived"], found["hung"])
    assert survived == (num_faults, num_faults, 0)
    assert done.returncode == 0
    kills = found["kinds"]["kill"]
    clocks = found["kinds"]["clock"]
    assert kills["restarted"] == kills["injected"] > 0
    assert clocks["restarted"] == 0
