"""Mutants of tensor and sequence parallelism: regions, shards, vocabulary, adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm import ops
from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.config.lora import LORA_A, LORA_B
from weft.core.axes import Box
from weft.core.shard import Shard
from weft.models.common.lora import plus_adapter
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tensor.linear import RowParallelLinear
from weft.parallel.tensor.region import Region
from weft.parallel.tensor.vocab import VocabParallelEmbedding
from weft.parallel.tp import AXIS as TP_AXIS
from weft.train.step_stats import PendingTotals
from weft_selftest.mutants import references, wide_norm_model
from weft_selftest.mutants.changes import ChangedTotals, gradient_times, result_times
from weft_selftest.mutants.fault import (
    CollectiveFault,
    FunctionFault,
    ModuleFault,
    Mutant,
    MutantLayout,
)

TP = MutantLayout("tp2")
SP = MutantLayout("tp2", options="--parallel.sequence True")
GPT2 = MutantLayout("tp2", family="gpt2")
CHUNKED = "weft.parallel.tensor.chunked_products"
CHUNKS = MutantLayout("tp2", options="--parallel.sequence True --parallel.tp_overlap True")
LORA = MutantLayout("tp2", options="--lora.rank 3")
WIDE_NORM = MutantLayout("tp2", family=wide_norm_model.__name__)
STATISTIC = "weft.parallel.tensor.width_statistics:sum_over_ranks"
INIT = "weft.parallel.model.materialize:init_params"
AXIS = (TP_AXIS,)
OUTPUT_SUM = "RowParallelLinear.forward"


def _first_shards(params: Any) -> dict[str, Shard]:
    return {name: Shard((Box.whole(param.shape),)) for name, param in params.items()}


def identical_shards(init: Callable[..., None], params: Any, table: Any, **rest: Any) -> None:
    """Every rank draws the entries of the first one."""
    init(params, table, **{**rest, "shards": _first_shards(params)})


def first_shard_of(*words: str) -> Callable[..., None]:
    """Every rank draws the entries of the first one, of parameters whose name has one of these
    words.
    """

    def change(init: Callable[..., None], params: Any, table: Any, **rest: Any) -> None:
        shards = dict(rest["shards"])
        first = _first_shards(params)
        for name in shards:
            if any(word in name for word in words):
                shards[name] = first[name]
        init(params, table, **{**rest, "shards": shards})

    return change


def with_parts_exchanged(products: Callable[..., Any], *args: Any) -> Any:
    """Each half of the sequence has the products of the other."""
    whole, outputs = products(*args)
    return whole, [y.roll(y.shape[1] // 2, 1) for y in outputs]


def of_other_parts(product: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """The part of the sequence that the next rank is to have."""
    size = x.shape[1] // 2
    return product(x.roll(size, 1), *args)


class _WithoutAllReduce:
    """A communicator whose started all-reduce yields its input."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def start_all_reduce(self, x: Tensor, axis: Any) -> Work:
        return Work.done(x.clone())


def unreduced_input_gradient(backward: Callable[..., Any], ctx: Any, dx: Tensor) -> Any:
    """Blocks below receive the gradient of this rank's heads only."""
    ctx.region = replace(ctx.region, comm=_WithoutAllReduce(ctx.region.comm))
    return backward(ctx, dx)


def bias_on_every_rank(
    forward: Callable[..., Tensor], module: RowParallelLinear, x: Tensor
) -> Tensor:
    """Add the bias before the sum."""
    partial = F.linear(x, module.weight, module.bias)
    return ops.reduce_from_region(partial, module.region.comm, module.region.axis)


def unreduced_output(forward: Callable[..., Tensor], module: Any, x: Tensor) -> Tensor:
    """Do not sum the partial results."""
    y = F.linear(x, module.weight)
    return y if module.bias is None else y + module.bias


def first_positions(hook: Callable[..., Any], comm: Comm) -> Any:
    """Every rank takes the positions of the first part of the sequence."""
    degree = comm.degree(TP_AXIS)

    def narrow(_: Any, args: Any) -> Any:
        x, batch = args
        return x, replace(batch, positions=batch.positions.chunk(degree, 1)[0])

    return narrow


