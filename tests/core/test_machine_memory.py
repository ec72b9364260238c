"""Memory of the machine, with /proc and without."""

from __future__ import annotations

import psutil
import pytest

from weft.core.machine_memory import available_bytes, resident_bytes, total_bytes


def missing(*_: object) -> None:
    raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")


def test_without_proc_the_figures_are_those_of_the_system(monkeypatch):
    with_proc = (total_bytes(), available_bytes(), resident_bytes())
    monkeypatch.setattr(psutil, "virtual_memory", missing)
    monkeypatch.setattr(psutil, "Process", missing)
    assert total_bytes() == pytest.approx(with_proc[0], rel=0.01)
    assert 0 < available_bytes() <= total_bytes()
    assert with_proc[2] / 4 < resident_bytes() < 4 * with_proc[2]
