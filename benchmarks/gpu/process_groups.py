"""NCCL as weft calls it, on a group of one rank: every binding that `comm/group_queue.py` uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from benchmarks.gpu.report import Row, Settings
from torch.distributed import HashStore

from weft.comm.group import PlannedGroup
from weft.comm.process_groups import ProcessTransport
from weft.comm.transport import Call

NUM_ENTRIES = 1024


def check_process_groups(settings: Settings) -> Iterator[Row]:
    """Connect a group of this rank alone, and run each operation on it."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        yield Row("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    transport = ProcessTransport(0, 1, HashStore(), device=device)
    transport.connect_groups([PlannedGroup("world", (0,))])
    yield Row("a group of one rank is connected", "", is_ok=True)
    for checked in (False, True):
        for call in _calls(device, checked=checked):
            pending = transport.start(call, lambda *late: None)
            pending.wait()
            result = call.required_output.cpu()
            is_ok = bool((result == 1).all())
            yield Row(f"{call.op}{', checked' if checked else ''}", f"{result[0]:g}", is_ok)
    transport.close()
    yield Row("the group is closed", f"torch.distributed {dist.is_available()}", is_ok=True)


def _calls(device: torch.device, *, checked: bool) -> Iterator[Call]:
    sizes = (NUM_ENTRIES,)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        has_input = op in ("reduce_scatter", "all_gather", "all_to_all")
        own = torch.ones(NUM_ENTRIES, device=device)
        yield Call(
            op=op,
            axis="world",
            ranks=(0,),
            index=0,
            signature=f"{op} float32[{NUM_ENTRIES}]",
            input=own if has_input else None,
            output=torch.empty_like(own) if has_input else own,
            input_split_sizes=sizes if has_input else (),
            output_split_sizes=sizes if has_input else (),
            checked=checked,
        )
