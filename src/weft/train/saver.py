"""Owns saving while training goes on: a snapshot at the end of a step, the disk in the background, and who says it is done.

    step 10    snapshot (the stall), each rank starts to write its file
    step 11    every rank says with the step's gathered numbers: still writing
    step 12    nobody says so any more, and all ranks know it: rank 0 commits in the background and removes what is too old
    step 13    rank 0 tells of it

So agreement costs no operation of its own. Only where a rank failed, and at the end of training, the ranks talk about it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

from weft.checkpoint.disk import free_bytes
from weft.checkpoint.folder import checkpoint_path, checkpoints, prune, temporary_path
from weft.checkpoint.format import Facts
from weft.checkpoint.held import snapshot
from weft.checkpoint.write import Writing, commit, discard, start_write
from weft.config.schema import SaveConfig
from weft.errors import CheckpointError
from weft.run.signals import StopRequest
from weft.train.agree import everyones_words, words_of_first
from weft.train.checkpoint import held
from weft.train.step import TrainStep

Event = dict[str, Any]


class Word(IntFlag):
    """What a rank says in the number that travels with every step."""

    LEAVE = 1  # somebody asked this process to save and leave
    WRITING = 2  # its file is not on the disk yet
    FAILED = 4  # its file did not get there


@dataclass(frozen=True)
class Underway:
    """One save between its snapshot and its end, on one rank."""

    step: int
    final: Path
    facts: Facts
    began_s: float
    stall_s: float
    writing: Writing


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is there."""

    num_bytes: int
    write_s: float
    problem: str
    """What kept an older one from being removed."""


class Saver:
    """Saves a step into the run folder; every rank has one and calls it at the same points.

    Args:
        facts: what the manifest says, after so many steps.
        leave: whether this process has been asked to go.
        last: steps behind the checkpoint that the run goes on from.

    Attributes:
        last: steps behind the newest save that was begun.
        trouble: what was wrong with the newest save, where it failed; after `finish` the same on all ranks.
    """

    def __init__(
        self,
        step: TrainStep,
        run_folder: Path,
        *,
        save: SaveConfig,
        facts: Callable[[int], Facts],
        leave: StopRequest,
        last: int = 0,
    ) -> None:
        self.step, self.run_folder, self.save_keys, self.facts, self.leave = step, run_folder, save, facts, leave
        self.comm, self.is_first = step.model.comm, step.model.comm.rank == 0
        self.last, self.trouble = last, ""
        self._underway: Underway | None = None
        self._committing: tuple[Underway, Future[Committed]] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")

    def word(self) -> Word:
        """What this rank has to say now."""
        word = Word.LEAVE if self.leave.requested else Word(0)
        if self._underway is None:
            return word
        if not self._underway.writing.done():
            return word | Word.WRITING
        return word | Word.FAILED if _failure(self._underway.writing) else word

    def is_over(self, said: Sequence[int]) -> bool:
        """Whether some rank was asked to leave: all leave, after the step in which it said so."""
        return any(word & Word.LEAVE for word in said)

    def after(self, number: int, said: Sequence[int]) -> Iterator[Event]:
        """What is to be done and told after step `number`, in which the ranks said `said`."""
        yield from self._news()
        if self._underway and not any(word & Word.WRITING for word in said):
            yield from self._end_writing(ask=any(word & Word.FAILED for word in said))
        if self.save_keys.every and number % self.save_keys.every == 0:
            yield from self.save(number)

    def save(self, number: int) -> Iterator[Event]:
        """Begin to save; where an earlier one is still under way, wait for it first."""
        began = time.perf_counter()
        yield from self._wait()
        final = checkpoint_path(self.run_folder, number)
        pieces = snapshot(held(self.step))
        writing = start_write(temporary_path(final), self.comm.rank, pieces)
        stall = time.perf_counter() - began
        self.last, self._underway = number, Underway(number, final, self.facts(number), began, stall, writing)

    def finish(self, number: int, *, save: bool) -> Iterator[Event]:
        """Save what has been trained since, if asked to, and wait; every rank then knows whether the newest save is there."""
        if save and self.last != number:
            yield from self.save(number)
        yield from self._wait()
        self.trouble = words_of_first(self.comm, self.trouble)
        self._pool.shutdown()

    def _wait(self) -> Iterator[Event]:
        if self._underway:
            yield from self._end_writing(ask=True)
        yield from self._news(wait=True)

    def _end_writing(self, *, ask: bool) -> Iterator[Event]:
        """All ranks are done writing, or will be once waited for. Without asking, it is known that all is well."""
        assert self._underway is not None, "called where a save is under way"
        underway, self._underway = self._underway, None
        mine = _failure(underway.writing)
        told = everyones_words(self.comm, json.dumps([underway.writing.num_bytes, mine])) if ask else ()
        reports = [json.loads(text) for text in told]
        failures = [(rank, failure) for rank, (_, failure) in enumerate(reports) if failure]
        if not self.is_first:
            return
        if failures:
            discard(temporary_path(underway.final))
            rank, failure = failures[0]
            why = f"rank {rank} ({self.comm.mesh.coord_text(rank)}): {failure}" if self.comm.mesh.size > 1 else failure
            yield self._failed(underway, why, need_bytes=sum(need for need, _ in reports))
        else:
            self._committing = (underway, self._pool.submit(self._commit, underway))

    def _commit(self, underway: Underway) -> Committed:
        tmp, problem = temporary_path(underway.final), ""
        manifest = commit(tmp, underway.final, underway.facts, ranks=self.comm.mesh.size)
        write_s = time.perf_counter() - underway.began_s
        try:
            prune(self.run_folder, self.save_keys.keep)
        except CheckpointError as error:
            problem = _told(error)
        return Committed(manifest.num_bytes, write_s, problem)

    def _news(self, *, wait: bool = False) -> Iterator[Event]:
        """How the commit ended, once it has."""
        if self._committing is None or not (wait or self._committing[1].done()):
            return
        (underway, committing), self._committing = self._committing, None
        try:
            committed = committing.result()
        except CheckpointError as error:
            yield self._failed(underway, _told(error), need_bytes=underway.writing.num_bytes)
            return
        self.trouble = ""
        yield {
            "event": "save",
            "step": underway.step,
            "path": str(underway.final),
            "bytes": committed.num_bytes,
            "stall_s": underway.stall_s,
            "write_s": committed.write_s,
        }
        if committed.problem:
            yield {"event": "note", "text": f"warning: {committed.problem}"}

    def _failed(self, underway: Underway, why: str, *, need_bytes: int) -> Event:
        newest = next((path for _, path in checkpoints(self.run_folder)), None)
        self.trouble = why
        return {
            "event": "save_failed",
            "step": underway.step,
            "why": why,
            "need_bytes": need_bytes,
            "free_bytes": free_bytes(self.run_folder),
            "newest": str(newest) if newest else None,
        }


def _failure(writing: Writing) -> str:
    """Why the file is not on the disk, once that is known; "" where it is."""
    try:
        writing.wait()
    except CheckpointError as error:
        return _told(error)
    return ""


def _told(error: CheckpointError) -> str:
    return "; ".join(map(str, error.faults))
