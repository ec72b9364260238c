"""The certificate of generated layouts of all families: no false alarm, and no operation without a rule."""

from __future__ import annotations

import itertools
import shlex

import pytest

from tests.planner.certificate_layouts import LAYOUTS
from weft.planner.certificate.certificate import certify
from weft.planner.measure.measured_run import MeasuredRun
from weft_selftest.generated_runs import generated_runs

NUM_LAYOUTS = 12
"""Of a seed: 30 to 60 CPU-s."""
SLOW = [pytest.param(seed, NUM_LAYOUTS, marks=pytest.mark.slow) for seed in range(26)]


@pytest.mark.parametrize(("seed", "num_layouts"), [(101, 2), *SLOW])
def test_generated_layouts_have_no_finding(seed: int, num_layouts: int) -> None:
    found = {}
    for generated in itertools.islice(generated_runs(seed, LAYOUTS), num_layouts):
        certificate = certify(MeasuredRun.of(generated.run))
        texts = [finding.text for finding in certificate.findings]
        if texts:
            found[shlex.join(generated.words)] = texts
    assert found == {}