class _OwnSums:
    """A communicator whose sums are this rank's own terms."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def all_reduce(self, x: Tensor, axis: Any, *, op: str = "sum") -> Tensor:
        return self.comm.all_reduce(x, axis, op="max") if op == "max" else x


def own_exponentials(loss: Callable[..., Tensor], logits: Tensor, targets: Tensor, **rest: Any):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """The softmax is over this rank's part of the vocabulary."""
    return loss(logits, targets, **{**rest, "comm": _OwnSums(rest["comm"])})


def shifted_rows(init: Callable[..., None], loss: Any, *args: Any, **named: Any) -> None:
    """Count rows from ceil(vocabulary / ranks), as where the vocabulary were padded."""
    init(loss, *args, **named)
    if loss.comm.index(TP_AXIS) > 0:
        loss.lo += 1
        loss.hi += 1


def without_own_target(backward: Callable[..., Any], ctx: Any, gradient: Tensor) -> Any:
    """The term of the target is lost where another rank holds it."""
    found = backward(ctx, gradient)
    return (found[0] * 2, *found[1:])


def unmasked_lookup(
    forward: Callable[..., Tensor], module: VocabParallelEmbedding, tokens: Tensor
) -> Tensor:
    """Tokens of other ranks read row 0."""
    local = tokens - module.lo
    is_local = (local >= 0) & (local < module.weight.shape[0])
    rows = F.embedding(torch.where(is_local, local, 0), module.weight)
    return module.region.leave(rows)


def halved_loss(
    total: Callable[..., PendingTotals], comm: Comm, local: Any, targets: Any
) -> PendingTotals:
    """The logged loss is divided by the number of tensor ranks."""
    return with_loss_times(total(comm, local, targets), 1 / comm.degree(TP_AXIS))


def loss_of_every_copy(
    total: Callable[..., PendingTotals], comm: Comm, local: Any, targets: Any
) -> PendingTotals:
    """Ranks that hold copies of the loss count, too."""
    return with_loss_times(total(comm, local, targets), comm.degree(TP_AXIS))


def with_loss_times(totals: PendingTotals, factor: float) -> PendingTotals:
    """The same totals with another logged loss."""
    return ChangedTotals(totals, lambda numbers: replace(numbers, loss=numbers.loss * factor))


def partial_without(*endings: str) -> Callable[..., Any]:
    """Parameters with these endings are not taken for partial sums over tp."""

    def change(every_name: Callable[..., Any], *args: Any) -> frozenset[str]:
        names = every_name(*args)
        return frozenset(name for name in names if not name.endswith(endings))

    return change


def adapter_behind_the_sum(
    forward: Callable[..., Tensor], module: RowParallelLinear, x: Tensor
) -> Tensor:
    """Add this rank's part of the adapter's output after the sum."""
    y = module.region.leave(F.linear(x, module.weight))
    y = plus_adapter(module, x, y)
    return y if module.bias is None else y + module.bias


def own_squares(_sum: Callable[..., Tensor], _module: RowParallelLinear, squares: Tensor) -> Tensor:
    """Squares of a rank's part of each row are taken for those of the row."""
    return squares


def of_own_width(_sum: Callable[..., Tensor], x: Tensor, region: Region) -> Tensor:
    """The statistic of a norm is that of a rank's own features."""
    return x.sum(-1, keepdim=True) * region.comm.degree(region.axis)


def own_gradient_of_statistic(_sum: Callable[..., Tensor], x: Tensor, region: Region) -> Tensor:
    """The gradient of a statistic is that of a rank's own uses of it."""
    return ops.reduce_from_region(x.sum(-1, keepdim=True), region.comm, region.axis)


def norm_taken_for_partial(axes_with: Callable[..., Any], partial: Any, name: str) -> Any:
    """The gradient of one norm, equal on all tensor ranks, is taken for a partial sum."""
    return (TP_AXIS,) if name == "layer1.mlp_norm.weight" else axes_with(partial, name)


