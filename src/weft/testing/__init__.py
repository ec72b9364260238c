"""For tests, the user's too: play a function on every rank of a mesh, in threads or in processes, with one call.

    from weft.testing import run_ranks

    def ring(comm):
        return comm.all_reduce(torch.tensor([comm.rank]), "dp").item()

    assert run_ranks("dp4", ring) == [6, 6, 6, 6]
    assert run_ranks("dp4", ring, transport="processes") == [6, 6, 6, 6]

Threads start in a millisecond, reduce in rank order and tell a deadlock within seconds; processes are the real thing.
"""

from weft.testing.run import run_ranks

__all__ = ["run_ranks"]
