"""Times of the actions of a schedule: forward, input gradient, weight gradient and message, read from words like `F=1 B=2`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from weft.errors import Fault, ScheduleError
from weft.schedule.actions import Act, Kind

KEY = "costs"
Times = tuple[Fraction, ...]

_WORD = re.compile(r"([FBIW])=([\d.,]+)")
_NUMBER = re.compile(r"\d{1,6}(\.\d{1,6})?|\.\d{1,6}")


@dataclass(frozen=True)
class ScheduleCosts:
    """Times of a micro-batch. Each is one number, the time of a rank's whole share of the model, or
    one number for each stage.

    Attributes:
        forward: F.
        input_grad: I, the backward without weight gradients.
        weight_grad: W; a whole backward takes I + W.
        message: from the end of an action to its arrival at another rank.
    """

    forward: Times = (Fraction(1),)
    input_grad: Times = (Fraction(1),)
    weight_grad: Times = (Fraction(1),)
    message: Fraction = Fraction(0)

    @staticmethod
    def parse(words: Sequence[str], *, message: str = "0") -> ScheduleCosts:
        """Read `F=1 B=2` (a whole backward, halved into I and W), `F=1 I=1 W=1`, or `F=1 B=1 W=1`
        (the letters of the Zero Bubble paper, whose B is I). `F=1,1,2,1` has one number a stage.

        Raises:
            ScheduleError: with the word that cannot be read.
        """
        times: dict[str, Times] = {}
        for word in words:
            match = _WORD.fullmatch(word)
            if match is None or match[1] in times:
                raise _unreadable(word)
            letter, numbers = match.groups()
            times_of_stages = [_time(number, word) for number in numbers.split(",")]
            times[letter] = tuple(times_of_stages)
        hop = _time(message, message, key="message", may_be_zero=True)
        letters = "".join(sorted(times))
        if not letters:
            return ScheduleCosts(message=hop)
        if letters == "BF":
            half = tuple(time / 2 for time in times["B"])
            return ScheduleCosts(times["F"], half, half, hop)
        if letters == "FIW":
            return ScheduleCosts(times["F"], times["I"], times["W"], hop)
        if letters == "BFW":
            return ScheduleCosts(times["F"], times["B"], times["W"], hop)
        raise _unreadable(" ".join(words))

    def of_stages(self, *, num_stages: int, chunks: int) -> StageCosts:
        """The times of every stage of a table whose ranks own `chunks` stages each.

        Raises:
            ScheduleError: times for another number of stages.
        """
        return StageCosts(
            forward=_of_stages(self.forward, num_stages, chunks),
            input_grad=_of_stages(self.input_grad, num_stages, chunks),
            weight_grad=_of_stages(self.weight_grad, num_stages, chunks),
            message=self.message,
        )

    @property
    def text(self) -> str:
        """The costs in words, with the unit."""
        forward = _shown(self.forward)
        input_grad = _shown(self.input_grad)
        weight_grad = _shown(self.weight_grad)
        backward = f"{input_grad} input gradient, {weight_grad} weights"
        message = float(self.message)
        return f"forward {forward}, backward {backward}, message {message:g}"


@dataclass(frozen=True)
class StageCosts:
    """Times of the actions of every stage, and of a message."""

    forward: Times
    input_grad: Times
    weight_grad: Times
    message: Fraction

    def cost(self, act: Act) -> Fraction:
        """Time of one action; exact."""
        return self.of_kind(act.kind, act.stage)

    def of_kind(self, kind: Kind, stage: int) -> Fraction:
        """Time of an action of this kind on this stage."""
        if kind == "B":
            return self.input_grad[stage] + self.weight_grad[stage]
        times: Mapping[Kind, Times] = {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }
        return times[kind][stage]

    def work(self, stages: Sequence[int]) -> Fraction:
        """Time of one micro-batch through these stages, forward and backward."""
        total = Fraction(0)
        for stage in stages:
            total += self.of_kind("F", stage) + self.of_kind("B", stage)
        return total


def _of_stages(times: Times, num_stages: int, chunks: int) -> Times:
    if len(times) == 1:
        (of_rank,) = times
        of_chunk = of_rank / chunks
        return (of_chunk,) * num_stages
    if len(times) == num_stages:
        return times
    fault = Fault(
        KEY,
        "another number of stages",
        got=f"{len(times)} times",
        need=f"1, or {num_stages}: one a stage",
    )
    raise ScheduleError(fault)


def _time(text: str, word: str, *, key: str = KEY, may_be_zero: bool = False) -> Fraction:
    if _NUMBER.fullmatch(text) is None:
        raise _unreadable(word, key)
    time = Fraction(text)
    if time == 0 and not may_be_zero:
        raise ScheduleError(Fault(key, "a time of 0", got=word, need="above 0"))
    return time


def _unreadable(word: str, key: str = KEY) -> ScheduleError:
    need = "F=1 B=2, F=1 I=1 W=1, or one number a stage: F=1,1,2,1 ..."
    if key != KEY:
        need = "a number, at least 0, with at most 6 digits before and after the point"
    return ScheduleError(Fault(key, "cannot read", got=repr(word), need=need))


def _shown(times: Times) -> str:
    return ",".join(f"{float(time):g}" for time in times)
