"""The items of what a script gives as data: a dataset or a DataLoader of torch or of `datasets`, a list, any iterable.

Note [Batches of a DataLoader]
    A run makes its own batches, of `batch.global_size`, on any layout. So of a DataLoader the
    dataset is read, by its workers, and its sampler where that chooses or orders items in another
    way than all of them once, shuffled or not. What its own collate_fn makes is split into items.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from weft.data.order import Order
from weft.errors import Fault, UserError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

KEY = "data"


@dataclass(frozen=True)
class GivenItems:
    """Items that are read once, in their order.

    Attributes:
        name: of the object, for messages.
        order: in which a run reads them.
        is_sized: whether their number is known; others may have no end.
    """

    items: Iterator[Any]
    name: str
    order: Order
    is_sized: bool


def given_items(data: Any, *, seed: int) -> GivenItems | None:
    """The items of an object; None if it has none.

    Args:
        seed: of torch's generator while items are read, for datasets and samplers that draw.
    """
    name = type(data).__name__
    if isinstance(data, (str, bytes, Mapping)):
        return None
    if _is_loader(data):
        return _of_loader(data, seed)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return GivenItems(_seeded(_all_of(data), seed), name, "shuffled", is_sized=True)
    if isinstance(data, Iterable):
        return GivenItems(_seeded(data, seed), name, "stored", is_sized=False)
    return None


def _seeded(items: Iterable[Any], seed: int) -> Iterator[Any]:
    """The items, read with torch's generator of this seed, which then is as before."""
    torch = sys.modules.get("torch")  # who has not imported it draws nothing from it
    with torch.random.fork_rng(devices=()) if torch else nullcontext():
        if torch:
            torch.manual_seed(seed)
        yield from items


def _all_of(data: Any) -> Iterator[Any]:
    """As many items as the length says.

    Raises:
        UserError: there are others.
    """
    iterates = hasattr(type(data), "__iter__")
    items = iter(data) if iterates else _indexed(data)
    number = 0
    for item in items:
        number += 1
        yield item
    if number != len(data):
        what = f"{type(data).__name__} ends after {number:,} items, and its length is another"
        fix = "repair its __len__, or give it without a length"
        raise UserError(Fault(KEY, what, got=f"{len(data):,}", need=f"{number:,}", fix=fix))


def _indexed(data: Any) -> Iterator[Any]:
    for index in range(len(data)):
        try:
            item = data[index]
        except IndexError:
            return
        yield item


def _is_loader(data: Any) -> bool:
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, module.DataLoader)


def _of_loader(loader: DataLoader[Any], seed: int) -> GivenItems:
    """See Note [Batches of a DataLoader]."""
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        SequentialSampler,
        default_collate,
    )
    from torch.utils.data._utils.collate import default_convert

    dataset = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    sampler = None if is_iterable else loader.sampler
    has_own_batches = type(loader.batch_sampler) not in (BatchSampler, type(None))
    shuffles = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False)
    has_all = isinstance(sampler, (SequentialSampler, DistributedSampler)) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    makes_batches = loader.collate_fn not in (default_collate, default_convert)
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn if makes_batches else list,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
    }
    if is_iterable or not has_own_batches:
        settings["batch_size"] = loader.batch_size or 1
    if has_own_batches:
        settings["batch_sampler"] = loader.batch_sampler
    elif not is_iterable and not has_all:
        settings["sampler"] = sampler
    if makes_batches and loader.batch_size is None and not has_own_batches:
        items: Iterable[Any] = loader
    else:
        batches: Iterable[Any] = DataLoader(dataset, **settings)
        items = chain.from_iterable(map(_rows, batches) if makes_batches else batches)
    order: Order = "shuffled" if shuffles and has_all and not has_own_batches else "stored"
    return GivenItems(_seeded(items, seed), "DataLoader", order, is_sized=not is_iterable)


def _rows(batch: Any) -> Iterator[Any]:
    """The items of a batch that a collate_fn has made.

    Raises:
        UserError: its parts have different lengths.
    """
    if isinstance(batch, Mapping):
        parts: Sequence[Any] = tuple(batch.values())
    elif isinstance(batch, (tuple, list)) and not any(isinstance(each, str) for each in batch):
        parts = tuple(batch)
    else:
        yield from batch
        return
    lengths = {len(part) if hasattr(part, "__len__") else None for part in parts}
    if len(lengths) != 1 or None in lengths:
        what = "the collate_fn of the DataLoader makes batches whose parts have different lengths"
        fix = "leave it out: a run makes its own batches"
        raise UserError(Fault(KEY, what, got=f"{type(batch).__name__} of {len(parts)}", fix=fix))
    for row in zip(*parts, strict=True):
        yield dict(zip(batch, row, strict=True)) if isinstance(batch, Mapping) else row
