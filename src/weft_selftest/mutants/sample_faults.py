"""Mutants of samples: borders of windows and answers, epochs, prefetched batches, large ids and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weft.data.order import places_of_step
from weft.data.packing import Packed
from weft.models.common.batch import IGNORE, Batch
from weft.parallel.cp import AXIS as CP_AXIS
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

LOADER = "weft.train.data_loader"
MICRO_BATCHES = f"{LOADER}:DataLoader.micro_batches"
ANY_AXIS = ("",)
BATCH = ("", "embed", "layer0")
LONG = "--data.seq_len 512"


def open_window(pack: Callable[..., Packed], *args: Any) -> Packed:
    """A document that ends with the window is taken for one that goes on."""
    found = pack(*args)
    is_last = found.is_last.copy()
    is_last[-1] = False
    return replace(found, is_last=is_last)


def same_epoch_again(
    samples_of: Callable[..., Any], samples: Any, step: int, *, global_size: int, seed: int
) -> Any:
    """Behind the end of an epoch its own order begins again."""
    places = places_of_step(step, global_size) % samples.num_samples
    return samples.at(places, seed=seed)


def dropped_remainder(
    samples_of: Callable[..., Any], samples: Any, step: int, *, global_size: int, seed: int
) -> Any:
    """A batch that an epoch cannot fill is left out."""
    steps_of_epoch = max(samples.num_samples // global_size, 1)
    epoch, inside = divmod(step, steps_of_epoch)
    first = epoch * samples.num_samples + inside * global_size
    return samples.at(np.arange(first, first + global_size, dtype=np.int64), seed=seed)


def later_across_documents(with_later: Callable[..., Batch], batch: Batch) -> Batch:
    """Tokens after the next one may be of another document."""
    found = with_later(replace(batch, documents=None))
    return replace(found, documents=batch.documents)


def changed_batches(change: Callable[[Batch], Batch]) -> Callable[..., list[Batch]]:
    """Every micro-batch is another one."""

    def call(micro_batches: Callable[..., list[Batch]], loader: Any, chosen: Any) -> list[Batch]:
        return [change(batch) for batch in micro_batches(loader, chosen)]

    return call


def small_ids(batch: Batch) -> Batch:
    """Ids have 15 bits."""
    return replace(batch, inputs=batch.inputs % 2**15)


def rounded_positions(batch: Batch) -> Batch:
    """Positions are rounded to bfloat16, which has them up to 256."""
    return replace(batch, positions=batch.positions.to(torch.bfloat16).long())


def wrapped_positions(batch: Batch) -> Batch:
    """A table of angles has 300 rows, and begins again behind them."""
    return replace(batch, positions=batch.positions % 300)


def answers_one_early(row: Callable[..., Any], samples: Any, sample: int) -> Any:
    """The first token of an answer does not count, and the last one of a question neither."""
    found = row(samples, sample)
    targets = found.targets.copy()
    is_first = np.concatenate(([True], targets[:-1] == IGNORE)) & (targets != IGNORE)
    targets[is_first] = IGNORE
    return replace(found, targets=targets)


def all_tokens_count(row: Callable[..., Any], samples: Any, sample: int) -> Any:
    """Questions are learned, too."""
    found = row(samples, sample)
    targets = found.targets.copy()
    is_inside = found.documents[1:] == found.documents[:-1]
    following = np.where(is_inside, found.inputs[1:], IGNORE)
    targets[:-1] = np.where(targets[:-1] == IGNORE, following, targets[:-1])
    return replace(found, targets=targets)


def late_results(results: Callable[..., Iterator[Any]], prefetcher: Any) -> Iterator[Any]:
    """From the second on, each step gets what was read for the one before."""
    before = None
    for result in results(prefetcher):
        yield result if before is None else before
        before = result


def refilled_buffer(results: Callable[..., Iterator[Any]], prefetcher: Any) -> Iterator[Any]:
    """What waits in the queue is overwritten by what is read next."""
    found = list(results(prefetcher))
    following = found[1:] + found[-1:]
    for batches, others in zip(found, following, strict=True):
        for batch, other in zip(batches, others, strict=True):
            batch.targets.copy_(other.targets)
        yield batches


def own_documents_repeated(columns: Callable[..., Batch], batch: Batch, **place: Any) -> Batch:
    """The documents of a rank's columns, once for each rank, stand for those of the sequence."""
    own = columns(batch, **place)
    if own.documents is None or own.whole_documents is None:
        return own
    num_ranks = own.whole_documents.shape[1] // own.documents.shape[1]
    return replace(own, whole_documents=own.documents.repeat(1, num_ranks))


