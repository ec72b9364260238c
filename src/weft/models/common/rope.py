"""Rotary position embedding (RoFormer, Su et al. 2021) with linear scaling of frequencies and those of LLaMA 3.1 and YaRN.

See Note [Rotary layout] at the end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from weft.core.rope_scaling import RopeScaling


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths: a model trained on `original_context` tokens reads `factor` times
    as many.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    gain: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Wavelengths under context/high stay, those over context/low grow by `factor`, a ramp lies
        between.
        """
        wavelengths = 2 * math.pi / frequencies
        num_turns = self.original_context / wavelengths
        ramp_width = self.high_freq_factor - self.low_freq_factor
        ramp = (num_turns - self.low_freq_factor) / ramp_width
        keep = ramp.clamp(0.0, 1.0)
        stretched = (1 - keep) * frequencies / self.factor
        return stretched + keep * frequencies


@dataclass(frozen=True)
class LinearScaling:
    """Slows all features down by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float
    gain: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Radians per token after scaling."""
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Stretches slow features: a model trained on `original_context` tokens reads `factor` times as
    many.

    Features that turn `beta_fast` times or more within the original context stay, those that turn
    `beta_slow` times or less slow down by `factor`, a ramp lies between. Scores are to be
    multiplied by `sharpness`.
    Source: Peng et al. 2023 (YaRN), with the two mscales of DeepSeek-V2 and V3.

    Attributes:
        cosine_gain: factor of cosine and sine; None: it follows from the mscales.
        truncate: whether the ramp begins and ends at whole features.
    """

    factor: float
    theta: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    cosine_gain: float | None = None
    truncate: bool = True

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Radians per token after scaling."""
        num = len(frequencies)
        last_fast = self._feature_index(self.beta_fast, num)
        first_slow = self._feature_index(self.beta_slow, num)
        if self.truncate:
            last_fast, first_slow = math.floor(last_fast), math.ceil(first_slow)
        low = max(last_fast, 0)
        high = min(first_slow, 2 * num - 1)
        ramp_width = high - low or 0.001
        device = frequencies.device
        indices = torch.arange(num, dtype=torch.float32, device=device)
        ramp = (indices - low) / ramp_width
        keep = 1 - ramp.clamp(0.0, 1.0)
        unscaled = periods(2 * num, theta=self.theta, device=device)
        stretched = 1.0 / (self.factor * unscaled)
        return stretched * (1 - keep) + frequencies * keep

    @property
    def gain(self) -> float:
        """Factor of cosine and sine."""
        if self.cosine_gain is not None:
            return self.cosine_gain
        of_rotated_part = self._temperature(self.mscale)
        of_all_scores = self._temperature(self.mscale_all_dim)
        return of_rotated_part / of_all_scores

    @property
    def sharpness(self) -> float:
        """Factor of the attention scores: compensates the growth of entropy with the context."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _feature_index(self, num_turns: float, num: int) -> float:
        """Index, as a real number, of the feature that turns so often within the original context."""
        wavelength = self.original_context / (num_turns * 2 * math.pi)
        log_wavelength = math.log(wavelength)
        log_theta = math.log(self.theta)
        return 2 * num * log_wavelength / (2 * log_theta)

    def _temperature(self, mscale: float) -> float:
        if self.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0


Scaling = Llama3Scaling | LinearScaling | YarnScaling


def scaling_of(text: str | None, *, theta: float) -> Scaling | None:
    """The scaling that a config names; None where it names none, or one that only begins beyond the
    context of the model, which its config rejects.
    """
    if text is None:
        return None
    named = RopeScaling.parse(text)
    match named.kind:
        case "linear":
            return LinearScaling(named.factor)
        case "llama3":
            return Llama3Scaling(named.factor, named.low, named.high, named.original)
        case "yarn":
            return YarnScaling(
                named.factor,
                theta=theta,
                original_context=named.original,
                beta_fast=named.fast,
                beta_slow=named.slow,
                cosine_gain=named.cosine_gain,
                truncate=named.truncate,
            )
        case _:
            return None


Angles = tuple[Tensor, Tensor]
"""Cosines and sines, [B, S, 1, K/2]."""


@dataclass(frozen=True)
class _KeptAngles:
    """Angles of a positions tensor, which is not kept alive, at one version of its values."""

    positions: weakref.ref[Tensor]
    version: tuple[int, bool]
    angles: Angles


class SharedAngles:
    """The angles that layers of one model share: of each kind of `Rope` those of the positions that
    were asked for last. They are dropped with that positions tensor, which a micro-batch holds.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _KeptAngles] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: object) -> SharedAngles:
        return SharedAngles()

    def __reduce__(self) -> tuple[type[SharedAngles], tuple[()]]:
        return SharedAngles, ()

    def of(self, positions: Tensor, kind: Hashable, compute: Callable[[Tensor], Angles]) -> Angles:
        """The angles of these positions: those that are kept, or `compute(positions)`."""
        version = (
            0 if positions.is_inference() else positions._version,
            torch.is_inference_mode_enabled(),  # its results cannot be saved for a backward
        )
        kept = self._kept.get(kind)
        # the same object and version: equal numbers in another tensor are not looked for, which would wait for a device
        if kept is not None and kept.positions() is positions and kept.version == version:
            return kept.angles
        angles = compute(positions)
        # An entry that is replaced takes its reference along, which then calls nothing. A method of
        # dict is no Python code, in which a Ctrl-C would be printed as an ignored exception.
        drop = partial(self._kept.pop, kind)
        self._kept[kind] = _KeptAngles(weakref.ref(positions, drop), version, angles)
        return angles


