"""MASTER_ADDR and MASTER_PORT in the form that a site wants."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.spec.loader import load_profile
from hpctrain.supervise.srun_launch import master_address
from hpctrain.supervise.srun_process import reserve_port


class Named(FakeSlurm):
    def node_address(self, node: str) -> str:
        self._present()
        return f"{node}-slurm"


@pytest.mark.parametrize(
    ("form", "expected"),
    [(None, "n1-slurm"), ("{node}i", "n1i"), ("{node}.ib.site", "n1.ib.site"), ("ip", "10.0.0.7")],
)
def test_the_form_that_the_site_wants(
    form: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[object]:
        assert host == "n1-slurm"
        return [(2, 1, 6, "", (ip, 0)) for ip in ("127.0.1.1", "10.0.0.7")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert master_address(Named(), "n1", form) == expected  # type: ignore[arg-type]


def test_without_an_answer_it_is_the_name_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    slurm = Named()
    slurm.away = True
    for form in (None, "ip"):
        assert master_address(slurm, "n1", form) == "n1"  # type: ignore[arg-type]


def test_the_port_is_one_that_the_site_allows(tmp_path: Path) -> None:
    with reserve_port(f"run {tmp_path}", 1) as usual:
        taken = usual.getsockname()[1]
        with pytest.raises(OSError, match=f"between {taken} and {taken}"):
            reserve_port("run", 1, (taken, taken))
        with reserve_port("run", 1, (taken, taken + 50)) as another:
            assert taken < another.getsockname()[1] <= taken + 50


@pytest.mark.parametrize(
    "network", ["ports: 80-90", "ports: 21000-20000", "ports: x", "master_address: '{node};id'"]
)
def test_what_is_no_form(tmp_path: Path, network: str) -> None:
    (tmp_path / "own.yaml").write_text(f"extends: sandbox\nname: own\nnetwork: {{{network}}}\n")
    with pytest.raises(InvalidInputError, match="expected") as caught:
        load_profile(tmp_path / "own.yaml")
    assert caught.value.problems[0].line == 3
