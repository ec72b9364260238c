"""Records of fine-tuning data: chat, instruction, prompt and completion, pairs, labelled completions; read, checked, rendered.

chat          {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
              or {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
instruction   {"instruction": "...", "input": "...", "output": "..."}; input may be missing
prompt        {"prompt": "...", "completion": "..."}; texts, or lists of messages
preference    {"prompt": "...", "chosen": "...", "rejected": "..."}; texts, or lists of messages;
reward        without a prompt where both answers begin with it
unpaired      {"prompt": "...", "completion": "...", "label": true}; texts, or lists of messages
classify      {"text": "...", "label": "..."} or {"messages": [...], "label": 0}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from weft.config.schema import RecordFormat
from weft.data.chat_template import ASSISTANT, ChatTemplate, Message, TemplateFault, template_fault
from weft.data.documents import without_surrogates
from weft.data.formats import guarded_read
from weft.data.record_forms import (
    TURNS,
    VALUES,
    WEIGHT,
    messages_of_turns,
    pair_with_prompt,
    record_fault,
    template_values,
    unread_message_fields,
    with_plain_content,
)
from weft.data.row_files import file_rows, holds_rows
from weft.data.rows import FORMAT_KEY, OTHER_NAMES, RECORD_FIELDS, Row, detect_format
from weft.errors import DataError, Fault

TRUTH_VALUES = ("true", "false")
UNPAIRED: RecordFormat = "unpaired"
OTHER = "completion of another record"
"""Field that is added to unpaired records."""
OPTIONAL_FIELDS: Mapping[str, tuple[str, ...]] = {
    "chat": (TURNS, "tools", VALUES),
    "instruction": ("input", "tools", VALUES),
    "prompt": ("tools", VALUES, "label"),
    "preference": ("prompt", "tools", VALUES),
    "reward": ("prompt", "tools", VALUES),
    "classify": ("text", "messages", TURNS, "tools", VALUES),
    "unpaired": ("tools", VALUES, OTHER),
}


@dataclass(frozen=True)
class AnswerText:
    """A text with its answers.

    Attributes:
        text: all of it.
        answers: [start, stop) of the answers, in characters.
        prompt: the text before the only answer, where tokens are counted by it: those of the prompt
            alone are not answers; None: tokens are found by their characters.
        adds_special: whether the tokenizer adds its special tokens, as for plain prompts; templates
            render theirs.
        label: number of its class; None: it has none.
        is_desired: whether it is to become more likely, of completions that say so.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    prompt: str | None = None
    adds_special: bool = False
    label: int | None = None
    is_desired: bool = True


@dataclass(frozen=True)
class RenderedRecord:
    """One record as texts: one, the two of a preference pair (chosen, rejected), or a completion and
    another one behind the same prompt.

    Attributes:
        is_pair: whether the texts are those of a preference pair.
    """

    texts: tuple[AnswerText, ...]
    where: str
    at: int
    is_pair: bool = False


