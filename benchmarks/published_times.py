"""Predicted against published step times: one set of constants a device and software, fitted to half of the rows.

PYTHONPATH=src:. python -m benchmarks.published_times FACTS [--only vtrain,bloom] [--cache rows.pkl] [--write folder]

FACTS has `perf_rows.json` (one row a published measurement) and `vtrain_single.csv` (720 steps on one node of A100).
Rows go to the fitted or the tested half by a hash of their text. Each row is expressed as a run of weft
(`published_rows.py`), whose stages are measured on meta tensors (`published_work.py`). Megatron's attention of that
time is not fused: its scores move through memory, which is a constant of the set. Besides the constants of its set, each
source but the first of a set has one free scale. A row that weft cannot express is listed with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.published_rows import (
    MEGATRON,
    InexpressibleError,
    Published,
    Stack,
    read_rows,
)
from benchmarks.published_work import MeasuredStages

from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.errors import WeftError
from weft.planner.calibrate import (
    Calibration,
    MeasuredStep,
    Residual,
    compare,
    fit,
    quantile,
    ratio_range,
)

FIRST_SOURCE = "vTrain single node"
"""Source without a free scale, of those with Megatron's constants."""
FEW = 20
"""Rows from which a range is taken."""
CACHE = Path("runs/published-work.pkl")
MOST_FITTED = 24
"""Rows of a source that are fitted: more change little."""
MOST_ACTIONS = 2_500
"""Actions of the schedule of a row that is fitted."""


# -- fit, test, report -------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """A row with its work."""

    row: Published
    step: MeasuredStep


def account_of(row: Published, measured: MeasuredStages, *, first_source: str) -> Account:
    group = "" if row.source == first_source else row.source
    step = MeasuredStep(row.key, measured.roles_of(row), row.seconds, group=group)
    return Account(row, step)


def fitted_rows(accounts: Sequence[Account]) -> list[Account]:
    """Rows of the fitted half: of each source the first ones by their hash."""
    by_source: dict[str, list[Account]] = defaultdict(list)
    for account in accounts:
        plan = account.step.roles[0].step.plan
        if account.row.is_fitted and sum(map(len, plan.table.rows)) <= MOST_ACTIONS:
            by_source[account.row.source].append(account)
    found = []
    for members in by_source.values():
        members.sort(key=lambda account: hashlib.sha256(account.row.key.encode()).hexdigest())
        found += members[:MOST_FITTED]
    return found


def error_line(name: str, residuals: Sequence[Residual]) -> str:
    errors = [abs(residual.error) for residual in residuals]
    within = sum(error <= 0.1 for error in errors) / len(errors)
    return (
        f"  {name:<44} {len(errors):>4} rows  median {100 * statistics.median(errors):5.1f}%"
        f"  p90 {100 * quantile(errors, 0.9):5.1f}%  within 10%: {100 * within:3.0f}%"
    )


def report_stack(stack: Stack, accounts: Sequence[Account], folder: Path | None) -> None:
    """Fit one set of constants, and print what it predicts of both halves."""
    hardware = find_hardware(stack.hardware)
    training = fitted_rows(accounts)
    names = sorted({account.row.source for account in training})
    source = f"fitted to {len(training)} published steps: {'; '.join(names)}"
    begin = time.process_time()
    found = fit([a.step for a in training], hardware, source=source, start=stack.start)
    print(f"\n{stack.name}: fit of {len(training)} rows, {time.process_time() - begin:.0f} CPU-s")
    print_constants(found)
    steps = [account.step for account in accounts]
    compared = compare(steps, hardware, found.efficiency, scales=found.scales)
    residuals = {account.row.key: each for account, each in zip(accounts, compared, strict=True)}
    low, high = range_of(accounts, training, residuals, found)
    print(f"  range of 80% of measured/predicted: {low:.3f} to {high:.3f}")
    print_sources(accounts, residuals)
    print_covered(accounts, residuals, low, high)
    report_choice(accounts, residuals)
    if folder is not None:
        write_outcome(
            folder, stack, accounts, residuals, replace(found.efficiency, low=low, high=high)
        )


def print_constants(found: Calibration) -> None:
    for name, error in found.uncertainty.items():
        value = getattr(found.efficiency, name)
        doubt = f"+- {100 * error:.0f}%" if error < math.inf else "not determined: as at the start"
        print(f"  {name:<18} {value:.4g}  {doubt}")
    for group, scale in found.scales.items():
        print(f"  scale of {group}: {scale:.3f}")


def range_of(
    accounts: Sequence[Account],
    training: Sequence[Account],
    residuals: Mapping[str, Residual],
    found: Calibration,
) -> tuple[float, float]:
    """The range of predictions: from rows of the fitted half that were not fitted, if there are."""
    used = {account.row.key for account in training}
    spare = [
        residuals[a.row.key].ratio for a in accounts if a.row.is_fitted and a.row.key not in used
    ]
    return ratio_range(spare) if len(spare) >= FEW else found.range


