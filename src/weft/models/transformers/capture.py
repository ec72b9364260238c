"""What one run of a model of transformers without memory tells of it: its layers, their attention, and what is around them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch, token_example
from weft.models.runs_without_memory import run_without_memory
from weft.models.transformers.interfaces import Call, Recording, calling

KEY = "model.name"
ROWS, LENGTH = 2, 8


@dataclass(frozen=True)
class CapturedAttention:
    """An attention of a model: path of its module, and what it asks `Attend` for."""

    path: str
    attend: Attend

    def made(self, module: nn.Module) -> Attend:
        """An `Attend` of a model whose attention module this is."""
        spec = self.attend
        sinks = None
        if spec.sinks is not None:
            (sinks,) = (one for one in module.parameters(recurse=False) if one.dim() == 1)
        return Attend(mask=spec.mask, scale=spec.scale, softcap=spec.softcap, sinks=sinks)


@dataclass(frozen=True)
class Captured:
    """The structure of a model.

    Attributes:
        layers: path of the list of layers.
        num_outputs: length of the tuples that layers return; 0: they return tensors.
        before: paths of modules that compute before the first layer.
        after: paths of modules that compute behind the last one.
        takes: names of arguments of the model's forward.
        attentions: of the layers.
        implementation: of attention, as transformers names it.
        is_own_attention: whether some layer mixes tokens without the attention interface.
    """

    layers: str
    num_outputs: int
    before: frozenset[str]
    after: frozenset[str]
    takes: frozenset[str]
    attentions: tuple[CapturedAttention, ...]
    implementation: str
    is_own_attention: bool

    def make_attends(self, lm: nn.Module) -> dict[str, Attend]:
        """One `Attend` for each attention of another model of the same config."""
        return {one.path: one.made(lm.get_submodule(one.path)) for one in self.attentions}


def capture(lm: nn.Module, num_layers: int, *, implementation: str) -> Captured:
    """Run a model on the meta device, and note its structure.

    Raises:
        PlanError: it has no list of decoder layers, or its forward fails.
    """
    layers = find_layers(lm, num_layers)
    takes = frozenset(inspect.signature(lm.forward).parameters)
    watched = _Watched(lm, layers)
    recording = Recording()

    def run(_blocks: Mapping[str, nn.Module], batch: Batch) -> None:
        watched.restart()
        options: dict[str, Any] = {}
        if "position_ids" in takes:
            options["position_ids"] = batch.positions
        ones = batch.inputs.new_ones(batch.inputs.shape, dtype=bool)
        with calling(Call(recording=recording)):
            lm(input_ids=batch.inputs, attention_mask=ones, use_cache=False, **options)

    try:
        run_without_memory(run, {"lm": lm}, token_example(ROWS, LENGTH))
    except PlanError:
        raise
    except Exception as error:
        what = f"its forward fails without values: {type_and_message(error)}"
        raise PlanError(Fault(KEY, what, fix="another architecture")) from error
    paths = {module: path for path, module in lm.named_modules()}
    attentions = [CapturedAttention(paths[one], attend) for one, attend in recording.attends.items()]
    own = [f"{layers}.{index}." for index in range(num_layers)]
    has_own = not all(any(one.path.startswith(start) for one in attentions) for start in own)
    return Captured(
        layers=layers,
        num_outputs=watched.num_outputs,
        before=frozenset(watched.before),
        after=frozenset(watched.after - watched.before),
        takes=takes,
        attentions=tuple(attentions),
        implementation=implementation,
        is_own_attention=has_own,
    )


def find_layers(lm: nn.Module, num_layers: int) -> str:
    """The path of the list of decoder layers: the outermost list of so many modules of parameters.

    Raises:
        PlanError: there is none.
    """
    for path, module in lm.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == num_layers
        if is_list and all(True for child in module for _ in child.parameters()):
            return path
    what = f"{type(lm).__name__} has no list of {num_layers} decoder layers"
    raise PlanError(Fault(KEY, what, fix="a decoder (docs/architectures.md)"))


class _Watched:
    """Hooks on a model that note which modules with parameters compute before and behind its layers."""

    def __init__(self, lm: nn.Module, layers: str) -> None:
        self.num_layers = len(list(lm.get_submodule(layers)))
        self.restart()
        for index, layer in enumerate(lm.get_submodule(layers)):
            layer.register_forward_hook(self._leave)
            del index
        for path, module in _around(lm, layers):
            module.register_forward_pre_hook(self._noted(path))

    def restart(self) -> None:
        """Forget a run."""
        self.num_done = 0
        self.num_outputs = 0
        self.before: set[str] = set()
        self.after: set[str] = set()

    def _leave(self, _module: nn.Module, _args: object, out: Any) -> None:
        self.num_done += 1
        self.num_outputs = 0 if isinstance(out, Tensor) else len(out)

    def _noted(self, path: str) -> Any:
        def note(_module: nn.Module, _args: object) -> None:
            (self.after if self.num_done else self.before).add(path)

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