@dataclass
class RecordReader:
    """Reads the records of files of one format.

    Args:
        format: of the records; None: that of the first one.
        template: renders messages; None where there is none.
        end_text: text of the token that ends a plain answer; "" where there is none.
        classes: names of the classes of labelled records, in the order of their numbers.
    """

    format: RecordFormat | None
    template: ChatTemplate | None
    end_text: str
    classes: Sequence[str] = ()
    no_template: DataError | None = None
    _known_roles: set[str] = field(default_factory=set)
    _unread: set[str] = field(default_factory=set)

    @property
    def unread(self) -> str:
        """What records hold besides what is read, "; not read: the fields id, source"; or ""."""
        if not self._unread:
            return ""
        return f"; not read: the fields {', '.join(sorted(self._unread))}"

    def read(self, file: Path) -> Iterator[RenderedRecord]:
        """The records of a file.

        Raises:
            DataError: a file or record that cannot be read, with its line.
        """
        with guarded_read(file):
            yield from self.read_rows(self._rows(file))

    def read_rows(self, rows: Iterable[Row]) -> Iterator[RenderedRecord]:
        """The records of rows.

        Raises:
            DataError: a record that cannot be read.
        """
        rows = (replace(row, fields=_without_nulls(row.fields)) for row in rows)
        if self.format == UNPAIRED:
            rows = self._with_other_completions(rows)
        for row in rows:
            texts = tuple(self._texts(row.fields, row.where))
            is_pair = len(texts) > 1 and self.format != UNPAIRED
            yield RenderedRecord(texts=texts, where=row.where, at=row.at, is_pair=is_pair)

    def _with_other_completions(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Rows with the completion of the next row that has another prompt, of the last ones that of
        the first such row; see Note [Unpaired answers] in models/common/pair_losses.py.

        Raises:
            DataError: all prompts are the same.
        """
        firsts: list[Row] = []
        waiting: list[Row] = []
        for row in rows:
            self._check_fields(tuple(row.fields), row.where)
            if waiting and row.fields["prompt"] != waiting[0].fields["prompt"]:
                yield from (_with_completion_of(row, each) for each in waiting)
                waiting = []
            waiting.append(row)
            if len(firsts) < 2 and row.fields["prompt"] not in [f.fields["prompt"] for f in firsts]:
                firsts.append(row)
        if len(firsts) == 1:
            what = f"{firsts[0].where}: every record has its prompt, and KTO needs completions of others"
            raise record_fault(what, need="two prompts at least", fix="add records")
        for row in waiting:
            other = next(f for f in firsts if f.fields["prompt"] != row.fields["prompt"])
            yield _with_completion_of(other, row)

    def _rows(self, file: Path) -> Iterator[Row]:
        if not holds_rows(file):
            raise DataError(
                Fault(
                    FORMAT_KEY,
                    f"{file} holds no records",
                    got=self._name,
                    need="files of JSON lines, a JSON array, CSV, TSV or parquet",
                    fix="name files of records, or leave data.format out to train on plain text",
                )
            )
        columns: set[str] = set()
        for names in (*RECORD_FIELDS.values(), *OPTIONAL_FIELDS.values()):
            columns.update(names)

        def check(schema: Any) -> None:
            self._check_fields(schema.names, f"{file} columns")

        return file_rows(file, check=check, columns=columns)

    @property
    def _name(self) -> str:
        return self.format or "auto"

    def _check_fields(self, names: Sequence[str], where: str) -> None:
        """Check that a record is of the format, or choose the format by the first one."""
        found = detect_format(names)
        if self.format is None:
            if found is None:
                raise _unknown_format(names, where)
            self.format = cast(RecordFormat, found)
        known = {OTHER_NAMES.get(name, name) for name in names}
        missing = [name for name in RECORD_FIELDS[self.format] if name not in known]
        if not missing:
            read = (*RECORD_FIELDS[self.format], *OPTIONAL_FIELDS[self.format])
            self._unread.update(set(names) - set(read))
            return
        got = ", ".join(names) or "none"
        need = ", ".join(RECORD_FIELDS[self.format])
        what = f"{where} has no {missing[0]!r}, which every {self.format} record has"
        if found:
            fix = f"--{FORMAT_KEY} {found}, or one format a file"
        else:
            fix = "repair the record"
        raise DataError(Fault(FORMAT_KEY, what, got=f"the fields {got}", need=need, fix=fix))

    def _texts(self, fields: Mapping[str, Any], where: str) -> Iterator[AnswerText]:
        self._check_fields(tuple(fields), where)
        match self.format:
            case "chat":
                turns = messages_of_turns(fields.get(TURNS), where)
                yield self._chat(fields.get("messages", turns), fields, where)
            case "instruction":
                yield self._chat(_instruction_messages(fields, where), fields, where)
            case "prompt":
                _check_label(fields, where)
                yield self._completion(fields, "completion", where)
            case "classify":
                yield self._labelled(fields, where)
            case "unpaired":
                label = str(fields["label"]).lower()  # a file of CSV holds texts
                if label not in TRUTH_VALUES:
                    got = repr(fields["label"])[:80]
                    raise record_fault(
                        f"{where}: its label is neither true nor false",
                        got=got,
                        need="true or false",
                    )
                for name in ("completion", OTHER):
                    text = self._completion(fields, name, where)
                    yield replace(text, is_desired=label == "true")
            case _:
                if fields["chosen"] == fields["rejected"]:
                    what = f"{where}: chosen and rejected are the same"
                    raise record_fault(what, fix="remove the pair: it has no preference")
                if "prompt" not in fields:
                    fields = pair_with_prompt(fields, where)
                yield self._completion(fields, "chosen", where)
                yield self._completion(fields, "rejected", where)

    def _chat(self, value: Any, fields: Mapping[str, Any], where: str) -> AnswerText:
        template = self._needed_template()
        messages = self._messages(value, "messages", where)
        answers = [message for message in messages if message["role"] == ASSISTANT]
        if not answers:
            names = dict.fromkeys(str(message["role"]) for message in messages)
            roles = ", ".join(names)
            what = f"{where}: no message is of the role {ASSISTANT!r}, so there is no answer"
            raise record_fault(what, got=f"the roles {roles}")
        if all(message.get(WEIGHT) == 0 for message in answers):
            raise record_fault(f"{where}: every answer has the weight 0", fix="remove the record")
        values = template_values(fields, where)
        try:
            rendered = template.render_answers(messages, values=values)
            self._check_roles(template, messages, rendered.text, values)
        except TemplateFault as error:
            raise template_fault(template, error, where) from None
        return AnswerText(rendered.text, rendered.answers)

    def _labelled(self, fields: Mapping[str, Any], where: str) -> AnswerText:
        """A text, or messages as the template renders them, with its class."""
        label = class_number(fields["label"], self.classes, where)
        if "text" in fields:
            text = check_text(fields["text"], "text", where)
            return AnswerText(text, (), adds_special=True, label=label)
        turns = messages_of_turns(fields.get(TURNS), where)
        value = fields.get("messages", turns)
        if value is None:
            raise record_fault(f"{where}: a record with a label has neither 'text' nor 'messages'")
        messages = self._messages(value, "messages", where)
        template = self._needed_template()
        try:
            text = template.render(messages, values=template_values(fields, where))
        except TemplateFault as error:
            raise template_fault(template, error, where) from None
        return AnswerText(text, (), label=label)

    def _messages(self, value: Any, name: str, where: str) -> list[Message]:
        """The messages of a field, as the template reads them.

        Raises:
            DataError: they are none.
        """
        template = self._needed_template()
        messages = with_plain_content(check_messages(value, name, where), template, name, where)
        unread = unread_message_fields(messages, template)
        self._unread.update(f"{name}.{each}" for each in unread)
        return messages

    def _check_roles(
        self, template: ChatTemplate, messages: Sequence[Message], text: str, values: Any
    ) -> None:
        """Check, when a role is seen first, that the template does not leave its messages out.

        Raises:
            TemplateFault: it does.
        """
        for index, message in enumerate(messages):
            role = str(message["role"])
            if role in self._known_roles or not message.get("content"):
                continue
            self._known_roles.add(role)
            before = messages[:index]
            after = messages[index + 1 :]
            others = [*before, *after]
            try:
                without = template.render(others, values=values)
            except TemplateFault:
                continue  # it needs this message, so it reads it
            if without == text:
                raise TemplateFault(f"it leaves out messages of the role {role!r}")

    def _completion(self, fields: Mapping[str, Any], answer_name: str, where: str) -> AnswerText:
        prompt = fields["prompt"]
        answer = fields[answer_name]
        if isinstance(prompt, list) and isinstance(answer, list):
            return self._completion_messages(fields, answer_name, where)
        prompt = check_text(prompt, "prompt", where)
        answer = check_text(answer, answer_name, where)
        if not answer.endswith(self.end_text):
            answer += self.end_text
        span = (len(prompt), len(prompt) + len(answer))
        return AnswerText(text=prompt + answer, answers=(span,), prompt=prompt, adds_special=True)

    def _completion_messages(
        self, fields: Mapping[str, Any], answer_name: str, where: str
    ) -> AnswerText:
        template = self._needed_template()
        prompt = self._messages(fields["prompt"], "prompt", where)
        answer = self._messages(fields[answer_name], answer_name, where)
        if any(WEIGHT in message for message in answer):
            what = f"{where}: a message of {answer_name!r} has a weight, and all of it counts"
            raise record_fault(what, fix="write it as messages of a chat record")
        values = template_values(fields, where)
        try:
            before = template.render(prompt, values=values, add_generation_prompt=True)
            text = template.render([*prompt, *answer], values=values)
            self._check_roles(template, [*prompt, *answer], text, values)
            if not text.startswith(before):
                raise TemplateFault(
                    "the text of prompt and answer does not begin with that of the prompt"
                )
        except TemplateFault as error:
            raise template_fault(template, error, where) from None
        return AnswerText(text=text, answers=((len(before), len(text)),), prompt=before)

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            assert self.no_template is not None, "a reader has a template, or the reason why not"
            raise self.no_template
        return self.template


def class_number(value: Any, classes: Sequence[str], where: str) -> int:
    """The number of a class that a record names, or gives as a number.

    Raises:
        DataError: there is no such class.
    """
    if str(value) in classes:
        return list(classes).index(str(value))
    if isinstance(value, int) and 0 <= value < len(classes):
        return int(value)
    need = f"one of {', '.join(classes)}, or 0 to {len(classes) - 1}"
    raise record_fault(f"{where}: 'label' is no class", got=repr(value)[:80], need=need)


def _unknown_format(names: Sequence[str], where: str) -> DataError:
    """The error of a first record whose fields are of no format."""
    kinds = []
    for name, needed in RECORD_FIELDS.items():
        kinds.append(f"{name}: {', '.join(needed)}")
    got = ", ".join(names) or "none"
    what = f"{where}: the fields are of no known format"
    return DataError(
        Fault(
            FORMAT_KEY,
            what,
            got=got,
            need="; ".join(kinds),
            fix="rename the fields, or leave data.format out to train on plain text",
        )
    )


def check_messages(value: Any, name: str, where: str) -> list[Message]:
    """A list of messages with roles and contents.

    Raises:
        DataError: it is another value.
    """
    if not isinstance(value, list):
        raise record_fault(
            f"{where}: {name!r} is no list", got=type(value).__name__, need="a list of messages"
        )
    if not value:
        raise record_fault(f"{where}: {name!r} is empty", need="one message at least")
    for number, message in enumerate(value, start=1):
        problem = _message_problem(message)
        if problem:
            raise record_fault(
                f"{where}: message {number} of {name!r} {problem}",
                need='{"role": "user", "content": "..."}',
            )
    return value


def _message_problem(message: Any) -> str:
    """What is wrong with a message, or ""."""
    if not isinstance(message, dict):
        return f"is no object but {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return "has no role"
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        return "has no content"
    if content is not None and not isinstance(content, (str, list)):
        return f"has a content that is no text but {type(content).__name__}"
    if WEIGHT in message and (message[WEIGHT] not in (0, 1) or message["role"] != ASSISTANT):
        return f"has the weight {message[WEIGHT]!r}, and only answers have one, 0 or 1"
    return ""


def check_text(value: Any, name: str, where: str) -> str:
    """Check that a value is text, and return it.

    Raises:
        DataError: it is another value.
    """
    if isinstance(value, str):
        return value
    raise record_fault(f"{where}: {name!r} is not text", got=type(value).__name__, need="text")


def _check_label(fields: Mapping[str, Any], where: str) -> None:
    """Reject a record that says whether its completion is desired: of one that is not, every token
    would be a target.

    Raises:
        DataError: it does.
    """
    label = fields.get("label")
    if isinstance(label, bool) or str(label).lower() in TRUTH_VALUES:
        what = (
            f"{where}: its label says whether the completion is desired (KTO), and all are trained"
        )
        fix = (
            "--data.format unpaired --loss dpo --dpo.loss_type kto, or keep the records whose label "
            "is true, without the field"
        )
        raise record_fault(what, got=f"label {str(label).lower()}", fix=fix)


def _with_completion_of(other: Row, row: Row) -> Row:
    """A row with the completion of another one beside its own."""
    return replace(row, fields={**row.fields, OTHER: other.fields["completion"]})


def _instruction_messages(fields: Mapping[str, Any], where: str) -> list[Message]:
    """An instruction record as two messages; the input follows the instruction after a blank line."""
    instruction = check_text(fields["instruction"], "instruction", where)
    context = check_text(fields.get("input", ""), "input", where)
    output = check_text(fields["output"], "output", where)
    question = instruction
    if context:
        question = f"{instruction}\n\n{context}"
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": output}]


def _without_nulls(value: Any) -> Any:
    """The value without the missing fields of objects, which parquet stores as nulls, and without
    halves of surrogate pairs.
    """
    if isinstance(value, dict):
        kept = {}
        for name, inner in value.items():
            if inner is not None:
                kept[name] = _without_nulls(inner)
        return kept
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    if isinstance(value, str):
        return without_surrogates(value)
    return value
