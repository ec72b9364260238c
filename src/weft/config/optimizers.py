"""Optimizer names, their options and parameter groups in the config: reading and checking them. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.config.keys import VALUE_SYNONYMS
from weft.config.schema import ConfigSection, OptimConfig, OptimGroup, Share

Positive = Annotated[float, Field(gt=0)]


class NoOptions(ConfigSection):
    """An optimizer whose settings are all keys of `optim`."""


class MuonOptions(ConfigSection):
    """Options of torch.optim.Muon, and of the parameters that it does not update."""

    momentum: Share = Field(0.95, description="decay rate of the gradient's average, 0 to 1")
    nesterov: bool = Field(True, description="interpolate the gradient with the momentum")
    ns_coefficients: tuple[float, float, float] = Field(
        (3.4445, -4.7750, 2.0315), description="a, b, c of the Newton-Schulz iteration"
    )
    ns_steps: int = Field(5, ge=1, le=99, description="Newton-Schulz iterations")
    eps: float = Field(1e-7, gt=0, description="smallest norm that a direction is divided by")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "original", description="factor of a matrix's rate: sqrt(max(1, A/B)), 0.2 sqrt(max(A, B))"
    )
    split_stacked: bool = Field(
        True, description="orthogonalise each projection of a fused weight by itself"
    )
    adamw_lr_scale: Positive = Field(
        1.0, description="learning rate of the parameters that AdamW updates, times optim.lr"
    )


class AdafactorOptions(ConfigSection):
    """Options of torch.optim.Adafactor."""

    beta2_decay: float = Field(
        -0.8, le=0, description="decay rate of the second moment at step t: 1 - t^beta2_decay"
    )
    eps: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (0.0, 1e-3),
        description="smallest root of the second moment (0: the dtype's), smallest parameter scale",
    )
    d: float = Field(1.0, ge=1, description="root mean square above which an update is clipped")


OPTIONS: Mapping[str, type[ConfigSection]] = {
    "adamw": NoOptions,
    "sgd": NoOptions,
    "lion": NoOptions,
    "muon": MuonOptions,
    "adafactor": AdafactorOptions,
}
"""Optimizers by name, and the options of each; users' classes have names with a colon."""

SETTINGS: Mapping[str, frozenset[str]] = {
    "adamw": frozenset({"betas", "eps"}),
    "sgd": frozenset({"momentum"}),
    "lion": frozenset({"betas"}),
    "muon": frozenset(),
    "adafactor": frozenset(),
}
"""Keys of `optim` that are settings of one update rule, by the optimizers that read them."""

SYNONYMS: Mapping[str, str] = {**VALUE_SYNONYMS, "momentum": "sgd", "shampoo": "muon"}

EMBEDDINGS = "embed*"
"""Blocks whose states have 8 bits only if a group says so: rare tokens have rare, large gradients."""
LEAST_BLOCKS = 16
"""Blocks' worth of entries from which a parameter's states have 8 bits: 4,096 entries by default."""

MUON_SKIPS = ("embed*", "head*")
"""Blocks whose parameters muon leaves to AdamW."""


def is_user_class(name: str) -> bool:
    """Whether an optimizer's name is that of a user's class: `package.module:Class`."""
    return ":" in name


def options_of(optim: OptimConfig, name: str) -> ConfigSection:
    """The options of one of weft's optimizers: those of the config, if it is the run's."""
    values = optim.options if name == optim.name else {}
    return OPTIONS[name].model_validate(values, strict=True)


def has_8_bits(optim: OptimConfig, group: OptimGroup, name: str, shape: Sequence[int]) -> bool:
    """Whether the states of a parameter have 8 bits: as its group says; else, in a run with 8 bits,
    those of matrices of at least `LEAST_BLOCKS` blocks outside the embedding.
    """
    if group.state_dtype is not None:
        return group.state_dtype == "8bit" and len(shape) > 0
    is_large = math.prod(shape) >= LEAST_BLOCKS * optim.state_block
    is_embedding = fnmatchcase(name.partition(".")[0], EMBEDDINGS)
    return optim.state_dtype == "8bit" and len(shape) >= 2 and is_large and not is_embedding


def uses_8_bits(optim: OptimConfig) -> bool:
    """Whether states of any parameter may have 8 bits."""
    return "8bit" in (optim.state_dtype, *(group.state_dtype for group in optim.groups))


def group_of(name: str, groups: tuple[OptimGroup, ...]) -> int | None:
    """Index of the first group whose pattern matches a parameter's name."""
    matching = (index for index, group in enumerate(groups) if fnmatchcase(name, group.match))
    return next(matching, None)


def muon_updates(name: str, ndim: int) -> bool:
    """Whether an optimizer of whole matrices updates a parameter, where no group says otherwise:
    matrices, and stacks of matrices (experts), outside the blocks of embedding and head.
    """
    if ndim not in (2, 3):
        return False
    block = name.partition(".")[0]
    is_skipped = any(fnmatchcase(block, pattern) for pattern in MUON_SKIPS)
    return not is_skipped


def rule_names(optim: OptimConfig) -> frozenset[str]:
    """The optimizers that the config names."""
    groups = {group.optimizer for group in optim.groups if group.optimizer is not None}
    return frozenset({optim.name, *groups})


def resume_values(optim: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which optimizer updates which parameter, with which states, of a config as JSON."""
    groups = []
    dtypes = [optim.get("state_dtype", "params")]
    for group in optim.get("groups", ()):
        optimizer, dtype = group.get("optimizer"), group.get("state_dtype")
        if optimizer is not None or dtype is not None:
            groups.append((group["match"], optimizer, dtype))
        dtypes.append(dtype)
    block = optim.get("state_block") if "8bit" in dtypes else None
    return {
        "name": optim.get("name"),
        "state_dtype": dtypes[0],
        "state_block": block,
        "groups": groups,
    }
