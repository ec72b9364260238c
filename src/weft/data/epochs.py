"""How often a run reads its data: epochs of every source, and the step in which the second one begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.data.dataset import open_data
from weft.data.samples import MixtureSamples, Samples
from weft.errors import DataError, first_line


@dataclass(frozen=True)
class SourceEpochs:
    """How often a run reads a source.

    Attributes:
        num_samples: in the source.
        num_read: samples of it that all steps read.
    """

    source: str
    num_samples: int
    num_read: float

    @property
    def epochs(self) -> float:
        """Times that the source is read."""
        return self.num_read / self.num_samples

    def note(self, num_steps: int) -> str:
        """What a run of `num_steps` repeats."""
        step = int(num_steps / self.epochs) + 1
        return (
            f"{self.source} is read {self.epochs:.3g} times: {self.num_samples:,} samples, of which step "
            f"{step:,} of {num_steps:,} begins the second epoch"
        )


def source_epochs(samples: Samples, *, num_read: int) -> Iterator[SourceEpochs]:
    """The epochs of each source of a run that reads so many samples."""
    parts: tuple[Samples, ...] = (samples,)
    shares: tuple[float, ...] = (1.0,)
    if isinstance(samples, MixtureSamples):
        parts, shares = samples.parts, samples.sampler.shares
    for part, share in zip(parts, shares, strict=True):
        source = str(part.facts()["source"])
        yield SourceEpochs(source, part.num_samples, share * num_read)


@dataclass(frozen=True)
class DataSummary:
    """What `weft explain` says of a run's data.

    Attributes:
        tokens: of all sources; 0 of images.
        opened_s: measured, with all that is tokenized at a start.
    """

    tokens: int
    epochs: tuple[SourceEpochs, ...]
    opened_s: float
    problem: str = ""

    @staticmethod
    def of(data: DataConfig, model: ModelConfig, *, num_read: int) -> DataSummary:
        """Open the data of a run that reads so many samples."""
        start_s = time.perf_counter()
        try:
            samples = open_data(data, model)
        except DataError as error:
            return DataSummary(0, (), 0.0, problem=first_line(error))
        opened_s = time.perf_counter() - start_s
        tokens = int(str(samples.facts().get("tokens", 0)))
        return DataSummary(tokens, tuple(source_epochs(samples, num_read=num_read)), opened_s)

    @property
    def text(self) -> str:
        """Lines for a reader."""
        if self.problem:
            return f"data: cannot be opened: {self.problem}"
        num_samples = sum(each.num_samples for each in self.epochs)
        size = f"{num_samples:,} samples"
        if self.tokens:
            size = f"{self.tokens:,} tokens in {size}"
        lines = [f"data: {size}"]
        for each in self.epochs:
            of_source = f" of {each.source}" if len(self.epochs) > 1 else ""
            lines.append(f"  the run reads {each.epochs:.2g} epochs{of_source}")
        lines.append(f"  opened and tokenized in {self.opened_s:.2g} s (measured)")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)
