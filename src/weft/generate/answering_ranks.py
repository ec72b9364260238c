"""Ranks in threads that answer the prompts of a conversation, one after the other, with what they have read in the cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from queue import SimpleQueue
from types import TracebackType

import torch

from weft.comm.comm import Comm
from weft.comm.threads import world_type
from weft.core.transports import THREADS
from weft.errors import WeftError
from weft.generate.conversation import ChatJob
from weft.generate.decode import Decoder, TextRow, decode
from weft.generate.detokenize import FinishReason
from weft.generate.main import open_decoder, sampler
from weft.run.devices import choose_device, devices_of_local_ranks
from weft.run.failure import ErrorContext, root_cause
from weft.run.rank_setup import TIMEOUT_S, open_comm, prepare_rank
from weft.run.rank_threads import run_rank_threads
from weft.run.world import ThreadRendezvous, World

# Note [Threads that wait for a person]
# A person may think for hours, and a rank that waits in a collective for so long has lost its peers. So all ranks wait for the
# next prompt outside of collectives, each at a queue of its own, and no watch looks for hung ranks. The thread that reads
# the terminal, which Ctrl-C interrupts, computes nothing: it sets `stop`, and the ranks agree after each token whether it is set.

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class AnswerPart:
    """What a token adds to an answer.

    Attributes:
        text: final characters; a token may add none.
        end: why the answer is complete; None while it is not.
    """

    text: str = ""
    token: int | None = None
    end: FinishReason | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt, and the most tokens of its answer."""

    prompt: Prompt
    num_tokens: int


class AnsweringRanks:
    """Ranks with a stored model, while open; see Note [Threads that wait for a person].

    Attributes:
        stop: while it is set, the answer ends.
    """

    def __init__(self, job: ChatJob) -> None:
        self.job = job
        self.stop = threading.Event()
        mesh = job.request.device_mesh
        self._asked: list[SimpleQueue[Asked | None]] = [SimpleQueue() for _ in range(mesh.size)]
        self._parts: SimpleQueue[AnswerPart | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def __enter__(self) -> AnsweringRanks:
        self._thread.start()
        try:
            self._next()  # the model is loaded
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def answer(self, prompt: Prompt, num_tokens: int) -> Iterator[AnswerPart]:
        """The parts of an answer, as they are generated.

        Raises:
            RankError: a rank has failed.
        """
        # a queue for each rank: all get every prompt, in one order
        for queue in self._asked:
            queue.put(Asked(prompt, num_tokens))
        part = self._next()
        yield part
        while part.end is None:
            part = self._next()
            yield part

    def _close(self) -> None:
        self.stop.set()
        for queue in self._asked:
            queue.put(None)
        self._thread.join()

    def _next(self) -> AnswerPart:
        # only rank 0 puts parts: all ranks generate the same
        part = self._parts.get()
        if part is None:
            raise self._error or WeftError("the ranks have ended")
        return part

    def _run(self) -> None:
        """The ranks, until they are told to end."""
        request = self.job.request
        mesh = request.device_mesh
        try:
            devices = devices_of_local_ranks(request.device, mesh.size, "threads")
            world = world_type(THREADS)(mesh.size, devices=devices, timeout_s=TIMEOUT_S)
            run = run_rank_threads(lambda rank: self._answer_all(rank, world), world)
            if run.failures:
                failure = root_cause(run.failures)
                self._error = ErrorContext(mesh).to_error(failure)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._error = error
        finally:
            # last of all: the thread that waits is woken however the ranks have ended
            self._parts.put(None)

    def _answer_all(self, rank: int, threads: object) -> None:
        """The function of one rank."""
        size = self.job.request.device_mesh.size
        rendezvous = ThreadRendezvous(threads)
        world = World(rank, size, local_rank=rank, local_size=size, rendezvous=rendezvous)
        prepare_rank(size)
        device = choose_device(self.job.request.device, world)
        with open_comm(world, self.job.request.device_mesh, device) as comm:
            decoder = open_decoder(self.job, comm)
            self._show(rank, AnswerPart())
            read: Prompt = ()
            while (asked := self._asked[rank].get()) is not None:
                read = self._answer(rank, decoder, asked, read)

    def _answer(self, rank: int, decoder: Decoder, asked: Asked, read: Prompt) -> Prompt:
        """Generate an answer; all tokens that are in the cache then.

        Args:
            read: the tokens in the cache before.
        """
        # the last token is read anew in any case: its logits are needed, which are not in the cache
        num_read = num_common(read, asked.prompt[:-1])
        # cells behind it are not cleared: the tokens that are read next overwrite them before any query sees them
        decoder.keep_first(num_read)
        row = TextRow(asked.prompt, num_read=num_read)
        text = self.job.new_text()
        comm = decoder.model.comm
        num_shown = 0

        def is_finished(row: TextRow) -> bool:
            text.add(row.tokens[-1])
            # asked on every token, also where the text is finished: the sum over the ranks needs all of them
            if self._is_stopped(comm) and text.finish_reason is None:
                text.finish("interrupted")
            elif len(row.tokens) == asked.num_tokens:
                text.finish(self._reason_of_length(asked))
            return text.finish_reason is not None

        choose = sampler(self.job.request)
        for _ in decode(decoder, [row], choose=choose, is_finished=is_finished):
            part = AnswerPart(text.text[num_shown:], row.tokens[-1], text.finish_reason)
            num_shown = len(text.text)
            self._show(rank, part)
            comm.checked = False  # every further token repeats the same operations
        # the last token was chosen and not read: no cell holds it
        return (*asked.prompt, *row.tokens[:-1])

    def _reason_of_length(self, asked: Asked) -> FinishReason:
        return "length" if asked.num_tokens == self.job.request.tokens else "context"

    def _is_stopped(self, comm: Comm) -> bool:
        """Whether the answer is to end; the same on every rank."""
        # summed and not read by each: it may be set between the looks of two ranks, and one would go on alone
        is_set = torch.tensor([int(self.stop.is_set())], device=comm.device)
        return bool(comm.sum_world(is_set).item())

    def _show(self, rank: int, part: AnswerPart) -> None:
        if rank == 0:
            self._parts.put(part)


def num_common(first: Prompt, second: Prompt) -> int:
    """Length of the longest common beginning.

    >>> num_common((1, 2, 3), (1, 2, 4, 5))
    2
    """
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