def share_angles(blocks: Iterable[nn.Module]) -> None:
    """Let all layers that rotate alike compute their angles once a micro-batch."""
    shared = SharedAngles()
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Rope):
                module.shared = shared


@contextmanager
def given_angles(ropes: Sequence[Rope], positions_BS: Tensor) -> Iterator[None]:
    """Inside the block, compiled code gets the angles of these positions. It computes none itself: its
    cosines are rounded otherwise, and each layer would compute its own.
    """
    for rope in ropes:
        rope.given = positions_BS, rope(positions_BS)
    try:
        yield
    finally:
        for rope in ropes:
            rope.given = None


class Rope(nn.Module):
    """Rotates queries and keys by angles that grow with the position; holds no tensor, see Note
    [Rotary layout].

    Attributes:
        shared: angles that other layers may have computed; None: each call computes them.
        given: angles for compiled code, and the positions that they are of; see `given_angles`.
    """

    def __init__(self, head_size: int, *, theta: float, scaling: Scaling | None = None) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta
        self.scaling = scaling
        self.shared: SharedAngles | None = None
        self.given: tuple[Tensor, Angles] | None = None

    def forward(self, positions_BS: Tensor) -> Angles:
        """Cosine and sine of each token's angles, [B, S, 1, K/2], float32 under every precision
        policy.
        """
        if torch.compiler.is_dynamo_compiling():  # compiled code keeps no state
            if self.given is not None and self.given[0] is positions_BS:
                return self.given[1]
            return self._angles(positions_BS)
        if self.shared is None:
            return self._angles(positions_BS)
        kind = (type(self), self.head_size, self.theta, self.scaling)
        return self.shared.of(positions_BS, kind, self._angles)

    def _angles(self, positions_BS: Tensor) -> Angles:
        # exact up to 2^24 positions
        positions_BS11 = positions_BS[..., None, None].float()
        frequencies = self.frequencies(positions_BS.device)
        angles = positions_BS11 * frequencies
        gain = self.scaling.gain if self.scaling else 1.0
        cos = angles.cos() * gain
        sin = angles.sin() * gain
        return cos, sin

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair of features, [K/2] float32, from the fastest to the
        slowest.
        """
        frequencies = 1.0 / periods(self.head_size, theta=self.theta, device=device)
        if self.scaling is None:
            return frequencies
        return self.scaling(frequencies)


def periods(head_size: int, *, theta: float, device: torch.device) -> Tensor:
    """Tokens per radian of each pair of features, unscaled, [K/2] float32."""
    even_features = torch.arange(0, head_size, 2, device=device)
    exponents = even_features.float() / head_size
    return theta**exponents


def rotate(
    x_BSHK: Tensor, turn: Angles, *, pairs: Literal["halves", "neighbours"] = "halves"
) -> Tensor:
    """`x` with each pair of features turned; computed in float32 at least.

    Pairs are (i, i + K/2), or (2i, 2i + 1) among "neighbours", which come out as halves too:
    queries and keys alike, so that their products are the same.
    """
    cos, sin = turn
    if pairs == "halves":
        left, right = x_BSHK.chunk(2, dim=-1)
    else:
        left = x_BSHK[..., 0::2]
        right = x_BSHK[..., 1::2]
    new_left = left * cos - right * sin
    new_right = right * cos + left * sin
    rotated = torch.cat((new_left, new_right), dim=-1)
    return rotated.to(x_BSHK.dtype)


# Note [Rotary layout]
# Feature i is paired with feature i + K/2, as in Hugging Face's weights; Meta's own files pair 2i with 2i + 1, which is
# the same model with the rows of q and k permuted within each head. DeepSeek's weights pair 2i with 2i + 1, here and in
# Hugging Face's files: only there the pairs are "neighbours". Frequencies and angles are float32 even in a
# float64 model: so do Meta and Hugging Face, and so a model is the same function under every precision. They are
# computed where they are used (K/2 numbers): a table in a buffer would be cast by `.to(bfloat16)` and left empty by
# `to_empty`.
