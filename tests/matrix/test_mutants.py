"""Each deliberate defect that trains silently wrong numbers makes the comparison with one device fail.

Most of these shipped in systems that people trained with; docs/anchors of the kind are in each
mutant's line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.matrix.layouts import Case, check
from weft.comm import ops
from weft.comm.transport import Work
from weft.core.axes import Box
from weft.core.shard import Shard
from weft.errors import CommError
from weft.models.common import init
from weft.models.common.batch import Batch
from weft.parallel.context import attend, ring
from weft.parallel.model import parallelize as parallelize_module
from weft.parallel.pipeline import player
from weft.parallel.tensor import linear as tensor_linear
from weft.parallel.tensor import region, vocab
from weft.parallel.tensor import transform as tensor_transform
from weft.parallel.zero import grad_norm
from weft.parallel.zero.param_group import ParamGroup
from weft.train import data_loader, step

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Case, Patch]] = {}


def mutant(case: Case) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        assert patch.__doc__, "say what goes wrong"
        MUTANTS[patch.__name__] = case, patch
        return patch

    return register


@mutant(Case("dp2", microbatches=2))
def gradients_are_never_reduced(patch: pytest.MonkeyPatch) -> None:
    """Data ranks drift apart."""
    patch.setattr(ParamGroup, "_start_collective", lambda self, unsharded: Work.done(unsharded))


@mutant(Case("dp2", microbatches=2))
def gradients_are_averaged_although_the_loss_is_normalised_globally(
    patch: pytest.MonkeyPatch,
) -> None:
    """Gradients come out 1 / dp too small; AdamW hides it from the loss."""

    def average(self: ParamGroup, unsharded: Tensor) -> Work:
        return self.comm.start_all_reduce_(unsharded, self.axes, op="avg")

    patch.setattr(ParamGroup, "_start_collective", average)


@mutant(Case("dp2", microbatches=2, bucket_bytes=2**20))
def two_parameters_are_swapped_in_one_ranks_bucket(patch: pytest.MonkeyPatch) -> None:
    """Two gradients of equal shape are summed crosswise."""
    right = ParamGroup.__init__
    one, other = "layer0.attn_norm.weight", "layer0.mlp_norm.weight"

    def swapped(self: ParamGroup, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        if {one, other} <= self.params.keys() and next(calls) == 0:
            views = self._grad_views
            views[one], views[other] = views[other], views[one]
            for name in (one, other):
                self.params[name].grad = views[name]

    calls = count()
    patch.setattr(ParamGroup, "__init__", swapped)


@mutant(Case("dp2", microbatches=3))
def gradients_are_reduced_after_the_first_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """The later micro-batches stay local."""
    right = player.Player.__init__

    def early(self: player.Player, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.last_backward = {
            stage: act._replace(mb=0) for stage, act in self.last_backward.items()
        }

    patch.setattr(player.Player, "__init__", early)


@mutant(Case("dp2 tp2", microbatches=2))
def the_gradient_rule_names_the_wrong_axis(patch: pytest.MonkeyPatch) -> None:
    """Replicated parameters are summed over tp instead of dp."""
    patch.setattr(
        parallelize_module,
        "gradient_axes",
        lambda mesh, *, varies, sharded: ("tp",) if not sharded else (),
    )


@mutant(Case("tp2", sequence=True))
def norms_under_sequence_parallelism_are_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """Each rank's norm sees the gradient of its own tokens only."""
    patch.setattr(parallelize_module, "gradient_axes", lambda mesh, *, varies, sharded: ())


@mutant(Case("tp2"))
def tensor_ranks_start_with_identical_shards(patch: pytest.MonkeyPatch) -> None:
    """Half the capacity; the loss does not show it."""
    right = init.init_params

    def same(params: Any, table: Any, *, shards: Any = None, **rest: Any) -> None:
        first = {name: Shard((Box.whole(param.shape),)) for name, param in params.items()}
        right(params, table, shards=first, **rest)

    patch.setattr(parallelize_module, "init_params", same)


@mutant(Case("tp2", family="gpt2"))
def the_input_gradient_of_a_column_linear_is_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Blocks below see the gradient of this rank's heads only."""

    right = region._Enter.backward

    def backward(ctx: Any, dx: Tensor) -> Any:
        comm = ctx.region.comm
        ctx.region = replace(ctx.region, comm=_Deaf(comm))
        return right(ctx, dx)

    patch.setattr(region._Enter, "backward", staticmethod(backward))


