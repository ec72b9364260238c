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
WITHOUT_MERGES = frozenset(("llama-bpe",))
"""Splitters for which llama.cpp takes a word that is a token without looking at merges."""
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
        note: what llama.cpp does not do, for the user.
    """

    splitter: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    begin: int | None
    end: int | None
    adds_begin: bool
    note: str = ""


def byte_characters() -> tuple[str, ...]:
    """The printable character that byte-level BPE writes for each byte.

    Source: Radford et al. 2019, GPT-2's encoder.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in shown else next(others)) for byte in range(256))


def _no_merge() -> str:
    """A merge of two bytes that no UTF-8 has, as a file needs one."""
    characters = byte_characters()
    return f"{characters[0xC0]} {characters[0xC1]}"


def bytes_vocabulary(size: int) -> Vocabulary:
    """Of a model that reads bytes; `size`: rows of its embedding."""
    tokens = (*byte_characters(), *_unused(256, size))
    kinds = (NORMAL,) * 256 + (UNUSED,) * (size - 256)
    return Vocabulary(
        GPT2, tokens, kinds, (_no_merge(),), NO_TEXT_BYTE, NO_TEXT_BYTE, adds_begin=False
    )


def tokenizer_faults(text: str, size: int) -> Iterator[Fault]:
    """Why llama.cpp would split text into other tokens than this tokenizer.json, if it would.

    Args:
        size: rows of the model's embedding.
    """
    content = json.loads(text)
    model = content["model"]
    splitter = _splitter(content)
    others = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or not splitter or any(map(model.get, others)):
        what = "GGUF has no name for its way of splitting text"
        got = f"{model.get('type')}, {_kind(content.get('pre_tokenizer'))}"
        need = "byte-level BPE that splits as GPT-2, Llama 3 or Qwen 2 do"
        yield Fault(KEY, what, got=got, need=need, fix=CONVERTER)
        return
    ignores = bool(model.get("ignore_merges"))
    if ignores != (splitter in WITHOUT_MERGES):
        what = f"llama.cpp has another ignore_merges for {splitter}"
        yield Fault(KEY, what, str(ignores), str(not ignores), CONVERTER)
    ids = (*model["vocab"].values(), *(each["id"] for each in content.get("added_tokens", ())))
    if max(ids, default=0) >= size:
        what = "has ids that the model has no embedding of"
        yield Fault(KEY, what, got=str(max(ids)), need=f"below {size}", fix=CONVERTER)
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
    splitter = _splitter(content)
    assert splitter is not None, "it has no faults"
    is_normalized = _kind(content.get("normalizer")) != "none"
    return Vocabulary(
        splitter,
        tuple(tokens),
        tuple(kinds),
        tuple(merges) or (_no_merge(),),
        begin,
        end,
        adds_begin=begin is not None,
        note="llama.cpp does not normalize text (NFC)" if is_normalized else "",
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
