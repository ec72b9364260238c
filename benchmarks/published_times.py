"""Predicted against published step times: constants fitted to a half of each source's rows, tested on the other half.

PYTHONPATH=src:. python -m benchmarks.published_times FACTS [--only vtrain,bloom] [--cache rows.pkl] [--shipped]

FACTS has `perf_rows.json` (one row a published measurement) and `vtrain_single.csv` (720 steps on one node of A100).
Rows go to the fitted or the tested half by a hash of their text. Each row is expressed as a run of weft
(`published_rows.py`), whose stages are measured on meta tensors (`published_work.py`). Megatron's attention of that
time is not fused: its scores move through memory, which is a constant of the set. A source with enough fitted rows has
constants of its own, those of its machine and software; another one has those between the large sources of the same
software, and a free scale. A row that weft cannot express is listed with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.fact_rows import RowError
from benchmarks.published_rows import (
    MOSAIC,
    InexpressibleError,
    Published,
    Reasons,
    Stack,
    read_rows,
)
from benchmarks.published_work import MeasuredStages

from weft.config.hardware import find_hardware
from weft.errors import WeftError
from weft_plan.calibration.fit import BOUNDS, Calibration, fit
from weft_plan.calibration.fit_statistics import quantile, ratio_range
from weft_plan.calibration.measured_steps import MeasuredStep, Residual, compare, condensed

DEFAULT = "default"
"""The constants of a device, beside named sets."""
FEW = 20
"""Rows from which a range is taken."""
OWN = 10
"""Fitted rows from which a source has constants of its own."""
CACHE = Path("runs/published-work.pkl")
MOST_FITTED = 20
"""Rows of a source that are fitted: more change little."""
MOST_ACTIONS = 10_000
"""Actions of the schedule of a row that is fitted."""


@dataclass(frozen=True)
class Account:
    """A row with its work."""

    row: Published
    step: MeasuredStep

    @property
    def num_actions(self) -> int:
        """Of its schedule."""
        return sum(map(len, self.step.roles[0].step.plan.table.rows))


@dataclass(frozen=True)
class HeldOut:
    """A row that was not fitted, or as if its family had not been: measured over predicted time."""

    ratio: float
    family: str


@dataclass(frozen=True)
class Fitted:
    """A source with its constants.

    Attributes:
        is_own: whether they are fitted to this source alone.
        training: keys of the rows that decided them.
        left_out: of these rows, each family left out.
        scale: predicted times are so many times longer.
    """

    source: str
    found: Calibration
    is_own: bool
    training: frozenset[str]
    left_out: tuple[HeldOut, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Rows of a source on one stack beside their predictions.

    Attributes:
        held_out: rows of the fitted half: those that were not fitted, if there are enough, else
            those that were, each family left out.
    """

    stack: Stack
    fitted: Fitted
    accounts: Sequence[Account]
    residuals: Sequence[Residual]
    held_out: Sequence[HeldOut]

    def rows(self, *, is_fitted: bool) -> list[Residual]:
        """Those of one half."""
        pairs = zip(self.accounts, self.residuals, strict=True)
        return [residual for account, residual in pairs if account.row.is_fitted == is_fitted]


# -- fit ---------------------------------------------------------------------------------------


def account_of(row: Published, measured: MeasuredStages) -> Account:
    step = MeasuredStep(
        name=row.key,
        roles=measured.roles_of(row),
        seconds=row.seconds,
        family=row.family,
        hardware=row.hardware,
        waits_for_norm=row.waits_for_norm,
    )
    return Account(row, step)


def training_rows(accounts: Sequence[Account], *, most: int) -> list[Account]:
    """Rows of the fitted half: the first ones by their hash."""
    found = []
    for account in accounts:
        if account.row.is_fitted and account.num_actions <= MOST_ACTIONS:
            found.append(account)
    found.sort(key=lambda account: hashlib.sha256(account.row.key.encode()).hexdigest())
    return found[:most]


def fitted_source(name: str, accounts: Sequence[Account], stack: Stack) -> Fitted:
    """Constants of a large source."""
    training = training_rows(accounts, most=MOST_FITTED)
    found = fit_rows([account.step for account in training], stack, name)
    keys = frozenset(account.row.key for account in training)
    left_out = []
    for account, ratio in zip(training, found.left_out, strict=True):
        left_out.append(HeldOut(ratio, account.row.family))
    return Fitted(name, found, is_own=True, training=keys, left_out=tuple(left_out))


