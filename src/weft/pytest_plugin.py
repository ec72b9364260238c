"""Plugin of pytest: `@weft.layouts("tp2", "pp2 dp2")` runs a test once for each layout, on every rank of it.

    @weft.layouts("dp2", "tp2")
    def test_the_sum_of_ranks(comm):
        ...                               # called on every rank, in threads

    @weft.layouts("tp2", "pp2 dp2", model="my_model.py")
    def test_my_model(layout_proof):
        assert layout_proof.holds         # this layout against one device, compared by weft prove

The test runs in rank threads where it has an argument `comm` (`weft.testing.run_ranks`); fixtures are
the same objects on all ranks. `mesh` is the text of the layout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from weft.core.mesh import Mesh

if TYPE_CHECKING:
    from weft.prove.report import ProofReport

MARKER = "layouts"
STEPS = 3
"""Optimizer steps of a proof."""
Test = TypeVar("Test", bound=Callable[..., Any])


def layouts(
    *meshes: str, model: str | None = None, transport: str = "threads", **keys: Any
) -> Callable[[Test], Test]:
    """Run a test once for each mesh.

    Args:
        model: family or model file of the fixture `layout_proof`.
        transport: of the ranks of a test with an argument `comm`.
        keys: of the run that `layout_proof` compares, with two underscores for a dot:
            `parallel__zero=3`.

    Raises:
        MeshError: a mesh cannot be read.
    """
    for mesh in meshes:
        Mesh.parse(mesh)

    def decorate(test: Test) -> Test:
        marked = (
            _on_ranks(test, transport) if "comm" in inspect.signature(test).parameters else test
        )
        marked = pytest.mark.parametrize("mesh", meshes)(marked)
        options = pytest.mark.layouts(model=model, keys=keys)
        return options(marked)  # type: ignore[no-any-return]

    return decorate


def _on_ranks(test: Callable[..., Any], transport: str) -> Any:
    """The test as a function of its mesh and fixtures, called on every rank."""
    signature = inspect.signature(test)
    wants_mesh = "mesh" in signature.parameters
    others = [each for name, each in signature.parameters.items() if name not in ("comm", "mesh")]
    mesh_parameter = inspect.Parameter("mesh", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(test)
    def run(*, mesh: str, **fixtures: Any) -> None:
        from weft.testing import run_ranks  # it imports torch

        if wants_mesh:
            fixtures["mesh"] = mesh
        run_ranks(mesh, lambda comm: test(comm=comm, **fixtures), transport=transport)

    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
    run.__signature__ = signature.replace(parameters=[*keyword, mesh_parameter])  # type: ignore[attr-defined]
    return run


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    line = f"{MARKER}(model, keys): set by weft.layouts, read by the fixture layout_proof"
    config.addinivalue_line("markers", line)


@pytest.fixture
def layout_proof(request: pytest.FixtureRequest, mesh: str) -> ProofReport:
    """The comparison of the test's model and layout with one device.

    Raises:
        UserError: the layout is rejected for this model.
    """
    from weft.python_api import checked_run
    from weft.start.prove_run import prove_config

    marker = request.node.get_closest_marker(MARKER)
    if marker is None:
        pytest.fail("layout_proof needs @weft.layouts(...) above the test")
    keys = {name.replace("__", "."): value for name, value in marker.kwargs["keys"].items()}
    run = checked_run({"mesh": mesh, **keys}, marker.kwargs["model"])
    return prove_config(run, steps=STEPS)
