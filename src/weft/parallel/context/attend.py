"""Context parallelism: implementations of the `Attend` seam for ranks that each hold part of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.attention_mask import ALL_FEATURES, AttentionMask
from weft.core.dimension import pipeline_axis
from weft.core.entry_places import WHOLE
from weft.core.sequence import Context, SequenceBlocks
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.models.common.attention import (
    AttentionImplementation,
    FusedAttention,
    set_implementations,
)
from weft.models.common.attention_spec import AttentionSpec
from weft.models.common.batch import Batch
from weft.parallel.context.blocks import BlockAttention
from weft.parallel.context.documents import document_ranges, whole_documents_of
from weft.parallel.context.dropout_columns import column_shards
from weft.parallel.context.kv_exchange import AllGatherExchange, KVExchange
from weft.parallel.context.position_sum import replace_position_sums
from weft.parallel.context.probe import check_blocks
from weft.parallel.context.ring import RingExchange
from weft.parallel.context.ulysses import UlyssesAttention
from weft.parallel.context.whole_sequences import WholeSequences, WholeUse, work_on_whole_sequences
from weft.parallel.cp import AXIS
from weft.parallel.model.chain import ChainSnapshot
from weft.parallel.model.dropout_blocks import DropoutShards, calls_of, drops_out


class BlockwiseAttention:
    """Queries stay on their rank; keys and values of the other ranks are received, and attended to
    block by block.
    """

    supports = ALL_FEATURES
    alternative = "--parallel.context ulysses"
    left_out = ("__call__",)

    def __init__(self, exchange: KVExchange, *, name: str) -> None:
        self.exchange = exchange
        self.name = name
        self._last_documents: Tensor | None = None
        self._last_blocks: dict[AttentionMask, SequenceBlocks] = {}

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW."""
        whole_documents = self._whole_documents(batch, spec)
        length = q_BSHK.shape[1] * self.exchange.num_ranks
        blocks = self._blocks(length, spec.mask, whole_documents)
        attention = BlockAttention(self.exchange, spec, blocks, whole_documents)
        return attention(q_BSHK, k_BSGK, v_BSGW)

    def _whole_documents(self, batch: Batch, spec: AttentionSpec) -> Tensor | None:
        return whole_documents_of(batch) if spec.mask.documents else None

    def _blocks(self, length: int, mask: AttentionMask, documents: Tensor | None) -> SequenceBlocks:
        """Computed once for all layers that attend alike within the same documents."""
        known = self._last_blocks.get(mask)
        # By identity: to compare values would wait for the device in every layer, and a batch
        # is one object for all of them.
        if known is not None and known.length == length and documents is self._last_documents:
            return known
        if documents is not self._last_documents:
            self._last_documents = documents
            self._last_blocks.clear()
        num_ranks = self.exchange.num_ranks
        self._last_blocks[mask] = SequenceBlocks(
            length,
            num_ranks,
            mask,
            documents=None if documents is None else document_ranges(documents, num_ranks),
            has_documents=documents is not None,
        )
        return self._last_blocks[mask]


def ring(comm: Comm) -> BlockwiseAttention:
    """Keys and values pass around a ring."""
    return BlockwiseAttention(RingExchange(comm, AXIS), name="ring")


def all_gather(comm: Comm) -> BlockwiseAttention:
    """Keys and values are gathered by every rank."""
    return BlockwiseAttention(AllGatherExchange(comm, AXIS), name="all-gather")


VARIANTS: Mapping[Context, Callable[[Comm], AttentionImplementation]] = {
    "ring": ring,
    "allgather": all_gather,
    "ulysses": UlyssesAttention,
}


