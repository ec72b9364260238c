"""A URL as run folder: its local folder, the check that it can be read and holds no other run, the download before a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.remote import RemoteFolder
from weft.checkpoint.remote_url import is_url, local_folder
from weft.checkpoint.resume import AUTO, resume_faults
from weft.code.identity import CodeIdentity
from weft.config.schema import ModelSection
from weft.errors import UserError
from weft.start.environment import LOCAL_RANK_VARIABLES, is_first


def local_keys(out: str | None, remote: str | None) -> dict[str, str]:
    """The keys of a run whose `out` is a URL: a local folder, whose checkpoints are copied there."""
    if not out or not is_url(out) or remote is not None:
        return {}
    folder = local_folder(out)
    return {"out": str(folder), "save.remote": out}


def has_copy(remote: str | None) -> bool:
    """Whether there is a complete checkpoint at the URL of a run.

    Raises:
        CheckpointError: it cannot be read.
    """
    return remote is not None and RemoteFolder.open(remote).newest() is not None


def fetch(
    remote: str | None,
    out: str,
    resume: str | None,
    *,
    model: ModelSection,
    config: Mapping[str, Any],
    code: CodeIdentity,
) -> None:
    """Download the newest checkpoint at the URL of a run that resumes, where it is missing; one
    process of a machine does.

    Args:
        config: all keys of the run, as JSON.
        code: of users, with what it has read so far.

    Raises:
        UserError: it cannot be downloaded, or is of another run.
    """
    is_fetching = is_first(os.environ, LOCAL_RANK_VARIABLES)
    if remote is None or resume != AUTO or not is_fetching:
        return
    RemoteFolder.open(remote).fetch(Path(out))
    faults = tuple(resume_faults(model, config, resume=resume, out=out, code=code))
    if faults:
        raise UserError(*faults)
