"""Set-up of all tests: one intra-op thread, fixed seeds, repeatable property tests, the transports."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
)  # before torch is imported: ranks share the cores
os.environ.setdefault("WEFT_PROVE_BEFORE", "never")  # the many tiny runs are not proved
os.environ.setdefault("WEFT_REPORT", "never")  # nor drawn

import hypothesis
import pytest

from tests.slow_rows import mark_slow_rows
from weft.code.trust import trusting_all

# A shell starts background jobs with these signals ignored, and processes inherit that: tests that send them would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

QUICK = {"max_examples": 40}
for profile, sizes in {"weft": QUICK, "thorough": {}}.items():
    hypothesis.settings.register_profile(
        profile, deadline=None, derandomize=True, database=None, **sizes
    )
hypothesis.settings.load_profile("weft")  # `make slow` asks for the other one


FOLDER = Path(__file__).parent
LONG_FILES = (
    "docs/test_commands.py",
    "device/test_fake_device.py",
    "matrix/test_mutants.py",
    "input/test_bad_inputs.py",
    "gloo/test_recovery.py",
    "comm/test_run_ranks.py",
    "run/test_torchrun.py",
    "prove/test_proof.py",
    "planner/test_certificate.py",
    "checkpoint/test_resume.py",
    "checkpoint/test_layouts.py",
    "examples/test_examples.py",
    "run/test_launch.py",
    "docs/test_extend.py",
    "commands/test_chaos.py",
    "gloo/test_failures.py",
    "gloo/test_resume.py",
    "test_python_api.py",
)
"""Longest first. The workers of pytest-xdist begin with them: none of them runs alone at the end."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow rows, and move the tests of long files to the front."""
    mark_slow_rows(items, are_whole_files=not any("::" in argument for argument in config.args))
    places = {FOLDER / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through the modules and tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    if "torch" in sys.modules:  # tests of the pure core never load it
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["threads", "processes"])
def transport(request):
    """Each transport that carries data, for `run_ranks(mesh, fn, transport=transport)`."""
    return request.param


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", where], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


@pytest.fixture
def trusted_code():
    """Code that a test has written and names to inner functions runs, as what users name does."""
    with trusting_all():
        yield
