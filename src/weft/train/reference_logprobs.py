"""Reference log-probabilities of preference pairs: computed once by the initial model on the run's own layout, and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.text import broadcast_text
from weft.core.dimension import replicated_axes
from weft.core.sequence import zigzag
from weft.data.logprob_files import (
    Logprobs,
    ReferencedSamples,
    check_size,
    read_references,
    write_references,
)
from weft.data.order import layout_of
from weft.data.samples import Samples
from weft.errors import DataError, Fault
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.preference import preference_loss_of
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import ForwardPlayer
from weft.train.data_loader import DataLoader
from weft.train.evaluate import batches_of


@dataclass(frozen=True)
class References:
    """The reference log-probabilities of a run's data: computed by the initial model, or stored.

    Attributes:
        load: returns this rank's loader of samples.
        run_folder: where they are stored.
        source_folder: of the run that the checkpoint is of, where a resume reads them.
        is_initial: whether the model has its initial parameters, and computes them; else they are
            read.
        is_written: whether computed ones are stored.
    """

    model: ParallelModel
    load: Callable[[Samples], DataLoader]
    run_folder: Path
    source_folder: Path
    is_initial: bool
    is_written: bool

    def add_to(self, samples: Samples, *, name: str) -> ReferencedSamples:
        """The samples with the log-probabilities of their targets; every rank must call it.

        Args:
            name: of the data source, `train` or `valid`.

        Raises:
            DataError: on all ranks; see `read_references`.
        """
        seq_len = self.model.plan.seq_len
        check_size(samples, seq_len=seq_len)
        if not self.is_initial:
            shape = (samples.num_samples, seq_len)
            logprobs = self._read(name, shape, samples.facts())
            is_new = self.source_folder != self.run_folder
        else:
            logprobs = compute_logprobs(self.model, self.load(samples))
            is_new = True
        if is_new and self.is_written and self.model.comm.rank == 0:
            write_references(self.run_folder, name, logprobs, samples.facts())
        return ReferencedSamples(samples, logprobs)

    def _read(self, name: str, shape: tuple[int, int], data: Mapping[str, object]) -> Logprobs:
        """The stored log-probabilities; rank 0 reads them, as other hosts may not have the folder.

        Raises:
            DataError: on all ranks.
        """
        comm = self.model.comm
        logprobs = np.zeros(shape)
        fault = Fault("", "")
        if comm.rank == 0:
            try:
                logprobs = read_references(self.source_folder, name, shape=shape, data=data)
            except DataError as error:
                fault = error.faults[0]
        fields = [fault.key, fault.what, fault.got, fault.need, fault.fix]
        fault = Fault(*broadcast_text(comm, "\0".join(fields)).split("\0"))
        if fault.what:
            raise DataError(fault)
        rows = [_from_rank_0(comm, row) for row in logprobs]
        return np.stack(rows)


def _from_rank_0(comm: Comm, row: Logprobs) -> Logprobs:
    """A row of numbers that is 0 on all ranks but the first, on every rank."""
    tensor = torch.tensor(row, dtype=torch.float64, device=comm.device)
    received: Logprobs = comm.sum_world(tensor).cpu().numpy()
    return received


def compute_logprobs(model: ParallelModel, loader: DataLoader) -> Logprobs:
    """logprobs_NS of the targets of all samples under the model, equal on every rank; 0 where
    nothing is a target. Every rank must call it.
    """
    num_samples = loader.samples.num_samples
    recorder = _LogprobRecorder(model, loader)
    parts = [
        recorder.logprobs(chosen) for chosen in batches_of(num_samples, loader.global_size, most=0)
    ]
    return np.concatenate(parts)[:num_samples]


class _LogprobRecorder:
    """Forward passes that record the log-probability of each target."""

    def __init__(self, model: ParallelModel, loader: DataLoader) -> None:
        self.model = model
        self.loader = loader
        self.player = ForwardPlayer(model)
        self.loss = preference_loss_of(model.blocks)
        comm = model.comm
        is_first_copy = comm.index(replicated_axes()) == 0
        self.counts_here = self.loss is not None and is_first_copy
        self.places = layout_of(
            np.arange(loader.global_size),
            index=loader.index,
            degree=loader.degree,
            micro_size=loader.micro_size,
            outer=loader.outer,
        ).ravel()

    def logprobs(self, chosen: np.ndarray) -> Logprobs:
        """logprobs_GS of a global batch of these samples."""
        comm = self.model.comm
        loader = self.loader
        seq_len = self.model.plan.seq_len
        micro_batches = loader.micro_batches(chosen)
        losses: dict[int, Tensor] = {}

        def record(batch: Batch, losses_BS: Tensor) -> None:
            # By identity: a loss is computed on the very objects of `micro_batches`, which live
            # until the table is filled.
            losses[id(batch)] = losses_BS

        if self.loss is not None:
            self.loss.on_token_losses = record
        try:
            self.player.loss(micro_batches)
        finally:
            if self.loss is not None:
                self.loss.on_token_losses = None
        table = torch.zeros(loader.global_size, seq_len, dtype=torch.float64, device=comm.device)
        if self.counts_here:
            for number, batch in enumerate(micro_batches):
                start = number * loader.micro_size
                rows = self.places[start : start + loader.micro_size]
                counts = batch.targets != IGNORE
                logprobs = -losses[id(batch)].double()
                values = torch.where(counts, logprobs, 0.0)
                table[np.ix_(rows, self._columns(seq_len))] = values
        return comm.sum_world(table.flatten()).view_as(table).cpu().numpy()

    def _columns(self, seq_len: int) -> np.ndarray:
        """The positions of whole sequences that this rank holds."""
        degree = self.loader.context_degree
        if degree == 1:
            return np.arange(seq_len)
        columns = [
            np.arange(span.start, span.stop)
            for span in zigzag(seq_len, degree, self.loader.context_index)
        ]
        return np.concatenate(columns)
