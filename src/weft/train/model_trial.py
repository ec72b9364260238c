"""Trial of a user's model with values, block by block: sums over targets, sequences beside each other, a second run.

Note [Trial]
    A block gets values (its constructor's with noise, so that what starts at zero acts; drawn ones
    where the model is larger than MOST_WHOLE entries), computes two sequences together, again, and
    each alone, and is freed. So a model of any size is tried in the memory of one block. Blocks of
    more than MOST_BLOCK entries, and those like an earlier one once MOST_ALL entries have been run, are
    left out: Note [Effects] holds for them all the same. Tables that are only looked up cost nothing.

    A short trial says something of the run if it executes the same instructions of the user's code.
    Where the run's length, micro-batch or number type takes another branch, the trial is made at these
    too, if it costs at most MOST_WORK; else the model is rejected with the line of the branch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.data.arrays import drawn_arrays
from weft.data.order import draw_keys
from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.batch import (
    IGNORE,
    Batch,
    activation_of,
    array_batch,
    image_batch,
    token_batch,
)
from weft.models.common.dropout_mode import run_block
from weft.models.runs_without_memory import run_without_memory
from weft.models.user_family import UserFamily, meta_blocks
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.model.block_values import fill, kind_of, num_computed_entries
from weft.parallel.model.executed_code import ExecutedCode
from weft.parallel.model.token_ids import SEED, draw_ids
from weft.train.block_trial import BlockTrial, RowParts, TrialSizes
from weft.train.casts import Casts
from weft.train.init_from import meta_modules
from weft.train.model_effects import Pure

MOST_WHOLE = 2**25
"""Entries of models that start with the values of their constructors, in float64."""
MOST_BLOCK = 2**26
MOST_ALL = 2**27
MOST_WORK = 2**33
"""Entries times tokens of a trial at the run's own sizes: a second or two of one core."""
MOST_TOKENS = 2**13
LENGTHS = (8, 16, 64)
"""Lengths of sequences that are tried before the configured one."""
NOISE = 0.02
"""Added to initial values: what starts at zero would hide what it is multiplied with."""


