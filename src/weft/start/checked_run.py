"""The run that command-line words or keys describe, with every check of its config, its model and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from weft.config import toml
from weft.config.keys import Flat, flatten
from weft.config.load import NO_VALUES, Loaded, check_other_keys, try_load
from weft.config.rules.checks import Adaptation, CheckTable, run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run, plan_of
from weft.config.run_files import absolute_paths
from weft.config.schema import ModelSection
from weft.errors import Fault, UserError
from weft.layout.plan import Plan
from weft.layout.recomputation import KEY as RECOMPUTE
from weft.layout.recomputation import is_chosen_by_memory
from weft.models import FAMILIES
from weft.small_files import parse_toml
from weft.start.auto_mesh import ChooseMesh, not_taken
from weft.start.auto_recompute import ChooseRecompute
from weft.start.environment import is_first
from weft.start.epochs_as_steps import with_steps
from weft.start.transformers_model import prepared


def set_openmp_policy() -> None:
    """Let waiting OpenMP threads sleep instead of spinning; must be set before torch is loaded.

    Measured with two threads on two busy cores: 221 ms a step instead of 1,820.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load_checked_run(
    words: Sequence[str],
    *tables: CheckTable,
    values: Mapping[str, Any] = NO_VALUES,
    adapt: Adaptation | None = None,
    choose_mesh: ChooseMesh | None = None,
    choose_recompute: ChooseRecompute | None = None,
) -> Run:
    """The run that these words and values of keys describe, validated.

    Args:
        tables: further checks, after those of the config.
        adapt: adapts a run without faults to its environment, before the checks.
        choose_mesh: for `mesh = "auto"`, which is a fault without it.
        choose_recompute: for `parallel.recompute = "auto"`, which stays so without it.

    Raises:
        UserError: with every fault: of single keys, of their combination, and of the environment.
    """
    set_openmp_policy()  # a user's model file may import torch
    check_other_keys(words, FAMILIES, values)
    loaded = try_load(words, FAMILIES, values)
    run = loaded.run
    notes: list[str] = []
    if loaded.auto_mesh is not None:
        _check_without_mesh(loaded, *tables, adapt=adapt)
        if choose_mesh is None:
            raise UserError(not_taken())
        chosen = choose_mesh(run, is_flag=loaded.auto_mesh == "flag")
        run = run.with_values({"mesh": chosen.mesh})
        notes.append(chosen.note)
    if adapt is not None and not loaded.faults:
        run = adapt(run)
    if not loaded.faults:
        run = with_steps(run)
    faults = run_checks(run, config_checks, *tables, known=loaded.faults)
    if faults:
        raise UserError(*faults)
    if choose_recompute is not None and is_chosen_by_memory(run.parallel.recompute):
        chosen_recompute = choose_recompute(run, is_flag=RECOMPUTE in loaded.named)
        run = run.with_values({RECOMPUTE: chosen_recompute.value})
        notes.append(chosen_recompute.note)
    given = run
    run, model_notes = prepared(run)
    if run is not given:  # axes that were found may shard heads, which layouts have rules for
        faults = run_checks(run, config_checks, *tables)
        if faults:
            raise UserError(*faults)
    if is_first(os.environ):
        for line in filter(None, (*notes, *model_notes)):
            print(line, file=sys.stderr)
    if FAMILIES.is_user_model(run.model.name):
        _check_user_model(run.model, plan_of(run))
    return run


def stored_form(run: Run) -> Flat:
    """The dotted keys of a run as its run.toml has them."""
    absolute = absolute_paths(flatten(run.model_dump(mode="json")))
    return flatten(parse_toml(toml.dump(run.with_values(absolute))))


def _check_without_mesh(loaded: Loaded, *tables: CheckTable, adapt: Adaptation | None) -> None:
    """The checks that read no mesh, before one is chosen.

    Raises:
        UserError: with every fault.
    """
    run = loaded.run
    if adapt is not None and not loaded.faults:
        run = adapt(run)
    not_chosen = Fault("mesh", "is not chosen yet")
    found = run_checks(run, config_checks, *tables, known=(*loaded.faults, not_chosen))
    faults = [fault for fault in found if fault != not_chosen]
    if faults:
        raise UserError(*faults)


def _check_user_model(model: ModelSection, plan: Plan) -> None:
    """Checks of a user's model, which need torch.

    Raises:
        UserError: the model would compute other numbers on this layout than on one device.
    """
    from weft.train.model_checks import check_user_model

    check_user_model(FAMILIES[model.name], model, plan)
