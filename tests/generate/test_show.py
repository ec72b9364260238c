"""What is seen: texts in order, the first as it comes; nothing twice, nothing left out."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from weft.data.tokenizer import ByteTokenizer
from weft.generate import show
from weft.generate.show import BOLD, PLAIN, Objects, Screen, Shown
from weft.generate.text import Writing


def shown(prompt: str) -> Shown:
    return Shown(prompt, 0, [], Writing(ByteTokenizer(), stop="!"))


def test_the_first_text_streams_and_the_others_wait_for_their_turn():
    one, two = shown("a"), shown("b")
    said: list[str] = []
    screen = Screen([one, two], write=said.append)
    for first, second in zip(b"xyz", b"uv!", strict=True):
        one.writing.take(first)
        two.writing.take(second)
        screen.update()
    assert "".join(said) == "--- 1 of 2\naxyz"
    one.writing.close("length")
    screen.update()
    screen.update()
    assert "".join(said) == "--- 1 of 2\naxyz\n\n--- 2 of 2\nbuv\n"


def test_the_prompt_is_bold_on_a_terminal():
    said: list[str] = []
    Screen([shown("a")], write=said.append, is_terminal=True).update()
    assert said == [f"{BOLD}a{PLAIN}"]


def test_objects_come_in_order_when_they_are_over():
    texts = [shown("a"), shown("b")]
    said: list[str] = []
    view = Objects(texts, write=said.append, facts={"seed": 1})
    texts[1].writing.close("length")
    view.update()
    assert not said
    texts[0].writing.close("context")
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
    monkeypatch.setattr(show.sys, "stdout", Narrow())
    show.to_stdout("a\N{SNOWMAN}b")
    assert show.sys.stdout.said == "a?b"
