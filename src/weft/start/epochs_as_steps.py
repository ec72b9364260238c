"""`epochs`: how often a run reads its data, said as the number of steps that this takes."""

from __future__ import annotations

import math

from weft.config.run import Run
from weft.config.schema import MAX_COUNT
from weft.data.dataset import open_data
from weft.errors import ConfigError, Fault


def with_steps(run: Run) -> Run:
    """The run with the steps of its epochs, rounded up to a whole step; without epochs, the run itself.

    An epoch of several sources is as many samples as all of them hold; each is read in its share.

    Raises:
        ConfigError: that are too many steps.
        DataError: the data cannot be opened.
    """
    if run.epochs is None:
        return run
    num_samples = open_data(run.data, run.model).num_samples
    steps = max(1, math.ceil(run.epochs * num_samples / run.batch.global_size))
    if steps > MAX_COUNT:
        got = f"{run.epochs:g}, of {num_samples:,} samples: {steps:,} steps"
        fix = "fewer epochs, or --steps"
        raise ConfigError(
            Fault("epochs", "is too much", got, need=f"at most {MAX_COUNT:,} steps", fix=fix)
        )
    return run.with_values({"steps": steps, "epochs": None})
