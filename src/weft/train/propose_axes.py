"""`weft axes`: proposes the table AXES of a user's model from how each parameter is used, and tries it on a layout.

The chain runs once on the meta device. Every tensor is followed back to the linears that it was
computed from since it left the stream of activations between the parts of the model:

    x ── norm ──┬── q ── {q} ──┐                                  a linear that reads nothing but results of
    {stream}    ├── k ── {k} ──┼── attention ── {q, k, v} ── o    linears closes a group: they are column-parallel,
                └── v ── {v} ──┘                                  it is row-parallel, and its result joins the stream

A group that goes through attention is sharded by heads, any other by its width. A proposal counts
only if the transforms accept it: each group is tried alone, in several forms (a fused weight in parts
or as one), and named undecided where none is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.model_config import AxisTable, ModelConfig
from weft.core.shard import DimAxis, Stacked
from weft.errors import PlanError
from weft.layout.plan import Plan
from weft.models.common.attention import Attend
from weft.models.common.batch import activation_of
from weft.models.common.init import named_parameters, path_below
from weft.models.common.uncompiled import keep_compiler_unimported, uncompiled_mode
from weft.models.user_facts import rows_of
from weft.models.user_family import LOSS, WHOLE, UserFamily, example, meta_blocks
from weft.parallel.autograd.tree import TensorNotes, tensors_in
from weft.train.model_checks import check_layout

STREAM = ""
"""Source of activations between the parts of a model."""
INPUTS = "inputs"
"""Source of what no linear has read before: token ids, pixels."""
NOT_LINEARS = frozenset({STREAM, INPUTS})
ATTENTION = "scaled_dot_product"
PRODUCTS = ("bmm", "baddbmm")
SOFTMAX = ("_softmax", "_safe_softmax")
"""Operations of attention that is written out."""
MOST_PARTS = 4
"""Projections that a fused weight may hold."""

Table = dict[str, tuple[DimAxis | None, ...]]


@dataclass(frozen=True)
class Proposal:
    """A table for a model, with exact names, and what it leaves whole.

    Attributes:
        table: pattern of parameter names -> logical axes.
        undecided: parameter or group -> why no sharding was accepted.
    """

    table: Table
    undecided: Mapping[str, str]

    def text(self) -> str:
        """The table as Python code."""
        lines = [f"    {pattern!r}: {_row_text(row)}," for pattern, row in self.table.items()]
        return "\n".join(("AXES = {", *lines, "}")).replace("'", '"')

    @property
    def needs_stacked(self) -> bool:
        """Whether the code needs `from weft import Stacked`."""
        return "Stacked(" in self.text()


def _row_text(row: tuple[DimAxis | None, ...]) -> str:
    words = []
    for axis in row:
        if isinstance(axis, Stacked):
            parts = ", ".join(map(repr, axis.parts))
        else:
            parts = ""
        words.append(f"Stacked({parts})" if parts else repr(axis))
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


@dataclass
class LinearRegion:
    """Linears of one tensor-parallel region.

    Attributes:
        columns: linears whose results the region consists of.
        row: the linear that reads them all.
        roles: linear -> number of heads, for "q", "k" and "v", where they go through attention.
        norms: parameter with an entry for each feature of a result -> linears that this is of.
    """

    columns: tuple[str, ...]
    row: str
    roles: Mapping[str, Mapping[str, int]]
    norms: Mapping[str, frozenset[str]]


@dataclass
class Uses:
    """How the linears and embeddings of a model are used.

    Attributes:
        token_embeddings: embeddings of the inputs.
        logits: linears whose results the loss reads.
        roles: linear -> role in attention -> heads.
        norms: as of the regions, of all linears.
        readers: linear -> linears that read its results alone.
    """

    groups: list[LinearRegion] = field(default_factory=list)
    token_embeddings: list[str] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    roles: dict[str, dict[str, int]] = field(default_factory=dict)
    norms: dict[str, frozenset[str]] = field(default_factory=dict)
    readers: dict[str, set[str]] = field(default_factory=dict)


@uncompiled_mode
class UseTrace(TorchDispatchMode):
    """Follows every tensor back to the linears that it was computed from; see the module's text.

    Args:
        projections: linears whose results are q, k, v or logits, which close no group; None: not
            known yet, and none closes one.
        num_tokens: of the batch.

    Attributes:
        is_in_attend: whether an `Attend` runs, whose heads are known.
    """

    def __init__(self, projections: Collection[str] | None, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = Uses()
        self.projections = projections
        self.num_tokens = num_tokens
        self._sources: TensorNotes[frozenset[str]] = TensorNotes()
        self.is_in_attend = False
        self._product: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._weights: TensorNotes[int] = TensorNotes()

    def sources(self, tensor: Tensor) -> frozenset[str]:
        """Linears, or the stream; empty for constants and parameters."""
        known = self._sources.get(tensor)
        if known is None:
            return frozenset()
        return known

    def set(self, tensor: Tensor, sources: frozenset[str]) -> None:
        """Note the sources of a tensor."""
        self._sources.set(tensor, sources)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        out = func(*args, **(kwargs or {}))
        tensors = list(tensors_in((args, kwargs)))
        sources = frozenset[str]().union(*map(self.sources, tensors))
        for tensor in tensors_in(out):
            self.set(tensor, sources)
        name = func.overloadpacket.__name__
        if self.is_in_attend:
            return out
        if ATTENTION in name:
            q, k, v = tensors[:3]
            self.attend((q, k, v), dim=1)
        elif name in PRODUCTS:
            self._multiply(*tensors[-2:])
        elif name in SOFTMAX:
            self._weigh(tensors[0], out, sources)
        elif tensors and (num_heads := self._weights.get(tensors[0])):
            for tensor in tensors_in(out):
                self._weights.set(tensor, num_heads)
        return out

    def _multiply(self, left: Tensor, right: Tensor) -> None:
        """A product of a batch of matrices: scores of queries and keys, or weights times values."""
        sources = (self.sources(left) - NOT_LINEARS, self.sources(right) - NOT_LINEARS)
        num_heads = self._weights.get(left)
        if num_heads:
            self._note_heads("v", sources[1], num_heads)
        else:
            self._product = sources

    def _weigh(self, scores: Tensor, weights: Tensor, sources: frozenset[str]) -> None:
        """Scores of all pairs of tokens, [B, H, S, S] or [BH, S, S], become weights."""
        q, k = self._product
        is_of_pairs = scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]
        if not (is_of_pairs and q and k and q | k == sources - NOT_LINEARS):
            return
        num_heads = scores.shape[:-1].numel() // self.num_tokens
        if not num_heads:  # of fewer tokens than the batch has
            return
        self._weights.set(weights, num_heads)
        self._note_heads("q", q, num_heads)
        self._note_heads("k", k, num_heads)

    def _note_heads(self, role: str, linears: frozenset[str], num_heads: int) -> None:
        for name in linears:
            self.uses.roles.setdefault(name, {})[role] = num_heads

    def attend(self, operands: Sequence[Tensor], *, dim: int) -> None:
        """Note the linears of q, k and v, and their numbers of heads."""
        for role, tensor in zip("qkv", operands, strict=True):
            num_heads = tensor.shape[dim]
            self._note_heads(role, self.sources(tensor) - NOT_LINEARS, num_heads)

    def read(self, name: str, x: Tensor) -> bool:
        """A linear reads x; whether it closes a group."""
        sources = self.sources(x)
        if not sources or sources & NOT_LINEARS:
            return False
        for one in sources:
            self.uses.readers.setdefault(one, set()).add(name)
        if self.projections is None or name in self.projections:
            return False
        sources -= {
            one for one in sources if self.uses.readers[one] & sources
        }  # latents of k and v
        roles = {one: dict(self.uses.roles.get(one, {})) for one in sources}
        norms = {param: of for param, of in self.uses.norms.items() if of <= sources}
        columns = tuple(sorted(sources))
        self.uses.groups.append(LinearRegion(columns, name, roles=roles, norms=norms))
        return True

    def scale(self, name: str, module: nn.Module, x: Tensor) -> None:
        """A module reads x; its parameters with an entry for each feature follow the linears of x."""
        sources = self.sources(x)
        if not sources or sources & NOT_LINEARS:
            return
        num_features = x.numel() // self.num_tokens  # of all heads
        for path, param in module.named_parameters(recurse=False):
            if param.shape == (num_features,):
                self.uses.norms[f"{name}.{path}"] = sources


def trace_uses(family: UserFamily, config: ModelConfig, plan: Plan) -> Uses:
    """Run the model on the meta device, and note how its modules are used.

    Raises:
        PlanError: its forward fails there.
    """
    first = _traced(family, config, plan, projections=None)
    return _traced(family, config, plan, projections={*first.roles, *first.logits})


def _traced(
    family: UserFamily, config: ModelConfig, plan: Plan, *, projections: Collection[str] | None
) -> Uses:
    blocks = meta_blocks(family, config)
    batch = example(family, config, rows=plan.micro_size, seq_len=plan.seq_len)
    keep_compiler_unimported()
    trace = UseTrace(projections, batch.inputs.shape[:2].numel())
    names: dict[int, list[str]] = {}
    for name, param in named_parameters(blocks).items():
        names.setdefault(id(param), []).append(name)
    for name, block in blocks.items():
        for path, module in block.named_modules():
            full_path = path_below(name, path)
            _watch(full_path, module, trace, names)
    trace.set(batch.inputs, frozenset({INPUTS}))
    x: Any = batch.inputs
    before_loss = list(blocks)
    if LOSS in blocks:
        before_loss = before_loss[: before_loss.index(LOSS)]
    with torch.no_grad(), trace:
        for name in before_loss:
            out = blocks[name](x, batch)
            x = activation_of(out)
            is_last = list(blocks)[-2:] == [name, LOSS]
            _note_outputs(trace, name, x, is_last=is_last)
        if LOSS in blocks and not getattr(config, "labels", 0):  # scores are few, and whole
            for tensor in tensors_in(x):
                linears = trace.sources(tensor) - NOT_LINEARS
                trace.uses.logits += sorted(linears)
    return trace.uses


def _note_outputs(trace: UseTrace, name: str, x: Any, *, is_last: bool) -> None:
    """The output of a block is of the residual stream; of the last block, of its own linears."""
    for tensor in tensors_in(x):
        sources = frozenset({STREAM})
        if is_last:
            own = [one for one in trace.sources(tensor) if one.startswith(f"{name}.")]
            sources = frozenset(own) or sources
        trace.set(tensor, sources)


def _watch(name: str, module: nn.Module, trace: UseTrace, names: Mapping[int, list[str]]) -> None:
    """Note the calls of a linear, an embedding, an attention or a norm.

    Args:
        names: identity of a parameter -> its names.
    """
    if isinstance(module, nn.Linear) and module._parameters.get("weight") is not None:
        closes: list[bool] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            closes.append(trace.read(name, args[0]))

        def after(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            trace.set(out, frozenset({STREAM} if closes.pop() else {name}))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    elif isinstance(module, nn.Embedding):

        def embed(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if INPUTS in trace.sources(args[0]):
                trace.uses.token_embeddings.append(name)
            trace.set(out, frozenset({STREAM}))

        module.register_forward_hook(embed)
    elif isinstance(module, Attend):

        def attend(_: nn.Module, args: tuple[Any, ...]) -> None:
            trace.attend(args[:3], dim=2)
            for param in names.get(id(module.sinks), ()):
                trace.uses.norms[param] = trace.sources(args[0])
            trace.is_in_attend = True

        def attended(*_: object) -> None:
            trace.is_in_attend = False

        module.register_forward_pre_hook(attend)
        module.register_forward_hook(attended)
    elif module._parameters:

        def scale(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                trace.scale(name, module, args[0])

        module.register_forward_pre_hook(scale)


def as_it_is(config: ModelConfig, _table: Table) -> ModelConfig:
    """Default of `propose`: blocks do not depend on what is sharded."""
    return config


def propose(
    family: UserFamily,
    config: ModelConfig,
    plan: Plan,
    *,
    with_table: Callable[[ModelConfig, Table], ModelConfig] = as_it_is,
) -> Proposal:
    """The table that shards as much as the transforms accept.

    Args:
        plan: a layout with tensor parallelism, on which groups are tried.
        with_table: the config with which a table is tried.

    Raises:
        PlanError: the model cannot be traced.
    """
    shapes = family.facts(config).shapes
    uses = trace_uses(family, config, plan)
    known = family.axes(config)
    table: Table = {name: _first_row(name, shape, known) for name, shape in shapes.items()}
    undecided: dict[str, str] = {}
    for label, forms in _candidates(uses, shapes):
        errors: list[str] = []
        for form in forms:
            changed = {**table, **form}
            error = _rejection(family, with_table(config, changed), plan, changed)
            if not error:
                table = changed
                break
            errors.append(error)
        else:
            undecided[label] = errors[0]
    loose = [name for name in shapes if name not in family.facts(config).ties]
    return Proposal(table=_with_patterns(table, loose, all_names=list(shapes)), undecided=undecided)


def _first_row(name: str, shape: tuple[int, ...], known: AxisTable) -> tuple[DimAxis | None, ...]:
    """The row that the family has for a parameter already, such as an expert's; else whole."""
    for pattern in rows_of(name, known):
        if len(known[pattern]) == len(shape):
            return tuple(None if axis == WHOLE else axis for axis in known[pattern])
    return (None,) * len(shape)


