"""Generated layouts for the typed certificate: families, meshes of up to 64 ranks, and options, as words of a command."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from weft.config.checks import run_checks
from weft.config.load import try_load
from weft.config.run import Run
from weft.config.validate import config_checks
from weft.core.dimension import exact_axes
from weft.models import FAMILIES
from weft.prove.small_sizes import small_words
from weft.prove.sweep import PRECISIONS, USER_MODEL
from weft.schedule.catalog import SCHEDULES

DEGREES = (1, 1, 2, 2, 4)
"""A degree of an axis is one of these."""
MOST_RANKS = 64
OPTIONS: Mapping[str, Sequence[str]] = {
    "--data.seq_len": ("16", "32"),
    "--data.packing": ("stream", "documents"),
    "--batch.micro_size": ("1", "1", "2"),
    "--batch.global_size": ("32", "64"),
    "--parallel.zero": ("0", "1", "2", "3"),
    "--parallel.sequence": ("False", "True"),
    "--parallel.context": ("ring", "allgather", "ulysses"),
    "--parallel.recompute": ("none", "none", "selective", "full"),
    "--optim.name": ("adamw", "adamw", "sgd", "lion", "muon", "adafactor"),
    "--optim.clip": ("0", "1"),
    "--lora.rank": ("0", "0", "0", "3"),
    "--deterministic": ("False", "False", "False", "True"),
    "--loss": ("cross_entropy", "cross_entropy", "cross_entropy", "dpo"),
}
SIZES: Mapping[str, Sequence[str]] = {
    "vocab": ("256", "257", "259"),
    "tied": ("False", "True"),
    "heads": ("4", "8"),
    "kv_heads": ("1", "2", "4"),
    "layers": ("3", "4", "9"),
    "experts": ("4", "8"),
    "balance_loss": ("0", "0.3"),
    "shared_experts": ("0", "1", "2"),
    "mtp_depth": ("0", "1"),
    "global_every": ("2", "3"),
    "window": ("5", "64"),
}
"""Fields of models, where the family has them."""


def generated_runs(seed: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    """Words that config validation accepts, and their runs, without end, a function of the seed."""
    dice = random.Random(seed)
    families = [name for name, family in FAMILIES.items() if family.Config.kind == "tokens"]
    families.append(USER_MODEL)
    while True:
        words = _words(dice, dice.choice(families))
        loaded = try_load(list(words), FAMILIES)
        if not run_checks(loaded.run, config_checks, known=loaded.faults):
            yield words, loaded.run


def _words(dice: random.Random, family: str) -> tuple[str, ...]:
    words = ["--mesh", _mesh(dice), "--model.name", family]
    if family != USER_MODEL:  # small as it is
        words += small_words(family)
        known = FAMILIES[family].Config.model_fields
        for field, values in SIZES.items():
            if field in known:
                words += (f"--model.{field}", dice.choice(values))
    for key, values in OPTIONS.items():
        words += (key, dice.choice(values))
    if words[-1] == "dpo":
        words += ("--data.format", "preference")
    schedule = dice.choice(tuple(SCHEDULES))
    words += ("--pipeline.schedule", schedule)
    words += ("--pipeline.chunks", str(SCHEDULES[schedule].default_chunks))
    words += dice.choice(PRECISIONS)
    return tuple(words)


def _mesh(dice: random.Random) -> str:
    """A mesh in any nesting."""
    axes = list(exact_axes())
    dice.shuffle(axes)
    names: list[str] = []
    size = 1
    for axis in axes:
        degree = dice.choice(DEGREES)
        if degree > 1 and size * degree <= MOST_RANKS:
            names.append(f"{axis}{degree}")
            size *= degree
    return " ".join(names)
