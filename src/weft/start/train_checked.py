"""A checked run in its own locked folder, trained to its end: what `weft train` and `weft.train` share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config.keys import flatten
from weft.config.run import Run
from weft.config.run_files import absolute_paths
from weft.models.code_of_run import code_of_run
from weft.start import remote_folder, run_folder
from weft.start.checked_run import set_openmp_policy
from weft.start.messages import print_messages
from weft.start.preflight import training_notes

if TYPE_CHECKING:
    from weft.run.signals import StopRequest
    from weft.start.train_run import OnEvent


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended without an error.

    Attributes:
        run: its config, with its folder.
        code: the exit code, 0 or 75: asked to stop, and saved.
    """

    run: Run
    code: int


def train_checked(
    run: Run,
    *,
    on_event: OnEvent | None = None,
    caller: StopRequest | None = None,
    complete: Callable[[Run, Path], Run] = lambda run, out: run,
) -> TrainedRun:
    """Train a run that has passed all checks.

    Args:
        on_event: called on every rank with each event of the run and the training of the rank.
        caller: of a run in the process of a script, which stops it by this request; None: of `weft
            train`.
        complete: called with the run and its folder once the folder is locked; the run with what
            has been written there.

    Raises:
        UserError: another process writes into the folder; or it cannot be prepared.
        WeftError: the training failed.
    """
    run = run.with_values(absolute_paths(flatten(run.model_dump(mode="json"))))
    with run_folder.locked_out(run.model, run.out, run.resume, now=datetime.now()) as out:
        run = complete(run.with_values({"out": out}), Path(out))
        remote_folder.fetch(
            run.save.remote,
            out,
            run.resume,
            model=run.model,
            config=run.model_dump(mode="json"),
            code=code_of_run(run.model.name, run.optim.name),
        )
        if run.run.elastic:
            run_folder.mark_job(Path(out), os.environ)
        print_messages(f"note: {note}" for note in training_notes(run))
        set_openmp_policy()
        from weft.generate.main import sample_trained  # late: they import torch, after all checks
        from weft.start.train_run import train

        generate_text = partial(
            sample_trained, data=run.data, config=run.model, num_tokens=run.sample, seed=run.seed
        )
        code = train(
            run,
            generate_text=generate_text if run.sample else None,
            on_event=on_event,
            caller=caller,
        )
    return TrainedRun(run, code)