def _rejection(family: UserFamily, config: ModelConfig, plan: Plan, table: Table) -> str:
    """Why the transforms reject a table; empty where they accept it."""
    tried = replace(family, model=replace(family.model, AXES=table))
    try:
        check_layout(tried, config, plan)
    except PlanError as error:
        return str(error.faults[0])
    return ""


Shapes = Mapping[str, tuple[int, ...]]


def _candidates(uses: Uses, shapes: Shapes) -> Iterator[tuple[str, list[Table]]]:
    """Groups, merged over numbered blocks by their text, each with the forms to try."""
    looked_up = [f"{name}.weight" for name in uses.token_embeddings]
    of_logits = [f"{name}.weight" for name in uses.logits]
    # tables of positions and types that are counted from the tokens have other numbers of rows
    vocab = next((shapes[name][0] for name in (*of_logits, *looked_up) if name in shapes), 0)
    embeddings: Table = {name: ("vocab", None) for name in looked_up if shapes[name][0] == vocab}
    logits: Table = {}
    for name in dict.fromkeys(uses.logits):
        logits[f"{name}.weight"] = ("vocab", None)
        if f"{name}.bias" in shapes:
            logits[f"{name}.bias"] = ("vocab",)
    if embeddings or logits:
        names = ", ".join((*embeddings, *logits))
        forms = [{**embeddings, **logits}, *filter(None, (embeddings, logits))]
        yield f"vocabulary of {names}", forms
    merged: dict[tuple[str, str], list[LinearRegion]] = {}
    for group in uses.groups:
        key = (_pattern(" ".join(group.columns)), _pattern(group.row))
        known = merged.setdefault(key, [])
        if group not in known:
            known.append(group)
    for (columns, row), groups in merged.items():
        forms = [
            _merged(each) for each in zip(*(_forms(group, shapes) for group in groups), strict=True)
        ]
        yield f"{columns} -> {row}", forms


