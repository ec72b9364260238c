"""Profiles on the fake CUDA device: CUDA events for times, without a wait in the step, and NVTX ranges with names."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.device.layouts import LAYOUTS
from tests.device.test_fake_device import PATIENCE_S, environ, start

__all__ = ["environ"]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own"),
    pytest.mark.timeout(PATIENCE_S),
]


@pytest.fixture(scope="module", params=["pp2 --pipeline.schedule zero_bubble", "dp2 zero 3"])
def found(request: pytest.FixtureRequest, environ: dict[str, str]) -> dict[str, Any]:
    """What the profile of a step records."""
    number = {"dp2 zero 3": 11}.get(request.param, 18)
    assert str(LAYOUTS[number]).startswith(f"llama3 {request.param[:3]}")
    process = start("profiled_step", str(number), environ=environ)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors[-4000:]
    recorded: dict[str, Any] = json.loads(output)
    return recorded


def test_times_are_those_of_events_for_which_no_step_waits(found: dict[str, Any]) -> None:
    assert found["is_cuda_clock"]
    assert found["events"] >= 2 * len(found["actions"]) + 2 * found["num_calls"]
    assert found["event_waits"] == 0, "inside the step"
    assert found["read"] >= found["events"], "each event is waited for when the records are read"
    assert found["waits"] == found["plain_waits"], "of the host, elsewhere"
    moments = [moment for _, start_s, end_s in found["actions"] for moment in (start_s, end_s)]
    assert moments == sorted(moments)
    assert moments[-1] < 1e-3 * found["events"] + 1e-9


def test_nvtx_ranges_nest_and_name_steps_actions_blocks_and_calls(found: dict[str, Any]) -> None:
    assert found["open"] == [], "each range is closed"
    for before, after in pairwise(found["ranges"]):
        assert len(after) <= len(before) + 1
        assert after[:-1] == before[: len(after) - 1], "inside those that are open"
    names = {path[-1] for path in found["ranges"]}
    assert all(name.startswith("weft: ") for name in names)
    assert {"weft: step 2 actions", "weft: step 2 reduce", "weft: step 2 update"} <= names
    for act, _, _ in found["actions"]:
        (path,) = [path for path in found["ranges"] if path[-1].startswith(f"weft: {act}: ")]
        assert path[-2] == "weft: step 2 actions"
    blocks = [path for path in found["ranges"] if path[-1] in ("weft: layer0", "weft: layer1")]
    assert all(path[-2].startswith("weft: F") for path in blocks)
    assert blocks
    calls = [path for path in found["ranges"] if path[-1].endswith((" pp", " dp"))]
    assert 0 < len(calls) <= found["num_calls"]
    assert all(path[0].startswith("weft: step 2 ") for path in calls)
