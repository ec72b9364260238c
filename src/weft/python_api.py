"""`weft.train`, `weft.steps` and `weft.prove`: training and proofs from Python scripts and notebooks.

Note [Where a run trains]
    One rank, rank threads, and a rank of torchrun or Slurm train in the calling process, and raise
    the exceptions of their ranks. Several rank processes are forks, and a process that has computed
    anything with several threads must not be forked: such a run has a process of its own, which
    starts the ranks as `weft train` does, and this process reads its events. So has one rank whose
    config asks for what only processes have: restarts, snapshots in memory, a port.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.saver import newest_path
from weft.config.rules.unused_keys import ranks_are_supervised
from weft.config.run import Run
from weft.core.transports import PROCESS, THREADS
from weft.errors import EXIT_OK, Fault, RankError, UserError, WeftError
from weft.layout.recomputation import KEY as RECOMPUTE
from weft.layout.recomputation import is_chosen_by_memory
from weft.models import FAMILIES
from weft.prove.recorded import first_config_path
from weft.prove.report import ProofReport
from weft.run.signals import StopRequest
from weft.start import preflight, run_folder
from weft.start.auto_mesh import choose_before_ranks, choose_mesh
from weft.start.auto_recompute import choose_recompute, choose_recompute_before_ranks
from weft.start.checked_run import load_checked_run
from weft.start.environment import is_joining
from weft.start.given_values import GivenRun
from weft.start.prove_parts import prove_run_parts
from weft.start.prove_run import proof_data_checks, prove_config, prove_folder
from weft.start.rules.start_checks import data_checks, environment_checks, optimizer_checks
from weft.start.run_process import RunProcess, steps_of_process
from weft.start.train_checked import train_checked
from weft.train.event_lines import read_run_events, step_history
from weft.train.event_log import EVENTS

if TYPE_CHECKING:
    from torch import Tensor

    from weft.parallel.model.parallelize import ParallelModel
    from weft.train.training import Training

Config = str | Path | Mapping[str, Any] | Run | None
"""A TOML file, keys (nested or dotted) with values, or a checked run."""
OnStep = Callable[["Step"], None]


class Step(Mapping[str, Any]):
    """The event of a step: step, loss, grad_norm, lr, tokens, tokens_per_s, step_s, mem_bytes.

    Args:
        trained: what this process trains; None: ranks are other processes.
    """

    def __init__(self, event: Mapping[str, Any], trained: ParallelModel | None = None) -> None:
        self._event = event
        self._trained = trained

    def __getitem__(self, key: str) -> Any:
        return self._event[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._event)

    def __len__(self) -> int:
        return len(self._event)

    def __repr__(self) -> str:
        return f"Step({dict(self._event)!r})"

    @property
    def model(self) -> ParallelModel:
        """The model that this rank trains, after the step: `blocks` by name, `params` by global name,
        which hold the shards of this rank.

        Raises:
            WeftError: ranks are other processes, or the run has ended.
        """
        if self._trained is None:
            how = 'one rank, "transport": "threads", torchrun, or Result.model after the run'
            raise WeftError(f"the model of a step is in the processes of its ranks; use {how}")
        return self._trained


@dataclass(frozen=True)
class Result:
    """A finished training run.

    Attributes:
        run: its config.
        out: its folder.
        history: the events of its steps, in order.
        status: "finished", or "stopped" after a request to stop.
    """

    run: Run
    out: Path
    history: tuple[Step, ...]
    status: str

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return newest_path(self.out)

    @cached_property
    def model(self) -> Mapping[str, Tensor]:
        """Parameters of the newest checkpoint, whole, by global name.

        Raises:
            UserError: the run has saved none.
        """
        from weft.checkpoint.read import open_checkpoint  # it imports torch
        from weft.core.axes import Box

        if self.checkpoint is None:
            fix = "save.at_end = True"
            raise UserError(Fault(str(self.out), "the run has no checkpoint", fix=fix))
        source = open_checkpoint(self.checkpoint).section("model")
        return {name: source.read(name, Box.whole(shape)) for name, shape in source.shapes.items()}


def train(
    config: Config = None, *, model: Any = None, data: Any = None, on_step: OnStep | None = None
) -> Result:
    """Train a run, as `weft train` does, and wait for its end.

    Args:
        config: a TOML file, or keys: `{"mesh": "dp2", "steps": 10, "optim": {"lr": 1e-3}}`.
        model: a family, a model file, a module, a `weft.Model`, or a class or object with the same
            names.
        data: a data source; a one-dimensional array of tokens; arrays by name, for models that name
            them; or items, which are read once: a dataset of torch or of the library datasets, a
            DataLoader, a list or an iterable, of texts, records, rows of tokens or arrays.
        on_step: called with each step, under torchrun on every rank, else once. If it raises, the
            run saves and ends, and the exception is raised here.

    Raises:
        UserError: what the config asks for is not possible; nothing has been written.
        WeftError: the training failed; or the exception itself that a rank in this process raised.
    """
    prepared = _prepare(config, model, data)
    if prepared.trains_here:
        return _train_here(prepared, on_step)
    for step in prepared.steps_of_process():
        if on_step is not None:
            on_step(step)
    recorded = _recorded(prepared.out)
    run = prepared.run.with_values({"out": str(prepared.out)})
    return Result(run, prepared.out, recorded.history, recorded.status)


def steps(config: Config = None, *, model: Any = None, data: Any = None) -> Generator[Step]:
    """Train a run, and yield the event of each step as it ends; the run does not wait for the loop.

        for step in weft.steps({"steps": 1000}, model="my_model.py"):
            if step["loss"] < 1.5:
                break                     # the run saves a checkpoint, and ends

    Raises:
        UserError: as `train`; or this process is a rank of torchrun, where `train(on_step=...)` is
            called on every rank.
        WeftError: the training failed.
    """
    if is_joining(os.environ):
        fix = "weft.train(..., on_step=...)"
        raise UserError(
            Fault("weft.steps", "runs in one process, not on torchrun's ranks", fix=fix)
        )
    return _prepare(config, model, data).steps_of_process()


def prove(
    config: Config = None,
    *,
    model: Any = None,
    data: Any = None,
    first: int = 4,
    full: bool = False,
    what: Sequence[str] = (),
) -> ProofReport:
    """Compare a layout with one device, as `weft prove` does, in this process, ranks as threads.

        report = weft.prove({"mesh": "pp2 tp2"}, model="my_model.py")
        assert report.holds, report.first

    Args:
        config: as of `train`; or the folder of a run, whose recorded steps are compared.
        model: as of `train`.
        data: as of `train`.
        first: steps to compare.
        full: keep the sizes of model and batch; else they are as small as the layout allows.
        what: parts of the run to prove in place of its training, as of `weft prove --what`; of the
            folder of a run they are those of its config.

    Raises:
        UserError: what the config asks for is not possible.
    """
    if first < 1:
        raise UserError(Fault("first", "is no number of steps", got=str(first), need="1 or more"))
    if isinstance(config, (str, Path)) and Path(config).is_dir():
        if model is not None or data is not None:
            what = "a run folder has its own model and data"
            raise UserError(Fault("weft.prove", what, got=str(config), fix="leave them out"))
        if not what:
            return prove_folder(Path(config), first=first)
        config = first_config_path(Path(config))
    given = GivenRun.of(config, model, data)
    run = load_checked_run(
        given.words,
        proof_data_checks,
        optimizer_checks,
        values=given.all_values,
        choose_mesh=choose_mesh,
        choose_recompute=choose_recompute,
    )
    if what:
        return prove_run_parts(run, what, steps=first, full=full)
    return prove_config(run, steps=first, full=full)


def checked_run(config: Config = None, model: Any = None, data: Any = None) -> Run:
    """The run of these arguments of `train`, checked as a command checks it.

    Raises:
        UserError: it is not possible.
    """
    given = GivenRun.of(config, model, data)
    return load_checked_run(
        given.words,
        data_checks,
        values=given.all_values,
        choose_mesh=choose_mesh,
        choose_recompute=choose_recompute,
    )


@dataclass(frozen=True)
class _PreparedRun:
    """A checked run, and what a script has given for it."""

    given: GivenRun
    run: Run

    @property
    def trains_here(self) -> bool:
        """See Note [Where a run trains]."""
        if self.run.transport != PROCESS or is_joining(os.environ):
            return True
        run = self.run
        needs_processes = any(ranks_are_supervised(THREADS, run.run, run.save, port=run.port))
        return run.device_mesh.size == 1 and not needs_processes

    @cached_property
    def out(self) -> Path:
        """The run folder: a new one where the config names none."""
        return Path(self.run.out or run_folder.new_run_folder(self.run.model, datetime.now()))

    def steps_of_process(self) -> Generator[Step]:
        """Train in a process of its own; yields its steps. Closed, it stops the run, which saves."""
        own_model = FAMILIES.value_of(self.run.model.name)
        values = dict(self.given.values)
        if self.given.data is not None:
            values |= self.given.data.moved(self.out)
        process = RunProcess(self.given.words, values, self.out, own_model)
        with closing(steps_of_process(process)) as events:
            for event in events:
                yield Step(event)


def _prepare(config: Config, model: Any, data: Any) -> _PreparedRun:
    given = GivenRun.of(config, model, data)
    is_rank = is_joining(os.environ)
    run = load_checked_run(
        given.words,
        data_checks,
        environment_checks,
        values=given.all_values,
        adapt=preflight.after_restart if is_rank else None,
        choose_mesh=choose_before_ranks,
        choose_recompute=choose_recompute_before_ranks,
    )
    chosen = {"mesh": run.mesh} if run.mesh else {}  # `auto` is chosen once
    if is_chosen_by_memory(run.parallel.recompute):
        chosen[RECOMPUTE] = run.parallel.recompute
    return _PreparedRun(replace(given, values={**given.values, **chosen}), run)


@dataclass(frozen=True)
class _RecordedSteps:
    """The steps that a run folder records, and how the run ended."""

    history: tuple[Step, ...]
    status: str


def _recorded(out: Path) -> _RecordedSteps:
    """What the events of a run folder say; without an `end` event the run was stopped."""
    events = list(read_run_events(out / EVENTS))
    status = "stopped"
    for event in events:
        if event["event"] == "end":
            status = str(event["status"])
    history: list[Step] = [Step(event) for event in step_history(events)]
    return _RecordedSteps(tuple(history), status)


def _train_here(prepared: _PreparedRun, on_step: OnStep | None) -> Result:
    """Train in this process: see Note [Where a run trains]."""
    observer = _StepObserver(on_step, is_rank=is_joining(os.environ))
    run = prepared.run
    if run.transport == PROCESS and not observer.is_rank:
        run = run.with_values({"transport": THREADS})  # one rank, which is a thread of this process

    def complete(run: Run, out: Path) -> Run:
        """The run in its folder, with the data that the script has given."""
        data = prepared.given.data
        return run if data is None else run.with_values(data.moved(out))

    try:
        trained = train_checked(
            run, complete=complete, on_event=observer.observe, caller=observer.stop_request
        )
    except RankError as error:
        if not isinstance(error.__cause__, Exception):
            raise
        if str(error) != str(error.__cause__):
            error.__cause__.add_note(str(error))
        raise error.__cause__ from None
    if observer.error is not None:
        raise observer.error
    status = "finished" if trained.code == EXIT_OK else "stopped"
    return Result(trained.run, Path(str(trained.run.out)), tuple(observer.steps), status)


class _StepObserver:
    """Collects the steps of a run in this process, and calls a function with each.

    Args:
        is_rank: this process is one rank; else its rank 0 is observed, which may be a thread.
    """

    def __init__(self, on_step: OnStep | None, *, is_rank: bool) -> None:
        self.steps: list[Step] = []
        self.error: BaseException | None = None
        self.stop_request = StopRequest()
        self.is_rank = is_rank
        self._on_step = on_step

    def observe(self, event: Mapping[str, Any], training: Training) -> None:
        """Take an event of a rank; a step is handed on. An exception stops the run, which saves."""
        model = training.step.model
        is_observed = self.is_rank or model.comm.rank == 0
        if event["event"] != "step" or not is_observed:
            return
        step = Step(dict(event), model)
        self.steps.append(Step(step._event))
        if self._on_step is None or self.error is not None:
            return
        try:
            self._on_step(step)
        except BaseException as error:
            if self.is_rank:  # the other ranks have not seen it
                raise
            self.error = error
            self.stop_request.requested = True
