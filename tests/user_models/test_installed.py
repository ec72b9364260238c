"""Models of installed distributions: by an entry point of the group `weft.models`, and by a dotted name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.config.load import load, try_load
from weft.models import ENTRY_POINTS, FAMILIES
from weft.start.prove_run import prove_config

METADATA = "Metadata-Version: 2.1\nName: tiny-models\nVersion: 1.0\n"
SIZES = "--mesh tp2 --batch.global_size 2 --batch.micro_size 1 --data.seq_len 8"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with a package and its metadata, as `pip install` lays it out."""
    package = tmp_path / "tiny_models_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(Path(__file__).parent / "parallel_block.py", package / "model.py")
    info = tmp_path / "tiny_models-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    names = "tiny-parallel = tiny_models_of_a_test.model\nbroken = tiny_models_of_a_test.missing\n"
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{names}")
    monkeypatch.syspath_prepend(tmp_path)
    with FAMILIES.restored():
        yield


@pytest.mark.parametrize(
    "name", [pytest.param("tiny-parallel", marks=pytest.mark.slow), "tiny_models_of_a_test.model"]
)
def test_a_model_of_an_installed_package_is_proved_by_its_name(name: str, installed: None) -> None:
    argv = ["--model.name", name, *SIZES.split()]
    run = load(argv, FAMILIES)
    report = prove_config(run, steps=1)
    assert report.holds, "\n".join(report.lines())
    assert name in report.command


def test_an_entry_point_without_its_module_is_one_fault(installed: None) -> None:
    (fault,) = try_load(["--model.name", "broken"], FAMILIES).faults
    assert fault.what == "no such module"
    assert "tiny_models_of_a_test.missing" in fault.got
