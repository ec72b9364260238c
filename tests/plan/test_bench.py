"""`weft bench`: axes and placements, figures of a hardware file, tables, plot, and the commands."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from datetime import date
from pathlib import Path

import pytest
import torch

from tests.plan.test_bandwidth import group_times
from weft.cli import main
from weft.comm.comm import Comm
from weft.config.hardware import find_hardware
from weft.config.hardware_file import fields_to_extend, file_text, write_fields
from weft.core.mesh import Mesh
from weft.errors import ConfigError
from weft.testing import run_ranks
from weft.view.log_plot import Panel, Series, log_plot
from weft_plan.bench import communication
from weft_plan.bench.bandwidth import OPERATIONS
from weft_plan.bench.clock import Times, num_iterations, timed
from weft_plan.bench.communication import (
    CommReport,
    Workload,
    measure_communication,
    measured_axes,
    node_mesh,
    node_name,
)
from weft_plan.bench.computation import ComputeSuite, ComputeTimes, ComputeWork, measure_computation
from weft_plan.bench.figures import MeasuredFigures, ReachedShare, comm_figures, compute_figures
from weft_plan.bench.record import extended
from weft_plan.bench.tables import CommTable, comm_footer, comm_panels, compute_lines
from weft_plan.commands.bench import parse_size

DAY = date(2026, 1, 2)


# ----------------------------------------------------------------------------- axes and placements


def axis_names(mesh: str, nodes: list[str]) -> list[str]:
    def names(comm: Comm) -> list[str]:
        return [axis.name for axis in measured_axes(comm, nodes)]

    return run_ranks(mesh, names)[0]


def test_placements_are_measured_where_no_axis_has_their_groups() -> None:
    assert axis_names("dp4", ["a"] * 4) == ["dp"]
    assert axis_names("dp4", ["a", "a", "b", "b"]) == ["dp", "nodes", "ranks of a node"]
    assert axis_names("dp2 tp2", ["a", "a", "b", "b"]) == ["dp", "tp"]
    assert axis_names("dp2", ["a", "b"]) == ["dp"]


def test_ranks_of_two_nodes_are_timed_by_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ("a", "a", "b", "b")
    monkeypatch.setattr(communication, "all_gather_text", lambda comm, text: nodes)
    workload = Workload(("all_gather",), (1024,), budget_s=1e-4)
    report = run_ranks("dp4", lambda comm: measure_communication(comm, workload))[0]
    found = {(row.axis, row.ranks): row.placement for row in report.rows}
    assert found == {
        ("dp", (0, 1, 2, 3)): "between",
        ("nodes", (0, 2)): "between",
        ("nodes", (1, 3)): "between",
        ("ranks of a node", (0, 1)): "inside",
        ("ranks of a node", (2, 3)): "inside",
    }
    titles = [panel.title for panel in comm_panels(report)]
    assert titles == [
        "dp: 1 group of 4 ranks, each on 2 nodes",
        "nodes: 2 groups of 2 ranks, each on 2 nodes",
        "ranks of a node: 2 groups of 2 ranks, inside a node",
    ]


def test_nodes_are_a_mesh_where_they_are_alike() -> None:
    assert node_mesh(["a", "a", "b", "b"]) == Mesh.parse("dp2 tp2")
    assert node_mesh(["a", "b", "a", "b"]) is None
    assert node_mesh(["a", "a", "b"]) is None
    assert node_mesh(["a", "a"]) is None


def test_nodes_are_told_apart_by_host_and_by_the_number_of_the_launcher() -> None:
    assert node_name({}) == node_name({"RANK": "1"})
    assert node_name({"GROUP_RANK": "0"}) != node_name({"GROUP_RANK": "1"})
    assert node_name({"SLURM_NODEID": "0"}) != node_name({"SLURM_NODEID": "1"})


def test_every_group_of_every_axis_has_times() -> None:
    workload = Workload(OPERATIONS, (1024, 4096), budget_s=1e-4)
    lines: list[str] = []

    def measure(comm: Comm) -> CommReport:
        on_line = lines.append if comm.rank == 0 else str
        table = CommTable(on_line)
        return measure_communication(comm, workload, on_rows=table.add)

    reports = run_ranks("dp2 tp2", measure)
    report = reports[0]
    for other in reports:
        assert str(other) == str(report)
    num_groups = 2 * 2
    num_sizes = 2
    assert len(report.rows) == num_groups * len(OPERATIONS) * num_sizes
    groups_of_dp = {row.ranks for row in report.rows if row.axis == "dp"}
    assert groups_of_dp == {(0, 2), (1, 3)}
    for row in report.rows:
        assert 0 < row.min_s <= row.median_s
        assert row.iterations >= 3
    assert lines[0] == "dp: 2 groups of 2 ranks, inside a node"
    lines_of_axis = 2 + 2 * len(OPERATIONS)
    assert len(lines) == 2 * lines_of_axis + 1
    for line in [*lines, comm_footer(report)]:
        assert len(line) <= 80


def test_iterations_fill_the_time_within_bounds() -> None:
    assert num_iterations(0.01, 0.1) == 10
    assert num_iterations(10.0, 0.1) == 3
    assert num_iterations(0.0, 0.1) == 1000
    times = timed(lambda: None, 4, torch.device("cpu"))
    assert len(times.seconds) == 4
    assert Times((3.0, 1.0, 2.0)).median_s == 2.0


# ----------------------------------------------------------------------------- figures


def ring_rows(*, nodes: int, gb_s: float, latency_s: float) -> list:
    """All-gathers of 2 ranks on links of this bandwidth."""
    sizes = (1000, 10**9)
    return [
        group_times(
            "all_gather",
            members=2,
            size=size,
            seconds=latency_s + size / 2 / (gb_s * 1e9),
            nodes=nodes,
        )
        for size in sizes
    ]


def test_bandwidth_and_latency_of_links_are_recovered() -> None:
    rows = ring_rows(nodes=1, gb_s=100.0, latency_s=1e-5)
    rows += ring_rows(nodes=2, gb_s=12.5, latency_s=5e-5)
    measured = comm_figures(rows, device="cpu", label="x", node=4)
    assert measured.figures["link_gb_s"] == pytest.approx(100, rel=0.01)
    assert measured.figures["network_gb_s"] == pytest.approx(12.5, rel=0.01)
    assert measured.costs["latency_s"] == pytest.approx(1e-5, rel=0.01)
    assert measured.costs["network_latency_s"] == pytest.approx(5e-5, rel=0.01)
    assert measured.shares["link"] == ReachedShare("link_gb_s", pytest.approx(1.0))  # type: ignore[arg-type]


def test_small_sizes_that_pass_through_buffers_do_not_count_as_bandwidth() -> None:
    burst = group_times("all_gather", members=2, size=10**5, seconds=1e-6, nodes=2)
    rows = [*ring_rows(nodes=2, gb_s=12.5, latency_s=0.0), burst]
    assert burst.bus_gb_s > 12.5
    measured = comm_figures(rows, device="cpu", label="x", node=1)
    assert measured.figures == {"network_gb_s": pytest.approx(12.5)}


def compute_times(kind: str, dtype: str, median_s: float, **sizes: int) -> ComputeTimes:
    work = ComputeWork(kind, "x", dtype, **sizes)  # type: ignore[arg-type]
    return ComputeTimes(work, min_s=median_s, median_s=median_s)


def test_shares_are_what_remains_without_launch_and_memory() -> None:
    times = [
        compute_times("gemm", "float32", 1.0, flops=10**12, num_bytes=1),
        compute_times("gemm", "float32", 2.0 + 0.5 + 0.1, flops=10**12, num_bytes=10**12 // 2),
        compute_times("gemm", "bfloat16", 0.5, flops=10**12, num_bytes=1),
        compute_times("attention", "float32", 4.1, flops=10**12, num_bytes=1),
        compute_times("memory", "float32", 1.0, num_bytes=10**12),
        compute_times("launch", "float32", 0.1),
        compute_times("step", "float32", 0.3),
    ]
    measured = compute_figures(times, device="cpu", label="x", node=2, memory_bytes=1e9)
    assert measured.figures["fp32_tflops"] == 1.0
    assert measured.figures["bf16_tflops"] == 2.0
    assert measured.figures["hbm_tb_s"] == 1.0
    assert measured.shares["attention"].value == pytest.approx(0.25)
    reached = [1 / 0.9, 0.5]
    assert measured.shares["gemm"].value == pytest.approx(sum(reached) / 2)
    assert measured.costs == {"launch_s": 0.3}


MEASURED = MeasuredFigures(
    program="weft bench comm",
    label="here",
    device="cpu",
    node=2,
    figures={"link_gb_s": 90.0},
    shares={"link": ReachedShare("link_gb_s", 0.5)},
    costs={"latency_s": 1e-5},
)


def test_a_measured_figure_has_date_and_versions() -> None:
    fields = extended({}, MEASURED, day=DAY, versions="torch 2")
    assert fields["node"] == 2
    assert fields["device"] == "cpu"
    assert fields["link_gb_s"] == {
        "value": 90.0,
        "measured": "weft bench comm",
        "date": "2026-01-02",
        "versions": "torch 2",
    }
    assert fields["efficiency"]["link"] == 0.5
    assert fields["efficiency"]["source"] == "weft bench comm 2026-01-02"


def test_a_published_figure_stays_and_what_is_measured_is_its_share() -> None:
    before = {
        "node": 8,
        "link_gb_s": {"value": 450.0, "published": "a datasheet"},
        "efficiency": {"gemm": 0.7, "source": "weft bench compute 2026-01-01"},
    }
    fields = extended(before, MEASURED, day=DAY, versions="torch 2")
    assert fields["node"] == 8
    assert fields["link_gb_s"]["value"] == 450
    efficiency = fields["efficiency"]
    assert efficiency["link"] == 0.1
    assert efficiency["gemm"] == 0.7
    assert efficiency["source"] == "weft bench compute 2026-01-01; weft bench comm 2026-01-02"
    again = extended(fields, MEASURED, day=date(2026, 2, 2), versions="torch 3")
    assert again["efficiency"]["source"].endswith("2026-01-01; weft bench comm 2026-02-02")


def test_a_written_hardware_file_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "my.toml")
    fields = extended(
        fields_to_extend(path, published="h100"), MEASURED, day=DAY, versions='a "quoted" version'
    )
    write_fields(path, fields)
    device = find_hardware(path)
    h100 = find_hardware("h100")
    assert device.figures == h100.figures
    assert device.efficiency.link == pytest.approx(45 / 450)
    assert device.efficiency.latency_s == 1e-5
    assert file_text(fields_to_extend(path)) == Path(path).read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [Path(path)]


# ----------------------------------------------------------------------------- tables and plots

TINY_SUITE = ComputeSuite(
    dtypes=("float32",),
    gemms=((8, 8, 8),),
    attentions=((1, 2, 16, 8),),
    attention_dtypes=("float32",),
    memory_bytes=2**20,
)


def test_every_kind_of_work_is_timed_on_all_ranks() -> None:
    reports = run_ranks("dp2", lambda comm: measure_computation(comm, TINY_SUITE, budget_s=1e-4))
    assert reports[0] == reports[1]
    kinds = [row.work.kind for row in reports[0]]
    assert kinds == ["gemm", "attention", "attention", "memory", "memory", "launch", "step"]
    gemm, forward, both = reports[0][:3]
    assert gemm.work.flops == 2 * 8**3
    pairs = 16 * 17 // 2
    assert forward.work.flops == 2 * pairs * 2 * 8 * 2
    assert both.work.flops == forward.work.flops * 7 // 2
    for line in compute_lines(reports[0]):
        assert len(line) <= 80


def test_the_plot_is_one_svg_document_without_references() -> None:
    lines = Series("all_reduce", ((1024, 0.01), (2**20, 1.0)))
    text = log_plot(
        [Panel("dp <2>", (lines,)), Panel("tp", (lines, lines))],
        title="a & b",
        x_label="size",
        y_label="GB/s",
    )
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert text.count("<polyline") == 3
    assert "href" not in text
    for point in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 64 <= float(point.attrib["cx"]) <= 580
        assert 0 < float(point.attrib["cy"]) < float(root.attrib["height"])


# ----------------------------------------------------------------------------- the commands


def test_comm_writes_a_file_that_explain_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {kind: str(tmp_path / f"x.{kind}") for kind in ("json", "svg", "toml")}
    base = str(tmp_path / "x.toml")
    words = ["--mesh", "dp2", "--transport", "threads", "--device", "cpu", "--seconds", "1e-4"]
    words += ["--smallest", "1KB", "--largest", "4KB", "--published", "a100", "--write", base]
    actual = main(["bench", "comm", *words, "--json", names["json"], "--svg", names["svg"]])
    assert actual == 0
    shown = capfd.readouterr().out
    assert "dp: 1 group of 2 ranks, inside a node" in shown
    for line in shown.splitlines():
        if not line.startswith("wrote"):
            assert len(line) <= 80
    path = Path(names["json"])
    report = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "versions", "device"} < report.keys()
    assert len(report["rows"]) == 2 * len(OPERATIONS)
    device = find_hardware(base)
    assert device.link_gb_s == 300
    assert device.efficiency.source == f"weft bench comm {report['date']}"


def test_sizes_are_read_with_units() -> None:
    assert parse_size("smallest", "1KB") == parse_size("smallest", "1024") == 1024
    assert parse_size("smallest", "64 MiB") == 2**26
    assert parse_size("largest", "1g") == 2**30
    for text in ("1TB", "-1", "", "1.5MB", "0", "99999999999999GB"):
        with pytest.raises(ConfigError):
            parse_size("smallest", text)
