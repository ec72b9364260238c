"""Check that a block mixes tokens through `Attend` alone: under cp, other token mixing would use only a rank's own positions.

Each block computes a drawn batch twice: whole sequences, and the columns of each context-parallel
rank. While it does, its `Attend` seams return each token's own values, scaled by functions of its own
query and key. A block whose other layers treat every token by itself yields the same columns both
times; one with attention of its own, a convolution over the sequence or positions that it counts
itself (also in a rotation of queries and keys alone) does not. Documents that `Attend` is given must
be the columns of those of the whole sequences.

Note [Sizes of the probe]
    Sequences have the run's length, and as many ranks share them as in the run, where that costs at
    most MOST_WORK for all blocks; else the longest that does. Blocks of more than MOST_ENTRIES are not
    computed, nor those like an earlier one once MOST_ALL entries have been. What was not computed at
    the run's length runs there without memory, where no instruction of the user's code may run that
    did not run with values.
    Ids are drawn from the whole vocabulary, and those that the block's code names are among them:
    `ids == 50256`. A block that another one equals is checked once in a process.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.models.common.batch import Batch, token_batch
from weft.models.common.layers import Loss
from weft.parallel.autograd.tree import tensors_in
from weft.parallel.context.probe_block import Activation, ProbeBlock
from weft.parallel.context.probe_columns import (
    MIXES,
    MixesTokensError,
    ProbeSizes,
    check_positions,
    columns_of,
    compare_columns,
)
from weft.parallel.context.probe_parts import part_that_mixes
from weft.parallel.context.whole_sequences import WholeUse
from weft.parallel.model.block_values import MOST_TABLE_ENTRIES, kind_of, num_computed_entries
from weft.parallel.model.chain import MAY_GATHER
from weft.parallel.model.executed_code import ExecutedCode, packages_of
from weft.parallel.model.fingerprint import TensorSpec, fingerprint
from weft.parallel.model.token_ids import NamedIds, NotesIds, draw_ids

LENGTH, RANKS = 8, 2
"""Of sequences, and of ranks that share them, where a caller names none."""

MOST_ENTRIES = 2**28
"""Blocks with more parameter entries are not computed: it would need their memory."""

MOST_ALL = 2**27

MOST_WORK = 2**33
"""Entries of all blocks times tokens: one or two seconds of a core."""

MOST_TOKENS = 2**13

MIN_TOKENS = 512
"""Of a batch of small blocks: room for ids that their code names."""

TOKENWISE = (
    nn.Linear,
    nn.Embedding,
    nn.RMSNorm,
    nn.LayerNorm,
    nn.Identity,
    nn.Dropout,
    nn.ModuleList,
    nn.ModuleDict,
)
"""Layers of torch that treat every token by itself."""


def check_blocks(
    blocks: Mapping[str, nn.Module],
    *,
    hidden_shape: tuple[int, ...] | None,
    length: int = LENGTH,
    degree: int = RANKS,
    vocab: int | None = None,
    head: str = "",
) -> dict[str, WholeUse]:
    """Reject blocks that mix tokens in another way than by `Attend`, but for those that may work on
    whole sequences, which are returned. See Note [Whole sequences under cp].

    Args:
        blocks: consecutive ones of a model, in order.
        hidden_shape: of one token's activation at the first block; None: the blocks begin with
            token ids.
        length: of the run's sequences.
        degree: ranks that share a sequence.
        vocab: number of token ids; None: rows of the first embedding.
        head: name of the block that the loss reads, which gathers nothing.

    Raises:
        PlanError: the first block that does, or that cannot be run on the batch; it names it.
    """
    gathered: dict[str, WholeUse] = {}
    if all(map(_consists_of_tested, blocks.values())):
        return gathered
    untested = {name: block for name, block in blocks.items() if not _consists_of_tested(block)}
    computed = _computed(untested)
    all_entries = sum(num_computed_entries(untested[name]) for name in computed)
    num_ids = vocab or _rows_of_embedding(blocks)
    sizes = _sizes(all_entries, run_length=length, degree=degree, vocab=num_ids)
    shapes = None if hidden_shape is None else _Shapes((hidden_shape,), is_tuple=False)
    executed = ExecutedCode(packages_of(blocks.values()))
    of_kind: dict[object, WholeUse | None] = {}
    for name, block in blocks.items():
        if isinstance(block, Loss) and name not in untested:
            break  # one of preference pairs cannot be run on tokens alone
        may_gather = name != head and getattr(block, MAY_GATHER, False)
        answer = _check_block(
            name,
            block,
            shapes,
            replace(sizes, is_computed=name in computed),
            may_gather=may_gather,
            needs_branches=name in untested,
            executed=executed,
        )
        if answer.shapes is None:
            break  # the loss
        shapes = answer.shapes
        kind = kind_of(block)
        found = answer.gathering
        if name in computed:
            of_kind[kind] = found or of_kind.get(kind)
        elif may_gather:
            found = of_kind[kind] if kind in of_kind else _by_structure(block)
        if found is not None:
            gathered[name] = found
    return gathered


def _by_structure(block: nn.Module) -> WholeUse | None:
    """How a block that is too large to be computed works on whole sequences."""
    reads_others: bool = getattr(block, "needs_whole_texts", False)
    return WholeUse(MIXES) if reads_others else None


def _computed(blocks: Mapping[str, nn.Module]) -> frozenset[str]:
    """Names of the blocks that are run with values."""
    found: set[str] = set()
    seen: set[object] = set()
    left = MOST_ALL
    for name, block in blocks.items():
        num_entries, kind = num_computed_entries(block), kind_of(block)
        if num_entries <= MOST_ENTRIES and (kind not in seen or num_entries <= left):
            found.add(name)
            seen.add(kind)
            left -= num_entries
    return frozenset(found)


def _sizes(all_entries: int, *, run_length: int, degree: int, vocab: int) -> ProbeSizes:
    """The sizes that Note [Sizes of the probe] explains."""
    unit = 2 * degree
    most = min(MOST_TOKENS, max(unit, MOST_WORK // max(all_entries, 1)))
    longest = max(most // unit, 1) * unit
    length = min(run_length, longest)
    rows = min(max(2, MIN_TOKENS // length), max(1, most // length))
    return ProbeSizes(rows, length, degree, run_length, vocab)


def _rows_of_embedding(blocks: Mapping[str, nn.Module]) -> int:
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, nn.Embedding):
                return module.num_embeddings
    return 2


def _consists_of_tested(block: nn.Module) -> bool:
    return all(map(_is_tested, block.modules()))


@dataclass(frozen=True)
class _Shapes:
    """Of the tensors that a block reads, without rows and columns; None in place of it: token ids."""

    of_tokens: tuple[tuple[int, ...], ...]
    is_tuple: bool

    def drawn(self, sizes: ProbeSizes) -> Activation:
        """Tensors of these shapes; without memory where the block is not computed."""
        generator = torch.Generator().manual_seed(0)
        tensors: list[Tensor] = []
        for shape in self.of_tokens:
            whole_shape = (sizes.rows, sizes.length, *shape)
            if sizes.is_computed:
                tensors.append(torch.randn(whole_shape, generator=generator))
            else:
                tensors.append(torch.empty(whole_shape, device="meta"))
        return tuple(tensors) if self.is_tuple else tensors[0]


@dataclass(frozen=True)
class _Question:
    """Equal for blocks that a check answers alike."""

    key: Hashable
    shapes: _Shapes | None
    sizes: ProbeSizes
    may_gather: bool
    probe: ProbeBlock = field(compare=False)


@dataclass(frozen=True)
class _ColumnAnswer:
    """What a check found out of a block that passes.

    Attributes:
        shapes: that it hands on; None of a loss.
        executed: the instructions that it executed with values.
        gathering: how it works on whole sequences, where it is not accepted on the columns of a rank.
    """

    shapes: _Shapes | None
    executed: ExecutedCode | None = None
    gathering: WholeUse | None = None


def _check_block(
    name: str,
    block: nn.Module,
    shapes: _Shapes | None,
    sizes: ProbeSizes,
    *,
    may_gather: bool,
    needs_branches: bool,
    executed: ExecutedCode,
) -> _ColumnAnswer:
    """Check a block as Note [Sizes of the probe] says.

    Args:
        executed: instructions that earlier blocks executed with values; those of this one are added.

    Raises:
        PlanError: it mixes tokens, or cannot be run.
    """
    probe = ProbeBlock(block, sizes.vocab)
    with probe:
        key: Hashable = fingerprint(block, _describe)
        if key is None:
            # Equal to no other question: without a fingerprint no answer may be reused.
            key = object()
        question = _Question(key, shapes, sizes, may_gather, probe)
        try:
            answer = _answer(question)
            if answer.executed is not None:
                executed.add(answer.executed)
            may_differ = needs_branches and answer.gathering is None
            if may_differ and (not sizes.is_computed or sizes.length < sizes.run_length):
                _check_branches(question, executed)
        except MixesTokensError as error:
            raise PlanError(Fault(name, error.what, error.got, error.need, error.fix)) from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, PlanError):
                raise
            what = (
                f"the check for context parallelism cannot run it on {sizes.rows} sequences of "
                f"{sizes.length} tokens: {error}"
            )
            raise PlanError(
                Fault(name, what, need="a block of any batch size and length")
            ) from error
        finally:
            probe.release()  # the cache of answers keeps the question
    return answer


class _SameTensor:
    """Equal for one tensor with one content as long as it lives: another one may get its `id` later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._key = id(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameTensor):
            return NotImplemented
        tensor = self._tensor()
        return tensor is not None and tensor is other._tensor() and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _describe(tensor: Tensor) -> Hashable:
    """Of a tensor of a block: small ones with their values."""
    if tensor.is_meta:
        return TensorSpec.of(tensor)
    if tensor.numel() > MOST_TABLE_ENTRIES:
        return _SameTensor(tensor)
    return TensorSpec.of(tensor), str(tensor.flatten().tolist())


