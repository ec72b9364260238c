"""A model of transformers as a chain of blocks: each calls the model's own forward, in which only its own part computes.

embed      the forward up to the first layer, whose input is the block's output
layer3     the forward with layer 3 alone: it gets the block's input, and all that the trunk hands it beside
           (rotary tables, masks, types of layers); what the trunk did to its own hidden state is discarded
head       the forward from the last layer on: it returns the block's input

So embedding, scaling, position tables, final norm and logits are computed by transformers' code.
A forward ends where its block does: the part raises `BlockDone`, which the block catches.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.head_output import LOGITS, HeadOutput
from weft.models.common.layers import RegionInput
from weft.models.transformers.capture import (
    EMBEDS,
    HIDDEN,
    POSITIONS,
    SCORE,
    Captured,
    forward_options,
    is_list,
)
from weft.models.transformers.carried import CarriedTensors, by_place, with_arguments
from weft.models.transformers.draws import DrawsByCounter
from weft.models.transformers.experts import set_dispatch
from weft.models.transformers.interfaces import (
    BlockCall,
    BlockDone,
    calling,
    current_call,
    end_at_input,
)
from weft.models.transformers.routed_values import routed_values
from weft.models.transformers.shard_sizes import ShardSizes
from weft.models.transformers.sizes import is_drop_out
from weft.models.transformers.wide_constants import WideConstants

MODULE = frozenset(nn.Module.__mro__)


class LayerPlace(nn.Module):
    """In place of a layer, with its plain attributes, such as the type of its attention.

    Args:
        num_outputs: of the layer, which returns a tuple of so many; 0: it returns a tensor.
    """

    def __init__(self, layer: nn.Module, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        of_class = (vars(kind) for kind in reversed(type(layer).__mro__) if kind not in MODULE)
        values = {name: value for each in (*of_class, vars(layer)) for name, value in each.items()}
        for name, value in values.items():
            if isinstance(value, str | int | float) and not hasattr(self, name):
                setattr(self, name, value)

    def result(self, x: Any) -> Any:
        """What the layer would return with this hidden state."""
        if not self.num_outputs:
            return x
        return (x, *[None] * (self.num_outputs - 1))


class Skipped(LayerPlace):
    """A layer that another block computes."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.result(hidden_state(args, options))


class First(LayerPlace):
    """A layer, for the block before all: the first one's input is that block's output, as is what each
    is handed beside.
    """

    def __init__(
        self, layer: nn.Module, num_outputs: int, carried: CarriedTensors, index: int
    ) -> None:
        super().__init__(layer, num_outputs)
        self.arguments = carried.arguments[index] if carried.arguments else {}
        self.is_last = index + 1 >= len(carried.arguments)

    def forward(self, *args: Any, **options: Any) -> Any:
        x = hidden_state(args, options)
        tensors = current_call().tensors
        given = by_place(args, options)
        tensors.update({number: given[place] for place, number in self.arguments.items()})
        if self.is_last:
            raise BlockDone(x)
        return self.result(x)


class Last(LayerPlace):
    """The last layer, for the block behind it: it returns that block's input."""

    def forward(self, *_args: Any, **_options: Any) -> Any:
        return self.result(current_call().x)


class Own(LayerPlace):
    """The layer of a block: it reads the block's input in place of the trunk's hidden state."""

    def __init__(
        self, layer: nn.Module, num_outputs: int, carried: CarriedTensors, index: int
    ) -> None:
        super().__init__(layer, num_outputs)
        self.layer = layer
        self.carried = carried
        self.index = index
        self.arguments = carried.arguments[index] if carried.arguments else {}

    def forward(self, *args: Any, **options: Any) -> Any:
        call = current_call()
        given = {place: call.tensors[number] for place, number in self.arguments.items()}
        args, options = with_arguments(given, args, options)
        args, options = with_hidden_state(call.x, args, options)
        places = by_place(args, options)
        self.carried.give_shared(self.index, call.tensors, places)
        out = self.layer(*args, **options)
        self.carried.take_shared(self.index, call.tensors, places)
        raise BlockDone(out if isinstance(out, Tensor) else out[0])


