"""The structure of a model of transformers, from one run without memory: layers, their attention, modules around them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, token_example
from weft.models.runs_without_memory import run_without_memory
from weft.models.transformers.interfaces import BlockCall, Recording, attend_name, calling

KEY = "model.name"
OTHER = "another architecture (docs/architectures.md)"
ROWS, LENGTH = 2, 8
POSITIONS = "position_ids"
"""Argument of a forward; a model without it counts positions from the first column."""
OWN_POSITIONS = "create_position_ids_from_input_ids"
"""Method of embeddings that count positions by the ids of tokens."""


@dataclass(frozen=True)
class CapturedAttention:
    """A call of attention: path of the module, its number there, and what it asks `Attend` for."""

    path: str
    number: int
    attend: Attend

    def made(self, module: nn.Module) -> Attend:
        """An `Attend` of a model whose attention module this is."""
        spec = self.attend
        sinks = None
        if spec.sinks is not None:
            (sinks,) = (one for one in module.parameters(recurse=False) if one.dim() == 1)
        return Attend(
            mask=spec.mask,
            scale=spec.scale,
            softcap=spec.softcap,
            sinks=sinks,
            dropout=spec.dropout,
        )


@dataclass(frozen=True)
class Captured:
    """The structure of a model.

    Attributes:
        layers: path of the list of layers.
        num_outputs: length of the tuples that layers return; 0: they return tensors.
        before: paths of modules that compute before the first layer.
        after: paths of modules that compute behind the last one.
        takes: names of arguments of the model's forward.
        has_mask: whether the forward gets a mask of ones; else it gets none.
        width: of embeddings.
        attentions: of the layers.
        implementation: of attention, as transformers names it.
        logits: path of the linear whose result the forward returns as logits; empty: it changes
            them (a soft-cap, a scale).
    """

    layers: str
    num_outputs: int
    before: frozenset[str]
    after: frozenset[str]
    takes: frozenset[str]
    has_mask: bool
    width: int
    attentions: tuple[CapturedAttention, ...]
    implementation: str
    logits: str = ""

    def set_attends(self, lm: nn.Module) -> frozenset[str]:
        """Give each attention module of another model of the same config what it calls; their paths."""
        for one in self.attentions:
            module = lm.get_submodule(one.path)
            setattr(module, attend_name(one.number), one.made(module))
        return frozenset(one.path for one in self.attentions)


def capture(lm: nn.Module, num_layers: int, *, implementation: str, has_mask: bool) -> Captured:
    """Run a model on the meta device, and note its structure.

    Raises:
        PlanError: it has no list of decoder layers, does not call them one after the other, or its
            forward fails.
    """
    layers = find_layers(lm, num_layers)
    takes = frozenset(inspect.signature(lm.forward).parameters)
    if any(hasattr(module, OWN_POSITIONS) for module in lm.modules()):
        takes -= {POSITIONS}  # theirs begin behind padding_idx
    watched = _Watched(lm, layers)
    recording = Recording()

    def run(_blocks: Mapping[str, nn.Module], batch: Batch) -> None:
        watched.restart()
        recording.attends.clear()
        options = forward_options(batch.inputs, batch, takes, has_mask=has_mask)
        with calling(BlockCall(recording=recording)):
            watched.logits = lm(input_ids=batch.inputs, **options).logits

    try:
        run_without_memory(run, {"lm": lm}, token_example(ROWS, LENGTH))
    except PlanError:
        raise
    except Exception as error:
        what = f"its forward fails without values: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix=OTHER)) from error
    if watched.order != list(range(num_layers)):
        what = "its layers do not run one after the other, once each"
        raise PlanError(Fault(KEY, what, got=str(watched.order), fix=OTHER))
    paths = {module: path for path, module in lm.named_modules()}
    return Captured(
        layers=layers,
        num_outputs=watched.num_outputs,
        before=frozenset(watched.before),
        after=frozenset(watched.after - watched.before),
        takes=takes,
        has_mask=has_mask,
        width=int(lm.get_input_embeddings().weight.shape[1]),  # type: ignore[operator]
        attentions=tuple(
            CapturedAttention(paths[one], number, attend)
            for one, attends in recording.attends.items()
            for number, attend in enumerate(attends)
        ),
        implementation=implementation,
        logits=watched.path_of_logits(),
    )


def forward_options(
    x: Tensor, batch: Batch, takes: frozenset[str], *, has_mask: bool
) -> dict[str, Any]:
    """Keywords of a forward besides its inputs.

    Ones, not None, where a forward takes them: without a mask transformers asks the values of
    positions whether documents are packed.
    """
    options: dict[str, Any] = {}
    if POSITIONS in takes:
        options[POSITIONS] = batch.positions
    if has_mask:
        options["attention_mask"] = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if "use_cache" in takes:
        options["use_cache"] = False
    return options


def find_layers(lm: nn.Module, num_layers: int) -> str:
    """The path of the list of decoder layers: the outermost list of so many modules of parameters.

    Raises:
        PlanError: there is none.
    """
    path: str
    for path, module in lm.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == num_layers
        if is_list and all(True for child in module for _ in child.parameters()):
            return path
    what = f"{type(lm).__name__} has no list of {num_layers} decoder layers"
    raise PlanError(Fault(KEY, what, fix=OTHER))


class _Watched:
    """Hooks on a model that note which modules with parameters compute before and behind its layers."""

    def __init__(self, lm: nn.Module, layers: str) -> None:
        self.restart()
        self._linears: dict[str, Tensor] = {}
        stack: Any = lm.get_submodule(layers)
        for index, layer in enumerate(stack):
            layer.register_forward_hook(self._left(index))
        for path, module in _around(lm, layers):
            module.register_forward_pre_hook(self._noted(path))
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._kept(path))

    def restart(self) -> None:
        """Forget a run."""
        self.order: list[int] = []
        self.num_outputs = 0
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.logits: Tensor | None = None

    def path_of_logits(self) -> str:
        """Of the linear whose result is the logits; empty where none is."""
        return next((path for path, y in self._linears.items() if y is self.logits), "")

    def _kept(self, path: str) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if args:
                self._linears[path] = out

        return keep

    def _left(self, index: int) -> Any:
        def note(_module: nn.Module, _args: object, out: Any) -> None:
            self.order.append(index)
            self.num_outputs = 0 if isinstance(out, Tensor) else len(out)

        return note

    def _noted(self, path: str) -> Any:
        def note(_module: nn.Module, _args: object) -> None:
            (self.after if self.order else self.before).add(path)

        return note


def _around(module: nn.Module, layers: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters that are not on the way to the layers."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below == layers:
            continue
        if f"{layers}.".startswith(f"{below}."):
            yield from _around(child, layers, below)
        else:
            yield below, child
