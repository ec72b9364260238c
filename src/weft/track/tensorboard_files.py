"""TensorBoard: event files under RUN/tensorboard, shown by `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.track.tracker import TrackedRun

FOLDER = "tensorboard"


class TensorBoardFiles:
    """Writes through torch's SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, kind: str, text: str) -> None:
        """A text, as it is: TensorBoard would read it as Markdown otherwise."""
        self._writer.add_text(kind, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def close(self, status: str) -> None:
        """Write what is pending."""
        self._writer.close()


def open_tracker(run: TrackedRun, *, first_step: int) -> TensorBoardFiles:
    """A new event file; TensorBoard leaves out what earlier ones hold of `first_step` and later."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.folder / FOLDER), purge_step=first_step)
    if first_step == 1:
        lines = (f"    {key} = {value!r}" for key, value in run.config.items())
        writer.add_text("config", "\n".join(lines), 0)
    return TensorBoardFiles(writer)
