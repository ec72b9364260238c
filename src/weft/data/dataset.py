"""The data of a run: its sources opened for a model, as numbered samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.data import images
from weft.data.arrays import open_arrays
from weft.data.conversations import ConversationSamples
from weft.data.document_bounds import longest_document
from weft.data.files import KEY
from weft.data.mixture import KEY as MIX_KEY
from weft.data.mixture import make_mixture_sampler, read_mix
from weft.data.prepared import Prepared, Split, prepared_of, tokenizer_of
from weft.data.record_sources import holds_records, open_records
from weft.data.samples import ImageSamples, MixtureSamples, Samples, SequenceSamples
from weft.data.token_sources import has_documents, open_source
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import TokenStream, file_names
from weft.errors import DataError, Fault, counted

EVAL_KEY = "eval.source"


def open_data(data: DataConfig, model: ModelConfig) -> Samples:
    """The source of `data`, or the mixture of several, checked against the model.

    Raises:
        DataError: missing, empty, too short, broken, or outside the model's vocabulary, image size
            or classes.
    """
    if not data.mix:
        return _open_split(data, model, split="train")
    weights = read_mix(data.mix)
    _check_same_tokenizer(tuple(weights))
    tokenizer = tokenizer_of(data).name
    parts = []
    for source in weights:
        part = data.model_copy(update={"source": source, "tokenizer": tokenizer})
        parts.append(_open_split(part, model, split="train"))
    _check_same_kind(tuple(weights), parts)
    return MixtureSamples(parts=tuple(parts), sampler=make_mixture_sampler(tuple(weights.values())))


def open_validation(data: DataConfig, model: ModelConfig, *, source: str | None) -> Samples:
    """The data that a run is evaluated on.

    Args:
        source: `eval.source`; None: the validation documents of the prepared folder `data.source`.

    Raises:
        DataError: as `open_data`; or there is nothing to evaluate on.
    """
    if source is None:
        if data.mix or prepared_of(data.source) is None:
            got = "several sources" if data.mix else repr(data.source)
            fix = "--eval.source FILE"
            if model.kind == "tokens":
                fix += (
                    ", or a prepared folder, which keeps documents for it: "
                    "weft data prepare INPUT --out FOLDER, then --data.source FOLDER"
                )
            raise DataError(
                Fault(
                    EVAL_KEY,
                    "there is nothing to evaluate on",
                    got=got,
                    need="a prepared data.source" if model.kind == "tokens" else "eval.source",
                    fix=fix,
                )
            )
        source = data.source
    tokenizer = tokenizer_of(data)
    validation = data.model_copy(update={"source": source, "mix": (), "tokenizer": tokenizer.name})
    try:
        _check_validation_tokenizer(source, tokenizer)
        return _open_split(validation, model, split="valid")
    except DataError as error:
        faults = []
        for fault in error.faults:
            if fault.key == KEY:
                key = EVAL_KEY
            else:
                key = fault.key
            faults.append(replace(fault, key=key))
        raise DataError(*faults) from None


def _open_split(data: DataConfig, model: ModelConfig, *, split: Split) -> Samples:
    if model.kind == "images":
        return _open_images(data, model)
    if model.kind == "arrays":
        return open_arrays(data.source, model.input_specs(), order=data.order)
    if holds_records(data.source, data):
        vocab = model.axis_sizes()["vocab"]
        return open_records(data.source, data, vocab=vocab, split=split)
    return _open_tokens(data, model, split=split)


def _open_tokens(data: DataConfig, model: ModelConfig, *, split: Split) -> SequenceSamples:
    if data.source == "digits":
        raise DataError(
            Fault(KEY, "'digits' are images, the model reads tokens", fix="--model.name mnist")
        )
    stream = open_source(data.source, data, vocab=model.axis_sizes()["vocab"], split=split)
    if len(stream) <= data.seq_len:
        need = f"at least {data.seq_len + 1} = data.seq_len + 1"
        if len(stream) > 1:
            shorter = f"--data.seq_len {len(stream) - 1}, or "
        else:
            shorter = ""
        what = f"{file_names(stream.files)} is too short"
        raise DataError(
            Fault(
                KEY,
                what,
                got=counted(len(stream), "token"),
                need=need,
                fix=f"{shorter}a longer source",
            )
        )
    if data.packing == "single":
        what = "text has no records, one of which would be a sequence"
        fix = "--data.packing documents or stream"
        raise DataError(Fault("data.packing", what, got="single", fix=fix))
    if data.packing == "documents":
        _check_documents(stream, data)
    return SequenceSamples(
        stream=stream,
        seq_len=data.seq_len,
        source=data.source,
        packing="documents" if data.packing == "documents" else "stream",
        order=data.order,
    )


def _check_documents(stream: TokenStream, data: DataConfig) -> None:
    if not has_documents(stream):
        what = f"{file_names(stream.files)} does not say where documents begin"
        fix = "--data.packing stream, or prepare their texts: weft data prepare INPUT --out FOLDER"
        raise DataError(Fault("data.packing", what, got="documents", need="stream", fix=fix))
    if data.long == "error":
        number, length = longest_document(stream.document_bounds)
        if length > data.seq_len:
            what = f"document {number} of {data.source} is longer than the sequence"
            fix = f"--data.seq_len {length}, or --data.long split"
            raise DataError(
                Fault(
                    "data.long",
                    what,
                    got=f"{length} tokens",
                    need=f"at most {data.seq_len}",
                    fix=fix,
                )
            )


def _check_same_kind(sources: tuple[str, ...], parts: Sequence[Samples]) -> None:
    """Check that all sources of a mixture are text, conversations, or pairs."""
    kinds = [_kind_of(part) for part in parts]
    for source, kind in zip(sources, kinds, strict=True):
        if kind != kinds[0]:
            got = f"{kinds[0]} in {sources[0]}, {kind} in {source}"
            fix = "mix text with text, conversations with conversations, pairs with pairs"
            raise DataError(Fault(MIX_KEY, "its sources are of different kinds", got=got, fix=fix))


def _kind_of(samples: Samples) -> str:
    if not isinstance(samples, ConversationSamples):
        return "text"
    return samples.unit


def _check_same_tokenizer(sources: tuple[str, ...]) -> None:
    """Check that all prepared folders of a mixture used one tokenizer."""
    first: tuple[str, str, Prepared] | None = None
    for source in sources:
        prepared = prepared_of(source)
        if prepared is None:
            continue
        sha256 = prepared.meta.tokenizer_sha256
        if first is None:
            first = source, sha256, prepared
        elif sha256 != first[1]:
            what = "its sources were prepared by different tokenizers"
            name = first[2].tokenizer().name
            fix = f"weft data prepare INPUT --out FOLDER --tokenizer {name}, in place of {source}"
            raise DataError(
                Fault(MIX_KEY, what, got=f"{first[0]} and {source}", need="one tokenizer", fix=fix)
            )


def _check_validation_tokenizer(source: str, tokenizer: Tokenizer) -> None:
    """Check that a prepared folder for evaluation used the tokenizer of the training data."""
    prepared = prepared_of(source)
    if prepared is None or prepared.meta.tokenizer_sha256 == tokenizer.sha256:
        return
    what = f"{source} was prepared by another tokenizer than the training data"
    fix = f"weft data prepare INPUT --out FOLDER --tokenizer {tokenizer.name}, then --{EVAL_KEY} FOLDER"
    raise DataError(
        Fault(EVAL_KEY, what, got=prepared.tokenizer().name, need=tokenizer.name, fix=fix)
    )


def _open_images(data: DataConfig, model: ModelConfig) -> ImageSamples:
    if data.source == "stdlib":
        raise DataError(
            Fault(KEY, "'stdlib' is text, the model reads images", fix="--data.source digits")
        )
    if data.source == "digits":
        pairs = images.digits()
    else:
        pairs = images.read_pair(data.source)
    sizes = model.model_dump()
    pairs.check(image_size=sizes["image_size"], classes=sizes["classes"])
    return ImageSamples(pairs, data.source, data.order)