@dataclass
class Trial:
    """Trials of one model.

    Args:
        pure: runs forwards, and notes the ids that the code names, which trials read.
    """

    family: UserFamily
    config: ModelConfig
    pure: Pure

    @property
    def label(self) -> str:
        """The model's label for messages."""
        return self.family.model.label

    @cached_property
    def num_entries(self) -> int:
        """The number of entries of all parameters."""
        shapes = self.family.facts(self.config).shapes.values()
        return sum(math.prod(shape) for shape in shapes)

    @cached_property
    def _known(self) -> dict[str, Tensor]:
        """Initial values with noise; none of a large model."""
        if self.num_entries > MOST_WHOLE:
            return {}
        generator = torch.Generator().manual_seed(SEED)
        values = self.family.initial_values(self.config, seed=SEED)
        for name, value in values.items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator)
                values[name] = value + NOISE * noise
        return values

    def run_short(self, seq_len: int) -> tuple[TrialSizes, ExecutedCode]:
        """The first trial that the model takes: of the shortest length, in float64 where it can.

        Raises:
            PlanError: it computes other numbers on other layouts; or its forward fails.
        """
        dtypes = [torch.float64, torch.float32]
        if self.num_entries > MOST_WHOLE:
            dtypes = [torch.float32]
        error: Exception | None = None
        for dtype, length in itertools.product(dtypes, lengths_of(seq_len)):
            sizes = TrialSizes(2, length, dtype)
            try:
                return sizes, self.run(sizes)
            except PlanError:
                raise
            except Exception as failure:  # noqa: BLE001 - a user's forward may raise anything
                error = failure
        assert error is not None, "at least one length is tried"
        what = f"its forward raises {type_and_message(error)}"
        raise PlanError(Fault(self.label, what)) from error

    def run_branches(self, at_run: ExecutedCode, short: ExecutedCode, *others: TrialSizes) -> None:
        """Try the model at other sizes until all instructions that the run executes have been tried.

        Raises:
            PlanError: the place of a branch that no trial which costs little enough takes.
        """
        tried = [short]
        for sizes in others:
            if not at_run.first_line_beyond(*tried):
                return
            num_tokens = sizes.rows * sizes.length
            if num_tokens > MOST_TOKENS or num_tokens * self.num_entries > MOST_WORK:
                continue
            try:
                tried.append(self.run(sizes))
            except PlanError:
                raise
            except Exception:  # noqa: BLE001, S112 - a number type that the CPU lacks, for example
                continue
        place = at_run.first_line_beyond(*tried)
        if place:
            what = f"{place} runs at the sizes of the run alone, where the checks are too expensive"
            fix = "no branch on a size, a length or a number type in a forward"
            raise PlanError(Fault(self.label, what, fix=fix))

    def run(self, sizes: TrialSizes) -> ExecutedCode:
        """Try all blocks; the instructions that they execute."""
        code = ExecutedCode(self.pure.packages)
        batch = self._batch(sizes)
        blocks = meta_modules(lambda: self.family.blocks(self.config))
        x = RowParts.of(batch.inputs)
        extra = RowParts(0.0, 0.0, 0.0)
        casts = Casts()
        without_values: dict[str, nn.Module] = {}
        left = MOST_ALL
        seen: set[object] = set()
        for name in list(blocks):
            block = blocks.pop(name)  # freed after its trial
            num_entries, kind = num_computed_entries(block), kind_of(block)
            if num_entries > MOST_BLOCK or (kind in seen and num_entries > left):
                without_values = without_values or meta_blocks(self.family, self.config)
                x = RowParts.of(_drawn_output(name, without_values[name], x.whole, batch))
                continue
            seen.add(kind)
            left -= num_entries
            self._fill(name, block, sizes.dtype)
            trial = BlockTrial(self.pure, name, block, batch, sizes, casts)
            with torch.no_grad(), code:
                x, extra = trial.run(x, extra, is_last=not blocks)
        return code

    def _fill(self, name: str, block: nn.Module, dtype: torch.dtype) -> None:
        known = {}
        for path, _param in block.named_parameters():
            value = self._known.get(f"{name}.{path}")
            if value is not None:
                known[path] = value.to(dtype) if value.is_floating_point() else value
        fill(block, dtype=dtype, known=known)

    @property
    def _vocab(self) -> int:
        return self.config.axis_sizes().get("vocab", 0)

    def _batch(self, sizes: TrialSizes) -> Batch:
        """Sequences of drawn ids, images or arrays; where they are tokens one target does not count."""
        if self.config.kind == "arrays":
            drawn = drawn_arrays(np.arange(sizes.rows), self.config.input_specs(), seed=SEED)
            arrays = {name: torch.from_numpy(array) for name, array in drawn.items()}
            return _with_keys(array_batch(arrays))
        if self.config.kind == "images":
            fields = self.config.model_dump()
            size, classes = fields["image_size"], fields["classes"]
            generator = torch.Generator().manual_seed(SEED)
            images = torch.randint(0, 256, (sizes.rows, 1, size, size), generator=generator)
            targets_B = torch.randint(0, classes, (sizes.rows,), generator=generator)
            return _with_keys(image_batch(images.to(torch.uint8), targets_B))
        ids_BS = draw_ids(
            sizes.rows, sizes.length + 1, vocab=self._vocab, named=self.pure.ids.found
        )
        num_targets = getattr(self.config, "labels", 0) or self._vocab
        targets_BS = ids_BS[:, 1:] % num_targets
        targets_BS[0, 0] = IGNORE
        return _with_keys(token_batch(ids_BS[:, :-1].contiguous(), targets_BS))


def _with_keys(batch: Batch) -> Batch:
    """The batch with keys of random numbers, as a step has them."""
    places = np.arange(len(batch.inputs), dtype=np.int64)
    return replace(batch, draw_keys=torch.from_numpy(draw_keys(places, seed=SEED)))


def _drawn_output(name: str, block: nn.Module, x: Any, batch: Batch) -> Any:
    """Drawn numbers of the shape that a block on the meta device hands on."""

    def run(blocks: Mapping[str, nn.Module], own_batch: Batch) -> Any:
        device = own_batch.inputs.device
        without = map_leaves(x, Tensor, lambda one: torch.empty_like(one, device=device))
        (only,) = blocks.values()
        return run_block(name, only, without, own_batch)

    with torch.no_grad():
        meta_batch = batch.map(lambda field: field.to("meta"))
        out = run_without_memory(run, {"block": block}, meta_batch)
    generator = torch.Generator().manual_seed(SEED)

    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=generator)

    return map_leaves(activation_of(out), Tensor, draw)


def lengths_of(seq_len: int) -> tuple[int, ...]:
    """The lengths at which a model of sequences of `seq_len` tokens is tried, short ones first."""
    shorter = (length for length in LENGTHS if length < seq_len and seq_len % length == 0)
    return (*shorter, seq_len)
