"""Bad inputs: one line each, exit code 2, under 2 s of CPU time, nothing written, no file outside the folder opened."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.input.cases import GROUPS as FIRST_GROUPS
from tests.input.cases import Case
from tests.input.data_cases import data_formats
from tests.input.folders import write_base
from tests.input.planner_cases import planner_cases
from weft.errors import EXIT_USER
from weft.small_files import user_folder

GROUPS = {**FIRST_GROUPS, "planner": planner_cases, "data formats": data_formats}
NUM_PARTS = 4
"""Of a group of cases, of which one runs by default."""
LIMIT_S = 2.0
"""CPU time of a command, with the start of Python and the imports that the server has made once."""
MAX_BYTES = 600 * 2**20
ROOT = Path(__file__).parents[2]
OWN = (
    str(ROOT / "src"),
    str(ROOT / "tests"),
    *{os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")},
    os.path.realpath(sys.base_prefix),
    "/dev/null",
    "/proc/self/",
    "/proc/stat",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/sys/",
    "/usr/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/python",
)
"""Where Python, its packages and the machine's own facts lie."""


@dataclass
class Server:
    """The process that runs the cases."""

    process: subprocess.Popen[str]
    start_s: float

    def run(self, case: Case, folder: Path) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"words": case.words, "folder": str(folder), "env": dict(case.env)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        report: dict[str, Any] = json.loads(line)
        return report


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.input.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout is not None
    yield Server(process, json.loads(process.stdout.readline())["start_s"])
    process.stdin.close()  # type: ignore[union-attr]
    process.wait(30)
    process.stdout.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "valid"
    write_base(folder)
    return folder


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every file below a folder, with its size and time of change."""
    found = []
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(here, name)
            status = os.lstat(path)
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            found.append(
                (path, 0 if is_folder else status.st_size, 0 if is_folder else status.st_mtime_ns)
            )
    return sorted(found)


def problems(case: Case, report: dict[str, Any], folder: Path, start_s: float) -> Iterator[str]:
    """What the answer to a bad input lacks."""
    lines = report["err"].splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if report["code"] != EXIT_USER:
        yield f"exit code {report['code']}"
    if not 1 <= len(errors) <= case.faults or len(errors) + sum(map(is_note, lines)) != len(lines):
        yield f"{len(errors)} error lines of {len(lines)}"
    if case.line not in report["err"]:
        yield f"no {case.line!r}"
    if any(line.count("Fix: ") > 1 for line in errors):
        yield "a line with two fixes"
    if not report["err"].replace("\n", "").isprintable():
        yield "control characters"
    if report["out"]:
        yield f"output {report['out'][:80]!r}"
    if report["torch"]:
        yield "torch is imported"
    if report["forbidden"]:
        yield f"audit events {report['forbidden']}"
    if start_s + report["cpu_s"] > LIMIT_S:
        yield f"{start_s + report['cpu_s']:.2f} s of CPU time"
    if report["rss_bytes"] > MAX_BYTES:
        yield f"{report['rss_bytes'] >> 20} MiB"
    outside = [path for path in report["opened"] if not is_inside(path, case, folder)]
    if outside:
        yield f"opened {sorted(set(outside))[:3]}"


def is_note(line: str) -> bool:
    return line.startswith("note: ")


def is_inside(path: str, case: Case, folder: Path) -> bool:
    """Whether an opened file belongs to the folder, to Python, or to the words of the case."""
    path = re.sub(r"^/proc/\d+/", "/proc/self/", path)  # what the name of the process leads to
    named = [os.path.dirname(word) for word in case.words if word.startswith("/")]
    if any(path.startswith(name) for name in named):
        return True
    real = os.path.join(real_folder(os.path.dirname(path)), os.path.basename(path))
    if os.path.islink(real):
        real = os.path.realpath(real)
    if real.startswith(str(user_folder(os.environ))):  # the list of trusted code
        return True
    return real.startswith((str(folder), *OWN)) or real == "/"


@functools.cache
def real_folder(path: str) -> str:
    """A folder without links in its path: most of the opened files are modules in a few folders."""
    return os.path.realpath(path)


@pytest.mark.parametrize(
    ("group", "part"),
    [
        *((group, 0) for group in GROUPS),
        *(
            pytest.param(group, part, marks=pytest.mark.slow)
            for group in GROUPS
            for part in range(1, NUM_PARTS)
        ),
    ],
)
def test_bad_input_is_one_line(
    group: str, part: int, server: Server, base: Path, tmp_path: Path
) -> None:
    """Every fourth case of a group; the others run with the slow tests."""
    wrong = []
    folder = tmp_path / "case"
    for case in itertools.islice(GROUPS[group](), part, None, NUM_PARTS):
        if not folder.exists():
            shutil.copytree(base, folder, symlinks=True)
        if case.change is not None:
            case.change(folder)
        before = listing(folder)
        report = server.run(case, folder)
        found = list(problems(case, report, folder, server.start_s))
        has_changed = listing(folder) != before
        if has_changed:
            found.append("files have changed")
        if found:
            end_of_output = report["err"][-300:]
            wrong.append(f"{case.name}: {'; '.join(found)}: {end_of_output}")
        if has_changed or case.change is not None:
            shutil.rmtree(folder)
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_table_has_over_300_cases_with_names_of_their_own():
    names = []
    for group, make in GROUPS.items():
        names += [f"{group}: {case.name}" for case in make()]
    assert len(names) > 300
    assert len(set(names)) == len(names)
