"""Python programs for tests, started as forks of a server process that has imported torch and weft: 0.1 s instead of 2.5 s each.

A forked program is a process of its own with its own arguments, environment, working directory,
standard streams, process group and exit: only the imports have happened already. The server computes
nothing and has one thread, as `weft train` has when it forks its ranks.

    caller --- program, streams, status pipe ---> server (python -m tests.programs MODULE ...)
           <-- process id, later exit code -----    forks one process a program
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
WEFT = "from tests.programs import end; from weft.cli import main; end(main())"
"""The program of the command `weft`."""
PRELOAD = (
    "weft.cli",
    "weft.start.train_run",
    "weft.run.fork_server",
    "weft.parallel.context.attend",
    "weft.parallel.tensor.transform",
    "weft.generate.main",
    "numpy.ma",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "typeguard",
)
"""What a training run imports."""
INTEGER = struct.Struct("i")
MAX_REQUEST_BYTES = 2**20
POLL_S = 0.01


@dataclass(frozen=True)
class Request:
    """A program: `code` is Python source, or `script` the path of a file, or `module` the name of a
    module to run.
    """

    words: Sequence[str]
    environ: dict[str, str]
    folder: str
    code: str = ""
    script: str = ""
    module: str = ""
    new_session: bool = False


class Program:
    """A running program, like `subprocess.Popen` with text; its output is in files until it has
    ended.
    """

    def __init__(self, pid: int, status: int, out: IO[bytes], err: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._out = out
        self._err = err

    def poll(self) -> int | None:
        """The exit code, or None while the program runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code, negative for a signal.

        Raises:
            TimeoutError: the program still runs.
        """
        code = self._wait(timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; stdout and stderr."""
        self.wait(timeout)
        return self.output(self._out), self.output(self._err)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def output(self, file: IO[bytes]) -> str:
        """What the program has written to a file."""
        file.seek(0)
        return file.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Close the files of the program."""
        os.close(self._status)
        self._out.close()
        self._err.close()

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        ready, _, _ = select.select([self._status], [], [], timeout)
        if ready:
            data = os.read(self._status, INTEGER.size)
            assert data, "the server of programs has ended"
            (self.returncode,) = INTEGER.unpack(data)
        return self.returncode


class ProgramServer:
    """The server process, which ends with this one.

    Args:
        preload: modules that it imports before the first program.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.programs", str(other.fileno()), *preload],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,
            )
        atexit.register(self.close)

    @contextmanager
    def running(
        self,
        code: str = "",
        *words: str,
        script: Path | None = None,
        module: str = "",
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        text: str = "",
        terminal: int | None = None,
    ) -> Iterator[Program]:
        """Start a program in a process group of its own; it is killed if it still runs at the end.

        Args:
            script: a file to run, or
            module: a module to run, instead of `code`.
            environ: its whole environment; None: that of this process.
            folder: its working directory; None: that of this process.
            text: its standard input.
            terminal: its controlling terminal and three standard streams, in a session of its own.
        """
        request = Request(
            words,
            environ=dict(os.environ if environ is None else environ),
            folder=str(folder or Path.cwd()),
            code=code,
            script=str(script or ""),
            module=module,
            new_session=terminal is not None,
        )
        program = self._start(request, text, terminal)
        try:
            yield program
        finally:
            program.kill()
            program.wait()
            program.close()

    def run(
        self, code: str = "", *words: str, timeout: float = 100.0, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; for the options see `running`."""
        with self.running(code, *words, **options) as program:  # type: ignore[arg-type]
            out, err = program.communicate(timeout)
            return subprocess.CompletedProcess(words, program.wait(), out, err)

    def close(self) -> None:
        """End the server."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()

    def _start(self, request: Request, text: str, terminal: int | None) -> Program:
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        status, end_of_server = os.pipe()
        with tempfile.TemporaryFile() as typed:
            typed.write(text.encode())
            typed.seek(0)
            streams = [typed.fileno(), out.fileno(), err.fileno()]
            if terminal is not None:
                streams = [terminal] * 3
            message = json.dumps(asdict(request)).encode()
            socket.send_fds(self._socket, [message], [*streams, end_of_server])
        os.close(end_of_server)
        buffer = self._socket.recv(INTEGER.size)
        (pid,) = INTEGER.unpack(buffer)
        return Program(pid, status, out, err)


@functools.cache
def programs() -> ProgramServer:
    """The server of this process, started at the first call."""
    return ProgramServer()


class Server:
    """The side of the server process.

    Attributes:
        statuses: process id of a running program -> the pipe for its exit code.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.statuses: dict[int, int] = {}
        self.wakeup, self.wakeup_end = os.pipe()
        for descriptor in (self.wakeup, self.wakeup_end):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wakeup_end, warn_on_full_buffer=False)

    def serve(self) -> Request | None:
        """Fork programs until the caller has ended: returns None then, and in a fork its
        program.
        """
        while True:
            waits_for = [self.connection, self.wakeup]
            ready, _, _ = select.select(waits_for, [], [])
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
                self._report_ended()
            if self.connection not in ready:
                continue
            message, descriptors, *_ = socket.recv_fds(self.connection, MAX_REQUEST_BYTES, 4)
            if not message:
                return None
            *streams, status = descriptors
            request = Request(**json.loads(message))
            pid = os.fork()
            if pid == 0:
                os.close(status)
                self._become(request, streams)
                return request
            for descriptor in streams:
                os.close(descriptor)
            if not request.new_session:
                _lead_group(pid)
            self.statuses[pid] = status
            self.connection.send(INTEGER.pack(pid))

    def _report_ended(self) -> None:
        for pid, status in list(self.statuses.items()):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.statuses[pid]
                code = os.waitstatus_to_exitcode(how)
                with suppress(BrokenPipeError):  # the caller has closed it
                    os.write(status, INTEGER.pack(code))
                os.close(status)

    def _become(self, request: Request, streams: Sequence[int]) -> None:
        """In a fork: leave nothing of the server but its imports."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self.wakeup, self.wakeup_end, *self.statuses.values()):
            os.close(descriptor)
        self.connection.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for descriptor in set(streams):
            os.close(descriptor)
        if request.new_session:
            _take_terminal()
        else:
            _lead_group(0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", 1, errors="backslashreplace", closefd=False
        )
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environ)


def _lead_group(pid: int) -> None:
    """Make a process the leader of a group: both sides do, as a shell, whichever comes first."""
    with suppress(ProcessLookupError):
        os.setpgid(pid, pid)


def _take_terminal() -> None:
    """Make stdin the controlling terminal of a new session; its end sends SIGHUP."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def execute(request: Request) -> None:
    """Run a program as Python would run it as `__main__`."""
    sys.argv[:] = ["-c", *request.words]
    path = request.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [request.folder, *path]
    if request.script:
        sys.argv[0] = request.script
        sys.path.insert(0, str(Path(request.script).parent))
        runpy.run_path(request.script, run_name="__main__")
    elif request.module:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    else:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(request.code, "<string>", "exec"), main.__dict__)


def end(code: int) -> NoReturn:
    """End a program as Python does, but for the modules of the server: freeing them copies their
    pages, and takes 0.25 s of CPU time.
    """
    from weft.run.worker import exit_now

    threading._shutdown()
    atexit._run_exitfuncs()
    exit_now(code)


def main() -> None:
    """Entry point of the server and of each program."""
    descriptor, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    request = Server(socket.socket(fileno=int(descriptor))).serve()
    if request is not None:
        execute(request)


if __name__ == "__main__":
    main()
