"""What ranks have found about a live step, joined over all of them: equal on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.prove.live_step.compared_numbers import GradientRow, OutputRow, StepNumbers
from weft.prove.live_step.gradient_rows import GradientRows
from weft.prove.live_step.judgement import Judgement
from weft.prove.live_step.meta_chain import MetaChain
from weft.prove.live_step.output_sketch import OutputSketches
from weft.prove.live_step.owner_gradients import NO_NOISE, GradientNoise
from weft.prove.live_step.plain_pass import PassNumbers
from weft.prove.live_step.whole_params import largest_over_ranks, sum_over_ranks


@dataclass(frozen=True)
class WorldTables:
    """Tables for a `Judgement`; `plain.loss` is summed over targets."""

    layout: StepNumbers
    plain: StepNumbers
    outputs: tuple[OutputRow, ...]
    gradients: tuple[GradientRow, ...]
    output_spread: Mapping[str, float]
    loss_spread: float
    unlike_definition: tuple[str, ...]
    unequal: tuple[str, ...]


def world_tables(
    comm: Comm,
    chain: MetaChain,
    sketches: OutputSketches,
    numbers: PassNumbers,
    rows: GradientRows,
    *,
    sequences: slice,
    flagged: tuple[Collection[str], Collection[str]],
    loads: Mapping[str, Tensor],
) -> WorldTables:
    """Join the tables of all ranks; every rank must call it.

    Args:
        sequences: of the step, of which the plain pass has numbers.
        flagged: owners with other initial values, and with unequal copies, as this rank sees them.
        loads: of the layout, on the ranks that hold the block.
    """
    names = tuple(chain.blocks)
    widths = largest_over_ranks(comm, numbers.widths)  # a rank without sequences has none
    on_layout = sketches.resolved(dict(zip(names, widths.tolist(), strict=True)))
    on_layout = on_layout[:, :, sequences]
    sums = torch.stack((*on_layout, numbers.sketches, numbers.sizes))
    layout_sums, coverage, plain, sizes = sum_over_ranks(comm, sums).cpu()
    losses = sum_over_ranks(comm, numbers.losses)
    # One table of all that is a maximum, so that a step costs one collective and not one for each number.
    largest = torch.cat(
        (
            numbers.spread,
            numbers.spread.new_tensor([numbers.loss_spread]),
            numbers.spread.new_tensor([row.difference for row in rows.rows]),
            numbers.spread.new_tensor([astuple(row.noise) for row in rows.rows]).T.flatten(),
            _flags(chain, flagged, like=numbers.spread),
        )
    )
    num_rows = len(rows.rows)
    lengths = [len(names), 1, *(num_rows,) * 4, len(chain.shapes), len(chain.shapes)]
    parts = largest_over_ranks(comm, _without_nan(largest)).cpu().split(lengths)
    spread, loss_spread, differences, *noise, unlike, unequal = (part.tolist() for part in parts)
    products = numbers.spread.new_tensor([row.products for row in rows.rows])
    sum_over_ranks(comm, products)
    gradients = tuple(
        replace(row, difference=difference, noise=GradientNoise(*of_noise), products=(one, other))
        for row, difference, of_noise, (one, other) in zip(
            rows.rows, differences, zip(*noise, strict=True), products.tolist(), strict=True
        )
    )
    layout_loads, plain_loads = _loads(comm, names, loads, numbers.loads)
    norm = sum(row.squared_norm for row in gradients) ** 0.5
    return WorldTables(
        layout=StepNumbers(0.0, 0.0, 0, layout_loads),
        plain=StepNumbers(float(losses.sum()), norm, 0, plain_loads),
        outputs=tuple(
            _output_rows(names, layout_sums, coverage, plain, sizes, first=sequences.start)
        ),
        gradients=gradients,
        output_spread=dict(zip(names, spread, strict=True)),
        loss_spread=loss_spread[0],
        unlike_definition=_named(chain, unlike),
        unequal=_named(chain, unequal),
    )


def with_noise(
    comm: Comm, judgement: Judgement, numbers: PassNumbers, noise: Mapping[str, GradientNoise]
) -> Judgement:
    """The judgement with the noise that perturbed passes have measured; every rank must call it.

    Args:
        numbers: of this rank's perturbed passes.
        noise: what noise changes in gradients, as this rank has found it.
    """
    of_rows = [noise.get(row.parameter, NO_NOISE) for row in judgement.gradients]
    like = numbers.spread
    table = torch.cat(
        (
            like,
            like.new_tensor([numbers.loss_spread]),
            like.new_tensor([astuple(each) for each in of_rows]).flatten(),
        )
    )
    largest = largest_over_ranks(comm, _without_nan(table)).cpu()
    spread, loss_spread, found = largest.split((len(like), 1, 3 * len(of_rows)))
    gradients = tuple(
        replace(row, noise=GradientNoise(*of_row))
        for row, of_row in zip(judgement.gradients, found.view(-1, 3).tolist(), strict=True)
    )
    return replace(
        judgement,
        gradients=gradients,
        output_spread=dict(zip(judgement.blocks, spread.tolist(), strict=True)),
        loss_spread=float(loss_spread),
        num_terms=None,
    )


def _without_nan(x: Tensor) -> Tensor:
    """NaN is larger than any number: a maximum over ranks may drop it."""
    return x.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _flags(chain: MetaChain, flagged: Sequence[Collection[str]], *, like: Tensor) -> Tensor:
    return like.new_tensor([float(name in names) for names in flagged for name in chain.shapes])


def _named(chain: MetaChain, flags: Sequence[float]) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(chain.shapes, flags, strict=True) if flag)


def _output_rows(
    names: Sequence[str],
    layout: Tensor,
    coverage: Tensor,
    plain: Tensor,
    sizes: Tensor,
    *,
    first: int,
) -> list[OutputRow]:
    """Rows of each block but the last, which yields the loss; `first` is the first sequence."""
    found = []
    for index, name in enumerate(names[:-1]):
        rows = zip(
            layout[index].tolist(),
            coverage[index].tolist(),
            plain[index].tolist(),
            sizes[index].tolist(),
            strict=True,
        )
        for sequence, (total, copies, right, size) in enumerate(rows, start=first):
            # Copies of an output on several ranks count once; one that is wrong moves the mean.
            mean = total / copies if copies else None
            found.append(OutputRow(name, sequence, mean, right, size))
    return found


def _loads(
    comm: Comm, names: Sequence[str], layout: Mapping[str, Tensor], plain: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tokens at each expert by block, of the layout and of one device."""
    widths = torch.zeros(len(names), dtype=torch.int64, device=comm.device)
    for loads in (layout, plain):
        for name, load in loads.items():
            widths[names.index(name)] = load.numel()
    largest = largest_over_ranks(comm, widths).tolist()
    total = sum(largest)
    if not total:
        return {}, {}
    on_layout = torch.zeros(total, dtype=torch.int64, device=comm.device)
    on_device = torch.zeros(total, dtype=torch.int64, device=comm.device)
    start = 0
    for name, width in zip(names, largest, strict=True):
        if name in layout:
            on_layout[start : start + width] = layout[name]
        if name in plain:
            on_device[start : start + width] = plain[name]
        start += width
    largest_over_ranks(comm, on_layout)  # of ranks that hold the block, which have the same
    sum_over_ranks(comm, on_device)
    return _by_block(names, largest, on_layout), _by_block(names, largest, on_device)


def _by_block(
    names: Sequence[str], widths: Sequence[int], flat: Tensor
) -> dict[str, tuple[int, ...]]:
    parts = flat.cpu().split(list(widths))
    return {
        name: tuple(part.tolist())
        for name, width, part in zip(names, widths, parts, strict=True)
        if width
    }
