"""A model of transformers as weft shards and stores it: linears of transposed weights, stored buffers as parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import MethodType

import torch
from torch import nn

WITHIN_CONTEXT = ("dynamic", "longrope")
"""Kinds of rope whose tables are the same for all batches within the original context."""


def transposed_linears(lm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears of a model whose weight has the shape [in, out], by path."""
    from transformers.pytorch_utils import Conv1D

    for path, module in lm.named_modules():
        if type(module) is Conv1D:
            yield path, module


def buffers_in_folders(lm: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, name, path) of the numbers that folders hold beside parameters, such as the correction
    biases of routers, and tables of the experts of each token.
    """
    stored = lm.state_dict().keys()
    for path, module in lm.named_modules():
        for name, buffer in list(module._buffers.items()):
            full = f"{path}.{name}".lstrip(".")
            if full in stored and buffer is not None and buffer.dtype != torch.bool:
                yield module, name, full


def adapt(lm: nn.Module) -> nn.Module:
    """The model with an `nn.Linear` for each linear of a transposed weight, and with parameters that
    are not trained for the buffers of folders: so these are sharded, read, kept and written like all
    others. Rotary tables that change with the length of a batch stay those of the original context,
    in which such models are trained. Changed in place.
    """
    for path, old in list(transposed_linears(lm)):
        parent, _, name = path.rpartition(".")
        setattr(lm.get_submodule(parent), name, _linear(old))
    for module, name, _ in list(buffers_in_folders(lm)):
        buffer = module._buffers.pop(name)
        assert buffer is not None, "None is in no folder"
        module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    for module in lm.modules():
        if getattr(module, "rope_type", None) in WITHIN_CONTEXT:
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
    return lm


def _linear(old: nn.Module) -> nn.Linear:
    weight, bias = old.get_parameter("weight"), old.get_parameter("bias")
    num_inputs, num_outputs = weight.shape
    new = nn.Linear(num_inputs, num_outputs, device="meta", dtype=weight.dtype)
    new.weight = nn.Parameter(weight.detach().T.contiguous())
    new.bias = nn.Parameter(bias.detach())
    return new
