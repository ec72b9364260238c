"""A model whose classes are in `__main__`, as in a notebook: proved again, and not resumed, where a layer has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.input.test_model_files import FORWARD, GOOD

PROGRAM = """
import sys
import weft

if __name__ == "__main__":
    model = weft.Model(Config=Config, blocks=blocks, AXES=AXES, name="mine")
    keys = {"mesh": "dp2", "transport": "threads", "data": {"seq_len": 8}, "sample": 0}
    keys |= {"batch": {"global_size": 2, "micro_size": 1}, "out": sys.argv[1], "steps": int(sys.argv[2])}
    if sys.argv[3:]:
        keys |= {"resume": "auto", "resume_code": sys.argv[4] if sys.argv[4:] else "same"}
    weft.train(keys, model=model)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_changed_layer_of_a_notebook(tmp_path):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "WEFT_PROVE_BEFORE": "auto"}

    def train(layer, *words):
        path = tmp_path / "program.py"
        path.write_text(GOOD.replace(FORWARD, layer) + PROGRAM)
        command = [sys.executable, str(path), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )

    def source(out):
        lines = (tmp_path / out / "events.jsonl").read_text().splitlines()
        return next(
            event["source"] for event in map(json.loads, lines) if event["event"] == "proof"
        )

    other = f"{FORWARD} * 1.5"
    for layer, out in ((FORWARD, "a"), (other, "b")):
        done = train(layer, out, "1")
        assert done.returncode == 0, done.stderr
        assert source(out) == "proved"
    refused = train(other, "a", "2", "resume")
    place = "the checkpoint a/ckpt/step-000001: class Layer (__main__)"
    assert f"the code of the model differs from that of {place}" in refused.stderr
    accepted = train(other, "a", "2", "resume", "any")
    assert accepted.returncode == 0, accepted.stderr
