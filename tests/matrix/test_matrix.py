"""Any layout == one device: losses, gradient norms, every gradient, every updated parameter, in float64 within 1e-9."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.matrix.layouts import Case
from tests.matrix.sweep import every_case, sample
from tests.one_device import PATIENCE_S
from tests.sampling import sampled

pytestmark = pytest.mark.timeout(PATIENCE_S)
Check = Callable[[Case], None]

CORNERS = (
    Case("", family="gpt2"),
    Case("dp3"),
    Case("pp2", family="gpt2"),
    Case("tp2", family="gpt2", sequence=True),
    Case("tp4", grouped=True, sequence=True),
    Case("pp2 dp2 tp2", family="gpt2", schedule="interleaved", chunks=2),
    Case("tp2 dp2 pp2", sequence=True),
    Case("pp5", family="gpt2", microbatches=2),
    Case("tp8", sequence=True),
)


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_layout_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.parametrize("case", sampled(sample(8, seed=2032, most_ranks=8)), ids=str)
def test_sampled_layout_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the whole sweep. Enumerating it takes seconds, so it is left out where `-m`
    deselects its tests.
    """
    if metafunc.function is test_every_layout_computes_what_one_device_computes:
        is_deselected = "not slow" in metafunc.config.getoption("markexpr")
        metafunc.parametrize("case", () if is_deselected else every_case(), ids=str)


@pytest.mark.slow
def test_every_layout_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
