"""Text across ranks: what one rank passes, every rank gets."""

import pytest

from weft.comm.text import all_gather_text, broadcast_text, raise_on_all_ranks
from weft.errors import CheckpointError, Fault
from weft.testing import run_ranks

NO_TEXT = b"run \xff".decode(errors="surrogateescape")
"""A name of a file that is no UTF-8, as Python reads it; it ends with the byte of the padding."""


def test_names_of_files_that_are_no_text_come_to_all_ranks():
    def names(comm):
        own = NO_TEXT if comm.rank == 0 else "another"
        return all_gather_text(comm, own), broadcast_text(comm, own)

    assert run_ranks("dp2", names, timeout_s=20) == [((NO_TEXT, "another"), NO_TEXT)] * 2


def test_an_error_about_such_a_file_is_raised_on_all_ranks():
    def fail_on_rank_0():
        raise CheckpointError(Fault(NO_TEXT, "cannot be read"))

    def check(comm):
        with pytest.raises(CheckpointError, match="cannot be read"):
            raise_on_all_ranks(comm, fail_on_rank_0 if comm.rank == 0 else lambda: None)

    run_ranks("dp2", check, timeout_s=20)
