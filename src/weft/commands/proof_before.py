"""Proof of a run before its first step: in a process beside the starting ranks, unless this machine has the verdict."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from weft.commands.data_checks import CROSS_ENTROPY
from weft.commands.prove import prove_config
from weft.config.run import Run, plan_of
from weft.config.small_runs import reduced
from weft.errors import WeftError
from weft.prove.small_sizes import accepts_sizes
from weft.prove.verdicts import cache_folder, read_verdict, verdict_key, write_verdict
from weft.run.worker import end_with_parent

MODE_VARIABLE = "WEFT_PROVE_BEFORE"
"""Environment variable in place of `prove.before = auto`, for machines on which nothing is proved."""
STEPS = 3

Verdict = dict[str, Any]


class RunningProof:
    """A proof in a forked process, while the ranks start.

    Note [Proof beside the start of ranks]
        The process of the proof is forked before the ranks are, by a process that has computed
        nothing, and inherits the end of a pipe that it holds open until it ends. Its answer is in a
        file without a name. Ranks inherit both: each waits at the end of the pipe before it opens
        the run folder, and reads the answer. So all of them start or none does, and a run that does
        not start leaves no file.

    Args:
        prove: makes the verdict.
        folder: that keeps verdicts that are "equal".
        is_required: whether a run without a verdict is rejected.
    """

    def __init__(
        self,
        prove: Callable[[], Verdict],
        *,
        folder: Path,
        is_required: bool,
    ) -> None:
        self.is_required = is_required
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            end_with_parent(parent)
            _prove_in_child(prove, self._answer.fileno(), folder)
        os.close(writer)

    def wait(self) -> Verdict:
        """The verdict, for the records of the run; in this process, or in one that it has forked.

        Raises:
            WeftError: the layout does not compute what one device computes; or the proof itself
                failed, and is required.
        """
        os.read(self._reader, 1)  # its end, when the process of the proof has ended
        file = self._answer.fileno()
        text = os.pread(file, os.fstat(file).st_size, 0)
        if not text:
            return self._unknown("the process of the proof ended without a verdict")
        answer = json.loads(text)
        if "failure" in answer:
            return self._unknown(str(answer["failure"]))
        if answer["verdict"] != "equal":
            raise WeftError(str(answer["refusal"]))
        return dict(answer)

    def end(self) -> None:
        """End the process, if it still runs; called by the process that started it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._reader)
        self._answer.close()

    def _unknown(self, reason: str) -> Verdict:
        """The verdict of a proof that could not be made.

        Raises:
            WeftError: a verdict is required.
        """
        if self.is_required:
            raise WeftError(f"prove.before is always, and the proof could not be made: {reason}")
        return {"verdict": "unknown", "reason": reason}


def start_proof(run: Run, environ: Mapping[str, str]) -> RunningProof | Verdict | None:
    """Start the proof of a run; its verdict where this machine has it; None where nothing is proved:
    `prove.before` says so, or the run has one rank.
    """
    mode = run.prove.before
    if mode == "auto":
        mode = environ.get(MODE_VARIABLE, mode)  # type: ignore[assignment]
    is_alone = run.device_mesh.size == 1
    if mode == "never" or (mode == "auto" and is_alone):
        return None
    if run.loss != CROSS_ENTROPY:
        reason = f"{run.loss} is not part of the proof, which computes the cross entropy of text"
        if mode == "always":
            raise WeftError(f"prove.before is always, and the proof could not be made: {reason}")
        return {"verdict": "unknown", "reason": reason}
    small = reduced(run, accepts_sizes)
    key = verdict_key(small.model_dump(mode="json"), plan_of(small))
    folder = cache_folder(environ)
    stored = read_verdict(folder, key)
    if stored is not None and mode == "auto":
        return {**stored, "source": "cache", "seconds": 0.0}
    return RunningProof(
        partial(_proved, run, key),
        folder=folder,
        is_required=run.prove.before == "always",
    )


def _prove_in_child(prove: Callable[[], Verdict], file: int, folder: Path) -> NoReturn:
    """Prove, keep a verdict that is "equal", and write it as JSON; the process ends here."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        try:
            verdict = prove()
        except Exception as error:  # noqa: BLE001 - reported by the parent
            verdict = {"failure": f"{type(error).__name__}: {error}"}
        if verdict.get("verdict") == "equal":
            write_verdict(folder, verdict)
        os.pwrite(file, json.dumps(verdict).encode(), 0)
        code = 0
    finally:
        os._exit(code)


def _proved(run: Run, key: str) -> Verdict:
    """The verdict of a proof that is made now; with the reason of a refusal where it fails."""
    start_s = time.perf_counter()
    answer = prove_config(run, steps=STEPS).to_dict()
    if answer["verdict"] != "equal":
        return {"verdict": answer["verdict"], "refusal": _refusal(answer)}
    return {
        "verdict": "equal",
        "key": key,
        "source": "proved",
        "compared": answer["compared"],
        "steps": answer["steps"],
        "seconds": round(time.perf_counter() - start_s, 3),
    }


def _refusal(answer: Mapping[str, Any]) -> str:
    """Why a run does not start: the first difference, and the command that repeats it."""
    words = ["the proof before the first step found a difference from one device"]
    case = answer["smallest"] or answer
    found = case["first"] or answer["first"]
    error = case["error"] or answer["error"]
    if error:
        words.append(f"the layout stops with an error: {error}")
    elif found is not None:
        if found["axis"]:
            axis = f" (axis {found['axis']})"
        else:
            axis = ""
        step = f"{found['phase']} of step {found['step']}"
        words.append(f"{step}: {found['tensor']} is {found['relation']}{axis}")
    again = f"Nothing was trained. See {case['command']}"
    return f"{': '.join(words)}. {again} (to train all the same: --prove.before never)"
