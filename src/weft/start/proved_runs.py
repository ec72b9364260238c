"""Which runs are proved before and in their first step. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.run import Run

MODE_VARIABLE = "WEFT_PROVE_BEFORE"
"""Environment variable in place of `prove.before = auto`, for machines on which nothing is proved."""


def is_proved(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether a run is proved before and in its first step: by default where it has several ranks, or
    blocks that are compiled.
    """
    mode = run.prove.before
    if mode == "auto":
        mode = environ.get(MODE_VARIABLE, mode)  # type: ignore[assignment]
    is_alone = run.device_mesh.size == 1 and run.compile == "off"
    return mode == "always" or (mode == "auto" and not is_alone)
