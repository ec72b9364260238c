"""Proof of a run before its first step: in a process beside the starting ranks, unless this machine has the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from weft.config.run import Run, plan_of
from weft.config.small_runs import reduced
from weft.errors import WeftError
from weft.models.code_of_run import code_of_run
from weft.prove.report import ProofReport
from weft.prove.rows import rows_digest
from weft.prove.small_sizes import accepts_sizes
from weft.prove.verdicts import cache_folder, read_verdict, verdict_key, write_verdict
from weft.run.forked_answer import FAILURE, ForkedAnswer, RunningAnswer, StartAnswer
from weft.start.prove_run import prove_config
from weft.start.proved_runs import is_proved

STEPS = 3

Verdict = dict[str, Any]


class RunningProof:
    """A proof in a forked process, while the ranks start.

    Note [Proof beside the start of ranks]
        The process of the proof is forked before the ranks are, by a process that has computed
        nothing. Each rank waits for its answer before it opens the run folder (see Note [Answer of a
        forked process]). So all of them start or none does, and a run that does not start leaves no
        file.

    Args:
        answer: of a function that makes the verdict.
        is_required: whether a run without a verdict is rejected.
    """

    def __init__(self, answer: RunningAnswer, *, is_required: bool) -> None:
        self.is_required = is_required
        self._answer = answer

    def wait(self) -> Verdict:
        """The verdict, for the records of the run; in this process, or in one that it has forked.

        Raises:
            WeftError: the layout does not compute what one device computes; or the proof itself
                failed, and is required.
        """
        answer = self._answer.wait()
        if FAILURE in answer:
            return self._unknown(str(answer[FAILURE]))
        if answer["verdict"] != "equal":
            raise WeftError(str(answer["refusal"]))
        return dict(answer)

    def end(self) -> None:
        """End the process, if it still runs; called by the process that started it."""
        self._answer.end()

    def _unknown(self, reason: str) -> Verdict:
        """The verdict of a proof that could not be made.

        Raises:
            WeftError: a verdict is required.
        """
        if self.is_required:
            raise WeftError(f"prove.before is always, and the proof could not be made: {reason}")
        return {"verdict": "unknown", "reason": reason}


def start_proof(
    run: Run, environ: Mapping[str, str], start_answer: StartAnswer = ForkedAnswer
) -> RunningProof | Verdict | None:
    """Start the proof of a run; its verdict where this machine has it; None where nothing is proved:
    `prove.before` says so, or the run has one rank and compiles nothing.

    Args:
        start_answer: starts what computes the verdict.
    """
    if not is_proved(run, environ):
        return None
    mode = run.prove.before
    small = reduced(run, accepts_sizes)
    code = code_of_run(run.model.name, run.optim.name)
    folder = cache_folder(environ)
    is_required = run.prove.before == "always"
    proof = partial(_proved, partial(prove_config, run, steps=STEPS))
    if code.digest is None:  # other code might have the same key
        unhashed = partial(_unhashed, proof, code.unknown[0])
        return RunningProof(start_answer(unhashed), is_required=is_required)
    key = verdict_key(
        small.model_dump(mode="json"),
        plan_of(small),
        code=code.digest,
        rows=rows_digest(small.data, small.model),
    )
    stored = read_verdict(folder, key)
    if stored is not None and mode == "auto":
        return {**stored, "source": "cache", "seconds": 0.0}
    kept = partial(_kept, proof, key, folder)
    return RunningProof(start_answer(kept), is_required=is_required)


def _unhashed(proof: Callable[[], Verdict], reason: str) -> Verdict:
    """The verdict of a proof that is made at each start, with the reason."""
    return {**proof(), "unhashed": reason}


def _kept(proof: Callable[[], Verdict], key: str, folder: Path) -> Verdict:
    """The verdict of a proof that is made now, kept where it is "equal"."""
    verdict = {**proof(), "key": key}
    if verdict["verdict"] == "equal":
        write_verdict(folder, verdict)
    return verdict


def _proved(proof: Callable[[], ProofReport]) -> Verdict:
    """The verdict of a proof that is made now; with the reason of a refusal where it fails."""
    start_s = time.perf_counter()
    answer = proof().to_dict()
    if answer["verdict"] != "equal":
        return {"verdict": answer["verdict"], "refusal": _refusal(answer)}
    return {
        "verdict": "equal",
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
