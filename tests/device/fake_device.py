"""The fake CUDA device in this process: loading it, and counting what one rank's training step does on it.

Import it first in a process of its own: it loads the device library, named in WEFT_FAKE_CUDA, before torch.
"""

# ruff: noqa: E402

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

ctypes.CDLL(os.environ["WEFT_FAKE_CUDA"])

import torch
import torch.cuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.device.layouts import Layout
from tests.device.streams import OrderedOperations, StreamedCall, Streams, cuda_streams
from weft.checkpoint.state import write_items
from weft.checkpoint.write_item import snapshot
from weft.comm.comm import Comm
from weft.comm.group import StepGroups, planned_groups
from weft.comm.transport import Call, MetaTransport, OnLate
from weft.config.load import load
from weft.config.run import Run, plan_of
from weft.core.mesh import Mesh
from weft.data.record_sources import packs_documents
from weft.models import FAMILIES
from weft.models.common import experts, init, linear_products
from weft.models.common.batch import token_batch
from weft.train import build, build_training
from weft.train.late_report import LateReports, reports_late
from weft.train.step import TrainStep

DEVICE = torch.device("cuda:0")
ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
NO_KERNEL = ("empty", "set_", "resize_", "detach", "lift", "alias", "record_stream", "_unsafe_view")
"""Operations without a kernel, besides views."""


class FakeEvent:
    """A CUDA event; its wait is not one of those that are counted."""

    def record(self) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Nothing runs."""


def prepare_torch() -> None:
    """Replace what needs a driver, and what refuses fake tensors without a reason."""
    torch.cuda.max_memory_allocated = lambda device=None: 1
    torch.cuda.reset_peak_memory_stats = lambda device=None: None
    torch.cuda.Event = FakeEvent
    torch.utils.swap_tensors = _swap_tensors
    init.normal_entries = _without_values
    for name in ("lazy_blocks", "parallelize"):
        plain = getattr(build, name)
        setattr(build, name, partial(_without_fake_tensors, plain))


def _without_values(key: int, shape, box, *, std: float, device: torch.device) -> Tensor:
    """As `normal_entries`: fake tensors have no values, and drawing them takes hundreds of calls."""
    return torch.empty(box.shape, dtype=torch.float32, device=device)


def _without_fake_tensors(function, *args, **kwargs):
    """Call `function` of meta tensors, which traces them and takes no tensors of other classes."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    """As torch's, which refuses the weak references that fake tensors keep."""
    for name in ("__class__", "__dict__"):
        kept = getattr(first, name)
        setattr(first, name, getattr(second, name))
        setattr(second, name, kept)
    torch._C._swap_tensor_impl(first, second)


