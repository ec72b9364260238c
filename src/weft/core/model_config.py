"""Models without torch: base class of family configs, FLOPs of blocks, tables by parameter name (axes, init)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from weft.core.input_spec import InputSpec
from weft.core.shard import DimAxis
from weft.errors import Fault, PlanError

T = TypeVar("T")

AxisTable = Mapping[str, tuple[DimAxis, ...]]
"""Pattern of global parameter names -> the logical axis of each dimension; each parameter is
matched exactly once.
"""

OwnValues = Callable[[str, int], Any]
"""(global name, seed) -> all initial values of a parameter, as a tensor."""

Draw = (
    tuple[Literal["normal"], float]
    | tuple[Literal["ones"]]
    | tuple[Literal["zeros"]]
    | tuple[Literal["own"], OwnValues]
)
"""Distribution of a parameter's initial values: normal with this standard deviation, constant, or
values of its own.
"""

InitTable = Mapping[str, Draw]
"""Pattern of global parameter names -> its initial values; each parameter is matched exactly once.
"""

InputKind = Literal["tokens", "images", "arrays"]
"""What a model reads: text, square grey images with classes, or arrays that it names itself."""

SAMPLE_NAMES: Mapping[InputKind, str] = {
    "tokens": "sequence",
    "images": "image",
    "arrays": "sample",
}
"""What one sample of each kind is called."""

LinearShapes = dict[str, tuple[int, int]]
"""Name of a linear -> features out, in."""


@dataclass(frozen=True)
class BlockSpec:
    """One block of the chain, as far as the split into stages needs it.

    Attributes:
        name: as in `blocks(cfg)`: "embed", "layer0", ..., "head", "loss".
        flops: of one sequence (or sample) forward: 2 x multiply-adds of its matrices, causal
            attention counted half.
        out: shape of its output: ("batch", "seq", 4096), ("batch", 128), or () for the scalar loss.
        is_layer: False for embed, head and loss.
        parts: where the output is a tuple or dict of tensors, the name (of a tuple "") and shape of each,
            which a pipeline stage can send; then `out` is ().
    """

    name: str
    flops: float
    out: tuple[str | int, ...]
    is_layer: bool
    parts: tuple[tuple[str, tuple[str | int, ...]], ...] = ()


class ModelNotBuiltError(Exception):
    """What is asked of a config is known once the modules of its model are built."""


class ModelConfig(BaseModel):
    """Base of every family's Config. The defaults of its fields are the family's tiny preset."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    family: ClassVar[str]
    kind: ClassVar[InputKind]
    is_opaque: ClassVar[bool] = False
    """Whether it may compute something else for some ids or lengths, as a user's code may."""

    @property
    def reads_later_targets(self) -> bool:
        """Whether blocks read the token after the next one (multi-token prediction)."""
        return False

    def unbuilt(self) -> Self:
        """The config for checks that come before its model is built, which may take seconds: sizes
        that only the modules know raise ModelNotBuiltError. Itself where the config knows all.
        """
        return self

    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Units of each logical axis that may be sharded: {"heads": 32, "kv_heads": 8, "ffn":
        14336, "vocab": 128256}.
        """

    @abstractmethod
    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        """The blocks in order, the last one "loss"; `seq_len` is ignored by models of images."""

    def check_seq_len(self, seq_len: int) -> Fault | None:
        """What is wrong with sequences of this length, if anything."""
        return None

    def input_specs(self) -> Mapping[str, InputSpec]:
        """The arrays of a sample by name, of a model that reads arrays; what the first block reads
        comes first.
        """
        return {}

    def linears(self) -> LinearShapes:
        """Projections of attention and feed-forward parts, which may get adapters: global name ->
        features out, in.
        """
        return {}

    def expert_linears(self) -> LinearShapes:
        """Projections of routed experts: global name of the parameter that holds those of all experts
        of a layer -> features out, in, of one.
        """
        return {}


def attention_linears(dim: int, *, q_width: int, kv_width: int) -> LinearShapes:
    """The projections of attention with grouped heads, by their name in a layer."""
    return {
        "attn.q": (q_width, dim),
        "attn.k": (kv_width, dim),
        "attn.v": (kv_width, dim),
        "attn.o": (dim, q_width),
    }


def gated_linears(dim: int, ffn: int, *, inside: str = "mlp") -> LinearShapes:
    """The projections of a gated feed-forward part, by their name in a layer."""
    return {f"{inside}.gate": (ffn, dim), f"{inside}.up": (ffn, dim), f"{inside}.down": (dim, ffn)}


def in_layers(names: Mapping[str, T], layers: Iterable[int]) -> dict[str, T]:
    """Values by name inside a layer, repeated for each of these layers with global names."""
    found: dict[str, T] = {}
    for layer in layers:
        prefix = f"layer{layer}"
        for name, value in names.items():
            full_name = f"{prefix}.{name}"
            found[full_name] = value
    return found


def match_row(name: str, table: Mapping[str, T], *, title: str) -> T:
    """The one row of `table` whose pattern matches the global parameter name.

    Raises:
        PlanError: when no row or several rows match; it names the parameter and the rows.
    """
    rows = [pattern for pattern in table if fnmatchcase(name, pattern)]
    if len(rows) == 1:
        return table[rows[0]]
    raise PlanError(
        Fault(
            title,
            f"parameter {name!r} is matched by {len(rows)} rows",
            got=", ".join(map(repr, rows or table)),
            need="exactly one row",
            fix="narrow one pattern" if rows else f"add a row for {name!r}",
        )
    )


def logical_axes(name: str, table: AxisTable) -> tuple[DimAxis, ...]:
    """Logical axes of the parameter's dimensions; errors as in `match_row`."""
    return match_row(name, table, title="AXES")


