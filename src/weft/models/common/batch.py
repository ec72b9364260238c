"""Inputs and outputs of blocks: `Batch`, which every block may read, `Extra` results, and the plain chain of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.input_spec import TARGETS, InputSpec
from weft.core.model_config import ModelConfig
from weft.core.query_blocks import RowRuns
from weft.core.sequence import zigzag
from weft.models.common.document_runs import document_runs
from weft.models.common.dropout_mode import run_block

IGNORE = -100
"""Target of a token that does not count in the loss."""


@dataclass(frozen=True)
class Batch:
    """Sequences (or images) of one micro-batch; all fields are sharded alike along batch and
    sequence.

    Attributes:
        inputs: tokens_BS int64, or images_BCHW float or uint8 (0..255).
        targets: targets_BS int64 (targets_B for images), IGNORE where a token does not count.
        positions: positions_BS int64, position of each token in its sequence or document (zeros_B
            for images).
        documents: documents_BS int64, tokens attend only within their own document; None: a
            sequence is one document.
        next_inputs: tokens_BS int64, the token after each one; see `with_later_targets`.
        later_targets: targets_BS int64, the target after each one, IGNORE where there is none.
        pairs: bool_BS, one token of each preference pair; None: the data has no pairs.
        references: logprobs_BS float64 of the targets under the reference model of preference
            pairs.
        whole_documents: documents_BT of whole sequences, where the other fields hold a shard of the
            columns.
        fields: the other arrays of samples that a model names in INPUTS, by name; None: it reads text
            or images. `inputs` is its first array, `targets` the one of this name, else zeros_B.
        draw_keys: keys_B int64, a hash of seed, step and sequence, of which dropout is a function;
            None: nothing is dropped (evaluation, generation).
        is_never_sharded: whether each rank has all columns of its sequences, under cp too.
    """

    is_never_sharded: ClassVar[bool] = False

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None = None
    next_inputs: Tensor | None = None
    later_targets: Tensor | None = None
    whole_documents: Tensor | None = None
    pairs: Tensor | None = None
    references: Tensor | None = None
    draw_keys: Tensor | None = None
    fields: Mapping[str, Tensor] | None = None

    @cached_property
    def document_runs(self) -> tuple[RowRuns, ...] | None:
        """Where the documents of each sequence begin and end, found once for all layers; None:
        without documents.
        """
        return None if self.documents is None else document_runs(self.documents)

    @property
    def documents_of_sequences(self) -> Tensor | None:
        """documents_BT of whole sequences; None: each is one document."""
        return self.documents if self.whole_documents is None else self.whole_documents

    @cached_property
    def of_whole_sequences(self) -> Batch:
        """The same with the documents of whole sequences, for attention that exchanges its columns."""
        return replace(self, documents=self.whole_documents)

    @cached_property
    def document_borders(self) -> Tensor:
        """The columns at which documents begin, counted over all sequences one after another, and
        their number: int32.
        """
        assert self.documents is not None, "read of packed sequences"
        length = self.documents.shape[1]
        starts = [
            row * length + run.start
            for row, of_row in enumerate(self.document_runs or ())
            for run in of_row or ()
        ]
        borders = [*starts, self.documents.numel()]
        return torch.tensor(borders, dtype=torch.int32, device=self.documents.device)

    def num_targets(self) -> Tensor:
        """Number of targets that count, or of preference pairs, int64 scalar; stays on the device."""
        if self.pairs is not None:
            return self.pairs.sum()
        return (self.targets != IGNORE).sum()

    def rows(self, index: Tensor | slice) -> Batch:
        """Some of its sequences."""
        return self.map(lambda x: x[index])

    def columns(self, *, index: int, degree: int) -> Batch:
        """What rank `index` of the `degree` ranks that share each sequence holds of it; see
        core/sequence.py.
        """
        if degree == 1:
            return self
        length = self.inputs.shape[1]
        spans = zigzag(length, degree, index)

        own = self._columns_at(*(slice(span.start, span.stop) for span in spans))
        # documents of the shard cannot say where those of the other columns begin
        return replace(own, whole_documents=self.documents)

    def window(self, columns: slice) -> Batch:
        """Some columns of every sequence, which are sequences of their own."""
        return self._columns_at(columns)

    def _columns_at(self, *columns: slice) -> Batch:
        def select(x: Tensor) -> Tensor:
            if x.dim() == 1:  # of sequences
                return x
            return torch.cat([x[:, own] for own in columns], dim=1)

        return self.map(select)

    def map(self, act: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `act` applied to each tensor: `batch.map(lambda x: x[:4])`,
        `batch.map(torch.Tensor.cuda)`.
        """
        changed: dict[str, Any] = {}
        for name, x in self._values():
            if isinstance(x, Tensor):
                changed[name] = act(x)
            elif x is not None:
                changed[name] = {key: act(field) for key, field in x.items()}
        return Batch(**changed)

    def _values(self) -> Iterator[tuple[str, Any]]:
        """The fields by name, without what is computed from them."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, those of `fields` by their own."""
        found: dict[str, Tensor] = {}
        for name, x in self._values():
            if isinstance(x, Tensor):
                found[name] = x
            elif x is not None:
                found.update(x)
        return found


def token_batch(inputs_BS: Tensor, targets_BS: Tensor) -> Batch:
    """Sequences of one document each: positions count from 0."""
    num, seq_len = inputs_BS.shape
    positions_S = torch.arange(seq_len, device=inputs_BS.device)
    positions_BS = positions_S.repeat(num, 1)
    return Batch(inputs_BS, targets_BS, positions_BS)


