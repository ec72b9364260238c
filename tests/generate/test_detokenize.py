"""Streaming detokenization: the pieces joined are the whole text, in whole characters, without any of the stop text."""

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


class ByteFallback:
    """A tokenizer that gives bytes which are no text a replacement character each, as Llama 2's does."""

    def decode(self, tokens: Iterable[int]) -> str:
        data = bytes(tokens)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(data)


def pieces_of(tokenizer: object, tokens: Iterable[int]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer)  # type: ignore[arg-type]
    return [*[detokenizer.add(token) for token in tokens], detokenizer.flush()]


@given(st.text())
@example("h\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{GRINNING FACE}")
def test_characters_are_never_split(text: str):
    data = text.encode("utf-8", "replace")
    pieces = pieces_of(BYTES, data)
    assert "".join(pieces) == data.decode()
    assert (
        all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
        or "\N{REPLACEMENT CHARACTER}" in text
    )


@given(st.binary())
@example(b"\xff\xff\xe2\x98")
def test_invalid_bytes_stream_as_they_decode_at_once(data: bytes):
    assert "".join(pieces_of(BYTES, data)) == data.decode(errors="replace")


@given(st.binary().filter(lambda data: len(data) % 2 == 0))
def test_tokens_of_several_bytes_stream_as_they_decode_at_once(data: bytes):
    tokens = []
    for place in range(0, len(data), 2):
        pair = data[place : place + 2]
        tokens.append(int.from_bytes(pair, "big"))
    assert "".join(pieces_of(Halves(), tokens)) == data.decode(errors="replace")


@given(st.text("a\N{SNOWMAN}\N{GRINNING FACE}"))
@example("\N{SNOWMAN}")
def test_characters_are_never_split_where_each_byte_shows_as_one(text: str):
    pieces = pieces_of(ByteFallback(), text.encode())
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, len(Words.pieces) - 1)))
def test_a_tokenizer_that_drops_a_leading_space_drops_it_once(tokens: list[int]):
    assert "".join(pieces_of(Words(), tokens)) == Words().decode(tokens)


def test_each_piece_is_returned_as_soon_as_it_is_final():
    assert pieces_of(BYTES, "a\N{SNOWMAN}b".encode()) == ["a", "", "", "\N{SNOWMAN}", "b", ""]


@given(st.text("ab\N{SNOWMAN}", max_size=12), st.text("ab\N{SNOWMAN}", min_size=1, max_size=3))
@example("aab", "ab")
def test_no_part_of_the_stop_text_is_returned(text: str, stop: str):
    generated = GeneratedText(BYTES, stop=stop)
    before = ""
    for token in text.encode():
        generated.add(token)
        assert generated.text.startswith(before), "text that was returned does not change"
        before = generated.text
        if generated.finish_reason:
            break
    generated.finish("length")
    before, found, _ = text.partition(stop)
    assert generated.text == before
    assert generated.finish_reason == ("stop" if found else "length")
    assert stop not in generated.text


def test_the_end_token_is_no_part_of_the_text():
    generated = GeneratedText(BYTES, end_tokens=frozenset({0}))
    for token in b"ab\x00":
        generated.add(token)
    assert generated.text == "ab"
    assert generated.finish_reason == "end of text"


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("a\n\n", "\n\n\n", 2), ("aa", "aa", 1), ("", "a", 0), ("x", "", 0)],
)
def test_overlap(text: str, stop: str, length: int):
    assert overlap(text, stop) == length
