"""Set-up of all tests: one intra-op thread, fixed seeds, repeatable property tests, the transports."""

from __future__ import annotations

import os
import random
import signal
import sys

os.environ.update(
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
)  # before torch is imported: ranks share the cores
os.environ.setdefault("WEFT_PROVE_BEFORE", "never")  # the many tiny runs are not proved

import hypothesis
import pytest

# A shell starts background jobs with these signals ignored, and processes inherit that: tests that send them would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

hypothesis.settings.register_profile("weft", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("weft")


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    if "torch" in sys.modules:  # tests of the pure core never load it
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(params=["threads", "processes"])
def transport(request):
    """Each transport that carries data, for `run_ranks(mesh, fn, transport=transport)`."""
    return request.param
