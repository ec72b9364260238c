"""Checks of a run's data sources, made before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from weft.config.checks import Check
from weft.config.run import Run
from weft.data import images
from weft.data.dataset import open_data, open_validation
from weft.data.files import KEY
from weft.data.prepared import Split, prepared_of, sources_of
from weft.data.token_sources import split_of
from weft.data.verify import content_faults
from weft.errors import DataError, Fault


def source_faults(run: Run) -> Iterable[Fault]:
    """Faults of the training data; the digits, which take a second to load, are only checked for
    existence.
    """
    is_digits = run.data.source == "digits" and run.model.kind == "images" and not run.data.mix
    try:
        if is_digits:
            images.check_digits()
        else:
            open_data(run.data, run.model)
            return tuple(_content_faults(sources_of(run.data)))
    except DataError as error:
        return tuple(_with_possible_fix(fault, from_hf=run.model.from_hf) for fault in error.faults)
    return ()


def _with_possible_fix(fault: Fault, *, from_hf: str | None) -> Fault:
    """The vocabulary of a model from a folder is fixed: the data must be prepared with its
    tokenizer.
    """
    if fault.key != "model.vocab" or from_hf is None:
        return fault
    return replace(
        fault, fix=f"weft data prepare the text with --tokenizer {from_hf}/tokenizer.json"
    )


def _content_faults(sources: Iterable[str], split: Split = "train") -> Iterator[Fault]:
    """Damage of the prepared folders among these sources."""
    for source in sources:
        prepared = prepared_of(source)
        if prepared is not None:
            yield from content_faults(prepared, split_of(source, split))


def validation_faults(run: Run) -> Iterable[Fault]:
    """Faults of the validation data, where the run has evaluations."""
    if not run.eval.every:
        return ()
    try:
        open_validation(run.data, run.model, source=run.eval.source)
        sources = (run.eval.source,) if run.eval.source else sources_of(run.data)
        return tuple(_content_faults(sources, split="valid"))
    except DataError as error:
        return error.faults
    return ()


CHECKS = (
    Check((KEY, "data.token_dtype", "data.mix", "data.tokenizer", "model"), source_faults),
    Check(
        (KEY, "data.token_dtype", "data.mix", "data.tokenizer", "model", "eval"), validation_faults
    ),
)
