"""Runs `weft` commands in forked children of a process without torch, and reports exit code, output, CPU time and files opened.

python -m tests.input.server   reads a JSON request a line (words, folder, env), writes a JSON report a line
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.data.first_use import CHILD

MEMORY_BYTES = 3 * 2**30
"""Address space of a child: a bomb ends in MemoryError, not in a machine without memory."""
CPU_S = 20
OPEN_EVENTS = ("open",)
FORBIDDEN_EVENTS = (
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.system",
    "pickle.find_class",
    "socket.connect",
)


def serve() -> None:
    """Answer requests until the input ends."""
    import email.parser  # noqa: F401 - what tyro and the readers of records import late

    import typeguard  # noqa: F401

    import weft.cli
    import weft.commands.data
    import weft.commands.export
    import weft.commands.generate
    import weft.commands.import_  # noqa: F401 - imported once, for all children
    from weft.config.schema import DataConfig
    from weft.data.token_sources import open_source

    open_source("stdlib", DataConfig(), vocab=256)  # read once, for all children
    assert "torch" not in sys.modules
    used = resource.getrusage(resource.RUSAGE_SELF)
    _answer({"start_s": used.ru_utime + used.ru_stime})
    for line in sys.stdin:
        request = json.loads(line)
        _answer(_run(request["words"], request["folder"], request["env"]))


def _answer(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def _run(words: list[str], folder: str, env: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        files = {name: Path(place) / name for name in ("out", "err", "report")}
        child = os.fork()
        if child == 0:
            os.environ.update(env)
            _child(words, folder, files)
        _, status, used = os.wait4(child, 0)
        report_text = files["report"].read_text() or "{}"
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": files["out"].read_text(errors="replace"),
            "err": files["err"].read_text(errors="replace"),
            "cpu_s": used.ru_utime + used.ru_stime,
            "rss_bytes": used.ru_maxrss * 1024,
            "opened": [],
            "forbidden": [],
            "torch": False,
            **json.loads(report_text),
        }


def is_first_use(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event is the start of the child that tries a template or tokenizer."""
    return event == "subprocess.Popen" and CHILD in arguments[1]


def _child(words: list[str], folder: str, files: dict[str, Path]) -> None:
    """Run one command and leave the process."""
    report_file = os.open(files["report"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.chdir(folder)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(files[name], os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    sys.stdin = open(os.devnull)  # noqa: SIM115 - until the process ends
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
    opened: list[str] = []
    forbidden: list[str] = []

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPEN_EVENTS and isinstance(arguments[0], (str, bytes)):
            path = os.fsdecode(arguments[0])
            opened.append(os.path.join(os.getcwd(), path))
        elif event in FORBIDDEN_EVENTS and not is_first_use(event, arguments):
            forbidden.append(event)

    sys.addaudithook(record)
    code = 1
    try:
        from weft.cli import main

        code = main(words)
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        else:
            code = 1
    except BaseException:  # noqa: BLE001 - the report is the traceback
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    report = {"opened": opened, "forbidden": forbidden, "torch": "torch" in sys.modules}
    os.write(report_file, json.dumps(report).encode("utf-8", "replace"))
    os._exit(code)


if __name__ == "__main__":
    serve()
