"""The structure of a model of transformers, from one run without memory: layers, their attention, modules around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, token_example
from weft.models.runs_without_memory import reads_values, run_without_memory
from weft.models.transformers.carried import (
    COLUMNS,
    NOTHING,
    CarriedTensors,
    Place,
    SharedEntry,
    by_place,
)
from weft.models.transformers.draws import DrawsByCounter
from weft.models.transformers.interfaces import (
    EAGER,
    BlockCall,
    BlockDone,
    Recording,
    attend_name,
    calling,
    end_at_input,
)
from weft.models.transformers.own_attention import OwnAttention, own_attentions
from weft.models.transformers.routed_values import routed_values

KEY = "model.name"
OTHER = "another architecture (docs/architectures.md)"
ROWS, LENGTH = 2, 8
SCORE = "score"
"""The head of transformers' classes for sequence classification."""
HIDDEN = "hidden_states"
EMBEDS = "inputs_embeds"
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
        own_attentions: those that call no interface, where none does.
        implementation: of attention, as transformers names it.
        logits: path of the linear whose result the forward returns as logits; empty: it changes
            them (a soft-cap, a scale).
        carried: what layers are handed beside the hidden state.
        reads_ids: whether the trunk around layers gets the ids of tokens, which it hands to layers, or
            without which it does not run; else it gets embeddings.
        states: (path of a module, attribute) where a forward leaves a tensor for the next one, as for
            generation with a cache; a block forgets it.
        draws: whether a forward draws random numbers besides dropout, as routers do.
        reads_values: whether a forward asks which experts have tokens; see Note [Routed values].
        widths: path of a module before the layers -> shape of its result behind batch and sequence.
        tables: paths of modules before the layers whose results have no gradient, and are handed to
            layers: every block looks them up.
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
    own_attentions: tuple[OwnAttention, ...] = ()
    logits: str = ""
    carried: CarriedTensors = NOTHING
    reads_ids: bool = False
    states: tuple[tuple[str, str], ...] = ()
    draws: bool = False
    reads_values: bool = False
    widths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()

    def set_attends(self, lm: nn.Module) -> frozenset[str]:
        """Give each attention module of another model of the same config what it calls; their paths."""
        for one in self.attentions:
            module = lm.get_submodule(one.path)
            setattr(module, attend_name(one.number), one.made(module))
        return frozenset(one.path for one in self.attentions)

    def forget_states(self, lm: nn.Module) -> None:
        """Let the modules of another model of the same config forget what their forward leaves."""
        for path, name in self.states:
            module = lm.get_submodule(path)
            module.register_forward_hook(partial(_forget, name), always_call=True)


def capture(
    lm: nn.Module, num_layers: int, *, implementation: str, has_mask: bool, is_scored: bool = False
) -> Captured:
    """Run a model on the meta device, and note its structure.

    Args:
        is_scored: whether its head scores texts.

    Raises:
        PlanError: it has no list of decoder layers, does not call them one after the other, or its
            forward fails.
    """
    layers = find_layers(lm, num_layers)
    takes = frozenset(inspect.signature(lm.forward).parameters)
    if any(hasattr(module, OWN_POSITIONS) for module in lm.modules()):
        takes -= {POSITIONS}  # theirs begin behind padding_idx
    watched = _Watched(lm, layers)
    empty = {(path, name) for path, name, value in _attributes(lm) if value is None}
    recording = Recording()
    drawing = DrawsByCounter()

    def run(_blocks: Mapping[str, nn.Module], batch: Batch) -> None:
        watched.restart()
        recording.attends.clear()
        options = forward_options(batch.inputs, batch, takes, has_mask=has_mask)
        watched.ids = batch.inputs
        with calling(BlockCall(recording=recording)), drawing:
            if is_scored:
                watched.logits = token_scores(lm, input_ids=batch.inputs, **options)
            else:
                watched.logits = lm(input_ids=batch.inputs, **options).logits

    own: tuple[OwnAttention, ...] = ()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            if implementation == EAGER:
                own = own_attentions(lm, layers, partial(_run, lm, run))
            has_read_values = _run(lm, run)
    except PlanError:
        raise
    except Exception as error:
        what = f"its forward fails without values: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix=OTHER)) from error
    finally:
        watched.end()
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
        own_attentions=own,
        logits=watched.path_of_logits(),
        carried=watched.carried(),
        reads_ids=watched.reads_ids or EMBEDS not in takes or bool(watched.shapes),
        states=tuple(
            (path, name)
            for path, name, value in list(_attributes(lm))
            if isinstance(value, Tensor) and (path, name) in empty
        ),
        draws=drawing.is_used,
        reads_values=has_read_values,
        widths=watched.widths,
        tables=frozenset(watched.tables),
    )


