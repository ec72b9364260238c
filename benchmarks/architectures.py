"""Every decoder of transformers on several layouts, against transformers' own class on one device; writes docs/architectures.md.

PYTHONPATH=. .venv/bin/python -m benchmarks.architectures [--only llama gpt2] [--missing]

Results are kept in docs/results/architectures.jsonl; `--missing` runs what is not there. Each
architecture runs in a process of its own, forked from one that has imported everything, with a time
limit. In the comparison with transformers' class casts to float32 inside its code are left out on
both sides; in the comparisons of layouts they are there, and bound what can be told.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
import transformers
from benchmarks.architectures_page import COLUMNS, last_results, write_page
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import weft
from weft.config.hf.architectures import PREFIX, architectures
from weft.errors import PlanError, UserError, WeftError
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.models.common.dropout import uniform_like
from weft.models.common.layers import Loss
from weft.models.transformers.adapt import adapt
from weft.models.transformers.build import Architecture, architecture_of, build, config_of
from weft.models.transformers.chain import blocks_of_model
from weft.models.transformers.check import check_against_transformers
from weft.models.transformers.draws import DrawsByCounter
from weft.models.transformers.interfaces import EAGER
from weft.models.transformers.sizes import AXES, SETTINGS
from weft.models.transformers.wide_constants import WideConstants
from weft.models.user_family import UserFamily
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase
from weft.python_api import checked_run
from weft.train import model_checks

RESULTS = Path("docs/results/architectures.jsonl")
GOLDEN_RATIO = 0.618034
"""A line an architecture; kept, so that `--missing` goes on from any checkout."""
LIMIT_S = 400
"""CPU seconds of an architecture; of the clock four times as many."""
ROWS, LENGTH = 2, 24
TOLERANCE = 1e-8
"""Largest difference of the loss and of any gradient to transformers' own class."""
TIED = '{"tie_word_embeddings": true}'
COMMON: Mapping[str, Any] = {"data.seq_len": 32, "transport": "threads"}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2 zero 3": {"mesh": "dp2", "parallel.zero": 3},
    "tp2": {"mesh": "tp2"},
    "tp2 sequence": {"mesh": "tp2", "parallel.sequence": True},
    "cp2": {"mesh": "cp2"},
    "pp2": {"mesh": "pp2"},
    "ep2": {"mesh": "ep2"},
}
SMALL: Mapping[str, Any] = {"batch.global_size": 4, "batch.micro_size": 2}
PARTS = {"generation": "generate", "export": "export"}


@dataclass(frozen=True)
class Outcome:
    """What came of one column of the table.

    Attributes:
        word: "equal", "rejected", "wrong", "failed", or "none" where there is nothing to compare.
        text: largest difference, or the line.
    """

    word: str
    text: str = ""


def main(words: Sequence[str]) -> int:
    """Run all, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--columns", nargs="*", default=[], help="these alone")
    parser.add_argument("--missing", action="store_true", help="columns without a result alone")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args(words)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if not options.page:
        prepare()
        known = last_results(options.results) if options.missing else {}
        for model_type in options.only or architectures():
            columns = [
                column
                for column in options.columns or COLUMNS
                if column not in known.get(model_type, {})
            ]
            is_rejected = known.get(model_type, {}).get("one device", {}).get("word") == "rejected"
            if is_rejected or not columns:
                continue
            outcomes = in_own_process(model_type, columns)
            record = {name: asdict(outcome) for name, outcome in outcomes.items()}
            line = json.dumps({"model_type": model_type, "outcomes": record})
            with options.results.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(
                model_type, *(f"{n}: {o.word}" for n, o in outcomes.items()), sep="; ", flush=True
            )
    write_page(options.results, architectures())
    return 0


def prepare() -> None:
    """What every process needs, before it is forked."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    FAMILIES[f"{PREFIX}llama"]
    architecture_of("llama", _values("llama"))
    # what does not depend on the layout is checked for the first column alone
    model_checks._check_computation = once(model_checks._check_computation)
    model_checks.check_builds = once(model_checks.check_builds)


def once(check: Callable[..., None]) -> Callable[..., None]:
    """A check of (family, config, plan) that is not repeated for layouts of equal sizes."""
    passed = set[object]()

    def checked(family: Any, config: Any, plan: Any = None) -> None:
        sizes = plan and (plan.micro_size, plan.seq_len, plan.compute, plan.mesh.degree("cp"))
        key = (family, config.model_dump_json(), sizes)
        if key not in passed:
            check(family, config, *filter(None, [plan]))
            passed.add(key)

    return checked


