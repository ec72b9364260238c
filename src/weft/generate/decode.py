"""Decoding: a stored model on this rank, its cached forward, and the loop that adds one token to every row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint import restore
from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.core.axes import span
from weft.core.model_config import ModelConfig
from weft.errors import Fault, PlanError
from weft.generate.cache import (
    DecodeBatch,
    attend_without_cache,
    compute_logits,
    decode_batch,
    install_kv_cache,
)
from weft.generate.sample import TokenPosition
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import chain
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.model.dropout_blocks import without_dropout
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.parallel.model.recorded_buffers import with_records
from weft.parallel.pipeline.forward import gather_vocabulary, run_stages
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.train.init_from import lazy_blocks, place_buffers

LOGITS_DIMS = 3
TRAINING_BLOCKS = ("loss", "mtp")
"""Blocks (by the beginning of their names) that only training reads."""


def load_model(
    family: Family, config: ModelConfig, source: Source, *, plan: Plan, comm: Comm
) -> ParallelModel:
    """This rank's part of the stored model, in the plan's `compute`; each rank reads its own
    shards.

    Raises:
        CheckpointError: a tensor that is missing, damaged or of another shape; it names it.
    """
    blocks = lazy_blocks(family, config)
    model = parallelize(blocks, plan, comm, axes=family.axes(config), ties=family.ties(config))
    model = with_records(model)
    dtype: torch.dtype = getattr(torch, plan.compute)
    place_buffers(model.blocks.values(), device=comm.device, dtype=dtype)
    for module in model.buffer_records.modules.values():
        # records of buffers would change them as in training
        module.eval()
    for param in model.params.values():
        values = torch.empty(param.shape, device=comm.device, dtype=dtype)
        allocated = nn.Parameter(values, requires_grad=False)
        torch.utils.swap_tensors(param, allocated)  # the modules that hold it keep the same object
    restore.load_model(model, source)
    return model


class Decoder:
    """A model and the cached rows of tokens that it has read. All ranks of the mesh call it alike;
    ranks along ep have rows of their own, those along dp and cp the same rows.

    It takes the model over: its attention computes with a cache from now on. A model without an
    `Attend`, or with blocks that mix positions beside it, reads every text anew for each of its
    tokens: only what `Attend` reads is cached.

    Args:
        vocab: entries of the whole vocabulary.
        max_positions: positions that the model has learned; None: it computes any number.
    """

    def __init__(
        self, model: ParallelModel, *, vocab: int, max_positions: int | None = None
    ) -> None:
        self.model = model
        self.vocab = vocab
        self.max_positions = max_positions
        # of all stages: one that reads anew needs the whole text from the stage before
        reads_anew = self._any_rank(needs_whole_texts(model.stages.values()))
        install = attend_without_cache if reads_anew else install_kv_cache
        self.caches = install(model.stages)
        compute_logits(model.stages)
        self.lengths: list[int] = []
        # a stage without attention has none, and must still go along with those that have
        self.has_caches = self._any_rank(bool(self.caches))
        self.texts: list[list[int]] = []
        """Whole rows, of a model without caches."""

    def _any_rank(self, value: bool) -> bool:
        """Whether it is true in any stage; the same on every rank, which all call it."""
        comm = self.model.comm
        count = torch.tensor([int(value)], dtype=torch.int64, device=comm.device)
        return bool(comm.all_reduce(count, PP).item())

    @property
    def is_last(self) -> bool:
        """Whether this rank is of the stage that yields logits."""
        last_rank = self.model.plan.table.stage_to_rank[-1]
        return last_rank == self.model.comm.index(PP)

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Read the next tokens of each row, one at least: logits_BV behind its last one; None
        before the last stage.
        """
        # the first read, or the first after a reset: from here on rows keep their places
        if not self.lengths:
            self.lengths = [0] * len(rows)
            self.texts = [[] for _ in rows]
        if not self.has_caches:
            return self._read_anew(rows)
        logits_BV = self._read_from(self.lengths, rows)
        for row, tokens in enumerate(rows):
            self.lengths[row] += len(tokens)
        return logits_BV

    def _read_from(
        self, first_positions: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """Read tokens that stand at these positions of their rows."""
        counts = [len(row) for row in rows]
        longest = max(counts, default=1)
        batch = decode_batch(
            self._padded(rows, length=longest), first_positions, max_positions=self.max_positions
        )
        lasts = [count - 1 for count in counts]
        with (
            torch.no_grad()
        ):  # not inference_mode: its tensors must not be written by the threads of gloo
            return self._forward(batch, lasts)

    def _read_anew(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Read each row from its beginning, one after the other: nothing says that the model's own
        modules do not see what a shorter row is filled up with.
        """
        for text, row in zip(self.texts, rows, strict=True):
            text.extend(row)
        comm = self.model.comm
        # ranks along ep have rows of their own, and every rank takes part in as many reads
        count = torch.tensor([len(rows)], dtype=torch.int64, device=comm.device)
        num_reads = int(comm.all_reduce(count, EP, op="max").item())
        parts = []
        for place in range(num_reads):
            own = self.texts[place : place + 1]  # none, where other ranks have more rows
            parts.append(self._read_from([0] * len(own), own))
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        device = self.model.comm.device
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        for cache in self.caches:
            cache.keep_rows(index)
        self.lengths = [self.lengths[row] for row in rows]
        self.texts = [self.texts[row] for row in rows]

    def keep_first(self, num_tokens: int) -> None:
        """Keep the first tokens of each row alone: what is read next follows them."""
        self.lengths = [num_tokens for _ in self.lengths]
        self.texts = [text[:num_tokens] for text in self.texts]

    def reset(self) -> None:
        """Drop all rows, and release the memory of the caches."""
        for cache in self.caches:
            cache.clear()
        self.lengths = []
        self.texts = []

    def _padded(self, rows: Sequence[Sequence[int]], *, length: int) -> Tensor:
        """tokens_BS, filled up behind shorter rows; with sequence parallelism every tp rank gets as
        many columns.
        """
        unit = self._num_sequence_parts
        num_units = -(-length // unit)
        tokens_BS = torch.zeros(len(rows), num_units * unit, dtype=torch.int64)
        for number, row in enumerate(rows):
            length_of_row = len(row)
            tokens_BS[number, :length_of_row] = torch.tensor(row)
        return tokens_BS.to(self.model.comm.device)

    @property
    def _num_sequence_parts(self) -> int:
        """Ranks along tp that share the columns of a sequence between tensor-parallel regions."""
        if not self.model.plan.sequence_parallel:
            return 1
        return self.model.comm.degree(TP)

    def _forward(self, batch: DecodeBatch, lasts: Sequence[int]) -> Tensor | None:
        num_rows, length = batch.inputs.shape
        cp = self.model.comm.degree(CP)  # not used here: each of its ranks has all columns
        sizes = {"micro_size": num_rows, "seq_len": length * cp}
        plan = self.model.plan.model_copy(update=sizes)

        def play(stage: int, x: Any) -> Any:
            return self._run_stage(stage, x, batch, lasts)

        x = run_stages(self.model, batch.inputs, play=play, plan=plan)
        if not self.is_last:
            return None
        return gather_vocabulary(x, self.model, vocab=self.vocab)

    def _run_stage(self, stage: int, x: Any, batch: DecodeBatch, lasts: Sequence[int]) -> Any:
        """x_BSD through a stage's blocks; the last stage yields logits_BV behind each row's last
        token.
        """
        has_columns = self._num_sequence_parts == 1
        is_selected = False
        for name, block in inference_blocks(self.model.stages[stage]).items():
            # the head costs as much as several blocks for each position, and one of them is needed
            if has_columns and _reads_columns(name, block, x, length=batch.inputs.shape[1]):
                x = _select_columns(x, lasts).unsqueeze(1)
                is_selected = True
            x = chain({name: block}, x, batch).x
        if stage + 1 < len(self.model.plan.table.stage_to_rank):
            return x
        if not isinstance(x, Tensor) or x.dim() != LOGITS_DIMS:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            what = "its last output is no logits of each token, so it generates no text"
            need = "one tensor of [sequences, tokens, vocabulary]"
            raise PlanError(Fault("model", what, got=f"{got}", need=need))
        if is_selected:
            return x.squeeze(1)
        return _select_columns(x, lasts)


def _reads_columns(name: str, block: nn.Module, x: Any, *, length: int) -> bool:
    """Whether a block computes the logits behind a token from one column of one tensor alone."""
    if name != "head" or getattr(without_dropout(block), "needs_whole_texts", False):
        return False
    return isinstance(x, Tensor) and x.shape[1] == length


def needs_whole_texts(stages: Iterable[nn.ModuleDict]) -> bool:
    """Whether some block reads other tokens by code of its own, or counts positions by itself."""
    blocks = (without_dropout(block) for stage in stages for block in stage.values())
    return any(getattr(block, "needs_whole_texts", False) for block in blocks)


def inference_blocks(stage: nn.ModuleDict) -> Mapping[str, nn.Module]:
    """The blocks of a stage that text is generated with."""
    return {name: block for name, block in stage.items() if not name.startswith(TRAINING_BLOCKS)}


def _select_columns(x_BSD: Tensor, columns: Sequence[int]) -> Tensor:
    """One column of each row: x_BD."""
    device = x_BSD.device
    rows_B = torch.arange(len(columns), device=device)
    columns_B = torch.tensor(columns, dtype=torch.int64, device=device)
    return x_BSD[rows_B, columns_B]


@dataclass
class TextRow:
    """One text in progress.

    Attributes:
        sample: its number among those of the same prompt.
        tokens: what was sampled so far.
        num_read: tokens of the prompt that the decoder has read before.
    """

    prompt: tuple[int, ...]
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    num_read: int = 0

    @property
    def next_position(self) -> TokenPosition:
        """The position of the next token, by which it is sampled."""
        return TokenPosition(sample=self.sample, position=len(self.prompt) + len(self.tokens))


ChooseToken = Callable[[Tensor, TokenPosition], int]
"""From logits_V to a token."""

IsFinished = Callable[[TextRow], bool]
"""Called with each row that has a new token; it must answer alike on every rank."""


def decode(
    decoder: Decoder, rows: Sequence[TextRow], *, choose: ChooseToken, is_finished: IsFinished
) -> Iterator[tuple[TextRow, ...]]:
    """Add one token after the other to each row until all are finished; yields the rows that have a
    new one.

    Every rank of the mesh must iterate to the end, with equal rows. Ranks along ep share the rows
    out, one after another.
    """
    shares = RowShares(rows, decoder.model.comm)
    logits_BV = decoder.read([row.prompt[row.num_read :] for row in shares.own])
    while True:
        chosen = []
        if logits_BV is not None:
            for logits_V, row in zip(logits_BV, shares.own, strict=True):
                chosen.append(choose(logits_V, row.next_position))
        extended = shares.all_rows
        tokens = _gather_tokens(chosen, shares, decoder)
        for row, token in zip(extended, tokens, strict=True):
            row.tokens.append(token)
        # called on every rank with every row, in one order: the ranks then keep the same rows
        finished = {id(row) for row in extended if is_finished(row)}
        # before rows are dropped: the caller sees also what the finished ones got last
        yield extended
        if len(finished) == len(extended):
            return
        kept = []
        for place, row in enumerate(shares.own):
            if id(row) not in finished:
                kept.append(place)
        if len(kept) < len(shares.own):
            # before the next read: a finished row would grow and take time for nothing
            decoder.keep_rows(kept)
        shares.remove(finished)
        # may be empty on a rank along ep whose rows are all finished: it takes part in the others' exchanges
        last_tokens = [row.tokens[-1:] for row in shares.own]
        logits_BV = decoder.read(last_tokens)


class RowShares:
    """The unfinished rows of every rank along ep: consecutive shares of all rows."""

    def __init__(self, rows: Sequence[TextRow], comm: Comm) -> None:
        self.index = comm.index(EP)
        self.shares: list[list[TextRow]] = []
        num_shares = comm.degree(EP)
        for number in range(num_shares):
            start, stop = span(len(rows), num_shares, number)
            share = list(rows[start:stop])
            self.shares.append(share)

    @property
    def own(self) -> list[TextRow]:
        """The rows of this rank."""
        return self.shares[self.index]

    @property
    def all_rows(self) -> tuple[TextRow, ...]:
        """Those of all ranks, in order."""
        return tuple(row for share in self.shares for row in share)

    @property
    def sizes(self) -> list[int]:
        """Rows of each rank."""
        return [len(share) for share in self.shares]

    def remove(self, finished: Collection[int]) -> None:
        """Drop the rows of these ids."""
        for share in self.shares:
            share[:] = [row for row in share if id(row) not in finished]


def _gather_tokens(chosen: Sequence[int], shares: RowShares, decoder: Decoder) -> list[int]:
    """Every rank's tokens, in the order of rows, from those that the last stage has chosen."""
    comm = decoder.model.comm
    tokens = torch.zeros(len(shares.own), dtype=torch.int64)
    if chosen:
        tokens = torch.tensor(chosen, dtype=torch.int64)
    tokens = tokens.to(comm.device)
    if shares.own:
        last_rank = decoder.model.plan.table.stage_to_rank[-1]
        tokens = comm.broadcast_(tokens, PP, root=last_rank)
    # also where this rank has no rows left: the others need its part of no elements
    gathered = comm.all_gather(tokens, EP, sizes=shares.sizes)
    return [int(token) for token in gathered]
