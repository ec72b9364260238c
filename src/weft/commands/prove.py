"""`weft prove`: compare a recorded run, or a config before it runs, with one process. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.config.schema import ParallelConfig, PipelineConfig, PrecisionConfig
from weft.core.mesh import Mesh
from weft.data.dataset import open_data
from weft.errors import counted
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.prove.compare import TOLERANCE, Verdict, prove_layout
from weft.prove.recorded import first_config_path, recorded_steps
from weft.prove.rerun import BOUNDS, DRIFT_AFTER, StepPair, step_pairs
from weft.train.build import (
    build_data_loader,
    build_step,
    build_step_range,
    family_of,
)
from weft.train.data_loader import samples_of, whole_batch
from weft.train.loop import Event, step_events
from weft.train.optim import learning_rate

MAX_DIFFERENCES_SHOWN = 5
FLOAT64 = PrecisionConfig(
    params="float64",
    compute="float64",
    reduce="float64",
)


class Proof:
    """Yields lines to print; `holds` says at the end whether everything was equal."""

    holds = False

    def of_run(self, out: Path, *, first: int) -> Iterator[str]:
        """Compare the first steps of the run in `out` with one process."""
        run = load([str(first_config_path(out))], FAMILIES)
        size = run.device_mesh.size
        yield f"{out} ({run.device_mesh}, {counted(size, 'rank')}) repeated on one process:"
        pairs: list[StepPair] = []
        for pair in step_pairs(
            recorded_steps(out),
            train_on_one_process(run),
            first=first,
        ):
            pairs.append(pair)
            if _is_shown(pair.step, first):
                losses = f"loss {pair.loss:.6f} and {pair.loss_alone:.6f}"
                yield f"  step {pair.step:>3}  {losses}  gradient norm {pair.norm:.5f} and {pair.norm_alone:.5f}"
        yield from self._verdict_on_run(out, pairs, dtype=run.precision.compute)

    def _verdict_on_run(
        self,
        out: Path,
        pairs: list[StepPair],
        *,
        dtype: str,
    ) -> Iterator[str]:
        bound = BOUNDS[dtype]
        pairs = pairs[: DRIFT_AFTER.get(dtype)]
        loss = max(pair.loss_difference for pair in pairs)
        norm = max(pair.norm_difference for pair in pairs)
        wrong = [pair for pair in pairs if not pair.largest_difference <= bound]
        self.holds = not wrong
        yield f"largest relative difference in {counted(len(pairs), 'step')}: loss {loss:.1e}, gradient norm {norm:.1e}"
        if self.holds:
            yield f"equal within {bound:.0e} ({dtype} rounding)"
        else:
            steps = counted(len(pairs), "step")
            first = f"the first is step {wrong[0].step}"
            yield f"NOT equal: {len(wrong)} of {steps} differ by more than {bound:.0e} ({dtype} rounding), {first}"
            yield f"to see the first tensor that differs: weft prove {out / 'run.toml'}"

    def of_config(self, run: Run, *, first: int) -> Iterator[str]:
        """Compare the first steps of this config with one device: ranks are threads, float64, every
        tensor.
        """
        start = time.perf_counter()
        mesh = run.device_mesh
        yield f"{mesh}, {counted(mesh.size, 'rank')} as threads, float64, {counted(first, 'step')}, compared with one device:"
        verdict = prove_config(run, steps=first)
        seconds = time.perf_counter() - start
        self.holds = verdict.holds
        yield f"compared {verdict.compared:,} losses, norms, gradients and parameters in {seconds:.1f} s"
        yield f"largest difference: {verdict.largest}"
        for difference in verdict.wrong[:MAX_DIFFERENCES_SHOWN]:
            yield f"  WRONG {difference}"
        num_hidden = len(verdict.wrong) - MAX_DIFFERENCES_SHOWN
        if num_hidden > 0:
            yield f"  and {num_hidden:,} more"
        for name in verdict.missing:
            yield f"  MISSING {name}: some entries lie on no rank"
        if self.holds:
            yield f"equal within {TOLERANCE:.0e}"
        else:
            first_wrong = (*verdict.wrong, *verdict.missing)[0]
            yield f"NOT equal: first at {first_wrong}"


def prove_config(run: Run, *, steps: int) -> Verdict:
    """Train the first `steps` steps of a config on its layout and on one device, in float64;
    compare every tensor.
    """
    run = run.with_values({"precision": FLOAT64})
    samples = open_data(run.data, run.model)
    batches: list[Batch] = []
    for step in range(steps):
        chosen = samples_of(
            samples,
            step,
            global_size=run.batch.global_size,
            seed=run.seed,
        )
        batches.append(whole_batch(samples, chosen, later=run.model.reads_later_targets))
    return prove_layout(
        family_of(run.model, run.lora),
        run.model,
        batches,
        plan=plan_of(run),
        seed=run.seed,
        optim=run.optim,
        lr=learning_rate(run.optim.warmup, run.optim, run.steps),
    )


def train_on_one_process(run: Run) -> Iterator[Event]:
    """Train the run again on one rank, with the same model, data, batch and optimizer; yields its
    step events.
    """
    run = run.with_values(
        {
            "mesh": "",
            "parallel": ParallelConfig(),
            "pipeline": PipelineConfig(),
            "resume": None,
        }
    )
    torch.set_flush_denormal(True)
    comm = Comm(Mesh.parse(""), 0, ThreadWorld(1).transport(0))
    loader = build_data_loader(
        open_data(run.data, run.model),
        comm,
        run.batch,
        seed=run.seed,
        later=run.model.reads_later_targets,
    )
    step_range = build_step_range(run.optim, total=run.steps, prefetch=run.data.prefetch)
    return step_events(build_step(run, comm), loader, step_range)


def _is_shown(step: int, last: int) -> bool:
    return step <= 3 or step % 5 == 0 or step == last
