"""`weft export --format gguf`: transformers' reader of GGUF has the model and the tokens, and what it cannot hold is rejected."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hf.folders import CONFIGS, config_of, random_values, write
from weft.cli import main
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.hf.folder import HfFolder
from weft.hf.gguf_model import context_length, model_faults, rope_divisors
from weft.hf.gguf_tokenizer import (
    BYTE_PIECES,
    SPACE,
    byte_characters,
    bytes_vocabulary,
    tokenizer_faults,
    vocabulary_of,
)

gguf = pytest.importorskip("gguf", reason="GGUF files are written by the package gguf (extra)")

LLAMA3 = "llama3 factor=8 original=64"
MODELS = {name: CONFIGS[name] for name in ("gpt2", "llama3", "llama3 tied", "qwen3", "qwen3-moe")}
MODELS["gemma3"] = CONFIGS["gemma3"].model_copy(update={"query_pre_attn_scalar": 12})


BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
ADDED = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
GEMMA_FRAME = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}
MERGES_APART = [[SPACE, "ab"], ["a", "b"], [SPACE, "a"], [f"{SPACE}a", "b"]]
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def imported(cfg: ModelConfig, base: Path) -> str:
    """A run of random values."""
    write(base / "hf", cfg, random_values(cfg))
    run = str(base / "run")
    assert main(["import", str(base / "hf"), "--out", run, "--compare", "False"]) == 0
    return run


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def values(file: Path) -> dict[str, np.ndarray]:
    tensors = gguf.GGUFReader(file).tensors
    return {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type).reshape(each.shape[::-1])
        for each in tensors
    }


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_model_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("transformers")
    run = imported(MODELS[name].model_copy(update={"vocab": 256}), tmp_path)
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        assert main(["export", run, str(out), "--format", "gguf", "--dtype", dtype]) == 0
        shown = capsys.readouterr().out
        assert f"{out}/model.gguf" in shown
        assert (
            "largest logit difference to transformers: " in shown
        )  # more than 1e-3 is exit code 1
        assert [path.name for path in out.iterdir()] == ["model.gguf"]


def test_blocks_of_32_values_share_a_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(CONFIGS["llama3"].model_copy(update={"vocab": 256}), tmp_path)
    for dtype in ("float32", "q8_0"):
        words = ("--format", "gguf", "--dtype", dtype, "--compare", "False")
        assert main(["export", run, str(tmp_path / dtype), *words]) == 0
    exact, rounded = (values(tmp_path / name / "model.gguf") for name in ("float32", "q8_0"))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        error = np.abs(rounded[name] - tensor).max()
        if tensor.ndim == 1:
            assert error == 0, name
        elif tensor.shape[-1] % 32:  # rows of 44 values: 16 bits
            assert 0 < error <= np.abs(tensor).max() * 2**-11, name
        else:
            assert 0 < error <= np.abs(tensor).max() / 127, name


def test_rows_of_q_and_k_are_in_neighbouring_pairs(tmp_path: Path) -> None:
    """llama.cpp rotates rows 2 i and 2 i + 1 of a head by one angle, weft rows i and i + half."""
    cfg = config_of(write(tmp_path / "hf", CONFIGS["llama3"], random_values(CONFIGS["llama3"])))
    run = str(tmp_path / "run")
    assert main(["import", str(tmp_path / "hf"), "--out", run, "--compare", "False"]) == 0
    write_tokenizer(tmp_path / "run" / "hf")
    assert main(["export", run, str(tmp_path / "out"), "--format", "gguf"]) == 0
    found = values(tmp_path / "out" / "model.gguf")["blk.0.attn_k.weight"]
    folder = HfFolder(tmp_path / "hf", cfg)
    shape = folder.shapes["layer0.attn.k.weight"]
    ours = folder.read("layer0.attn.k.weight", Box.whole(shape)).numpy()
    half = 4  # heads of 8
    for row in range(16):
        head, place = divmod(row, 8)
        pair, second = divmod(place, 2)
        assert np.array_equal(found[row], ours[8 * head + pair + half * second])


def write_tokenizer(folder: Path, **changes: Any) -> str:
    """A byte-level BPE with two merges and a special token, as tokenizers writes it."""
    vocab = {char: number for number, char in enumerate(sorted(byte_characters())[:46])}
    vocab["ab"] = 46
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 47, "content": "<|endoftext|>", **ADDED}],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": {**vocab, "a": 48, "b": 49}, "merges": [["a", "b"]]},
        **changes,
    }
    folder.mkdir(exist_ok=True)
    text = json.dumps(content)
    (folder / "tokenizer.json").write_text(text)
    return text


def test_the_vocabulary_has_a_token_for_each_row(tmp_path: Path) -> None:
    found = vocabulary_of(write_tokenizer(tmp_path), 52, end=47)
    assert len(found.tokens) == len(found.kinds) == 52
    assert (found.tokens[46:], found.kinds[46:]) == (
        ("ab", "<|endoftext|>", "a", "b", "[PAD50]", "[PAD51]"),
        (1, 3, 1, 1, 5, 5),
    )
    assert (found.splitter, found.merges, found.end) == ("gpt-2", ("a b",), 47)
    assert (found.begin, found.adds_begin) == (None, False)


def write_pieces(folder: Path, *, model: dict[str, Any] | None = None, **changes: Any) -> str:
    """A tokenizer of pieces with all merges, as one that is made from a SentencePiece model."""
    pieces = ("<unk>", "<s>", *BYTE_PIECES, "a", "b", SPACE, "ab", f"{SPACE}a", f"{SPACE}ab")
    added = [{**ADDED, "id": number, "content": pieces[number]} for number in (0, 1)]
    merges = [["a", "b"], [SPACE, "a"], [SPACE, "ab"], [f"{SPACE}a", "b"]]
    of_pieces = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": merges}
    of_pieces |= {"vocab": {piece: number for number, piece in enumerate(pieces)}, **(model or {})}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "model": of_pieces,
        **changes,
    }
    text = json.dumps(content)
    (folder / "tokenizer.json").write_text(text)
    return text


def test_pieces_have_the_scores_of_their_merges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By which llama.cpp merges; bytes and the unknown token are named as such."""
    cfg = CONFIGS["llama3"].model_copy(update={"vocab": 265})
    run = imported(cfg, tmp_path)
    text = write_pieces(tmp_path / "run" / "hf")
    assert not list(tokenizer_faults(text, 265))
    assert main(["export", run, str(tmp_path / "out"), "--format", "gguf"]) == 0
    assert "largest logit difference to transformers: " in capsys.readouterr().out
    found = fields(tmp_path / "out" / "model.gguf")
    names = ("model", "pre", "add_space_prefix", "unknown_token_id")
    of_file = [found[f"tokenizer.ggml.{name}"] for name in names]
    assert of_file == ["llama", "default", True, 0]
    assert found["tokenizer.ggml.scores"][-4:] == [0, -1, -2, 0]  # ab, _a, _ab, and no piece
    assert found["tokenizer.ggml.token_type"][:3] == [2, 3, 6]
    assert found["tokenizer.ggml.token_type"][-2:] == [1, 5]
    assert not vocabulary_of(write_pieces(tmp_path, **GEMMA_FRAME), 265, end=None).adds_space


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": {"merges": [["a", "b"]]}}, "merge other pieces (got 1 merges"),
        ({"model": {"merges": MERGES_APART}}, "merge other pieces (got 4 merges"),
        ({"added_tokens": [{**ADDED, "id": 264, "content": SPACE * 2}]}, "added tokens of spaces"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "no name for its way of splitting text"),
        ({"model": {"ignore_merges": True}}, "no name for its way of splitting text"),
    ],
)
def test_pieces_that_llama_cpp_would_merge_otherwise_are_rejected(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    """Where a pair is no merge, or those of a piece do not follow each other."""
    (fault,) = tokenizer_faults(write_pieces(tmp_path, **changes), 265)
    assert what in str(fault)


def test_bytes_are_the_tokens_of_a_model_of_bytes() -> None:
    found = bytes_vocabulary(260)
    assert "".join(found.tokens[byte] for byte in "né".encode()) == "nÃ©"
    assert found.tokens[256:] == ("[PAD256]", "[PAD257]", "[PAD258]", "[PAD259]")


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "BPE, Whitespace"),
        ({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}}, "BPE, ByteLevel"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram, ByteLevel"),
        ({"model": {**BPE, "ignore_merges": True}}, "True"),
        ({"model": {**BPE, "vocab": {"a": 60}}}, "60"),
        ({"model": {**BPE, "end_of_word_suffix": "</w>"}}, "BPE, ByteLevel"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_split_otherwise_is_rejected(
    tmp_path: Path, changes: dict[str, Any], got: str
) -> None:
    (fault,) = tokenizer_faults(write_tokenizer(tmp_path, **changes), 50)
    assert fault.got == got


@pytest.mark.parametrize(("digits", "name"), [("{1,3}", "llama-bpe"), ("", "qwen2")])
def test_patterns_of_known_tokenizers_have_llama_cpps_names(
    tmp_path: Path, digits: str, name: str
) -> None:
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {**BYTE_LEVEL, "use_regex": False}
    pre = {"type": "Sequence", "pretokenizers": [split, level]}
    text = write_tokenizer(tmp_path, pre_tokenizer=pre, normalizer={"type": "NFC"})
    if name == "llama-bpe":  # as Llama 3's own
        (fault,) = tokenizer_faults(text, 50)
        assert (fault.got, fault.need) == ("False", "True")
        text = text.replace('"merges": ', '"ignore_merges": true, "merges": ')
    assert not list(tokenizer_faults(text, 50))
    found = vocabulary_of(text, 50, end=47)
    assert (found.splitter, found.note) == (name, "llama.cpp does not normalize text (NFC)")


def test_frequencies_of_llama_3_are_divided_by_its_rule() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {"hidden_size": 128, "num_attention_heads": 4}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters={**scaling, "rope_theta": 1e4})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 1e4 ** -(np.arange(16) / 16)
    divisors = rope_divisors({**sizes, "rope_theta": 1e4, "rope_scaling": scaling})
    assert np.allclose(plain / divisors, scaled.numpy(), rtol=1e-6)
    assert len(set(divisors)) > 3


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.1386294361119891,  # 0.1 ln 4 + 1
    "truncate": True,
}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "hidden_size": 1152,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rope_scaling": None,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "key", "got"),
    [
        ({"model_type": "deepseek_v3"}, "format", "deepseek_v3"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "format",
            "LlamaForSequenceClassification",
        ),
        ({"norm_topk_prob": False}, "model.norm_topk_prob", "False"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "model.rope_scaling", "dynamic"),
        (
            {"rope_scaling": {**YARN, "beta_fast": 16.0}},
            "model.rope_scaling",
            "yarn, beta_fast 16.0",
        ),
        (
            {"rope_scaling": {**YARN, "truncate": False}},
            "model.rope_scaling",
            "yarn, truncate False",
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": 1.0}},
            "model.rope_scaling",
            "yarn, attention_factor 1.0",
        ),
        (
            {"model_type": "qwen3", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "model.rope_scaling",
            "llama3",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise_are_rejected(
    changes: dict[str, Any], key: str, got: str
) -> None:
    usual: list[dict[str, Any]] = [{}, {"rope_scaling": YARN}, {"rope_scaling": LINEAR}]
    assert not [fault for other in usual for fault in model_faults({**LLAMA, **other})]
    (fault,) = model_faults({**LLAMA, **changes})
    assert (fault.key, fault.got) == (key, got)


@pytest.mark.parametrize(
    ("changes", "key", "got"),
    [
        ({"query_pre_attn_scalar": 168}, "model.query_pre_attn_scalar", "168"),
        ({"num_hidden_layers": 62}, "model.query_pre_attn_scalar", "256"),
        ({"rope_scaling": YARN}, "model.rope_scaling", "yarn"),
    ],
)
def test_scores_and_scalings_of_gemma_are_those_of_llama_cpp(
    changes: dict[str, Any], key: str, got: str
) -> None:
    """Which takes the root of a head's size, but of another number in the model of 27B."""
    for known in ({}, {"rope_scaling": LINEAR}):
        assert not list(model_faults({**GEMMA, **known}))
    large = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32}
    assert not list(model_faults({**GEMMA, **large, "query_pre_attn_scalar": 168}))
    (fault,) = model_faults({**GEMMA, **changes})
    assert (fault.key, fault.got) == (key, got)


def test_norms_of_gemma_multiply_by_what_the_file_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And layers without a window are as far apart as in the model."""
    cfg = MODELS["gemma3"].model_copy(update={"vocab": 256, "global_every": 2})
    assert main(["export", imported(cfg, tmp_path), str(tmp_path / "out"), "--format", "gguf"]) == 0
    assert "sliding_window_pattern: read by llama.cpp since 2026" in capsys.readouterr().out
    file = tmp_path / "out" / "model.gguf"
    folder = HfFolder(tmp_path / "hf", config_of(tmp_path / "hf"))
    name = "layer0.attn_norm.weight"
    ours = folder.read(name, Box.whole(folder.shapes[name])).numpy()
    assert np.array_equal(values(file)["blk.0.attn_norm.weight"], ours + 1)
    assert fields(file)["gemma3.attention.sliding_window_pattern"] == 2


def test_a_window_is_the_context_of_the_file() -> None:
    """But of Gemma's, which llama.cpp computes."""
    assert context_length(LLAMA) == 8192
    assert context_length({**LLAMA, "sliding_window": 4096}) == 4096
    assert context_length(GEMMA) == 32_768


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--format", "gguf", "x.gguf"),
            "error: weft export: writes model.gguf into a folder (got x.gguf; need a folder)."
            " Fix: weft export RUN x --format gguf\n",
        ),
        (
            ("--format", "gguf", "--adapters", "True"),
            "error: adapters: gguf has the whole model (got True; need False). Fix: export without"
            " --adapters, which merges them, or without --format\n",
        ),
        (
            ("--format", "gguf", "--max_shard_bytes", "9"),
            "error: max_shard_bytes: gguf is one file (got 9). Fix: leave it out\n",
        ),
        (
            ("--dtype", "q8_0"),
            "error: dtype: safetensors have no such type (got q8_0). Fix: add --format gguf\n",
        ),
    ],
)
def test_options_of_the_other_format_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    run = imported(CONFIGS["llama3"], tmp_path)
    capsys.readouterr()
    place = () if words[-1] == "x.gguf" else (str(tmp_path / "out"),)
    assert main(["export", run, *place, *words]) == 2
    assert capsys.readouterr().err.replace(run, "RUN") == line
    assert not (tmp_path / "out").exists()