def in_own_process(model_type: str, columns: Sequence[str]) -> Mapping[str, Outcome]:
    """The outcomes of an architecture; those that came before the time limit."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(4 * LIMIT_S)
        with os.fdopen(write, "w", encoding="utf-8") as file:
            for name, outcome in outcomes_of(model_type, columns):
                print(json.dumps([name, asdict(outcome)]), file=file, flush=True)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        found = {name: Outcome(**fields) for name, fields in map(json.loads, file)}
    _, status = os.waitpid(pid, 0)
    if status:
        found["end"] = Outcome("failed", f"ended with status {status} (limit {LIMIT_S} s)")
    return found


def outcomes_of(model_type: str, columns: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """One device against transformers' class, then each layout against one device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    with float64_alone():
        one_device = tried(lambda: against_transformers(model_type))
    yield "one device", one_device
    if one_device.word != "equal":
        return
    found = architecture_of(model_type, _values(model_type))
    ties = hasattr(found.config, "tie_word_embeddings") and _can_tie(model_type)
    for name, keys in LAYOUTS.items():
        if name not in columns:
            continue
        if name == "ep2" and not found.experts:
            yield name, Outcome("none")
            continue
        settings = {f"model.{SETTINGS}": TIED} if name == "pp2" and ties else {}
        yield name, tried(lambda keys=keys, more=settings: proven(model_type, {**keys, **more}))
    for name, part in PARTS.items():
        if name not in columns:
            continue
        what = (part,)
        yield name, tried(lambda what=what: proven(model_type, {"mesh": "dp2"}, what=what))


def _can_tie(model_type: str) -> bool:
    try:
        config_of(model_type, {**_values(model_type), SETTINGS: TIED})
    except PlanError:
        return False
    return True


def tried(act: Callable[[], Outcome]) -> Outcome:
    """An outcome, or why there is none; a rejection is one line of weft."""
    try:
        return act()
    except UserError as error:
        return Outcome("rejected", str(error.faults[0]))
    except WeftError as error:
        return Outcome("failed", str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - a traceback is what the table counts
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return Outcome("failed", text.splitlines()[0])


def proven(model_type: str, keys: Mapping[str, Any], *, what: Sequence[str] = ()) -> Outcome:
    """A proof of a layout against one device."""
    config = {"model.name": f"{PREFIX}{model_type}", **COMMON, **keys}
    if what:
        report = weft.prove({**SMALL, **config}, first=1, full=True, what=what)
    else:
        run = checked_run({**SMALL, **config})
        report = prove(ProofCase(run, 1).opened().in_float64())
    if not report.holds:
        return Outcome("wrong", report.error or str(report.first))
    if report.error:
        return Outcome("failed", report.error)
    return Outcome("equal", f"{_largest(report):.0e}")


def _largest(report: ProofReport) -> float:
    return max((bound.largest for one in report.passes for bound in one.bounds), default=0.0)


def _values(model_type: str) -> dict[str, Any]:
    family = FAMILIES[f"{PREFIX}{model_type}"]
    assert isinstance(family, UserFamily), "made by weft.models.transformers"
    values = dict(vars(family.user_config(family.Config())))
    del values[AXES]
    return values


def against_transformers(model_type: str) -> Outcome:
    """Loss and every gradient of the chain, and of transformers' class with the same values."""
    check_against_transformers(model_type, _values(model_type), packs_documents=False)
    found = architecture_of(model_type, _values(model_type))
    right = _seeded(found, EAGER)
    own = adapt(_seeded(found, found.captured.implementation))
    ids = torch.randint(found.config.vocab_size, (ROWS, LENGTH + 1))
    batch = replace(token_batch(ids[:, :-1], ids[:, 1:]), draw_keys=torch.arange(ROWS))
    with SameDraws(), DrawsByCounter(), WideConstants():  # as in the blocks of the chain
        logits: Tensor = right(input_ids=batch.inputs, use_cache=False).logits
    targets = batch.targets.flatten()
    right_loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    loss: Tensor = batch.inputs
    with SameDraws():  # not `forward`, in which draws are by counter
        for block in (*blocks_of_model(own, found.captured).values(), Loss()):
            loss = block(loss, batch)
    differences = [float(abs(loss - right_loss).detach())]
    right_loss.backward()
    loss.backward()
    for name, param in right.named_parameters():
        of_own = _grad(own.get_parameter(name))
        if name in found.transposed:
            of_own = of_own.T
        differences.append(float((of_own - _grad(param)).abs().max()))
    largest = max(differences)
    return Outcome("equal" if largest <= TOLERANCE else "wrong", f"{largest:.0e}")


class SameDraws(TorchFunctionMode):
    """Random numbers that are functions of their place alone: both sides draw the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of `func`."""
        if func is not uniform_like:
            return func(*args, **(kwargs or {}))
        (x,) = args
        places = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
        return (places * GOLDEN_RATIO + 0.5) % 1


def _seeded(found: Architecture, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    return build(found.config, implementation=implementation).double().train()


def _grad(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


@contextmanager
def float64_alone() -> Iterator[None]:
    """Casts of float64 to float32 do nothing."""
    to, narrow, softmax, functional = Tensor.to, Tensor.float, torch.softmax, F.softmax

    def wide_to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
        return to(x, *args, **options)

    def wide(act: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(x: Tensor, *args: Any, **options: Any) -> Tensor:
            if x.dtype == torch.float64 and options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
            return act(x, *args, **options)

        return computed

    def wide_float(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x if x.dtype == torch.float64 else narrow(x, *args, **options)

    Tensor.to = wide_to  # type: ignore[method-assign]
    Tensor.float = wide_float  # type: ignore[method-assign, assignment]
    torch.softmax = wide(softmax)
    F.softmax = wide(functional)
    try:
        yield
    finally:
        Tensor.to = to  # type: ignore[method-assign]
        Tensor.float = narrow  # type: ignore[method-assign]
        torch.softmax = softmax
        F.softmax = functional


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
