"""The vocabulary of a GGUF file: byte-level or SentencePiece-like BPE from a tokenizer.json, or bytes. No torch.

llama.cpp splits text by code of its own, which a file chooses by a name: a tokenizer whose way of
splitting has no name known here is rejected, as its tokens would be others there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import Fault
from weft.hf.gguf_model import CONVERTER

Json = Mapping[str, Any]

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
BYTE_LEVEL, PIECES = "gpt2", "llama"
"""llama.cpp's names of two kinds of vocabularies: byte-level BPE, and pieces of text with scores."""
SPACE = "\u2581"
"""The character of pieces for a space."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens in the file: of the vocabulary, special, added, none, and bytes without a piece."""
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""Pieces of bytes that no other piece has."""
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
FRAMES: Mapping[str, bool] = {
    json.dumps([normalizer, pre], sort_keys=True): adds_space
    for normalizer, pre, adds_space in (
        ({"type": "Sequence", "normalizers": [_PREPEND, _SPACES]}, None, True),
        (_SPACES, None, False),
        (_SPACES, _SPLIT, False),  # Gemma's: no space is left to split at
    )
}
"""Normalizer and pre-tokenizer of a tokenizer of pieces, as JSON -> whether a space is put before texts."""
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
        scores: of pieces, of which the highest is merged first; empty: it is byte-level BPE.
        unknown: id of what no piece has.
        adds_space: whether a space is put before each text.
    """

    splitter: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]
    begin: int | None
    end: int | None
    adds_begin: bool
    note: str = ""
    scores: tuple[float, ...] = ()
    unknown: int | None = None
    adds_space: bool = False


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
    added = content.get("added_tokens", ())
    if _puts_space(content) is not None:
        yield from _piece_faults(model, added)
        yield from _id_faults(model, added, size)
        return
    splitter = _splitter(content)
    others = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or not splitter or any(map(model.get, others)):
        what = "GGUF has no name for its way of splitting text"
        got = f"{model.get('type')}, {_kind(content.get('pre_tokenizer'))}"
        need = "byte-level BPE that splits as GPT-2, Llama 3 or Qwen 2 do, or SentencePiece's BPE"
        yield Fault(KEY, what, got=got, need=need, fix=CONVERTER)
        return
    ignores = bool(model.get("ignore_merges"))
    if ignores != (splitter in WITHOUT_MERGES):
        what = f"llama.cpp has another ignore_merges for {splitter}"
        yield Fault(KEY, what, str(ignores), str(not ignores), CONVERTER)
    yield from _id_faults(model, added, size)
    normalizer = _kind(content.get("normalizer"))
    if normalizer not in ("none", "NFC"):
        yield Fault(KEY, "llama.cpp has no normalizer", got=normalizer, need="none", fix=CONVERTER)


def _id_faults(model: Json, added: Sequence[Json], size: int) -> Iterator[Fault]:
    ids = (*model["vocab"].values(), *(each["id"] for each in added))
    if max(ids, default=0) >= size:
        what = "has ids that the model has no embedding of"
        yield Fault(KEY, what, got=str(max(ids)), need=f"below {size}", fix=CONVERTER)


def _piece_faults(model: Json, added: Sequence[Json]) -> Iterator[Fault]:
    """Why pieces that are merged by their scores, as in llama.cpp, are others than those of the merges.

    llama.cpp merges two neighbours whenever they make a piece, the piece of the highest score first;
    so every such pair must be a merge, and those of one piece must follow each other.
    """
    vocab = model["vocab"]
    merges = _merges(model)
    places: dict[str, list[int]] = {}
    for place, pair in enumerate(merges):
        places.setdefault("".join(pair), []).append(place)
    pairs = {
        (piece[:at], piece[at:])
        for piece in vocab.keys() - {each["content"] for each in added} - set(BYTE_PIECES)
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    }
    are_together = all(at[-1] - at[0] < len(at) for at in places.values())
    if pairs != set(merges) or not are_together or not vocab.keys() >= set(BYTE_PIECES):
        what = "llama.cpp would merge other pieces"
        need = "the merges and bytes of a SentencePiece model"
        yield Fault(KEY, what, got=f"{len(merges)} merges", need=need, fix=CONVERTER)
    spaces = [each["content"] for each in added if SPACE in each["content"]]
    if spaces:
        yield Fault(KEY, "has added tokens of spaces", got=repr(spaces[0]), fix=CONVERTER)


def _merges(model: Json) -> list[tuple[str, ...]]:
    """The pairs that are merged, in their order."""
    return [tuple(each.split(" ") if isinstance(each, str) else each) for each in model["merges"]]


def _puts_space(content: Json) -> bool | None:
    """Whether a tokenizer of pieces puts a space before each text; None: it is none of these."""
    model = content["model"]
    others = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or not model.get("byte_fallback"):
        return None
    if any(map(model.get, others)):
        return None
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer")
    return FRAMES.get(json.dumps([normalizer, pre], sort_keys=True))


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
    for byte in BYTE_PIECES if _puts_space(content) is not None else ():
        kinds[model["vocab"][byte]] = BYTE
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    tokenizer = tokenizers.Tokenizer.from_str(text)
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    begin = framed[0] if framed[0] != plain[0] else None
    adds_space = _puts_space(content)
    if adds_space is not None:
        scores = [0.0] * size
        for place, pair in reversed(list(enumerate(_merges(model)))):
            scores[model["vocab"]["".join(pair)]] = -float(place)
        unknown = model["vocab"].get(model.get("unk_token"))
        if unknown is not None:
            kinds[unknown] = UNKNOWN
        return Vocabulary(
            "default",
            tuple(tokens),
            tuple(kinds),
            (),
            begin,
            end,
            adds_begin=begin is not None,
            scores=tuple(scores),
            unknown=unknown,
            adds_space=adds_space,
        )
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
    writer.add_tokenizer_model(PIECES if vocabulary.scores else BYTE_LEVEL)
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.unknown is not None:
        writer.add_unk_token_id(vocabulary.unknown)
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
