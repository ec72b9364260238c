"""Devices and their links: the published table `hardware.toml`, and hardware files of users."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from weft.config.efficiency import Efficiency
from weft.config.schema import ConfigSection
from weft.errors import ConfigError, Fault, did_you_mean
from weft.small_files import MIB, UnreadableFile, parse_toml, read_text

GB = 10**9
SUFFIX = ".toml"
PEAK_SHARES = {"bfloat16": 1.0, "float16": 1.0, "float32": 1 / 16, "float64": 1 / 16}
"""Peak of matrix products as a share of bfloat16, where there is no figure: those of the A100."""
PEAK_FIELDS = {
    "float8_e4m3fn": "fp8_tflops",
    "bfloat16": "bf16_tflops",
    "float16": "fp16_tflops",
    "float32": "fp32_tflops",
    "float64": "fp64_tflops",
}

CUDA_NAMES = {
    "GB200": "gb200",
    "B200": "b200",
    "H200": "h200",
    "H800": "h800",
    "H100 80GB HBM3": "h100",
    "A100-SXM4-80GB": "a100",
    "A100-SXM4-40GB": "a100-40gb",
}
"""Part of a CUDA device's name -> device of the hardware table; others have no peak there."""

Text = Annotated[str, Field(min_length=1)]
DeviceType = Literal["cuda", "cpu"]
"""As torch names devices; it decides the communication backend."""
LinkTopology = Literal["switch", "full_mesh"]
"""How the devices of a node are connected: any group has the whole bandwidth of a device, or each pair
of devices has a link of its own, so a group has the links among its members alone.
"""


class Figure(ConfigSection):
    """A number and where it is from: published by a source, or measured by a program."""

    value: float = Field(gt=0)
    published: Text | None = None
    measured: Text | None = None
    date: Text | None = None
    versions: Text | None = None

    @model_validator(mode="after")
    def _has_one_origin(self) -> Figure:
        if (self.published is None) == (self.measured is None):
            raise ValueError('needs published = "source" or measured = "program", one of them')
        if self.measured is not None and not (self.date and self.versions):
            raise ValueError("is measured, and needs date and versions")
        return self

    def __str__(self) -> str:
        if self.published is not None:
            return f"published: {self.published}"
        return f"measured {self.date}: {self.measured}; {self.versions}"


class HardwareTable(ConfigSection):
    """The fields of a hardware file; see `Hardware` for their units."""

    label: Text | None = None
    device: DeviceType = "cuda"
    node: int = Field(ge=1)
    memory_gb: Figure
    bf16_tflops: Figure
    fp16_tflops: Figure | None = None
    fp32_tflops: Figure | None = None
    tf32_tflops: Figure | None = None
    fp64_tflops: Figure | None = None
    fp8_tflops: Figure | None = None
    hbm_tb_s: Figure
    link_gb_s: Figure | None = None
    link_topology: LinkTopology = "switch"
    network_gb_s: Figure | None = None
    host_gb_s: Figure | None = None
    power_w: Figure | None = None
    price_usd_h: Figure | None = None
    efficiency: Efficiency = Efficiency()
    stacks: dict[str, Efficiency] = Field(default_factory=dict)

    def figures(self) -> dict[str, Figure]:
        """Every figure that the file has, by name."""
        found = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Figure):
                found[name] = value
        return found


