"""Mutants of what ranks hold whole or shard along heads: biases, angles of one kind of layers, gradients of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.fault import FunctionFault, ModuleFault, Mutant, MutantLayout

AXIS = (TP_AXIS,)
LAYERS = ("layer*",)


def halved_bias_gradient(backward: Callable[..., Any], ctx: Any, dy: Tensor) -> Any:
    """The gradient of a bias is divided by the number of ranks."""
    dx, d_weight, d_bias, none = backward(ctx, dy)
    return dx, d_weight, None if d_bias is None else d_bias / 2, none


def global_angles(forward: Callable[..., Any], rope: Any, positions: Tensor) -> Any:
    """A layer with a window has the wavelengths of one without."""
    theta, rope.theta = rope.theta, rope.theta * 100
    try:
        return forward(rope, positions)
    finally:
        rope.theta = theta


def rows_of_first_sequence(forward: Callable[..., Tensor], embed: Any, tokens: Tensor) -> Tensor:
    """Rows that a rank does not hold are not masked in the backward: row 0 gets their gradients."""
    out = forward(embed, tokens)
    local = tokens - embed.lo
    is_other = (local < 0) | (local >= embed.weight.shape[0])
    leak = embed.weight[0] * is_other.unsqueeze(-1)
    return out + (leak - leak.detach()) if out.shape == leak.shape else out


def scaled_first_head(forward: Callable[..., Tensor], module: Any, x: Tensor) -> Tensor:
    """One head's norm sees the sum of squares over the heads of the rank."""
    out = forward(module, x)
    whole = x.square().mean((-1, -2), keepdim=True)
    own = x.square().mean(-1, keepdim=True)
    return out * (own / whole).sqrt()


MUTANTS = (
    Mutant(
        "the_gradient_of_a_column_bias_is_divided_by_tp",
        "biases of sharded heads are taken for replicated ones",
        MutantLayout("tp2", family="qwen2"),
        (FunctionFault("weft.parallel.tensor.region:_Linear.backward", halved_bias_gradient),),
        axes=(TP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "a_layer_with_a_window_rotates_as_one_without",
        "one kind of layers has the angles of the other on a later rank",
        MutantLayout("cp2", family="gemma3"),
        (ModuleFault("layer0.attn.rope", global_angles, axis=CP_AXIS, index=1),),
        axes=(CP_AXIS,),
        blocks=("layer0",),
    ),
    Mutant(
        "row_0_has_the_gradients_of_other_ranks_tokens",
        "tokens of other ranks are masked forward, not backward",
        MutantLayout("tp2"),
        (
            FunctionFault(
                "weft.parallel.tensor.vocab:VocabParallelEmbedding.forward", rows_of_first_sequence
            ),
        ),
        axes=AXIS,
        blocks=("embed",),
    ),
    Mutant(
        "norms_of_heads_are_over_all_heads_of_a_rank",
        "visible only where a rank has several heads",
        MutantLayout("tp2", family="qwen3"),
        (ModuleFault("layer1.attn.q_norm", scaled_first_head, axis=TP_AXIS),),
        axes=(TP_AXIS, ""),
        blocks=("layer1",),
    ),
)