def hidden_state(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The hidden state that a layer is called with."""
    return args[0] if args else options[HIDDEN]


def with_hidden_state(
    x: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with another hidden state."""
    if args:
        return (x, *args[1:]), options
    return args, {**options, HIDDEN: x}


class Stub(nn.Module):
    """In place of a module whose parameters another block holds; its result is discarded.

    Args:
        shape: of its result behind batch and sequence; None: that of embeddings.
    """

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.weight = torch.zeros((), device="cpu")
        self.shape = shape

    def forward(self, *_args: Any, **_options: Any) -> Tensor:
        embeds: Tensor = current_call().embeds
        if self.shape is None:
            return embeds
        return embeds.new_zeros((*embeds.shape[:2], *self.shape))


class WholeBlock(nn.Module):
    """The first or the last block: the model without its layers, and without the other end.

    Args:
        index: number of the layer before it; -1 for the first block.
    """

    may_gather_sequence = True

    def __init__(self, lm: nn.Module, captured: Captured, index: int) -> None:
        super().__init__()
        self.lm = lm
        self.index = index
        self.carried = captured.carried
        self.reads_ids = captured.reads_ids
        self.draws = captured.draws
        self.reads_values = captured.reads_values
        self.takes = captured.takes
        self.has_mask = captured.has_mask
        self.width = captured.width
        self.drops_out = captured.draws or drops_out(lm)
        self.needs_whole_texts = POSITIONS not in captured.takes
        self.whole_trunk = False

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return run(self.lm, x, batch, self)


class LogitsBlock(WholeBlock):
    """The last block of a model that returns what a linear yields: its forward ends at the input of
    that linear.

    Attributes:
        head_output: what the linear hands to the loss.
    """

    def __init__(self, lm: nn.Module, captured: Captured, index: int) -> None:
        super().__init__(lm, captured, index)
        self.logits = captured.logits
        self.head_output: HeadOutput = LOGITS

    @property
    def proj(self) -> nn.Module:
        """The linear, or what stands in its place."""
        return self.lm.get_submodule(self.logits)

    @property
    def trained_whole(self) -> nn.Module | None:
        """What adapters leave trained."""
        return self.proj if self.logits == SCORE else None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        proj = self.proj
        # before other hooks: those of the linear itself are for its call by `head_output`
        end = proj.register_forward_pre_hook(end_at_input, prepend=True)
        try:
            x = super().forward(x, batch)
        finally:
            end.remove()
        return self.head_output(proj, x, batch)


class LayerBlock(nn.Module):
    """One layer. The model around it has no parameters of its own and belongs to no block.

    Attributes:
        may_gather_sequence: whether it may work on whole sequences where sequence parallelism does
            not fit its code.
        needs_whole_texts: whether it reads other tokens by code of its own (short convolutions,
            recurrent states), or counts positions by itself.
        whole_trunk: whether what the trunk hands the layer is that of the batch, not of the input:
            under cp, where a part of the layer alone works on whole sequences.
    """

    may_gather_sequence = True
    whole_trunk = False

    def __init__(self, layer: nn.Module, lm: nn.Module, captured: Captured, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.carried = captured.carried
        self.reads_ids = captured.reads_ids
        self.draws = captured.draws
        self.reads_values = captured.reads_values
        self.around = nn.ModuleList(_with_buffers(lm, captured.layers))
        self._lm = (lm,)  # in a tuple: a child would name the layer twice
        self.takes = captured.takes
        self.has_mask = captured.has_mask
        self.width = captured.width
        self.drops_out = captured.draws or drops_out(lm)
        kinds = {type(module) for module in layer.modules()}
        mixes = Attend not in kinds or nn.Conv1d in kinds
        self.needs_whole_texts = mixes or POSITIONS not in captured.takes
        self.whole_trunk = bool(captured.own_attentions)  # their regions gather the sequence

    @property
    def gatherable_parts(self) -> tuple[str, ...]:
        """Modules of the layer, one of which may be all that mixes tokens."""
        children = self.layer.named_children()
        return tuple(f"layer.{name}" for name, child in children if _has_parameters(child))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return run(self._lm[0], x, batch, self)


def drops_out(lm: nn.Module) -> bool:
    """Whether the config of a model names a probability of dropout that is not 0."""
    config: Any = lm.config
    return any(is_drop_out(name, value) for name, value in config.to_dict().items())


def run(lm: nn.Module, x: Tensor, batch: Batch, block: WholeBlock | LayerBlock) -> Tensor:
    """The part of a model's forward that belongs to a block."""
    is_first = not x.is_floating_point()
    x, tensors = (x, {}) if is_first else block.carried.unpack(x, block.index)
    tokens = batch.inputs if block.whole_trunk or block.reads_ids else x
    options = forward_options(tokens, batch, block.takes, has_mask=block.has_mask)
    # zeros, not x: some trunks scale their embeddings in place, or make several streams of them
    embeds = torch.zeros((*tokens.shape[:2], block.width), dtype=_dtype(x), device=x.device)
    if is_first:
        options["input_ids"] = x
    elif block.reads_ids:
        options["input_ids"] = batch.inputs
    else:
        options[EMBEDS] = embeds
    try:
        draws = DrawsByCounter() if block.draws else nullcontext()
        values = routed_values() if block.reads_values and x.is_meta else nullcontext()
        types = WideConstants() if x.dtype == torch.float64 else nullcontext()
        with calling(BlockCall(x, batch, embeds, tensors=tensors)), draws, values, types:
            out = lm(**options)
    except BlockDone as done:
        return block.carried.pack(done.x, tensors, block.index + 1)
    logits: Tensor = out.logits
    return logits


def _dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


REGION = "weft_region"
"""Child of an attention module at whose input a tensor-parallel region may begin."""


def enter_region(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A forward pre-hook of attention: its code takes lengths from its input, so the region begins
    there, where under sequence parallelism the sequence is whole.
    """
    if not args and HIDDEN not in options:
        return None
    region: nn.Module = getattr(module, REGION)
    return with_hidden_state(region(hidden_state(args, options)), args, options)


def blocks_of_model(
    lm: nn.Module,
    captured: Captured,
    *,
    has_region: Callable[[str], bool] = lambda _: False,
    has_parts: Callable[[str], bool] = lambda _: False,
) -> dict[str, nn.Module]:
    """The chain embed, layer0, ..., head of a model of transformers.

    Args:
        has_region: path of an attention module -> whether a tensor-parallel region may begin there.
        has_parts: ... -> whether a fused weight in it may be sharded by its parts.
    """
    own = {one.path: one for one in captured.own_attentions}
    for path in (*captured.set_attends(lm), *own):
        module = lm.get_submodule(path)
        if has_region(path):
            if path in own:
                own[path].shard(module, lm.config)
            elif has_parts(path):
                ShardSizes(module, lm.config)
            setattr(module, REGION, RegionInput())
            module.register_forward_pre_hook(enter_region, with_kwargs=True)
    set_dispatch(lm)
    captured.forget_states(lm)
    stack: Any = lm.get_submodule(captured.layers)
    layers = list(stack)

    def skipped(index: int) -> LayerPlace:
        return Skipped(layers[index], captured.num_outputs)

    def model_with(places: Mapping[int, LayerPlace], holds: frozenset[str]) -> nn.Module:
        stack = nn.ModuleList(places.get(other) or skipped(other) for other in range(len(layers)))
        return _copied(lm, captured, stack, holds)

    count = captured.num_outputs
    carried = captured.carried
    firsts = {
        index: First(layer, count, carried, index)
        for index, layer in enumerate(layers[: max(1, len(carried.arguments))])
    }
    chain: dict[str, nn.Module] = {
        "embed": WholeBlock(model_with(firsts, captured.before), captured, -1)
    }
    for index, layer in enumerate(layers):
        around = model_with({index: Own(layer, count, carried, index)}, frozenset())
        chain[f"layer{index}"] = LayerBlock(layer, around, captured, index)
    last = len(layers) - 1
    head = LogitsBlock if captured.logits else WholeBlock
    at_end = model_with({last: Last(layers[last], count)}, captured.after)
    chain["head"] = head(at_end, captured, last + 1)
    return chain


STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _copied(
    module: nn.Module,
    captured: Captured,
    places: nn.ModuleList,
    holds: frozenset[str],
    path: str = "",
) -> nn.Module:
    """A copy of the model that shares what it keeps: other layers, and stubs for what it does not hold."""
    new = copy.copy(module)
    new._modules = {}
    for name in STATE_HOOKS:  # methods of the whole model, whose copy would hold every layer
        setattr(new, name, OrderedDict())
    for name, child in module._modules.items():
        below = f"{path}.{name}" if path else name
        if below == captured.layers:
            new._modules[name] = places
        elif f"{captured.layers}.".startswith(f"{below}.") or is_list(child):
            new._modules[name] = child and _copied(child, captured, places, holds, below)
        elif child is None or below in holds or not _has_parameters(child):
            new._modules[name] = child
        elif below in captured.tables:
            new._modules[name] = _with_constants(child)
        else:
            new._modules[name] = Stub(captured.widths.get(below))
    return new


def _with_constants(table: nn.Module) -> nn.Module:
    """A copy whose parameters, which another block holds, are buffers: constants of its code."""
    new = copy.copy(table)
    new._parameters = {}
    constants = {name: param.detach() for name, param in table.named_parameters(recurse=False)}
    new._buffers = {**table._buffers, **constants}
    return new


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _with_buffers(lm: nn.Module, layers: str) -> list[nn.Module]:
    """Modules around the layers that compute with buffers alone, such as rotary tables."""
    parts = layers.split(".")[:-1]
    trunks = [lm.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return [
        child
        for trunk in trunks
        for child in trunk.children()
        if not isinstance(child, Stub | nn.ModuleList)
        and not _has_parameters(child)
        and any(True for _ in child.buffers())
    ]
