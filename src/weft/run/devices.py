"""The device of each rank: GPUs of this machine, their assignment to ranks, and the check that no two ranks share one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from weft.core.gpu_files import may_have_gpu
from weft.errors import Fault, LaunchError, first_line
from weft.models.common.backward_apart import has_autograd_threads
from weft.run.fork_probe import survives_fork
from weft.run.world import ThreadRendezvous, World

BAD_FORK = "initialization error"
"""Part of what CUDA says in a fork of a process that has started its driver."""

DeviceChoice = Literal["auto", "cpu", "cuda"]
Starter = Literal["fork", "launcher", "threads"]
"""Who starts the ranks: weft, as forks of one process; torchrun or Slurm; weft, as threads."""

ASK_TIMEOUT_S = 60.0
NVIDIA_FOLDER = Path("/proc/driver/nvidia/gpus")
"""One folder for each NVIDIA GPU of the machine."""


@dataclass(frozen=True)
class GpuInventory:
    """The GPUs that one process sees.

    Attributes:
        num_visible: those that the process may use.
        num_present: those of the machine, as far as they are known.
        has_cuda: whether torch is built with CUDA.
    """

    num_visible: int = 0
    num_present: int = 0
    has_cuda: bool = True

    @property
    def num_hidden(self) -> int:
        """GPUs of the machine that the process does not see."""
        return max(self.num_present - self.num_visible, 0)


@dataclass(frozen=True)
class Assignment:
    """The device of a rank.

    Attributes:
        device: "cpu", or "cuda:N".
        note: which GPUs stay idle, and why; "" on machines without a GPU.
    """

    device: str
    note: str = ""


# Note [Assignment of GPUs]
# Local rank i uses GPU i where each local rank has one. Ranks that torchrun or Slurm started may see fewer: with
# --gpus-per-task=1, --gpu-bind, or CUDA_VISIBLE_DEVICES of each task, every task sees GPUs of its own, as cuda:0. Whether
# they are its own shows only in their UUIDs, which the ranks compare. Rank threads of one process may share a GPU: they
# exchange tensors in its memory, without NCCL. In all other cases fewer GPUs than ranks are an error, never the CPU.


def assign_device(
    choice: DeviceChoice, gpus: GpuInventory, *, local_rank: int, local_size: int, starter: Starter
) -> Assignment:
    """The device of one rank: see Note [Assignment of GPUs].

    Raises:
        LaunchError: GPUs are wanted, and there are none or too few.
    """
    num_gpus = gpus.num_visible
    if choice == "cpu":
        note = f"device cpu as asked: {_gpus(num_gpus)} idle" if num_gpus else ""
        return Assignment("cpu", note)
    if num_gpus == 0:
        if choice == "auto":
            return Assignment("cpu", _reason_for_cpu(gpus))
        raise LaunchError(_missing_gpus(gpus, local_size))
    if num_gpus >= local_size:
        note = _note_of_used(gpus, local_size)
        return Assignment(f"cuda:{local_rank}", note)
    if starter == "launcher":
        note = f"device cuda:0 of the {_gpus(num_gpus)} that the launcher gave to this rank"
        return Assignment("cuda:0", note)
    if starter == "threads":
        note = f"{local_size} rank threads share {_gpus(num_gpus)}: for tests of a layout, not for speed"
        return Assignment(f"cuda:{local_rank % num_gpus}", note)
    raise LaunchError(_missing_gpus(gpus, local_size))


def _note_of_used(gpus: GpuInventory, local_size: int) -> str:
    note = "device cuda:0"
    if local_size > 1:
        note = f"{note} to cuda:{local_size - 1}"
    num_idle = gpus.num_visible - local_size
    if num_idle:
        note = f"{note}; {_gpus(num_idle)} idle"
    return note


def _reason_for_cpu(gpus: GpuInventory) -> str:
    if gpus.num_present == 0:
        return ""
    present = f"device cpu: {_gpus(gpus.num_present)} of this machine idle"
    if not gpus.has_cuda:
        return f"{present}, because this torch is built without CUDA"
    return f"{present}, because CUDA_VISIBLE_DEVICES or the launcher hides them"


def _missing_gpus(gpus: GpuInventory, local_size: int) -> Fault:
    ranks = f"{local_size} local rank{'s' if local_size > 1 else ''}"
    fix = "use fewer ranks, --transport threads to share a GPU, or --device cpu"
    if not gpus.has_cuda:
        fix = "install a torch with CUDA, or use --device cpu"
    elif gpus.num_visible == 0:
        fix = "check CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu"
    return Fault(
        "device",
        "not enough GPUs",
        got=f"{_gpus(gpus.num_visible)} for {ranks}",
        need="one for each rank",
        fix=fix,
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def find_gpus() -> GpuInventory:
    """The GPUs that this process sees, without starting CUDA in it: a fork of it would not survive
    that.

    NVML is asked, and where it does not answer, another process.
    """
    num_present = 0
    if NVIDIA_FOLDER.is_dir():
        num_present = len(list(NVIDIA_FOLDER.iterdir()))
    has_cuda = torch.cuda._is_compiled()
    if not has_cuda:
        return GpuInventory(0, num_present, has_cuda=False)
    if torch.cuda.is_initialized():
        num_visible = torch.cuda.device_count()
    else:
        # asks the driver's library and starts no CUDA, which a fork would not survive
        num_visible = torch.cuda._device_count_nvml()
    if num_visible < 0:
        num_visible = _ask_other_process()
    return GpuInventory(num_visible, max(num_present, num_visible))


def _ask_other_process() -> int:
    """The number of GPUs that torch sees in a process of its own; 0 without a device file."""
    if not may_have_gpu():
        return 0
    script = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    answer = done.stdout.strip()
    return int(answer) if answer.isdecimal() else 0


def gpu_names() -> tuple[str, ...]:
    """The names of the GPUs of this machine, each once, without starting CUDA; none where neither
    the driver's files nor nvidia-smi say them.
    """
    found: set[str] = set()
    for path in NVIDIA_FOLDER.glob("*/information"):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                found.add(value.strip())
    return tuple(sorted(found or _names_of_nvidia_smi()))


def _names_of_nvidia_smi() -> set[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return set()
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def starter_of(world: World) -> Starter:
    """Who started the ranks of a world."""
    if isinstance(world.rendezvous, ThreadRendezvous):
        return "threads"
    return "fork" if world.nonce else "launcher"


def choose_device(choice: DeviceChoice, world: World) -> torch.device:
    """The device of this rank of `world`. The first rank of torchrun or Slurm prints what was
    chosen; for ranks that weft starts, the process that starts them does.

    Raises:
        LaunchError: as `assign_device`.
    """
    starter = starter_of(world)
    assignment = assign_device(
        choice,
        find_gpus(),
        local_rank=world.local_rank,
        local_size=world.local_size,
        starter=starter,
    )
    if starter == "launcher" and world.rank == 0:
        announce(assignment.note)
    return torch.device(assignment.device)


def devices_of_local_ranks(
    choice: DeviceChoice, num_ranks: int, starter: Starter
) -> list[torch.device]:
    """The devices of ranks to be started on this machine; prints what was chosen.

    Raises:
        LaunchError: as `assign_device`.
    """
    gpus = find_gpus()
    devices = []
    for rank in range(num_ranks):
        assignment = assign_device(
            choice, gpus, local_rank=rank, local_size=num_ranks, starter=starter
        )
        devices.append(torch.device(assignment.device))
    announce(assignment.note)
    return devices


def announce(note: str) -> None:
    """Print the note of an assignment on stderr."""
    if note:
        sys.stderr.write(f"note: {note}\n")


class Claims(Protocol):
    """Names that ranks claim, see `ProcessTransport.claim`."""

    @property
    def rank(self) -> int: ...
    def claim(self, name: str) -> int: ...


def check_exclusive(claims: Claims, uuid: str) -> None:
    """Claim a GPU for this rank, by its UUID.

    Raises:
        LaunchError: another rank has claimed it.
    """
    first = claims.claim(f"gpu {uuid}")
    # a rank that claims twice, after a restart of its communicator, has the GPU already
    if first == claims.rank:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    fault = Fault(
        "device",
        f"ranks {first} and {claims.rank} would share one GPU",
        got=f"{uuid} on both; CUDA_VISIBLE_DEVICES here: {visible}",
        need="one GPU for each rank",
        fix="start one task for each GPU, bind GPUs to tasks (srun --gpus-per-task=1), or use "
        "--device cpu",
    )
    raise LaunchError(fault)


def gpu_uuid(device: torch.device) -> str:
    """UUID of a GPU; CUDA is started in this process.

    Raises:
        LaunchError: CUDA does not start, since the process is a fork of one that had asked its driver.
    """
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except RuntimeError as error:
        if BAD_FORK not in str(error):
            raise
        what = (
            "CUDA does not start: the process that forked the ranks had asked its driver for GPUs"
        )
        fix = (
            "set PYTORCH_NVML_BASED_CUDA_CHECK=1, by which torch.cuda.is_available() does not, or start "
            "the script with torchrun"
        )
        raise LaunchError(Fault("ranks", what, got=first_line(error), fix=fix)) from error


def fork_problem() -> str:
    """Why a fork of this process could not compute; "" if it can.

    The CUDA runtime does not survive a fork, nor do the device threads that autograd starts at the
    first backward on a machine with a GPU, also one of CPU tensors, nor those of OpenMP.
    """
    if torch.cuda.is_initialized():
        return "this process uses CUDA already, and CUDA does not survive a fork"
    is_in_bad_fork = getattr(torch._C, "_cuda_isInBadFork", None)
    if is_in_bad_fork is not None and is_in_bad_fork():
        return "this process is a fork of one that used CUDA"
    if has_autograd_threads():
        return "autograd's device threads run since the first backward, and do not survive a fork"
    if not survives_fork():
        return "this process has computed with several threads, and they do not survive a fork"
    return ""
