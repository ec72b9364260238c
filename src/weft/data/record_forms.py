"""Records as other tools write them, in one form: ShareGPT turns, content parts, tools as text, pairs without a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from weft.data.chat_template import ASSISTANT, ChatTemplate, Message
from weft.data.rows import FORMAT_KEY
from weft.errors import DataError, Fault
from weft.small_files import parse_json

TURNS = "conversations"
"""ShareGPT's name of the messages of a record: {"conversations": [{"from": "human", "value": "..."}]}."""
ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Speakers of ShareGPT's turns -> roles."""
VALUES = "chat_template_kwargs"
"""Field with further variables of the template, as in TRL."""
OWN_VALUES = ("messages", "tools", "documents", "add_generation_prompt")
WEIGHT = "weight"
"""Field of an answer that says whether it counts in the loss: 0 or 1, as in OpenAI's files."""
MESSAGE_FIELDS = ("role", "content", WEIGHT)
_READS_PARTS = re.compile(
    r"content['\"]?\]?\s+is\s+(not\s+)?(string|iterable|sequence)|\[\s*['\"]type['\"]\s*\]|\.type\b"
)


def record_fault(what: str, *, got: str = "", need: str = "", fix: str = "") -> DataError:
    """The error of a record."""
    return DataError(
        Fault(FORMAT_KEY, what, got=got, need=need, fix=fix or "repair or remove the record")
    )


def messages_of_turns(turns: Any, where: str) -> Any:
    """The messages of ShareGPT's turns; turns that are messages already, and no list, are returned.

    Raises:
        DataError: a speaker or a text is missing or unknown.
    """
    if not isinstance(turns, list):
        return turns
    if any(isinstance(turn, dict) and "role" in turn for turn in turns):
        return turns
    messages = []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from") if isinstance(turn, dict) else None
        role = ROLES.get(str(speaker))
        if role is None or not isinstance(turn.get("value"), str):
            raise record_fault(
                f"{where}: turn {number} of {TURNS!r} has no known speaker or no text",
                got=repr(turn)[:80],
                need='{"from": "human", "value": "..."}; speakers: ' + ", ".join(ROLES),
            )
        others = {name: value for name, value in turn.items() if name not in ("from", "value")}
        messages.append({"role": role, "content": turn["value"], **others})
    return messages


def pair_with_prompt(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A preference pair whose answers begin with the prompt, with the prompt taken off: what both
    begin with, of texts without the space before the answers, as TRL's `extract_prompt` does.

    Raises:
        DataError: they have no common beginning, or one of them is nothing else.
    """
    chosen, rejected = fields["chosen"], fields["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        got = f"{type(chosen).__name__} and {type(rejected).__name__}"
        need = "two texts, or two lists of messages"
        raise record_fault(f"{where}: chosen and rejected are not alike", got=got, need=need)
    equal = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
    length = sum(1 for _ in equal)
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1
    prompt, *answers = chosen[:length], chosen[length:], rejected[length:]
    if not prompt or not all(answers):
        raise record_fault(
            f"{where}: has no prompt, and its answers do not say it",
            got="no common beginning"
            if not prompt
            else "an answer that is the beginning of the other",
            need="prompt, chosen, rejected; or chosen and rejected that begin with one prompt",
        )
    return {**fields, "prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def template_values(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Variables of a record's template besides its messages: tools, which may be JSON text, and
    those that the record names.

    Raises:
        DataError: tools that are no list, or a variable that the template gets from weft.
    """
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools.encode()) if tools.strip() else None
        except ValueError as error:
            raise record_fault(f"{where}: 'tools' is text, and no JSON", got=str(error)) from None
    if tools is not None and not isinstance(tools, list):
        got = type(tools).__name__
        raise record_fault(f"{where}: 'tools' is no list", got=got, need="a list of tools")
    own = fields.get(VALUES, {})
    if not isinstance(own, dict):
        raise record_fault(f"{where}: {VALUES!r} is no object", got=type(own).__name__)
    taken = [name for name in own if name in OWN_VALUES]
    if taken:
        what = f"{where}: {VALUES!r} names {taken[0]!r}, which the record itself gives"
        raise record_fault(what, fix="leave it out")
    return {**own, "tools": tools or None}


def with_plain_content(
    messages: Sequence[Message], template: ChatTemplate, name: str, where: str
) -> list[Message]:
    """Messages whose content is text, or parts of text that the template reads as such.

    Raises:
        DataError: a part that is no text, or several of them under a template that reads one text.
    """
    return [
        _with_text(message, template, f"{where}: message {number} of {name!r}")
        for number, message in enumerate(messages, start=1)
    ]


def _with_text(message: Message, template: ChatTemplate, where: str) -> Message:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"{where} has a content part that is no text"
            raise record_fault(what, got=str(kind), need='{"type": "text", "text": "..."}')
    if _READS_PARTS.search(template.text):
        return message
    if len(parts) != 1:
        what = f"{where} has {len(parts)} content parts, and {template.name} renders one text"
        raise record_fault(what, fix="join them into one text")
    return {**message, "content": parts[0]["text"]}


def unread_message_fields(messages: Iterable[Message], template: ChatTemplate) -> set[str]:
    """Fields of messages whose names are not in the template, which can therefore not read them."""
    names = {name for message in messages for name in message if name not in MESSAGE_FIELDS}
    return {name for name in names if name not in template.text}
