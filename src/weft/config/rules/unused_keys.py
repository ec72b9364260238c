"""Keys of a run config that have no effect beside its other keys: contradictions are faults, what is switched off a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.config.keys import keys_of
from weft.config.optimizers import OPTIONS, SETTINGS, is_user_class
from weft.config.schema import (
    ConfigSection,
    DataConfig,
    DpoConfig,
    EvalConfig,
    GuardConfig,
    LoraConfig,
    OptimConfig,
    PairLossType,
    SaveConfig,
    SupervisionConfig,
    label_of,
)
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.transports import PROCESS, TransportName
from weft.errors import Fault, MeshError


def sample_is_text(model: ModelConfig, sample: int, *, seq_len: int) -> Iterator[Fault]:
    """Only a language model generates text after the last step."""
    if not sample:
        return
    if model.kind != "tokens":
        yield Fault(
            "sample",
            f"{model.family} reads {model.kind} and generates no text",
            got=str(sample),
            need="0",
            fix="--sample 0",
        )
    elif getattr(model, "labels", 0):
        what = "a model with labels scores texts and generates none"
        yield Fault("sample", what, got=str(sample), need="0", fix="--sample 0")
    else:
        *_, last, _loss = model.block_specs(seq_len)
        if last.out[:2] != ("batch", "seq") or len(last.out) != LOGITS_DIMS:
            what = (
                f"{last.name} of {model.family} yields no logits of each token, so there is no text"
            )
            yield Fault("sample", what, got=str(sample), need="0", fix="--sample 0")


LOGITS_DIMS = 3
"""Sequences, tokens, entries of the vocabulary."""
OF_TEXT = ("format", "packing", "chat_template", "tokenizer", "text_field", "round_trip", "long")
"""Options of data that are read of text alone."""

DPO_KEYS: Mapping[str, tuple[PairLossType, ...]] = {
    "gamma": ("simpo",),
    "label_smoothing": ("sigmoid", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Keys of `dpo` that not every loss reads, and the losses that do."""


def text_options_are_of_text(model: ModelConfig, data: DataConfig) -> Iterator[Fault]:
    """Options of text and records have no meaning for images and arrays."""
    if model.kind != "tokens":
        what = f"is an option of text, and {label_of(model.family)} reads {model.kind}"
        yield from set_keys(data, "data", OF_TEXT, what, fix="leave it out")


def samples_are_on(*, sample: int, sample_every: int) -> Iterator[Fault]:
    """How often a text is generated is read only where a text has tokens."""
    if sample_every and not sample:
        what = "is set, and sample is 0 (no texts)"
        yield Fault("sample_every", what, got=str(sample_every), fix="--sample 40")


def pair_loss_reads_keys(dpo: DpoConfig) -> Iterator[Fault]:
    """A target margin and label smoothing are of some losses of preference pairs alone."""
    for key, losses in DPO_KEYS.items():
        if dpo.loss_type not in losses:
            what = f"is set, and dpo.loss_type is {dpo.loss_type!r}, which reads no such key"
            fix = f"leave it out, or --dpo.loss_type {' or '.join(losses)}"
            yield from set_keys(dpo, "dpo", (key,), what, fix=fix)


def switched_off(
    *,
    loss: str,
    dpo: DpoConfig,
    evaluation: EvalConfig,
    lora: LoraConfig,
    guard: GuardConfig,
    data: DataConfig,
    optim: OptimConfig,
    supervision: SupervisionConfig,
    save: SaveConfig,
    leaves_rest_to_adamw: bool,
) -> Iterator[Fault]:
    """Keys that are set, and belong to a part of the run that is switched off; it trains the same
    without them.

    Args:
        leaves_rest_to_adamw: whether the run's optimizer updates whole matrices alone.
    """
    yield from pairs_are_compared(loss, dpo)
    if loss != "classify":
        what = f"is set, and loss is {loss!r}"
        yield from set_keys(data, "data", ("classes",), what, fix="--loss classify")
    yield from evaluation_is_on(evaluation)
    yield from adapters_are_on(lora)
    yield from guards_continue(guard)
    yield from documents_are_packed(data)
    yield from rate_decays(optim)
    yield from unread_settings(optim, leaves_rest_to_adamw=leaves_rest_to_adamw)
    yield from ranks_start_again(supervision, save)


def pairs_are_compared(loss: str, dpo: DpoConfig) -> Iterator[Fault]:
    """Constants of the loss of preference pairs are read by that loss alone."""
    if loss != "dpo":
        what = f"is set, and loss is {loss!r}"
        yield from set_keys(dpo, "dpo", tuple(DpoConfig.model_fields), what, fix="--loss dpo")


def evaluation_is_on(evaluation: EvalConfig) -> Iterator[Fault]:
    """What to evaluate on is read only by evaluations."""
    if not evaluation.every:
        what = "is set, and eval.every is 0 (no evaluation)"
        yield from set_keys(evaluation, "eval", ("batches", "source"), what, fix="--eval.every 100")


def adapters_are_on(lora: LoraConfig) -> Iterator[Fault]:
    """The scale of adapters is read only where there are some."""
    if not lora.rank:
        what = "is set, and lora.rank is 0 (no adapters)"
        yield from set_keys(lora, "lora", ("alpha", "dora"), what, fix="--lora.rank 8")


def guards_continue(guard: GuardConfig) -> Iterator[Fault]:
    """The number of failed steps counts only where a guard goes on after one."""
    if guard.nonfinite == "stop" and guard.on_spike == "report":
        what = "is set, and no guard goes on after a failed step"
        fix = "--guard.nonfinite skip, or leave it out"
        yield from set_keys(guard, "guard", ("max_failures",), what, fix=fix)


