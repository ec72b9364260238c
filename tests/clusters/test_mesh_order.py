"""The order of a mesh's axes over two hosts (network namespaces, links of 100 Mbit/s): its note, and steps that it slows down."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import cluster_marks, events, run_on_each
from tests.tiny_run import TINY

pytestmark = cluster_marks(hosts_module.unavailable())
TIMEOUT_S = 240
HARDWARE = """
node = 8
device = "cpu"
memory_gb = {value = 4.0, published = "assumed"}
bf16_tflops = {value = 0.1, published = "assumed"}
hbm_tb_s = {value = 0.01, published = "assumed"}
link_gb_s = {value = 1.0, published = "assumed"}
network_gb_s = {value = 0.00625, published = "half of 100 Mbit/s: two ranks a host"}
"""


def train(hosts: Hosts, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The events of a run of two ranks on each host, which torchrun starts."""
    out = folder / "run"
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "weft0:29400", "--rdzv-id", "order")
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    command += ["--nnodes", "2", "--nproc-per-node", "2", "-m", "weft", "train", *TINY]
    command += ["--transport", "process", "--device", "cpu", "--batch.global_size", "32"]
    command += ["--batch.micro_size", "4", "--data.seq_len", "256", "--model.dim", "64"]
    command += ["--steps", "6", "--prove.before", "never", "--out", str(out), *words]
    folder.mkdir()
    run_on_each(hosts, folder, command, timeout_s=TIMEOUT_S)
    return events(out)


def notes(found: list[dict[str, Any]]) -> list[str]:
    texts = [event["text"] for event in found if event["event"] == "note"]
    return [text for text in texts if text.startswith("mesh order")]


def step_s(found: list[dict[str, Any]]) -> float:
    steps = [event["step_s"] for event in found if event["event"] == "step"]
    return statistics.median(steps[2:])


def test_a_bad_order_is_noted_and_takes_longer(tmp_path: Path, record_property: Any) -> None:
    hardware = tmp_path / "hosts.toml"
    hardware.write_text(HARDWARE, encoding="utf-8")
    with Hosts(2, rate="100mbit") as hosts:
        ruled = train(hosts, tmp_path / "ruled", "--mesh", "tp2 dp2")
        bad = train(hosts, tmp_path / "bad", "--mesh", "tp2 dp2", "--hardware", str(hardware))
        right = train(hosts, tmp_path / "right", "--mesh", "dp2 tp2", "--hardware", str(hardware))
    (rule,) = notes(ruled)
    assert rule.startswith("mesh order: tp2 is on 2 nodes, and dp2, which sends less, is on one")
    (note,) = notes(bad)
    record_property("note", note)
    assert "tp2 is on 2 nodes and sends" in note
    assert '--mesh "dp2 tp2" keeps it inside' in note
    assert notes(right) == []
    record_property("seconds", (step_s(bad), step_s(right)))
    assert step_s(bad) > 1.5 * step_s(right), "links decide: tensors of 256 KB, 40 times a step"
    losses = [
        [event["loss"] for event in found if event["event"] == "step"] for found in (bad, right)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
