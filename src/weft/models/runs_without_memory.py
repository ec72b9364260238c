"""Runs of a user's chain without memory: on the meta device, or on fake tensors where a forward reads values there.

Note [Fake tensors]
    Code such as transformers' asks whether all positions are in order, but not of fake tensors,
    which mean that a program is traced. These need torch's compiler, two seconds of computing; so
    they are used only where the meta device fails because a value is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch
from weft.models.user_chain import replace_tensors

T = TypeVar("T")
READS_VALUES = (
    *("on meta tensors", "_local_scalar_dense", "Cannot copy out of meta tensor"),
    *("register_meta function for torch.nonzero", "a tensor with unallocated storage"),
)
"""Parts of what torch says where a value of the meta device is read."""
VALUE_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException")
"""Classes of errors where a value of a fake tensor is read."""


def run_without_memory(
    run: Callable[[Mapping[str, nn.Module], Batch], T],
    blocks: Mapping[str, nn.Module],
    batch: Batch,
) -> T:
    """What `run` returns for blocks and a batch on the meta device; see Note [Fake tensors].

    Args:
        blocks: on the meta device; changed where fake tensors are used.
    """
    try:
        return run(blocks, batch)
    except Exception as error:
        if not reads_values(error):
            raise
        first_error = error
    from torch._subclasses.fake_tensor import FakeTensorMode  # late: it imports the compiler

    try:
        with _silent_log(), FakeTensorMode(allow_non_fake_inputs=True):
            replace_tensors(blocks, _fake)
            return run(blocks, batch.map(_fake))
    except Exception as error:
        if reads_values(error):
            raise first_error from None
        raise


@contextmanager
def _silent_log() -> Iterator[None]:
    """Without the hundred lines that torch logs of an error that it raises as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _fake(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the CPU; without memory in the mode of fake tensors."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def reads_values(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, comes from reading a value."""
    while error is not None:
        message = f"{type(error).__name__}: {error}"
        if any(text in message for text in (*VALUE_ERRORS, *READS_VALUES)):
            return True
        error = error.__cause__
    return False
