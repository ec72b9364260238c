"""Prefetching: same results, bounded queue, errors raised in the consumer, no thread left."""

from __future__ import annotations

import threading

import pytest

from weft.train.data_loader import prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("most", [0, 1, 2, 64])
def test_results_come_in_order_and_all_of_them(most):
    with prefetch(lambda step: step * step, range(3, 40), most=most) as results:
        assert list(results) == [step * step for step in range(3, 40)]
    assert not threads()


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_is_read_than_may_wait(most):
    read = []
    room = threading.Semaphore(0)

    def note(step):
        read.append(step)
        room.release()
        return step

    with prefetch(note, range(100), most=most) as results:
        for taken in range(5):
            for _ in range(1 if taken else most + 1):  # what waits, and the one that waits for room
                assert room.acquire(timeout=60)
            assert len(read) == taken + most + 1
            assert next(results) == taken
    assert not threads()


def test_it_is_another_thread_that_reads():
    with prefetch(lambda _step: threading.current_thread().name, range(2), most=1) as results:
        assert list(results) == ["prefetch", "prefetch"]
    with prefetch(lambda _step: threading.current_thread().name, range(2), most=0) as results:
        assert "prefetch" not in list(results)


def test_what_goes_wrong_is_raised_where_it_would_have_been_taken():
    def broken(step):
        if step == 2:
            raise OSError("the disk is gone")
        return step

    with prefetch(broken, range(9), most=4) as results:
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(results)
    assert not threads()


def test_leaving_early_ends_the_thread():
    with prefetch(lambda step: step, range(10**9), most=2) as results:
        assert next(results) == 0
    assert not threads()
