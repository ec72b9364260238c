"""Owns what `weft prove` does with its words: a run folder is played again on one process, a config is proved before it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from weft.config.run import Run, plan_of
from weft.prove.config import TOLERANCE, prove
from weft.prove.rerun import BOUNDS, DRIFT_AFTER, StepPair, recorded_run, rerun

SHOWN = 5
"""Differences that are shown one by one."""


class Proof:
    """Lines to show as they come, and at the end whether all was well."""

    holds = False

    def of(self, subject: Path | Run, *, first: int) -> Iterator[str]:
        """Of a run's folder, or of a config."""
        return self.of_config(subject, first=first) if isinstance(subject, Run) else self.of_run(subject, first=first)

    def of_run(self, out: Path, *, first: int) -> Iterator[str]:
        """The first steps of the run in `out`, again on one process."""
        run = recorded_run(out)
        kind = run.precision.compute
        bound = BOUNDS[kind]
        yield f"{out} ({run.device_mesh}, {run.device_mesh.size} rank{'s' * (run.device_mesh.size > 1)}) again on one process:"
        pairs: list[StepPair] = []
        for pair in rerun(out, first):
            pairs.append(pair)
            if _is_shown(pair.step, first):
                yield (
                    f"  step {pair.step:>3}  loss {pair.loss:.6f} and {pair.loss_alone:.6f}"
                    f"  gradient norm {pair.norm:.5f} and {pair.norm_alone:.5f}"
                )
        if not pairs:
            yield f"error: {out}: no step has been recorded"
            return
        pairs = pairs[: DRIFT_AFTER.get(kind)]
        loss, norm = max(pair.loss_difference for pair in pairs), max(pair.norm_difference for pair in pairs)
        self.holds = max(loss, norm) <= bound
        yield f"largest relative difference in {len(pairs)} steps: loss {loss:.1e}, gradient norm {norm:.1e}"
        if self.holds:
            yield f"equal: {kind} rounding explains up to {bound:.0e}"
        else:
            wrong = next(pair for pair in pairs if max(pair.loss_difference, pair.norm_difference) > bound)
            yield f"NOT equal from step {wrong.step} on ({kind} rounding explains up to {bound:.0e});"
            yield f"to see the first tensor that differs: weft prove {out / 'run.toml'}"

    def of_config(self, run: Run, *, first: int) -> Iterator[str]:
        """The first steps of this config, ranks as threads, in float64, every tensor against one device."""
        mesh, start = plan_of(run).mesh, time.perf_counter()
        yield f"{mesh}, {mesh.size} rank{'s' * (mesh.size > 1)} as threads, float64, {first} steps, against one device:"
        verdict = prove(run, steps=first)
        yield f"compared {verdict.compared:,} losses, norms, gradients and parameters in {time.perf_counter() - start:.1f} s"
        yield f"largest difference: {verdict.largest}"
        for difference in verdict.wrong[:SHOWN]:
            yield f"  WRONG {difference}"
        if len(verdict.wrong) > SHOWN:
            yield f"  and {len(verdict.wrong) - SHOWN:,} more"
        for name in verdict.missing:
            yield f"  MISSING {name}: some entries lie on no rank"
        self.holds = not verdict.wrong and not verdict.missing
        yield (
            f"equal within {TOLERANCE:.0e}"
            if self.holds
            else f"NOT equal: first at {(*verdict.wrong, *verdict.missing)[0]}"
        )


def _is_shown(step: int, last: int) -> bool:
    return step <= 3 or step % 5 == 0 or step == last