def transform(
    blocks: dict[str, nn.Module],
    *,
    plan: Plan,
    comm: Comm,
    dropout: DropoutShards,
    chain: ChainSnapshot | None = None,
    **_unused: object,
) -> tuple[str, ...]:
    """The transform of the dimension cp: attention reads the keys and values of every rank along
    it.

    Raises:
        PlanError: as `apply`; or a block of a user's model that mixes tokens in another way than by
            `Attend`.
    """
    if comm.degree(AXIS) == 1:
        return ()
    apply(blocks, comm=comm, variant=plan.context)
    replace_position_sums(blocks, comm, AXIS)
    gathered = _gathered_blocks(blocks, plan, here=comm.index(pipeline_axis()))
    sequences = WholeSequences(comm, AXIS)
    for block, how in {blocks[name]: how for name, how in gathered.items()}.items():
        # counters of dropout know no parts of a block
        part = "" if drops_out([block]) else how.part
        work_on_whole_sequences(block, sequences, part=part)
    if chain is not None:
        shards = dict(calls_of(chain, comm, AXIS, column_shards))
        for name in gathered:
            shards[name] = tuple((WHOLE,) * len(call) for call in shards[name])
        dropout.add(shards)
    return ()


def gathered_blocks(blocks: Mapping[str, nn.Module], plan: Plan) -> dict[str, WholeUse]:
    """Blocks of a whole model that work on whole sequences under the plan's cp, and why.

    Raises:
        PlanError: as `transform`.
    """
    found: dict[str, WholeUse] = {}
    for rank in range(plan.mesh.degree(pipeline_axis())):
        found |= _gathered_blocks(blocks, plan, here=rank)
    return found


def _gathered_blocks(
    blocks: Mapping[str, nn.Module], plan: Plan, *, here: int
) -> dict[str, WholeUse]:
    """Those on a pipeline rank; the others mix tokens by `Attend` alone."""
    vocab = _vocab(plan)
    *_, head, _loss = ("", *(name for stage in plan.stages for name in stage.blocks))
    gathered: dict[str, WholeUse] = {}
    for number, stage in enumerate(plan.stages):
        if plan.table.stage_to_rank[number] != here:
            continue
        hidden_shape = None
        if number > 0:
            _batch, _seq, *sizes = plan.stages[number - 1].out
            hidden_shape = tuple(int(size) for size in sizes)
        gathered |= check_blocks(
            {name: blocks[name] for name in stage.blocks},
            hidden_shape=hidden_shape,
            length=plan.seq_len,
            degree=plan.mesh.degree(AXIS),
            vocab=vocab,
            head=head,
        )
    if gathered and plan.sequence_parallel:
        name, how = next(iter(gathered.items()))
        what = f"{name} {how.reason}; and it gathers no sequence of which tp ranks hold parts"
        fix = "--parallel.sequence False, or a mesh without cp"
        raise PlanError(Fault("parallel.sequence", what, got="True", need="False", fix=fix))
    return gathered


def _vocab(plan: Plan) -> int | None:
    """Number of token ids of the plan's family; None where it is none of weft's or a user's."""
    if plan.family not in FAMILIES:
        return None
    config = FAMILIES[plan.family].Config.model_validate_json(plan.architecture)
    return config.axis_sizes().get("vocab")


def whole_sequence_attentions(blocks: Iterable[nn.Module]) -> Iterator[FusedAttention]:
    """The implementations below these blocks that attend over whole sequences on one device."""
    for block in blocks:
        for module in block.modules():
            implementation = getattr(module, "implementation", None)
            if isinstance(implementation, UlyssesAttention):
                yield implementation.inner
            elif isinstance(implementation, FusedAttention):
                yield implementation


def apply(blocks: Mapping[str, nn.Module], *, comm: Comm, variant: Context) -> None:
    """Let the attention in these named blocks reach the keys of every rank along cp.

    Raises:
        PlanError: an `Attend` that requires what the variant does not support, or does not declare
            what it requires.
    """
    implementation = VARIANTS[variant](comm)
    for name, block in blocks.items():
        # One object for all blocks, so that which scores are computed is found once a batch.
        set_implementations(block, lambda: implementation, name=name)