def print_sources(accounts: Sequence[Account], residuals: Mapping[str, Residual]) -> None:
    by_half: dict[tuple[str, bool], list[Residual]] = defaultdict(list)
    for account in accounts:
        row = account.row
        by_half[row.source, not row.is_fitted].append(residuals[row.key])
    for (source, is_test), chosen in sorted(by_half.items()):
        half = "TEST half" if is_test else "fitted half"
        print(error_line(f"{source[:30]} {half}", chosen))


def print_covered(
    accounts: Sequence[Account], residuals: Mapping[str, Residual], low: float, high: float
) -> None:
    test = [residuals[account.row.key] for account in accounts if not account.row.is_fitted]
    if test:
        print(error_line("all sources TEST half", test))
        covered = sum(low <= residual.ratio <= high for residual in test) / len(test)
        print(f"  the range holds {100 * covered:.0f}% of the test half (80% is the aim)")


def write_outcome(
    folder: Path,
    stack: Stack,
    accounts: Sequence[Account],
    residuals: Mapping[str, Residual],
    constants: Efficiency,
) -> None:
    """Write the constants and every row beside its prediction."""
    rows = []
    for account in accounts:
        row, residual = account.row, residuals[account.row.key]
        rows.append(
            {
                "source": row.source,
                "key": row.key,
                "words": " ".join(row.words),
                "is_fitted": row.is_fitted,
                "measured_s": residual.measured_s,
                "predicted_s": residual.predicted_s,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stack.hardware}-{stack.name.split()[1]}.json"
    outcome = {"efficiency": asdict(constants), "rows": rows}
    (folder / name).write_text(json.dumps(outcome, indent=1))


def report_choice(accounts: Sequence[Account], residuals: Mapping[str, Residual]) -> None:
    """What the layout that is predicted to be the fastest costs, beside the one that is."""
    groups: dict[str, list[Residual]] = defaultdict(list)
    for account in accounts:
        if account.row.group:
            groups[account.row.group].append(residuals[account.row.key])
    choices = [members for members in groups.values() if len(members) > 1]
    if not choices:
        return
    excess = []
    for members in choices:
        chosen = min(members, key=lambda residual: residual.predicted_s)
        best = min(residual.measured_s for residual in members)
        excess.append(chosen.measured_s / best - 1)
    mean = 100 * statistics.mean(excess)
    right = sum(not each for each in excess)
    print(
        f"  layout chosen in {len(choices)} cases of 2 to {max(map(len, choices))} layouts: "
        f"{mean:.1f}% over the best on average, {100 * max(excess):.0f}% at most, best in {right}"
    )


def accounts_of(
    rows: Sequence[Published], measured: MeasuredStages, reasons: Counter[str]
) -> dict[Stack, list[Account]]:
    """The rows with their work, by set of constants; reasons count those that have none."""
    stacks: dict[Stack, list[Account]] = defaultdict(list)
    for number, row in enumerate(rows):
        if number % 100 == 0:
            measured.save()
            print(f"  row {number} of {len(rows)}", flush=True)
        first = FIRST_SOURCE if row.stack == MEGATRON else row.source
        try:
            stacks[row.stack].append(account_of(row, measured, first_source=first))
        except (InexpressibleError, WeftError) as reason:
            text = str(reason).splitlines()[0][:90]
            reasons[f"{row.source}: {text}"] += 1
    measured.save()
    return stacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--only", default="", help="beginnings of sources, comma-separated")
    parser.add_argument("--most", type=int, default=0, help="rows of a source")
    parser.add_argument("--cache", type=Path, default=CACHE, help="file for the measured work")
    parser.add_argument("--write", type=Path, help="folder for the fitted constants and all rows")
    args = parser.parse_args()
    rows, reasons = read_rows(args.facts)
    only = tuple(args.only.lower().split(","))
    rows = [row for row in rows if row.source.lower().startswith(only)]
    if args.most:
        rows = first_rows(rows, args.most)
    begin = time.process_time()
    stacks = accounts_of(rows, MeasuredStages(args.cache), reasons)
    print(f"measured {len(rows)} rows: {time.process_time() - begin:.0f} CPU-s")
    for stack, accounts in stacks.items():
        report_stack(stack, accounts, args.write)
    print("\nnot expressed:")
    for text, number in sorted(reasons.items()):
        print(f"  {number:>4} x {text}")


def first_rows(rows: Sequence[Published], most: int) -> list[Published]:
    """So many rows of each source."""
    counts: Counter[str] = Counter()
    found = []
    for row in rows:
        counts[row.source] += 1
        if counts[row.source] <= most:
            found.append(row)
    return found


if __name__ == "__main__":
    main()
