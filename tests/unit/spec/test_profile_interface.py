"""`network.interface` and the variables of `environment` that name an interface, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.loader import find_profile, load_profile

TEXT = Path(find_profile("a100x64")).read_text()
LINE = "  - name: NCCL_SOCKET_IFNAME\n    value: eth0\n"


def with_value(tmp_path: Path, value: str) -> Path:
    assert LINE in TEXT
    file = tmp_path / "site.yaml"
    file.write_text(TEXT.replace(LINE, LINE.replace("eth0", f'"{value}"')))
    return file


@pytest.mark.parametrize("value", ["eth0", "eth", "=eth0", "eth1,eth0", "^docker0"])
def test_agreement(tmp_path: Path, value: str) -> None:
    profile = load_profile(with_value(tmp_path, value)).document
    assert profile.network.interface == "eth0" and profile.environment[0].value == value


@pytest.mark.parametrize("value", ["ib0", "eth01", "=ib0,ib1", ""])
def test_contradiction(tmp_path: Path, value: str) -> None:
    file = with_value(tmp_path, value)
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file)
    (problem,) = caught.value.problems
    line = file.read_text().splitlines().index(f'    value: "{value}"') + 1
    assert str(problem).startswith(f"{file}:{line}:12: `environment[0].value`: NCCL_SOCKET_IFNAME")
    assert "but network.interface is eth0" in problem.message
    assert problem.hint == "remove one of the two; `interface` alone sets NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize("field", ["eth", "=eth0", "ib0,eth0", "ib,eth"])
def test_the_field_may_be_a_beginning_or_a_list(tmp_path: Path, field: str) -> None:
    file = with_value(tmp_path, "eth0,eth1")
    file.write_text(file.read_text().replace("  interface: eth0", f'  interface: "{field}"'))
    assert load_profile(file).document.network.interface == field


def test_what_nccl_leaves_out_is_no_interface(tmp_path: Path) -> None:
    file = with_value(tmp_path, "eth0")
    file.write_text(file.read_text().replace("  interface: eth0", '  interface: "^docker0"'))
    with pytest.raises(InvalidInputError, match=r"network\.interface`: expected the name of an"):
        load_profile(file)


def test_without_the_field_any_value_is_taken(tmp_path: Path) -> None:
    file = with_value(tmp_path, "ib0")
    text = file.read_text()
    field = next(line for line in text.splitlines() if line.startswith("  interface: "))
    file.write_text(text.replace(f"{field}\n", ""))
    assert load_profile(file).document.network.interface is None
