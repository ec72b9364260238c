"""The vocabulary of a GGUF file: byte-level BPE from a tokenizer.json, or bytes. No torch.

llama.cpp splits text by code of its own, which a file chooses by a name: a tokenizer whose way of
splitting has no name known here is rejected, as its tokens would be others there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import Fault
from weft.hf.gguf_model import CONVERTER

KEY = "tokenizer"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS: Mapping[str, str] = {SPLIT % "{1,3}": "llama-bpe", SPLIT % "": "qwen2"}
"""Pattern of a Split -> llama.cpp's name of it."""
GPT2 = "gpt-2"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in the file: of the vocabulary, special, added, and none."""
NO_TEXT_BYTE = 0xFF
"""A byte that no UTF-8 has: it ends texts, where llama.cpp would take byte 11 for their end."""


@dataclass(frozen=True)
class Vocabulary:
    """What the file says of the tokens.

    Attributes:
        splitter: llama.cpp's name of the way in which text is split before merges.
        tokens: text of each id, bytes as printable characters.
        kinds: of each token.
        merges: pairs, first come first served.
        begin: id that starts a text; None: nothing does.
        end: id that ends one.
        adds_begin: whether it is added to each text.
    """

    splitter: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    begin: int | None
    end: int | None
    adds_begin: bool


def byte_characters() -> tuple[str, ...]:
    """The printable character that byte-level BPE writes for each byte.

    Source: Radford et al. 2019, GPT-2's encoder.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in shown else next(others)) for byte in range(256))


def bytes_vocabulary(size: int) -> Vocabulary:
    """Of a model that reads bytes; `size`: rows of its embedding."""
    characters = byte_characters()
    merge = f"{characters[0xC0]} {characters[0xC1]}"  # a file needs one; no UTF-8 has these bytes
    tokens = (*characters, *_unused(256, size))
    kinds = (NORMAL,) * 256 + (UNUSED,) * (size - 256)
    return Vocabulary(GPT2, tokens, kinds, (merge,), NO_TEXT_BYTE, NO_TEXT_BYTE, adds_begin=False)


def tokenizer_faults(text: str) -> Iterator[Fault]:
    """Why llama.cpp would split text into other tokens than this tokenizer.json, if it would."""
    content = json.loads(text)
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or not _splitter(content):
        what = "GGUF has no name for its way of splitting text"
        got = f"{model.get('type')}, {_kind(content.get('pre_tokenizer'))}"
        need = "byte-level BPE that splits as GPT-2, Llama 3 or Qwen 2 do"
        yield Fault(KEY, what, got=got, need=need, fix=CONVERTER)
    normalizer = _kind(content.get("normalizer"))
    if normalizer not in ("none", "NFC"):
        yield Fault(KEY, "llama.cpp has no normalizer", got=normalizer, need="none", fix=CONVERTER)


def vocabulary_of(text: str, size: int, *, end: int | None) -> Vocabulary:
    """Of a tokenizer.json without faults.

    Args:
        size: rows of the model's embedding.
        end: id of the token that ends a document.
    """
    import tokenizers

    content = json.loads(text)
    model = content["model"]
    tokens = list(_unused(0, size))
    kinds = [UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    tokenizer = tokenizers.Tokenizer.from_str(text)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    begin = framed[0] if framed[0] != plain[0] else None
    if not merges:  # a file needs one; no UTF-8 has these bytes
        characters = byte_characters()
        merges.append(f"{characters[0xC0]} {characters[0xC1]}")
    return Vocabulary(
        _splitter(content) or GPT2,
        tuple(tokens),
        tuple(kinds),
        tuple(merges),
        begin,
        end,
        adds_begin=begin is not None,
    )


def add_vocabulary(writer: Any, vocabulary: Vocabulary, *, chat_template: str | None) -> None:
    """The fields of the tokenizer, into a `gguf.GGUFWriter`."""
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    begin = vocabulary.end if vocabulary.begin is None else vocabulary.begin
    if begin is not None:
        writer.add_bos_token_id(begin)
    if vocabulary.end is not None:
        writer.add_eos_token_id(vocabulary.end)
    writer.add_add_bos_token(vocabulary.adds_begin)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _unused(start: int, stop: int) -> Iterator[str]:
    """Texts of rows that no token has."""
    return (f"[PAD{number}]" for number in range(start, stop))


def _splitter(content: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of the way in which a tokenizer.json splits text."""
    pre = content.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    *before, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return GPT2 if last.get("use_regex", True) else None
    (split, *others) = before
    is_split = split.get("type") == "Split" and split.get("behavior") == "Isolated"
    if others or not is_split or split.get("invert") or last.get("use_regex", True):
        return None
    return SPLITTERS.get(split["pattern"].get("Regex", ""))


def _kind(part: Mapping[str, Any] | None) -> str:
    """The type of a part of a tokenizer.json."""
    return "none" if part is None else str(part.get("type"))
