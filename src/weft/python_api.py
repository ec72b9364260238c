"""`weft.train`, `weft.steps` and `weft.prove`: training and proofs from Python scripts and notebooks.

Note [Where a run trains]
    One rank, rank threads, and a rank of torchrun or Slurm train in the calling process, and raise
    the exceptions of their ranks. Several rank processes are forks, and a process that has computed
    anything with several threads must not be forked: such a run has a process of its own, which
    starts the ranks as `weft train` does, and this process reads its events.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import cloudpickle  # noqa: TID251 - between this process and its own child

from weft.checkpoint.saver import newest_path
from weft.config.keys import flatten
from weft.config.run import Run
from weft.config.user_code import canonical_reference, is_reference
from weft.core.transports import PROCESS, THREADS
from weft.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USER,
    Fault,
    RankError,
    UserError,
    WeftError,
    first_line,
)
from weft.models import FAMILIES
from weft.prove.recorded import first_config_path
from weft.prove.report import ProofReport
from weft.run.signals import StopRequest
from weft.start import preflight, run_folder
from weft.start.auto_mesh import choose_before_ranks, choose_mesh
from weft.start.checked_run import load_checked_run
from weft.start.environment import is_joining
from weft.start.preflight import data_checks
from weft.start.prove_parts import prove_run_parts
from weft.start.prove_run import proof_data_checks, prove_config, prove_folder
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
POLL_S = 0.05
CHILD = "from weft.python_api import train_as_child; train_as_child()"
TOKENS = "tokens.bin"
"""File of a run folder with the tokens that were given as an array."""


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
        data: a data source, or a one-dimensional array of tokens.
        on_step: called with each step, under torchrun on every rank, else once. If it raises, the
            run saves and ends, and the exception is raised here.

    Raises:
        UserError: what the config asks for is not possible; nothing has been written.
        WeftError: the training failed; or the exception itself that a rank in this process raised.
    """
    prepared = _prepare(config, model, data)
    if prepared.trains_here:
        return _train_here(prepared, on_step)
    history: list[Step] = []
    for step in _run_child(prepared):
        history.append(step)
        if on_step is not None:
            on_step(step)
    recorded = _recorded(prepared.out)
    run = prepared.run.with_values({"out": str(prepared.out)})
    return Result(run, prepared.out, recorded.history, recorded.status)


def steps(config: Config = None, *, model: Any = None, data: Any = None) -> Iterator[Step]:
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
    return _run_child(_prepare(config, model, data))


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
    words, values = _words(config, model, data)
    tokens = None if isinstance(data, (str, Path)) else data
    with tempfile.TemporaryDirectory() as folder:
        of_tokens = {} if tokens is None else _stored_tokens(tokens, Path(folder))
        run = load_checked_run(
            words,
            proof_data_checks,
            preflight.optimizer_checks,
            values={**values, **of_tokens},
            choose_mesh=choose_mesh,
        )
        if what:
            return prove_run_parts(run, what, steps=first, full=full)
        return prove_config(run, steps=first, full=full)


def checked_run(config: Config = None, model: Any = None, data: Any = None) -> Run:
    """The run of these arguments of `train`, checked as a command checks it.

    Raises:
        UserError: it is not possible.
    """
    words, values = _words(config, model, data)
    return load_checked_run(words, data_checks, values=values, choose_mesh=choose_mesh)


@dataclass(frozen=True)
class _PreparedRun:
    """A checked run.

    Attributes:
        words: of the command line, and `values` of keys beside them.
        tokens: that are given as an array; None: the config names the data.
    """

    words: tuple[str, ...]
    values: Mapping[str, Any]
    run: Run
    tokens: Any

    @property
    def trains_here(self) -> bool:
        """See Note [Where a run trains]."""
        is_alone = self.run.device_mesh.size == 1
        return is_alone or self.run.transport != PROCESS or is_joining(os.environ)

    @cached_property
    def out(self) -> Path:
        """The run folder: a new one where the config names none."""
        return Path(self.run.out or run_folder.new_run_folder(self.run.model, datetime.now()))


