"""Ports that are reserved for a program which listens on them later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpctrain.base import reserved_ports


def test_a_reserved_port_is_left_to_its_program() -> None:
    with reserved_ports.reserve_any() as first:
        number = reserved_ports.number_of(first)
        assert reserved_ports.reserve("127.0.0.1", [number]) is None
        with socket.create_server(("127.0.0.1", number)):
            assert not reserved_ports.is_free("127.0.0.1", number)
        assert reserved_ports.is_free("127.0.0.1", number)
    with reserved_ports.reserve("127.0.0.1", [number]) or pytest.fail("it was released"):
        pass


def test_a_port_in_use_is_passed_over() -> None:
    with reserved_ports.reserve_any() as reserved:
        taken = reserved_ports.number_of(reserved)
    with socket.create_server(("127.0.0.1", taken)):
        assert reserved_ports.reserve("127.0.0.1", [taken]) is None


def test_no_outgoing_connection_has_such_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    starts = iter([0, reserved_ports.COUNT - 1])
    monkeypatch.setattr(reserved_ports.random, "randrange", lambda _: next(starts))
    for _ in range(2):
        with reserved_ports.reserve_any() as reserved:
            assert reserved_ports.FIRST <= reserved_ports.number_of(reserved) < min(low, 32768)


def test_without_a_free_port_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports.reserve_any() as reserved:
        monkeypatch.setattr(reserved_ports, "FIRST", reserved_ports.number_of(reserved))
        monkeypatch.setattr(reserved_ports, "COUNT", 1)
        with pytest.raises(OSError, match="no free port between"):
            reserved_ports.reserve_any()