def check_divides(
    value: int, parts: int, *, value_name: str, parts_name: str, multiple: int = 1
) -> None:
    """Reject a `value` that does not divide into `parts`, with the nearest values that do.

    Args:
        multiple: what is proposed divides into parts of a multiple of this size.

    Raises:
        ValueError: for pydantic, which adds the key.
    """
    if value % parts == 0:
        return
    step = parts * multiple
    below = value // step * step
    above = below + step
    near = " or ".join(str(proposed) for proposed in (below, above) if proposed)
    hint = f"try {value_name} {near}"
    if value % multiple == 0:
        divisors = ", ".join(map(str, nearest_divisors(value // multiple, parts)))
        hint += f", or {parts_name} {divisors}"
    raise ValueError(f"{value_name} {value} does not divide by {parts_name} {parts}; {hint}")


def nearest_divisors(value: int, parts: int) -> tuple[int, ...]:
    """The largest divisor of `value` below `parts` and the smallest above, as far as they exist."""
    below: list[int] = []
    above: list[int] = []
    for small in range(1, math.isqrt(value) + 1):
        large, rest = divmod(value, small)
        if rest:
            continue
        for divisor in (small, large):
            side = below if divisor <= parts else above
            side.append(divisor)
    nearest: list[int] = []
    if below:
        nearest.append(max(below))
    if above:
        nearest.append(min(above))
    return tuple(nearest)


def linear_flops(num_tokens: int, *num_weights: int) -> float:
    """Forward FLOPs of linears with these numbers of weights, for `num_tokens`."""
    return 2.0 * num_tokens * sum(num_weights)


def weight_flops(model: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of products with weights, for one sequence: what grows with its length itself,
    not with the square of it as attention does. Of a user's model those of its named linears.
    """
    if model.is_opaque:
        sizes = [out * into for out, into in model.linears().values()]
        return linear_flops(seq_len, *sizes)
    of_one, of_two = (sum(block.flops for block in model.block_specs(n)) for n in (1, 2))
    return seq_len * (2 * of_one - of_two / 2)


def causal_attention_flops(seq_len: int, width: int) -> float:
    """Forward FLOPs of q k^T and p v, `width` = heads x head size, half of the S x S square each."""
    return 2.0 * seq_len * seq_len * width
