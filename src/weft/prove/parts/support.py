"""Which parts of a run can be proved, and what to change where one cannot. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.config.hf.write_config import unwritable
from weft.config.schema import ModelSection
from weft.core.axes import local_update_axis
from weft.core.mesh import Mesh
from weft.errors import Fault
from weft.models import FAMILIES
from weft.prove.parts.names import Part

MIN_STEPS = 2
"""Of a run that is stopped and continued."""
KEY = "--what"


def part_faults(part: Part, model: ModelSection, *, mesh: Mesh, steps: int) -> Iterator[Fault]:
    """Why a part of a run cannot be proved, if it cannot.

    Args:
        steps: that are compared.
    """
    if part == "resume" and steps < MIN_STEPS:
        yield Fault(
            "--first",
            "a run that stops and goes on has steps on either side",
            got=str(steps),
            need=f"{MIN_STEPS} or more",
            fix=f"--first {MIN_STEPS}",
        )
    if part in ("generate", "dpo") and model.kind != "tokens":
        yield Fault(
            "model.name",
            f"{model.name} is no language model, so there is nothing for {KEY} {part}",
            got=model.name,
            need="a model of tokens",
            fix=f"leave {part} out: {KEY} resume",
        )
    if part == "export":
        for fault in unwritable(model, FAMILIES):
            yield replace(fault, fix=fault.fix or f"leave export out: {KEY} resume")
    if part == "sites" and local_update_axis(mesh) is None:
        yield Fault(
            "mesh",
            "has no sites, whose outer steps could be proved",
            got=mesh.text or "one rank",
            need="an axis site",
            fix=f'--mesh "site2 dp2", or leave sites out: {KEY} resume',
        )


def is_of_run(part: Part, model: ModelSection, *, mesh: Mesh, loss: str) -> bool:
    """Whether a run has this part: preference pairs are of a run whose loss reads them."""
    if part == "dpo" and loss != "dpo":
        return False
    return not any(part_faults(part, model, mesh=mesh, steps=MIN_STEPS))
