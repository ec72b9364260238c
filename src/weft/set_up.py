"""What weft needs before anything of it can be imported: Linux, Python, packages. Imports the standard library alone."""

from __future__ import annotations

import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from weft.errors import EXIT_FAILED, EXIT_USER, Fault

MIN_PYTHON = (3, 11)
PLATFORM = "linux"
REQUIRED = ("torch", "numpy", "pydantic", "tyro", "rich", "safetensors", "psutil", "cloudpickle")
WIDTH = 80
INDENT = 20
"""Columns of mark and name before the text of a finding."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; a problem has a fix."""

    name: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        mark = "FAIL" if self.fix else "ok"
        line = f"{mark:<4}  {self.name:<13} {self.text}"
        if self.fix:
            return f"{line}. Fix: {self.fix}"
        return line


def examine_set_up() -> Iterator[Finding]:
    """The platform, Python, and the packages that are missing."""
    need = ".".join(map(str, MIN_PYTHON))
    is_new_enough = sys.version_info[:2] >= MIN_PYTHON
    yield Finding(
        "python",
        platform.python_version(),
        "" if is_new_enough else f"Python {need} or newer: make setup PYTHON=python{need}",
    )
    if sys.platform != PLATFORM:
        fix = "a Linux machine or container: ranks are watched through /proc"
        yield Finding("platform", f"{platform.system()}: only Linux is tested", fix)
    missing = [each for each in REQUIRED if each != "torch" and version_of(each) is None]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        yield Finding("packages", f"{', '.join(missing)}: not installed", fix)


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(findings: Sequence[Finding], *, verdict: str) -> str:
    """The findings in lines of 80 columns, texts aligned, with the verdict for this machine last.

    Args:
        verdict: where nothing is a problem.
    """
    problems = [finding.name for finding in findings if finding.fix]
    last = Finding("verdict", verdict)
    if problems:
        last = Finding("verdict", "not ready", f"see above: {', '.join(problems)}")
    return "\n".join(map(_wrapped, (*findings, last)))


def _wrapped(finding: Finding) -> str:
    """Longer words stay whole."""
    return textwrap.fill(
        str(finding),
        WIDTH,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def explain_missing(name: str, words: Sequence[str]) -> int:
    """Say why no command can run: all findings for `weft doctor`, else one line.

    Args:
        name: of the module that cannot be imported.
        words: of the command line.

    Returns:
        The exit code.
    """
    problems = [finding for finding in examine_set_up() if finding.fix]
    if words[:1] == ["doctor"]:
        if version_of("torch") is None:
            problems.append(Finding("torch", "is not installed", "pip install torch"))
        sys.stdout.write(report(problems, verdict="") + "\n")
        return EXIT_FAILED
    fix = problems[0].fix if problems else f"pip install {name}"
    fault = Fault(name, "cannot be imported", fix=f"{fix} (see python -m weft doctor)")
    sys.stderr.write(f"error: {fault}\n")
    return EXIT_USER
