"""Commands that weft prints: templates in its source, commands within a message, and what shortens their runs."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from weft.cli import all_commands

SOURCE = Path(__file__).parents[2] / "src"
NAME = "|".join(all_commands())
COMMAND = re.compile(rf"(?<!from )(?<!-m )(?<![\w/'-])weft ((?:{NAME})\b[^;,|()\n]*)")
"""A command ends at punctuation, two blanks, or the end of its line. In backticks stands the name of
one, which is not to be run.
"""
IN_BACKTICKS = re.compile(r"`[^`]*`")
END = re.compile(r"  |\. |: |\.$")
HOLE = "{}"
USAGE = "[usage]"
TITLE = re.compile(rf"weft (?:{NAME})(?: [a-z]+)?(?:: {{}})?")
NOT_PRINTED = ("# found by weft schedule --search:",)
"""First lines of files."""
SMALL = {
    "train": "--model.layers 1 --data.seq_len 16 --batch.global_size 4 --transport threads",
    "explain": "--model.layers 1",
    "sweep": "--model.layers 1 --data.seq_len 16 --batch.global_size 4 --transport threads",
    "bench comm": "--largest 4KB",
    "bench compute": "--seconds 0.0001 --ranks 1",
}
"""What makes a command shorter; the numbers of steps are replaced."""
STEPS = "2"
NEW_FOLDER = ("--out FOLDER", "--out new")


@cache
def templates() -> Mapping[str, str]:
    """Texts in the source that hold a command, each with its place; `{}` stands for values. Texts
    that are docstrings, usages or titles are left out.
    """
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "weft " not in source:
            continue  # parsing all files takes seconds, in each worker of the tests
        for text, line in _texts(ast.parse(source)):
            is_usage = (
                text.startswith("usage") or USAGE in text or "[--" in text or TITLE.fullmatch(text)
            )
            if any(commands_in(text)) and not is_usage and text not in NOT_PRINTED:
                found[text] = f"{path.relative_to(SOURCE)}:{line}"
    return found


def _texts(tree: ast.AST) -> Iterator[tuple[str, int]]:
    nodes = list(ast.walk(tree))
    docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node in docs or node in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.JoinedStr):
            yield "".join(map(_piece, node.values)), node.lineno


def _piece(part: ast.expr) -> str:
    """A part of an f-string."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    return USAGE if "usage" in ast.unparse(part).lower() else HOLE


def pattern_of(template: str) -> re.Pattern[str]:
    """What a message of a template looks like."""
    return re.compile(".*?".join(map(re.escape, template.split(HOLE))))


def commands_in(message: str) -> Iterator[str]:
    """The commands of a message, without `weft`."""
    for found in COMMAND.findall(IN_BACKTICKS.sub("", message)):
        yield END.split(found)[0].strip()


def runnable(command: str, places: Mapping[str, str]) -> list[str]:
    """The words of a command with the words in capitals filled in, on a small model and few steps."""
    words = [places.get(word, word) for word in shlex.split(command.replace(*NEW_FOLDER))]
    if "--steps" in words:
        words[words.index("--steps") + 1] = STEPS
    return [*words, *shlex.split(_shorter(words))]


def _shorter(words: Sequence[str]) -> str:
    """Flags for a command; a config file and a resumed run are small by themselves."""
    if words[0] == "train" and any(word.endswith(".toml") for word in words):
        return "--transport threads"
    flags = SMALL.get(" ".join(words[:2]), SMALL.get(words[0], ""))
    if words[0] == "train" and "--steps" not in words:
        flags += f" --steps {STEPS}"
    return flags