@functools.lru_cache(maxsize=256)
def _answer(question: _Question) -> _ColumnAnswer:
    """What a block computes.

    Raises:
        MixesTokensError: it mixes tokens.
    """
    probe, sizes = question.probe, question.sizes
    if not sizes.is_computed:
        return _ColumnAnswer(_shapes_of(probe.run_without_values(*_inputs(question, sizes, ()))))
    ids = NamedIds(sizes.vocab)
    executed = ExecutedCode(packages_of([probe.block]))
    with executed, NotesIds(ids):
        out = probe.run(*_inputs(question, sizes, ()))
    shapes = _shapes_of(out)
    if shapes is None:
        return _ColumnAnswer(None, executed)
    check_positions(out, sizes)
    try:
        with executed:
            compare_columns(probe, *_inputs(question, sizes, ids.found), sizes)
            unit = 2 * sizes.degree
            short_length = math.ceil(LENGTH / unit) * unit
            short = replace(sizes, rows=2, length=min(sizes.length, short_length))
            x, batch = _inputs(question, short, ids.found)
            documents_BS = (torch.arange(short.length) >= short.length // 3).long().repeat(2, 1)
            compare_columns(probe, x, replace(batch, documents=documents_BS), short)
    except MixesTokensError as error:
        if not question.may_gather:
            raise
        part = part_that_mixes(probe, *_inputs(question, sizes, ids.found), sizes)
        return _ColumnAnswer(shapes, executed, WholeUse(error.what, part))
    return _ColumnAnswer(shapes, executed)


def _inputs(
    question: _Question, sizes: ProbeSizes, named: Mapping[int, None] | tuple[()]
) -> tuple[Activation, Batch]:
    """What the block is called with."""
    ids_BS = draw_ids(sizes.rows, sizes.length + 1, vocab=sizes.vocab, named=named)
    batch = token_batch(ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous())
    if question.shapes is None:
        return batch.inputs, batch
    return question.shapes.drawn(sizes), batch


def _shapes_of(out: Activation) -> _Shapes | None:
    """The shapes of a block's output; None for a loss."""
    if isinstance(out, Tensor) and out.dim() == 0:
        return None
    of_tokens = tuple(tuple(tensor.shape[2:]) for tensor in tensors_in(out))
    return _Shapes(of_tokens, isinstance(out, tuple))


def _check_branches(question: _Question, executed: ExecutedCode) -> None:
    """No instruction of the user's code runs at the run's length alone."""
    place = _at_run(question).first_line_beyond(executed)
    if place:
        length = question.sizes.run_length
        what = f"{place} runs at {length} tokens, and at none of the lengths that can be checked for cp"
        raise MixesTokensError(what, need="no branch on the length")


@functools.lru_cache(maxsize=256)
def _at_run(question: _Question) -> ExecutedCode:
    """The instructions that a block executes at the run's length, without memory."""
    sizes = replace(question.sizes, rows=1, length=question.sizes.run_length, is_computed=False)
    executed = ExecutedCode(packages_of([question.probe.block]))
    x, batch = _inputs(question, sizes, ())
    own_x, own_batch = columns_of(x, batch, 0, sizes.degree)
    with executed:
        question.probe.run_without_values(x, batch)
        question.probe.run_without_values(own_x, own_batch)
    return executed


def _is_tested(module: nn.Module) -> bool:
    """Whether a module is one of torch or weft as it is."""
    kind = type(module)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if "forward" in vars(module) or not all(map(_is_of_weft, hooks)):
        return False
    return kind in TOKENWISE or _is_of_weft(kind)


def _is_of_weft(code: object) -> bool:
    return getattr(code, "__module__", "").startswith("weft.")
