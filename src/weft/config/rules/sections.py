"""Rules within a section, and between sections: losses, guards, adapters, profiles, hardware, alerts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.config.alert_keys import IN_VARIABLE, URL, VARIABLE
from weft.config.fp8 import fp8_linears, fp8_shapes
from weft.config.hardware import Hardware, find_hardware
from weft.config.lora import DEFAULT_RANK, adapted_linears, matches
from weft.config.profiled_steps import KEY as PROFILE
from weft.config.profiled_steps import MOST_STEPS, profiled_steps
from weft.config.schema import (
    SCORED,
    AlertConfig,
    DataConfig,
    EvalConfig,
    GuardConfig,
    LoraConfig,
    LossName,
    PrecisionConfig,
    SaveConfig,
)
from weft.core.model_config import ModelConfig
from weft.core.precision import dtype_faults
from weft.errors import ConfigError, Fault, did_you_mean

NUM_BYTES = 256
"""Number of byte tokens."""
LONG_PART = 16
"""Characters of a part of a path from which on it may be a secret, as in the addresses of web hooks."""


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
    yield from vocabulary_holds("bytes", NUM_BYTES, vocab=size)


def vocabulary_holds(tokenizer: str, num_tokens: int, *, vocab: int) -> Iterator[Fault]:
    """The vocabulary of a model has an id for each token of a tokenizer."""
    if num_tokens > vocab:
        need = f"at least {num_tokens} for {tokenizer}"
        what, fix = "is smaller than the tokenizer's", f"--model.vocab {num_tokens}"
        yield Fault("model.vocab", what, got=str(vocab), need=need, fix=fix)


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
        fix = (
            "a family of weft (llama3, qwen2, qwen3, qwen3-moe, gemma3, mistral, gpt2), or hf:NAME "
            "of a decoder with a class for sequence classification"
        )
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


def targets_exist(lora: LoraConfig, model: ModelConfig) -> Iterable[Fault]:
    """Every one of `lora.targets` selects a linear of the model."""
    linears = model.linears()
    if not lora.rank:
        if lora.targets:
            what = "is 0 (no adapters), and lora.targets names some"
            yield Fault("lora.rank", what, fix=f"--lora.rank {DEFAULT_RANK}")
        return
    if not linears:
        what = (
            f"{model.family} has no attention or feed-forward projections that adapters can extend"
        )
        yield Fault(
            "lora.rank", what, got=str(lora.rank), need="a language model", fix="--lora.rank 0"
        )
        return
    for target in lora.targets:
        if not any(matches(target, linear) for linear in linears):
            what = f"no linear of {model.family} has this name"
            yield Fault("lora.targets", what, got=repr(target), fix=_nearest_target(target, model))


def fp8_names_exist(precision: PrecisionConfig, model: ModelConfig) -> Iterable[Fault]:
    """With fp8 the model has linears, every pattern excludes one, and one is left."""
    excluded = precision.fp8_exclude
    if precision.linears != "fp8":
        if excluded:
            what = "names linears, and precision.linears is default"
            yield Fault("precision.fp8_exclude", what, fix="--precision.linears fp8")
        return
    linears = fp8_shapes(model)
    if not linears:
        what = f"{model.family} has no attention or feed-forward linears that fp8 is for"
        fix = "--precision.linears default"
        yield Fault("precision.linears", what, got="fp8", need="a language model", fix=fix)
        return
    for target in excluded:
        if not any(matches(target, linear) for linear in linears):
            what = f"no linear of {model.family} in fp8 has this name"
            leaves = sorted({linear.rpartition(".")[2] for linear in linears})
            fix = did_you_mean(target.rpartition(".")[2] or target, leaves)
            yield Fault("precision.fp8_exclude", what, got=repr(target), fix=fix)
    if not fp8_linears(precision, model):
        what = "leaves no linear in fp8"
        yield Fault("precision.fp8_exclude", what, fix="--precision.linears default")


def _nearest_target(target: str, model: ModelConfig) -> str:
    """The linear that an unknown target may mean; `q_proj` of Hugging Face's models is `q`."""
    leaves = sorted({linear.rpartition(".")[2] for linear in model.linears()})
    if "experts" in model.axis_sizes() and "expert" in target:
        return f"routed experts take no adapters; these do: {', '.join(leaves)}"
    leaf = target.rpartition(".")[2] or target
    without_suffix = leaf.removesuffix("_proj")
    if without_suffix in leaves:
        return f"did you mean {without_suffix!r}?"
    return did_you_mean(leaf, leaves)


def rank_is_low(lora: LoraConfig, model: ModelConfig) -> Iterable[Fault]:
    """The rank is at most the smaller side of each adapted linear."""
    if not lora.rank:
        return
    linears = model.linears()
    adapted = adapted_linears(lora.targets, linears)
    if not adapted:
        return
    name = min(adapted, key=lambda linear: min(linears[linear]))
    limit = min(linears[name])
    if lora.rank > limit:
        out_features, in_features = linears[name]
        yield Fault(
            "lora.rank",
            f"is larger than the smaller side of {name}, which has {in_features} features in, {out_features} out",
            got=str(lora.rank),
            need=f"at most {limit}",
            fix=f"--lora.rank {min(DEFAULT_RANK, limit)}",
        )


