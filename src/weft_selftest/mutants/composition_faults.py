"""Mutants of published compositions: what one dimension gives is not what the next one takes (replicated, sharded, partial)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.comm import ops
from weft.models.common.batch import Batch, Extra
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tensor.region import SEQ_DIM
from weft.parallel.tensor.vocab import VocabParallelLoss
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants import references
from weft_selftest.mutants.fault import FunctionFault, ModuleFault, Mutant, MutantLayout
from weft_selftest.mutants.tensor_faults import partial_without

AXIS = (TP_AXIS,)
PARTIAL_NAMES = "weft.parallel.tensor.transform:_every_name"


def gathered_logits(
    forward: Callable[..., Tensor], loss: VocabParallelLoss, logits: Tensor, batch: Batch
) -> Tensor:
    """The loss of shards of the vocabulary reads the whole vocabulary on every rank."""
    whole = ops.gather_from_region(logits, loss.comm, loss.axis, dim=-1)
    return forward(loss, whole, batch)


def own_slice_of_the_gradient(backward: Callable[..., Any], ctx: Any, dx: Tensor) -> Any:
    """The gradient of gathered activations is sliced, as that of a gather outside of regions, and
    not reduced and scattered.
    """
    gradients = backward(ctx, dx)
    comm, axis = ctx.region.comm, ctx.region.axis
    reduced = ctx.grad.work.wait()
    own = dx.chunk(comm.degree(axis), SEQ_DIM)[comm.index(axis)]
    reduced.copy_(own)
    return gradients


def loss_by_local_counts(
    forward: Callable[..., Extra], block: Any, x: Tensor, batch: Batch
) -> Extra:
    """The loss of later targets is a mean over those of the micro-batch, times its next targets."""
    found = forward(block, x, batch)
    assert found.loss is not None
    assert batch.later_targets is not None
    num_later = replace(batch, targets=batch.later_targets).num_targets()
    return found._replace(loss=found.loss * (batch.num_targets() / num_later))


def without_later_sum(leave: Callable[..., Tensor], region: Any, y: Tensor) -> Tensor:
    """The exit of a mixture keeps this rank's part of its sum."""
    return y.view_as(y) if y.dim() == SEQ_DIM + 2 else leave(region, y)


def no_axes(replicated_axes: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """No axis is taken for one whose ranks have the same tokens."""
    return ()


MUTANTS = (
    Mutant(
        "gathered_logits_enter_the_loss_of_a_cut_vocabulary",
        "every rank counts the whole vocabulary, its exponentials tp times",
        MutantLayout("tp2"),
        (FunctionFault("weft.parallel.tensor.vocab:VocabParallelLoss.forward", gathered_logits),),
        axes=AXIS,
        blocks=("loss",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_gradient_of_gathered_activations_is_sliced",
        "heads and features of other ranks are missing from the gradient of each rank's tokens",
        MutantLayout("tp2", options="--parallel.sequence True"),
        (FunctionFault("weft.parallel.tensor.region:_Enter.backward", own_slice_of_the_gradient),),
        axes=AXIS,
        blocks=("head", "loss", "layer*"),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_bias_behind_a_scattered_sum_is_not_summed_over_tp",
        "each rank updates the bias of a row linear from its own tokens",
        MutantLayout("tp2", family="gpt2", options="--parallel.sequence True"),
        (FunctionFault(PARTIAL_NAMES, partial_without("attn.o.bias", "down.bias")),),
        axes=AXIS,
        blocks=("layer*",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_gradient_of_a_latent_projection_is_not_summed_over_tp",
        "the latent of keys and values is whole, the heads that read it are not",
        MutantLayout("tp2", family="deepseek"),
        (FunctionFault(PARTIAL_NAMES, partial_without("kv_a.weight")),),
        axes=AXIS,
        blocks=("layer*", "mtp*"),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "multi_token_prediction_is_normalised_by_local_counts",
        "ranks whose documents are shorter count their later targets more",
        MutantLayout("dp2", family="deepseek", documents=True),
        (ModuleFault("mtp0", loss_by_local_counts, axis=DP_AXIS),),
        axes=(DP_AXIS, ""),
        blocks=("mtp0", "loss", ""),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_exit_of_a_region_keeps_its_partial_sum",
        "a residual stream of each rank's own heads and features",
        MutantLayout("tp2", family="qwen3-moe"),
        (FunctionFault("weft.parallel.tensor.region:Region.leave", without_later_sum),),
        axes=AXIS,
        blocks=("embed", "layer0"),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "every_tensor_rank_counts_its_copy_of_the_loss",
        "a replicated loss is summed over tp",
        MutantLayout("dp2 tp2"),
        (FunctionFault("weft.train.step:replicated_axes", no_axes),),
        axes=AXIS,
        blocks=("loss", ""),
        reference=references.MEGATRON_COMPOSITION,
    ),
)
