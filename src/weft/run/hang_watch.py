"""Watching local ranks: reads their status board ten times a second, and the states of ranks without progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from weft.core.mesh import Mesh
from weft.run.failure import NO_LOCATION_KINDS, RankFailure
from weft.run.hang import ENDED, Hang, HangDetector
from weft.run.process_state import ProcessState
from weft.run.rank_status import RankSnapshot, StatusBoard

CHECK_S = 0.1
"""Between two looks at the status board."""
STACK_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


class HangWatch:
    """Applies the rule of `weft.run.hang` to the ranks of one board.

    Args:
        board: one slot a rank.
        mesh: for coordinates; None: not known.
        timeout_s, patience: see `HangDetector`.
    """

    def __init__(
        self,
        board: StatusBoard,
        *,
        mesh: Mesh | None = None,
        timeout_s: float = 0.0,
        patience: int = 1,
    ) -> None:
        self.board = board
        self.mesh = mesh
        self._detector = HangDetector(board.num_ranks, timeout_s=timeout_s, patience=patience)
        self._next_check_s = 0.0

    @property
    def step(self) -> int:
        """The last step that any rank works on; 0 before the first."""
        return max(snapshot.step for snapshot in self._snapshots())

    def check(
        self, running: Collection[int], state_of: Callable[[int], ProcessState]
    ) -> Hang | None:
        """The hang, if there is one; looks every CHECK_S only.

        Args:
            running: ranks that have not ended.
            state_of: called with a rank without progress: the state of its process or thread.
        """
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + CHECK_S
        num_ranks = self.board.num_ranks
        progress = [ENDED] * num_ranks
        for rank in running:
            progress[rank] = self.board.progress(rank)
        suspicious = self._detector.suspicious(progress, now_s=now_s)
        if not suspicious:
            return None
        states = {rank: state_of(rank) for rank in suspicious}
        self._detector.discount(states, num_running=len(running))
        # nothing can be found yet: the boards are not read
        if max(self._detector.stalled_s) < self._detector.shortest_limit_s:
            return None
        ended = frozenset(range(num_ranks)).difference(running)
        return self._detector.find(self._snapshots(), ended=ended)

    def failure_of(self, hang: Hang, *, stack: str, at_s: float) -> RankFailure:
        """The record of a hang: what the culprit does, in which line, and what waits for it.

        Args:
            stack: of the culprit; "" if it has ended.
            at_s: time.monotonic() of the detection.
        """
        text = hang.text
        if self.mesh is not None and len(hang.ranks) > 1:
            places: list[str] = [f"{rank} = {self.mesh.coord_text(rank)}" for rank in hang.ranks]
            text += f" (ranks: {', '.join(places)})"
        text += location(stack)
        return RankFailure(hang.ranks[0], "error", at_s, text, trace=stack)

    def with_place(self, failure: RankFailure) -> RankFailure:
        """The failure with the step and phase of its rank."""
        snapshot = self.board.read(failure.rank)
        if failure.kind in NO_LOCATION_KINDS or not snapshot.step:
            return failure
        return replace(failure, text=f"{snapshot.place}: {failure.text}")

    def _snapshots(self) -> list[RankSnapshot]:
        return [self.board.read(rank) for rank in range(self.board.num_ranks)]


def location(stack: str) -> str:
    """Where the main thread of a stack file is, in weft if it is there: ` [loop.py:31 in train]`."""
    main_thread = stack.strip().rpartition("\n\n")[2]  # faulthandler writes it last
    frames = list(STACK_FRAME.finditer(main_thread))
    if not frames:
        return ""
    inside = [frame for frame in frames if "/weft/" in frame["file"]]
    frame = (inside or frames)[0]
    file = frame["file"].rpartition("/")[2]
    return f" [{file}:{frame['line']} in {frame['function']}]"
