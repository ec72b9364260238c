"""One path of a collective: the Python functions of this package that one all_reduce on gloo passes, and their files."""

import sys

import torch

from weft.testing import run_ranks

MAX_CALLS, MAX_FILES = 25, 6
"""64 and 15 before a group kept its queue, its process groups and their policy."""


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

        sys.setprofile(note)
        total = comm.all_reduce(x, "dp")
        sys.setprofile(None)
    assert total.tolist() == [2, 2]
    return passed


def test_one_all_reduce_on_gloo_passes_few_functions_and_files(monkeypatch):
    monkeypatch.setenv("WEFT_CPU_TRANSPORT", "gloo")
    for passed in run_ranks("dp2", functions_of_all_reduce, transport="processes"):
        files = {file for file, _ in passed}
        assert 0 < len(passed) <= MAX_CALLS, passed
        assert 0 < len(files) <= MAX_FILES, files
