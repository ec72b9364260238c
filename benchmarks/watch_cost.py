"""What watching a run costs: blocks of ten steps with and without a part of it, in turns, in one run.

    python -m benchmarks.watch_cost PART [MESH [STEPS [WORD ...]]]      further words are those of `weft train`

PART is `off` (the tests for a recorder that each call and action makes where no step is profiled, against the same
code without them), `on` (a profile of the steps), a tracker (`csv`, `tensorboard`, ...; a package that is not
installed is an error), or `nothing` (neither block has anything: the noise). Prints for each rank, of a tracker for
rank 0, the CPU seconds of a step without and with it, all threads of the process counted, and their ratio: the median
over blocks of a block to the mean of its two neighbours. The first steps of each block, in which things start and end,
are left out.
"""

from __future__ import annotations

import ast
import inspect
import json
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import weft.start.train_run
from weft.cli import main
from weft.comm.comm import Comm
from weft.parallel.pipeline.player import Player
from weft.run.rank_status import OnPhase, Phase
from weft.track.sink import TrackerSink
from weft.train.step_profiler import StepProfiler

BLOCK = 10
LEFT_OUT = 2
"""First steps of a block."""
WARM_BLOCKS = 2
"""First blocks of a run, in which a tracker's package is imported."""


def is_on(step: int) -> bool:
    """Whether a step is in a block with the part."""
    return step // BLOCK % 2 == 1


class InTurns(StepProfiler):
    """Turns the part on for every other block of steps, and keeps the times at which steps begin and end."""

    part = "nothing"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: dict[int, list[float]] = {}

    def observed(self, on_phase: OnPhase | None) -> OnPhase:
        observe = super().observed(on_phase)

        def timed(step: int, phase: Phase) -> None:
            if phase in ("data", "end"):
                self.times.setdefault(step, []).append(time.process_time())
            observe(step, phase)

        return timed

    def before_step(self, number: int) -> Iterator[dict[str, Any]]:
        if self.part == "off":
            use_hooks(is_on(number))
        elif self.part == "on" and is_on(number) and self._recorder is None:
            self._start(number)
        elif not is_on(number) and self._recorder is not None:
            yield self._end()
        self._last = number

    def close(self) -> Iterator[dict[str, Any]]:
        yield from super().close()
        path = self._run_folder / f"times-{self._step.model.comm.rank}.json"
        path.write_text(json.dumps(self.times))


class SinkInTurns(TrackerSink):
    """Passes on the events of every other block of steps."""

    def handle(self, event: Any) -> None:
        if is_on(int(event.get("step") or 0)):
            super().handle(event)


class WithoutHooks(ast.NodeTransformer):
    """Code as it would be if it knew no recorder."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return (
            None if ast.unparse(node.test) == "recorder is not None" else self.generic_visit(node)
        )

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return node.body if ast.unparse(node.test) == "recorder is None" else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.values = [v for v in node.values if ast.unparse(v) != "recorder is not None"]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            kept = [at for at, name in enumerate(target.elts) if ast.unparse(name) != "recorder"]
            target.elts = [target.elts[at] for at in kept]
            value.elts = [value.elts[at] for at in kept]
        is_recorder = ast.unparse(target) == "recorder"
        return None if is_recorder else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        nothing = ast.Constant(None)
        node.args = [nothing if ast.unparse(arg) == "recorder" else arg for arg in node.args]
        return self.generic_visit(node)


def has_recorder(tree: ast.AST) -> bool:
    """Whether code reads the name `recorder`."""
    return any(isinstance(node, ast.Name) and node.id == "recorder" for node in ast.walk(tree))


def without_hooks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled again without its tests for a recorder.

    Raises:
        AssertionError: something of a recorder is left, or nothing was there.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    assert has_recorder(tree), "the function asks for no recorder"
    tree = ast.fix_missing_locations(WithoutHooks().visit(tree))
    assert not has_recorder(tree), ast.unparse(tree)
    names: dict[str, Any] = {}
    exec(compile(tree, "<without hooks>", "exec"), function.__globals__, names)  # noqa: S102
    return names[function.__name__]


HOOKED = ((Comm, "_start_call"), (Player, "_execute"))
VARIANTS = {
    (owner, name): (getattr(owner, name), without_hooks(getattr(owner, name)))
    for owner, name in HOOKED
}


def use_hooks(has_hooks: bool) -> None:
    """Run the code with its tests for a recorder, or without."""
    for (owner, name), (hooked, plain) in VARIANTS.items():
        setattr(owner, name, hooked if has_hooks else plain)


def blocks_of(times: dict[str, list[float]]) -> list[float]:
    """CPU seconds of a step, the mean of each whole block after the first ones."""
    found: dict[int, list[float]] = {}
    for step, marks in times.items():
        number = int(step)
        if number % BLOCK >= LEFT_OUT and len(marks) >= 2:
            found.setdefault(number // BLOCK, []).append(marks[1] - marks[0])
    return [
        statistics.fmean(found[block])
        for block in sorted(found)
        if block >= WARM_BLOCKS and len(found[block]) == BLOCK - LEFT_OUT
    ]


def ratio_text(times: dict[str, list[float]]) -> str:
    """`76.1 -> 76.3 ms, ratio 1.003`."""
    blocks = blocks_of(times)  # the first one is off
    ratios = [
        2 * blocks[at] / (blocks[at - 1] + blocks[at + 1]) for at in range(1, len(blocks) - 1, 2)
    ]
    off, on = statistics.median(blocks[::2]), statistics.median(blocks[1::2])
    return f"{1e3 * off:.2f} -> {1e3 * on:.2f} ms, ratio {statistics.median(ratios):.4f} over {len(ratios)} blocks"


def measure(part: str, mesh: str = "pp2 dp2 tp2", steps: str = "204", *words: str) -> None:
    """Train, and print the ratio of each rank."""
    InTurns.part = part
    weft.start.train_run.StepProfiler = InTurns  # type: ignore[misc]
    track: tuple[str, ...] = ()
    if part not in ("off", "on", "nothing"):
        track = ("--track", part)
        weft.start.train_run.tracker_sinks = lambda names, run: [  # type: ignore[assignment]
            SinkInTurns(name, run) for name in names
        ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        code = main(
            [
                *("train", "--mesh", mesh, "--steps", steps, "--profile", "2:3", *track),
                *("--prove.before", "never", "--save.at_end", "False", "--report", "False"),
                *("--out", str(out), *words),
            ]
        )
        assert code == 0
        for path in sorted(out.glob("times-*.json"))[: 1 if track else None]:
            print(f"{part}, {path.stem}: {ratio_text(json.loads(path.read_text()))}")


if __name__ == "__main__":
    measure(*sys.argv[1:])