def token_scores(lm: nn.Module, **options: Any) -> Tensor:
    """The scores of each token, of which transformers returns those of the last one of a text.

    Raises:
        PlanError: the model has no linear that scores tokens.
    """
    score = getattr(lm, SCORE, None)
    if not isinstance(score, nn.Linear):
        what = f"{type(lm).__name__} has no linear that scores tokens"
        raise PlanError(Fault("model.labels", what, need="0", fix=OTHER))
    end = score.register_forward_pre_hook(end_at_input, prepend=True)
    try:
        lm(**options)
    except BlockDone as done:
        x = done.x
    finally:
        end.remove()
    scores: Tensor = score(x)
    return scores


def _run(
    lm: nn.Module,
    run: Callable[[Mapping[str, nn.Module], Batch], None],
    rows: int = ROWS,
    length: int = LENGTH,
) -> bool:
    """Run a model without memory; whether it reads values that those of an even load stand for."""
    example = token_example(rows, length)
    for has_values in (False, True):
        try:
            with routed_values() if has_values else nullcontext():
                run({"lm": lm}, example)
        except Exception as error:
            if not reads_values(error):
                raise
        else:
            return has_values
    run_without_memory(run, {"lm": lm}, example)
    return False


def _attributes(lm: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The plain attributes of all modules: path, name and value."""
    for path, module in lm.named_modules():
        yield from ((path, name, value) for name, value in vars(module).items())


def _forget(name: str, module: nn.Module, _args: object, _out: object) -> None:
    """A forward hook that sets an attribute to None."""
    setattr(module, name, None)


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
        self._hooks: list[RemovableHandle] = []
        stack: Any = lm.get_submodule(layers)
        for index, layer in enumerate(stack):
            entered, left = self._entered(index), self._left(index)
            self._hooks.append(layer.register_forward_pre_hook(entered, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(left, with_kwargs=True))
        for path, module in _around(lm, layers):
            self._hooks.append(module.register_forward_pre_hook(self._noted(path)))
            self._hooks.append(module.register_forward_hook(self._measured(path)))
            if isinstance(module, nn.Linear):
                self._hooks.append(module.register_forward_hook(self._kept(path)))

    def end(self) -> None:
        """Remove the hooks, of which some detach results."""
        for hook in self._hooks:
            hook.remove()

    def restart(self) -> None:
        """Forget a run."""
        self.order: list[int] = []
        self.num_outputs = 0
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.logits: Tensor | None = None
        self.ids: Tensor | None = None
        self.reads_ids = False
        self.hidden: tuple[int, ...] = ()
        self.tensors: dict[int, Tensor] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.shared: list[SharedEntry] = []
        self.arguments: list[dict[Place, int]] = []
        self.widths: dict[str, tuple[int, ...]] = {}
        self.constants: dict[int, tuple[str, Tensor]] = {}
        self.tables: set[str] = set()

    def carried(self) -> CarriedTensors:
        """What layers are handed beside the hidden state."""
        sizes = list(self.hidden)
        batch_dim = next(
            (at for at in range(len(sizes)) if sizes[at : at + 2] == [ROWS, LENGTH]), 0
        )
        del sizes[batch_dim : batch_dim + 2]
        if not self.shapes:
            return CarriedTensors(batch_dim=batch_dim)
        return CarriedTensors(
            tuple(sizes), batch_dim, tuple(self.shapes), tuple(self.arguments), tuple(self.shared)
        )

    def path_of_logits(self) -> str:
        """Of the linear whose result is the logits; empty where none is."""
        return next((path for path, y in self._linears.items() if y is self.logits), "")

    def _kept(self, path: str) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if args:
                self._linears[path] = out

        return keep

    def _entered(self, index: int) -> Any:
        def note(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = by_place(args, options)
            hidden = given.pop(0 if args else HIDDEN, None)
            self.reads_ids |= any(value is self.ids for value in given.values())
            for value in given.values():
                if isinstance(value, Tensor) and _memory(value) in self.constants:
                    self.tables.add(self.constants[_memory(value)][0])
            if index == len(self.arguments):
                self.arguments.append(dict(self._carried_of(given)))
            if index == 0 and isinstance(hidden, Tensor):
                self.hidden = tuple(hidden.shape)

        return note

    def _carried_of(self, given: Mapping[Place, Any]) -> Iterator[tuple[Place, int]]:
        """The arguments that depend on embeddings, and not on layers, whose results are detached."""
        for place, value in given.items():
            if not _is_of_tokens(value) or not value.requires_grad:
                continue
            known = next((number for number, x in self.tensors.items() if x is value), None)
            yield place, self._add(value, value.shape[2:]) if known is None else known

    def _add(self, x: Tensor, shape: Sequence[int]) -> int:
        number = len(self.shapes)
        self.tensors[number] = x
        self.shapes.append(tuple(shape))
        return number

    def _shared_of(self, index: int, given: Mapping[Place, Any]) -> Iterator[SharedEntry]:
        """What a layer has left in mappings that it was given."""
        for place, mapping in given.items():
            for key, left in mapping.items() if isinstance(mapping, MutableMapping) else ():
                is_known = any((one.place, one.key) == (place, key) for one in self.shared)
                is_shared = isinstance(left, tuple | list) and all(map(_is_of_heads, left))
                if is_shared and not is_known:
                    numbers = (self._add(x, (x.shape[1], *x.shape[3:])) for x in left)
                    yield SharedEntry(place, key, index, tuple(numbers))

    def _left(self, index: int) -> Any:
        def note(
            _module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Any
        ) -> Any:
            self.order.append(index)
            self.shared += self._shared_of(index, by_place(args, options))
            self.num_outputs = 0 if isinstance(out, Tensor) else len(out)
            if isinstance(out, Tensor):
                return out.detach()
            return tuple(x.detach() if isinstance(x, Tensor) else x for x in out)

        return note

    def _measured(self, path: str) -> Any:
        def note(_module: nn.Module, _args: object, out: Any) -> None:
            if _is_of_tokens(out) and not self.order:
                self.widths[path] = tuple(out.shape[2:])
            if isinstance(out, Tensor) and not out.requires_grad and not self.order:
                self.constants[_memory(out)] = (path, out)

        return note

    def _noted(self, path: str) -> Any:
        def note(_module: nn.Module, _args: object) -> None:
            (self.after if self.order else self.before).add(path)

        return note


def is_list(module: nn.Module | None) -> bool:
    """Whether a module holds others, and is not called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _is_of_tokens(value: Any) -> bool:
    """Whether a value has entries for each token of a batch."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() > 2
        and tuple(value.shape[:2]) == (ROWS, LENGTH)
    )


def _is_of_heads(value: Any) -> bool:
    """Whether a value is keys or values of all tokens, [B, H, S, K]."""
    is_whole = isinstance(value, Tensor) and value.dim() == COLUMNS + 2
    return is_whole and (len(value), value.shape[COLUMNS]) == (ROWS, LENGTH)


def _around(module: nn.Module, layers: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters that are not on the way to the layers."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below == layers:
            continue
        if f"{layers}.".startswith(f"{below}.") or is_list(child):
            yield from _around(child, layers, below)
        else:
            yield below, child
