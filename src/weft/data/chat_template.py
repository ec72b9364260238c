"""Chat templates: found beside a tokenizer, rendered in jinja2's sandbox with the variables that transformers passes.

Note [Answers]
    A template marks what the assistant writes by `{% generation %}` blocks. Where it has none, the
    answer of assistant turn i is what rendering turns 0..i adds to rendering turns 0..i-1 with the
    header of an answer (`add_generation_prompt`):

        turns 0..i-1, header   <|user|>Hi<|assistant|>
        turns 0..i             <|user|>Hi<|assistant|>Hello.<end>
        answer                                        ~~~~~~~~~~~

    Each rendering must begin with the one before it; a template that changes earlier turns (one
    that removes their reasoning, for example) is rejected, as no rule would be exact. An answer of
    weight 0 is found this way, too, and does not count, marked or not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from weft.data.first_use import check_first_use
from weft.data.tokenizer import BYTES, Tokenizer
from weft.errors import DataError, Fault, first_line
from weft.small_files import MIB, UnreadableFile, read_json_object, read_text

KEY = "data.chat_template"
FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_BYTES = MIB
MAX_RENDERED_CHARS = 64 * MIB
"""Of one conversation: a template is code of unknown origin."""
MAX_RENDER_S = 10.0
"""Processor time of one rendering."""
MAX_CONFIG_BYTES = 64 * MIB
MAX_ERROR_CHARS = 160
DEFAULT = "default"
"""Name of the template that is used where a tokenizer has several."""
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
ASSISTANT = "assistant"
TRIAL = "weft.data.chat_template:try_template"
CONVERSATION: Sequence[Mapping[str, Any]] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": ASSISTANT, "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": ASSISTANT, "content": "6"},
)
"""What a template of unknown origin renders first."""

Message = Mapping[str, Any]
NO_VALUES: Mapping[str, Any] = MappingProxyType({})

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ALPACA = """{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{- message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' }}
{%- generation %}{{ message['content'] + (eos_token or '') + '\\n\\n' }}{% endgeneration %}
{%- else %}
{{- raise_exception('the roles are system, user and assistant') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""

BUILT_IN: Mapping[str, str] = {"chatml": CHATML, "alpaca": ALPACA}

_HAS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_READS_DATE = re.compile(r"\bstrftime_now\b")


class TemplateFault(Exception):  # noqa: N818 - becomes the fault of a record
    """Why a template does not render a conversation, with its line where that is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(text)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: all of it.
        answers: [start, stop) of what the assistant wrote, in characters.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of conversations.

    Attributes:
        name: of a built-in template, or its file, for messages.
        text: the template.
        special_tokens: variables `bos_token`, `eos_token` and so on.
    """

    name: str
    text: str
    special_tokens: Mapping[str, str]

    @property
    def marks_answers(self) -> bool:
        """Whether it has `{% generation %}` blocks."""
        return _HAS_GENERATION.search(self.text) is not None

    @property
    def reads_date(self) -> bool:
        """Whether it may render today's date."""
        return _READS_DATE.search(self.text) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        values: Mapping[str, Any] = NO_VALUES,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; `values` are further variables, such as tools.

        Raises:
            TemplateFault: the template does not render it.
        """
        text, _ = self._render(messages, values, add_generation_prompt=add_generation_prompt)
        return text

    def render_answers(
        self, messages: Sequence[Message], *, values: Mapping[str, Any] = NO_VALUES
    ) -> Rendered:
        """The text of a conversation and what the assistant wrote in it; see Note [Answers].

        Raises:
            TemplateFault: the template does not render it, or its answers cannot be told exactly.
        """
        text, marked = self._render(messages, values, add_generation_prompt=False)
        answers = list(marked)
        for index, message in enumerate(messages):
            counts = message.get("weight", 1) != 0
            if message.get("role") != ASSISTANT or (counts and self.marks_answers):
                continue
            before = self.render(messages[:index], values=values, add_generation_prompt=True)
            through = self.render(messages[: index + 1], values=values)
            if not through.startswith(before) or not text.startswith(through):
                raise TemplateFault(
                    f"it renders message {index + 1} differently with and without the others, "
                    "so the answer in it cannot be told; mark answers by {% generation %}"
                    if counts
                    else f"it renders message {index + 1} differently with and without the "
                    "others, so the answer of weight 0 in it cannot be told"
                )
            start, stop = len(before), len(through)
            if counts:
                answers.append((start, stop))
            else:
                answers = [each for each in answers if each[1] <= start or stop <= each[0]]
        return Rendered(text, tuple(answers))

    def _render(
        self, messages: Sequence[Message], values: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        compiled, tracker = self._compiled
        blocks: list[str] = []
        variables = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            **values,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with tracker.tracking(blocks, until_s=time.thread_time() + MAX_RENDER_S) as answers:
                num_chars = 0
                for block in compiled.generate(**variables):
                    blocks.append(block)
                    num_chars += len(block)
                    if num_chars > MAX_RENDERED_CHARS:
                        raise ValueError(f"it renders more than {MAX_RENDERED_CHARS:,} characters")
        except Exception as error:  # noqa: BLE001 - a template may raise anything, and only about itself and this record
            raise self._fault(error) from None
        return "".join(blocks), tuple(answers)

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """The compiled template and the tracker of its answers.

        Raises:
            TemplateFault: it is no template.
        """
        environment = _make_environment()
        try:
            compiled = environment.from_string(self.text)
        except Exception as error:  # noqa: BLE001 - as above
            raise self._fault(error) from None
        return compiled, environment.weft_tracker

    def _fault(self, error: Exception) -> TemplateFault:
        line = getattr(error, "lineno", None)
        if line is None:
            line = _template_line(error.__traceback__)
        text = first_line(error)[:MAX_ERROR_CHARS]
        return TemplateFault(text or type(error).__name__, line)


def find_template(
    name: str | None, tokenizer: Tokenizer, *, folder: Path | None = None
) -> ChatTemplate:
    """The template of this name, a built-in one or a file; None: the tokenizer's own.

    Args:
        folder: of the tokenizer's other files; default: that of its tokenizer.json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if folder is None and tokenizer.name != BYTES:
        folder = Path(tokenizer.name).parent
    if folder is None:
        config = {}
    else:
        config = _read_config(folder / TOKENIZER_CONFIG)
    special = _special_tokens(config)
    if tokenizer.end_text and "eos_token" not in special:
        special["eos_token"] = tokenizer.end_text
    if name is not None and name in BUILT_IN:
        return ChatTemplate(name=name, text=BUILT_IN[name], special_tokens=special)
    if name is not None:
        file, text = name, _read_template(Path(name).expanduser())
    elif folder is not None and (folder / FILE).exists():
        file, text = str(folder / FILE), _read_template(folder / FILE)
    else:
        own = _template_of_config(config)
        if own is None:
            raise DataError(_no_template(tokenizer))
        file, text = str((folder or Path()) / TOKENIZER_CONFIG), own
    values = {"text": text, "special_tokens": special}
    content = json.dumps(values).encode()
    check_first_use(TRIAL, values, content=content, key=KEY, name=file)
    return ChatTemplate(name=file, text=text, special_tokens=special)


def _no_template(tokenizer: Tokenizer) -> Fault:
    fix = f"--{KEY} {' or '.join(BUILT_IN)}, or a file with a Jinja template"
    return Fault(KEY, "the tokenizer has no chat template", got=tokenizer.name, fix=fix)


def try_template(text: str, special_tokens: Mapping[str, str]) -> None:
    """Render a conversation, in a process that may be ended.

    Raises:
        MemoryError: it takes too much.
    """
    template = ChatTemplate("", text, special_tokens)
    for messages in (CONVERSATION, CONVERSATION[1:]):
        try:
            template.render_answers(messages)
        except TemplateFault as fault:  # a conversation that it does not take
            if str(fault) == MemoryError.__name__:
                raise MemoryError from None


def template_fault(template: ChatTemplate, fault: TemplateFault, where: str) -> DataError:
    """The error of a record that a template does not render."""
    if fault.line is None:
        line = ""
    else:
        line = f" line {fault.line}"
    fix = "repair the record or the template, or name another --data.chat_template"
    what = f"{template.name}{line} does not render {where}: {fault}"
    return DataError(Fault(KEY, what, fix=fix))


def _read_template(file: Path) -> str:
    try:
        return read_text(file, max_bytes=MAX_BYTES)
    except UnreadableFile as error:
        fix = f"name {', '.join(BUILT_IN)}, or a file with a Jinja template"
        raise DataError(error.fault(KEY, fix=fix)) from None


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return read_json_object(file, max_bytes=MAX_CONFIG_BYTES)
    except UnreadableFile as error:
        raise DataError(error.fault(KEY, fix="fetch the file again")) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json: texts, or objects with a `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            text = value.get("content")
        else:
            text = value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_of_config(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer_config.json: a text, or several with names."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    for entry in value:
        is_named = isinstance(entry, dict) and entry.get("name") == DEFAULT
        if is_named and isinstance(entry.get("template"), str):
            return str(entry["template"])
    return None


def _template_line(traceback: TracebackType | None) -> int | None:
    """The line of a template in which an error was raised; jinja2 puts it into the traceback."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


class AnswerTracker:
    """Where the text of `{% generation %}` blocks is in what has been rendered."""

    def __init__(self) -> None:
        self._blocks: list[str] | None = None
        self._answers: list[tuple[int, int]] = []
        self._until_s = 0.0

    @contextmanager
    def tracking(self, blocks: list[str], *, until_s: float) -> Iterator[list[tuple[int, int]]]:
        """Track a rendering whose finished parts are appended to `blocks`; yields the answers.

        Args:
            until_s: time.thread_time() at which the rendering must have ended.
        """
        self._blocks, self._answers, self._until_s = blocks, [], until_s
        try:
            yield self._answers
        finally:
            self._blocks = None

    def check_time(self) -> str:
        """Nothing, in every round of a loop and every call of a macro.

        Raises:
            ValueError: the rendering takes too long.
        """
        if time.thread_time() > self._until_s:
            raise ValueError(f"it takes more than {MAX_RENDER_S:g} s")
        return ""

    def add(self, text: str) -> None:
        """Add an answer that follows the finished parts."""
        if self._blocks is None:
            return
        start = sum(len(block) for block in self._blocks)
        stop = start + len(text)
        self._answers.append((start, stop))


def _make_environment() -> Any:
    """The sandbox of transformers' `apply_chat_template`, with the same filters and functions."""
    from jinja2 import TemplateError, nodes  # late: 60 ms to import
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tracker = AnswerTracker()

    class Generation(Extension):
        """The block `{% generation %} ... {% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_track")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _track(self, caller: Any) -> str:
            text = str(caller())
            tracker.add(text)
            return text

        def _check_time(self) -> str:
            return tracker.check_time()

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, with a check of the time in all that may be repeated."""

        def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
            extension = self.extensions[Generation.identifier]
            found: Any = source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
            for node in found:
                call = extension.call_method("_check_time", lineno=node.lineno)
                node.body.insert(0, nodes.Output([call], lineno=node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    node.test = nodes.And(nodes.Not(call), node.test, lineno=node.lineno)
            return super()._generate(source, *args, **kwargs)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.extend(weft_tracker=tracker)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escapes of HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