def base_is_quantizable(lora: LoraConfig, model: ModelConfig) -> Iterable[Fault]:
    """Weights that are held in 4 bits are frozen, and have an even number of features: two share a
    byte.
    """
    if lora.quantize == "none":
        return
    if not lora.rank:
        what = "holds frozen weights, and lora.rank is 0: all of them are trained"
        fix = f"--lora.rank {DEFAULT_RANK}, or --lora.quantize none"
        yield Fault("lora.quantize", what, got=repr(lora.quantize), fix=fix)
    for name, (out_features, in_features) in model.linears().items():
        if out_features % 2 or in_features % 2:
            what = f"packs two entries in a byte, and {name} has an odd number of features"
            got = f"{in_features} in, {out_features} out"
            yield Fault("lora.quantize", what, got=got, fix="--lora.quantize none")
            return


def profile_faults(text: str | None, *, num_steps: int) -> Iterator[Fault]:
    """The steps of the profile are steps of the run, and not too many."""
    try:
        steps = profiled_steps(text)
    except ValueError:
        need = "FIRST:END, with steps from 1 and the last one before END"
        yield Fault(PROFILE, "cannot be read", got=repr(text), need=need, fix="--profile 10:13")
        return
    if text is None:
        return
    if steps.start < 1:
        fix = f"--profile 1:{max(steps.stop, 2)}"
        yield Fault(PROFILE, "the first step is 1", got=text, need="steps from 1", fix=fix)
    elif not steps:
        what = "holds no step: the end is not part of it, as in Python"
        yield Fault(PROFILE, what, got=text, fix=f"--profile {steps.start}:{steps.start + 3}")
    elif len(steps) > MOST_STEPS:
        fix = f"--profile {steps.start}:{steps.start + 3}"
        yield Fault(PROFILE, "has too many steps", str(len(steps)), f"at most {MOST_STEPS}", fix)
    elif steps[-1] > num_steps:
        first = max(1, num_steps - 2)
        fix = f"--profile {first}:{num_steps + 1}"
        what = "has steps after the end of the run"
        yield Fault(
            PROFILE,
            what,
            got=text,
            need=f"steps up to {num_steps}, END at most {num_steps + 1}",
            fix=fix,
        )


def hardware_faults(name: str | None, *, num_ranks: int = 1) -> Iterator[Fault]:
    """A device that is unknown or not valid, or that cannot hold a world of `num_ranks`."""
    if name is None:
        return
    try:
        hardware = find_hardware(name)
    except ConfigError as error:
        yield from error.faults
    else:
        yield from bandwidths_are_known(hardware, num_ranks)


def stack_faults(name: str | None, stack: str | None) -> Iterator[Fault]:
    """A set of constants that the device does not have."""
    if stack is None:
        return
    if name is None:
        what = "is of a device, and no device is named"
        yield Fault("stack", what, got=stack, need="hardware", fix="--hardware h100")
        return
    try:
        known = find_hardware(name).stacks
    except ConfigError:  # `hardware_faults` reports it
        return
    if stack not in known:
        need = ", ".join(known) or f"none: {name} has no sets"
        fix = did_you_mean(stack, known) if known else "leave stack out"
        yield Fault("stack", "unknown set of constants", got=repr(stack), need=need, fix=fix)


def bandwidths_are_known(hardware: Hardware, num_ranks: int) -> Iterator[Fault]:
    """A world that needs a bandwidth which the hardware file does not have."""
    fix = f"weft bench comm --write {hardware.name}, or a layout of fewer ranks"
    if num_ranks > 1 and hardware.node > 1 and not hardware.link_gb_s:
        need = "link_gb_s, the bandwidth between devices of a node"
        yield Fault(
            "hardware", f"{hardware.name} has no link", got=f"{num_ranks} ranks", need=need, fix=fix
        )
    elif num_ranks > hardware.node and not hardware.network_gb_s:
        need = f"network_gb_s, the bandwidth between nodes of {hardware.node} devices"
        yield Fault(
            "hardware",
            f"{hardware.name} has no network",
            got=f"{num_ranks} ranks",
            need=need,
            fix=fix,
        )


def secret_faults(alert: AlertConfig) -> Iterator[Fault]:
    """What may be a secret in the literal parts of the URL: it would be stored with the run. The
    fault does not show it.
    """
    what = _secret_in(VARIABLE.sub("", alert.url or ""))
    if what:
        yield Fault(URL, f"{what}, and would be written into run.toml", fix=IN_VARIABLE)


def _secret_in(literal: str) -> str:
    """What may be a secret in the parts of a URL that are no variables; "" for nothing."""
    address, _, query = literal.partition("?")
    place = address.partition("://")[2]
    host, _, path = place.partition("/")
    if "@" in host:
        return "holds a user or password"
    if query or "#" in address:
        return "has a query, which may hold a secret"
    if any(len(part) >= LONG_PART for part in path.split("/")):
        return f"has a part of {LONG_PART} or more characters, which may be a secret"
    return ""
