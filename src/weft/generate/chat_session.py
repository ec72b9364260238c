"""The lines of a conversation in the terminal or on the standard input: messages, commands, answers, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from weft.config.command_options import json_writer
from weft.errors import EXIT_OK, Fault, UserError, counted, did_you_mean, printable
from weft.generate.answering_ranks import AnsweringRanks, AnswerPart, Prompt
from weft.generate.conversation import (
    ChatJob,
    ChatQuestion,
    Conversation,
    check_system,
    save_conversation,
)
from weft.generate.output import to_stdout

COMMANDS = ("/reset", "/system TEXT", "/save FILE", "/exit")
MARK = "/"
PROMPT = "> "


class Answering(Protocol):
    """What answers prompts; `stop` ends the answer in progress."""

    @property
    def stop(self) -> threading.Event: ...
    def answer(self, prompt: Prompt, num_tokens: int) -> Iterator[AnswerPart]: ...


def chat(job: ChatJob) -> int:
    """Hold a conversation with a stored model; the exit code."""
    is_terminal = sys.stdin.isatty()
    with AnsweringRanks(job) as ranks:
        session = ChatSession(job, ranks, is_terminal=is_terminal)
        if is_terminal:
            session.say(
                f"{job.source.path}, template {job.format.template.name}. A line is a message; "
                f"{', '.join(COMMANDS)}; Ctrl-C stops an answer, Ctrl-D ends"
            )
        return session.run(line_reader(is_terminal=is_terminal))


def line_reader(*, is_terminal: bool) -> Callable[[], str]:
    """The function that returns the next line; at the end of the input it raises EOFError."""
    if is_terminal:
        import readline  # noqa: F401 - `input` edits lines with it

        return lambda: input(PROMPT)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # a line that is no text must not end the conversation
        sys.stdin.reconfigure(errors="replace")

    def read() -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    return read


class ChatSession:
    """A conversation in progress.

    Args:
        is_terminal: whether a person types: then a fault is said and the conversation goes on, and
            Ctrl-C stops an answer; else either ends it.
        write: takes the text of answers and shows it at once.
    """

    def __init__(
        self,
        job: ChatJob,
        ranks: Answering,
        *,
        is_terminal: bool,
        write: Callable[[str], object] = to_stdout,
    ) -> None:
        self.job = job
        self.ranks = ranks
        self.is_terminal = is_terminal
        self.conversation = Conversation(job.request.system)
        self._write = write
        self._write_json = json_writer(job.request.json, write) if job.request.json else None
        self._num_interrupts = 0

    def run(self, read: Callable[[], str]) -> int:
        """Take lines until one of them, or their end, ends the conversation; the exit code.

        Raises:
            UserError: a line is wrong, without a terminal.
            KeyboardInterrupt: Ctrl-C twice, or once without a terminal.
        """
        while True:
            try:
                line = read()
            except EOFError:
                return self._end()
            except KeyboardInterrupt:
                self._interrupt()
                continue
            self._num_interrupts = 0
            try:
                if not self.take(line.rstrip("\r\n")):
                    return EXIT_OK
            except UserError as error:
                if not self.is_terminal:
                    raise
                for fault in error.faults:
                    self.say(f"error: {fault}")

    def take(self, line: str) -> bool:
        """Take a line; whether the conversation goes on.

        Raises:
            UserError: no such command, or a message that has no room.
        """
        if line.startswith(MARK) and not line.startswith(2 * MARK):
            return self._command(line)
        if line.strip():
            self._answer(line[1:] if line.startswith(MARK) else line)
        return True

    def say(self, line: str) -> None:
        """Print a line that is no answer."""
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _command(self, line: str) -> bool:
        name, _, value = line.partition(" ")
        value = value.strip()
        takes_value = name in ("/system", "/save")
        if name not in [command.split()[0] for command in COMMANDS]:
            raise UserError(_unknown_command(name))
        if value and not takes_value:
            raise UserError(Fault(name, "takes no value", repr(value), fix=name))
        if name == "/system":
            check_system(value, self.job.format, key=name)
            self._restart(value)
        elif name == "/save":
            self._save(value)
        elif name == "/reset":
            self._restart(self.conversation.system)
        return name != "/exit"

    def _restart(self, system: str) -> None:
        self.conversation = Conversation(system)
        self.say(f"a new conversation, {'with a' if system else 'without'} system prompt")

    def _save(self, name: str) -> None:
        number = save_conversation(self.conversation, name)
        turns = counted(self.conversation.num_turns, "turn")
        self.say(f"saved {turns} as line {number} of {printable(name)}")

    def _answer(self, text: str) -> None:
        """Ask, and show the answer as it is generated."""
        question = self.conversation.ask(text, self.job)
        if question.num_dropped:
            turns = counted(question.num_dropped, "turn")
            self.say(
                f"note: the conversation has outgrown the context of {self.job.context} tokens: "
                f"from here on the model reads it without its oldest {turns}"
            )
        most = question.most_tokens(self.job)
        parts: list[AnswerPart] = []
        with self._stopped_by_interrupt():
            for part in self.ranks.answer(question.tokens, most):
                parts.append(part)
                if self._write_json is None:
                    self._write(shown(part.text))
        answer = "".join(part.text for part in parts)
        # also an answer that was stopped: it is in the context that the model has read
        self.conversation = self.conversation.answered(question, answer)
        if self._write_json is None:
            self._write("\n")
        else:
            self._write_json(f"{_json_answer(question, parts)}\n")
        self._note_end(parts, most)

    def _note_end(self, parts: list[AnswerPart], most: int) -> None:
        """Say that an answer is cut."""
        match parts[-1].end:
            case "length":
                self.say(f"note: the answer is cut at --tokens {most}")
            case "context":
                self.say(f"note: the answer is cut at the context of {self.job.context} tokens")
            case "interrupted":
                self.say("note: the answer is stopped; Ctrl-C again ends the conversation")

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        """While open, Ctrl-C stops the answer, where a person types; twice ends the conversation."""
        # no rank is in an answer here: one that was stopped before cannot see this one's flag
        self.ranks.stop.clear()
        if not self.is_terminal or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            self.ranks.stop.set()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self) -> None:
        """Ctrl-C where a line is awaited."""
        if not self.is_terminal or self._num_interrupts:
            raise KeyboardInterrupt
        self._num_interrupts = 1
        self.say("\nCtrl-C again ends the conversation")

    def _end(self) -> int:
        if self.is_terminal:
            self.say("")  # the line of the prompt
        return EXIT_OK


def shown(text: str) -> str:
    """The text of a model with its control characters written out, line by line."""
    return "\n".join(map(printable, text.split("\n")))


def _unknown_command(name: str) -> Fault:
    names = [command.split()[0] for command in COMMANDS]
    hint = did_you_mean(name, names)
    slash = f"a message that begins with {MARK} is written with {2 * MARK}"
    fix = f"{hint}; {slash}" if hint.startswith("did") else slash
    return Fault(name, "unknown command", need=f"one of {', '.join(COMMANDS)}", fix=fix)


def _json_answer(question: ChatQuestion, parts: list[AnswerPart]) -> str:
    fields = {
        "message": question.text,
        "text": "".join(part.text for part in parts),
        "tokens": [part.token for part in parts],
        "prompt_tokens": len(question.tokens),
        "end": parts[-1].end,
    }
    return json.dumps(fields, ensure_ascii=False)