def typical(large: Sequence[Fitted], stack: Stack) -> Calibration:
    """Constants between those of the large sources of a stack: of each the geometric mean; without
    large sources those of the hardware table.
    """
    if not large:
        constants = find_hardware(stack.hardware).efficiency
        source = constants.source or "assumed"
        constants = replace(constants, source=f"of the hardware table: {source}")
        return Calibration(constants, {}, (), (), {})
    values: dict[str, float] = {}
    for name in BOUNDS:
        of_sources = [getattr(source.found.efficiency, name) for source in large]
        if all(of_sources):
            values[name] = statistics.geometric_mean(of_sources)
    names = "; ".join(source.source for source in large)
    constants = replace(stack.start, **values, source=f"between {names}")
    return Calibration(constants, {}, (), (), {})


def fit_rows(steps: Sequence[MeasuredStep], stack: Stack, source: str) -> Calibration:
    text = f"fitted to {len(steps)} published steps: {source}"
    begin = time.process_time()
    hardware = find_hardware(stack.hardware)
    found = fit(steps, hardware, source=text, start=stack.start)
    print(f"\n{stack.name}: {text}, {time.process_time() - begin:.0f} CPU-s")
    print_constants(found)
    return found


def scaled(name: str, accounts: Sequence[Account], large: Sequence[Fitted], stack: Stack) -> Fitted:
    """A small source with typical constants; its scale is the median of its fitted half, its range
    that of the rows of all large sources.
    """
    between = typical(large, stack)
    left_out: list[HeldOut] = []
    for source in large:
        left_out.extend(source.left_out)
    training = [account for account in accounts if account.row.is_fitted]
    residuals = compared(training, between, stack)
    scale = statistics.median(residual.ratio for residual in residuals) if residuals else 1.0
    keys = frozenset(account.row.key for account in training)
    return Fitted(name, between, is_own=False, training=keys, left_out=tuple(left_out), scale=scale)


def compared(accounts: Sequence[Account], found: Calibration, stack: Stack) -> list[Residual]:
    steps = [account.step for account in accounts]
    return list(compare(steps, find_hardware(stack.hardware), found.efficiency))


def outcome_of(fitted: Fitted, accounts: Sequence[Account], stack: Stack) -> Outcome:
    """Every row beside its prediction."""
    residuals = []
    for residual in compared(accounts, fitted.found, stack):
        scaled_s = fitted.scale * residual.predicted_s
        residuals.append(replace(residual, predicted_s=scaled_s))
    held_out = []
    for account, residual in zip(accounts, residuals, strict=True):
        if account.row.is_fitted and account.row.key not in fitted.training:
            held_out.append(HeldOut(residual.ratio, account.row.family))
    if len(held_out) < FEW:
        held_out = list(fitted.left_out)
    return Outcome(stack, fitted, accounts, residuals, held_out)


