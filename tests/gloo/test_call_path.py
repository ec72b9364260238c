"""One path of a collective: the Python functions of this package that one all_reduce passes between processes."""

import sys
import time

import pytest
import torch

from weft.testing import run_ranks


def functions_of_all_reduce(comm):
    """(file, function) of every call in this package's files, of a call that is not compared."""
    x = torch.ones(2)
    with comm.unchecked():
        comm.all_reduce(x, "dp")  # it connects the group
        passed = []

        def note(frame, event, _):
            file = frame.f_code.co_filename
            if event == "call" and "/weft/comm/" in file:
                passed.append((file, frame.f_code.co_name))

        time.sleep(1.0 * comm.rank)  # enough for the other rank on a busy machine
        sys.setprofile(note)
        total = comm.all_reduce(x, "dp")
        sys.setprofile(None)
    assert total.tolist() == [2, 2]
    return passed


@pytest.mark.parametrize(
    ("transport", "max_calls", "max_files"), [("gloo", 25, 6), ("shared_memory", 37, 8)]
)
def test_one_all_reduce_passes_few_functions_and_files(
    monkeypatch, transport, max_calls, max_files
):
    """On the rank that comes last, which does not wait."""
    monkeypatch.setenv("WEFT_CPU_TRANSPORT", transport)
    _, passed = run_ranks("dp2", functions_of_all_reduce, transport="processes")
    files = {file for file, _ in passed}
    assert 0 < len(passed) <= max_calls, passed
    assert 0 < len(files) <= max_files, files
