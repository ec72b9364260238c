"""The table of bad inputs: words of a command, the change to the valid folders before it, and a part of the expected line."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.input.folders import (
    HF_CONFIG,
    NORM,
    Q,
    edit_header,
    edit_json,
    forge_manifest,
    tensors,
    write,
    write_manifest,
    write_safetensors,
)

Change = Callable[[Path], object]
MIB = 2**20
DEEP = 100_000
"""Levels of nesting that end a recursive parser."""
STEP = "run/ckpt/step-000003"


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        words: of the command line.
        line: part of its line on stderr.
        change: what is done to the valid folders before.
        faults: lines it may have: an input may be wrong in several ways.
        env: environment variables, of an engine that has started the ranks.
    """

    name: str
    words: tuple[str, ...]
    line: str = ""
    change: Change | None = None
    faults: int = 1
    env: tuple[tuple[str, str], ...] = ()


def _nothing(_folder: Path) -> None:
    pass


def link(name: str, target: str) -> Change:
    def make(folder: Path) -> None:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return make


def fifo(name: str) -> Change:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def as_folder(name: str) -> Change:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / name, size)


def flip(name: str, at: int) -> Change:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 0x10
        (folder / name).write_bytes(content)

    return change


def huge_cell(name: str) -> Change:
    """A parquet file of some kilobytes, with one text of 80 MiB."""

    def make(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": ["x" * (80 * MIB)]})
        pyarrow.parquet.write_table(table, folder / name, compression="zstd")

    return make


# ---------------------------------------------------------------------------------------------- values of the config

VALUES: dict[str, tuple[str, ...]] = {
    "mesh": (
        "dp0",
        "dp-1",
        "x2",
        "dp2dp2",
        "dp2 dp2",
        "dp1.5",
        "pp99999999",
        "dp1000000000000000000000",
        "tp",
        "2",
    ),
    "steps": (
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "x",
        "99999999999999999999999",
        "1e400",
        "0x10",
        "None",
    ),
    "seed": ("-1", "9223372036854775808", "1.5", "seed"),
    "nproc": ("0", "-2", "3"),
    "port": ("0", "-1", "65536", "http"),
    "device": ("gpu", "cuda:0", "tpu"),
    "transport": ("mpi", "nccl"),
    "sample": ("-1", "1e30"),
    "sample_every": ("-1", "1e30", "x"),
    "batch.global_size": ("0", "-8", "3", "1e18", "x"),
    "batch.micro_size": ("0", "-1", "3", "1e18"),
    "data.seq_len": ("0", "-5", "16777217", "1e12"),
    "data.token_dtype": ("uint8", "int64"),
    "data.packing": ("tight",),
    "data.prefetch": ("-1", "65"),
    "data.source": (
        "nowhere",
        "",
        "/proc/self/mem",
        "/dev/zero",
        "/dev/random",
        "a" * 5000,
        "**/*.nothing",
        "~unknown-user/y",
    ),
    "hardware": ("h10", "", "nowhere.toml", "text.txt/x"),
    "data.tokenizer": ("nowhere.json", "/dev/zero", "text.txt"),
    "optim.name": ("adam", "muno"),
    "optim.lr": ("0", "-1", "nan", "inf", "fast", "1e400"),
    "optim.min_lr": ("-1", "nan", "1.5", "3e-5"),
    "optim.warmup": ("-1", "1e13"),
    "optim.betas": ("0.9", "0.9 1.0", "0.9 -0.1", "a b"),
    "optim.eps": ("0", "-1"),
    "optim.clip": ("-1", "nan"),
    "optim.momentum": ("1", "-1"),
    "optim.decay": ("exp",),
    "parallel.zero": ("4", "-1", "yes"),
    "parallel.context": ("star",),
    "parallel.recompute": ("all", "full:0", "full+none", "full/none/full", "auto:some"),
    "compile": ("all", "True"),
    "pipeline.schedule": ("1fb1", "nowhere.txt", "/dev/zero", "prep", "text.txt"),
    "pipeline.chunks": ("0", "257"),
    "pipeline.split": ("0", "1 2", "x"),
    "precision.compute": ("float8", "int8"),
    "precision.params": ("bfloat16", "float8"),
    "lora.rank": ("-1", "65537"),
    "lora.alpha": ("0", "nan"),
    "lora.base": ("nowhere",),
    "save.every": ("-1", "1e13"),
    "save.keep": ("0", "1e13"),
    "eval.every": ("-1", "1e13"),
    "alert.command": ("", "no-such-program", "cat 'x"),
    "alert.url": ("$WEFT_NOT_SET", "ftp://host/x", "https://me:key@host/x", "https://host/x?k=1"),
    "log.every": ("-1", "1e13", "1.5", "often"),
    "log.blocks": ("-1", "1e13", "1.5", "all"),
    "resume": ("nowhere", "text.txt", "prep"),
    "model.name": ("lama", "", "LLAMA3"),
    "model.preset": ("llama3-9b", "gpt2-tiny-x"),
    "model.from_hf": ("nowhere", "text.txt", "prep", "meta-llama/Llama-3.2-1B"),
    "model.layers": ("0", "10001", "1e12", "-4"),
    "model.dim": ("0", "2147483649", "127"),
    "model.heads": ("0", "3", "-1"),
    "model.vocab": ("0", "99", "1e18"),
    "model.rope_theta": ("0", "nan"),
    "out": ("text.txt/run", "/proc/x", "run", "a" * 5000),
}


def config_values() -> Iterator[Case]:
    for key, values in VALUES.items():
        for value in values:
            if key in ("optim.betas", "pipeline.split"):
                given = value.split(" ")
            else:
                given = [value]
            yield Case(f"{key} {value[:20]!r}", ("train", f"--{key}", *given), "", faults=4)
    for line in ("rope_theta", "steps", "model.layers"):
        yield Case(f"{line} without a value", ("train", f"--{line}"))


# ---------------------------------------------------------------------------------------------- TOML files

TOML: dict[str, tuple[str | bytes, str]] = {
    "two equals": ("steps == 3", "is not TOML"),
    "an open string": ('mesh = "dp2', "is not TOML"),
    "an open table": ("[optim\nlr = 1", "is not TOML"),
    "a key twice": ("steps = 1\nsteps = 2", "is not TOML"),
    "a table twice": ("[optim]\nlr=1.0\n[optim]\nlr=2.0", "is not TOML"),
    "a section as a value": ("optim = 3", "is a section"),
    "a value as a section": ("[steps]\nx = 1", "unknown key"),
    "an unknown key": ("stepz = 3", "unknown key"),
    "an unknown section": ("[optimizer]\nlr = 1", "unknown key"),
    "text for a number": ('steps = "many"', "steps: wrong type"),
    "a list for a number": ("steps = [3]", "steps: wrong type"),
    "a date": ("steps = 1979-05-27", "steps: wrong type"),
    "true for a number": ("steps = true", "steps: wrong type"),
    "a number for text": ("mesh = 2", "mesh: wrong type"),
    "NaN": ("[optim]\nlr = nan", "optim.lr: out of range"),
    "infinity": ("[optim]\nlr = inf", "optim.lr: out of range"),
    "5,000 digits": (f"steps = {'9' * 5000}", "is not a config"),
    "100 digits": (f"steps = {'9' * 100}", "is not a config"),
    "nested lists": ("steps = " + "[" * 5000 + "]" * 5000, "is not a config"),
    "nested tables": ("steps = " + "{a=" * 5000 + "1" + "}" * 5000, "is not a config"),
    "a key of 50,000 parts": ("a" + ".a" * 50_000 + " = 1", "is not a config"),
    "a table of 50,000 parts": ("[a" + ".a" * 50_000 + "]", "is not a config"),
    "2 MiB of comment": ("#" * 2 * MIB, "is too large"),
    "20,000 unknown keys": ("".join(f"k{i} = 1\n" for i in range(20_000)), "20000 keys"),
    "not UTF-8": (b"mesh = '\xff'", "not UTF-8"),
    "UTF-16": ("steps = 3".encode("utf-16"), "not UTF-8"),
    "zero bytes": (b"\0" * 100, "is not TOML"),
    "JSON": ('{"steps": 3}', "is not TOML"),
    "YAML": ("steps: 3", "is not TOML"),
    "Python": ("import os; os.system('x')", "is not TOML"),
    "an escape sequence as key": ('"\\u001b[31mx" = 1', "unknown key"),
    "an ELF file": (b"\x7fELF\x02\x01\x01" + b"\0" * 64, "is not TOML"),
    "a zip file": (b"PK\x03\x04" + b"\0\xff" * 40, "not UTF-8"),
    "a negative size": ("[batch]\nglobal_size = -1", "batch.global_size: out of range"),
    "a mix without weights": ('[data]\nmix = ["text.txt"]', "data.mix"),
    "a mix with negative weights": ('[data]\nmix = ["text.txt=-1"]', "data.mix"),
    "a mix with NaN": ('[data]\nmix = ["text.txt=nan"]', "data.mix"),
}


BASES: dict[str, tuple[str, str]] = {
    "itself": ('"bad.toml"', "base: is a cycle (got bad.toml -> bad.toml)"),
    "nowhere": ('"nowhere.toml"', "base: of bad.toml: no such file (got 'nowhere.toml'"),
    "a device": ('"/dev/zero"', "base: of bad.toml: is no regular file"),
    "no TOML": ('"text.txt"', "base: of bad.toml: text.txt is not TOML"),
    "a number": ("3", "base: of bad.toml is no path (got 3"),
    "a section": ('{file = "x"}', "base.file: unknown key"),
}


def toml_files() -> Iterator[Case]:
    for name, (content, line) in TOML.items():
        yield Case(name, ("train", "bad.toml"), line, write("bad.toml", content), faults=2)
    words = ("explain", "bad.toml")
    yield Case("a pipe", words, "is no regular file", fifo("bad.toml"))
    yield Case("a folder", words, "is no regular file", as_folder("bad.toml"))
    yield Case("a device", words, "is no regular file", link("bad.toml", "/dev/zero"))
    yield Case("a dangling link", words, "no such file", link("bad.toml", "nowhere"))
    yield Case("a link to itself", words, "error: config", link("bad.toml", "bad.toml"))
    for name, (base, line) in BASES.items():
        content = f"base = {base}\n"
        for command in ("train", "explain"):
            words = (command, "bad.toml")
            yield Case(f"base: {name}, {command}", words, line, write("bad.toml", content))
    content = 'base = "../../outside/secret.txt"\n'
    words = ("train", "run")
    line = "base: is not read from run/run.toml, which lies in a run folder"
    yield Case("a base in a run folder", words, line, write("run/run.toml", content))


# ---------------------------------------------------------------------------------------------- data

TEXT_NESTED = '{"text": ' + "[" * DEEP + "]" * DEEP + "}\n"
LINES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("hello\n", "data.jsonl:1 is not JSON"),
    "half a line": ('{"text": "a"}\n{"text": "b', "data.jsonl:2 is not JSON"),
    "a list": ('["text"]\n', "in place of an object"),
    "a number": ("3\n", "is not a JSON object"),
    "no field": ('{"body": "x"}\n', "has no such field"),
    "a number as text": ('{"text": 3}\n', "is not text"),
    "null as text": ('{"text": null}\n', "is not text"),
    "nested": (TEXT_NESTED, "nested more than"),
    "5,000 digits": ('{"text": "a", "n": ' + "9" * 5000 + "}\n", "is not JSON"),
    "not UTF-8": (b'{"text": "\xff"}\n', "is not JSON"),
    "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), "is no text (got UTF-16 text"),
    "nothing": ("", "is empty"),
    "empty texts": ('{"text": ""}\n' * 9, "is empty"),
    "zero bytes": (b"\0" * 1000, "got binary data"),
}


def long_line(folder: Path) -> None:
    """100 MiB in one line, 100 KB compressed."""
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(100):
            file.write(b"a" * MIB)
        file.write(b'"}\n')


def data_files() -> Iterator[Case]:
    for name, (content, line) in LINES.items():
        change = write("data.jsonl", content)
        yield Case(f"train, {name}", ("train", "--data.source", "data.jsonl"), line, change)
        yield Case(
            f"prepare, {name}", ("data", "prepare", "data.jsonl", "--out", "new"), line, change
        )
    yield Case(
        "a line of 100 MiB",
        ("data", "prepare", "bomb.jsonl.gz", "--out", "new"),
        "is too long",
        long_line,
    )
    yield Case(
        "100 MiB, in train", ("train", "--data.source", "bomb.jsonl.gz"), "is too long", long_line
    )
    broken = write("x.txt.gz", b"\x1f\x8b\x08broken")
    yield Case("a broken gzip file", ("train", "--data.source", "x.txt.gz"), "broken gzip", broken)
    cut_gzip = write("x.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 999)[:-20])
    yield Case(
        "a cut gzip file",
        ("data", "prepare", "x.jsonl.gz", "--out", "new"),
        "broken gzip",
        cut_gzip,
    )
    train = ("train", "--data.source", "d")
    yield Case("a folder with a pipe", train, "is no regular file", _folder_with(fifo("d/a.txt")))
    outside = _folder_with(link("d/a.txt", "/etc/passwd"))
    yield Case("a folder with a link out of it", train, "leads out of its folder", outside)
    yield Case(
        "a folder with a device", train, "d/a.txt", _folder_with(link("d/a.txt", "/dev/zero"))
    )
    yield Case("an empty folder", train, "no file to read", lambda folder: (folder / "d").mkdir())
    yield Case(
        "prepare a link out of it", ("data", "prepare", "d", "--out", "new"), "leads out", outside
    )
    odd = write("x.bin", b"123")
    yield Case("half a token", ("train", "--data.source", "x.bin"), "ends inside a token", odd)
    ids = np.full(999, 60_000, "<u2").tobytes()
    yield Case(
        "ids too large",
        ("train", "--data.source", "x.bin"),
        "outside the vocabulary",
        write("x.bin", ids),
    )
    yield Case("a pipe of text", ("train", "--data.source", "p.txt"), "regular file", fifo("p.txt"))
    yield Case("not UTF-8 text", ("data", "prepare", "x.txt", "--out", "new", "--tokenizer", "train"), "UTF-8",
               write("x.txt", b"\xff\xfe" * 999))  # fmt: skip
    parquet = write("x.parquet", b"PAR1" + b"\xff" * 999 + b"PAR1")
    yield Case(
        "no parquet file", ("train", "--data.source", "x.parquet"), "is not a parquet file", parquet
    )
    yield Case(
        "a huge cell of a parquet file",
        ("train", "--data.source", "x.parquet"),
        "row 1 holds a text that is too long",
        huge_cell("x.parquet"),
    )
    for name, words in {
        "no input": ("data", "prepare", "--out", "new"),
        "no out": ("data", "prepare", "text.txt"),
        "out exists": ("data", "prepare", "text.txt", "--out", "prep"),
        "out behind a URL": ("data", "prepare", "text.txt", "--out", "s3://bucket/new"),
        "out below a file": ("data", "prepare", "text.txt", "--out", "text.txt/new"),
        "out in /proc": ("data", "prepare", "text.txt", "--out", "/proc/new"),
        "input missing": ("data", "prepare", "nowhere", "--out", "new"),
        "tokenizer missing": (
            "data",
            "prepare",
            "text.txt",
            "--out",
            "new",
            "--tokenizer",
            "nowhere",
        ),
        "vocab too small": (
            "data",
            "prepare",
            "text.txt",
            "--out",
            "new",
            "--tokenizer",
            "train",
            "--vocab",
            "9",
        ),
        "valid 1": ("data", "prepare", "text.txt", "--out", "new", "--valid", "1"),
        "split_on": ("data", "prepare", "text.txt", "--out", "new", "--split_on", "word"),
        "show nothing": ("data", "show", "text.txt"),
        "show missing": ("data", "show", "nowhere"),
        "an unknown word": ("data", "delete", "prep"),
    }.items():
        yield Case(name, words)
    images = ("train", "--model.name", "mnist", "--data.source", "m")
    yield Case("no images", images, "no pair of IDX files", lambda folder: (folder / "m").mkdir())
    yield Case(
        "images cut", images, "m/train", _images(b"\0\0\x08\x03\0\0\xff\xff\0\0\0\x1c\0\0\0\x1c")
    )
    yield Case(
        "images of 2^96 bytes", images, "is truncated", _images(b"\0\0\x08\x03" + b"\xff" * 12)
    )


def _folder_with(change: Change) -> Change:
    def make(folder: Path) -> None:
        (folder / "d").mkdir()
        (folder / "d" / "b.txt").write_text("text " * 99)
        change(folder)

    return make


def _images(content: bytes) -> Change:
    def make(folder: Path) -> None:
        (folder / "m").mkdir()
        (folder / "m" / "train-images-idx3-ubyte").write_bytes(content)
        (folder / "m" / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x01\0")

    return make


# ---------------------------------------------------------------------------------------------- fine-tuning records

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
GOOD = {"messages": [ASK, ANSWER]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
DESIRED = {"prompt": "a", "completion": "b", "label": True}
UNDESIRED = {"prompt": "c", "completion": "d", "label": False}
STRICT = "{% for m in messages %}\n{% if m.role == 'bot' %}{{ raise_exception('no bots') }}{% endif %}{{ m.content }}{% endfor %}"
BLIND = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role + m.content }}{% endif %}{% endfor %}"
LAST_ONLY = "{{ messages[-1].role }}: {{ messages[-1].content }}"


@dataclass(frozen=True)
class RecordFile:
    """A file of records that is rejected.

    Attributes:
        rows: its lines, text as it is and other values as JSON.
        said: a part of the line of the error.
    """

    form: str
    rows: list[Any]
    template: str
    said: str

    @property
    def text(self) -> str:
        lines = []
        for row in self.rows:
            line = row if isinstance(row, str) else json.dumps(row)
            lines.append(f"{line}\n")
        return "".join(lines)

    @property
    def words_of_train(self) -> tuple[str, ...]:
        words = ["train", "--data.source", "c.jsonl", "--data.format", self.form]
        if self.template:
            words += ["--data.chat_template", self.template]
        if self.form == "preference":
            words += ["--loss", "dpo"]
        return tuple(words)

    @property
    def words_of_prepare(self) -> tuple[str, ...]:
        words = ["data", "prepare", "c.jsonl", "--out", "new", "--format", self.form]
        if self.template:
            words += ["--chat_template", self.template]
        return tuple(words)


RECORDS: dict[str, RecordFile] = {
    "no JSON record": RecordFile("chat", [GOOD, "{"], template="chatml", said="c.jsonl:2"),
    "mixed forms": RecordFile(
        "auto", [GOOD, PAIR], template="chatml", said="c.jsonl:2 has no 'messages'"
    ),
    "another form": RecordFile("chat", [PAIR], template="chatml", said="--data.format preference"),
    "unknown fields": RecordFile(
        "auto", [{"body": "x"}], template="chatml", said="of no known format"
    ),
    "no answer": RecordFile(
        "chat",
        [GOOD, {"messages": [ASK]}],
        template="chatml",
        said="c.jsonl:2: no message is of the role 'assistant'",
    ),
    "a role that raises": RecordFile(
        "chat",
        [GOOD, {"messages": [{"role": "bot", "content": "x"}, ANSWER]}],
        template="t.jinja",
        said="t.jinja line 2 does not render c.jsonl:2: no bots",
    ),
    "a role that is left out": RecordFile(
        "chat",
        [{"messages": [{"role": "tool", "content": "x"}, *GOOD["messages"]]}],
        template="blind.jinja",
        said="leaves out messages of the role 'tool'",
    ),
    "no messages": RecordFile(
        "chat", [{"messages": []}], template="chatml", said="'messages' is empty"
    ),
    "messages are text": RecordFile(
        "chat", [{"messages": "hi"}], template="chatml", said="is no list"
    ),
    "a message is text": RecordFile(
        "chat",
        [{"messages": ["hi"]}],
        template="chatml",
        said="message 1 of 'messages' is no object",
    ),
    "no role": RecordFile(
        "chat", [{"messages": [{"content": "hi"}]}], template="chatml", said="has no role"
    ),
    "no content": RecordFile(
        "chat",
        [{"messages": [ASK, {"role": "assistant"}]}],
        template="chatml",
        said="has no content",
    ),
    "a number as content": RecordFile(
        "chat",
        [{"messages": [ASK, {"role": "assistant", "content": 3}]}],
        template="chatml",
        said="no text but int",
    ),
    "a template that is none": RecordFile(
        "chat",
        [GOOD],
        template="broken.jinja",
        said="broken.jinja line 1 does not render c.jsonl:1",
    ),
    "a template without a file": RecordFile(
        "chat", [GOOD], template="nowhere.jinja", said="no such file"
    ),
    "a template that is a device": RecordFile(
        "chat", [GOOD], template="/dev/zero", said="regular file"
    ),
    "an undefined variable": RecordFile(
        "chat", [GOOD], template="undefined.jinja", said="'nothing' is undefined"
    ),
    "a template that escapes": RecordFile("chat", [GOOD], template="escape.jinja", said="unsafe"),
    "turns that change": RecordFile(
        "chat",
        [{"messages": [ASK, ANSWER, ASK, ANSWER]}],
        template="last.jinja",
        said="mark answers by",
    ),
    "no template": RecordFile(
        "chat", [GOOD], template="", said="the tokenizer has no chat template"
    ),
    "no pairs without dpo": RecordFile("auto", [PAIR], template="", said="--loss dpo"),
    "a pair without prompt": RecordFile(
        "preference",
        [{"chosen": "b", "rejected": "c"}],
        template="",
        said="its answers do not say it",
    ),
    "an answer without a label": RecordFile(
        "unpaired",
        [DESIRED, {"prompt": "c", "completion": "d"}],
        template="",
        said="c.jsonl:2 has no 'label', which every unpaired record has",
    ),
    "a label of a number": RecordFile(
        "unpaired",
        [DESIRED, {**UNDESIRED, "label": 1}],
        template="",
        said="c.jsonl:2: its label is neither true nor false (got 1; need true or false)",
    ),
    "labelled answers to one prompt": RecordFile(
        "unpaired",
        [DESIRED, {**DESIRED, "label": False}],
        template="",
        said="c.jsonl:1: every record has its prompt",
    ),
    "a labelled prompt and completion": RecordFile(
        "prompt", [DESIRED], template="", said="Fix: --data.format unpaired --loss dpo"
    ),
    "labelled answers without kto": RecordFile(
        "unpaired", [DESIRED, UNDESIRED], template="", said="Fix: --loss dpo --dpo.loss_type kto"
    ),
    "a pair of equals": RecordFile(
        "preference",
        [PAIR, {**PAIR, "rejected": "b"}],
        template="",
        said="c.jsonl:2: chosen and rejected are the same",
    ),
    "a prompt of numbers": RecordFile(
        "prompt", [{"prompt": [3], "completion": "b"}], template="", said="'prompt' is not text"
    ),
    "a completion of a number": RecordFile(
        "prompt", [{"prompt": "a", "completion": 7}], template="", said="'completion' is not text"
    ),
    "an output of null": RecordFile(
        "instruction",
        [{"instruction": "a", "output": None}],
        template="chatml",
        said="has no 'output'",
    ),
    "empty prompt and completion": RecordFile(
        "prompt", [{"prompt": "", "completion": ""}], template="", said="is empty"
    ),
    "all targets masked": RecordFile(
        "prompt", [{"prompt": "a" * 200, "completion": "b"}], template="", said="no target is left"
    ),
    "no record": RecordFile("chat", [], template="chatml", said="is empty"),
}
PREPARED_RECORDS = (
    "mixed forms",
    "another form",
    "a role that raises",
    "no template",
    "a pair of equals",
    "no record",
)
"""Of which `weft data prepare` is tried, too."""
TEMPLATES = {
    "t.jinja": STRICT,
    "blind.jinja": BLIND,
    "broken.jinja": "{% for m in messages %}{{ m.content }",
    "undefined.jinja": "{{ nothing.at_all }}",
    "escape.jinja": "{{ messages.__class__.__mro__ }}{{ raise_exception('unsafe') }}",
    "last.jinja": LAST_ONLY,
}


def _with_templates(name: str, content: str | bytes) -> Change:
    def make(folder: Path) -> None:
        write(name, content)(folder)
        for template, text in TEMPLATES.items():
            (folder / template).write_text(text)

    return make


def records() -> Iterator[Case]:
    for name, file in RECORDS.items():
        change = _with_templates("c.jsonl", file.text)
        yield Case(name, file.words_of_train, file.said, change)
        if name in PREPARED_RECORDS:
            said = file.said.replace("--data.format", "--format")
            yield Case(f"prepare, {name}", file.words_of_prepare, said, change)
    chat = write("c.jsonl", json.dumps(GOOD) + "\n")
    given = (
        "train",
        "--data.source",
        "c.jsonl",
        "--data.format",
        "chat",
        "--data.chat_template",
        "chatml",
    )
    yield Case("dpo without pairs", (*given, "--loss", "dpo"), "dpo needs preference pairs", chat)
    yield Case(
        "records as a stream", (*given, "--data.packing", "stream"), "records stay whole", chat
    )
    yield Case("records as text", ("train", "--data.source", "c.jsonl"), "--data.format chat", chat)
    yield Case(
        "text as records",
        ("train", "--data.source", "text.txt", "--data.format", "chat"),
        "holds no records",
    )
    yield Case(
        "prepared text as records",
        ("train", "--data.source", "prep", "--data.format", "chat"),
        "prepared as",
    )
    yield Case(
        "a record a sequence of text",
        ("train", "--data.source", "text.txt", "--data.packing", "single"),
        "no records",
    )
    yield Case(
        "best without evaluations", ("train", "--save.best", "True"), "no evaluations to compare"
    )
    yield Case(
        "patience without evaluations",
        ("train", "--eval.patience", "2"),
        "no evaluations to compare",
    )
    yield Case(
        "classes without names", ("train", "--loss", "classify"), "data.classes: names", faults=2
    )
    yield Case("labels without a loss", ("train", "--model.labels", "2"), "--loss classify")
    yield Case(
        "rewards of a family without a head for them",
        ("train", "--loss", "reward", "--model.name", "deepseek", "--data.format", "reward"),
        "deepseek has no head for that",
        faults=2,
    )
    yield Case("noise on images", ("train", "--model.name", "mnist", "--neftune", "5"), "neftune")
    yield Case("beta 0", ("train", "--dpo.beta", "0"), "dpo.beta: out of range")
    yield Case(
        "labels that are wrong as often as right",
        ("train", "--dpo.label_smoothing", "0.5"),
        "dpo.label_smoothing: out of range",
    )
    yield Case(
        "a loss of pairs as the loss",
        ("train", "--loss", "orpo"),
        "it is a dpo.loss_type (got 'orpo'; need one of cross_entropy, dpo, reward, classify). Fix: did you mean 'dpo'?",
    )
    yield Case("another loss of pairs", ("train", "--dpo.loss_type", "apo"), "need one of sigmoid")
    yield Case(
        "a weight of labels of dpo",
        ("train", "--loss", "dpo", "--dpo.desirable_weight", "2"),
        "Fix: leave it out, or --dpo.loss_type kto",
        faults=2,
    )
    answers = write("c.jsonl", "".join(f"{json.dumps(each)}\n" for each in (DESIRED, UNDESIRED)))
    labelled = ("train", "--data.source", "c.jsonl", "--data.format", "unpaired")
    yield Case(
        "labelled answers, another loss",
        (*labelled, "--loss", "dpo"),
        "Fix: --loss dpo --dpo.loss_type kto",
        answers,
    )
    yield Case(
        "kto without labelled answers",
        (*given, "--loss", "dpo", "--dpo.loss_type", "kto"),
        "Fix: --data.format unpaired, or another --dpo.loss_type",
        chat,
    )
    yield Case(
        "label smoothing of a hinge",
        ("train", "--dpo.loss_type", "hinge", "--dpo.label_smoothing", "0.1"),
        "dpo.label_smoothing: is set, and dpo.loss_type is 'hinge'",
    )
    yield Case(
        "a target margin of dpo",
        ("train", "--dpo.gamma", "1"),
        "Fix: leave it out, or --dpo.loss_type simpo",
    )
    yield Case(
        "dpo on images", ("train", "--model.name", "mnist", "--loss", "dpo"), "dpo", faults=2
    )
    yield Case("no best checkpoint", ("generate", "run/best"), "has recorded no best checkpoint")
    yield Case(
        "a parquet file without the columns",
        ("data", "prepare", "x.parquet", "--out", "new", "--format", "chat"),
        "has no 'messages'",
        _parquet_of_text,
    )


def _parquet_of_text(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), folder / "x.parquet")


# ---------------------------------------------------------------------------------------------- prepared folders


def prepared() -> Iterator[Case]:
    words = ("train", "--data.source", "prep")
    meta = "prep/meta.json"
    changes: dict[str, tuple[Change, str]] = {
        "no meta": (remove(meta), "lacks meta.json"),
        "meta is no JSON": (write(meta, "x"), "meta.json cannot be read"),
        "meta is a list": (write(meta, "[]"), "meta.json cannot be read"),
        "meta nested": (write(meta, "[" * DEEP), "meta.json cannot be read"),
        "meta of 5 MiB": (write(meta, " " * 5 * MIB), "is too large"),
        "meta not UTF-8": (write(meta, b"\xff"), "meta.json cannot be read"),
        "meta is a pipe": (fifo(meta), "is no regular file"),
        "meta is a link": (link(meta, "/etc/passwd"), "leads out"),
        "meta is a folder": (as_folder(meta), "is no regular file"),
        "format 99": (edit_json(meta, format=99), "newer weft"),
        "dtype": (edit_json(meta, dtype="float32"), "dtype"),
        "vocab -1": (edit_json(meta, vocab=-1), "vocab"),
        "vocab 70000": (edit_json(meta, vocab=70_000), "contradicts itself"),
        "vocab text": (edit_json(meta, vocab="256"), "vocab"),
        "end outside": (edit_json(meta, end=999), "contradicts itself"),
        "no splits": (edit_json(meta, splits={}), "newer weft"),
        "negative documents": (_split(documents=-5), "documents"),
        "more tokens": (_split(tokens=10**15), "is truncated"),
        "2^62 documents": (_split(documents=2**62), "is truncated"),
        "another hash": (_split(sha256="0" * 64), "SHA-256"),
        "tokenizer hash": (
            edit_json(meta, tokenizer_sha256="0" * 64),
            "did not produce the tokens",
        ),
        "tokenizer missing": (edit_json(meta, tokenizer="tokenizer.json"), "lacks tokenizer.json"),
        "a byte of the tokens": (flip("prep/train.bin", 100), "SHA-256"),
        "a byte of the bounds": (flip("prep/train.idx", 9), "SHA-256"),
        "bounds of garbage": (write("prep/train.idx", b"\xff" * 16), "train.idx is damaged"),
        "bounds that descend": (_bounds(5, 0), "do"),
        "bounds from 5": (_bounds(5, 1320), "begins at token 5"),
        "tokens cut": (cut("prep/train.bin", 10), "is truncated"),
        "tokens gone": (remove("prep/train.bin"), "lacks train.bin"),
        "tokens are a link": (_linked_tokens, "lies elsewhere"),
        "tokens are a pipe": (fifo("prep/train.bin"), "train.bin"),
        "bounds gone": (remove("prep/train.idx"), "lacks train.idx"),
    }
    for name, (change, line) in changes.items():
        yield Case(name, words, line, change, faults=2)


def _split(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "prep/meta.json"
        meta = json.loads(path.read_text())
        meta["splits"]["train"].update(values)
        path.write_text(json.dumps(meta))

    return change


def _bounds(*bounds: int) -> Change:
    """Other bounds, and their hash in meta.json."""

    def change(folder: Path) -> None:
        import hashlib

        content = np.array(bounds, "<i8").tobytes()
        (folder / "prep/train.idx").write_bytes(content)
        _split(bounds_sha256=hashlib.sha256(content).hexdigest())(folder)

    return change


def _linked_tokens(folder: Path) -> None:
    shutil.move(folder / "prep/train.bin", folder / "elsewhere.bin")
    (folder / "prep/train.bin").symlink_to(folder / "elsewhere.bin")


# ---------------------------------------------------------------------------------------------- Hugging Face folders

IMPORT = ("import", "hf", "--out", "new", "--compare", "False")
CONFIG = "hf/config.json"
WEIGHTS = "hf/model.safetensors"

CONFIG_KEYS: dict[str, Any] = {
    "architectures": ["EvilForCausalLM"],
    "num_hidden_layers": (0, -1, 2, 10**9, 2**70, "1", None, 1.5, [1], True),
    "hidden_size": (0, -8, 10**9, "8", [8], {}, 1e30, 7),
    "num_attention_heads": (0, 3, -2, "x", 10**9),
    "num_key_value_heads": (0, 3, -1),
    "intermediate_size": (0, 17, 10**9, "x"),
    "vocab_size": (0, 33, 10**12, "x"),
    "rms_norm_eps": (0, -1, "x"),
    "rope_theta": (0, -1, "x", [1]),
    "max_position_embeddings": (0, -1, "x"),
    "hidden_act": (3, [], {"a": 1}),  # "gelu" is trained by transformers' own code
    "rope_scaling": ("x", [1], {"rope_type": "evil"}, {"rope_type": "llama3", "factor": "x"}),
    "attention_bias": ("x", 3),
    "quantization_config": ({"bits": 4},),
    "unknown_key": (1, "x", [[[]]]),
    "tie_word_embeddings": ("maybe", [1]),
    "head_dim": ("x", [1]),
}


def hf_folders() -> Iterator[Case]:
    for key, values in CONFIG_KEYS.items():
        for value in values if isinstance(values, tuple) else (values,):
            change = edit_json(CONFIG, **{key: value})
            yield Case(f"config {key} {str(value)[:20]}", IMPORT, "", change, faults=9)
    texts: dict[str, tuple[str | bytes, str]] = {
        "no JSON": ("x", "is no JSON"),
        "a list": ("[]", "is no JSON object"),
        "empty": ("", "is no JSON"),
        "nested": ("[" * DEEP + "]" * DEEP, "nested more than"),
        "nested objects": ('{"a":' * DEEP + "1" + "}" * DEEP, "nested more than"),
        "5 MiB": (" " * 5 * MIB, "is too large"),
        "not UTF-8": (b'{"a": "\xff"}', "is not UTF-8"),
        "5,000 digits": ('{"vocab_size": ' + "9" * 5000 + "}", "digits"),
        "NaN": (json.dumps({**HF_CONFIG, "rms_norm_eps": float("nan")}), "rms_norm_eps"),
        "infinity": (json.dumps({**HF_CONFIG, "rope_theta": float("inf")}), "rope_theta"),
    }
    for name, (content, line) in texts.items():
        yield Case(f"config.json, {name}", IMPORT, line, write(CONFIG, content), faults=2)
    for name, file in {"config.json": CONFIG, "weights": WEIGHTS}.items():
        yield Case(f"{name} missing", IMPORT, "", remove(file))
        yield Case(f"{name} a pipe", IMPORT, "is no regular file", fifo(file))
        yield Case(f"{name} a folder", IMPORT, "is no regular file", as_folder(file))
        yield Case(f"{name} a device", IMPORT, "leads out", link(file, "/dev/zero"))
        yield Case(f"{name} a link out", IMPORT, "leads out", link(file, "/etc/passwd"))
        yield Case(f"{name} a link to itself", IMPORT, "", link(file, file.rpartition("/")[2]))
    for small in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"):
        yield Case(f"{small} a link out", IMPORT, "leads out", link(f"hf/{small}", "/etc/passwd"))
        yield Case(f"{small} a pipe", IMPORT, "is no regular file", fifo(f"hf/{small}"))
        yield Case(
            f"{small} not UTF-8", IMPORT, "is not UTF-8", write(f"hf/{small}", b"\xff\xfe\xff")
        )
    tokenizer = "hf/tokenizer.json"
    yield Case("tokenizer garbage", IMPORT, "is not a tokenizer", write(tokenizer, "{}"))
    yield Case("tokenizer nested", IMPORT, "is not a tokenizer", write(tokenizer, "[" * DEEP))
    yield Case(
        "tokenizer too large", IMPORT, "has more tokens", write(tokenizer, tokenizer_text(40))
    )
    yield from _weights()
    yield from _indexes()
    for name, words in {
        "out exists": ("import", "hf", "--out", "run"),
        "out in /proc": ("import", "hf", "--out", "/proc/x"),
        "out below a file": ("import", "hf", "--out", "text.txt/x"),
        "no out": ("import", "hf"),
        "no folder": ("import",),
        "folder missing": ("import", "nowhere", "--out", "new"),
        "folder is a file": ("import", "text.txt", "--out", "new"),
        "another model key": ("import", "hf", "--out", "new", "--model.layers", "3"),
    }.items():
        yield Case(f"import, {name}", words)
    train = ("train", "--model.from_hf", "hf", "--data.source", "text.txt")
    yield Case("train from NaN", train, "NaN", _values(np.nan), faults=3)
    generate = ("generate", "hf", "--prompt", "\t", "--tokenizer", "bytes")
    yield Case("generate from NaN", generate, "NaN", _values(np.nan), faults=3)


def tokenizer_text(size: int) -> str:
    vocab = {f"t{index}": index for index in range(size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


def _values(value: float) -> Change:
    """One value of the weights replaced."""

    def change(folder: Path) -> None:
        header, data = tensors()
        values = np.frombuffer(data, "<f4").copy()
        values[300] = value
        write_safetensors(folder / WEIGHTS, header, values.tobytes())

    return change


HeaderChange = Callable[[dict[str, Any]], object]


def _entry(tensor: str, **fields: Any) -> HeaderChange:
    """Fields of a tensor's entry replaced."""
    return lambda header: header[tensor].update(fields)


def _norm(**fields: Any) -> HeaderChange:
    return _entry(NORM, **fields)


def _weights() -> Iterator[Case]:
    _, data = tensors()
    header_changes: dict[str, HeaderChange] = {
        "a tensor is missing": lambda h: h.pop(NORM),
        "a tensor is left over": lambda h: h.update(evil=h[NORM]),
        "two tensors over the same bytes": _norm(data_offsets=[0, 32]),
        "offsets reversed": _norm(data_offsets=[64, 32]),
        "offsets negative": _norm(data_offsets=[-32, 0]),
        "offsets beyond": _norm(data_offsets=[10**15, 10**15 + 32]),
        "offsets as text": _norm(data_offsets=["0", "32"]),
        "offsets as floats": _norm(data_offsets=[0.0, 32.0]),
        "three offsets": _norm(data_offsets=[0, 16, 32]),
        "shape as text": _norm(shape=["8"]),
        "shape as floats": _norm(shape=[8.0]),
        "shape of true": _norm(shape=[8, True]),
        "shape negative": _norm(shape=[-8]),
        "shape of 10^18": _norm(shape=[10**18]),
        "shape of 0 x 2^62": _norm(shape=[0, 2**62]),
        "shape of 1,000 dims": _norm(shape=[1] * 1000 + [8]),
        "shape another": _entry(Q, shape=[4, 16]),
        "dtype unknown": _norm(dtype="F3"),
        "dtype I64": _norm(dtype="I64"),
        "dtype F8": _norm(dtype="F8_E4M3"),
        "dtype a list": _norm(dtype=["F32"]),
        "dtype another": _norm(dtype="F16"),
        "an entry is a list": lambda h: h.update({NORM: [1, 2]}),
        "an entry is null": lambda h: h.update({NORM: None}),
        "no offsets": lambda h: h[NORM].pop("data_offsets"),
        "another name": lambda h: h.update({"../../evil": h.pop(NORM)}),
    }  # fmt: skip
    for name, change in header_changes.items():
        yield Case(f"weights, {name}", IMPORT, "", edit_header(change), faults=3)
    headers: dict[str, bytes] = {
        "no JSON": b"x" * 100,
        "a list": b"[]",
        "nested": b"[" * DEEP + b"]" * DEEP,
        "not UTF-8": b'{"\xff": 1}',
        "5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    }
    for name, header in headers.items():
        forged = _file(header, data)
        yield Case(f"header, {name}", IMPORT, "", forged)
    for length in (2**60, 2**63, 26_000_000, 0):
        yield Case(
            f"header of {length} bytes", IMPORT, "", _file(b"{}", data, length=length), faults=3
        )
    yield Case("weights empty", IMPORT, "is no safetensors file", write(WEIGHTS, b""))
    yield Case("weights of 7 bytes", IMPORT, "is no safetensors file", write(WEIGHTS, b"1234567"))
    yield Case("weights cut", IMPORT, "is cut short", cut(WEIGHTS, 2000))
    yield Case("weights NaN", IMPORT, "NaN", _values(np.nan))
    yield Case("weights infinite", IMPORT, "NaN", _values(np.inf))
    pickled = _renamed(WEIGHTS, "hf/pytorch_model.bin")
    yield Case("weights pickled", IMPORT, "Fix: save it as safetensors", pickled)
    yield Case("GGUF", IMPORT, "holds no weights", _renamed(WEIGHTS, "hf/model.gguf"))


def _file(header: bytes, data: bytes, *, length: int | None = None) -> Change:
    return lambda folder: write_safetensors(folder / WEIGHTS, header, data, length=length)


def _renamed(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


def _indexes() -> Iterator[Case]:
    contents: dict[str, Any] = {
        "no map": {},
        "a list": {"weight_map": ["a"]},
        "empty": {"weight_map": {}},
        "numbers": {"weight_map": {"a": 3}},
        "a path": {"weight_map": {"a": "../evil.safetensors"}},
        "an absolute path": {"weight_map": {"a": "/etc/passwd"}},
        "two dots": {"weight_map": {"a": ".."}},
        "a dot": {"weight_map": {"a": "."}},
        "no name": {"weight_map": {"a": ""}},
        "a zero byte": {"weight_map": {"a": "a\0b"}},
        "a missing file": {"weight_map": {"a": "missing.safetensors"}},
        "a long name": {"weight_map": {"a": "a" * 5000}},
        "another tensor": {"weight_map": {"evil": "model.safetensors"}},
    }
    index = "hf/model.safetensors.index.json"
    for name, content in contents.items():
        yield Case(f"index, {name}", IMPORT, "", write(index, json.dumps(content)))
    yield Case("index nested", IMPORT, "nested more than", write(index, "[" * DEEP + "]" * DEEP))
    yield Case("index a pipe", IMPORT, "is no regular file", fifo(index))
    yield Case("index a device", IMPORT, "leads out", link(index, "/dev/zero"))


# ---------------------------------------------------------------------------------------------- runs and checkpoints


TENSOR = "model/head.norm.weight"
ManifestChange = Callable[[dict[str, Any]], object]


def _manifest_fields(**fields: Any) -> ManifestChange:
    return lambda manifest: manifest.update(fields)


def _facts(**fields: Any) -> ManifestChange:
    return lambda manifest: manifest["facts"].update(fields)


def _tensor(**fields: Any) -> ManifestChange:
    return lambda manifest: manifest["tensors"][TENSOR].update(fields)


def _piece(**fields: Any) -> ManifestChange:
    return lambda manifest: manifest["tensors"][TENSOR]["pieces"][0].update(fields)


def checkpoints() -> Iterator[Case]:
    manifest = f"{STEP}/manifest.json"
    data_file = f"{STEP}/rank-00000.safetensors"
    forged: dict[str, ManifestChange] = {
        "format 99": _manifest_fields(format=99),
        "format text": _manifest_fields(format="1"),
        "step -1": _facts(step=-1),
        "step text": _facts(step="3"),
        "no facts": lambda m: m.pop("facts"),
        "an unknown key": _manifest_fields(evil=1),
        "family unknown": _facts(family="evil"),
        "family of images": _facts(family="mnist"),
        "another architecture": lambda m: m["facts"]["architecture"].update(dim=64),
        "a path": lambda m: m["files"].update({"../../../etc/passwd": m["files"].popitem()[1]}),
        "block_bytes 0": _manifest_fields(block_bytes=0),
        "block_bytes 1": _manifest_fields(block_bytes=1),
        "a shape of 10^15": _tensor(shape=[10**15]),
        "a piece outside": _piece(hi=[64]),
        "a piece at -1": _piece(at=-1),
        "a piece at 10^18": _piece(at=10**18),
        "a piece of two dims": _piece(lo=[0, 0], hi=[1, 1]),
        "a dtype": _tensor(dtype="object"),
        "no crc": _piece(crc32=[]),
        "another crc": _piece(crc32=[1]),
    }
    generate = ("generate", STEP, "--prompt", "x")
    for case, change in forged.items():
        yield Case(f"manifest, {case}", generate, "", forge_manifest(change), faults=2)
    texts: dict[str, bytes] = {
        "no JSON": b"x",
        "nested": b"[" * DEEP + b"]" * DEEP,
        "a list": b"[]",
        "not UTF-8": b"\xff",
        "5,000 digits": b'{"format": ' + b"9" * 5000 + b"}",
    }
    for case, text in texts.items():
        yield Case(f"manifest {case}", generate, "manifest.json", _manifest(text))
    resume = ("train", "run/run.toml", "--out", "new", "--resume", STEP)
    files: dict[str, tuple[Change, str]] = {
        "a flipped byte of the manifest": (flip(manifest, 40), "do not agree"),
        "no checksum": (remove(f"{manifest}.sha256"), "checksum cannot be read"),
        "checksum a pipe": (fifo(f"{manifest}.sha256"), "checksum cannot be read"),
        "checksum of 1 MiB": (write(f"{manifest}.sha256", b"0" * MIB), "checksum cannot be read"),
        "manifest missing": (remove(manifest), "not a checkpoint"),
        "manifest a pipe": (fifo(manifest), "is no regular file"),
        "manifest a link": (link(manifest, "/etc/passwd"), "leads out"),
        "data missing": (remove(data_file), "missing"),
        "data cut": (cut(data_file, 500), "cut short"),
        "data a link": (link(data_file, "/etc/passwd"), "is no regular file"),
        "data a pipe": (fifo(data_file), "is no regular file"),
        "data a folder": (as_folder(data_file), "is no regular file"),
    }
    for case, (change, line) in files.items():
        yield Case(f"resume, {case}", resume, line, change, faults=2)
        yield Case(
            f"generate, {case}", generate, line if "manifest missing" not in case else "", change
        )
    flipped = flip(data_file, 3000)
    export = ("export", "run", "new", "--compare", "False")
    yield Case(
        "generate from a flipped byte", ("generate", "run", "--prompt", "x"), "is damaged", flipped
    )
    yield Case("export of a flipped byte", export, "is damaged", flipped)
    yield Case("another seed", (*resume, "--seed", "7"), "seed: differs")
    yield Case("another model", (*resume, "--model.dim", "64"), "another model")
    yield Case("another optimizer", (*resume, "--optim.name", "sgd"), "optim.name: differs")
    exports: dict[str, tuple[tuple[str, ...], Change | None]] = {
        "one folder": (("export", "run"), None),
        "a missing run": (("export", "nowhere", "new"), None),
        "a Hugging Face folder": (("export", "hf", "new"), None),
        "out exists": (("export", "run", "prep"), None),
        "out in /proc": (("export", "run", "/proc/new"), None),
        "no adapters": (("export", "run", "new", "--adapters", "True"), None),
        "a dtype": ((*export, "--dtype", "int8"), None),
        "a link among the small files": (export, _linked_template),
        "run.toml a link": (export, link("run/run.toml", "/etc/passwd")),
        "run.toml a pipe": (export, fifo("run/run.toml")),
        "run.toml garbage": (export, write("run/run.toml", b"\xff")),
    }
    for case, (words, change) in exports.items():
        yield Case(f"export, {case}", words, "", change or _nothing)
    yield from _proofs()
    yield from _prompts()


def _manifest(text: bytes) -> Change:
    return lambda folder: write_manifest(folder, text)


def _linked_template(folder: Path) -> None:
    (folder / "run/hf").mkdir()
    (folder / "run/hf/chat_template.jinja").symlink_to("/etc/passwd")


def _proofs() -> Iterator[Case]:
    words = ("prove", "run")
    events = "run/events.jsonl"
    step = '{"event": "step", "step": 1, "loss": 5.5, "grad_norm": 1.0}\n'
    contents: dict[str, tuple[str | bytes, str]] = {
        "garbage": ("x\n", "damaged line"),
        "a list": ("[]\n", "damaged line"),
        "a number": ("3\n", "damaged line"),
        "nested": ("[" * DEEP + "]" * DEEP + "\n", "damaged line"),
        "no event": ("{}\n", "no event of a run"),
        "a step of text": ('{"event": "step", "step": "1"}\n', "no event of a run"),
        "a step without loss": ('{"event": "step", "step": 1}\n', "no event of a run"),
        "a loss of text": (step.replace("5.5", '"x"'), "no event of a run"),
        "not UTF-8": (b"\xff\n", "damaged line"),
        "5,000 digits": ('{"event": "step", "step": ' + "9" * 5000 + "}\n", "damaged line"),
        "a line of 2 MiB": ("a" * 2 * MIB, "damaged line"),
        "empty": ("", "no step has been recorded"),
        "starts later": (
            step.replace('"step": 1', '"step": 9'),
            "from a checkpoint of another folder",
        ),
    }
    for name, (content, line) in contents.items():
        yield Case(f"prove, events {name}", words, line, write(events, content))
    yield Case("prove, events missing", words, "no run in this folder", remove(events))
    yield Case("prove, events a pipe", words, "is no regular file", fifo(events))
    yield Case("prove, events a link", words, "leads out", link(events, "/etc/passwd"))
    yield Case("prove, events a device", words, "leads out", link(events, "/dev/zero"))
    yield Case("prove, run.toml a pipe", words, "is no regular file", fifo("run/run.toml"))
    yield Case("prove, no run", ("prove", "prep"), "no run in this folder")
    yield Case("prove, a key besides", ("prove", "run", "--steps", "3"), "takes no keys")
    yield Case("prove, first 0", ("prove", "run", "--first", "0"), "first: out of range")
    yield Case("prove, first without value", ("prove", "run", "--first"), "first")
    yield Case("mutant unknown", ("prove", "--mutants", "--only", "none"), "no such mutant")
    yield Case("mutants, a key besides", ("prove", "--mutants", "--steps", "3"), "steps")
    yield Case("sweep of no time", ("prove", "--sweep", "0"), "sweep: out of range")
    yield Case("sweep of words", ("prove", "--sweep", "long"), "sweep")


def _prompts() -> Iterator[Case]:
    ask = ("generate", "run", "--prompt_file", "p.jsonl")
    contents: dict[str, str | bytes] = {
        "garbage": "x\n",
        "a number": "3\n",
        "nested": "[" * DEEP + "]" * DEEP + "\n",
        "not UTF-8": b"\xff\n",
        "empty": "",
        "17 MiB": " " * 17 * MIB,
        "5,000 digits": '{"prompt": ' + "9" * 5000 + "}\n",
    }
    for name, content in contents.items():
        yield Case(f"prompts, {name}", ask, "prompt_file", write("p.jsonl", content))
    yield Case("prompts, a pipe", ask, "prompt_file", fifo("p.jsonl"))
    yield Case("prompts, a device", ask, "prompt_file", link("p.jsonl", "/dev/zero"))
    for flag, value in {
        "tokens": "0", "samples": "1e9", "temperature": "-1", "top_p": "2", "top_k": "0", "mesh": "dp2",
        "dtype": "int8", "device": "gpu", "tokenizer": "nowhere", "format": "xml",
    }.items():  # fmt: skip
        yield Case(
            f"generate --{flag} {value}",
            ("generate", "run", "--prompt", "x", f"--{flag}", value),
            flag,
        )
    ends = {**HF_CONFIG, "eos_token_id": {"a": 1}}
    yield Case("end token a table", ("generate", "hf", "--prompt", "x", "--tokenizer", "bytes"), "eos_token_id",
               write("hf/config.json", json.dumps(ends)))  # fmt: skip


# ---------------------------------------------------------------------------------------------- schedules, command lines


def schedules() -> Iterator[Case]:
    head = "microbatches 1\nstage_to_rank 0\n"
    tables: dict[str, str | bytes] = {
        "garbage": "hello",
        "empty": "",
        "no header": "rank 0: F0.0 B0.0",
        "an unknown action": head + "rank 0: F0.0 X0.0",
        "a missing backward": head + "rank 0: F0.0",
        "an action twice": head + "rank 0: F0.0 F0.0 B0.0",
        "a deadlock": head + "rank 0: B0.0 F0.0",
        "another stage": head + "rank 0: F9.0 B9.0",
        "a huge stage": head + "rank 0: F99999999999999999999.0 B0.0",
        "5,000 digits": head + "rank 0: F" + "9" * 5000 + ".0",
        "a rank too many": head + "rank 0: F0.0 B0.0\nrank 1: F0.0",
        "10^12 micro-batches": "microbatches 1000000000000\nstage_to_rank 0\nrank 0: F0.0 B0.0",
        "no rows": "microbatches 1\nstage_to_rank 5\n",
        "JSON": '{"table": 3}',
        "JSON without rows": '{"microbatches": 1, "stage_to_rank": [0]}',
        "JSON with text": '{"microbatches": "1", "stage_to_rank": ["a"], "rows": ["F0.0 B0.0"]}',
        "JSON nested": "{" + '"a":{' * DEEP,
        "not UTF-8": b"\xff\xfe",
        "5 MiB": "#" * 5 * MIB,
        "a W without its I": head + "rank 0: F0.0 W0.0",
        "unequal stages": "microbatches 1\nstage_to_rank 0 0 1\nrank 0: F0.0 F1.0 B1.0 B0.0\n"
        "rank 1: F2.0 B2.0",
        "20,000 stages": "microbatches 20000\nstage_to_rank"
        + " 0" * 20_000
        + "\nrank 0:"
        + " F0.0" * 20_000,
        "a header twice": head + head + "rank 0: F0.0 B0.0",
        "zero bytes": b"\0" * 999,
        "an ELF file": b"\x7fELF\x02\x01\x01" + b"\xff" * 64,
        "too long for a config": "microbatches 20000\nstage_to_rank 0\nrank 0:"
        + "".join(f" F0.{mb} B0.{mb}" for mb in range(20_000)),
    }
    for name in ("a deadlock", "a missing backward", "an action twice", "an unknown action",
                 "too long for a config", "zero bytes", "20,000 stages"):  # fmt: skip
        change = write("t.txt", tables[name])
        for command in ("train", "simulate"):
            asked = (command, "--pipeline.schedule", "t.txt", "--batch.global_size", "2")
            yield Case(f"{command}, table, {name}", asked, "pipeline.schedule", change, faults=4)
    other = write("t.txt", head + "rank 0: F0.0 B0.0")
    yield Case(
        "train, a table of other sizes",
        ("train", "--mesh", "pp2", "--pipeline.schedule", "t.txt"),
        "has other sizes",
        other,
        faults=2,
    )
    yield Case(
        "a table of other ranks", ("schedule", "t.txt", "--ranks", "2"), "has other sizes", other
    )
    cycle = "microbatches 1\nstage_to_rank 0 1\nrank 0: B0.0 F0.0\nrank 1: F1.0 B1.0"
    waits = "rank 0 is at B0.0 and waits for F0.0"
    yield Case("a cycle", ("schedule", "t.txt"), waits, write("t.txt", cycle))
    for name, (given, line) in {
        "one schedule unknown": ("gpipe 1fb1 --compare", "did you mean '1f1b'"),
        "two names": ("gpipe 1f1b", "takes one name"),
        "compare, ranks 0": ("--compare --ranks 0", "ranks: out of range"),
        "compare, too large": ("--compare --ranks 3000 --microbatches 3000", "too many actions"),
        "compare, chunks that none has": ("gpipe 1f1b --compare --chunks 3", "chunks"),
        "compare, no such config": ("--compare --config nowhere.toml", "no such file"),
        "compare and search": ("--compare --search", "compare: is set"),
        "a limit without a search": ("--memory-limit 4", "memory_limit: is not used"),
        "costs without a number": ("--compare --costs F=x B=1", "costs: cannot read"),
        "costs of 0": ("--compare --costs F=0 B=1", "costs: a time of 0"),
        "a negative message": ("--compare --message -1", "message: cannot read"),
        "a limit of 0": ("--search --memory-limit 0", "at least 1: one micro-batch"),
        "a limit of a half": ("--search --memory-limit 0.5", "Fix: --memory-limit 1"),
        "a limit of NaN": ("--search --memory-limit nan", "memory_limit: out of range"),
        "limits of other ranks": ("--search --memory-limit 4 4", "memory_limit: another number"),
        "search, ranks 0": ("--search --ranks 0", "ranks: out of range"),
        "search, no time": ("--search --seconds 0", "seconds: out of range"),
        "search, too large": ("--search --microbatches 100000", "too large to be searched"),
        "search, 3 chunks": ("--search --chunks 3", "chunks: is not searched"),
    }.items():
        yield Case(name, ("schedule", *given.split()), line, faults=8)
    words = ("schedule", "t.txt", "--ranks", "1", "--microbatches", "1")
    for name, content in tables.items():
        yield Case(f"table, {name}", words, "", write("t.txt", content), faults=4)
    yield Case("table, a pipe", words, "is no regular file", fifo("t.txt"))
    yield Case("table, a device", words, "is no regular file", link("t.txt", "/dev/zero"))
    yield Case("table, a folder", ("schedule", "prep"), "is no regular file")
    for sizes in ("--ranks 1000000000", "--ranks 3000 --microbatches 3000", "--microbatches 1e15", "--ranks 0",
                  "--ranks 100 --microbatches 3000", "--chunks 99999", "--width 1", "--ranks -4"):  # fmt: skip
        yield Case(f"schedule {sizes}", ("schedule", *sizes.split()), faults=2)
    layers = ("explain", "--model.layers", "2000")
    yield Case(
        "1,500 stages",
        (*layers, "--mesh", "pp1500", "--batch.global_size", "20000"),
        "stages",
        faults=3,
    )
    wide = ("train", "--model.dim", "1000000000", "--mesh", "dp2")
    yield Case(
        "a model larger than the machine",
        wide,
        "model: parameters, gradients and optimizer states are larger than the memory",
    )
    layers = ("explain", "--model.layers", "10000")
    inside = "compile: blocks that communicate inside, along tp, are not compiled"
    yield Case("compiled tp", ("train", "--mesh", "tp2", "--compile", "blocks"), inside)
    yield Case("5,000 stages", (*layers, "--mesh", "pp5000"), "too many stages", faults=3)
    for name, path in (("is a folder", "prep"), ("in no folder", "none/x.html"), ("empty", "")):
        yield Case(f"html {name}", ("explain", "--html", path), "html")
    yield Case("html without a file", ("explain", "--html", "--json"), "html: has no value")
    yield Case("svg in /proc", ("schedule", "--svg", "/proc/x.svg"), "svg")
    yield Case("json below a file", ("schedule", "--json", "text.txt/x.json"), "json")


def command_lines() -> Iterator[Case]:
    lines: dict[str, tuple[str, ...]] = {
        "an unknown command": ("trian",),
        "a config as command": ("run.toml",),
        "a flag as command": ("--steps", "3"),
        "an empty command": ("",),
        "a command with a line break": ("a\nb",),
        "a command with an escape sequence": ("\x1b[2J",),
        "a command of 100,000 characters": ("a" * 100_000,),
        "a lone surrogate": ("train", "--data.source", "\udcff"),
        "two configs": ("train", "a.toml", "b.toml"),
        "a zero byte": ("train", "--data.source", "a\0b"),
        "a zero byte in out": ("train", "--data.source", "text.txt", "--out", "a\0b"),
        "a short flag": ("train", "-n", "3"),
        "an empty flag": ("train", "--", "3"),
        "an empty data source": ("train", "--data.source", ""),
        "full-width digits in a mesh": ("train", "--mesh", "dp２"),
        "an equals flag": ("train", "--=3"),
        "a flag twice": ("train", "--steps", "x", "--steps", "y"),
        "a word too many": ("train", "--steps", "3", "4"),
        "a flag of dots": ("train", "--...", "1"),
        "an unknown key with an escape": ("train", "--\x1b[31m", "1"),
        "a section": ("train", "--optim", "3"),
        "a word for schedule": ("schedule", "1f1b", "gpipe"),
        "doctor with a word": ("doctor", "evil"),
        "generate nothing": ("generate",),
        "generate from nothing": ("generate", "nowhere", "--prompt", "x"),
        "generate from a file": ("generate", "text.txt", "--prompt", "x"),
        "generate from a folder": ("generate", "prep", "--prompt", "x"),
        "generate with a zero byte": ("generate", "a\0b", "--prompt", "x"),
        "chat with nothing": ("chat",),
        "chat with nowhere": ("chat", "nowhere"),
        "chat with a file": ("chat", "text.txt"),
        "chat with two": ("chat", "run", "run"),
        "chat with a zero byte": ("chat", "a\0b"),
        "prove a zero byte": ("prove", "a\0b"),
        "prove a model file that is not there": ("prove", "nowhere.py", "--mesh", "tp2"),
        "train a model file that is not there": ("train", "nowhere.py"),
        "axes of a model file that is not there": ("axes", "nowhere.py"),
        "import a zero byte": ("import", "a\0b", "--out", "new"),
        "export a zero byte": ("export", "a\0b", "new"),
        "show a zero byte": ("data", "show", "a\0b"),
        "out of 5,000 characters": ("import", "hf", "--out", "a" * 5000),
        "generate 5,000 characters": ("generate", "a" * 5000),
        "export 5,000 characters": ("export", "a" * 5000, "new"),
        "prove 5,000 characters": ("prove", "a" * 5000),
        "show 5,000 characters": ("data", "show", "a" * 5000),
        "resume with a zero byte": ("train", "--resume", "a\0b"),
        "replay nothing": ("replay",),
        "replay a missing run": ("replay", "nowhere", "--step", "1"),
    }
    for name, words in lines.items():
        yield Case(name, words, faults=3)
    many = [word for index in range(2000) for word in (f"--key{index}", "1")]
    yield Case("2,000 unknown keys", ("train", *many), "unknown key", faults=60)


def optimizers() -> Iterator[Case]:
    rows: dict[str, tuple[tuple[str, ...], str]] = {
        "unknown": (("--optim.name", "muno"), "did you mean 'muon'"),
        "unknown option": (
            ("--optim.name", "muon", "--optim.options.momentun", "0.9"),
            "did you mean 'momentum'",
        ),
        "option out of range": (
            ("--optim.name", "muon", "--optim.options.ns_steps", "0"),
            "optim.options.ns_steps: out of range",
        ),
        "options as a value": (("--optim.options", "3"), "optim.options: wrong type"),
        "a group without settings": (("--optim.groups", "*norm*"), "is no group"),
        "a group with an unknown setting": (("--optim.groups", "*: wd=0"), "no setting of a group"),
        "a group with no number": (("--optim.groups", "*: lr_scale=x"), "is no number"),
        "a group below zero": (("--optim.groups", "*: lr_scale=-1"), "out of range"),
        "a group of an unknown optimizer": (
            ("--optim.groups", "*: optimizer=x"),
            "unknown optimizer",
        ),
        "one pattern twice": (
            ("--optim.groups", "*: lr_scale=1", "*: lr_scale=2"),
            "the same pattern",
        ),
        "an outer period of no steps": (
            ("--mesh", "site2", "--site.every", "0"),
            "site.every: out of range (got 0",
        ),
        "an outer momentum of one": (
            ("--mesh", "site2", "--site.momentum", "1.0"),
            "site.momentum: out of range (got 1.0",
        ),
        "an unknown type on the wire": (
            ("--mesh", "site2", "--site.wire", "fp4"),
            "site.wire: unknown value (got 'fp4'",
        ),
        "an exchange that is longer than its period": (
            ("--mesh", "site2", "--site.every", "5", "--site.overlap", "5"),
            "site.overlap: an exchange would not end before the next one begins (got 5",
        ),
        "a share that nothing keeps": (
            ("--mesh", "site2", "--site.mix", "0.25"),
            "site.mix: is set, and site.overlap is 0",
        ),
        "keys of sites without sites": (
            ("--mesh", "dp2", "--site.every", "5"),
            'site.every: is set, and the mesh has no axis site (got 5). Fix: --mesh "site2 ...", or --site.every 20',
        ),
        "sites inside of data ranks": (
            ("--mesh", "dp2 site2"),
            "mesh: the ranks of a site are not next to each other (got 'dp2 site2'",
        ),
        "deterministic sites": (
            ("--mesh", "site2", "--deterministic", "True"),
            "deterministic: fixes the bits for every number of data ranks",
        ),
        "outer parameters in 16 bits": (
            (
                "--mesh",
                "site2",
                "--precision.params",
                "bfloat16",
                "--precision.compute",
                "bfloat16",
            ),
            "precision.params: outer steps are smaller than its digits",
        ),
        "deterministic on three data ranks": (
            ("--deterministic", "True", "--mesh", "dp3", "--batch.global_size", "24"),
            "binary tree over the data ranks",
        ),
        "deterministic on three ranks that shard states": (
            (
                *("--deterministic", "True", "--mesh", "fsdp3"),
                *("--parallel.zero", "2", "--batch.global_size", "24"),
            ),
            "binary tree over the data ranks (got fsdp3; need a power of two)",
        ),
        "deterministic with six micro-batches": (
            ("--deterministic", "True", "--batch.global_size", "12"),
            "binary tree over the micro-batches",
        ),
        "deterministic adafactor under ZeRO": (
            (
                *("--deterministic", "True", "--mesh", "dp2"),
                *("--optim.name", "adafactor", "--parallel.zero", "1"),
            ),
            "adafactor adds sums",
        ),
    }
    for name, (words, line) in rows.items():
        yield Case(name, ("train", *words), line)


# ------------------------------------------------------------------------------- hardware files

LAPTOP = """node = 2
memory_gb = {value = 16, published = "label"}
bf16_tflops = {value = 0.1, published = "label"}
hbm_tb_s = {value = 0.02, published = "label"}
"""
HARDWARE: dict[str, tuple[str | bytes, str]] = {
    "a bandwidth of 0": (
        LAPTOP + 'link_gb_s = {value = 0, published = "label"}',
        "link_gb_s.value is out of range (got 0; need greater than 0)",
    ),
    "a bandwidth of infinity": (
        LAPTOP + 'link_gb_s = {value = inf, published = "label"}',
        "link_gb_s.value is out of range",
    ),
    "a missing field": ("node = 2", "memory_gb is missing"),
    "an unknown field": (LAPTOP + "hbm_tb = 3", "hbm_tb is unknown. Fix: did you mean 'hbm_tb_s'?"),
    "text for a number": (
        LAPTOP + 'link_gb_s = {value = "9", published = "label"}',
        "link_gb_s.value has the wrong type (got '9'; need a number)",
    ),
    "a figure without a source": (LAPTOP + "link_gb_s = 9", "link_gb_s has no source"),
    "a figure without an origin": (LAPTOP + "link_gb_s = {value = 9}", "link_gb_s needs published"),
    "a measured figure without a date": (
        LAPTOP + 'link_gb_s = {value = 9, measured = "weft"}',
        "is measured, and needs date and versions",
    ),
    "a node of 0": (LAPTOP.replace("node = 2", "node = 0"), "node is out of range"),
    "an efficiency of 0": (LAPTOP + "[efficiency]\ngemm = 0.0", "efficiency.gemm is out of range"),
    "an unknown efficiency": (
        LAPTOP + "[efficiency]\ngemms = 1.0",
        "efficiency.gemms is unknown. Fix: did you mean 'gemm'?",
    ),
    "no link for two ranks": (LAPTOP, "has no link (got 2 ranks; need link_gb_s"),
    "no TOML": ("node == 2", "is not TOML"),
    "zero bytes": (b"\0" * 100, "is not TOML"),
}


BENCH: dict[str, tuple[str, str]] = {
    "nothing": ("", "no benchmark is named"),
    "an unknown benchmark": ("com", "did you mean 'comm'?"),
    "an unknown flag": ("compute --rank 2", "rank: unknown key"),
    "one rank": ("comm --mesh dp1", "mesh: has no ranks to communicate"),
    "an unknown axis": ("comm --mesh xp2", "unknown axis 'xp'"),
    "an unknown operation": ("comm --operations allreduce", "did you mean 'all_reduce'?"),
    "no operation": ("comm --operations ,", "operations: names no operation"),
    "no size": ("comm --smallest many", "smallest: is no size (got 'many'; need a size like 1KB"),
    "a size of 0": ("comm --largest 0", "largest: out of range"),
    "sizes the wrong way": ("comm --smallest 1MB --largest 1KB", "is below the smallest size"),
    "no seconds": ("comm --seconds 0", "seconds: out of range"),
    "no ranks": ("compute --ranks 0", "ranks: out of range"),
    "JSON nowhere": ("comm --json nowhere/x.json", "json: cannot be written"),
    "a plot in a folder's place": ("comm --svg prep", "svg: cannot be written"),
    "no hardware file": ("compute --write text.txt", "a name that ends in .toml"),
    "a hardware file nowhere": ("comm --write nowhere/x.toml", "a folder that does not exist"),
    "an unknown device": ("comm --write x.toml --published h10", "did you mean 'h100'?"),
    "a device without a file": ("comm --published h100", "starts a hardware file, and none is"),
}


def hardware_files() -> Iterator[Case]:
    words = ("explain", "--mesh", "dp2", "--hardware", "device.toml")
    for name, (content, line) in HARDWARE.items():
        yield Case(name, words, line, write("device.toml", content), faults=3)
    yield Case("no file", words, "device.toml: no such file")
    yield Case("a device", words, "is no regular file", link("device.toml", "/dev/zero"))
    for name, (flags, line) in BENCH.items():
        yield Case(f"bench: {name}", ("bench", *flags.split()), line, faults=2)
    bad = write("device.toml", "node = 0")
    extend = ("bench", "compute", "--write", "device.toml")
    yield Case("bench: a bad file to extend", extend, "node is out of range", bad)


# ------------------------------------------------------------------------------- options of weft simulate

SIMULATE = {
    "jitter without a device": ("--jitter 5%", "jitter: is about seconds, and no device is named"),
    "jitter of 700%": ("--hardware h100 --jitter 7", "jitter: out of range"),
    "no number of draws": ("--hardware h100 --draws 0", "draws: out of range"),
    "no such rank": ("--hardware h100 --slow 2=1.5", "slow: there is no such rank"),
    "a factor of 0": ("--hardware h100 --slow 0=0", "slow: cannot be read"),
    "a rank alone": ("--hardware h100 --slow 0", "slow: cannot be read"),
    "failures every 0 hours": ("--hardware h100 --mtbf_hours 0", "mtbf_hours: out of range"),
    "failures without checkpoints": ("--hardware h100 --mtbf_hours 9", "the cost of a checkpoint"),
    "a restart without failures": ("--hardware h100 --restart_s 9", "restart_s: is about failures"),
    "no bandwidth": ("--hardware h100 --storage_gb_s 0", "storage_gb_s: out of range"),
    "a file nowhere": ("--html nowhere/x.html", "html: cannot write the file"),
    "an unknown option": ("--jiter 5%", "jiter: unknown key"),
}


def simulate_options() -> Iterator[Case]:
    for name, (flags, line) in SIMULATE.items():
        yield Case(name, ("simulate", "--mesh", "dp2", *flags.split()), line, faults=2)
    words = ("simulate", "--mesh", "site2 dp2", "--hardware", "h100")
    yield Case("sites without a link", words, "site.gbit_s: is not known")


# ------------------------------------------------------------------------------- keys of another way to start ranks

TORCHRUN = (
    *(("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")),
    *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_MAX_RESTARTS", "2")),
)
SLURM = (
    *(("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")),
    *(("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "node[1-2]")),
)
UNSUPERVISED = "is set, and ranks as threads are not started again"


@dataclass(frozen=True)
class Start:
    """A way to start ranks, with flags that it rejects."""

    way: str
    env: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    said: str


def starts() -> Iterator[Case]:
    threads = ("--transport", "threads")
    rows = (
        Start(
            "processes",
            env=(),
            words=("--nproc", "1"),
            said="or --run.elastic True for the best smaller layout",
        ),
        Start(
            "threads",
            env=(),
            words=(*threads, "--save.memory_every", "5"),
            said=f"memory_every: {UNSUPERVISED}",
        ),
        Start(
            "threads",
            env=(),
            words=(*threads, "--run.restarts", "3"),
            said=f"run.restarts: {UNSUPERVISED}",
        ),
        Start("threads", env=(), words=(*threads, "--run.timeout_s", "-9"), said="run.timeout_s"),
        Start(
            "threads",
            env=(),
            words=(*threads, "--port", "29500"),
            said="port: is set, and ranks as threads need",
        ),
        Start(
            "torchrun",
            env=TORCHRUN,
            words=threads,
            said="transport: ranks as threads cannot be started",
        ),
        Start("torchrun", env=TORCHRUN, words=("--nproc", "4"), said="nproc: differs"),
        Start(
            "Slurm", env=SLURM, words=threads, said="transport: ranks as threads cannot be started"
        ),
        Start("Slurm", env=SLURM, words=("--nproc", "4"), said="nproc: differs"),
    )
    for row in rows:
        name = f"{row.way} {' '.join(row.words)}"
        words = ("train", "--mesh", "dp2", *row.words)
        yield Case(name, words, row.said, env=row.env)
    launch = ("launch", "slurm", "--mesh", "dp2", "--dry-run")
    yield Case("launch with threads", (*launch, *threads), "ranks as threads")
    yield Case("launch, no such URL", (*launch, "--out", "nowhere://x/y"), "unknown file system")
    urls = {
        "memory://x/run": "save.remote: is lost when the process ends",
        "http://127.0.0.1:9/run": "save.remote: cannot be written",
        "nowhere://x/run": "save.remote: names an unknown file system",
        "ftp://me:hidden@host/run": "save.remote: holds a password",
        "s3://": "save.remote: is no URL of a folder",
    }
    for url, line in urls.items():
        yield Case(f"out {url}", ("train", "--out", url), line)
    words = ("train", "--out", "file://run", "--save.remote", "file://x")
    yield Case("two URLs", words, "out: is a URL, and save.remote names one too")
    held = ("train", "--out", "new", "--save.remote", "file://run")
    yield Case("a URL that holds a run", held, "out: holds a run already")
    yield Case("resume of a URL", ("train", "--resume", "s3://bucket/run"), "resume: is a URL")
    for name in ("status", "prove", "replay", "generate", "chat", "export"):
        yield Case(f"{name} of a URL", (name, "s3://bucket/run"), "reads local folders")


def auto_meshes() -> Iterator[Case]:
    """What `mesh = "auto"` rejects."""
    seven = ("--mesh", "auto", "--nproc", "7")
    for name in ("train", "explain", "simulate", "prove"):
        line = "mesh: auto finds no legal layout of 7 ranks (got"
        yield Case(f"auto: {name} on 7 ranks", (name, *seven), line)
    two = ("explain", "--mesh", "auto", "--nproc", "2")
    words = (*two, "--hardware", "h10")
    yield Case("auto on an unknown device", words, "hardware: unknown device")
    words = (*two, "--model.preset", "llama3-9b")
    yield Case("auto of an unknown preset", words, "model.preset: unknown")
    words = ("train", "--mesh", "auto", "--nproc", "2", "--data.source", "nowhere")
    yield Case("auto without data", words, "data.source: no such file")
    words = ("train", "--mesh", "auto", "--nproc", "0")
    yield Case("auto on no ranks", words, "nproc: out of range")
    env = (("RANK", "0"), ("WORLD_SIZE", "two"), ("MASTER_ADDR", "localhost"))
    yield Case("auto of a broken launcher", ("train", "--mesh", "auto"), "MASTER_PORT", env=env)
    yield Case("auto in capitals", ("train", "--mesh", "AUTO"), "mesh: ")
    launch = ("launch", "slurm", "--mesh", "auto", "--dry-run")
    yield Case("auto in a job file", launch, "mesh: auto is chosen by `weft train`")
    words = ("plan", "--mesh", "auto", "--devices", "4", "--hardware", "h100")
    yield Case("auto of a search", words, "mesh: auto is what `weft plan` looks for")


def plans() -> Iterator[Case]:
    """What `weft plan` rejects."""
    on_h100 = ("--hardware", "h100")
    yield Case("plan without devices", ("plan", *on_h100), "devices: no number is given")
    yield Case("plan of 0", ("plan", "--devices", "0", *on_h100), "devices: out of range")
    yield Case("plan without a device", ("plan", "--devices", "4"), "hardware: no device is named")
    words = ("plan", "--devices", "4", "--hardware", "h10")
    yield Case("plan on an unknown device", words, "hardware: unknown device")
    words = ("plan", "--devices", "4", "--mesh", "dp2", *on_h100)
    yield Case("plan of two sizes", words, "devices: differ from the mesh")
    words = ("plan", "--mesh", "site2", "--devices", "5", *on_h100)
    yield Case("plan of unequal sites", words, "devices: no layout fills 5")
    words = ("plan", "--devices", "23", *on_h100)
    yield Case("plan that nothing fills", words, "devices: no layout fills 23")
    words = ("plan", "--mesh", "dp4", "--batch.global_size", "7", *on_h100)
    yield Case("plan of a batch that nothing divides", words, "batch.global_size: does not divide")
    words = ("plan", "--devices", "4", "--model.preset", "llama3-70b", "--model.dim", "0", *on_h100)
    yield Case("plan of a preset without a size", words, "model.dim: out of range")
    words = (
        "plan",
        "--devices",
        "4",
        "--model.name",
        "gpt2",
        "--model.preset",
        "llama3-70b",
        *on_h100,
    )
    yield Case("plan of a preset of another family", words, "model.preset: ")
    words = ("plan", "--devices", "4", "--seconds", "0", *on_h100)
    yield Case("plan in no time", words, "seconds: out of range")
    words = ("plan", "--devices", "4", "--why", "dp2", *on_h100)
    yield Case("why of another size", words, "why: has another number of devices")
    words = ("plan", "--devices", "4", "--why", "dp4 zero9", *on_h100)
    yield Case("why of no layout", words, "why: 'dp4 zero9' is not legal: mesh: unknown axis")
    words = ("plan", "--devices", "8", "--why", "dp2 tp2 cp2", "--data.seq_len", "255", *on_h100)
    yield Case("why of an illegal layout", words, "why: 'dp2 tp2 cp2' is not legal: ")


def _model_of(name: str) -> Change:
    """A stored config, and a manifest, that name another model."""

    def change(folder: Path) -> None:
        forge_manifest(lambda manifest: manifest["facts"].update(family=name))(folder)
        path = folder / "run/run.toml"
        text = path.read_text().replace('name = "llama3"', f'name = "{name}"', 1)
        path.write_text(text)
        (folder / "evil.py").write_text("open('ran', 'w').close()")

    return change


def newer_features() -> Iterator[Case]:
    """Sites, launch, axes, replay, eval, generate, export, status, stored code, moved folders."""
    slurm = ("launch", "slurm", "--mesh", "dp2", "--dry-run")
    kubeflow = ("launch", "kubeflow", "--mesh", "dp2", "--dry-run", "--image", "a")
    sky = ("launch", "skypilot", "--mesh", "dp2", "--dry-run")
    bucket = (*sky, "--bucket", "s3://runs")
    chat = ("chat", "run", "--chat_template", "chatml")
    rows: dict[str, tuple[tuple[str, ...], str]] = {
        "time below save_s": ((*slurm, "--time", "1"), "before it has trained"),
        "time of 60 s": ((*slurm, "--time", "0:60", "--save_s", "60"), "need more than the 60 s"),
        "time of words": ((*slurm, "--time", "two hours"), "is no time limit"),
        "time below zero": ((*slurm, "--time", "-5"), "is no time limit"),
        "spare nodes below zero": ((*slurm, "--spare_nodes", "-1"), "spare_nodes: out of range"),
        "a job name of a digit": ((*kubeflow, "--volume", "r", "--name", "1a"), "--name weft-1a"),
        "a volume with a slash": ((*kubeflow, "--volume", "r/a"), "is no name of Kubernetes"),
        "no volume": (kubeflow, "volume: is needed"),
        "a namespace in capitals": (
            (*kubeflow, "--volume", "r", "--namespace", "Prod"),
            "namespace: is no name of Kubernetes",
        ),
        "no bucket": (sky, "bucket: is needed"),
        "a bucket on disk": ((*sky, "--bucket", "/tmp/x"), "bucket: "),
        "a wheel that is missing": ((*bucket, "--wheel", "x.whl"), "wheel: is no wheel"),
        "a wheel that is a text": ((*bucket, "--wheel", "text.txt"), "wheel: is no wheel"),
        "gpus below zero": ((*slurm, "--gpus-per-node", "-1"), "gpus_per_node: out of range"),
        "an engine that is near": (("launch", "slurn"), "did you mean 'slurm'"),
        "trust of maybe": (("explain", "--trust_code=maybe"), "trust_code: wrong type"),
        "axes of nothing": (("axes",), "names no model"),
        "axes of a text": (("axes", "text.txt"), "no such module"),
        "axes of a missing file": (("axes", "no.py"), "no such file"),
        "axes of a folder": (("axes", "hf"), "names no model"),
        "axes, check of maybe": (("axes", "no.py", "--check=maybe"), "check: wrong type"),
        "replay a text": (("replay", "text.txt"), "no run in this folder"),
        "replay a Hugging Face folder": (("replay", "hf"), "no run in this folder"),
        "replay step -1": (("replay", "run", "--step", "-1"), "step: out of range"),
        "replay step 99": (("replay", "run", "--step", "99"), "has no record of it"),
        "replay an unknown key": (("replay", "run", "--stop", "1"), "did you mean 'step'"),
        "eval batches below zero": (("eval", "run", "--batches", "-1"), "batches: out of range"),
        "eval length 0": (("eval", "run", "--seq_len", "0"), "seq_len: out of range"),
        "eval fp8": (("eval", "run", "--dtype", "fp8"), "did you mean 'bfloat16'"),
        "eval missing data": (("eval", "run", "--data", "nowhere"), "data: "),
        "eval an axis of FSDP": (("eval", "run", "--mesh", "fsdp2"), "--parallel.zero 3"),
        "eval a text": (("eval", "text.txt"), "text.txt"),
        "generate temperature -1": (("generate", "run", "--temperature", "-1"), "temperature: "),
        "generate a text": (("generate", "text.txt"), "text.txt"),
        "generate an axis": (("generate", "run", "--mesh", "zero2"), "--mesh dp2"),
        "chat without a template": (("chat", "run"), "has no chat template (got bytes). Fix: --chat_template chatml or alpaca"),
        "chat, no template there": (("chat", "run", "--chat_template", "no.jinja"), "chat_template: "),
        "chat, a text as template": ((*chat[:2], "--chat_template", "text.txt"), "leaves out messages of the role 'user'"),
        "chat, cp": ((*chat, "--mesh", "cp2"), "mesh: cp shards long sequences"),
        "chat, tp of 3": ((*chat, "--mesh", "tp3"), "mesh: tp3 does not divide"),
        "chat of no tokens": ((*chat, "--tokens", "0"), "tokens: out of range"),
        "chat, context 0": ((*chat, "--context", "0"), "context: out of range"),
        "chat, top_p 2": ((*chat, "--top_p", "2"), "top_p: out of range"),
        "chat with a prompt": ((*chat, "--prompt", "x"), "prompt: unknown key"),
        "chat, transport": ((*chat, "--transport", "threads"), "transport: unknown key"),
        "chat, json in no folder": ((*chat, "--json", "no/x.json"), "json: its folder does not exist"),
        "export to a file": (("export", "run", "text.txt"), "text.txt"),
        "export nothing": (("export",), "weft export"),
        "export int8": (("export", "run", "new", "--dtype", "int8"), "dtype: unknown value"),
        "export shards of 0": (("export", "run", "new", "--max_shard_bytes", "0"), "out of range"),
        "dash of no folder": (("dash", "nowhere"), "weft dash: there is no such folder"),
        "dash of a text": (("dash", "text.txt"), "weft dash: there is no such folder"),
        "dash on port 70000": (("dash", ".", "--port", "70000"), "port: "),
        "dash for other machines": (("dash", ".", "--host", "0.0.0.0"), "host: unknown key"),
        "status of a text": (("status", "text.txt"), "there is no run here"),
        "status as XML": (("status", "run", "--format", "xml"), "format: unknown key"),
        "status, json of maybe": (("status", "run", "--json=maybe"), "json: wrong type"),
        "a site of FSDP": (("train", "--mesh", "site2 fsdp2"), "--parallel.zero 3"),
        "sites without a number": (("train", "--mesh", "site"), "mesh: "),
        "wire of 8 bits": (("train", "--mesh", "site2", "--site.wire", "fp8"), "site.wire"),
        "a variable as run folder": (("train", "--out", "$HOME/new"), "out: holds a variable"),
        "a folder of Windows": (("train", "--out", "D:\\runs"), "out: is a path of Windows"),
        "a folder without a config": (("train", "prep"), "config: "),
    }  # fmt: skip
    for name, (words, line) in rows.items():
        yield Case(name, words, line, faults=2)
    evil, flag = _model_of("evil.py"), "--trust_code"
    for words in (
        ("generate", "run"),
        ("eval", STEP),
        ("train", "run"),
        ("explain", "run/run.toml"),
    ):
        yield Case(f"a stored config names code, {words}", words, flag, evil)
    dotted = _model_of("evil.model")
    yield Case("a stored config names a module", ("generate", "run"), "no such module", dotted)


SWEEPS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "nothing": ((), "weft sweep: no key has several values", 1),
    "one value": (("--optim.lr", "1"), "weft sweep: no key has several values", 1),
    "a value twice": (("--seed", "1", "1"), "seed: has a value twice (got 1)", 1),
    "no number": (("--optim.lr", "1", "x"), "optim.lr: wrong type, in the run lr=x", 1),
    "an unknown key": (("--optim.lrr", "1", "2"), "optim.lrr: unknown key. Fix: did you mean", 1),
    "a fault of all runs": (("--seed", "1", "2", "--steps", "0"), "steps: out of range (got 0", 1),
    "a batch that ranks do not divide": (
        ("--mesh", "dp2", "--mesh", "dp3"),
        "batch.global_size: ",
        1,
    ),
    "no file": (("nowhere.toml", "--seed", "1", "2"), "config: no such file", 1),
    "a URL": (("--seed", "1", "2", "--out", "s3://x/y"), "out: is a URL", 1),
    "a copy at a URL": (
        ("--seed", "1", "2", "--save.remote", "file://copy"),
        "save.remote: is one URL, to which all runs would copy",
        1,
    ),
    "a file as its folder": (("--seed", "1", "2", "--out", "text.txt"), "out: cannot be", 2),
    "JSON nowhere": (("--seed", "1", "2", "--json", "nowhere/x.json"), "json: its folder does", 1),
}


def sweeps() -> Iterator[Case]:
    """What `weft sweep` rejects before the first run."""
    for name, (words, line, faults) in SWEEPS.items():
        yield Case(f"sweep: {name}", ("sweep", *words), line, faults=faults)
    words = ("sweep", "--seed", "1", "2")
    line = "weft sweep: starts its runs itself"
    yield Case("sweep: ranks of torchrun", words, line, env=TORCHRUN)


def new_files() -> Iterator[Case]:
    """What `weft init` rejects; it never asks here, as the input is no terminal."""
    rows: dict[str, tuple[tuple[str, ...], str]] = {
        "a file that is there": (("bad.toml",), "weft init: overwrites no file (got 'bad.toml')"),
        "no TOML": (("text.txt",), "weft init: writes a TOML file (got 'text.txt'"),
        "two files": (("a.toml", "b.toml"), "weft init: writes one file (got a.toml b.toml)"),
        "a folder that is missing": (("no/a.toml",), "the folder of the file does not exist"),
        "an unknown key": (("a.toml", "--stepz", "3"), "stepz: unknown key"),
        "no steps": (("a.toml", "--steps", "0"), "steps: out of range"),
        "no devices": (("a.toml", "--devices", "0"), "devices: out of range"),
        "no data": (("a.toml", "--data.source", "nowhere.txt"), "data.source: no such file"),
        "no model": (("a.toml", "--model.preset", "llama-9b"), "model.preset: unknown preset"),
    }
    for name, (words, line) in rows.items():
        change = write("bad.toml", "steps = 1\n")
        yield Case(f"init: {name}", ("init", *words), line, change)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "config": config_values,
    "toml": toml_files,
    "data": data_files,
    "records": records,
    "prepared": prepared,
    "hf": hf_folders,
    "checkpoint": checkpoints,
    "schedule": schedules,
    "words": command_lines,
    "optimizers": optimizers,
    "hardware": hardware_files,
    "simulate": simulate_options,
    "plan": plans,
    "auto mesh": auto_meshes,
    "start": starts,
    "newer": newer_features,
    "sweeps": sweeps,
    "new files": new_files,
}
