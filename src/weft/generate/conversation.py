"""A conversation with a model: its messages, its tokens in the chat template, the turns that fit, its file. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.data.chat_template import ASSISTANT, Message
from weft.data.documents import without_surrogates
from weft.errors import Fault, UserError, counted
from weft.generate.detokenize import GeneratedText
from weft.generate.job import (
    ChatFormat,
    ModelJob,
    chat_format,
    encode_prompt,
    inference_model,
    mesh_faults,
    open_model_tokenizer,
)
from weft.generate.model_source import ModelSource
from weft.generate.request import LINES, ChatRequest

SYSTEM, USER = "system", "user"
TURN = 2
"""Messages of a turn: a question, and its answer."""
ROOM_SHARE = 4
"""An answer has room for this part of the context at least, or for all the tokens that it may have."""


@dataclass(frozen=True)
class ChatJob(ModelJob):
    """A checked request of `weft chat`."""

    request: ChatRequest
    format: ChatFormat

    @property
    def context(self) -> int | None:
        """Most tokens of a conversation with its next answer; None: any number."""
        own: int | None = getattr(self.config, "max_seq_len", None)
        limits = [limit for limit in (self.request.context, self.max_positions) if limit]
        return min(limits) if limits else own

    @property
    def room(self) -> int:
        """Tokens of the context that the turns before leave to an answer."""
        if self.context is None:
            return self.request.tokens
        return min(self.request.tokens, -(-self.context // ROOM_SHARE))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered conversation.

        Raises:
            ConfigError: the model does not know one of them.
        """
        return encode_prompt(text, self.tokenizer, vocab=self.config.axis_sizes()["vocab"])

    def new_text(self) -> GeneratedText:
        """The text of an answer, which ends with its turn."""
        return GeneratedText(self.tokenizer, stop=self.format.stop, end_tokens=self.end_tokens)


def make_chat_job(
    request: ChatRequest, source: ModelSource, other_faults: Iterable[Fault] = ()
) -> ChatJob:
    """The job, every part of it checked.

    Args:
        other_faults: of the environment, reported with those found here.

    Raises:
        UserError: with every fault of mesh, template, system prompt and environment.
    """
    config = inference_model(source.run.model)
    faults = [*mesh_faults(request.device_mesh, config), *other_faults]
    try:
        tokenizer = open_model_tokenizer(request, source)
        form = chat_format(request, source, tokenizer)
        check_system(request.system, form, key="system")
    except UserError as error:
        faults.extend(error.faults)
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return ChatJob(
        request=request,
        source=source,
        config=config,
        dtype=request.dtype or source.dtype,
        tokenizer=tokenizer,
        format=form,
    )


def check_system(text: str, form: ChatFormat, *, key: str) -> None:
    """Check that the template renders a system prompt.

    Raises:
        UserError: it rejects it, or leaves it out.
    """
    question: Message = {"role": USER, "content": "?"}
    if not text:
        return
    with_system = form.render_messages([{"role": SYSTEM, "content": text}, question])
    if with_system == form.render_messages([question]):
        what = f"the template {form.template.name} leaves out messages of the role 'system'"
        raise UserError(Fault(key, what, fix="leave it out, or name another --chat_template"))


@dataclass(frozen=True)
class ChatQuestion:
    """The newest message of a user with what the model reads of the conversation.

    Attributes:
        tokens: the conversation with the header of its next answer.
        first: the first message that is in them.
        num_dropped: turns that were in the context before, and are not any more.
    """

    text: str
    tokens: tuple[int, ...]
    first: int
    num_dropped: int

    def most_tokens(self, job: ChatJob) -> int:
        """Tokens that its answer may have."""
        if job.context is None:
            return job.request.tokens
        return min(job.request.tokens, job.context - len(self.tokens))


@dataclass(frozen=True)
class Conversation:
    """Questions with their answers, in turn.

    Attributes:
        messages: all of them, without the system prompt.
        first: the first message that is still in the context.
    """

    system: str = ""
    messages: tuple[Message, ...] = ()
    first: int = 0

    @property
    def num_turns(self) -> int:
        """Questions with answers."""
        return len(self.messages) // TURN

    def ask(self, text: str, job: ChatJob) -> ChatQuestion:
        """A further question; the oldest turns leave the context where it has no room for them.

        Raises:
            UserError: the question alone leaves no room for an answer.
        """
        text = without_surrogates(text)
        asked = (*self.messages, {"role": USER, "content": text})
        last = len(self.messages)
        for first in range(self.first, last + 1, TURN):
            tokens = job.encode(job.format.render_messages([*self._head, *asked[first:]]))
            # turns are dropped for an answer of some length; for the question alone any room will do
            room = job.room if first < last else 1
            if job.context is None or len(tokens) + room <= job.context:
                return ChatQuestion(text, tokens, first, (first - self.first) // TURN)
        raise UserError(
            Fault(
                "message",
                "leaves no room for an answer in the context",
                got=counted(len(tokens), "token"),
                need=f"fewer than {counted(job.context or 0, 'token')}",
                fix="shorten it, or the system prompt",
            )
        )

    def answered(self, question: ChatQuestion, answer: str) -> Conversation:
        """The conversation with a question and its answer."""
        turn: tuple[Message, ...] = (
            {"role": USER, "content": question.text},
            {"role": ASSISTANT, "content": answer},
        )
        return replace(self, messages=(*self.messages, *turn), first=question.first)

    @property
    def _head(self) -> tuple[Message, ...]:
        return ({"role": SYSTEM, "content": self.system},) if self.system else ()

    def record(self) -> str:
        """The conversation as a line of the format `chat`, as `weft train` reads it."""
        return json.dumps({"messages": [*self._head, *self.messages]}, ensure_ascii=False)


def save_conversation(conversation: Conversation, name: str) -> int:
    """Add a conversation to a file of JSON lines; the number of its line.

    Raises:
        UserError: there is no answer yet, or the file cannot be written.
    """
    path = Path(name).expanduser()
    if not conversation.messages:
        raise UserError(Fault("/save", "there is no answer yet", fix="ask something first"))
    if path.suffix != LINES:
        fix = f"/save {path.with_suffix(LINES) if path.name else f'chat{LINES}'}"
        got = repr(name) if name else "nothing"
        raise UserError(Fault("/save", "names no file of JSON lines", got, f"x{LINES}", fix))
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        gap = "" if not before or before.endswith("\n") else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{gap}{conversation.record()}\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        fix = "name another file"
        raise UserError(Fault("/save", "cannot be written", f"{name!r}: {why}", fix=fix)) from None
    return before.count("\n") + bool(gap) + 1