def _merged(forms: Sequence[Table]) -> Table:
    found: Table = {}
    for form in forms:
        found.update(form)
    return found


def _forms(group: LinearRegion, shapes: Shapes) -> list[Table]:
    """The ways to shard a group: fused weights in parts, then as one; then with heads of keys and
    values whole, which tp may not divide.
    """
    width = shapes[f"{group.row}.weight"][1]
    forms = [_form(group, shapes, width=width, fused=fused) for fused in (True, False)]
    axis = forms[0][f"{group.row}.weight"][1]
    shared = [name for name, roles in group.roles.items() if roles and "q" not in roles]
    whole = {
        name: (None,) * len(row)
        for name, row in forms[-1].items()
        if name.rpartition(".")[0] in shared
    }
    in_units = {name: _in_units(row, group, name) for name, row in forms[-1].items()}
    forms += [{**forms[-1], **whole}, in_units]
    return [_with_norms(form, group, shapes, of_all=axis) for form in forms]


def _in_units(
    row: tuple[DimAxis | None, ...], group: LinearRegion, name: str
) -> tuple[DimAxis | None, ...]:
    """The row of a column-parallel linear by its heads, as code shards it that counts them itself."""
    heads = group.roles.get(name.rpartition(".")[0], {}).values()
    axis = row[0]
    if not heads or not isinstance(axis, str):
        return row
    return (Stacked((axis, max(heads))), *row[1:])


