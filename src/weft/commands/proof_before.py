"""Proof of a run before its first step: in a forked process, unless this machine has the verdict already."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.commands.data_checks import CROSS_ENTROPY
from weft.commands.prove import prove_config
from weft.config.run import Run
from weft.errors import WeftError
from weft.prove.reduce import reduced
from weft.prove.verdicts import cache_folder, read_verdict, verdict_key, write_verdict

MODE_VARIABLE = "WEFT_PROVE_BEFORE"
"""Environment variable in place of `prove.before = auto`, for machines on which nothing is proved."""
STEPS = 3

Verdict = dict[str, Any]


class RunningProof:
    """A proof in a forked process; `wait` returns its verdict."""

    def __init__(
        self,
        run: Run,
        key: str,
        environ: Mapping[str, str],
    ) -> None:
        self.key = key
        self.folder = cache_folder(environ)
        self.is_required = run.prove.before == "always"
        self._start_s = time.perf_counter()
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _prove_in_child(run, writer)
        os.close(writer)
        self._reader = reader

    def wait(self) -> Verdict:
        """The verdict, for the records of the run.

        Raises:
            WeftError: the layout does not compute what one device computes; or the proof itself
                failed, and is required.
        """
        text = self._read()
        if not text:
            return self._unknown("the process of the proof ended without a verdict")
        answer = json.loads(text)
        if "failure" in answer:
            return self._unknown(str(answer["failure"]))
        if answer["verdict"] != "equal":
            raise WeftError(_refusal(answer))
        verdict = {
            "verdict": "equal",
            "key": self.key,
            "source": "proved",
            "compared": answer["compared"],
            "steps": answer["steps"],
            "seconds": round(time.perf_counter() - self._start_s, 3),
        }
        write_verdict(self.folder, verdict)
        return verdict

    def _read(self) -> str:
        """All that the child writes; it is ended if this process is interrupted."""
        parts = []
        try:
            while part := os.read(self._reader, 2**16):
                parts.append(part)
            os.waitpid(self.pid, 0)
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        finally:
            os.close(self._reader)
        return b"".join(parts).decode()

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
    key = verdict_key(reduced(run))
    stored = read_verdict(cache_folder(environ), key)
    if stored is not None and mode == "auto":
        return {**stored, "source": "cache", "seconds": 0.0}
    return RunningProof(run, key, environ)


def _prove_in_child(run: Run, writer: int) -> None:
    """Prove and write the report as JSON; the process ends here."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        try:
            answer = prove_config(run, steps=STEPS).to_dict()
        except Exception as error:  # noqa: BLE001 - reported by the parent
            answer = {"failure": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        code = 0
    finally:
        os._exit(code)


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
