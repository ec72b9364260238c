"""Owns which linears get adapters: the words of `lora.targets` held against the names that a model has."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from weft.config.checks import Check
from weft.config.run import Run
from weft.errors import Fault, did_you_mean

LORA_A, LORA_B = ".lora_a.weight", ".lora_b.weight"
"""What follows a linear's global name in the names of its adapter's two factors."""


def adapted_linears(targets: Collection[str], linears: Iterable[str]) -> tuple[str, ...]:
    """Those of `linears` (global names) that one of the words names; all of them where there is no word.

    A word is the end of a name, from a dot on, or a pattern for such: `q`, `attn.*`, `layer[0-3].mlp.up`.
    """
    return tuple(name for name in linears if not targets or any(matches(word, name) for word in targets))


def matches(word: str, linear: str) -> bool:
    """Whether a word of `lora.targets` means this linear."""
    return fnmatchcase(linear, word) or fnmatchcase(linear, f"*.{word}")


def adapted_linear(name: str) -> str | None:
    """The global name of the linear whose adapter a parameter is part of; None where it is no adapter's."""
    return next((name.removesuffix(end) for end in (LORA_A, LORA_B) if name.endswith(end)), None)


def targets_exist(run: Run) -> Iterable[Fault]:
    """Every word of `lora.targets` names a linear of the model."""
    linears = run.model.linears()
    if not run.lora.rank:
        if run.lora.targets:
            yield Fault("lora.rank", "is 0, no adapters, and lora.targets names some", fix="--lora.rank 8")
        return
    if not linears:
        what = f"{run.model.name} has no attention or feed-forward projections for adapters to stand beside"
        yield Fault("lora.rank", what, str(run.lora.rank), "a language model", "--lora.rank 0")
    leaves = {linear.rpartition(".")[2] for linear in linears}
    for word in run.lora.targets:
        if linears and not any(matches(word, linear) for linear in linears):
            yield Fault(
                "lora.targets", f"no linear of {run.model.name} has this name", repr(word), fix=_hint(word, run, leaves)
            )


def _hint(word: str, run: Run, leaves: Collection[str]) -> str:
    """What may have been meant."""
    if "experts" in run.model.axis_sizes() and "expert" in word:
        return f"routed experts take no adapters; these do: {', '.join(sorted(leaves))}"
    return did_you_mean(word.rpartition(".")[2] or word, sorted(leaves))


def rank_is_low(run: Run) -> Iterable[Fault]:
    """No adapter is wider than the smaller side of the linear beside which it stands."""
    linears = run.model.linears()
    sides = {name: min(linears[name]) for name in adapted_linears(run.lora.targets, linears)}
    if sides and run.lora.rank > min(sides.values()):
        name = min(sides, key=lambda name: sides[name])
        out, into = linears[name]
        what = f"is larger than the smaller side of {name}, which has {into} features in, {out} out"
        yield Fault(
            "lora.rank", what, str(run.lora.rank), f"at most {sides[name]}", f"--lora.rank {min(8, sides[name])}"
        )


CHECKS = (
    Check(("lora", "model"), targets_exist),
    Check(("lora", "model"), rank_is_low),
)
