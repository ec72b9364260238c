"""Commands in Markdown pages, run as a shell would, with weft imported once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.programs import WEFT, programs

FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(\.venv/bin/weft|weft|torchrun|srun|make|pip|python) ")
TIMEOUT_S = 110


@dataclass(frozen=True)
class Command:
    """One command line of a page, without its comment; `output` is the file after `>`, `input` the
    one after `<`.
    """

    text: str
    words: tuple[str, ...]
    output: str | None = None
    input: str | None = None

    @property
    def program(self) -> str:
        """`weft`, `torchrun`, `make`, ..."""
        return Path(self.words[0]).name


def commands_of(page: Path) -> Iterator[Command]:
    """The commands in the code blocks of a page, in order; lines after a `$` prompt show output and
    are left out.
    """
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "sh", "bash"):
            continue
        for line in body.splitlines():
            is_drawing = "──" in line
            if is_drawing or not COMMAND.match(line):
                continue
            command = re.split(r"\s+#\s", line)[0].strip()
            words = shlex.split(command)
            output = None
            if ">" in words:
                output = words[words.index(">") + 1]
                words = words[: words.index(">")]
            given = None
            if "<" in words:
                given = words[words.index("<") + 1]
                words = words[: words.index("<")]
            yield Command(command, tuple(words), output, given)


@dataclass(frozen=True)
class Result:
    """Exit code, and stdout with stderr."""

    code: int
    text: str


def run(command: Command, folder: Path) -> Result:
    """Run a command in `folder`: `weft` and torchrun as forks, other programs as processes of their own."""
    words = command.words[1:]
    if command.program == "weft":
        text = (folder / command.input).read_text(encoding="utf-8") if command.input else ""
        done = programs().run(WEFT, *words, folder=folder, timeout=TIMEOUT_S, text=text)
    elif command.program == "torchrun":
        torchrun = "torch.distributed.run"
        done = programs().run("", *words, module=torchrun, folder=folder, timeout=TIMEOUT_S)
    else:
        done = _run_program(command, folder)
    if command.output is not None:
        (folder / command.output).write_text(done.stdout, encoding="utf-8")
    return Result(done.returncode, done.stdout + done.stderr)


def _run_program(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    return subprocess.run(
        command.words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
