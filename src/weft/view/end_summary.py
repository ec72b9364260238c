"""The last lines of a run: how long it took, how the loss went, and what to do with the result."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from weft.errors import counted
from weft.view.progress import Progress, loss_unit
from weft.view.quantity import clock

WITH_TURNS = frozenset({"chat", "instruction"})
"""Values of `data.format` whose records a chat template renders."""


def end_summary(progress: Progress) -> list[tuple[str, str]]:
    """Label and text of each line after a run that has finished; nothing after any other end, whose
    own line says how to go on.
    """
    if progress.end.get("status") != "finished" or not progress.losses:
        return []
    return [("trained", _trained(progress)), ("loss", _loss(progress)), *_next(progress)]


def _trained(progress: Progress) -> str:
    """`200 steps in 1:32, 409,600 tokens, 4,452 tokens/s`: the steps of this start."""
    parts = [
        f"{counted(len(progress.losses), 'step', spec=',')} in {clock(progress.end['seconds'])}"
    ]
    tokens = progress.total_tokens
    if tokens and math.isfinite(tokens):
        parts.append(f"{tokens:,.0f} {progress.unit}")
        parts.append(f"{tokens / progress.total_step_s:,.0f} {progress.unit}/s")
    return ", ".join(parts)


def _loss(progress: Progress) -> str:
    """`5.5611 to 1.9865 nats; best evaluation 2.0041 after step 180`."""
    text = f"{progress.losses[0]:.4f} to {progress.losses[-1]:.4f}{loss_unit(progress.unit)}"
    best = progress.end.get("best_loss")
    if best is not None:
        text += f"; best evaluation {best:.4f} after step {progress.end['best_step']}"
    return text


def _next(progress: Progress) -> Iterator[tuple[str, str]]:
    """Commands for a run that has a folder: its page, and text from its model, which a model of
    conversations gives as answers.
    """
    out = progress.run.get("out")
    if not out:
        return
    folder = shlex.quote(str(out))
    yield "its page", f"weft report {folder}"
    if progress.unit != "tokens" or not progress.end.get("checkpoint"):
        return
    formats = str(progress.run["data"].get("format")).split(", ")  # a mixture may have several
    if WITH_TURNS.issuperset(formats):
        yield "its chat", f"weft chat {folder}"
    else:
        yield "its text", f"weft generate {folder} --prompt 'def ' --tokens 40"
