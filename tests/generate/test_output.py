"""What is seen: texts in order, the first as it comes; nothing twice, nothing left out."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from weft.data.tokenizer import ByteTokenizer
from weft.generate import output
from weft.generate.detokenize import GeneratedText
from weft.generate.output import BOLD, PLAIN, JsonOutput, OutputText, TextOutput


def shown(prompt: str) -> OutputText:
    return OutputText(prompt, 0, [], GeneratedText(ByteTokenizer(), stop="!"))


def test_the_first_text_streams_and_the_others_wait_for_their_turn():
    one, two = shown("a"), shown("b")
    said: list[str] = []
    screen = TextOutput([one, two], write=said.append)
    for first, second in zip(b"xyz", b"uv!", strict=True):
        one.generated.add(first)
        two.generated.add(second)
        screen.update()
    assert "".join(said) == "--- 1 of 2\naxyz"
    one.generated.finish("length")
    screen.update()
    screen.update()
    assert "".join(said) == "--- 1 of 2\naxyz\n\n--- 2 of 2\nbuv\n"


def test_the_prompt_is_bold_on_a_terminal():
    said: list[str] = []
    TextOutput([shown("a")], write=said.append, is_terminal=True).update()
    assert said == [f"{BOLD}a{PLAIN}"]


def test_objects_come_in_order_when_they_are_over():
    texts = [shown("a"), shown("b")]
    said: list[str] = []
    view = JsonOutput(texts, write=said.append, facts={"seed": 1})
    texts[1].generated.finish("length")
    view.update()
    assert not said
    texts[0].generated.finish("context")
    view.update()
    told = [json.loads(line) for line in said]
    assert [(each["prompt"], each["end"], each["seed"]) for each in told] == [("a", "context", 1), ("b", "length", 1)]


@dataclass
class Narrow:
    """A terminal without most characters."""

    encoding: str = "ascii"
    said: str = ""

    def write(self, text: str) -> None:
        self.said += text.encode(self.encoding).decode()

    def flush(self) -> None:
        pass


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output.sys, "stdout", Narrow())
    output.to_stdout("a\N{SNOWMAN}b")
    assert output.sys.stdout.said == "a?b"
