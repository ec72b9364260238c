"""A note on a resume whose longer or other schedule raises the learning rate again."""

from __future__ import annotations

from collections.abc import Iterator

from weft.checkpoint.format import Facts
from weft.config.schema import OptimConfig
from weft.train.optim import learning_rate
from weft.train.run_records import note_event
from weft.train.training import Event

ROUNDING = 1e-9


def rate_events(facts: Facts, optim: OptimConfig, *, total: int) -> Iterator[Event]:
    """A note where the rate of the next step, of `total`, is above that of the checkpoint's last
    step, which was after the warm-up.
    """
    stored = facts.run.get("optim") or {}
    stored_total = facts.run.get("steps")
    if not stored_total or not stored.get("lr") or facts.step <= stored.get("warmup", 0):
        return
    names = ("lr", "warmup", "decay", "cooldown", "min_lr")
    before = OptimConfig().model_copy(
        update={name: stored[name] for name in names if name in stored}
    )
    old = learning_rate(facts.step - 1, before, stored_total)
    new = learning_rate(facts.step, optim, total)
    if new <= old * (1 + ROUNDING):
        return
    yield note_event(
        f"the learning rate rises again: {old:.3g} at step {facts.step} of {stored_total}, {new:.3g} "
        f"at step {facts.step + 1} of {total}; --optim.lr {old:.3g} --optim.decay constant keeps it"
    )
