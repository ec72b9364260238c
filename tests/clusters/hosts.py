"""Hosts on one machine: network namespaces joined by a bridge, with a limited rate, whose links can be cut. Needs root.

    host i   namespace PREFIXi, eth0 = 10.NET.0.(i+1), names PREFIX0, PREFIX1, ... in /etc/hosts
    bridge   PREFIXbr, 10.NET.0.254: this machine

Usable by hand: python -m tests.clusters.hosts up 2 --rate 1gbit; ... run 0 COMMAND; ... cut 1; ... restore 1; ... down 2
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

NAMES_FOLDER = Path("/run/weft-hosts")
ENTER = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""Shell text that sees a file or folder in another place, and runs a command. `ip netns exec` mounts
/etc/hosts too, but it hides cgroups."""

SET_HOST_NAME = 'hostname "$1" && shift && exec "$@"'


def unavailable() -> str:
    """Why hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc (iproute2)"
    probe = subprocess.run(
        ["ip", "netns", "add", "weftprobe"], capture_output=True, check=False, text=True
    )
    subprocess.run(["ip", "netns", "del", "weftprobe"], capture_output=True, check=False)
    return probe.stderr.strip()


class Hosts:
    """`size` hosts; made on entry of the `with` block, removed on exit.

    Args:
        rate: of every link, as tc reads it: 1gbit; "": not limited.
        delay_ms: of every link, one way; above 0 the hosts are joined by `tests.clusters.switch`, with
            links of 100 Mbit/s, and cannot reach this machine.
        prefix: of the names; at most 8 letters.
        private: a folder of which every host has its own: FOLDER-NAME, seen as FOLDER.
    """

    def __init__(
        self,
        size: int,
        *,
        rate: str = "",
        prefix: str = "weft",
        network: int = 78,
        private: Path | None = None,
        delay_ms: float = 0.0,
    ):
        self.size = size
        self.rate = rate
        self.prefix = prefix
        self.network = network
        self.private = private
        self.delay_ms = delay_ms
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        self.remove()
        try:
            self.make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    @property
    def names(self) -> list[str]:
        """Names of all hosts."""
        return [f"{self.prefix}{index}" for index in range(self.size)]

    @property
    def bridge_address(self) -> str:
        """Address of this machine as the hosts see it."""
        return f"10.{self.network}.0.254"

    def address(self, index: int) -> str:
        """Address of one host."""
        return f"10.{self.network}.0.{index + 1}"

    def make(self) -> None:
        """Make bridge, namespaces and links."""
        if self.delay_ms:
            self._make_delayed()
            return
        bridge = f"{self.prefix}br"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.bridge_address}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(self.names):
            self._make_namespace(index)
            outer = f"{self.prefix}v{index}"
            _run(*f"ip link add {outer} type veth peer name eth0 netns {name}".split())
            _run("ip", "link", "set", outer, "master", bridge, "up")
            self._set_address(index)
            _run("ip", "-n", name, "route", "add", "default", "via", self.bridge_address)
            if self.rate:
                shape = f"tc qdisc add dev eth0 root tbf rate {self.rate} burst 256kb latency 100ms"
                _run("ip", "netns", "exec", name, *shape.split())

    def _make_delayed(self) -> None:
        """Make namespaces, and the switch that joins them."""
        for index in range(self.size):
            self._make_namespace(index)
        switch = Path(__file__).with_name("switch.py")
        words = [sys.executable, str(switch), *self.names]
        self._switch = subprocess.Popen(
            [*words, "--rate", "100", "--delay", str(self.delay_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        if not self._switch.stdout.readline():
            raise RuntimeError("the switch does not start")
        for index in range(self.size):
            self._set_address(index)

    def _make_namespace(self, index: int) -> None:
        name = self.names[index]
        self._write_names(name)
        if self.private is not None:
            self.private.mkdir(exist_ok=True)
            self.private_folder(index).mkdir(exist_ok=True)
        _run("ip", "netns", "add", name)

    def _set_address(self, index: int) -> None:
        name = self.names[index]
        _run("ip", "-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _write_names(self, name: str) -> None:
        NAMES_FOLDER.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost"]
        for index, other in enumerate(self.names):
            lines.append(f"{self.address(index)} {other}")
        lines.append(f"{self.bridge_address} {os.uname().nodename}")
        (NAMES_FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove what `make` has made; processes in the namespaces must have ended."""
        switch, self._switch = self._switch, None
        if switch is not None:
            switch.kill()
            switch.communicate()
        for index, name in enumerate(self.names):
            _try("ip", "link", "del", f"{self.prefix}v{index}")
            _try("ip", "netns", "del", name)
            (NAMES_FOLDER / name).unlink(missing_ok=True)
        _try("ip", "link", "del", f"{self.prefix}br")

    def command(self, index: int, words: Sequence[str]) -> list[str]:
        """A command that runs `words` on host `index`."""
        name = self.names[index]
        in_network = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount"]
        mounts = {str(NAMES_FOLDER / name): "/etc/hosts"}
        if self.private is not None:
            mounts[str(self.private_folder(index))] = str(self.private)
        entered = ["--uts", "sh", "-c", SET_HOST_NAME, "enter", name]
        for source, target in mounts.items():
            entered += ["sh", "-c", ENTER, "enter", source, target]
        return [*in_network, *entered, *words]

    def private_folder(self, index: int) -> Path:
        """What host `index` sees as the private folder."""
        assert self.private is not None
        return self.private.with_name(f"{self.private.name}-{self.names[index]}")

    def start(
        self, index: int, words: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on host `index`, in a session of its own; its output goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(index, words),
                env={**os.environ, **env},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self, index: int) -> None:
        """Cut the link of host `index`: packets are lost, connections stay open."""
        if self._switch is not None:
            self._command_switch(f"cut {index}")
            return
        _run("ip", "link", "set", f"{self.prefix}v{index}", "nomaster")

    def restore(self, index: int) -> None:
        """Join the link of host `index` again."""
        if self._switch is not None:
            self._command_switch(f"restore {index}")
            return
        _run("ip", "link", "set", f"{self.prefix}v{index}", "master", f"{self.prefix}br")

    def _command_switch(self, line: str) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(line + "\n")
        self._switch.stdin.flush()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _try(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=False)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("up", "run", "cut", "restore", "down"))
    parser.add_argument("number", type=int, help="of hosts for up and down, else of the host")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="the command of run")
    parser.add_argument("--rate", default="", help="of every link: 1gbit")
    given = parser.parse_args()
    size = max(1, given.number)
    hosts = Hosts(size, rate=given.rate)
    if given.action == "up":
        hosts.make()
    elif given.action == "down":
        hosts.remove()
    elif given.action == "run":
        hosts = Hosts(given.number + 1)
        return subprocess.run(hosts.command(given.number, given.words), check=False).returncode
    else:
        hosts = Hosts(given.number + 1)
        (hosts.cut if given.action == "cut" else hosts.restore)(given.number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
