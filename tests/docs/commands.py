"""Commands in Markdown pages, and a process that runs them as a shell would, with weft imported once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(\.venv/bin/weft|weft|torchrun|srun|make|pip|python) ")
TIMEOUT_S = 110


@dataclass(frozen=True)
class Command:
    """One command line of a page, without its comment; `output` is the file after `>`."""

    text: str
    words: tuple[str, ...]
    output: str | None = None

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
            yield Command(command, tuple(words), output)


@dataclass(frozen=True)
class Result:
    """Exit code, and stdout with stderr."""

    code: int
    text: str


class CommandServer:
    """A process that has imported weft and forks a child for each command."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=environment,
        )

    def run(self, command: Command, folder: Path) -> Result:
        """Run `weft ...` in `folder`; other programs run as processes of their own."""
        log = folder / "output.txt"
        if command.program != "weft":
            return self._run_program(command, folder)
        request = {
            "words": command.words[1:],
            "folder": str(folder),
            "log": str(log),
            "output": command.output,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Result(code, log.read_text(encoding="utf-8", errors="replace"))

    def _run_program(self, command: Command, folder: Path) -> Result:
        scripts = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command.words,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Result(done.returncode, done.stdout + done.stderr)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()
