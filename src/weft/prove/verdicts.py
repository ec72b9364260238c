"""Verdicts of proofs that this machine has made before: one small file each in the user's cache folder. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import weft
from weft.layout.plan import Plan
from weft.small_files import UnreadableFile, read_json_object, user_folder

MAX_BYTES = 2**16
FOLDER = "proofs"
IRRELEVANT = {
    "out", "resume", "seed", "device", "transport", "nproc", "port", "sample", "sample_every", "data", "save",
    "run", "guard", "eval", "prove", "track", "report", "log", "alert",
}  # fmt: skip
"""Sections and keys that do not change what is computed, or are not compared."""


@cache
def weft_digest() -> str:
    """SHA-256 of the sources of this weft."""
    package = Path(weft.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def verdict_key(config: Mapping[str, Any], plan: Plan, *, code: str, rows: str) -> str:
    """Hash of all that a proof of this run depends on: code, versions, layout, options, sizes, rows.

    Args:
        config: of a run with reduced sizes, as JSON.
        plan: of the same run.
        code: digest of the users' code: `CodeIdentity.digest`.
        rows: hash of the data that is compared: `weft.prove.rows.rows_digest`.
    """
    options = {key: value for key, value in config.items() if key not in IRRELEVANT}
    facts = {
        "weft": weft_digest(),
        "code": code,
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "plan": plan.to_json(),
        "options": options,
        "packing": config["data"]["packing"],
        "rows": rows,
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where verdicts are kept."""
    return user_folder(environ) / FOLDER


def read_verdict(folder: Path, key: str) -> dict[str, Any] | None:
    """The stored verdict, which is "equal"; None where there is none that can be read."""
    try:
        stored = read_json_object(folder / f"{key}.json", max_bytes=MAX_BYTES)
    except (UnreadableFile, ValueError):
        return None
    is_right = stored.get("key") == key and stored.get("verdict") == "equal"
    return stored if is_right else None


def write_verdict(folder: Path, verdict: Mapping[str, Any]) -> None:
    """Keep a verdict; a folder that cannot be written keeps none."""
    path = folder / f"{verdict['key']}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(verdict), encoding="utf-8")
        temporary.replace(path)
