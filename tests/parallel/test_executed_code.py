"""Code that rank threads trace at the same time."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import threading

from weft.parallel.model.executed_code import ExecutedCode

faults = []


def on_event(name, args):
    for _ in range(20):
        pass


def trace():
    for _ in range(5_000):
        try:
            with ExecutedCode(frozenset()):
                pass
        except RuntimeError as error:
            faults.append(error)


sys.addaudithook(on_event)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=trace) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(faults))
"""


def test_threads_trace_beside_an_audit_hook() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "0\n"
