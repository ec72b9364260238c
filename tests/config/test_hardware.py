"""Hardware files: every figure has an origin, what is read equals what is written in the file, bad fields are faults."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from weft.config.efficiency import Efficiency
from weft.config.hardware import HardwareTable, find_hardware, hardware_table
from weft.config.load import load
from weft.config.rules.sections import bandwidths_are_known
from weft.config.run import hardware_of
from weft.errors import ConfigError
from weft.models import FAMILIES

LAPTOP = """
label = "A laptop"
node = 2
memory_gb = {value = 16, published = "its label"}
bf16_tflops = {value = 0.1, measured = "weft bench compute", date = "2026-01-02", versions = "torch 2"}
fp32_tflops = {value = 0.2, published = "its label"}
hbm_tb_s = {value = 0.02, published = "its label"}
price_usd_h = {value = 0.5, published = "a shop"}

[efficiency]
gemm = 0.9
launch_s = 0
source = "24 runs"
"""


def laptop(folder: Path, text: str = LAPTOP) -> str:
    path = folder / "laptop.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_published_figure_names_its_source_and_none_is_measured() -> None:
    for device in hardware_table().values():
        assert device.figures.keys() >= {"memory_gb", "bf16_tflops", "hbm_tb_s", "link_gb_s"}
        for figure in device.figures.values():
            assert figure.published
            assert figure.measured is None


def test_a_hardware_file_is_read_as_it_stands(tmp_path: Path) -> None:
    device = find_hardware(laptop(tmp_path))
    assert device.label == "A laptop"
    assert device.node == 2
    assert device.memory_bytes == 16 * 10**9
    assert device.price_usd_h == 0.5
    assert device.power_w is None
    assert device.efficiency == Efficiency(gemm=0.9, launch_s=0.0, source="24 runs")
    assert str(device.figures["bf16_tflops"]) == "measured 2026-01-02: weft bench compute; torch 2"


def test_the_peak_of_a_dtype_is_its_figure_or_a_share_of_bfloat16(tmp_path: Path) -> None:
    device = find_hardware(laptop(tmp_path))
    assert device.tflops("float32") == 0.2
    assert device.tflops("bfloat16") == device.tflops("float16") == 0.1
    assert device.tflops("float64") == 0.1 / 16


def test_float32_products_are_in_tf32_where_the_run_asks_for_it() -> None:
    h100 = find_hardware("h100")
    assert h100.tflops("float32") == h100.for_matmul("ieee").tflops("float32") == 67
    assert h100.for_matmul("tf32").tflops("float32") == 494.7
    ascend = find_hardware("910b")
    assert ascend.for_matmul("tf32") == ascend


def test_a_world_needs_the_bandwidths_between_its_ranks(tmp_path: Path) -> None:
    device = find_hardware(laptop(tmp_path))
    whats = [fault.what for fault in bandwidths_are_known(device, 2)]
    assert whats == [f"{device.name} has no link"]
    link = 'link_gb_s = {value = 1, published = "its label"}\n'
    device = find_hardware(laptop(tmp_path, link + LAPTOP))
    assert not list(bandwidths_are_known(device, 2))
    whats = [fault.what for fault in bandwidths_are_known(device, 3)]
    assert whats == [f"{device.name} has no network"]
    assert not list(bandwidths_are_known(find_hardware("h100"), 16384))


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_hardware("h10")


def test_the_efficiency_table_has_every_field_of_efficiency(tmp_path: Path) -> None:
    names = [field.name for field in fields(Efficiency)]
    for name in names:
        value = '"x"' if name == "source" else "0.25"
        text = LAPTOP.partition("[efficiency]")[0] + f"[efficiency]\n{name} = {value}"
        efficiency = find_hardware(laptop(tmp_path, text)).efficiency
        assert getattr(efficiency, name) in ("x", 0.25)
    assert "efficiency" in HardwareTable.model_fields


# ----------------------------------------------------------------------------- the page

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
COLUMNS = ("memory_gb", "bf16_tflops", "hbm_tb_s", "link_gb_s", "network_gb_s", "node")


def test_the_page_has_the_published_figures_of_every_device() -> None:
    table = hardware_table()
    printed = {}
    for line in PAGE.splitlines():
        name, *figures = line.strip("| ").split(" | ")
        if line.startswith("| ") and name in table:
            printed[name] = figures
    assert printed.keys() == table.keys()
    for name, device in table.items():
        figures = [f"{getattr(device, column):g}" for column in COLUMNS]
        assert printed[name] == figures


def test_the_hardware_file_of_the_page_is_valid(tmp_path: Path) -> None:
    text = PAGE.partition("```toml\n")[2].partition("```")[0]
    device = find_hardware(laptop(tmp_path, text))
    assert device.price_usd_h == 2.1
    assert device.efficiency == Efficiency(gemm=0.8, source="measured by hand")
    for name in HardwareTable.model_fields:
        is_explained = f"`{name}`" in PAGE or f"`[{name}]`" in PAGE
        assert is_explained or name == "label"


def test_a_group_on_a_full_mesh_has_the_links_among_its_members() -> None:
    mesh = find_hardware("910b")
    assert mesh.link_topology == "full_mesh"
    assert mesh.link_gb_s_of(8) == mesh.link_gb_s == 196
    assert mesh.link_gb_s_of(2) == 196 / 7  # 18 to 38 were measured
    assert find_hardware("h100").link_gb_s_of(2) == 450


def test_nodes_of_one_device_need_no_link_but_a_network() -> None:
    device = replace(find_hardware("h100"), node=1, link_gb_s=0.0)
    assert not list(bandwidths_are_known(device, 16))
    (fault,) = bandwidths_are_known(replace(device, network_gb_s=0.0), 16)
    assert "has no network" in fault.what


def test_a_stack_is_a_whole_set_of_constants() -> None:
    device = find_hardware("h100")
    whole = device.with_stack("llm-foundry-2023").efficiency
    assert whole == device.stacks["llm-foundry-2023"] != device.efficiency
    assert whole.attention == 0.1821
    assert "fitted as a whole" in whole.source
    assert device.with_stack(None) is device
    run = load(["--hardware", "h100", "--stack", "llm-foundry-2023"], FAMILIES)
    named = hardware_of(run)
    assert named is not None
    assert named.efficiency == whole


def test_a_file_may_have_stacks(tmp_path: Path) -> None:
    text = f"{LAPTOP}[stacks.mine]\ngemm = 0.5\nsource = 'by hand'\n"
    assert find_hardware(laptop(tmp_path, text)).with_stack("mine").efficiency.gemm == 0.5
