"""Addresses on which ranks listen: loopback, or the interface that routes to the master; never all interfaces."""

from __future__ import annotations

import socket

import pytest

from weft.comm import interfaces
from weft.comm.interfaces import address_toward, is_loopback_name, listen, listen_address


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.4.5", "::1", "x.localhost"])
def test_names_of_this_machine_everywhere_are_loopback(host):
    assert is_loopback_name(host)
    assert address_toward(host, 1) == "127.0.0.1"


@pytest.mark.parametrize("host", ["10.0.0.1", "node07", "localhost.example", "2001:db8::1"])
def test_other_names_are_not_loopback_whatever_they_resolve_to(host):
    assert not is_loopback_name(host)


def test_a_host_name_that_resolves_to_loopback_gets_the_default_route(monkeypatch):
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    def source(family: int, target: tuple[str, int]) -> str:
        return "198.51.100.7" if target == interfaces.DOCUMENTATION_ADDRESS else "127.0.0.1"

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interfaces, "_source_address", source)
    assert address_toward("node07", 29500) == "198.51.100.7"
    assert listen_address("node07", 29500) is None, "ranks of this machine use loopback"


def test_a_name_that_does_not_resolve_has_no_address(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert address_toward("node07", 29500) is None


def test_of_two_listeners_on_a_port_the_second_is_refused():
    with listen("127.0.0.1", 0) as first:
        address, port = first.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)
