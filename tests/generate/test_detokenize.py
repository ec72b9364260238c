"""Text comes piece by piece: joined it is the whole, no character is cut, nothing of the stop text is said."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.data.tokenizer import ByteTokenizer
from weft.generate.detokenize import GeneratedText, StreamDetokenizer, overlap

BYTES = ByteTokenizer()


class Words:
    """A tokenizer that drops a space at the beginning of what it decodes, as some do."""

    pieces = (" one", " two", "three", "\N{SNOWMAN}", " ")

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.pieces[token] for token in tokens).removeprefix(" ")


class Halves:
    """A tokenizer whose tokens are pairs of bytes."""

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(token.to_bytes(2, "big") for token in tokens).decode(errors="replace")


def pieces_of(tokenizer: object, tokens: Iterable[int]) -> list[str]:
    spelling = StreamDetokenizer(tokenizer)  # type: ignore[arg-type]
    return [*[spelling.add(token) for token in tokens], spelling.flush()]


@given(st.text())
@example("h\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{GRINNING FACE}")
def test_characters_come_whole(text: str):
    data = text.encode("utf-8", "replace")
    pieces = pieces_of(BYTES, data)
    assert "".join(pieces) == data.decode()
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.binary())
@example(b"\xff\xff\xe2\x98")
def test_bytes_that_are_no_text_come_as_they_decode_in_one(data: bytes):
    assert "".join(pieces_of(BYTES, data)) == data.decode(errors="replace")


@given(st.binary().filter(lambda data: len(data) % 2 == 0))
def test_tokens_of_several_bytes_decode_as_in_one(data: bytes):
    tokens = [int.from_bytes(data[place : place + 2], "big") for place in range(0, len(data), 2)]
    assert "".join(pieces_of(Halves(), tokens)) == data.decode(errors="replace")


@given(st.lists(st.integers(0, len(Words.pieces) - 1)))
def test_a_tokenizer_that_drops_a_leading_space_drops_it_once(tokens: list[int]):
    assert "".join(pieces_of(Words(), tokens)) == Words().decode(tokens)


def test_every_piece_comes_as_soon_as_it_is_whole():
    assert pieces_of(BYTES, "a\N{SNOWMAN}b".encode()) == ["a", "", "", "\N{SNOWMAN}", "b", ""]


@given(st.text("ab\N{SNOWMAN}", max_size=12), st.text("ab\N{SNOWMAN}", min_size=1, max_size=3))
@example("aab", "ab")
def test_a_text_ends_before_its_stop_text_and_never_says_a_part_of_it(text: str, stop: str):
    writing, said = GeneratedText(BYTES, stop=stop), ""
    for token in text.encode():
        writing.add(token)
        assert writing.text.startswith(said), "what is said stays said"
        said = writing.text
        if writing.finish_reason:
            break
    writing.finish("length")
    before, found, _ = text.partition(stop)
    assert (writing.text, writing.finish_reason) == (before, "stop" if found else "length")
    assert stop not in writing.text


def test_the_token_that_ends_a_text_is_no_part_of_it():
    writing = GeneratedText(BYTES, end_tokens=frozenset({0}))
    for token in b"ab\x00":
        writing.add(token)
    assert (writing.text, writing.finish_reason) == ("ab", "end of text")


@pytest.mark.parametrize(
    ("text", "stop", "length"), [("a\n\n", "\n\n\n", 2), ("aa", "aa", 1), ("", "a", 0), ("x", "", 0)]
)
def test_overlap(text: str, stop: str, length: int):
    assert overlap(text, stop) == length
