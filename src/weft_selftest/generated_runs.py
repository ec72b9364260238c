"""Generated runs of every family: meshes in any nesting, sizes, options, number types, schedules, adapters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from weft.config.load import try_load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.core.dimension import exact_axes
from weft.models import FAMILIES
from weft.prove.small_sizes import small_words
from weft.schedule.catalog import SCHEDULES

USER_MODEL = "weft.prove.user_model"
FLOAT64 = tuple(
    word for key in ("params", "compute", "reduce") for word in (f"--precision.{key}", "float64")
)
BFLOAT16 = ("--precision.compute", "bfloat16")
FLOAT16 = ("--precision.compute", "float16")
OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "--data.seq_len": ("16", "24", "40"),
        "--data.packing": ("stream", "documents"),
        "--batch.micro_size": ("1", "1", "2"),
        "--batch.global_size": ("8", "16"),
        "--parallel.zero": ("0", "0", "1", "2", "3"),
        "--parallel.sequence": ("False", "True"),
        "--parallel.context": ("ring", "allgather", "ulysses"),
        "--parallel.recompute": ("none", "none", "selective", "full"),
        "--optim.name": ("adamw", "adamw", "adamw", "sgd", "lion", "muon", "adafactor"),
        "--optim.clip": ("0", "0.1", "1"),
        "--optim.warmup": ("0", "4"),
        "--lora.rank": ("0", "0", "0", "3"),
        "--deterministic": ("False", "False", "False", "True"),
    }
)
SIZES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "vocab": ("256", "257", "259"),
        "tied": ("False", "True"),
        "heads": ("4", "8"),
        "kv_heads": ("1", "2", "4"),
        "layers": ("2", "3", "4", "5"),
        "experts": ("4", "8"),
        "balance_loss": ("0", "0.3"),
        "shared_experts": ("0", "1", "2"),
        "mtp_depth": ("0", "1"),
        "global_every": ("2", "3"),
        "window": ("5", "64"),
    }
)
LOSS_WORDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"dpo": ("--loss", "dpo"), "kto": ("--loss", "dpo", "--dpo.loss_type", "kto")}
)


@dataclass(frozen=True)
class Choices:
    """From what runs are generated; each value has the same chance, so one that is given twice has two.

    Attributes:
        most_ranks: of a mesh.
        degrees: of an axis.
        options: values of keys.
        sizes: values of fields of models, where the family has them.
        losses: the loss of preference pairs is "dpo", that of answers with labels "kto".
        precisions: words of number types.
        steps: of a run.
    """

    most_ranks: Sequence[int] = (2, 4, 4, 8)
    degrees: Sequence[int] = (1, 1, 1, 2, 2, 4)
    options: Mapping[str, Sequence[str]] = field(default_factory=lambda: OPTIONS)
    sizes: Mapping[str, Sequence[str]] = field(default_factory=lambda: SIZES)
    losses: Sequence[str] = (*4 * ("cross_entropy",), "dpo", "kto")
    precisions: Sequence[tuple[str, ...]] = ((), (), FLOAT64, BFLOAT16, FLOAT16)
    steps: Sequence[int] = (6,)


@dataclass(frozen=True)
class GeneratedRun:
    """A run that config validation accepts, and the words of its command."""

    words: tuple[str, ...]
    run: Run


def generated_runs(seed: int, choices: Choices) -> Iterator[GeneratedRun]:
    """Runs on several ranks without end, a function of the seed."""
    dice = random.Random(seed)  # noqa: S311 - layouts, not secrets
    families = [name for name, family in FAMILIES.items() if family.Config.kind == "tokens"]
    families.append(USER_MODEL)
    while True:
        words = _words(dice, dice.choice(families), choices)
        loaded = try_load(list(words), FAMILIES)
        is_alone = loaded.run.device_mesh.size == 1
        if not is_alone and not run_checks(loaded.run, config_checks, known=loaded.faults):
            yield GeneratedRun(words, loaded.run)


def _words(dice: random.Random, family: str, choices: Choices) -> tuple[str, ...]:
    words = ["--mesh", _mesh(dice, choices), "--model.name", family]
    if family != USER_MODEL:  # small as it is
        words += _model_words(dice, family, choices)
    for key, values in choices.options.items():
        words += (key, dice.choice(values))
    loss = dice.choice(choices.losses)
    words += LOSS_WORDS.get(loss, ())
    schedule = dice.choice(tuple(SCHEDULES))
    words += ("--pipeline.schedule", schedule)
    words += ("--pipeline.chunks", str(SCHEDULES[schedule].default_chunks))
    words += dice.choice(choices.precisions)
    words += ("--steps", str(dice.choice(choices.steps)), "--seed", str(dice.randrange(1000)))
    return tuple(words)


def _model_words(dice: random.Random, family: str, choices: Choices) -> Iterator[str]:
    small = small_words(family)
    sizes = dict(zip(small[::2], small[1::2], strict=True))
    fields = FAMILIES[family].Config.model_fields
    for field_name, values in choices.sizes.items():
        if field_name in fields:
            sizes[f"--model.{field_name}"] = dice.choice(values)
    for flag, value in sizes.items():
        yield from (flag, value)


def _mesh(dice: random.Random, choices: Choices) -> str:
    """A mesh in any nesting."""
    most = dice.choice(choices.most_ranks)
    axes = list(exact_axes())
    dice.shuffle(axes)
    names: list[str] = []
    size = 1
    for axis in axes:
        degree = dice.choice(choices.degrees)
        if degree > 1 and size * degree <= most:
            names.append(f"{axis}{degree}")
            size *= degree
    return " ".join(names)
