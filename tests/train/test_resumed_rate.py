"""A resume with more steps says that the learning rate rises again, and how to keep it."""

from __future__ import annotations

import shlex

from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.cli import main
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS


def test_a_resume_that_raises_the_rate_says_so_and_its_flags_keep_it(tmp_path, capsys):
    out = tmp_path / "run"
    source = ("--data.source", str(write_text(tmp_path)), "--out", str(out))
    words = [*MODEL, *SEQUENCES, *source, "--transport", "threads", "--prove.before", "never"]
    words += ["--optim.lr", "3e-4", "--optim.warmup", "1", "--save.every", "4", "--save.keep", "9"]
    assert main(["train", *words, "--steps", "4"]) == 0
    assert "rises again" not in capsys.readouterr().out
    assert main(["train", *words, "--steps", "8", "--resume", "auto"]) == 0
    events = list(read_events(out / EVENTS))
    rates = [event["lr"] for event in events if event["event"] == "step"]
    assert rates[4] > rates[3]
    (note,) = [event["text"] for event in events if "rises again" in event.get("text", "")]
    said = f"{rates[3]:.3g} at step 4 of 4, {rates[4]:.3g} at step 5 of 8; "
    start, _, flags = note.partition("; ")
    assert start == f"the learning rate rises again: {said[:-2]}"
    flags = shlex.split(flags.removesuffix(" keeps it"))
    at_4 = ["--resume", str(out / "ckpt/step-000004"), "--out", str(tmp_path / "kept")]
    kept = [word for word in words if word not in ("--out", str(out))]
    kept[kept.index("--optim.lr") : kept.index("--optim.lr") + 2] = flags
    assert main(["train", *kept, *at_4, "--steps", "8"]) == 0
    events = list(read_events(tmp_path / "kept" / EVENTS))
    assert not [event for event in events if "rises again" in event.get("text", "")]
    assert {f"{event['lr']:.3g}" for event in events if event["event"] == "step"} == {
        f"{rates[3]:.3g}"
    }
