"""Timelines as trace events, as a page and as SVG: each follows the rules of its format."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.schedule.catalog import make_table
from weft.schedule.simulate import simulate
from weft.schedule.timeline import Span, Timeline
from weft.view.html import html
from weft.view.perfetto import perfetto
from weft.view.svg import svg

SECONDS_OF = {"F": 1e-3, "B": 2e-3}
ROUNDING_US = 1e-6


def with_lanes() -> Timeline:
    """1F1B on two ranks, with a collective and with messages on lanes of their own."""
    timeline = simulate(
        make_table("1f1b", ranks=2, microbatches=3),
        lambda act: SECONDS_OF[act.kind],
        hop=1e-4,
        unit="s",
    )
    end = max(span.end for span in timeline.spans)
    extra = [
        Span(0, "all_reduce dp", "all_reduce", 0.002, 0.004, "dp"),
        Span(0, "reduce", "reduce", end, end + 0.001),
    ]
    for span in timeline.spans:
        if span.name.startswith("F0"):
            lane = "pp to 1"
            name = f"{span.name} to rank 1"
            extra.append(
                Span(rank=0, name=name, kind="send", start=span.end, end=span.end + 1e-4, lane=lane)
            )
    return Timeline(spans=(*timeline.spans, *extra), num_ranks=2, origin="predicted", unit="s")


NAMES_OF_METADATA = ("process_name", "thread_name", "process_sort_index", "thread_sort_index")


def assert_valid_trace(trace: dict[str, Any], num_spans: int) -> None:
    """The rules of the Trace Event Format for the phases that are used."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans_of_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        phase = event["ph"]
        thread = (event["pid"], event["tid"])
        assert phase in ("M", "X", "s", "f")
        for number in thread:
            assert isinstance(number, int)
        if phase == "M":
            assert event["name"] in NAMES_OF_METADATA
            named[event["name"]].add(thread)
        elif phase == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
            spans_of_thread[thread].append((event["ts"], end))
        else:
            flows[event["id"]][phase] = event
    assert sum(map(len, spans_of_thread.values())) == num_spans
    assert set(spans_of_thread) <= named["thread_name"]
    processes = {pid for pid, _ in spans_of_thread}
    assert processes <= {pid for pid, _ in named["process_name"]}
    for spans in spans_of_thread.values():
        assert_one_after_another(spans)
    for flow in flows.values():
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        assert flow["f"]["bp"] == "e"
        for end_of_arrow in flow.values():
            spans = spans_of_thread[end_of_arrow["pid"], end_of_arrow["tid"]]
            assert_lies_in_a_span(end_of_arrow["ts"], spans)


def assert_one_after_another(spans: list[tuple[float, float]]) -> None:
    """The spans of a thread do not overlap."""
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start >= end - ROUNDING_US


def assert_lies_in_a_span(time_us: float, spans: list[tuple[float, float]]) -> None:
    """An end of an arrow is drawn at the span of its thread at its time."""
    for start, end in spans:
        if start - ROUNDING_US <= time_us <= end + ROUNDING_US:
            return
    pytest.fail(f"no span at {time_us} us")


def test_the_trace_keeps_the_rules_of_its_format() -> None:
    timeline = with_lanes()
    trace = json.loads(perfetto(timeline, title="a step"))
    assert_valid_trace(trace, len(timeline.spans))
    threads = {
        (event["pid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert threads == {(0, "kernels"), (0, "dp"), (0, "pp to 1"), (1, "kernels")}
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "f"]
    assert [arrow["pid"] for arrow in arrows] == [1, 1, 1]


@settings(max_examples=20)
@given(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), st.integers(1, 4), st.integers(1, 6))
def test_every_schedule_makes_a_valid_trace(name: str, ranks: int, microbatches: int) -> None:
    timeline = simulate(make_table(name, ranks=ranks, microbatches=microbatches))
    trace = json.loads(perfetto(timeline, title=name))
    assert_valid_trace(trace, len(timeline.spans))
    assert trace["otherData"]["unit"] == "units"


def test_the_page_needs_no_other_file_and_shows_every_span() -> None:
    timeline = with_lanes()
    page = html(timeline, title="tp2 </script><b>")
    assert not re.search(r"(src|href)\s*=|https?://|@import|@[A-Z]+@", page)
    assert "tp2 &lt;/script&gt;&lt;b&gt;" in page
    found = re.search(
        r'<script id="timelines" type="application/json">(.*?)</script>', page, re.DOTALL
    )
    assert found is not None
    data = json.loads(found[1])
    shown = {
        (
            data["rows"][row]["rank"],
            data["rows"][row]["lane"],
            data["names"][name],
            data["kinds"][kind],
            start,
            end,
        )
        for row, name, kind, start, end in data["spans"]
    }
    expected = {
        (f"rank {span.rank}", span.lane, span.name, span.kind, span.start, span.end)
        for span in timeline.spans
    }
    assert shown == expected
    assert len(data["colours"]) == len(data["kinds"])


def test_the_svg_draws_lanes_where_it_is_asked_to() -> None:
    timeline = with_lanes()
    xml = "{http://www.w3.org/2000/svg}"
    for lanes in (False, True):
        root = ElementTree.fromstring(svg(timeline, title="a step", lanes=lanes))
        tooltips = [title.text or "" for title in root.findall(f".//{xml}title")]
        texts = {text.text for text in root.findall(f".//{xml}text")}
        assert len(tooltips) == (len(timeline.spans) if lanes else 12)
        assert ("dp" in texts) == lanes
    boxes = [
        (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in root.findall(f".//{xml}rect")
        if "x" in rect.attrib
    ]
    for x, width in boxes:
        assert x >= 0
        assert x + width <= 960.01
