"""Addresses on which a rank listens: loopback within one machine, else the interface that routes to the master.

    ranks of one machine     127.0.0.1
    several machines         the address from which this machine reaches the master; the master listens on all
                             interfaces only where its own name resolves to loopback
    GLOO_SOCKET_IFNAME       these interfaces for the data of gloo, whatever else holds

What torch opens by itself is not chosen here: the store of torchrun's agent (rendezvous backends c10d
and static) listens on all interfaces.
"""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)
"""An address that is never assigned (RFC 5737): the way to it is the default route."""


def is_loopback_name(host: str) -> bool:
    """Whether `host` means this machine wherever it is resolved: `localhost`, 127.0.0.1, ::1.

    The name of a machine may resolve to loopback on that machine too (127.0.1.1 on Debian), but not
    on others.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def address_toward(host: str, port: int) -> str | None:
    """The address from which this machine reaches `host`; None if no route is known.

    Nothing is sent: connecting a datagram socket only selects the route.
    """
    if is_loopback_name(host):
        return LOOPBACK
    targets = _targets_of(host, port)
    if not targets:
        return None
    return _address_of_interface(targets) or _source_address(socket.AF_INET, DOCUMENTATION_ADDRESS)


def listen_address(host: str, port: int) -> str | None:
    """The address on which the master, named `host`, listens; None: all interfaces.

    Where the name of the master resolves to loopback on the master itself, ranks of this machine
    use loopback and others an interface, so that no single address serves all.
    """
    if is_loopback_name(host):
        return LOOPBACK
    return _address_of_interface(_targets_of(host, port))


Target = tuple[int, tuple[object, ...]]
"""Family and address that a name resolves to."""


def _targets_of(host: str, port: int) -> tuple[Target, ...]:
    """What a name resolves to; nothing where it does not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ()
    return tuple((family, address) for family, _, _, _, address in found)


def _address_of_interface(targets: tuple[Target, ...]) -> str | None:
    """The address, no loopback, from which this machine reaches the first of these that it can."""
    for family, target in targets:
        address = _source_address(family, target)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    return None


def _source_address(family: int, target: tuple[object, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return address.partition("%")[0]


def listen_anywhere(port: int) -> socket.socket:
    """A listening socket on all interfaces.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return listen("::", port)
    return listen("0.0.0.0", port)  # noqa: S104 - ranks of other hosts join; their nonce is checked


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on one address; for IPv6 too.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
