"""`weft bench comm` over links of a known rate: hosts are network namespaces, shaped to 100 Mbit/s."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import hosts as hosts_module
from tests.clusters.hosts import Hosts
from tests.clusters.training import cluster_marks, run_on_each
from weft.config.hardware import read_fields

pytestmark = cluster_marks(hosts_module.unavailable())
RATE_GB_S = 0.0125
"""100 Mbit/s."""
TOLERANCE = 0.1
"""Headers of Ethernet, IP and TCP take 5% (1,448 of 1,514 bytes of a frame are payload); the bucket
of the shaper lets 256 KiB pass at once, 3% of the largest size."""
TIMEOUT_S = 240


def measure(
    hosts: Hosts, folder: Path, *, ranks_a_host: int, mesh: str, operations: str, largest: str
) -> dict[str, Any]:
    """The JSON report of a benchmark under torchrun."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "weft0:29400", "--rdzv-id", "links")
    factor = "2048" if largest == "16MB" else "16"
    words = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    words += ["--nnodes", str(hosts.size), "--nproc-per-node", str(ranks_a_host)]
    words += ["-m", "weft", "bench", "comm", "--mesh", mesh, "--device", "cpu"]
    words += ["--smallest", "8KB", "--largest", largest, "--factor", factor, "--seconds", "1"]
    words += ["--operations", operations]
    words += ["--json", str(folder / "x.json"), "--write", str(folder / "x.toml")]
    run_on_each(hosts, folder, words, timeout_s=TIMEOUT_S)
    text = (folder / "x.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text)
    return report


def figure_of(folder: Path, name: str) -> float:
    """A figure of the hardware file."""
    fields = read_fields(str(folder / "x.toml"))
    value: float = fields[name]["value"]
    return value


def test_the_rate_of_a_shaped_link_is_measured(tmp_path: Path, record_property: Any) -> None:
    with Hosts(2, rate="100mbit") as hosts:
        report = measure(
            hosts,
            tmp_path,
            ranks_a_host=1,
            mesh="dp2",
            operations="all_reduce,send_recv",
            largest="16MB",
        )
    assert len(set(report["nodes"])) == 2
    assert {row["placement"] for row in report["rows"]} == {"between"}
    largest = max(row["size_bytes"] for row in report["rows"])
    bandwidths = {
        row["operation"]: row["bus_gb_s"] for row in report["rows"] if row["size_bytes"] == largest
    }
    record_property("bandwidths", dict(bandwidths))
    assert max(bandwidths.values()) < RATE_GB_S * (1 + TOLERANCE)
    assert figure_of(tmp_path, "network_gb_s") == pytest.approx(RATE_GB_S, rel=TOLERANCE)


def test_ranks_of_a_host_share_its_link(tmp_path: Path, record_property: Any) -> None:
    """The file has the network of one device: half of the link for each of two."""
    with Hosts(2, rate="100mbit") as hosts:
        report = measure(
            hosts,
            tmp_path,
            ranks_a_host=2,
            mesh="dp4",
            operations="all_reduce,all_gather,reduce_scatter,all_to_all,send_recv",
            largest="2MB",
        )
    assert {row["axis"] for row in report["rows"]} == {"dp", "nodes", "ranks of a node"}
    network = figure_of(tmp_path, "network_gb_s")
    record_property("network_gb_s", network)
    assert network == pytest.approx(RATE_GB_S / 2, rel=TOLERANCE)
    assert figure_of(tmp_path, "link_gb_s") > 5 * network