@dataclass(frozen=True)
class Hardware:
    """A device and its links.

    Attributes:
        name: of the device in the table, or the path of its file.
        device: its type in torch.
        node: devices in a node.
        memory_gb: 10^9 bytes.
        bf16_tflops: of dense matrix products.
        hbm_tb_s: memory bandwidth.
        link_gb_s: of one device inside a node, all of its links, one direction; 0: not known.
        link_topology: how they connect the devices.
        network_gb_s: of one device between nodes, one direction; 0: not known. `bandwidths_are_known`
            rejects worlds that need what is not known.
        host_gb_s: of one device to the memory of its host, one direction; 0: not known.
        fp8_tflops, fp16_tflops, fp32_tflops, fp64_tflops: see `tflops`.
        tf32_tflops: of float32 matrix products in TF32; see `for_matmul`.
        power_w: of one device under load.
        price_usd_h: of one device, in dollars an hour.
        efficiency: what real work reaches, assumed if the file does not say.
        stacks: the same by the name of a software, whole fits to published steps.
        figures: every figure with its origin.
    """

    name: str
    label: str
    node: int
    memory_gb: float
    bf16_tflops: float
    hbm_tb_s: float
    link_gb_s: float = 0.0
    link_topology: LinkTopology = "switch"
    network_gb_s: float = 0.0
    host_gb_s: float = 0.0
    fp16_tflops: float | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    fp64_tflops: float | None = None
    fp8_tflops: float | None = None
    power_w: float | None = None
    price_usd_h: float | None = None
    device: DeviceType = "cuda"
    efficiency: Efficiency = field(default_factory=Efficiency)
    stacks: Mapping[str, Efficiency] = field(default_factory=dict, compare=False)
    figures: Mapping[str, Figure] = field(default_factory=dict, compare=False)

    @property
    def memory_bytes(self) -> int:
        """All of its memory. The driver, the libraries and fragmentation take a part of it."""
        return int(self.memory_gb * GB)

    def tflops(self, dtype: str) -> float:
        """Peak of dense matrix products of a dtype, 10^12 a second: its figure, else a share of
        bfloat16's.
        """
        value: float | None = getattr(self, PEAK_FIELDS.get(dtype, ""), None)
        if value is not None:
            return value
        return self.bf16_tflops * PEAK_SHARES.get(dtype, 1.0)

    def slow_compute_note(self, compute: str) -> str:
        """A line for runs that compute in float32 where bfloat16 has a higher peak; "" for others."""
        if compute != "float32":
            return ""
        factor = self.tflops("bfloat16") / self.tflops("float32")
        if factor <= 1:
            return ""
        return f"note: computes in float32; --precision.compute bfloat16 has {factor:.0f} times the peak"

    def for_matmul(self, matmul: Literal["ieee", "tf32"]) -> Hardware:
        """The device as it computes float32 matrix products under `precision.matmul`."""
        if matmul == "tf32" and self.tf32_tflops is not None:
            return replace(self, fp32_tflops=self.tf32_tflops)
        return self

    def link_gb_s_of(self, members: int) -> float:
        """10^9 bytes a second of one device to so many members of its node, itself among them."""
        if self.link_topology == "switch" or self.node < 2:
            return self.link_gb_s
        return self.link_gb_s * (members - 1) / (self.node - 1)

    def with_stack(self, stack: str | None) -> Hardware:
        """The device with the shares that a software reaches; as it is for None."""
        return self if stack is None else self.with_efficiency(self.stacks[stack])

    def with_efficiency(self, efficiency: Efficiency) -> Hardware:
        """The device with other shares of its figures."""
        return replace(self, efficiency=efficiency)

    @classmethod
    def from_table(cls, name: str, table: HardwareTable) -> Hardware:
        """The device of a table."""
        figures = table.figures()
        values = {key: figure.value for key, figure in figures.items()}
        return cls(
            name=name,
            label=table.label or Path(name).stem,
            device=table.device,
            node=table.node,
            link_topology=table.link_topology,
            efficiency=table.efficiency,
            stacks=table.stacks,
            figures=figures,
            **values,
        )


@cache
def hardware_table() -> Mapping[str, Hardware]:
    """All devices whose published figures weft has."""
    text = resources.files("weft.config").joinpath("hardware.toml").read_text(encoding="utf-8")
    return {
        name: Hardware.from_table(name, parse_table(fields))
        for name, fields in parse_toml(text).items()
    }


def is_file_name(name: str) -> bool:
    """Whether a name means a hardware file, not a device of the table."""
    return name.endswith(SUFFIX) or "/" in name


def find_hardware(name: str) -> Hardware:
    """The device of a name in the table, or of a hardware file.

    Raises:
        ConfigError: the name is unknown; the file is missing or not valid.
    """
    if is_file_name(name):
        return Hardware.from_table(name, read_table(name))
    table = hardware_table()
    if name in table:
        return table[name]
    hint = did_you_mean(name.lower(), table)
    joint = " Or" if hint.endswith("?") else "; or"
    fix = f"{hint}{joint} name a file: --hardware file{SUFFIX}"
    raise ConfigError(
        Fault("hardware", "unknown device", got=repr(name), need=", ".join(table), fix=fix)
    )


