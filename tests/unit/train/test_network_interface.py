"""Which interface of a node a profile means, and what ranks tell gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.train.network_interface import (
    matching_interface,
    set_gloo_interface,
    usable_interfaces,
)

HAVE = {"eno1": "10.0.0.5", "hsn1": "10.1.0.6", "hsn0": "10.1.0.5", "ib10": "10.2.0.6",
        "ib2": "10.2.0.5"}  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ib2", "ib2"),
        ("ib1", "ib10"),
        ("ib", "ib2"),
        ("hsn", "hsn0"),
        ("=ib10", "ib10"),
        ("=ib", None),
        ("eth0,eno1", "eno1"),
        ("ib,eno1", "eno1"),  # a whole name before a beginning
        ("bond,hsn", "hsn0"),
        ("ib3", None),
    ],
)
def test_the_interface_that_is_meant(wanted: str, found: str | None) -> None:
    assert matching_interface(wanted, HAVE) == found


@pytest.mark.parametrize(
    ("given", "gloo", "address"),
    [
        ({"HPCTRAIN_INTERFACE": "hsn"}, "hsn0", "10.1.0.5"),
        ({"GLOO_SOCKET_IFNAME": "ib"}, "ib2", "10.2.0.5"),
        ({"GLOO_SOCKET_IFNAME": "hsn0,hsn1"}, "hsn0,hsn1", "10.1.0.5"),
        ({"GLOO_SOCKET_IFNAME": "eno1", "HPCTRAIN_INTERFACE": "ib"}, "eno1", "10.0.0.5"),
        ({}, None, None),
    ],
)
def test_what_gloo_is_told(given: dict[str, str], gloo: str | None, address: str | None) -> None:
    assert set_gloo_interface(given, "n1", HAVE) == address
    assert given.get("GLOO_SOCKET_IFNAME") == gloo


def test_a_node_without_it_says_what_it_has() -> None:
    with pytest.raises(InvalidInputError) as caught:
        set_gloo_interface({"HPCTRAIN_INTERFACE": "bond0"}, "n1", {"eno1": "10.0.0.5"})
    (problem,) = caught.value.problems
    assert problem.node_dependent
    assert str(problem) == (
        "`network.interface` of the profile is bond0, and no interface of n1 with an address has "
        "such a name: it has eno1"
    )


def test_only_interfaces_that_are_up_and_have_an_address(tmp_path: Path) -> None:
    """lo of this machine has one; the other names of the directory have none."""
    for name, flags in (("lo", "0x9"), ("ib0", "0x1003")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags}\n")
    assert usable_interfaces(tmp_path) == {"lo": "127.0.0.1"}
    (tmp_path / "lo/flags").write_text("0x8\n")
    assert usable_interfaces(tmp_path) == {}
    assert "lo" in usable_interfaces()
