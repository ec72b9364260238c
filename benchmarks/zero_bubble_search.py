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

    def start_of(self, arrivals: deque[float]) -> float:
        """When the next action with one of these inputs can start."""
        if not arrivals:
            return NEVER
        return max(self.free_at, arrivals[0])


@dataclass(frozen=True, order=True)
class Choice:
    """When a rank starts its next action, and the action's kind; compared by time."""

    start: float
    kind: str
    rank: int


def limited_table(
    ranks: int,
    microbatches: int,
    *,
    limit: float,
    costs: Costs,
) -> Table:
    """A table in which no rank holds more than `limit` activations.

    Args:
        limit: in activations of one micro-batch; at least 1.
    """
    state = [Rank() for _ in range(ranks)]
    state[0].forwards.extend([0.0] * microbatches)
    num_actions = 3 * ranks * microbatches
    for _ in range(num_actions):
        choices = []
        for number, rank in enumerate(state):
            choice = _next(
                rank,
                number,
                limit,
                costs,
            )
            choices.append(choice)
        _run(state, min(choices), costs)
    return Table.of_rows(
        [rank.row for rank in state],
        stage_to_rank=range(ranks),
        microbatches=microbatches,
    )


def _next(
    rank: Rank,
    number: int,
    limit: float,
    costs: Costs,
) -> Choice:
    """The next action of a rank; its start is NEVER if its inputs are not known yet."""
    gradient = rank.start_of(rank.gradients)
    forward = rank.start_of(rank.forwards)
    weight_grad = Choice(rank.free_at, "W", number)
    has_room = rank.held + 1 <= limit + ROUNDING
    is_turn_of_forward = bool(rank.row) and rank.row[-1].kind != "F"
    if not has_room:
        waits_for_room = is_turn_of_forward and forward < NEVER
        if waits_for_room and rank.num_pending:
            return weight_grad
        forward = NEVER
    is_tie = forward == gradient
    runs_forward = forward < gradient or (is_tie and is_turn_of_forward)
    start = min(forward, gradient)
    fits_before = start >= rank.free_at + costs.weight_grad
    if rank.num_pending and fits_before:
        return weight_grad
    return Choice(start, "F" if runs_forward else "I", number)


def _run(
    state: list[Rank],
    choice: Choice,
    costs: Costs,
) -> None:
    """Run an action, and deliver its tensor."""
    number = choice.rank
    rank = state[number]
    start = choice.start
    if choice.kind == "F":
        end = start + 1.0
        act = Act("F", number, rank.num_forwards)
        rank.row.append(act)
        rank.num_forwards += 1
        rank.held += 1
        rank.forwards.popleft()
        is_last = number + 1 == len(state)
        if is_last:
            rank.gradients.append(end)
        else:
            behind = state[number + 1]
            behind.forwards.append(end + costs.message)
    elif choice.kind == "I":
        end = start + costs.input_grad
        rank.row.append(Act("I", number, rank.num_input_grads))
        rank.num_input_grads += 1
        rank.held -= 1 - costs.kept
        rank.gradients.popleft()
        if number:
            before = state[number - 1]
            before.gradients.append(end + costs.message)
    else:
        end = start + costs.weight_grad
        rank.row.append(Act("W", number, rank.num_weight_grads))
        rank.num_weight_grads += 1
        rank.held -= costs.kept
    rank.free_at = end
