"""Which versions of megatron-core are accepted, warned about, refused, and resumed across."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the megatron extra")

from hpctrain.base.errors import InvalidInputError
from hpctrain.train import software
from hpctrain.train.engines.megatron.core_versions import check, supported


def test_older_versions_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.platform, "python_version_tuple", lambda: ("3", "11", "7"))
    remarks, problem = check.check_core("0.15.3")
    assert problem is not None and not remarks
    assert problem.message == (
        "megatron-core 0.15.3 is older than 0.16.1, the oldest supported version: "
        "`pip install megatron-core==0.16.1`"
    )


def test_newest_usable_version_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.platform, "python_version_tuple", lambda: ("3", "12", "1"))
    _, problem = check.check_core("0.12.0")
    assert problem is not None and "megatron-core==0.19.2" in problem.message


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_tested_versions_are_accepted_silently(version: str) -> None:
    assert check.check_core(version) == ((), None)
    assert supported.row_of(version).number == version


@pytest.mark.parametrize(
    ("version", "row"),
    [("0.17.1", "0.16.1"), ("0.19.0", "0.16.1"), ("0.19.3", "0.19.2"), ("0.20.0rc1", "0.19.2")],
)
def test_other_versions_are_used_as_the_one_before_with_a_warning(version: str, row: str) -> None:
    (remark,), problem = check.check_core(version)
    assert problem is None
    assert remark.startswith(f"megatron-core {version} is not tested with hpctrain, ")
    assert f"it is used as {row}" in remark
    assert supported.row_of(version).number == row


def test_missing_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "megatron_core", lambda: None)
    (problem,) = check.library_findings().problems
    assert problem.message.startswith("megatron-core is not installed: `pip install")


@pytest.mark.parametrize(
    ("saved", "now", "exact"),
    [
        ("0.16.1", "0.19.2", True),
        ("0.19.2", "0.16.1", True),
        ("0.21.0", "0.21.0", True),
        ("0.16.1", "0.21.0", False),
        ("0.18.0", "0.19.2", False),
    ],
)
def test_resume_across_versions_is_exact_or_refused(
    saved: str, now: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "megatron_core", lambda: now)
    monkeypatch.setattr(supported, "saving_version", lambda directory: saved)
    if exact:
        remarks = supported.check_versions(tmp_path)
        assert len(remarks) == (saved != now)
        return
    with pytest.raises(InvalidInputError) as refused:
        supported.check_versions(tmp_path)
    assert f"was saved by megatron-core {saved}, and this is {now}" in str(refused.value)
    (problem,) = refused.value.problems
    assert f"resume with megatron-core {saved}" in (problem.hint or "")


def test_checkpoints_without_a_version_are_of_the_oldest(tmp_path: Path) -> None:
    assert supported.saving_version(tmp_path) == "0.16.1"
