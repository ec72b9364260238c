"""A switch in user space between hosts (network namespaces), with a rate and a delay for every link, for kernels without netem.

python tests/clusters/switch.py NAME... --rate 100 --delay 5     makes eth0 in every namespace; reads `cut 1`, `restore 1`
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
MAX_PACKET_BYTES = 65_535
MAX_QUEUE_S = 0.5
"""Packets that would wait longer for their link are dropped, as in a switch."""
DESTINATION = slice(16, 20)
"""Bytes of an IPv4 packet that hold the address of its receiver."""
READY = "ready"


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """This thread in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(other, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")
        yield
    finally:
        libc.setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(other)


def open_device(name: str) -> int:
    """The file of a new device eth0 in a namespace; it is removed when the file is closed."""
    with namespace(name):
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
        return file


@dataclass
class Switch:
    """Passes packets on after the time that their link takes.

    Attributes:
        files: of the devices, by host.
        rate: bits/s of every link.
        delay_s: of every link, one way.
    """

    files: list[int]
    rate: float
    delay_s: float
    cut: set[int] = field(default_factory=set)
    free_at_s: list[float] = field(default_factory=list)
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    num_packets: int = 0

    def __post_init__(self) -> None:
        self.free_at_s = [0.0] * len(self.files)

    def run(self) -> None:
        """Pass packets on until the input ends."""
        with selectors.DefaultSelector() as selector:
            for host, file in enumerate(self.files):
                selector.register(file, selectors.EVENT_READ, host)
            selector.register(sys.stdin, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select(self._wait_s()):
                    if key.data is not None:
                        self._receive(key.data)
                    elif not self._obey(sys.stdin.readline()):
                        return
                self._deliver()

    def _wait_s(self) -> float | None:
        if not self.waiting:
            return None
        first_s = self.waiting[0][0]
        return max(0.0, first_s - time.monotonic())

    def _obey(self, line: str) -> bool:
        """Carry out a command; False at the end of the input."""
        words = line.split()
        if words and words[0] == "cut":
            self.cut.add(int(words[1]))
        elif words and words[0] == "restore":
            self.cut.discard(int(words[1]))
        return bool(line)

    def _receive(self, source: int) -> None:
        """Read the packets of a host."""
        while True:
            try:
                packet = os.read(self.files[source], MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            is_ipv4 = packet[0] >> 4 == 4
            target = packet[DESTINATION][-1] - 1 if is_ipv4 else -1
            if not 0 <= target < len(self.files) or {source, target} & self.cut:
                continue
            now_s = time.monotonic()
            start_s = max(now_s, self.free_at_s[source])
            if start_s - now_s > MAX_QUEUE_S:
                continue
            num_bits = 8 * len(packet)
            self.free_at_s[source] = start_s + num_bits / self.rate
            self.num_packets += 1
            at_s = self.free_at_s[source] + self.delay_s
            heapq.heappush(self.waiting, (at_s, self.num_packets, target, packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self.waiting)
            try:
                os.write(self.files[target], packet)
            except (BlockingIOError, OSError):  # the queue of the device is full, or it is down
                continue


def main() -> None:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s")
    parser.add_argument("--delay", type=float, default=1.0, help="ms, one way")
    given = parser.parse_args()
    files = [open_device(name) for name in given.names]
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    Switch(files, 1e6 * given.rate, 1e-3 * given.delay).run()


if __name__ == "__main__":
    main()