class _Deaf:
    """A comm whose all-reduce returns its input."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def start_all_reduce(self, x: Tensor, axis: Any) -> Work:
        return Work.done(x.clone())


@mutant(Case("tp2", family="gpt2"))
def the_bias_of_a_row_linear_is_added_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """tp times the bias."""

    def forward(self: tensor_linear.RowParallelLinear, x: Tensor) -> Tensor:
        return ops.reduce_from_region(
            torch.nn.functional.linear(x, self.weight, self.bias),
            self.region.comm,
            self.region.axis,
        )

    patch.setattr(tensor_linear.RowParallelLinear, "forward", forward)


@mutant(Case("tp2", sequence=True, family="gpt2"))
def every_rank_adds_the_first_positions_under_sequence_parallelism(
    patch: pytest.MonkeyPatch,
) -> None:
    """Learned positions of the wrong part of the sequence."""

    def of_the_first_rank(comm: Any) -> Any:
        def first(_: torch.nn.Module, args: Any) -> Any:
            x, batch = args
            return x, replace(batch, positions=batch.positions.chunk(comm.degree("tp"), 1)[0])

        return first

    patch.setattr(tensor_transform, "_local_positions", of_the_first_rank)


@mutant(Case("tp2"))
def the_cut_cross_entropy_forgets_the_other_ranks_exponentials(patch: pytest.MonkeyPatch) -> None:
    """Each rank's softmax is over its own part of the vocabulary."""
    right = vocab.vocab_cross_entropy

    def alone(logits: Tensor, targets: Tensor, *, lo: int, comm: Any, axis: Any) -> Tensor:
        return right(logits, targets, lo=lo, comm=_Alone(comm), axis=axis)

    patch.setattr(vocab, "vocab_cross_entropy", alone)


class _Alone:
    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def all_reduce(self, x: Tensor, axis: Any, *, op: str = "sum") -> Tensor:
        return self.comm.all_reduce(x, axis, op=op) if op == "max" else x


@mutant(Case("pp2", family="gpt2"))
def tied_embeddings_are_not_summed_across_stages(patch: pytest.MonkeyPatch) -> None:
    """Embedding and head drift apart."""
    patch.setattr(grad_norm, "sum_tied_gradients", lambda model, reducer: None)


@mutant(Case("pp2", family="gpt2"))
def a_tied_parameter_counts_twice_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """The logged norm and the clipping are wrong."""
    patch.setattr(grad_norm, "is_first_holder", lambda model, name, sharded_over=(): True)


@mutant(Case("tp2"))
def replicated_parameters_count_once_a_rank_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Norm weights count tp times."""
    patch.setattr(grad_norm, "_is_first_replica", lambda piece, comm, sharded_over: True)


@mutant(Case("pp2 tp2"))
def clipping_uses_the_norm_of_this_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank clips by another factor."""
    right = step.TrainStep._total_stats

    def local(self: step.TrainStep, *args: Any, **named: Any) -> Any:
        norm = grad_norm.squared_norm(self.model, self.grads).sqrt()
        return replace(right(self, *args, **named), grad_norm=norm)

    patch.setattr(step.TrainStep, "_total_stats", local)


@mutant(Case("dp2", microbatches=2))
def the_loss_is_divided_by_this_ranks_own_number_of_targets(patch: pytest.MonkeyPatch) -> None:
    """Wrong as soon as masks are unequal."""

    def local(self: step.TrainStep, batches: Any) -> Tensor:
        return torch.stack([batch.num_targets() for batch in batches]).sum().double() * 2

    patch.setattr(step.TrainStep, "_count_targets", local)


@mutant(Case("dp2", microbatches=2))
def every_data_rank_trains_on_the_same_samples(patch: pytest.MonkeyPatch) -> None:
    """Half of the data is never seen."""
    right = data_loader.layout_of
    patch.setattr(
        data_loader, "layout_of", lambda samples, *, index, **rest: right(samples, index=0, **rest)
    )


@mutant(Case("pp2", microbatches=2))
def the_last_micro_batch_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """Its gradients never come."""
    right = player.Player._backward

    def drop(self: player.Player, state: Any, act: Any) -> None:
        if act.mb == 1:
            state.seed = state.seed * 0
        right(self, state, act)

    patch.setattr(player.Player, "_backward", drop)


@mutant(Case("cp2", microbatches=2))
def gradients_are_not_reduced_over_cp(patch: pytest.MonkeyPatch) -> None:
    """Each rank learns from its own columns: picotron's and ScaleTorch's where dp is 1."""
    patch.setattr(parallelize_module, "gradient_axes", lambda mesh, *, varies, sharded: ())


@mutant(Case("cp2", microbatches=2))
def every_cp_rank_counts_positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    """Rotary angles of the wrong columns."""
    right = Batch.columns

    def local(self: Batch, *, index: int, degree: int) -> Batch:
        own = right(self, index=index, degree=degree)
        return replace(own, positions=torch.arange(own.inputs.shape[1]).expand_as(own.positions))

    patch.setattr(Batch, "columns", local)


@mutant(Case("cp2", microbatches=2))
def attention_never_leaves_the_rank(patch: pytest.MonkeyPatch) -> None:
    """Ring attention silently not used: ScaleTorch read its flag too early."""
    patch.setattr(attend, "apply", lambda blocks, *, comm, variant: None)


@mutant(Case("cp2", grouped=True, microbatches=2))
def gradients_of_keys_and_values_do_not_come_home(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps what it found itself."""
    patch.setattr(ring.RingAccumulator, "finish", lambda self: (self.hop.wait(), self.own)[1])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, patch = MUTANTS[name]
    check(case)
    patch(monkeypatch)
    with pytest.raises(
        (AssertionError, CommError),
        match=r"relative difference|arrived after its group was reduced",
    ):
        check(case)
