"""Measured figures in a hardware file: published ones stay, and what was measured becomes a share of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import date
from typing import Any

import torch

from weft import __version__
from weft.comm.comm import Comm
from weft.comm.transport import NamesCarriers
from weft.config.hardware import Figure
from weft.config.hardware_file import EFFICIENCY, fields_of, is_published
from weft_plan.bench.figures import MeasuredFigures

DIGITS = 4
"""Significant digits of a measured figure."""


def extended(
    fields: Mapping[str, Any], measured: MeasuredFigures, *, day: date, versions: str
) -> dict[str, Any]:
    """The fields of a hardware file with measured figures; the measured ones of before are replaced."""
    result: dict[str, Any] = {
        "label": measured.label,
        "device": measured.device,
        "node": measured.node,
        **fields,
    }
    for name, value in measured.figures.items():
        if is_published(fields, name):
            continue
        figure = Figure(
            value=rounded(value), measured=measured.program, date=day.isoformat(), versions=versions
        )
        result[name] = fields_of(figure)
    result[EFFICIENCY] = _efficiency(result, measured, day)
    return result


def _efficiency(fields: Mapping[str, Any], measured: MeasuredFigures, day: date) -> dict[str, Any]:
    """The efficiency of a hardware file, with the measured shares and costs."""
    result = dict(fields.get(EFFICIENCY, {}))
    for name, share in measured.shares.items():
        reached = share.value * measured.figures[share.figure]
        figure = fields[share.figure]["value"]
        result[name] = rounded(reached / figure)
    for name, seconds in measured.costs.items():
        result[name] = rounded(seconds)
    before = result.get("source", "")
    added = f"{measured.program} {day}"
    result["source"] = _source(before, added)
    return result


def _source(before: str, added: str) -> str:
    """The sources of before and this one, which replaces an older one of its program."""
    program = added.rpartition(" ")[0]
    parts = [part for part in before.split("; ") if part and not part.startswith(program)]
    parts.append(added)
    return "; ".join(parts)


def rounded(value: float) -> float:
    """The value to a few significant digits."""
    return float(f"{value:.{DIGITS}g}")


def versions_of(comm: Comm) -> str:
    """Versions of what was measured with, and what carried the tensors."""
    transport = comm.transport
    parts = [
        f"weft {__version__}",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    if comm.device.type == "cuda":
        numbers = [str(number) for number in torch.cuda.nccl.version()]
        nccl = ".".join(numbers)
        parts.append(f"CUDA {torch.version.cuda}")
        parts.append(f"NCCL {nccl}")
    elif isinstance(transport, NamesCarriers):
        parts += sorted(transport.carriers)
    else:
        parts.append("rank threads")
    return ", ".join(parts)
