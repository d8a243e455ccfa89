"""Stripes of checkpoints on Lustre, with a program in place of lfs, which cannot be had here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpctrain.base.errors import UsageError
from hpctrain.job.run_directory import stripe
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import FilesystemProfile

SPEED = {"read_bandwidth": "1GB/s", "write_bandwidth": "1GB/s"}


def site(path: Path, **stripes: Any) -> ClusterProfile:
    home = {"name": "home", "path": "/", "kind": "nfs", **SPEED}
    scratch = {"name": "scratch", "path": str(path), "kind": "lustre", **SPEED, **stripes}
    document = load_profile(find_profile("a100x64")).document.model_dump(mode="json", by_alias=True)
    return ClusterProfile.model_validate({**document, "filesystems": [home, scratch]})


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes its words, one each line."""
    program, calls = tmp_path / "bin" / "lfs", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def test_a_directory_on_the_file_system_gets_its_stripes(tmp_path: Path, calls: Path) -> None:
    directory = tmp_path / "runs" / "a b"
    stripe(directory, site(tmp_path / "runs", stripe_count=-1, stripe_size="4MiB"))
    assert calls.read_text().split("\n")[:-1] == [
        "setstripe", "-c", "-1", "-S", "4194304", str(directory)
    ]  # fmt: skip


@pytest.mark.parametrize("stripes, inside", [({}, True), ({"stripe_count": 8}, False)])
def test_nothing_is_set_unasked_or_elsewhere(
    stripes: dict[str, int], inside: bool, tmp_path: Path, calls: Path
) -> None:
    stripe(tmp_path / ("runs" if inside else "others"), site(tmp_path / "runs", **stripes))
    assert not calls.exists()


def test_what_lfs_says_is_told(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "bin" / "lfs").write_text("#!/bin/sh\necho 'error: not a Lustre' >&2\nexit 95\n")
    with pytest.raises(UsageError, match="error: not a Lustre"):
        stripe(tmp_path / "runs", site(tmp_path, stripe_count=4))
    (tmp_path / "bin" / "lfs").unlink()
    with pytest.raises(UsageError, match="lfs"):
        stripe(tmp_path / "runs", site(tmp_path, stripe_count=4))


@pytest.mark.parametrize(
    "kind, fields, reason",
    [
        ("gpfs", {"stripe_count": 4}, "kind lustre, not gpfs"),
        ("lustre", {"stripe_size": "4MiB"}, "needs `stripe_count`"),
        ("lustre", {"stripe_count": 0}, "number of servers"),
        ("lustre", {"stripe_count": 4, "stripe_size": "100kB"}, "no multiple of 64KiB"),
    ],
)
def test_stripes_that_lfs_would_refuse(kind: str, fields: dict[str, Any], reason: str) -> None:
    document = {"name": "a", "path": "/a", "kind": kind, **SPEED, **fields}
    with pytest.raises(ValidationError, match=reason):
        FilesystemProfile.model_validate(document)
