"""Tables by the heuristic of Zero Bubble (arXiv 2401.10241, section 3.1), with one memory limit for all ranks.

    forwards as early as the limit allows until the first gradient comes back, then one forward and one input gradient in turn;
    a weight gradient where a rank would wait as long as it takes, and where the next forward would exceed the limit

Weight gradients are put off until the limit is reached: then every rank holds nearly as much as it allows, where the handcrafted
H1 and H2 hold less the later the stage.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from weft.schedule.actions import Act, Table

NEVER = float("inf")
ROUNDING = 1e-9


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of a stage.

    Attributes:
        input_grad, weight_grad, message: times, where a forward takes 1.
        kept: share of an activation that is held from the input gradient to the weight gradient.
    """

    input_grad: float = 1.0
    weight_grad: float = 0.6
    message: float = 0.03
    kept: float = 0.5


@dataclass
class Rank:
    """What a rank has run, holds and has received.

    Attributes:
        held: in activations of one micro-batch.
        forwards, gradients: times at which inputs of the next ones arrive, oldest first.
    """

    free_at: float = 0.0
    held: float = 0.0
    row: list[Act] = field(default_factory=list)
    forwards: deque[float] = field(default_factory=deque)
    gradients: deque[float] = field(default_factory=deque)
    num_forwards: int = 0
    num_input_grads: int = 0
    num_weight_grads: int = 0

    @property
    def num_pending(self) -> int:
        """Weight gradients that could run."""
        return self.num_input_grads - self.num_weight_grads


def limited_table(ranks: int, microbatches: int, *, limit: float, costs: Costs) -> Table:
    """A table in which no rank holds more than `limit` activations.

    Args:
        limit: in activations of one micro-batch; at least 1.
    """
    state = [Rank() for _ in range(ranks)]
    state[0].forwards.extend([0.0] * microbatches)
    for _ in range(3 * ranks * microbatches):
        choices = [_next(rank, limit, costs) for rank in state]
        start, kind, number = min((*choice, number) for number, choice in enumerate(choices))
        _run(state, number, kind, start, costs)
    rows = [rank.row for rank in state]
    return Table.of_rows(rows, stage_to_rank=range(ranks), microbatches=microbatches)


def _next(rank: Rank, limit: float, costs: Costs) -> tuple[float, str]:
    """When a rank starts its next action, and its kind; NEVER if its inputs are not known yet."""
    gradient = max(rank.free_at, rank.gradients[0]) if rank.gradients else NEVER
    forward = max(rank.free_at, rank.forwards[0]) if rank.forwards else NEVER
    has_room = rank.held + 1 <= limit + ROUNDING
    is_turn_of_forward = bool(rank.row) and rank.row[-1].kind != "F"
    if is_turn_of_forward and forward < NEVER and not has_room and rank.num_pending:
        return rank.free_at, "W"
    if not has_room:
        forward = NEVER
    kind = "F" if forward < gradient or (forward == gradient and is_turn_of_forward) else "I"
    start = min(forward, gradient)
    if rank.num_pending and start >= rank.free_at + costs.weight_grad:
        return rank.free_at, "W"
    return start, kind


def _run(state: list[Rank], number: int, kind: str, start: float, costs: Costs) -> None:
    """Run an action, and deliver its tensor."""
    rank = state[number]
    if kind == "F":
        end = start + 1.0
        rank.row.append(Act("F", number, rank.num_forwards))
        rank.num_forwards += 1
        rank.held += 1
        rank.forwards.popleft()
        if number + 1 < len(state):
            state[number + 1].forwards.append(end + costs.message)
        else:
            rank.gradients.append(end)
    elif kind == "I":
        end = start + costs.input_grad
        rank.row.append(Act("I", number, rank.num_input_grads))
        rank.num_input_grads += 1
        rank.held -= 1 - costs.kept
        rank.gradients.popleft()
        if number:
            state[number - 1].gradients.append(end + costs.message)
    else:
        end = start + costs.weight_grad
        rank.row.append(Act("W", number, rank.num_weight_grads))
        rank.num_weight_grads += 1
        rank.held -= costs.kept
    rank.free_at = end
