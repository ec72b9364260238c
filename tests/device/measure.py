"""Measures layouts on the fake device, one JSON line each. Run: python -m tests.device.measure NUMBER...

Names of scenarios may come first: one JSON line each too.

With WEFT_CHECK_STREAMS=1 the order of accesses on several streams is checked for every layout.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from tests.device.fake_device import counts_of, prepare_torch
from tests.device.layouts import LAYOUTS, Layout
from tests.device.scenarios import SCENARIOS


def measure(layout: Layout) -> dict[str, object]:
    """The counts of a layout, or the traceback of its error."""
    try:
        checks_streams = layout.checks_streams or "WEFT_CHECK_STREAMS" in os.environ
        # others wait for the numbers of tokens of their experts
        checks_late = layout.checks_late and layout.model == "llama3"
        counts = counts_of(layout, checks_streams=checks_streams, checks_late=checks_late)
        if layout.measures_layers:
            larger = counts_of(layout, num_layers=layout.num_layers + 1, checks_late=False)
            counts["launches_per_layer"] = larger["launches"] - counts["launches"]
            for key in ("syncs", "copies"):
                before = sum(counts[key].values())
                after = sum(larger[key].values())
                added = after - before
                counts[f"{key}_per_layer"] = added
    except Exception:  # noqa: BLE001 - the test shows it
        return {"layout": str(layout), "error": traceback.format_exc()}
    return counts


def run_scenario(name: str) -> dict[str, object]:
    """An error of a scenario is its traceback."""
    try:
        SCENARIOS[name]()
    except BaseException:  # noqa: BLE001 - the test shows it
        return {"layout": name, "error": traceback.format_exc()}
    return {"layout": name}


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word in SCENARIOS]
    for name in names:
        print(json.dumps(run_scenario(name)), flush=True)  # noqa: T201
    prepare_torch()
    for number in sys.argv[1 + len(names) :]:
        print(json.dumps(measure(LAYOUTS[int(number)])), flush=True)  # noqa: T201