class Recorder(TorchDispatchMode):
    """Counts launches, host synchronisations and copies between host and device, by source line.

    Attributes:
        launches: operations with a kernel, by name.
        syncs: places where the host waits for the device.
        copies: places where data moves between host and device; also those that do not wait.
        mixed: operations whose tensors are on several devices, scalars aside.
        most_bytes: of the memory of a result on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_recording = False
        self.is_listing = False
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATEN._local_scalar_dense.default:
            return self._scalar(args[0])
        outputs = func(*args, **kwargs)
        if self.is_recording:
            inputs = tree_leaves((args, kwargs))
            self._record(func, inputs, tree_leaves(outputs))
        return outputs

    def _scalar(self, x: Tensor) -> float | bool | int:
        if self.is_recording and not self.is_listing and x.is_cuda:
            self.syncs[source_line()] += 1
        if x.dtype.is_floating_point:
            return 1.0
        return True if x.dtype == torch.bool else 1

    def _record(self, func, inputs, outputs) -> None:
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        results = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
        devices = {x.device.type for x in (*tensors, *results)}
        if "cuda" not in devices:
            return
        if func in COPIES and len(devices) > 1:
            self.copies[source_line()] += 1
        elif len({x.device.type for x in tensors if x.dim() > 0}) > 1:
            self.mixed[f"{source_line()} {func}"] += 1
        sizes = [x.untyped_storage().nbytes() for x in results]
        self.most_bytes = max([self.most_bytes, *sizes])
        name = func._schema.name.removeprefix("aten::")
        has_kernel = not func.is_view and not name.startswith(NO_KERNEL)
        if results and has_kernel and func.namespace == "aten":
            self.launches[name] += 1


class RecordingTransport(MetaTransport):
    """Notes the groups of all calls, and the calls of tensors on the CPU, which need gloo; calls run
    on the stream of their group.
    """

    def __init__(
        self, mesh: Mesh, rank: int, *, steps: StepGroups, device: torch.device, streams: Streams
    ) -> None:
        super().__init__(mesh.size, rank, device=device)
        planned = planned_groups(mesh, rank, steps=steps)
        self.planned = {(group.ranks, group.communicator) for group in planned}
        self.groups: set[tuple[tuple[int, ...], str]] = set()
        self.on_cpu: set[str] = set()
        self.streams = streams

    def start(self, call: Call, on_late: OnLate) -> StreamedCall | None:
        ranks = call.members if call.is_p2p else call.ranks
        group = (ranks, call.communicator)
        if call.communicator != "group" and group not in self.planned:
            group = (ranks, "group")
        self.groups.add(group)
        super().start(call, on_late)
        if call.device.type != "cuda":
            self.on_cpu.add(call.description)
            return None
        if not self.streams.is_checking:
            return None
        return StreamedCall(self.streams, call, f"calls of {group}")

    def not_planned(self) -> list[str]:
        """Groups that are not connected at start."""
        return [str(group) for group in self.groups - self.planned]


def source_line() -> str:
    """The innermost line of weft that is running: file and text, without its number."""
    frames = traceback.extract_stack()[:-2]
    for frame in reversed(frames):
        if "/src/weft/" in frame.filename:
            return f"{frame.filename.split('/src/weft/')[1]}: {frame.line}"
    return f"{frames[-1].filename}: {frames[-1].line}"


@contextmanager
def even_expert_loads(recorder: Recorder):
    """`Tensor.tolist` of counts gives the even load of the experts: fake tensors have no values.

    One call is one synchronisation, whatever the length.
    """
    num_slots = 0
    sort_by_expert = experts.sort_by_expert
    even_lengths = experts.ExpertLoads.lengths
    plain_tolist = FakeTensor.tolist

    def sort(experts_NK: Tensor, num_experts: int) -> experts.Sorting:
        nonlocal num_slots
        num_slots = experts_NK.numel()
        return sort_by_expert(experts_NK, num_experts)

    def tolist(x: Tensor):
        if not x.is_cuda and x.constant is not None:
            return x.constant.tolist()
        if recorder.is_recording and x.is_cuda:
            recorder.syncs[source_line()] += 1
        if x.dtype == torch.int64:
            row_length = x.shape[-1]
            row = [num_slots // row_length] * row_length
            if x.dim() == 2:
                return [row] * x.shape[0]
            return row
        recorder.is_listing = True
        try:
            return plain_tolist(x)
        finally:
            recorder.is_listing = False

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("weft.") and getattr(module, "sort_by_expert", None) is sort_by_expert
    ]
    for module in users:
        module.sort_by_expert = sort
    FakeTensor.tolist = tolist
    experts.ExpertLoads.lengths = lambda loads, num_tokens: (
        loads._lengths
    )  # as where there are values
    try:
        yield
    finally:
        FakeTensor.tolist = plain_tolist
        experts.ExpertLoads.lengths = even_lengths
        for module in users:
            module.sort_by_expert = sort_by_expert


def counts_of(
    layout: Layout,
    *,
    num_layers: int | None = None,
    checks_streams: bool = False,
    checks_late: bool = True,
) -> dict[str, object]:
    """What the second training step of one rank of `layout` does on the fake device; with
    `checks_streams` also the races from then on, with `checks_late` the waits of late reports.
    """
    run = load(layout.flags(num_layers), FAMILIES)
    recorder = Recorder()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    mesh = run.device_mesh
    streams = Streams()
    transport = RecordingTransport(
        mesh, layout.rank, steps=build_training.step_groups(run), device=DEVICE, streams=streams
    )
    comm = Comm(mesh, layout.rank, transport)
    with fake_mode:
        step = build_training.build_step(run, comm)
        batches = batches_of(run, comm)
    ordered = OrderedOperations(streams) if checks_streams else nullcontext()
    is_hopper = patch.object(linear_products, "_capability", lambda device: (9, 0))
    with fake_mode, recorder, cuda_streams(streams), even_expert_loads(recorder), is_hopper:
        step(batches, lr=1e-3)
        comm.checked = False
        streams.is_checking = checks_streams
        with ordered:
            recorder.is_recording = True
            step(batches, lr=1e-3)
            recorder.is_recording = False
            late_syncs = _late_syncs(step, recorder, batches) if checks_late else None
    return {
        "layout": str(layout),
        "syncs": dict(recorder.syncs),
        "copies": dict(recorder.copies),
        "mixed": dict(recorder.mixed),
        "launches": recorder.launches.total(),
        "most_bytes": recorder.most_bytes,
        "not_on_device": _not_on_device(step),
        "not_planned": transport.not_planned(),
        "calls_on_cpu": sorted(transport.on_cpu),
        "late_syncs": late_syncs,
        "races": dict(streams.races),
        "overlap": streams.overlap(),
        "gathers_behind_reductions": streams.num_gathers_behind,
        "communicators": len(transport.planned),
    }


def _late_syncs(step: TrainStep, recorder: Recorder, batches) -> dict[str, int] | None:
    """Waits of two steps whose reports are late, but for the reading, while the state before them is
    copied to the host; None where they cannot be.
    """
    if not reports_late(step):
        return None
    before = recorder.syncs.copy()
    copies = recorder.copies.copy()
    launches = recorder.launches.copy()
    late = LateReports(step)
    copied = snapshot(write_items(step.state()))
    step.grads.before_next_change(copied.under_way.before_change)
    recorder.is_recording = True
    for number in (1, 2):
        late.launch(number, batches, lr=1e-3, status=lambda: 0, on_phase=None)
    recorder.is_recording = False
    waits = recorder.syncs - before
    recorder.syncs, recorder.copies, recorder.launches = before, copies, launches
    return dict(waits)


def batches_of(run: Run, comm: Comm):
    """The micro-batches of a step of a rank, all alike."""
    shape = (run.batch.micro_size, run.data.seq_len + 1)
    tokens = torch.zeros(shape, dtype=torch.int64)
    batch = token_batch(tokens[:, :-1], tokens[:, 1:])
    if packs_documents(run.data):
        batch = replace(batch, documents=torch.zeros_like(batch.inputs))
    own = batch.columns(index=comm.index("cp"), degree=comm.degree("cp"))
    on_device = own.map(lambda x: x.to(DEVICE))
    return [on_device] * plan_of(run).microbatches


def _not_on_device(step: TrainStep) -> list[str]:
    """Names of parameters, buffers, gradients and optimizer states that are elsewhere."""
    found: dict[str, Tensor] = dict(step.model.params)
    for name, block in step.model.blocks.items():
        for path, buffer in block.named_buffers():
            found[f"{name}.{path}"] = buffer
    for name, param in step.grads.sharded_params.items():
        found[f"sharded {name}"] = param
        if param.grad is not None:
            found[f"gradient of {name}"] = param.grad
    for name, states in step.state().optimizer_state.items():
        for key, state in states.items():
            if state.dim() > 0:
                found[f"{key} of {name}"] = state
    return [name for name, tensor in found.items() if tensor.device != DEVICE]
