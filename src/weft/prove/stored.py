"""The tensors of a checkpoint, read whole as a layout of one device would read them, for comparison with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from weft.checkpoint.quantized import NF4_SECTIONS
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.saver import newest_path
from weft.checkpoint.state import MODEL
from weft.core.axes import Box
from weft.parallel.zero.state_codes import ABSMAX
from weft.prove.places import Whole
from weft.prove.plain_codes import decoded
from weft.prove.record import Observed, RankRecord, Site

SUFFIX = " as stored"
"""Ends the name of a tensor that was read whole."""


def record_stored(record: RankRecord, run_folder: Path, step: int) -> None:
    """Record all tensors of the newest checkpoint, which was saved after `step`. A fault in writing
    that the same ranks undo when they read is a difference here.
    """
    for owner, name, tensor in stored_tensors(run_folder):
        site = Site.of_parameter(step, "checkpoint", owner, f"{name}{SUFFIX}")
        record.values[site] = Observed(tensor, Whole(), None)


def stored_tensors(run_folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Parameter, name of the tensor, and the whole tensor, of the newest checkpoint."""
    path = newest_path(run_folder)
    assert path is not None, "the run has saved"
    checkpoint = open_checkpoint(path)
    stored = checkpoint.sections
    for section_name in stored:
        # the model is read from the first, and moments from the others, with their codes
        if section_name in NF4_SECTIONS or section_name.endswith(ABSMAX):
            continue
        section = checkpoint.section(section_name)
        key = section_name.partition("/")[2]
        for owner, shape in section.shapes.items():
            name = owner if section_name == MODEL else f"{owner} {key}"
            values = section.read(owner, Box.whole(shape))
            largest_name = section_name + ABSMAX
            if largest_name in stored and owner in checkpoint.section(largest_name).shapes:
                of_blocks = checkpoint.section(largest_name)
                largest = of_blocks.read(owner, Box.whole(of_blocks.shapes[owner]))
                length = checkpoint.manifest.facts.run["optim"]["state_block"]
                # By the definition of the codes: the code that training reads with could undo
                # what it has written wrongly.
                values = decoded(values, largest, length)
            yield owner, name, values
