"""Rules within a section of the config, and between sections other than the mesh: texts, losses, guards. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.config.schema import (
    SCORED,
    DataConfig,
    EvalConfig,
    GuardConfig,
    LossName,
    PrecisionConfig,
    SaveConfig,
)
from weft.core.model_config import ModelConfig
from weft.core.precision import dtype_faults
from weft.errors import Fault

NUM_BYTES = 256
"""Number of byte tokens."""


def sequence_fits_model(model: ModelConfig, *, seq_len: int) -> Iterator[Fault]:
    """The model takes sequences of this length."""
    fault = model.check_seq_len(seq_len)
    if fault is not None:
        yield fault


def vocabulary_holds_bytes(model: ModelConfig, data: DataConfig) -> Iterator[Fault]:
    """Where the default text is read as bytes, the vocabulary has all of them; other sources are
    checked when opened.
    """
    is_default_text = model.kind == "tokens" and data.source == "stdlib" and not data.mix
    if not is_default_text or data.tokenizer != "bytes":
        return
    size = model.axis_sizes().get("vocab", NUM_BYTES)
    if size < NUM_BYTES:
        yield Fault(
            "model.vocab",
            "is smaller than the tokenizer's",
            got=str(size),
            need=f"at least {NUM_BYTES} for bytes",
            fix=f"--model.vocab {NUM_BYTES}",
        )


def number_types_fit(precision: PrecisionConfig) -> Iterable[Fault]:
    """Parameters and gradient sums are at least as precise as the computation."""
    return dtype_faults(params=precision.params, compute=precision.compute, reduce=precision.reduce)


def preference_loss_fits(loss: str, model: ModelConfig) -> Iterator[Fault]:
    """The loss of preference pairs is that of the last block alone."""
    if loss != "dpo":
        return
    if model.kind != "tokens":
        yield Fault(
            "loss",
            f"dpo compares texts, and {model.family} reads {model.kind}",
            got="dpo",
            fix="leave loss out",
        )
    for field in ("mtp_depth", "balance_loss"):
        value = getattr(model, field, 0)
        if value:
            what = "dpo has no extra loss: it would be weighed by pairs instead of tokens"
            yield Fault(
                f"model.{field}", what, got=f"{value:g}", need="0", fix=f"--model.{field} 0"
            )


def scores_fit(loss: LossName, model: ModelConfig, data: DataConfig) -> Iterator[Fault]:
    """Texts are scored by a head for labels, of which a reward model has one, and on data of the same
    name.
    """
    labels = getattr(model, "labels", None)
    if loss not in SCORED:
        if labels:
            what = f"is a head that scores texts, and loss is {loss!r}"
            fix = "--loss reward or --loss classify, or --model.labels 0"
            yield Fault("model.labels", what, got=str(labels), need="0", fix=fix)
        if data.format in SCORED:
            what = f"is data of the loss {data.format}"
            yield Fault("data.format", what, got=data.format, fix=f"--loss {data.format}")
        return
    if labels is None:
        what = f"{loss} scores texts, and {model.family} has no head for that"
        fix = "a family of weft: llama3, qwen2, qwen3, qwen3-moe, gemma3, mistral, gpt2"
        yield Fault("loss", what, got=loss, fix=fix)
        return
    if data.format != loss:
        what = f"{loss} reads texts that are scored at their last token"
        yield Fault("data.format", what, got=data.format, need=loss, fix=f"--data.format {loss}")
    if loss == "classify" and not 2 <= len(set(data.classes)) == len(data.classes):
        what = "names the classes of loss classify, at least two different ones"
        fix = "--data.classes negative positive"
        yield Fault("data.classes", what, got=" ".join(data.classes) or "none", fix=fix)
    num_outputs = len(data.classes) if loss == "classify" else 1
    if labels != num_outputs and num_outputs:
        what = "is not the number of scores of a text"
        yield Fault(
            "model.labels",
            what,
            got=str(labels),
            need=str(num_outputs),
            fix=f"--model.labels {num_outputs}, or leave it out",
        )


def scores_are_whole(loss: LossName, *, sequence: bool) -> Iterator[Fault]:
    """Scores are computed of whole sequences."""
    if loss in SCORED and sequence:
        what = (
            f"leaves a rank scores of a part of each sequence, and {loss} reads those of its texts"
        )
        fix = "--parallel.sequence False; cp shards sequences"
        yield Fault("parallel.sequence", what, got="True", need="False", fix=fix)


def noise_is_of_tokens(neftune: float, model: ModelConfig) -> Iterator[Fault]:
    """Only embeddings of tokens have noise."""
    if neftune and model.kind != "tokens":
        what = f"is noise on the embeddings of tokens, and {model.family} reads {model.kind}"
        yield Fault("neftune", what, got=f"{neftune:g}", need="0", fix="--neftune 0")


def evaluations_exist(evaluation: EvalConfig, save: SaveConfig) -> Iterator[Fault]:
    """The best checkpoint and early stopping need evaluations."""
    for key, is_used in (("save.best", save.best), ("eval.patience", evaluation.patience > 0)):
        if is_used and not evaluation.every:
            what = "the run has no evaluations to compare"
            yield Fault(key, what, got="eval.every 0", need="evaluations", fix="--eval.every 100")


def guard_factors_are_above_one(guard: GuardConfig) -> Iterator[Fault]:
    """A spike is larger than the losses before it, and a straggler slower than its equals."""
    factors = {
        "spike": (guard.spike, "every loss would be a spike"),
        "stragglers": (guard.stragglers, "every rank would be a straggler"),
    }
    for name, (factor, what) in factors.items():
        if 0 < factor <= 1:
            yield Fault(
                f"guard.{name}",
                what,
                got=f"{factor:g}",
                need="above 1, or 0",
                fix=f"--guard.{name} 3",
            )
    if guard.on_spike == "rollback" and not guard.spike:
        yield Fault(
            "guard.on_spike",
            "no loss counts as a spike",
            got="rollback with guard.spike 0",
            fix="--guard.spike 3, or leave guard.on_spike out",
        )