def sources_are_one_or_mixed(data: DataConfig) -> Iterator[Fault]:
    """A mixture names its own sources."""
    if data.mix and data.source not in ("stdlib", "digits"):
        what = "is set, and data.mix names the sources instead"
        yield Fault("data.source", what, got=repr(data.source), fix="leave one of them out")


def documents_are_packed(data: DataConfig) -> Iterator[Fault]:
    """What becomes of a long document matters only where documents are packed."""
    if data.packing != "documents":
        what = "is set, and data.packing is 'stream', which joins documents"
        yield from set_keys(data, "data", ("long",), what, fix="--data.packing documents")


def rate_decays(optim: OptimConfig) -> Iterator[Fault]:
    """The end of the decay lies below its start; what shapes another decay is not read."""
    what = f"is set, and optim.decay is {optim.decay!r}"
    if optim.decay != "wsd":
        yield from set_keys(optim, "optim", ("cooldown",), what, fix="--optim.decay wsd")
    if optim.decay == "constant":
        yield from set_keys(optim, "optim", ("min_lr",), what, fix="--optim.decay cosine")
    elif optim.min_lr == 1:
        yield Fault(
            "optim.min_lr",
            "is all of optim.lr, so that the rate does not decay",
            got=f"{optim.min_lr:g}",
            need="below 1",
            fix="--optim.min_lr 0.1, or --optim.decay constant",
        )


def unread_settings(optim: OptimConfig, *, leaves_rest_to_adamw: bool) -> Iterator[Fault]:
    """Settings of update rules that are set, and that no optimizer of the run reads.

    Args:
        leaves_rest_to_adamw: whether the run's optimizer updates whole matrices alone.
    """
    used = [optim.name]
    if leaves_rest_to_adamw:
        used.append("adamw")
    for group in optim.groups:
        if group.optimizer is not None and group.optimizer not in used:
            used.append(group.optimizer)
    read: set[str] = set()
    for name in used:
        read.update(SETTINGS.get(name, ()))
    fields = type(optim).model_fields
    for key in ("betas", "eps", "momentum"):
        value = getattr(optim, key)
        if key not in read and value != fields[key].default:
            what = f"is set, and {' and '.join(used)} reads no such key"
            yield Fault(f"optim.{key}", what, got=str(value), fix=_other_key(optim.name, key))
    for group in optim.groups:
        optimizer = group.optimizer or optim.name
        has_adamw = group.optimizer is None and leaves_rest_to_adamw
        if group.betas and not has_adamw and "betas" not in SETTINGS.get(optimizer, ()):
            what = f"betas of {group.match!r} are set, and {optimizer} reads none"
            yield Fault("optim.groups", what, got=str(group.betas), fix="leave betas out")


def _other_key(optimizer: str, key: str) -> str:
    """The option of an optimizer that has the name of a key of `optim`."""
    options = OPTIONS.get(optimizer)
    if options is not None and key in keys_of(options):
        return f"--optim.options.{key}, or leave it out"
    if is_user_class(optimizer):
        return f"--optim.options.{key} if the class has it, or leave it out"
    return "leave it out"


def ranks_start_again(supervision: SupervisionConfig, save: SaveConfig) -> Iterator[Fault]:
    """Snapshots in memory are read only by ranks that are started again."""
    if not supervision.num_restarts and save.memory_every:
        what = "is set, and run.restarts is 0: nothing would read a snapshot"
        yield from set_keys(save, "save", ("memory_every",), what, fix="--run.restarts 3")


def ranks_are_supervised(
    transport: TransportName, supervision: SupervisionConfig, save: SaveConfig, *, port: int | None
) -> Iterator[Fault]:
    """Ranks are started again, and take snapshots for that, only as processes: a thread cannot be
    ended from outside. Only processes meet at a port.
    """
    if transport == PROCESS:
        return
    if port is not None:
        what = "is set, and ranks as threads need no rendezvous"
        yield Fault("port", what, got=str(port), fix="--transport process, or leave it out")
    what = "is set, and ranks as threads are not started again"
    fix = "--transport process, or leave it out"
    if supervision.restarts:
        yield from set_keys(supervision, "run", ("restarts",), what, fix=fix)
    if save.memory_every:
        yield from set_keys(save, "save", ("memory_every",), what, fix=fix)


def full_mesh_is_elastic(supervision: SupervisionConfig) -> Iterator[Fault]:
    """The mesh to return to is one, and is read only by elastic runs."""
    key = "run.full_mesh"
    if not supervision.full_mesh:
        return
    try:
        Mesh.parse(supervision.full_mesh)
    except MeshError as error:
        for fault in error.faults:
            yield Fault(key, fault.what, got=fault.got, need=fault.need, fix=fault.fix)
        return
    if not supervision.elastic:
        what = "is set, and run.elastic is False"
        yield Fault(key, what, got=repr(supervision.full_mesh), fix="--run.elastic True")


def set_keys(
    section: ConfigSection, prefix: str, names: Sequence[str], what: str, *, fix: str
) -> Iterator[Fault]:
    """A fault for each of these keys that does not have its default."""
    fields = type(section).model_fields
    for name in names:
        value = getattr(section, name)
        if value != fields[name].default:
            if isinstance(value, str):
                got = repr(value)
            else:
                got = str(value)
            yield Fault(f"{prefix}.{name}", what, got=got, fix=fix)
