"""Devices by name, with their published figures (`hardware.toml`)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from weft.errors import ConfigError, Fault

GB = 10**9


class Hardware(BaseModel):
    """A device and its links.

    Attributes:
        name: key of the table.
        memory_gb: 10^9 bytes.
        bf16_tflops: of dense matrix products.
        hbm_tb_s: memory bandwidth.
        link_gb_s: of one device inside a node, one direction.
        network_gb_s: of one device between nodes, one direction.
        node: devices in a node.
        source: of the figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str
    memory_gb: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)
    hbm_tb_s: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)
    network_gb_s: float = Field(gt=0)
    node: int = Field(ge=1)
    source: str

    @property
    def memory_bytes(self) -> int:
        """All of its memory. The driver, the libraries and fragmentation take a part of it."""
        return int(self.memory_gb * GB)


@cache
def hardware_table() -> Mapping[str, Hardware]:
    """All devices that weft knows."""
    text = resources.files("weft.config").joinpath("hardware.toml").read_text(encoding="utf-8")
    return {name: Hardware(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def hardware_faults(name: str | None) -> Iterator[Fault]:
    """A name that is not in the table."""
    table = hardware_table()
    if name is None or name in table:
        return
    near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.0)
    yield Fault(
        "hardware",
        "unknown device",
        got=repr(name),
        need=", ".join(table),
        fix=f"--hardware {near[0]}",
    )


def find_hardware(name: str) -> Hardware:
    """The device of this name.

    Raises:
        ConfigError: there is none.
    """
    faults = tuple(hardware_faults(name))
    if faults:
        raise ConfigError(*faults)
    return hardware_table()[name]
