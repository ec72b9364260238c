"""`weft chat`: conversations with a trained model over the standard input, their context, their file, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.chat_files import tokenizer_folder, write_jsonl
from tests.programs import WEFT, programs
from tests.tiny_run import MODEL
from weft.cli import main
from weft.data.chat_template import CHATML, ChatTemplate
from weft.data.files import find_files
from weft.data.record_sources import encode_records, make_reader
from weft.data.tokenizer import ByteTokenizer
from weft.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER, UserError
from weft.generate.answering_ranks import AnswerPart
from weft.generate.chat_session import ChatSession, shown
from weft.generate.conversation import ChatJob, Conversation, make_chat_job
from weft.generate.decode import Decoder
from weft.generate.model_source import find_model
from weft.generate.request import ChatRequest

TEMPLATE = ChatTemplate("chatml", CHATML, {})
QUESTIONS = ("hi", "and you?", "bye")
ANSWERS = ("hello", "well", "bye bye")
FAST = ("--dtype", "float64", "--tokens", "12")
GREEDY = ("--temperature", "0")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned one conversation."""
    folder = tmp_path_factory.mktemp("chat")
    messages = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    source = write_jsonl(folder / "chat.jsonl", [{"messages": messages}] * 2)
    words = ["--data.source", str(source), "--data.format", "chat", "--data.seq_len", "256"]
    words += ["--data.chat_template", "chatml", "--batch.global_size", "1", "--batch.micro_size"]
    words += [
        "1",
        "--steps",
        "150",
        "--optim.lr",
        "1e-2",
        "--model.dim",
        "32",
        "--transport",
        "threads",
    ]
    out = folder / "run"
    assert main(["train", *MODEL, *words, "--out", str(out)]) == EXIT_OK
    return out


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command with these lines on its standard input: exit code, output, lines of stderr."""

    def run_command(lines: tuple[str, ...], *words: object) -> tuple[int, str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        code = main(["chat", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run_command


def generated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What `weft generate` writes of one text."""
    capsys.readouterr()
    code = main(["generate", *map(str, words), "--json", "--transport", "threads"])
    assert code == EXIT_OK
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mesh", "sampling"),
    [("", GREEDY), ("tp2", GREEDY), ("pp2", GREEDY), ("", ("--temperature", "2", "--seed", "5"))],
)
def test_an_answer_is_what_generate_makes_of_the_rendered_conversation(
    mesh: str,
    sampling: tuple[str, ...],
    run: Path,
    talk: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    system = ("--system", "Be brief.")
    code, out, _ = talk(QUESTIONS, run, *FAST, *sampling, *system, "--json", "--mesh", mesh)
    assert code == EXIT_OK
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["message"] for answer in answers] == list(QUESTIONS)
    messages = [{"role": "system", "content": "Be brief."}]
    for answer in answers:
        messages.append({"role": "user", "content": answer["message"]})
        prompt = tmp_path / "prompt.txt"
        text = TEMPLATE.render(messages, add_generation_prompt=True)
        prompt.write_bytes(text.encode())
        words = ("--prompt_file", prompt, "--stop", "<|im_end|>", *FAST, *sampling)
        expected = generated(capsys, run, *words)
        assert answer["tokens"] == expected["tokens"]
        assert answer["text"] == expected["text"]
        assert answer["end"] == expected["end"]
        assert answer["prompt_tokens"] == len(text.encode())
        messages.append({"role": "assistant", "content": answer["text"]})


def test_the_model_answers_in_the_context_of_its_turns_and_each_answer_ends_with_its_turn(
    run: Path, talk: Callable[..., Any]
) -> None:
    long = ("--tokens", "40", "--dtype", "float64", *GREEDY)
    code, out, err = talk((*QUESTIONS, "/exit", "not read"), run, *long)
    assert (code, out.splitlines(), err) == (EXIT_OK, list(ANSWERS), [])


