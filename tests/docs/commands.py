"""Commands in Markdown pages, and a process that runs them as a shell would, with weft imported once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.programs import PRELOAD, WEFT, ProgramServer

FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(\.venv/bin/weft|weft|torchrun|srun|make|pip|python) ")
TIMEOUT_S = 110
PRELOADED = (
    *PRELOAD,
    "weft.commands.prove",
    "weft.generate.main",
    "transformers.models.llama.modeling_llama",
)
"""What commands of several pages import."""


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


class CommandServer:
    """Runs commands; those of weft as forks of a process that has imported it."""

    def __init__(self) -> None:
        self._programs = ProgramServer(preload=PRELOADED)

    def run(self, command: Command, folder: Path) -> Result:
        """Run `weft ...` in `folder`; other programs run as processes of their own."""
        done = self._run_weft(command, folder)
        if done is None:
            done = _run_program(command, folder)
        if command.output is not None:
            (folder / command.output).write_text(done.stdout, encoding="utf-8")
        text = done.stdout + done.stderr
        return Result(done.returncode, text)

    def run_code(self, code: str, *words: str) -> Result:
        """Run a Python program."""
        done = self._programs.run(code, *words)
        text = done.stdout + done.stderr
        return Result(done.returncode, text)

    def _run_weft(self, command: Command, folder: Path) -> subprocess.CompletedProcess[str] | None:
        words = command.words[1:]
        if command.program == "weft":
            text = (folder / command.input).read_text(encoding="utf-8") if command.input else ""
            return self._programs.run(WEFT, *words, folder=folder, timeout=TIMEOUT_S, text=text)
        if command.program == "torchrun":
            torchrun = "torch.distributed.run"
            return self._programs.run("", *words, module=torchrun, folder=folder, timeout=TIMEOUT_S)
        return None

    def close(self) -> None:
        """End the process."""
        self._programs.close()


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
