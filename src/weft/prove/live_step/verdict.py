"""The line and the event of a verdict about a live step: what was compared, and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import counted
from weft.prove.live_step.judgement import Judgement
from weft.train.training import Event


def verdict_of(
    judgement: Judgement,
    *,
    number: int,
    num_sequences: int,
    has_initial_values: bool,
    seconds: float,
) -> dict[str, Any]:
    """The fields of a verdict about a step that is equal, before its update."""
    return {
        "verdict": "equal",
        "step": number,
        "sequences": num_sequences,
        "tokens": judgement.plain.targets,
        "gradients": len(judgement.gradients) - len(judgement.unseen),
        "all_gradients": len(judgement.gradients),
        "projected_gradients": len(judgement.projected),
        "outputs": len(judgement.outputs),
        "closest": round(judgement.closest, 4),
        "initial_values": has_initial_values,
        "notes": list(judgement.notes),
        "updates": 0,
        "seconds": round(seconds, 3),
    }


def verdict_text(verdict: Mapping[str, Any], before: Mapping[str, Any], *, is_first: bool) -> str:
    """The line of a verdict: what was compared, and what was not."""
    step = "this run's first step" if is_first else f"step {verdict['step']}"
    num = verdict["sequences"]
    num_gradients, total = verdict["gradients"], verdict["all_gradients"]
    share = f"all {total}" if num_gradients == total else f"{num_gradients} of {total}"
    if verdict["projected_gradients"]:
        share = f"{share} gradients, {verdict['projected_gradients']} of them as wholes"
    else:
        share = f"{share} gradients"
    updates = verdict["updates"]
    if updates:
        share += (
            f", all {updates} updates" if updates == total else f", {updates} of {total} updates"
        )
    covered = [f"{num} of {counted(num, 'sequence')}", f"{verdict['tokens']:,} tokens", share]
    text = f"proved equal: {step} ({', '.join(covered)}; {verdict['seconds']:.1f} s)"
    if is_first and before.get("verdict") == "equal":
        text = f"{text}, and {before['compared']:,} tensors at reduced size"
    elif is_first and before:
        text = f"{text}; not proved at reduced size: {before.get('reason', '')}"
    if is_first and before.get("verdict") != "equal":
        text = f"{text}; not compared: {'saves' if updates == total else 'updates, saves'}"
    for note in verdict["notes"]:
        text = f"{text}; {note}"
    return text


def not_compared(number: int, reason: str) -> Event:
    """The event of a step that was due and could not be compared."""
    text = f"step {number} was not compared with one device: {reason}"
    return {"event": "proof", "verdict": "unknown", "step": number, "reason": reason, "text": text}


def different(number: int, reason: str) -> Event:
    """The record of a wrong step; without a text, since the error that ends the run is shown."""
    return {"event": "proof", "verdict": "different", "step": number, "reason": reason, "text": ""}