def test_a_further_turn_reads_only_what_is_new(
    run: Path, talk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read: list[int] = []
    read = Decoder.read

    def counted_read(self: Decoder, rows: Any) -> Any:
        num_read.append(sum(map(len, rows)))
        return read(self, rows)

    monkeypatch.setattr(Decoder, "read", counted_read)
    _, out, _ = talk(QUESTIONS[:2], run, "--tokens", "40", "--dtype", "float64", *GREEDY, "--json")
    first, second = map(json.loads, out.splitlines())
    prompt_reads = [number for number in num_read if number > 1]
    in_cache = first["prompt_tokens"] + len(first["tokens"]) - 1
    assert prompt_reads == [first["prompt_tokens"], second["prompt_tokens"] - in_cache]


def test_a_saved_conversation_has_the_tokens_of_the_answers_and_trains(
    run: Path, talk: Callable[..., Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.jsonl"
    lines = (*QUESTIONS, f"/save {saved}", "/system Be brief.", "hi", f"/save {saved}")
    words = ("--tokens", "40", "--dtype", "float64", *GREEDY, "--json")
    code, out, err = talk(lines, run, *words)
    assert code == EXIT_OK
    assert err[0] == f"saved 3 turns as line 1 of {saved}"
    assert err[-1] == f"saved 1 turn as line 2 of {saved}"
    first, second = map(json.loads, saved.read_text().splitlines())
    assert [message["content"] for message in first["messages"][1::2]] == list(ANSWERS)
    assert second["messages"][0] == {"role": "system", "content": "Be brief."}
    tokenizer = ByteTokenizer()
    reader = make_reader("chat", "chatml", tokenizer)
    records = list(encode_records(find_files(str(saved)), reader, tokenizer))
    document = records[0].documents[0]
    answers = [json.loads(line) for line in out.splitlines()][:3]
    for answer in answers:
        start = answer["prompt_tokens"]
        stop = start + len(answer["tokens"])
        assert list(document.ids[start:stop]) == answer["tokens"]
        assert document.mask[start:stop].all()
    assert document.mask.sum() == sum(len(answer["tokens"]) for answer in answers)
    source = ("--data.source", str(saved), "--data.format", "chat", "--data.seq_len", "256")
    sizes = ("--data.chat_template", "chatml", "--batch.global_size", "2", "--steps", "1")
    out_folder = ("--transport", "threads", "--out", str(tmp_path / "again"))
    assert main(["train", *MODEL, *source, *sizes, *out_folder]) == EXIT_OK


def job_of(run: Path, **options: object) -> ChatJob:
    return make_chat_job(ChatRequest.model_validate(options), find_model(str(run)))


def test_the_oldest_turns_leave_an_overlong_conversation_and_the_system_prompt_stays(
    run: Path,
) -> None:
    job = job_of(run, context=200, tokens=20)
    conversation = Conversation(system="Be brief.")
    dropped = []
    for number in range(6):
        question = conversation.ask(f"question {number}", job)
        assert len(question.tokens) + 20 <= 200
        assert bytes(question.tokens).startswith(b"<|im_start|>system\nBe brief.<|im_end|>\n")
        dropped.append(question.num_dropped)
        conversation = conversation.answered(question, f"answer {number}")
    assert dropped == [0, 0, 1, 1, 1, 1]
    assert b"question 3" not in bytes(question.tokens)
    assert bytes(question.tokens).count(b"answer 4") == 1
    assert conversation.num_turns == 6
    assert len(json.loads(conversation.record())["messages"]) == 13


def test_an_answer_may_fill_the_context_and_a_question_may_not(run: Path) -> None:
    job = job_of(run, context=64, tokens=500)
    empty = len(Conversation().ask("", job).tokens)
    question = Conversation().ask("x" * (60 - empty), job)
    assert question.most_tokens(job) == 4
    with pytest.raises(UserError, match=r"no room for an answer in the context \(got 64 tok"):
        Conversation().ask("x" * (64 - empty), job)


def test_the_command_says_what_is_cut_and_what_leaves_the_context(
    run: Path, talk: Callable[..., Any]
) -> None:
    words = (*GREEDY, "--dtype", "float64", "--context", "80", "--tokens", "2")
    code, _, err = talk(("hi", "hi"), run, *words)
    cut = "note: the answer is cut at --tokens 2"
    left = (
        "note: the conversation has outgrown the context of 80 tokens: "
        "from here on the model reads it without its oldest 1 turn"
    )
    assert (code, err) == (EXIT_OK, [cut, left, cut])
    code, _, err = talk(("x" * 22,), run, *GREEDY, "--context", "73", "--temperature", "9")
    assert err == ["note: the answer is cut at the context of 73 tokens"]


def test_learned_positions_are_the_context(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "c.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    )
    words = ["--model.name", "gpt2", "--model.layers", "1", "--model.dim", "16"]
    words += ["--model.heads", "2", "--model.max_seq_len", "96", "--data.seq_len", "96"]
    words += ["--data.source", str(source), "--data.format", "chat", "--steps", "1"]
    words += ["--data.chat_template", "chatml", "--batch.global_size", "2"]
    words += ["--transport", "threads", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == EXIT_OK
    assert job_of(tmp_path / "run").context == 96
    assert job_of(tmp_path / "run", context=4096).context == 96


BAD_LINES = {
    "unknown": (("/rest",), "error: /rest: unknown command (need one of /reset, /system TEXT, "),
    "a path": (("/usr/bin",), "Fix: a message that begins with / is written with //"),
    "a value": (("/exit now",), "error: /exit: takes no value (got 'now'). Fix: /exit"),
    "nothing to save": (("/save x.jsonl",), "error: /save: there is no answer yet"),
    "no name": (("hi", "/save"), "error: /save: names no file of JSON lines (got nothing; need x.jsonl)"),
    "no JSON lines": (("hi", "/save x.txt"), "/save: names no file of JSON lines (got 'x.txt'; need x.jsonl). Fix: /save x"),
    "no folder": (("hi", "/save no/x.jsonl"), "error: /save: cannot be written (got 'no/x.jsonl': No such file"),
    "too long": (("x" * 9000,), "error: message: leaves no room for an answer in the context (got 9050 tokens; "),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_of_a_script_ends_it_with_one_line(
    name: str, run: Path, talk: Callable[..., Any]
) -> None:
    lines, expected = BAD_LINES[name]
    code, _, err = talk((*lines, "hi"), run, "--tokens", "1", *GREEDY)
    faults = [line for line in err if not line.startswith("note: ")]
    assert code == EXIT_USER
    assert len(faults) == 1
    assert expected in faults[0]


def test_a_template_without_a_system_role_rejects_a_system_prompt(
    run: Path, tmp_path: Path, talk: Callable[..., Any]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    words = (run, "--chat_template", template, "--tokens", "1")
    line = "leaves out messages of the role 'system'"
    code, _, err = talk((), *words, "--system", "Be brief.")
    assert code == EXIT_USER
    assert line in err[0]
    code, _, err = talk(("/system Be brief.",), *words)
    assert code == EXIT_USER
    assert err == [f"error: /system: the template {template} {line}. Fix: "
                   "leave it out, or name another --chat_template"]  # fmt: skip


def test_a_tokenizers_template_ends_answers_at_its_token(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tok")
    record = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": record}])
    words = ["--data.source", str(source), "--data.format", "chat", "--model.vocab", "320"]
    words += ["--data.tokenizer", str(folder), "--data.seq_len", "64", "--steps", "1"]
    words += ["--batch.global_size", "2", "--transport", "threads", "--out", str(tmp_path / "run")]
    assert main(["train", *MODEL, *words]) == EXIT_OK
    job = job_of(tmp_path / "run")
    text = job.new_text()
    for token in job.tokenizer.encode("you</s>"):
        text.add(token)
    assert text.text == "you"
    assert text.finish_reason in ("stop", "end of text")


# ------------------------------------------------------------------------------------ a person at a terminal


class Scripted:
    """Answers every prompt with the same words; `during` is called between two of them."""

    def __init__(self, during: Callable[[Scripted], object] = lambda answering: None) -> None:
        self.stop = threading.Event()
        self.prompts: list[str] = []
        self._during = during

    def answer(self, prompt: tuple[int, ...], num_tokens: int) -> Iterator[AnswerPart]:
        self.prompts.append(bytes(prompt).decode())
        for word in ("one", " two\x1b[2J"):
            yield AnswerPart(word, 1)
            self._during(self)
            if self.stop.is_set():
                yield AnswerPart("", 1, "interrupted")
                return
        yield AnswerPart("", 1, "stop")


def lines_of(*items: str | type[BaseException]) -> Callable[[], str]:
    """Returns one line after the other, or raises what stands in its place."""
    left = iter(items)

    def read() -> str:
        item = next(left, EOFError)
        if isinstance(item, str):
            return item
        raise item

    return read


def session_of(run: Path, ranks: Scripted, written: list[str]) -> ChatSession:
    return ChatSession(job_of(run), ranks, is_terminal=True, write=written.append)


def interrupt(answering: Scripted) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_answers_are_written_in_pieces_with_their_control_characters_written_out(run: Path) -> None:
    written: list[str] = []
    session = session_of(run, Scripted(), written)
    assert session.run(lines_of("hi\n")) == EXIT_OK
    assert written == ["one", " two\\x1b[2J", "", "\n"]
    assert session.conversation.messages[1]["content"] == "one two\x1b[2J"
    assert shown("a\n\x07b\r") == "a\n\\x07b\\r"


def test_a_fault_is_said_and_the_conversation_goes_on_where_a_person_types(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Scripted()
    session = session_of(run, ranks, [])
    lines = lines_of("/nothing\n", "\n", "  \n", "//etc\n", "/reset\n", "hi\n")
    assert session.run(lines) == EXIT_OK
    assert "error: /nothing: unknown command" in capsys.readouterr().err
    header = "<|im_end|>\n<|im_start|>assistant\n"
    assert ranks.prompts == [f"<|im_start|>user\n{text}{header}" for text in ("/etc", "hi")]


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    session = session_of(run, Scripted(interrupt), [])
    assert session.run(lines_of("hi\n", "more\n")) == EXIT_OK
    contents = [message["content"] for message in session.conversation.messages]
    assert contents == ["hi", "one", "more", "one"]
    line = "note: the answer is stopped; Ctrl-C again ends the conversation"
    assert capsys.readouterr().err.count(line) == 2
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("during", "lines"),
    [
        (lambda answering: None, (KeyboardInterrupt, KeyboardInterrupt)),
        (interrupt, ("hi\n", KeyboardInterrupt)),
        (lambda answering: [interrupt(answering), interrupt(answering)], ("hi\n",)),
    ],
    ids=["while it awaits a line", "after a stopped answer", "within an answer"],
)
def test_ctrl_c_twice_ends_the_conversation(
    during: Callable[[Scripted], object], lines: tuple[Any, ...], run: Path
) -> None:
    session = session_of(run, Scripted(during), [])
    with pytest.raises(KeyboardInterrupt):
        session.run(lines_of(*lines, "never read\n"))
    assert "never read" not in session.conversation.record()


def test_ctrl_c_once_does_not_end_it_and_a_line_between_two_counts_anew(run: Path) -> None:
    session = session_of(run, Scripted(), [])
    lines = lines_of(KeyboardInterrupt, "hi\n", KeyboardInterrupt, "more\n")
    assert session.run(lines) == EXIT_OK
    assert session.conversation.num_turns == 2


def test_ranks_stop_within_an_answer(
    run: Path, talk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ChatSession.take

    def take_and_stop(self: ChatSession, line: str) -> bool:
        write = self._write
        self._write = lambda text: (write(text), self.ranks.stop.set())
        return take(self, line)

    monkeypatch.setattr(ChatSession, "take", take_and_stop)
    words = ("--mesh", "tp2", "--temperature", "9", "--tokens", "100000", "--context", "100000")
    code, _, err = talk(("hi",), run, *words)
    assert code == EXIT_OK
    assert err == ["note: the answer is stopped; Ctrl-C again ends the conversation"]


def test_ctrl_c_ends_a_script(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.readline", interrupted, raising=False)
    assert main(["chat", str(run)]) == EXIT_INTERRUPTED


def read_until(terminal: int, text: str) -> str:
    """What a program writes to its terminal, up to this text."""
    written = b""
    while text.encode() not in written:
        ready, _, _ = select.select([terminal], [], [], TIMEOUT_S)
        assert ready, written.decode()
        written += os.read(terminal, 4096)
    return written.decode()


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread of a process waits for something, here for the next line.

    A Ctrl-C between the print of a prompt and the call that waits would be seen by Python's
    `input` at the next key alone.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_conversation_at_a_terminal(run: Path) -> None:
    terminal, end = pty.openpty()
    words = ("--temperature", "9", "--tokens", "100000", "--context", "200000")
    environ = {**os.environ, "TERM": "dumb"}
    with programs().running(
        WEFT, "chat", str(run), *words, terminal=end, environ=environ
    ) as program:
        os.close(end)

        def typed(text: bytes, answer: str) -> None:
            os.write(terminal, text)
            read_until(terminal, answer)

        read_until(terminal, "template chatml. A line is a message; /reset, /system TEXT")
        typed(b"/nothing\n", "error: /nothing: unknown command")
        typed(b"/system Be brief.\n", "a new conversation, with a system prompt\r\n> ")
        typed(b"hi\n", "\\x")  # a control character of the answer
        typed(b"\x03", "note: the answer is stopped; Ctrl-C again ends the conversation\r\n> ")
        typed(b"/reset\n", "a new conversation, with a system prompt\r\n> ")
        wait_until_asleep(program.pid)
        typed(b"\x03", "Ctrl-C again ends the conversation\r\n> ")
        typed(b"/reset\n", "a new conversation, with a system prompt\r\n> ")
        os.write(terminal, b"\x04")
        assert program.wait(TIMEOUT_S) == EXIT_OK
    os.close(terminal)
