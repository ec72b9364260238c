"""Runs weft's commands, each in a forked child, for requests on stdin; answers with exit codes on stdout."""

from __future__ import annotations

import importlib
import json
import os
import sys

PRELOADED = (
    "torch",
    "torch._dynamo",
    "numpy.ma",
    "torch.fx.experimental.symbolic_shapes",
    "weft.cli",
    "weft.commands.train",
    "weft.commands.prove",
    "weft.generate.main",
    "weft.parallel.context.attend",
    "weft.parallel.tensor.transform",
    "transformers.models.llama.modeling_llama",
)


def run_command(request: dict[str, object]) -> None:
    """In a child: run the command with its output in files; does not return."""
    os.chdir(str(request["folder"]))
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    output = request["output"]
    stdout = log if output is None else os.open(str(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stdout, 1)
    os.dup2(log, 2)
    from weft.cli import main

    code = 1
    try:
        code = main(list(request["words"]))  # type: ignore[call-overload]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Answer requests until stdin ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_command(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