def rounded_by_evaluation(evaluate: Callable[..., Any], evaluation: Any) -> Any:
    """After an evaluation parameters are taken back from rounded copies."""
    report = evaluate(evaluation)
    with torch.no_grad():
        for param in evaluation.model.params.values():
            param.copy_(param.to(torch.bfloat16))
    return report


MUTANTS = (
    Mutant(
        "a_document_that_ends_with_the_window_goes_on",
        "its last token is asked for the first one of another document",
        MutantLayout("dp2", documents=True),
        (FunctionFault("weft.data.samples:pack", open_window),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "an_epoch_begins_again_in_its_own_order",
        "the second time through the data is the first one again",
        MutantLayout("dp2", options=LONG),
        (FunctionFault(f"{LOADER}:samples_of", same_epoch_again),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "the_remainder_of_an_epoch_is_dropped",
        "samples at the end of every epoch are never seen",
        MutantLayout("dp2", options=LONG),
        (FunctionFault(f"{LOADER}:samples_of", dropped_remainder),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "later_targets_cross_documents",
        "the token after the next one is of another document",
        MutantLayout("dp2", family="deepseek", documents=True),
        (FunctionFault(f"{LOADER}:with_later_targets", later_across_documents),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "ids_have_fifteen_bits",
        "visible only with a large vocabulary",
        MutantLayout("dp2", options="--model.vocab 40000", rows="ids"),
        (FunctionFault(MICRO_BATCHES, changed_batches(small_ids)),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "positions_are_rounded_to_bfloat16",
        "visible only in long sequences",
        MutantLayout("dp2", options=LONG),
        (FunctionFault(MICRO_BATCHES, changed_batches(rounded_positions)),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "positions_begin_again_behind_the_table_of_angles",
        "visible only in long sequences",
        MutantLayout("tp2", options=LONG),
        (FunctionFault(MICRO_BATCHES, changed_batches(wrapped_positions)),),
        axes=(TP_AXIS, ""),
        blocks=BATCH,
    ),
    Mutant(
        "the_first_token_of_an_answer_does_not_count",
        "masks of records are off by one",
        MutantLayout("dp2", options="--data.seq_len 64", rows="chat"),
        (FunctionFault("weft.data.conversations:ConversationSamples._row", answers_one_early),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "questions_are_learned_too",
        "masks of records are lost",
        MutantLayout("dp2", options="--data.seq_len 64", rows="chat"),
        (FunctionFault("weft.data.conversations:ConversationSamples._row", all_tokens_count),),
        axes=ANY_AXIS,
        blocks=BATCH,
    ),
    Mutant(
        "prefetched_batches_are_one_step_late",
        "the first step is right, and every other has the batch of the one before",
        MutantLayout("dp2"),
        (FunctionFault(f"{LOADER}:_Prefetcher.results", late_results),),
        axes=(DP_AXIS, ""),
        blocks=BATCH,
    ),
    Mutant(
        "a_prefetched_batch_has_the_targets_of_the_next",
        "the memory of a batch that waits is written again",
        MutantLayout("dp2"),
        (FunctionFault(f"{LOADER}:_Prefetcher.results", refilled_buffer),),
        axes=(DP_AXIS, ""),
        blocks=(*BATCH, "loss"),
    ),
    Mutant(
        "each_rank_takes_its_own_documents_for_those_of_the_sequence",
        "borders of documents are those of a part of the columns, repeated",
        MutantLayout("cp2", documents=True),
        (FunctionFault("weft.models.common.batch:Batch.columns", own_documents_repeated),),
        axes=(CP_AXIS, ""),
        blocks=BATCH,
    ),
    Mutant(
        "an_evaluation_leaves_rounded_parameters",
        "training goes on with the values that were evaluated",
        MutantLayout("dp2", evaluates=True),
        (FunctionFault("weft.train.evaluate:Evaluation.__call__", rounded_by_evaluation),),
        axes=ANY_AXIS,
        blocks=("embed", "layer*", "head", ""),
    ),
)
