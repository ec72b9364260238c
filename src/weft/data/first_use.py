"""The first use of a template or tokenizer of unknown origin: in a child process with limits of time and memory.

What has passed is remembered in the user's folder by its digest, and runs at full speed from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import DataError, Fault
from weft.small_files import MIB, user_folder

FOLDER = "tried"
LIMIT_S = 20
MEMORY_BYTES = 2048 * MIB
BYTES_OF_INPUT = 16
"""Memory that a byte of the input may take, beside the limit."""
CHILD = "from weft.data.first_use import run; run()"
NO_MEMORY = 3
UNUSABLE = 4


def check_first_use(
    function: str, values: Mapping[str, Any], *, content: bytes, key: str, name: str
) -> None:
    """Call a function in a child process, unless it has ended well with this content before.

    Args:
        function: "module:function" of weft; it is called with the values.
        values: of JSON.
        content: of the file.
        key: config key of the file, for messages.
        name: the file.

    Raises:
        DataError: it takes too much time or memory, or ends its process.
    """
    mark = user_folder(os.environ) / FOLDER / hashlib.sha256(content).hexdigest()
    if mark.exists():
        return
    problem = _problem(json.dumps([function, values, len(content)]).encode())
    if problem:
        fix = "name another file; this one may be hostile"
        raise DataError(Fault(key, f"{name} cannot be used: {problem}", fix=fix))
    with contextlib.suppress(OSError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # only what ended well: content that was too slow once is tried again
        mark.touch()


def _problem(request: bytes) -> str:
    """What is wrong with the first use; "" where nothing is."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "1",
    }
    try:
        child = subprocess.run(  # noqa: S603 - this Python, with a module of weft
            [sys.executable, "-c", CHILD],
            input=request,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, **variables},
        )
    except subprocess.TimeoutExpired:
        return f"its first use takes more than {LIMIT_S} s"
    if child.returncode == UNUSABLE:
        return child.stdout.decode(errors="replace")
    if child.returncode == NO_MEMORY or child.returncode < 0:
        return f"its first use takes more than {MEMORY_BYTES // MIB:,} MiB"
    if child.returncode:
        *_, last = ["it ends its process", *child.stderr.decode(errors="replace").split("\n")[:-1]]
        return f"its first use fails: {last}"
    return ""


def run() -> None:
    """Entry point of the child: limits first, then the call."""
    function, values, size = json.load(sys.stdin.buffer)
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    # after the imports: what the interpreter and its libraries have mapped does not count
    limit = MEMORY_BYTES + BYTES_OF_INPUT * size + _mapped_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        call(**values)
    except MemoryError:
        # no clean-up: it might need memory
        os._exit(NO_MEMORY)
    except DataError as error:
        sys.stdout.write(str(error))
        sys.stdout.flush()
        os._exit(UNUSABLE)


def _mapped_bytes() -> int:
    """Address space of this process; 0 where /proc does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0
