"""Output of texts: in order, the first one streams; nothing twice, nothing left out."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from weft.data.tokenizer import ByteTokenizer
from weft.generate import output
from weft.generate.detokenize import GeneratedText
from weft.generate.output import BOLD, PLAIN, JsonOutput, OutputText, TextOutput


def output_text(prompt: str) -> OutputText:
    return OutputText(
        prompt=prompt, sample=0, tokens=[], generated=GeneratedText(ByteTokenizer(), stop="!")
    )


def test_the_first_text_streams_and_the_others_wait():
    one = output_text("a")
    two = output_text("b")
    pieces: list[str] = []
    screen = TextOutput([one, two], write=pieces.append)
    for first, second in zip(b"xyz", b"uv!", strict=True):
        one.generated.add(first)
        two.generated.add(second)
        screen.update()
    assert "".join(pieces) == "--- 1 of 2\naxyz"
    one.generated.finish("length")
    screen.update()
    screen.update()
    assert "".join(pieces) == "--- 1 of 2\naxyz\n\n--- 2 of 2\nbuv\n"


def test_the_prompt_is_bold_on_a_terminal():
    pieces: list[str] = []
    TextOutput([output_text("a")], write=pieces.append, is_terminal=True).update()
    assert pieces == [f"{BOLD}a{PLAIN}"]


def test_json_objects_are_written_in_order_when_finished():
    texts = [output_text("a"), output_text("b")]
    pieces: list[str] = []
    view = JsonOutput(texts, write=pieces.append, facts={"seed": 1})
    texts[1].generated.finish("length")
    view.update()
    assert not pieces
    texts[0].generated.finish("context")
    view.update()
    objects = [json.loads(line) for line in pieces]
    assert [(each["prompt"], each["end"], each["seed"]) for each in objects] == [
        ("a", "context", 1),
        ("b", "length", 1),
    ]


@dataclass
class Narrow:
    """A terminal without most characters."""

    encoding: str = "ascii"
    text: str = ""

    def write(self, new: str) -> None:
        self.text += new.encode(self.encoding).decode()

    def flush(self) -> None:
        pass


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output.sys, "stdout", Narrow())
    output.to_stdout("a\N{SNOWMAN}b")
    assert output.sys.stdout.text == "a?b"
