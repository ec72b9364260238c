"""Scaling of rotary frequencies as one text: `yarn factor=4 original=32768`. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

Kind = Literal["linear", "dynamic", "yarn", "llama3"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are scaled; what a kind does not read has its default.

    linear     all frequencies are divided by `factor` (Chen et al. 2023, position interpolation)
    dynamic    as linear with other numbers beyond the context of the model, and unscaled within it
    yarn       slow features are slowed down by `factor` (Peng et al. 2023)
    llama3     long wavelengths grow by `factor` (Grattafiori et al. 2024)

    Attributes:
        original: tokens of the context before scaling.
        low, high: of llama3: waves over original / low are long, those under original / high stay.
        fast, slow: of yarn: features that turn so often in that context stay, or are scaled.
        gain: of yarn: factor of cosine and sine; None: 0.1 ln(factor) + 1.
        truncate: of yarn: whether its ramp begins and ends at whole features.
    """

    kind: Kind
    factor: float
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    gain: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of scaling; need {', '.join(KINDS)}")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor {self.factor} is not above 0")
        if self.kind in ("yarn", "llama3") and self.original < 1:
            raise ValueError(f"{self.kind} needs original, the context before scaling in tokens")
        if self.high <= self.low or self.fast <= self.slow or min(self.low, self.slow) <= 0:
            raise ValueError("high is not above low, or fast not above slow, or one is not above 0")

    @property
    def cosine_gain(self) -> float:
        """Factor of cosine and sine."""
        if self.gain is not None or self.kind != "yarn" or self.factor <= 1:
            return 1.0 if self.gain is None else self.gain
        return 0.1 * math.log(self.factor) + 1.0

    @staticmethod
    def parse(text: str) -> RopeScaling:
        """Read `KIND name=value ...`.

        Raises:
            ValueError: it is none.
        """
        kind, *words = text.split() or [""]
        values: dict[str, object] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name not in _READERS:
                raise ValueError(f"{word!r} is no setting; need {', '.join(_READERS)}")
            values[name] = _READERS[name](value)
        if "factor" not in values:
            raise ValueError(f"{text!r} has no factor, as in 'linear factor=4'")
        return RopeScaling(kind, **values)  # type: ignore[arg-type]  # checked by its class

    @property
    def text(self) -> str:
        """What `parse` reads, without defaults."""
        words = [self.kind, f"factor={self.factor!r}"]
        for each in fields(self)[2:]:
            value = getattr(self, each.name)
            if value != each.default:
                words.append(f"{each.name}={str(value).lower()}")
        return " ".join(words)


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


_READERS: Mapping[str, Callable[[str], object]] = {
    "factor": float,
    "original": int,
    "low": float,
    "high": float,
    "fast": float,
    "slow": float,
    "gain": float,
    "truncate": _read_bool,
}
