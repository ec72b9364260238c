"""Forward and backward of one step through transformers' model: each document as a sequence of its own, losses by definition.

row of the batch      | document 0      | document 1  | document 2        |
calls of the model    model([doc 0])    model([doc 1])  model([doc 2])        positions 0, 1, ... in each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.models.common.batch import IGNORE, Batch
from weft.prove.against.hf_model import HFModel
from weft.prove.against.routers import RouterRecord, balance_loss, expert_loads
from weft.prove.reference_trace import ReferenceTrace

EMBED = "embed"
HEAD = "head"
LOSS = "loss"
SIDE = "mtp0"


class ModelCall(NamedTuple):
    """Tokens that are one call of the model."""

    rows: slice
    columns: slice


@dataclass
class HFPass:
    """One training step of a model of transformers.

    Args:
        hf: the model, whose hooks write here.
        architecture: fields of the model.
        micro_size: rows of a call where there are no documents.

    Attributes:
        loss: summed over targets, with extra losses.
        sums: losses of blocks, as a proof names them.
        loads: tokens at each expert, by block.
        outputs, gradients: of each block, for the whole batch.
    """

    hf: HFModel
    architecture: Mapping[str, Any]
    micro_size: int
    routers: RouterRecord = field(default_factory=RouterRecord)
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    _piece: ModelCall | None = None
    _shape: tuple[int, int] = (0, 0)
    _hidden: Tensor | None = None

    def __post_init__(self) -> None:
        layers = self.hf.layers
        layers[0].register_forward_pre_hook(self._keep_embedded, with_kwargs=True)
        for index, layer in enumerate(layers):
            name = f"layer{index}"
            layer.register_forward_hook(self._keeper(name))
            self.routers.attach(name, layer)
        if self.hf.side is not None:
            self.routers.attach(SIDE, self.hf.side)
        self.hf.base.register_forward_hook(self._keep_hidden)

    def run(self, batch: Batch, num_targets: int) -> dict[str, Tensor]:
        """The gradients of the mean loss of a batch, by published names."""
        self._clear(batch)
        for pieces in self._groups(batch):
            # Each group has a backward of its own, which frees the graphs of its logits.
            self.routers.clear()
            losses = []
            for piece in pieces:
                losses += self._losses(batch, piece)
            losses += self._balance_losses(batch, pieces)
            total = torch.stack(losses).sum()
            (total / num_targets).backward()
        self._piece = None
        return self.hf.take_gradients()

    @torch.no_grad()
    def loss_of(self, batch: Batch) -> float:
        """The cross entropy summed over the targets of a batch."""
        total = 0.0
        for pieces in self._groups(batch):
            for piece in pieces:
                logits = self._logits(batch, piece)
                total += float(cross_entropy(logits, batch.targets[piece]))
        return total

    def keep_in(self, trace: ReferenceTrace, step: int) -> None:
        """Keep what was computed as that of a step."""
        for name, value in self.sums.items():
            trace.keep_number(step, "loss", name, value)
        for name, load in self.loads.items():
            trace.keep(step, "forward", f"{name}.expert load", load)
        for name, output in self.outputs.items():
            trace.keep(step, "forward", f"{name}.output", output)
        if self.hf.side is not None:  # it hands on what it gets
            last = self.outputs[f"layer{len(self.hf.layers) - 1}"]
            trace.keep(step, "forward", f"{SIDE}.output", last)
        for name, gradient in self.gradients.items():
            trace.keep(step, "backward", f"{name}.output gradient", gradient)

    # parts of a step

    def _groups(self, batch: Batch) -> Iterator[list[ModelCall]]:
        """Calls whose losses have one backward: whole rows, or the documents of a row."""
        num_rows, length = batch.inputs.shape
        if batch.documents is None:
            for start in range(0, num_rows, self.micro_size):
                stop = min(start + self.micro_size, num_rows)
                yield [ModelCall(slice(start, stop), slice(0, length))]
            return
        for row in range(num_rows):
            spans = document_spans(batch.documents[row].tolist())
            yield [ModelCall(slice(row, row + 1), slice(*span)) for span in spans]

    def _losses(self, batch: Batch, piece: ModelCall) -> list[Tensor]:
        """The losses of a call: of the next token, and of the one after it."""
        self._piece = piece
        logits = self._logits(batch, piece)
        self._keep(HEAD, logits)
        loss = cross_entropy(logits, batch.targets[piece])
        self._add(f"{LOSS}.loss", loss)
        losses = [loss]
        if self.hf.side is not None:
            later_loss = self._later_loss(batch, piece)
            self._add(f"{SIDE}.extra loss", later_loss)
            losses.append(later_loss)
        return losses

    def _logits(self, batch: Batch, piece: ModelCall) -> Tensor:
        logits: Tensor = self.hf.model(input_ids=batch.inputs[piece], use_cache=False).logits
        return logits

    def _later_loss(self, batch: Batch, piece: ModelCall) -> Tensor:
        """The weighted loss of the token after the next one (DeepSeek-V3, section 2.2)."""
        assert self.hf.side is not None, "asked for"
        assert batch.next_inputs is not None, "asked for"
        assert batch.later_targets is not None, "asked for"
        hidden = self._hidden
        assert hidden is not None, "the base model has run"
        embedded = self.hf.base.embed_tokens(batch.next_inputs[piece])
        num_rows, length = embedded.shape[:2]
        positions = torch.arange(length).expand(num_rows, length)
        turns = self.hf.base.rotary_emb(hidden, positions)
        joined = self.hf.side(embedded, hidden, turns, None, positions, None)
        logits = self.hf.model.lm_head(joined)
        loss = cross_entropy(logits, batch.later_targets[piece])
        weighted: Tensor = self.architecture["mtp_loss"] * loss
        return weighted

    def _balance_losses(self, batch: Batch, pieces: list[ModelCall]) -> list[Tensor]:
        """Those of all routers, sequence by sequence; and the loads of their experts."""
        rows = range(pieces[0].rows.start, pieces[0].rows.stop)
        length = batch.inputs.shape[1]
        losses = []
        for block, calls in self.routers.logits.items():
            logits = torch.cat(calls)
            loads = expert_loads(self.routers.experts[block], logits.shape[-1])
            self.loads[block] = self.loads.get(block, 0) + loads
            if not self.architecture.get("balance_loss"):
                continue
            for row, of_row in zip(rows, logits.split(length), strict=True):
                loss = balance_loss(of_row, batch.targets[row], self.architecture)
                self._add(f"{block}.extra loss", loss)
                losses.append(loss)
        return losses

    # what is kept

    def _clear(self, batch: Batch) -> None:
        num_rows, length = batch.inputs.shape
        self._shape = (num_rows, length)
        self.loss = 0.0
        for kept in (self.sums, self.loads, self.outputs, self.gradients):
            kept.clear()

    def _add(self, name: str, loss: Tensor) -> None:
        number = float(loss.detach())
        self.sums[name] = self.sums.get(name, 0.0) + number
        self.loss += number

    def _keep(self, block: str, x: Tensor) -> None:
        """Keep the output of a block, and its gradient once that is computed."""
        piece = self._piece
        # An evaluation calls the same hooks, and must not replace what the step has kept.
        if piece is None or not x.requires_grad:
            return
        self._whole(self.outputs, block, x)[piece] = x.detach()

        def keep_gradient(gradient: Tensor) -> None:
            self._whole(self.gradients, block, gradient)[piece] = gradient.detach()

        x.register_hook(keep_gradient)

    def _whole(self, tensors: dict[str, Tensor], block: str, part: Tensor) -> Tensor:
        """The tensor of a block for all rows and columns."""
        if block not in tensors:
            tensors[block] = torch.zeros(*self._shape, *part.shape[2:], dtype=part.dtype)
        return tensors[block]

    def _keep_embedded(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self._keep(EMBED, x)

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: object, output: Any) -> None:
            self._keep(name, output[0] if isinstance(output, tuple) else output)

        return keep

    def _keep_hidden(self, module: nn.Module, args: object, output: Any) -> None:
        self._hidden = output.last_hidden_state


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target), summed over the targets that count."""
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    counts = targets != IGNORE
    of_targets = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -of_targets[counts].sum()


def document_spans(documents: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of equal numbers."""
    starts = [0]
    starts.extend(
        column for column in range(1, len(documents)) if documents[column] != documents[column - 1]
    )
    ends = [*starts[1:], len(documents)]
    return list(zip(starts, ends, strict=True))