def _with_norms(
    form: Table, group: LinearRegion, shapes: Shapes, *, of_all: DimAxis | None
) -> Table:
    """The form with the parameters of norms, sharded as what they read.

    Args:
        of_all: axis of the results of several linears together, and of a part of one.
    """
    found = dict(form)
    for param, linears in group.norms.items():
        if param not in shapes:
            continue
        weights = [f"{name}.weight" for name in linears]
        is_of_one = len(weights) == 1 and shapes[weights[0]][:1] == shapes[param]
        found[param] = (form[weights[0]][0] if is_of_one else of_all,)
    return found


def _form(group: LinearRegion, shapes: Shapes, *, width: int, fused: bool) -> Table:
    has_heads = any(group.roles.values())
    axis = "heads" if has_heads else "ffn"
    form: Table = {f"{group.row}.weight": (None, axis)}
    for name in group.columns:
        num_outputs = shapes[f"{name}.weight"][0]
        out = _out_axis(group.roles[name], num_outputs, width, axis, fused=fused)
        form[f"{name}.weight"] = (out, None)
        if f"{name}.bias" in shapes:
            form[f"{name}.bias"] = (out,)
    return form


def _out_axis(
    roles: Mapping[str, int], length: int, width: int, axis: str, *, fused: bool
) -> DimAxis:
    """Logical axis of a column-parallel linear's features."""
    if fused and len(roles) > 1:
        roles = _with_shared_heads(roles, length, width)
        parts = [(_axis_of_role(role), roles[role]) for role in "qkv" if role in roles]
        return Stacked(*parts)
    if fused and not roles and length > width and length // width <= MOST_PARTS:
        return Stacked(*[(axis, width)] * (length // width))
    if len(roles) == 1:
        return _axis_of_role(next(iter(roles)))
    return axis


def _with_shared_heads(roles: Mapping[str, int], length: int, width: int) -> Mapping[str, int]:
    """The heads of a fused weight; where attention that is written out has repeated those of keys and
    values for the heads of queries, as many as the weight has rows for.

    Args:
        width: of all heads of queries.
    """
    num_heads = roles.get("q", 0)
    if set(roles) != set("qkv") or len(set(roles.values())) > 1 or width % num_heads:
        return roles
    shared, rest = divmod(length // (width // num_heads) - num_heads, 2)
    return {**roles, "k": shared, "v": shared} if shared > 0 and not rest else roles


def _axis_of_role(role: str) -> str:
    return "heads" if role == "q" else "kv_heads"


def _pattern(name: str) -> str:
    """A name with the number of its block as `*`."""
    return " ".join(re.sub(r"^(\w*?)\d+(?=\.|$)", r"\1*", word) for word in name.split(" "))


def _with_patterns(table: Table, names: Sequence[str], *, all_names: Sequence[str]) -> Table:
    """Rows of equal axes under the pattern of their numbered blocks, where that matches no other
    parameter.
    """
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(_pattern(name), []).append(name)
    found: Table = {}
    for pattern, members in rows.items():
        matched = {name for name in all_names if fnmatchcase(name, pattern)}
        different_rows = {table[name] for name in members}
        same = len(different_rows) == 1
        aliases = matched - set(names)
        if same and matched - aliases == set(members):
            found[pattern] = table[members[0]]
        else:
            found.update({name: table[name] for name in members})
    return found