def test_a_scaling_of_each_kind_is_written_as_weft_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    for kind in ("linear factor=4", "yarn factor=4 original=64"):
        cfg = CONFIGS["llama3"].model_copy(update={"vocab": 256, "rope_scaling": kind})
        base = tmp_path / kind.split()[0]
        base.mkdir()
        out = base / "out"
        assert main(["export", imported(cfg, base), str(out), "--format", "gguf"]) == 0
        assert "largest logit difference to transformers: " in capsys.readouterr().out
        found = fields(out / "model.gguf")
        assert found["llama.rope.scaling.type"] == base.name
        assert found["llama.rope.scaling.factor"] == 4


def test_fields_are_those_of_the_config(tmp_path: Path) -> None:
    cfg = CONFIGS["llama3"].model_copy(update={"vocab": 256, "rope_scaling": LLAMA3})
    run = imported(cfg, tmp_path)
    words = ("--format", "gguf", "--compare", "False")
    assert main(["export", run, str(tmp_path / "out"), *words]) == 0
    file = tmp_path / "out" / "model.gguf"
    found = fields(file)
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 44,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "tokenizer.ggml.pre": "gpt-2",
    }
    assert {name: found[name] for name in expected} == expected
    assert len(found["tokenizer.ggml.tokens"]) == 256
    assert values(file)["rope_freqs.weight"].max() == 8


def test_transformers_own_code_of_an_architecture_of_weft_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    write(tmp_path / "hf", CONFIGS["qwen3"], random_values(CONFIGS["qwen3"]))
    run = str(tmp_path / "run")
    words = ("--model.name", "hf:qwen3", "--compare", "False")
    assert main(["import", str(tmp_path / "hf"), "--out", run, *words]) == 0
    write_tokenizer(tmp_path / "run" / "hf")
    assert main(["export", run, str(tmp_path / "out"), "--format", "gguf"]) == 0
    assert "largest logit difference to transformers: " in capsys.readouterr().out
    found = fields(tmp_path / "out" / "model.gguf")
    assert found["general.architecture"] == "qwen3"
    assert found["qwen3.rope.freq_base"] == 1e6


def test_the_fix_of_a_file_name_is_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(CONFIGS["llama3"].model_copy(update={"vocab": 256}), tmp_path)
    assert main(["export", run, str(tmp_path / "my.gguf")]) == 2
    fix = capsys.readouterr().err.partition("Fix: weft ")[2]
    assert main([*shlex.split(fix), "--compare", "False"]) == 0
    assert (tmp_path / "my" / "model.gguf").is_file()
