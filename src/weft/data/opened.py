"""Owns what a run reads: its sources opened for a model, as numbered samples. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weft.config.checks import Check
from weft.config.run import Run
from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.data import images
from weft.data.bounds import longest
from weft.data.files import KEY
from weft.data.mixture import KEY as MIX_KEY
from weft.data.mixture import read_mix, turns_of
from weft.data.order import layout_of, samples_of_step
from weft.data.prepared import Split, prepared_of, tokenizer_of
from weft.data.samples import Arrays, Mixture, Pictures, Samples, Sequences
from weft.data.sources import has_documents, open_source
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import TokenStream, names
from weft.errors import DataError, Fault

__all__ = ["CHECKS", "Arrays", "Samples", "layout_of", "open_data", "open_valid", "samples_of_step"]

EVAL_KEY = "eval.source"


def open_data(data: DataConfig, model: ModelConfig) -> Samples:
    """The source of `data`, or the mixture of several, checked against the model that shall read it.

    Raises:
        DataError: missing, empty, too short, broken, or beyond the model's vocabulary, image size or classes.
    """
    if not data.mix:
        return _open(data, model)
    weights = read_mix(data.mix)
    _check_tokenizers(tuple(weights))
    shared = data.model_copy(update={"tokenizer": tokenizer_of(data).name})
    parts = tuple(_open(shared.model_copy(update={"source": source}), model) for source in weights)
    return Mixture(parts, turns_of(tuple(weights.values())))


def open_valid(run: Run) -> Samples:
    """What a run is evaluated on: `eval.source`, or the validation documents of the prepared folder that it reads.

    Raises:
        DataError: as `open_data`; or there is nothing to evaluate on.
    """
    source = run.eval.source
    if source is None and (run.data.mix or prepared_of(run.data.source) is None):
        got = "several sources" if run.data.mix else repr(run.data.source)
        fix = "--eval.source FILE, or weft data prepare, which keeps documents for it"
        raise DataError(Fault(EVAL_KEY, "there is nothing to evaluate on", got, "a prepared data.source", fix))
    source = source or run.data.source
    own = tokenizer_of(run.data)
    data = run.data.model_copy(update={"source": source, "mix": (), "tokenizer": own.name})
    try:
        _check_valid_tokenizer(source, own)
        return _open(data, run.model, split="valid")
    except DataError as error:
        keys = {KEY: EVAL_KEY}
        raise DataError(*(replace(fault, key=keys.get(fault.key, fault.key)) for fault in error.faults)) from None


def _open(data: DataConfig, model: ModelConfig, *, split: Split = "train") -> Samples:
    return _open_images(data, model) if model.kind == "images" else _open_tokens(data, model, split=split)


def _open_tokens(data: DataConfig, model: ModelConfig, *, split: Split) -> Sequences:
    if data.source == "digits":
        raise DataError(Fault(KEY, "'digits' are images, the model reads tokens", fix="--model.name mnist"))
    stream = open_source(data.source, data, vocab=model.axis_sizes()["vocab"], split=split)
    if len(stream) <= data.seq_len:
        need = f"at least {data.seq_len + 1} = data.seq_len + 1"
        fix = f"--data.seq_len {len(stream) - 1}, or a longer source" if len(stream) > 1 else "a longer source"
        raise DataError(Fault(KEY, f"{names(stream.files)} is too short", f"{len(stream)} tokens", need, fix))
    if data.packing == "documents":
        _check_documents(stream, data)
    return Sequences(stream, data.seq_len, data.source, data.packing)


def _check_documents(stream: TokenStream, data: DataConfig) -> None:
    if not has_documents(stream):
        what = f"{names(stream.files)} does not say where documents begin"
        fix = "weft data prepare their texts, or --data.packing stream"
        raise DataError(Fault("data.packing", what, "documents", "stream", fix))
    if data.long == "error":
        number, length = longest(stream.document_bounds)
        if length > data.seq_len:
            what = f"document {number} of {data.source} is longer than the sequence"
            fix = f"--data.seq_len {length}, or --data.long split"
            raise DataError(Fault("data.long", what, f"{length} tokens", f"at most {data.seq_len}", fix))


def _check_tokenizers(sources: tuple[str, ...]) -> None:
    """Prepared folders of one mixture were made by one tokenizer."""
    known = [(source, found) for source in sources if (found := prepared_of(source)) is not None]
    for source, found in known[1:]:
        if found.meta.tokenizer_sha256 != known[0][1].meta.tokenizer_sha256:
            what, got = "its sources were prepared by different tokenizers", f"{known[0][0]} and {source}"
            fix = f"weft data prepare one of them with --tokenizer {known[0][0]}/tokenizer.json"
            raise DataError(Fault(MIX_KEY, what, got, "one tokenizer", fix))


def _check_valid_tokenizer(source: str, own: Tokenizer) -> None:
    """A prepared folder to evaluate on was made by the tokenizer of what is trained on."""
    found = prepared_of(source)
    if found is not None and found.meta.tokenizer_sha256 != own.sha256:
        what, need = f"{source} was prepared by another tokenizer than what is trained on", own.name
        fix = f"weft data prepare it with --tokenizer {own.name}"
        raise DataError(Fault(EVAL_KEY, what, found.tokenizer().name, need, fix))


def _open_images(data: DataConfig, model: ModelConfig) -> Pictures:
    if data.source == "stdlib":
        raise DataError(Fault(KEY, "'stdlib' is text, the model reads images", fix="--data.source digits"))
    pairs = images.digits() if data.source == "digits" else images.read_pair(data.source)
    sizes = model.model_dump()
    pairs.check(image_size=sizes["image_size"], classes=sizes["classes"])
    return Pictures(pairs, data.source)


def source_faults(run: Run) -> Iterable[Fault]:
    """What is wrong with the source; the digits, a second to load, are only looked for."""
    try:
        if (run.data.source, run.model.kind, run.data.mix) == ("digits", "images", ()):
            images.check_digits()
        else:
            open_data(run.data, run.model)
    except DataError as error:
        return tuple(_mended(fault, run) for fault in error.faults)
    return ()


def _mended(fault: Fault, run: Run) -> Fault:
    """The vocabulary of a model that comes from a folder is not for choosing: the data has to speak its language."""
    if fault.key != "model.vocab" or run.model.from_hf is None:
        return fault
    return replace(fault, fix=f"weft data prepare the text with --tokenizer {run.model.from_hf}/tokenizer.json")


def eval_faults(run: Run) -> Iterable[Fault]:
    """What is wrong with the source to evaluate on, where there shall be evaluations."""
    if not run.eval.every:
        return ()
    try:
        open_valid(run)
    except DataError as error:
        return error.faults
    return ()


CHECKS = (
    Check((KEY, "data.token_dtype", "data.mix", "data.tokenizer", "model"), source_faults),
    Check((KEY, "data.token_dtype", "data.mix", "data.tokenizer", "model", "eval"), eval_faults),
)