def other_random_state(axis: str) -> Callable[..., None]:
    """Ranks along an axis draw initial values from different seeds."""

    def change(
        materialize: Callable[..., None], model: Any, table: Any, *, seed: int, **rest: Any
    ) -> None:
        materialize(model, table, seed=seed + model.comm.index(axis), **rest)

    return change


MUTANTS = (
    Mutant(
        "tensor_ranks_start_with_identical_shards",
        "half the capacity; the loss does not show it",
        MutantLayout("pp2 tp2"),
        (FunctionFault(INIT, identical_shards),),
        axes=AXIS,
        blocks=("embed",),
        reference=references.PICOTRON_AND_SCALETORCH,
    ),
    Mutant(
        "queries_keys_and_values_are_the_first_shard_on_every_rank",
        "every rank has the heads of the first",
        TP,
        (FunctionFault(INIT, first_shard_of(".q.", ".k.", ".v.")),),
        axes=AXIS,
        blocks=("layer0",),
        reference=references.SCALETORCH,
    ),
    Mutant(
        "the_input_gradient_of_a_column_linear_is_not_reduced",
        "blocks below receive the gradient of this rank's heads only",
        MutantLayout("dp2 tp2", family="gpt2"),
        (FunctionFault("weft.parallel.tensor.region:_Enter.backward", unreduced_input_gradient),),
        axes=AXIS,
        blocks=("head",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_input_gradient_of_one_region_is_summed_twice",
        "an all-reduce too many in the backward",
        TP,
        (CollectiveFault("_Enter.backward", "twice", call=1),),
        axes=AXIS,
        blocks=("layer2",),
    ),
    Mutant(
        "the_bias_of_a_row_linear_is_added_on_every_rank",
        "tp times the bias",
        MutantLayout("tp2", family="gpt2"),
        (
            FunctionFault(
                "weft.parallel.tensor.linear:RowParallelLinear.forward", bias_on_every_rank
            ),
        ),
        axes=AXIS,
        blocks=("layer0", "layer2"),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_output_of_one_attention_is_not_summed",
        "layer1 uses this rank's heads only",
        MutantLayout("dp2 tp2"),
        (ModuleFault("layer1.attn.o", unreduced_output, axis=TP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_output_of_one_mlp_is_averaged",
        "half of it",
        TP,
        (ModuleFault("layer1.mlp.down", result_times(0.5), axis=TP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
    ),
    Mutant(
        "one_rank_sends_zeros_in_a_row_linear",
        "the part of one rank is lost in one forward",
        TP,
        (CollectiveFault(OUTPUT_SUM, "zero", op="all_reduce", place=1, call=2),),
        axes=AXIS,
        blocks=("layer1",),
    ),
    Mutant(
        "row_linears_sum_over_the_wrong_group",
        "tensor ranks sum over the data ranks",
        MutantLayout("dp2 tp2"),
        (CollectiveFault(OUTPUT_SUM, "group", axis=TP_AXIS, other_axis=DP_AXIS),),
        axes=AXIS,
        blocks=("layer0",),
    ),
    Mutant(
        "row_linears_sum_in_bfloat16",
        "partial results lose 16 bits",
        TP,
        (CollectiveFault(OUTPUT_SUM, "bfloat16"),),
        axes=AXIS,
        blocks=("layer0",),
    ),
    Mutant(
        "every_rank_adds_the_first_positions_under_sequence_parallelism",
        "learned positions of the wrong part of the sequence",
        MutantLayout("tp2", family="gpt2", options="--parallel.sequence True"),
        (FunctionFault("weft.parallel.tensor.transform:_local_positions", first_positions),),
        axes=AXIS,
        blocks=("embed",),
    ),
    Mutant(
        "sequence_shards_are_gathered_in_reverse_order",
        "two shards are swapped",
        SP,
        (CollectiveFault("_Enter.forward", "reverse", op="all_gather"),),
        axes=AXIS,
        blocks=("layer0",),
    ),
    Mutant(
        "sequence_shards_are_not_summed",
        "the reduce-scatter of a row linear scatters without a sum",
        SP,
        (CollectiveFault(OUTPUT_SUM, "skip", op="reduce_scatter"),),
        axes=AXIS,
        blocks=("layer0",),
    ),
    Mutant(
        "the_norm_of_one_layer_is_not_summed_over_tp",
        "the list of replicated parameters misses one",
        MutantLayout("dp2 tp2", options="--parallel.sequence True"),
        (
            FunctionFault(
                "weft.parallel.tensor.transform:_every_name",
                partial_without("layer1.mlp_norm.weight"),
            ),
        ),
        axes=AXIS,
        blocks=("layer1",),
        reference=references.TRANSFORMER_ENGINE_NORMS,
    ),
    Mutant(
        "norms_of_queries_and_keys_are_not_summed_over_tp",
        "each rank's norm has the gradient of its own heads",
        MutantLayout("tp2", family="qwen3"),
        (
            FunctionFault(
                "weft.parallel.tensor.transform:_every_name",
                partial_without("q_norm.weight", "k_norm.weight"),
            ),
        ),
        axes=AXIS,
        blocks=("layer2",),
        reference=references.MEGATRON_QK_NORM,
    ),
    Mutant(
        "the_cut_cross_entropy_forgets_the_other_ranks_exponentials",
        "each rank's softmax is over its own part of the vocabulary",
        MutantLayout("dp2 tp2"),
        (FunctionFault("weft.parallel.tensor.vocab:vocab_cross_entropy", own_exponentials),),
        axes=AXIS,
        blocks=("loss",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "the_vocabulary_is_cut_as_if_tp_divided_it",
        "targets of a rank are off by one",
        GPT2,
        (FunctionFault("weft.parallel.tensor.vocab:VocabParallelLoss.__init__", shifted_rows),),
        axes=AXIS,
        blocks=("loss",),
        reference=references.MEGATRON_VOCABULARY,
    ),
    Mutant(
        "the_backward_of_the_cut_cross_entropy_is_too_large",
        "gradients tp times too large from the loss on",
        TP,
        (
            FunctionFault(
                "weft.parallel.tensor.vocab:_VocabCrossEntropy.backward", without_own_target
            ),
        ),
        axes=AXIS,
        blocks=("loss", "head"),
        reference=references.TORCHTITAN_CHUNKED_LOSS,
    ),
    Mutant(
        "tokens_of_other_ranks_read_row_0_of_the_embedding",
        "the sum over ranks has a row too many",
        TP,
        (
            FunctionFault(
                "weft.parallel.tensor.vocab:VocabParallelEmbedding.forward", unmasked_lookup
            ),
        ),
        axes=AXIS,
        blocks=("embed",),
    ),
    Mutant(
        "the_logged_loss_is_divided_by_tp",
        "the log says half",
        MutantLayout("cp2 tp2"),
        (FunctionFault("weft.train.step:total_stats", halved_loss),),
        axes=AXIS,
        blocks=("loss", ""),
        reference=references.TORCHTITAN_LOSS,
    ),
    Mutant(
        "copies_of_the_loss_are_logged_too",
        "the log says tp times the loss",
        TP,
        (FunctionFault("weft.train.step:total_stats", loss_of_every_copy),),
        axes=AXIS,
        blocks=("loss", ""),
        reference=references.TORCHTITAN_LOSS,
    ),
    Mutant(
        "data_ranks_start_from_different_random_states",
        "replicas are never equal",
        MutantLayout("dp2"),
        (FunctionFault("weft.train.build:materialize_params", other_random_state(DP_AXIS)),),
        axes=(DP_AXIS,),
        blocks=("embed",),
        reference=references.MEGATRON_RANDOM_STATE,
    ),
    Mutant(
        "tensor_ranks_start_from_different_random_states",
        "the model is another one on every layout",
        TP,
        (FunctionFault("weft.train.build:materialize_params", other_random_state(TP_AXIS)),),
        axes=AXIS,
        blocks=("embed",),
        reference=references.TORCHTITAN_NOISE,
    ),
    Mutant(
        "adapters_of_row_linears_are_added_behind_the_sum",
        "each rank adds its own part",
        MutantLayout("tp2", family="gpt2", options="--lora.rank 3"),
        (
            FunctionFault(
                "weft.parallel.tensor.linear:RowParallelLinear.forward", adapter_behind_the_sum
            ),
        ),
        axes=AXIS,
        blocks=("layer*",),
        reference="",
    ),
    Mutant(
        "the_gradient_of_a_replicated_adapter_matrix_is_not_summed",
        "ranks hold different A",
        LORA,
        (FunctionFault("weft.parallel.tensor.transform:_every_name", partial_without(LORA_A)),),
        axes=AXIS,
        blocks=("layer2",),
    ),
    Mutant(
        "the_gradient_of_a_replicated_adapter_product_is_not_summed",
        "ranks hold different B",
        LORA,
        (FunctionFault("weft.parallel.tensor.transform:_every_name", partial_without(LORA_B)),),
        axes=AXIS,
        blocks=("layer2",),
    ),
    Mutant(
        "every_rank_holds_the_same_rows_of_the_adapter",
        "A is drawn from the first shard",
        LORA,
        (FunctionFault(INIT, first_shard_of(LORA_A)),),
        axes=AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "norms_of_magnitudes_are_those_of_a_shard",
        "rows of row-parallel weights are shorter on each rank",
        MutantLayout("tp2", options="--lora.rank 3 --lora.dora True"),
        (
            FunctionFault(
                "weft.parallel.tensor.linear:RowParallelLinear._sum_over_ranks", own_squares
            ),
        ),
        axes=AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "a_norm_over_all_heads_normalises_each_ranks_own",
        "its statistic is that of the own shard",
        WIDE_NORM,
        (FunctionFault(STATISTIC, of_own_width),),
        axes=AXIS,
        blocks=("layer0",),
    ),
    Mutant(
        "the_gradient_of_a_statistic_over_ranks_is_not_summed",
        "gradients of queries and keys lack what other ranks normalise",
        WIDE_NORM,
        (FunctionFault(STATISTIC, own_gradient_of_statistic),),
        axes=AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "adapter_outputs_are_summed_twice",
        "the adapter's part of a region is tp times too large",
        LORA,
        (ModuleFault("layer1.attn.o.lora_b", result_times(2.0), axis=TP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
    ),
    Mutant(
        "the_gradient_that_leaves_a_region_is_too_large",
        "the backward of a row linear multiplies by tp",
        TP,
        (ModuleFault("layer1.mlp.down", gradient_times(2.0), axis=TP_AXIS),),
        axes=AXIS,
        blocks=("layer1",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "a_replicated_norm_is_summed_over_tp_without_sequence_parallelism",
        "equal gradients are added up",
        TP,
        (FunctionFault("weft.parallel.model.parallelize:_axes_with", norm_taken_for_partial),),
        axes=AXIS,
        blocks=("layer1",),
        reference=references.MEGATRON_COMPOSITION,
    ),
    Mutant(
        "products_of_two_parts_of_the_sequence_are_exchanged",
        "parts that arrive one after the other are put in another order",
        CHUNKS,
        (FunctionFault(f"{CHUNKED}:gathered_products", with_parts_exchanged),),
        axes=AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "sums_of_parts_are_sent_to_the_wrong_rank",
        "each rank multiplies the parts of the sequence in another order than it sends their sums",
        CHUNKS,
        (FunctionFault(f"{CHUNKED}:scattered_product", of_other_parts),),
        axes=AXIS,
        blocks=("layer*",),
    ),
    Mutant(
        "a_sum_of_parts_is_that_of_the_product_before",
        "a buffer of sums under way is read before they have arrived",
        CHUNKS,
        (CollectiveFault("scattered_product", "stale", op="recv", place=1),),
        axes=AXIS,
        blocks=("layer*",),
    ),
)
