"""Compiles weft and rewrites the assert statements of tests once, before several workers would each do so.

In a fresh clone that takes 8 s of computing. It only saves time: what is not done here, a worker does
when it imports the file.
"""

from __future__ import annotations

import compileall
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "src"


def compile_once(config: pytest.Config) -> None:
    """Where workers will run the whole suite: compile in as many processes as there are cores."""
    is_worker = hasattr(config, "workerinput")
    has_workers = bool(config.getoption("numprocesses", default=None))
    is_whole_suite = config.args_source is config.ArgsSource.TESTPATHS
    if is_worker or not has_workers or not is_whole_suite or sys.dont_write_bytecode:
        return
    tests = [
        path
        for path in sorted(FOLDER.rglob("*.py"))
        if path.match("test_*.py") or path.name == "conftest.py"
    ]
    num_processes = os.cpu_count() or 1
    children = []
    for number in range(num_processes):
        child = os.fork()
        if child == 0:
            _compile_in_child(tests[number::num_processes], config, is_first=number == 0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _compile_in_child(tests: Sequence[Path], config: pytest.Config, *, is_first: bool) -> None:
    """Compile a part, and exit."""
    try:
        for path in tests:
            _rewrite(path, config)
        if is_first:
            compileall.compile_dir(SOURCE, quiet=2)
    except Exception:  # noqa: BLE001 - workers do what is left
        traceback.print_exc()
    os._exit(0)


def _rewrite(path: Path, config: pytest.Config) -> None:
    """Store a test file as the import hook of pytest does."""
    folder = rewrite.get_cache_dir(path)
    stored = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, stored) is None:
        folder.mkdir(parents=True, exist_ok=True)
        source_hash, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, stored)
