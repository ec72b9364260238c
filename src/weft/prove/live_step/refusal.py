"""Why a step is not used: what differs first, on which ranks, and the command that shows every tensor."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Protocol

from weft.comm.comm import Comm
from weft.comm.text import all_gather_text
from weft.core.dimension import local_update_axes
from weft.core.mesh import Mesh
from weft.errors import counted
from weft.prove.live_step.compared_numbers import LiveDifference
from weft.prove.report import Difference


class Kept(Protocol):
    """What a rank knows of its own gradients or updates."""

    @property
    def kept(self) -> Container[str]:
        """Parameters that are wrong on this rank."""

    def relation_of(self, owner: str) -> str:
        """How this rank's entries of one relate to the right ones; "" where that is not known."""


def refusal(
    comm: Comm,
    number: int,
    differences: Sequence[LiveDifference],
    own: Kept,
    *,
    outcome: str,
    repeat: str,
) -> str:
    """The message, equal on all ranks; every rank of the mesh must call it, also one of a site whose
    own numbers are right.

    Args:
        number: of the step.
        own: of what the first difference is about.
        outcome: what has become of the step.
        repeat: the command that compares the step tensor by tensor.
    """
    first = differences[0] if differences else None
    local = {"relation": "", "is_wrong": False}
    if first is not None and first.phase in ("reduce", "update") and first.parameter in own.kept:
        local = {"relation": own.relation_of(first.parameter), "is_wrong": True}
    found = [json.loads(text) for text in all_gather_text(comm, json.dumps(local))]
    text = ""
    if first is not None:
        wrong = tuple(rank for rank, each in enumerate(found) if each["is_wrong"])
        relations = [each["relation"] for each in found if each["relation"]]
        difference = _difference(number, first, mesh=comm.mesh, wrong=wrong, relations=relations)
        text = f"step {number} is not what one device computes: {difference}"
        num_others = len(differences) - 1
        if num_others:
            text += f"; {counted(num_others, 'more number')} after it differ"
    of_first_wrong_replica = next(filter(None, all_gather_text(comm, text)))
    return (
        f"{of_first_wrong_replica}. {outcome}. See {repeat} "
        "(to train all the same: --prove.before never)"
    )


def _difference(
    number: int,
    first: LiveDifference,
    *,
    mesh: Mesh,
    wrong: Sequence[int],
    relations: Sequence[str],
) -> Difference:
    """The first difference with its ranks, and its relation on the first of them."""
    return Difference(
        tensor=first.tensor,
        block=first.block,
        parameter=first.parameter,
        phase=first.phase,
        step=number,
        micro_batch=None,
        axis=_axis_of(mesh, wrong),
        ranks=tuple(wrong) or tuple(range(mesh.size)),
        collective="",
        relation=relations[0] if relations else first.relation,
        measured=first.measured,
        bound=first.bound,
    )


def _axis_of(mesh: Mesh, wrong: Sequence[int]) -> str:
    """The mesh axis along which some ranks are wrong and others are not, inside a site if there is
    one; "": there is none.
    """
    for axis in sorted(mesh.wide_axes, key=local_update_axes().__contains__):
        for rank in wrong:
            if not set(wrong).issuperset(mesh.group(rank, axis)):
                return axis
    return ""
