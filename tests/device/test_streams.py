"""The race checker: accesses on two streams need an event between them, and memory is freed only behind them."""

from __future__ import annotations

import torch

from tests.device.streams import MAIN, Streams


def test_a_write_that_no_event_orders_is_a_race():
    streams = Streams()
    x = torch.zeros(8)
    streams.run([], [x], stream=MAIN)
    streams.run([x], [], stream="side")
    assert len(streams.races) == 1


def test_an_event_orders_all_that_came_before_it():
    streams = Streams()
    x = torch.zeros(8)
    streams.run([], [x], stream=MAIN)
    streams.wait("side", dict(streams.clock(MAIN)))
    streams.run([x], [], stream="side")
    streams.run([x], [], stream=MAIN)
    assert not streams.races
    streams.run([], [x], stream=MAIN)
    assert len(streams.races) == 1, "it was read on the side stream, without a wait for it"


def test_parts_of_one_storage_that_do_not_overlap_are_apart():
    streams = Streams()
    x = torch.zeros(8)
    streams.run([], [x[:4]], stream=MAIN)
    streams.run([], [x[4:]], stream="side")
    assert not streams.races
    streams.run([], [x[3:5]], stream="other")
    assert len(streams.races) == 2


def test_memory_that_is_freed_while_another_stream_reads_it_is_a_race():
    for is_waited_for in (False, True):
        streams = Streams()
        x = torch.zeros(8)
        streams.run([], [x], stream=MAIN)
        streams.wait("side", dict(streams.clock(MAIN)))
        streams.run([x], [], stream="side")
        if is_waited_for:
            streams.wait(MAIN, dict(streams.clock("side")))
        del x
        streams.find_freed()
        assert bool(streams.races) != is_waited_for
