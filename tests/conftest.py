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
    "prove/live_step/test_live_step.py",
    "planner/test_step_costs.py",
    "prove/test_against_transformers.py",
    "models/test_transformers.py",
    "docs/test_commands.py",
    "train/test_guard.py",
    "planner/test_explain.py",
    "user_models/test_deceiving.py",
    "input/test_bad_inputs.py",
    "matrix/test_zero.py",
    "prove/parts/test_resume.py",
    "comm/test_run_ranks.py",
    "parallel/test_sharding_trace.py",
    "device/test_fake_device.py",
    "test_bad_input.py",
    "selftest/test_sweep.py",
    "test_cli.py",
    "train/test_evaluate.py",
    "run/test_double_launch.py",
    "parallel/test_as_torch.py",
    "test_python_api.py",
    "selftest/test_chaos.py",
    "train/test_loss_scale.py",
    "checkpoint/test_resume.py",
    "oracle/test_finetuning.py",
    "train/test_optimizer_layouts.py",
    "matrix/test_recompute.py",
    "run/test_init.py",
    "prove/test_before.py",
    "train/test_best.py",
    "user_models/test_models.py",
)
"""Longest first. The workers of pytest-xdist begin with them: none of them runs alone at the end."""


MOST_OBJECTS = 50_000
"""That the garbage collector walks through."""
gc.set_threshold(10_000, 20, 20)  # 3% of all seconds, and ranks in threads all wait for it


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


@pytest.fixture(autouse=True, scope="module")
def _imports_are_frozen():
    """The same for what the tests of a file have imported, which takes 0.2 s each time."""
    yield
    if len(gc.get_objects()) > MOST_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _ctrl_c_arrives():
    """A command that Ctrl-C has ended ignores a second one, and programs of later tests inherit that."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