def _prepare(config: Config, model: Any, data: Any) -> _PreparedRun:
    words, values = _words(config, model, data)
    tokens = None if data is None or isinstance(data, (str, Path)) else data
    is_rank = is_joining(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        of_tokens = {} if tokens is None else _stored_tokens(tokens, Path(folder))
        run = load_checked_run(
            words,
            data_checks,
            preflight.environment_checks,
            values={**values, **of_tokens},
            adapt=preflight.after_restart if is_rank else None,
            choose_mesh=choose_before_ranks,
        )
    chosen = {"mesh": run.mesh} if run.mesh else {}  # `auto` is chosen once
    return _PreparedRun(words, {**values, **chosen}, run, tokens)


MAX_TOKENS = 2**32
"""Tokens are stored in at most four bytes."""


def _words(config: Any, model: Any, data: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """The words of a command line, and keys with values, that mean the same."""
    words: list[str] = []
    values: dict[str, Any] = {}
    if isinstance(config, (str, Path)):
        words.append(str(config))
    elif isinstance(config, Run):
        values.update(_plain_values(config.model_dump(mode="json")))
    elif isinstance(config, Mapping):
        values.update(_plain_values(config))
    elif config is not None:
        got, need = type(config).__name__, "a TOML file, or keys with values"
        fix = 'for example weft.train({"steps": 10, "optim": {"lr": 1e-3}})'
        raise UserError(Fault("config", "is no config", got=got, need=need, fix=fix))
    if model is not None:
        values["model.name"] = _model_name(model)
    if isinstance(data, (str, Path)):
        values["data.source"] = str(data)
    elif data is not None:
        _check_tokens(data)
    return tuple(words), values


def _plain_values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys with values as a TOML file has them; None means the same as leaving a key out."""
    for key, value in flatten(config).items():
        if isinstance(value, os.PathLike):
            yield key, os.fspath(value)
        elif hasattr(value, "item") and not getattr(
            value, "shape", ()
        ):  # a scalar of NumPy or torch
            yield key, value.item()
        elif value is not None:
            yield key, value


def _model_name(model: Any) -> str:
    """The name under which a model is known; a model that is a value is registered."""
    if isinstance(model, (str, Path)):
        name = str(model)
        return canonical_reference(name) if is_reference(name) else name
    if isinstance(model, ModuleType) and getattr(model, "__file__", None):
        return canonical_reference(str(model.__file__))
    from weft.models.user_family import UserFamily  # it imports torch
    from weft.models.user_model import Model, model_of, with_code

    if isinstance(model, Model):
        family = UserFamily(with_code(model))
    else:
        name = getattr(model, "__name__", None) or type(model).__name__
        family = UserFamily(model_of(model, name=name.strip("_")))
    FAMILIES.add(family)
    return family.model.name


def _check_tokens(data: Any) -> None:
    """An array of tokens has one dimension and whole numbers."""
    import numpy as np

    if not _is_array(data):  # NumPy takes any other object for a sequence, maybe one without an end
        raise UserError(_no_data(type(data).__name__))
    try:
        tokens = np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(_no_data(f"{type(data).__name__}: {first_line(error)}")) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise UserError(_no_data(f"shape {list(tokens.shape)} of {tokens.dtype}"))
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= MAX_TOKENS:
        got = f"{least} to {most}"
        raise UserError(
            Fault("data", "has numbers that are no tokens", got=got, need="0 or more, below 2**32")
        )


def _is_array(data: Any) -> bool:
    """Whether an object is an array, a tensor, or a list, tuple or range of numbers."""
    if isinstance(data, (list, tuple)):
        return all(isinstance(each, Number) or hasattr(each, "__array__") for each in data)
    return isinstance(data, (range, array)) or hasattr(data, "__array__")


def _no_data(got: str) -> Fault:
    need = "a data source, or tokens: an array, tensor or list of whole numbers in one dimension"
    return Fault("data", "is no data", got=got, need=need)


def _run_child(prepared: _PreparedRun) -> Iterator[Step]:
    """Train in a process of its own; yields step events. Ends the run where the loop ends early."""
    out = prepared.out
    own_model = FAMILIES.value_of(prepared.run.model.name)
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as failure:
        values = {**prepared.values, "out": str(out)}
        job = (prepared.words, values, own_model, prepared.tokens, failure.name)
        payload = cloudpickle.dumps(job)
        child = subprocess.Popen(  # noqa: S603 - this Python, with a module of weft
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert child.stdin is not None, "stdin is a pipe"
        with child.stdin as pipe:
            pipe.write(payload)
        seen = _num_events(out / EVENTS)
        try:
            yield from _follow(out / EVENTS, child, skip=seen)
        finally:
            code = _end(child)
        if code not in (EXIT_OK, EXIT_PREEMPTED):
            raise _failure_of(Path(failure.name), code, output)


def _num_events(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _follow(path: Path, child: subprocess.Popen[bytes], *, skip: int) -> Iterator[Step]:
    """The step events that a process writes, until it ends."""
    position = 0
    number = 0
    while True:
        has_ended = child.poll() is not None
        for line in _whole_lines(path, position):
            position += len(line)
            number += 1
            event = json.loads(line)
            if number > skip and event["event"] == "step":
                yield Step(event)
        if has_ended:
            return
        time.sleep(POLL_S)


def _whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines from a position on that are complete."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(position)
        lines = file.read().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _end(child: subprocess.Popen[bytes]) -> int:
    """Wait for a process; one that still runs is asked to stop, and saves."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    return child.wait()


LAST_LINES = 20
"""Of the output of a process that has printed no error."""


def _failure_of(path: Path, code: int, output: IO[bytes]) -> WeftError:
    """The error that the process of a run has written; else what it has printed last."""
    written = path.read_bytes()
    if written:
        error: WeftError = cloudpickle.loads(written)
        return error
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return WeftError("\n".join(lines[-LAST_LINES:]) or f"the run ended with code {code}")


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


def train_as_child() -> None:
    """Entry point of the process of a run: reads its config, model and tokens, and trains."""
    words, values, own_model, tokens, failure_path = cloudpickle.load(sys.stdin.buffer)
    if own_model is not None:
        _model_name(own_model)
    if tokens is not None:
        values |= _stored_tokens(tokens, Path(values["out"]))
    try:
        run = load_checked_run(
            words,
            data_checks,
            preflight.environment_checks,
            values=values,
            choose_mesh=choose_before_ranks,
        )
        sys.exit(train_checked(run).code)
    except WeftError as error:
        Path(failure_path).write_bytes(cloudpickle.dumps(error))
        sys.exit(EXIT_USER if isinstance(error, UserError) else EXIT_FAILED)


def _stored_tokens(tokens: Any, out: Path) -> dict[str, Any]:
    """Write tokens to a file in the run folder; the keys that name it."""
    import numpy as np

    stored = np.asarray(tokens)
    dtype = "uint16" if int(stored.max()) < 2**16 else "uint32"
    out.mkdir(parents=True, exist_ok=True)
    path = out / TOKENS
    stored.astype(dtype).tofile(path)
    return {"data.source": str(path), "data.token_dtype": dtype}


def _train_here(prepared: _PreparedRun, on_step: OnStep | None) -> Result:
    """Train in this process: see Note [Where a run trains]."""
    observer = _StepObserver(on_step, is_rank=is_joining(os.environ))
    run = prepared.run
    if run.transport == PROCESS and not observer.is_rank:
        run = run.with_values({"transport": THREADS})  # one rank, which is a thread of this process

    def complete(run: Run, out: Path) -> Run:
        """The run in its folder, with tokens that were given as an array."""
        tokens = prepared.tokens
        return run if tokens is None else run.with_values(_stored_tokens(tokens, out))

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