def hardware_of_cuda(cuda_name: str) -> Hardware | None:
    """The device of the table that CUDA gives this name; None if the table does not have it."""
    for part, name in CUDA_NAMES.items():
        if part in cuda_name:
            return hardware_table()[name]
    return None


def read_table(path: str) -> HardwareTable:
    """The table of a hardware file.

    Raises:
        ConfigError: it is missing, no TOML, or a field is missing, unknown or not valid.
    """
    try:
        return parse_table(read_fields(path))
    except ValidationError as error:
        faults = [fault_of(path, item) for item in error.errors()]
        raise ConfigError(*faults) from None


def read_fields(path: str) -> dict[str, Any]:
    """The fields of a hardware file, not validated.

    Raises:
        ConfigError: it is missing, or no TOML.
    """
    try:
        return parse_toml(read_text(Path(path), max_bytes=MIB))
    except UnreadableFile as error:
        fix = f"weft bench compute --write {path}" if error.is_missing else ""
        raise ConfigError(error.fault("hardware", fix=fix)) from None
    except ValueError as error:
        got = str(error)
        need = "a hardware file"
        raise ConfigError(
            Fault(
                "hardware",
                f"{path} is not TOML",
                got=got,
                need=need,
                fix="correct the file, or write another: weft bench compute --write NEW.toml",
            )
        ) from None


def parse_table(fields: Mapping[str, Any]) -> HardwareTable:
    """A table from its fields; as JSON, whose strict reading knows tables.

    Raises:
        ValidationError: a field is missing, unknown or not valid.
    """
    return HardwareTable.model_validate_json(json.dumps(fields, default=str))


NEEDS: Mapping[str, str] = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "string_too_short": "a text that is not empty",
}
"""What a type of pydantic's errors means in a hardware file, where its message is no need."""


def fault_of(path: str, item: Any) -> Fault:
    """What pydantic found wrong in a hardware file."""
    key = ".".join(map(str, item["loc"]))
    what = f"{path}: {key}"
    kind = item["type"]
    if kind == "missing":
        return Fault("hardware", f"{what} is missing", fix=_fix_of_missing(path, key))
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        parent, _, name = key.rpartition(".")
        known = _fields_of(parent)
        return Fault("hardware", f"{what} is unknown", fix=did_you_mean(name, known))
    if kind == "value_error":
        return Fault(
            "hardware",
            f"{what} {item['msg'].removeprefix('Value error, ')}",
            fix="correct the file",
        )
    is_number_of_figure = _is_figure(key) and not isinstance(item["input"], dict)
    if is_number_of_figure:
        fix = f'{key} = {{value = {_example(item["input"])}, published = "where it stands"}}'
        return Fault(
            "hardware", f"{what} has no source", got=repr(item["input"]), need="a table", fix=fix
        )
    is_out_of_range = kind.startswith(("greater", "less", "finite", "string_too"))
    problem = "is out of range" if is_out_of_range else "has the wrong type"
    if kind == "literal_error":
        problem = "has an unknown value"
    need = NEEDS.get(kind) or item["msg"].removeprefix("Input should be ")
    return Fault(
        "hardware", f"{what} {problem}", got=repr(item["input"]), need=need, fix="correct the file"
    )


def _fix_of_missing(path: str, key: str) -> str:
    if _is_figure(key):
        return f'weft bench compute --write {path}, or {key} = {{value = 1.0, published = "where it stands"}}'
    if key == "node":
        return f"{key} = 8"
    return f"set {key}"


def _example(value: Any) -> float:
    is_finite = isinstance(value, (int, float)) and math.isfinite(value)
    is_number = is_finite and value > 0
    return value if is_number else 1.0


def _is_figure(key: str) -> bool:
    field = HardwareTable.model_fields.get(key)
    return field is not None and field.annotation in (Figure, Figure | None)


def _fields_of(parent: str) -> list[str]:
    """Names of fields of a table inside a hardware file; of the file itself for ""."""
    if not parent:
        return list(HardwareTable.model_fields)
    if parent == "efficiency":
        return [name for name in Efficiency.__dataclass_fields__ if not name.startswith("_")]
    return list(Figure.model_fields)
