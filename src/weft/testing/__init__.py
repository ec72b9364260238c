"""For tests, also those of users: call a function on every rank of a mesh, in threads or in processes.

    from weft.testing import run_ranks

    def sum_of_ranks(comm):
        return comm.all_reduce(torch.tensor([comm.rank]), "dp").item()

    assert run_ranks("dp4", sum_of_ranks) == [6, 6, 6, 6]
    assert run_ranks("dp4", sum_of_ranks, transport="processes") == [6, 6, 6, 6]

Threads start in a millisecond, reduce in rank order and detect a deadlock within seconds; processes
use gloo. Every rank has a default CPU generator of torch of its own: see `run_ranks`.
"""

from weft.run.run_ranks import run_ranks

__all__ = ["run_ranks"]
