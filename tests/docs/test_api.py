"""The API reference lists every public name, and the documentation builds without warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import weft

ROOT = Path(__file__).parents[2]


def test_the_reference_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: weft\.(\w+)$", page, re.MULTILINE)) == set(weft.__all__)


def test_the_documentation_builds_offline_without_warnings(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "api.html").stat().st_size > 0
