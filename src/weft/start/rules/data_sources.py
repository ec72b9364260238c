"""Checks of a run's data sources, made before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from weft.config.schema import DataConfig, EvalConfig, ModelSection
from weft.data import images
from weft.data.dataset import open_data, open_validation
from weft.data.files import KEY
from weft.data.prepared import Split, prepared_of, sources_of, tokenizer_of
from weft.data.samples import Samples, num_evaluated
from weft.data.token_sources import split_of
from weft.data.tokenizer import FILE
from weft.data.verify import content_faults
from weft.errors import DataError, Fault, counted
from weft.generate.model_source import is_guess

CROSS_ENTROPY = "cross_entropy"
READ_KEYS = (
    *(KEY, "data.format", "data.chat_template", "data.packing", "loss", "dpo.loss_type"),
    *("data.token_dtype", "data.mix", "data.tokenizer", "model"),
)
"""Keys and sections that the checks of the training data read."""


def source_faults(
    data: DataConfig, model: ModelSection, *, loss: str = CROSS_ENTROPY, has_labels: bool = False
) -> Iterator[Fault]:
    """Faults of the training data; the digits, which take a second to load, are only checked for
    existence.
    """
    is_digits = data.source == "digits" and model.kind == "images" and not data.mix
    try:
        if is_digits:
            images.check_digits()
        else:
            yield from kind_faults(open_data(data, model), loss, has_labels=has_labels)
            yield from _content_faults(sources_of(data))
    except DataError as error:
        for fault in error.faults:
            yield _with_possible_fix(fault, from_hf=model.from_hf)


def kind_faults(samples: Samples, loss: str, *, has_labels: bool = False) -> Iterator[Fault]:
    """Preference pairs are trained on by dpo and as rewards, answers with labels by KTO, and nothing
    else is.

    Args:
        has_labels: whether the loss of dpo is KTO.
    """
    facts = samples.facts()
    has_pairs, has_answers = "pairs" in facts, "answers" in facts
    if loss == "classify":
        return
    if has_answers or (has_labels and loss == "dpo"):
        if not has_answers:
            need = '{"prompt": "...", "completion": "...", "label": true}'
            fix = "--data.format unpaired, or another --dpo.loss_type"
            yield Fault("dpo.loss_type", "kto needs labelled answers", "other data", need, fix)
        elif not has_labels or loss != "dpo":
            what = "the answers have labels, which KTO alone reads"
            fix = "--loss dpo --dpo.loss_type kto"
            yield Fault("loss", what, got=loss, need="kto", fix=fix)
        return
    if has_pairs and loss == CROSS_ENTROPY:
        what = "cross entropy would imitate rejected answers as well"
        yield Fault("loss", what, got="preference pairs", fix="--loss dpo")
    if not has_pairs and loss != CROSS_ENTROPY:
        need = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
        fix = "--data.format preference, or --loss cross_entropy"
        yield Fault("loss", f"{loss} needs preference pairs", got="other data", need=need, fix=fix)


def _with_possible_fix(fault: Fault, *, from_hf: str | None) -> Fault:
    """The vocabulary of a model from a folder is fixed: the data must be prepared with its
    tokenizer.
    """
    if fault.key != "model.vocab" or from_hf is None:
        return fault
    file = Path(from_hf) / FILE
    name = shlex.quote(str(file)) if file.is_file() else "FILE"
    prepare = f"weft data prepare INPUT --out FOLDER --tokenizer {name}"
    return replace(fault, fix=f"{prepare}, then --data.source FOLDER")


def _content_faults(sources: Iterable[str], split: Split = "train") -> Iterator[Fault]:
    """Damage of the prepared folders among these sources."""
    for source in sources:
        prepared = prepared_of(source)
        if prepared is not None:
            yield from content_faults(prepared, split_of(source, split))


def sample_faults(data: DataConfig, model: ModelSection, sample: int) -> Iterator[Fault]:
    """Text after the last step needs the tokenizer of the data, which token files do not name."""
    if not sample or model.kind != "tokens":
        return
    try:
        tokenizer = tokenizer_of(data)
    except DataError:  # a fault of the training data
        return
    if is_guess(tokenizer, data, model):
        yield Fault(
            "sample",
            "nothing says which tokenizer belongs to these token files",
            got=f"{model.axis_sizes()['vocab']} tokens, data.tokenizer bytes",
            fix="--data.tokenizer with its tokenizer.json, or --sample 0",
        )


def validation_faults(
    data: DataConfig,
    model: ModelSection,
    evaluation: EvalConfig,
    *,
    loss: str = CROSS_ENTROPY,
    has_labels: bool = False,
    global_size: int = 1,
) -> Iterator[Fault]:
    """Faults of the validation data, where the run has evaluations.

    Args:
        global_size: samples of a batch.
    """
    if not evaluation.every:
        return
    try:
        samples = open_validation(data, model, source=evaluation.source)
        yield from kind_faults(samples, loss, has_labels=has_labels)
        if not num_evaluated(samples, global_size):
            what = "holds less than a batch, and a sample that does not count cannot fill it"
            got, need = counted(samples.num_samples, "sample"), f"{global_size} or more"
            fix = f"--batch.global_size {samples.num_samples}, or an array targets in INPUTS"
            yield Fault("eval.source", what, got=got, need=need, fix=fix)
        sources = sources_of(data)
        if evaluation.source:
            sources = (evaluation.source,)
        yield from _content_faults(sources, split="valid")
    except DataError as error:
        yield from error.faults
