"""Set-up of a rank: memory reused without page faults."""

from __future__ import annotations

from tests.programs import programs

SCRIPT = """
import resource, sys, torch
from weft.run.rank_setup import prepare_rank

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        torch.ones(16, 2**20).add_(1)  # 64 MB: mapped anew every time by default, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults_of_a_step()
prepare_rank(1)
later = [faults_of_a_step() for _ in range(6)]  # the heap grows in the first ones
sys.stdout.write(f"{first} {later[-1]}")
"""


def test_freed_memory_is_reused_by_later_steps():
    done = programs().run(SCRIPT)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 30_000
    assert after < 1_000
