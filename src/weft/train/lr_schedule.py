"""Owns the learning rate as a pure function of the step."""

from __future__ import annotations

import math

from weft.config.schema import OptimConfig


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of a run of `total_steps`.

    ```
    lr      ┌───────╮            constant   stays at lr
           ╱         ╲           linear     straight down from the end of the warm-up
          ╱           ╲          cosine     half a cosine down from there
    min_lr             ╰─        wsd        stays at lr, straight down over the last `cooldown` of all steps
          warm-up   decay
    ```

    The warm-up rises by equal amounts and reaches `lr` in its last step. `min_lr` is reached at `total_steps`, one step
    after the last, and held from there on. A `min_lr` above `lr` counts as `lr`: no run heats up at its end.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    least = min(optim.min_lr, optim.lr)
    return least + (optim.lr - least) * _height(step, optim, total_steps)


def _height(step: int, optim: OptimConfig, total_steps: int) -> float:
    """How high the rate stands between `min_lr` (0) and `lr` (1)."""
    start: float = optim.warmup
    if optim.decay == "constant":
        return 1.0
    if optim.decay == "wsd":
        start = max(start, total_steps * (1 - optim.cooldown))
    progress = _progress(step, start=start, end=total_steps)
    return (1 + math.cos(math.pi * progress)) / 2 if optim.decay == "cosine" else 1 - progress


def _progress(step: int, *, start: float, end: float) -> float:
    """Share of the way from `start` to `end`, 0 to 1; an empty way has been gone."""
    return min(max((step - start) / (end - start), 0.0), 1.0) if start < end else float(step >= end)