def token_example(num: int, seq_len: int) -> Batch:
    """A batch of token ids on the meta device, with the fields that multi-token prediction reads."""
    tokens_BS = torch.zeros((num, seq_len), dtype=torch.int64, device="meta")
    batch = token_batch(tokens_BS, tokens_BS)
    return replace(with_later_targets(batch), draw_keys=_keys_without_values(num))


def _keys_without_values(num: int) -> Tensor:
    return torch.zeros(num, dtype=torch.int64, device="meta")


def image_example(num: int, size: int) -> Batch:
    """A batch of square grey images on the meta device."""
    images_B1HW = torch.zeros((num, 1, size, size), dtype=torch.uint8, device="meta")
    targets_B = torch.zeros(num, dtype=torch.int64, device="meta")
    batch = image_batch(images_B1HW, targets_B)
    return replace(batch, draw_keys=_keys_without_values(num))


def array_example(num: int, specs: Mapping[str, InputSpec]) -> Batch:
    """A batch of named arrays on the meta device."""
    arrays: dict[str, Tensor] = {}
    for name, spec in specs.items():
        dtype = getattr(torch, spec.dtype)
        arrays[name] = torch.zeros((num, *spec.shape), dtype=dtype, device="meta")
    return replace(array_batch(arrays), draw_keys=_keys_without_values(num))


def example_of(model: ModelConfig, num: int, seq_len: int) -> Batch:
    """A batch of what a model reads, on the meta device."""
    if model.kind == "images":
        return image_example(num, model.model_dump()["image_size"])
    if model.kind == "arrays":
        return array_example(num, model.input_specs())
    return token_example(num, seq_len)


def array_batch(arrays: Mapping[str, Tensor]) -> Batch:
    """Named arrays, the first of which the first block reads; each sample is one target where none are
    named.
    """
    first, *others = arrays
    inputs = arrays[first]
    positions_B = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    targets = positions_B.clone()
    if TARGETS in others:
        targets = arrays[TARGETS].long()
    fields = {name: arrays[name] for name in others if name != TARGETS}
    return Batch(inputs, targets, positions_B, fields=fields)


def image_batch(images_BCHW: Tensor, targets_B: Tensor) -> Batch:
    """Images and their classes; nothing has a position."""
    positions_B = torch.zeros_like(targets_B)
    return Batch(images_BCHW, targets_B, positions_B)


def with_later_targets(batch: Batch) -> Batch:
    """The batch of whole sequences with the fields that multi-token prediction reads; apply it
    before sharding.

    The token after the last one of a sequence or document is taken from its target, 0 where that is
    ignored; the target after that one is unknown and ignored.
    """
    from_targets_BS = batch.targets.clamp(min=0)
    inputs_after_first = batch.inputs[:, 1:]
    last_from_target = from_targets_BS[:, -1:]
    next_BS = torch.cat((inputs_after_first, last_from_target), dim=1)
    targets_after_first = batch.targets[:, 1:]
    later_BS = F.pad(targets_after_first, (0, 1), value=IGNORE)
    if batch.documents is not None:
        here = batch.documents[:, :-1]
        after = batch.documents[:, 1:]
        is_last_BS = F.pad(after != here, (0, 1))
        # behind the end of a document stands another one's first token
        next_BS = next_BS.where(~is_last_BS, from_targets_BS)
        later_BS = later_BS.masked_fill(is_last_BS, IGNORE)
    return replace(batch, next_inputs=next_BS, later_targets=later_BS)


class Extra(NamedTuple):
    """Results that a block may return instead of x alone.

    Attributes:
        x: input of the next block.
        loss: scalar that is added to the summed loss, and divided by the step's number of targets
            with it.
        load: number of this micro-batch's tokens at each expert, load_E int64.
    """

    x: Tensor
    loss: Tensor | None = None
    load: Tensor | None = None


def activation_of(out: Any) -> Any:
    """What a block hands on: its result without the extra losses and loads of an `Extra`."""
    if isinstance(out, Extra):
        return out.x
    return out


def drop_batch(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook of blocks that are called with (x, batch) and take x alone."""
    return args[:1]


class Chained(NamedTuple):
    """Results of consecutive blocks: output of the last one, sum of their extra losses, loads by
    block name.
    """

    x: Tensor
    loss: Tensor | None
    loads: dict[str, Tensor]


def _call(name: str, block: nn.Module, x: Any, batch: Batch) -> Any:
    return block(x, batch)


def chain(
    blocks: Mapping[str, nn.Module] | nn.ModuleDict,
    x: Tensor,
    batch: Batch,
    *,
    call: Callable[[str, nn.Module, Any, Batch], Any] = _call,
) -> Chained:
    """Run consecutive blocks on the output of the block before them.

    Args:
        call: (name, block, x, batch) -> the output of a block.
    """
    total: Tensor | None = None
    loads: dict[str, Tensor] = {}
    for name, block in blocks.items():
        out = call(name, block, x, batch)
        if not isinstance(out, Extra):
            x = out
            continue
        x = out.x
        if out.loss is not None:
            total = out.loss if total is None else total + out.loss
        if out.load is not None:
            loads[name] = out.load
    return Chained(x, total, loads)


def forward(blocks: Mapping[str, nn.Module] | nn.ModuleDict, batch: Batch) -> Tensor:
    """The plain chain on one device: the summed loss with all extra losses, or the output of the
    last of these blocks.
    """
    out = chain(blocks, batch.inputs, batch, call=run_block)
    is_loss = out.x.dim() == 0
    if is_loss and out.loss is not None:
        return out.x + out.loss
    return out.x
