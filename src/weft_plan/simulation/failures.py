"""Goodput of a long run whose devices fail: expected seconds between two checkpoints, and the best interval.

Note [Renewal]
    Devices fail independently, so the job fails at random with a mean of M = (hours of a device) /
    (devices): a Poisson process. A job does t seconds of training, then stops for a checkpoint of c
    seconds, and so on. A failure loses what was done since the last checkpoint and costs a restart
    of r seconds, in which the job may fail again. The time between two checkpoints renews itself,
    and its expectation is exactly

        E(t) = M exp(r/M) (exp((t+c)/M) - 1)

    of which a share t / E(t), the goodput, is training that counts. It is largest where
    (1 - t/M) exp((t+c)/M) = 1. Sources: Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", FGCS 22 (2006), equations 13 and 37; Young, CACM 17 (1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class FailureModel:
    """How often a job fails, and what a checkpoint and a restart cost.

    Attributes:
        mean_s: seconds between two failures of the job, on average.
        checkpoint_s: in which no step runs for a checkpoint.
        restart_s: from a failure to the first step: detection, start of the ranks, loading.
    """

    mean_s: float
    checkpoint_s: float
    restart_s: float

    @staticmethod
    def of_devices(
        num_devices: int, *, mtbf_hours: float, checkpoint_s: float, restart_s: float
    ) -> FailureModel:
        """A job that fails when one of its devices does.

        Args:
            mtbf_hours: mean time between failures of one device with its share of the machine.
        """
        return FailureModel(mtbf_hours * HOUR_S / num_devices, checkpoint_s, restart_s)

    def expected_s(self, interval_s: float) -> float:
        """Seconds from one checkpoint to the next on average, for `interval_s` of training; see
        Note [Renewal]. Infinite where the job can practically never get there.
        """
        mean = self.mean_s
        try:
            segments = math.expm1((interval_s + self.checkpoint_s) / mean)
            return mean * math.exp(self.restart_s / mean) * segments
        except OverflowError:
            return math.inf

    def goodput(self, interval_s: float) -> float:
        """Share of all time that is training which counts."""
        return interval_s / self.expected_s(interval_s)

    @property
    def best_s(self) -> float:
        """The interval of the largest goodput, by bisection of the equation in Note [Renewal]; 0
        if a checkpoint costs nothing.
        """
        cost = self.checkpoint_s / self.mean_s
        if cost == 0.0:
            return 0.0
        low, high = 0.0, math.nextafter(1.0, 0.0)
        for _ in range(100):
            middle = (low + high) / 2
            is_below = math.log1p(-middle) + middle + cost > 0
            low, high = (middle, high) if is_below else (low, middle)
        return low * self.mean_s


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run with failures goes.

    Attributes:
        model: what it was computed from.
        interval_steps: steps between two checkpoints.
        interval_s: their seconds.
        goodput: share of training that counts; with the next three it is 1.
        checkpoints: share of checkpoints.
        lost: share of work that failures undid.
        restarts: share of restarts.
    """

    model: FailureModel
    interval_steps: int
    interval_s: float
    goodput: float
    checkpoints: float
    lost: float
    restarts: float

    @property
    def failures_a_day(self) -> float:
        """Failures of the job a day, those during restarts too."""
        return DAY_S / self.model.mean_s


def goodput_at(model: FailureModel, *, step_s: float, interval_steps: int) -> Goodput:
    """The account of a run with a checkpoint every `interval_steps` steps."""
    interval_s = interval_steps * step_s
    expected = model.expected_s(interval_s)
    if math.isinf(expected):
        return Goodput(
            model=model,
            interval_steps=interval_steps,
            interval_s=interval_s,
            goodput=0.0,
            checkpoints=0.0,
            lost=0.0,
            restarts=1.0,
        )
    failures = math.expm1((interval_s + model.checkpoint_s) / model.mean_s)
    restarts = failures * model.mean_s * math.expm1(model.restart_s / model.mean_s)
    lost = expected - restarts - interval_s - model.checkpoint_s
    return Goodput(
        model=model,
        interval_steps=interval_steps,
        interval_s=interval_s,
        goodput=interval_s / expected,
        checkpoints=model.checkpoint_s / expected,
        lost=max(0.0, lost / expected),
        restarts=restarts / expected,
    )


def best_goodput(model: FailureModel, *, step_s: float) -> Goodput:
    """The account at the best whole number of steps between checkpoints."""
    steps = model.best_s / step_s
    fewer = max(1, math.floor(steps))
    more = max(1, math.ceil(steps))
    accounts = []
    for count in (fewer, more):
        account = goodput_at(model, step_s=step_s, interval_steps=count)
        accounts.append(account)
    return max(accounts, key=lambda account: account.goodput)