def ranges_of(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    """By source, the range of 80% of measured over predicted times; a source on several devices has
    one, as its software is the same. None for a source without a row that was held out.
    """
    rows: dict[str, list[HeldOut]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.fitted.source].extend(outcome.held_out)
    ranges = {}
    for source, of_source in rows.items():
        if not of_source:
            continue
        ratios = [row.ratio for row in of_source]
        families = [row.family for row in of_source]
        ranges[source] = ratio_range(ratios, families)
    return ranges


def outcomes_of(stack: Stack, accounts: Sequence[Account]) -> Iterator[Outcome]:
    """The outcome of each source of a stack."""
    by_source: dict[str, list[Account]] = defaultdict(list)
    for account in accounts:
        by_source[account.row.source].append(account)
    large: dict[str, list[Account]] = {}
    small: dict[str, list[Account]] = {}
    for name, members in by_source.items():
        is_large = len(training_rows(members, most=OWN)) == OWN
        (large if is_large else small)[name] = members
    fitted = {name: fitted_source(name, members, stack) for name, members in large.items()}
    for name, members in large.items():
        yield outcome_of(fitted[name], members, stack)
    for name, members in small.items():
        own = scaled(name, members, list(fitted.values()), stack)
        yield outcome_of(own, members, stack)


# -- report ------------------------------------------------------------------------------------


def print_constants(found: Calibration) -> None:
    for name, error in found.uncertainty.items():
        value = getattr(found.efficiency, name)
        doubt = f"+- {100 * error:.0f}%" if error < math.inf else "not determined: as at the start"
        print(f"  {name:<18} {value:.4g}  {doubt}")
    for group, scale in found.scales.items():
        print(f"  scale of {group}: {scale:.3f}")


def print_named_sets(stack: Stack, accounts: Sequence[Account]) -> dict[str, list[float]]:
    """The rows of a stack beside the constants that weft ships: nothing is fitted, and no scale.

    Returns:
        By source, measured over predicted times with the constants of the device.
    """
    device = find_hardware(stack.hardware)
    by_source: dict[str, list[float]] = defaultdict(list)
    for name, constants in {DEFAULT: device.efficiency, **device.stacks}.items():
        residuals = list(compare([account.step for account in accounts], device, constants))
        if name == DEFAULT:
            for account, residual in zip(accounts, residuals, strict=True):
                by_source[account.row.source].append(residual.ratio)
        for half, is_fitted in (("fitted half", True), ("TEST half", False)):
            pairs = zip(accounts, residuals, strict=True)
            errors = [
                abs(row.predicted_s / row.measured_s - 1)
                for account, row in pairs
                if account.row.is_fitted == is_fitted
            ]
            if errors:
                within = sum(error < 0.1 for error in errors) / len(errors)
                print(
                    f"shipped constants, {stack.name}, {name}, {half}: {len(errors)} rows, median "
                    f"{100 * statistics.median(errors):.1f}%, within 10%: {100 * within:.0f}%",
                    flush=True,
                )
    return by_source


def print_blind(ratios: dict[str, list[float]]) -> None:
    """Errors of each source with the shipped constants, and with one scale a source; together those
    that no shipped constant was fitted to.
    """
    unseen = [name for name in ratios if name != MOSAIC]
    scaled = {
        name: [ratio / statistics.median(values) for ratio in values]
        for name, values in ratios.items()
    }
    groups = {**{name: [name] for name in ratios}, "together, unseen": unseen}
    groups["the same without vTrain's single node"] = [
        name for name in unseen if name != "vTrain single node"
    ]
    for title, names in groups.items():
        texts = []
        for what, found in (("shipped", ratios), ("one scale a source", scaled)):
            errors = [abs(1 / ratio - 1) for name in names for ratio in found[name]]
            within = 100 * sum(error <= 0.1 for error in errors) / len(errors)
            median = 100 * statistics.median(errors)
            texts.append(f"{what}: median {median:.1f}%, within 10%: {within:.0f}%")
        print(f"{title}: {len(errors)} rows; {'; '.join(texts)}")


def print_outcome(outcome: Outcome, limits: tuple[float, float] | None) -> None:
    """Both halves of a source, and what its range holds."""
    name = outcome.fitted.source[:34]
    print(f"\n{name}, {outcome.stack.name}")
    if not outcome.fitted.is_own:
        origin = outcome.fitted.found.efficiency.source
        print(f"{name}: constants {origin}; scale {outcome.fitted.scale:.3f}")
    for is_fitted, half in ((True, "fitted half"), (False, "TEST half")):
        rows = outcome.rows(is_fitted=is_fitted)
        if rows:
            print(error_line(f"{name} {half}", rows))
    test = outcome.rows(is_fitted=False)
    if limits is None:
        print("  no range: no row was held out")
    elif test:
        low, high = limits
        covered = sum(low <= residual.ratio <= high for residual in test)
        print(
            f"  range {low:.3f} to {high:.3f} holds {covered} of {len(test)}"
            f" of the test half: {100 * covered / len(test):.0f}% (aim 80%)"
        )
    report_choice(outcome, only_tested=False)
    report_choice(outcome, only_tested=True)


def error_line(name: str, residuals: Sequence[Residual]) -> str:
    errors = [abs(residual.error) for residual in residuals]
    within = sum(error <= 0.1 for error in errors) / len(errors)
    return (
        f"  {name:<46} {len(errors):>4} rows  median {100 * statistics.median(errors):5.1f}%"
        f"  p90 {100 * quantile(errors, 0.9):5.1f}%  within 10%: {100 * within:3.0f}%"
    )


def report_choice(outcome: Outcome, *, only_tested: bool) -> None:
    """What the layout that is predicted to be the fastest costs, beside the one that is."""
    groups: dict[str, list[Residual]] = defaultdict(list)
    for account, residual in zip(outcome.accounts, outcome.residuals, strict=True):
        is_asked = not (only_tested and account.row.is_fitted)
        if account.row.group and is_asked:
            groups[account.row.group].append(residual)
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
    which = "tested rows" if only_tested else "all rows"
    print(
        f"  layout chosen in {len(choices)} cases of 2 to {max(map(len, choices))} layouts, {which}: "
        f"{mean:.1f}% over the best on average, {100 * max(excess):.0f}% at most, best in {right}"
    )


def write_outcome(folder: Path, outcome: Outcome, limits: tuple[float, float] | None) -> None:
    """Write the constants and every row beside its prediction."""
    stack = outcome.stack
    rows = []
    for account, residual in zip(outcome.accounts, outcome.residuals, strict=True):
        row = account.row
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
    words = [*stack.name.split()[1:2], *outcome.fitted.source.split()[:2]]
    name = "-".join([stack.hardware, *words]).replace(",", "").replace("/", "")
    constants = outcome.fitted.found.efficiency
    if limits is not None:
        constants = replace(constants, low=limits[0], high=limits[1])
    text = json.dumps({"efficiency": asdict(constants), "rows": rows}, indent=1)
    (folder / f"{name}.json").write_text(text)


# -- all rows ----------------------------------------------------------------------------------


def accounts_of(
    rows: Sequence[Published], measured: MeasuredStages, reasons: Reasons
) -> dict[Stack, list[Account]]:
    """The rows with their work, by set of constants; keys of those that have none by the reason."""
    stacks: dict[Stack, list[Account]] = defaultdict(list)
    for number, row in enumerate(rows):
        if number % 100 == 0:
            measured.save()
            print(f"  row {number} of {len(rows)}", flush=True)
        try:
            account = account_of(row, measured)
        except (InexpressibleError, WeftError) as reason:
            text = str(reason).splitlines()[0][:90]
            reasons[f"{row.source}: {text}"].append(row.key)
            continue
        stacks[row.stack].append(account)
    measured.save()
    for accounts in stacks.values():
        steps = condensed([account.step for account in accounts])
        pairs = zip(accounts, steps, strict=True)
        accounts[:] = [replace(account, step=step) for account, step in pairs]
    return stacks


def first_rows(rows: Sequence[Published], most: int) -> list[Published]:
    """So many rows of each source."""
    counts: Counter[str] = Counter()
    found = []
    for row in rows:
        counts[row.source] += 1
        if counts[row.source] <= most:
            found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path, help="folder of both files, or a file of rows")
    parser.add_argument("--only", default="", help="beginnings of sources, comma-separated")
    parser.add_argument("--most", type=int, default=0, help="rows of a source")
    parser.add_argument("--cache", type=Path, default=CACHE, help="file for the measured work")
    parser.add_argument("--shipped", action="store_true", help="the shipped constants alone")
    parser.add_argument("--write", type=Path, help="folder for the fitted constants and all rows")
    args = parser.parse_args()
    try:
        rows, reasons = read_rows(args.facts)
    except RowError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    only = tuple(args.only.lower().split(","))
    rows = [row for row in rows if row.source.lower().startswith(only)]
    if args.most:
        rows = first_rows(rows, args.most)
    begin = time.process_time()
    stacks = accounts_of(rows, MeasuredStages(args.cache), reasons)
    print(f"measured {len(rows)} rows: {time.process_time() - begin:.0f} CPU-s")
    outcomes: list[Outcome] = []
    blind: dict[str, list[float]] = defaultdict(list)
    for stack, accounts in stacks.items():
        for source, ratios in print_named_sets(stack, accounts).items():
            blind[source].extend(ratios)
        if not args.shipped:
            outcomes.extend(outcomes_of(stack, accounts))
    if args.shipped and stacks:
        print_blind(blind)
        return 0
    ranges = ranges_of(outcomes)
    for outcome in outcomes:
        limits = ranges.get(outcome.fitted.source)
        print_outcome(outcome, limits)
        if args.write is not None:
            write_outcome(args.write, outcome, limits)
    print("\nnot expressed:")
    for text, keys in sorted(reasons.items()):
        print(f"  {len(keys):>4} x {text} (first: {keys[0]})")
    if not outcomes:
        print("error: no row is a run of weft; the reasons are above", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
