"""A model of transformers as weft shards and stores it: linears of transposed weights, stored buffers as parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WITHIN_CONTEXT = ("dynamic", "longrope")
"""Kinds of rope whose tables are the same for all batches within the original context."""


def transposed_linears(lm: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears of a model whose weight has the shape [in, out], by path."""
    from transformers.pytorch_utils import Conv1D

    for path, module in lm.named_modules():
        if type(module) is Conv1D:
            yield path, module


HF_MARK = "_is_hf_initialized"
"""Attribute that transformers sets on modules."""
LINEAR_STATE = {*vars(nn.Linear(1, 1, device="meta")), HF_MARK}


def is_linear_of_own_class(module: nn.Module) -> bool:
    """Whether a module of a class with a forward of its own computes what `nn.Linear` does: the class
    does, and the module has nothing more that its forward may read, such as a scale.
    """
    kind: Any = type(module)
    if not isinstance(module, nn.Linear) or kind.forward is nn.Linear.forward:
        return False
    has_more = vars(module).keys() - LINEAR_STATE or module._buffers or module._modules
    has_params = module._parameters.keys() == {"weight", "bias"}
    return has_params and not has_more and computes_linear(kind)


@functools.cache
def computes_linear(kind: type[nn.Linear]) -> bool:
    """Whether a class with a forward of its own computes what `nn.Linear` does, by the same attributes."""
    linear = kind.__new__(kind)
    nn.Module.__init__(linear)
    x, weight, bias = (torch.arange(1.0, size + 1, device="cpu").sin() for size in (12, 6, 2))
    x, weight = x.view(4, 3), weight.view(2, 3)
    for own_bias in (bias, None):
        # no parameters: where a model is built these may be on the meta device
        vars(linear).update(in_features=3, out_features=2, weight=weight, bias=own_bias)
        try:
            y = kind.forward(linear, x)
        except Exception:  # noqa: BLE001 - it reads attributes of its own
            return False
        if not torch.allclose(y, F.linear(x, weight, own_bias)):
            return False
    return True


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
    """The model with an `nn.Linear` for each linear of a transposed weight, or of a class of its own,
    and with parameters that are not trained for the buffers of folders: so these are sharded, read, kept
    and written like all others. Rotary tables that change with the length of a batch stay those of the
    original context, in which such models are trained. Changed in place.
    """
    for path, old in list(transposed_linears(lm)):
        parent, _, name = path.rpartition(".")
        setattr(lm.get_submodule(parent), name, _linear(old))
    for module, name, _ in list(buffers_in_folders(lm)):
        buffer = module._buffers.pop(name)
        assert buffer is not None, "None is in no folder"
        module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    for module in lm.modules():
        if is_linear_of_own_class(module):
            module.__class__ = nn.Linear
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
