"""What a launch trains with, by name: packages, checkout, image; and what has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_software_agreement import GOOD

from hpctrain.records.software import SoftwareLock, changes
from hpctrain.supervise.srun_launch import image_identity
from hpctrain.train.found_software import checkout_state, found_software, installed_packages


def git(checkout: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    argv = ["git", "-C", str(checkout), *identity, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "Megatron-LM"
    (directory / "megatron/core").mkdir(parents=True)
    (directory / "megatron/core/model.py").write_text("layers = 1\n")
    (directory / "tests").mkdir()
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "first")
    return directory


def test_a_checkout_is_its_commit_and_its_python_files(checkout: Path) -> None:
    clean = checkout_state(checkout)
    assert clean.startswith(git(checkout, "rev-parse", "HEAD")[:12])
    (checkout / "tests/test_model.py").write_text("1\n")
    (checkout / "notes.txt").write_text("1\n")
    assert checkout_state(checkout) == clean, "these do not train"
    git(checkout, "pack-refs", "--all")
    assert checkout_state(checkout) == clean
    (checkout / "megatron/core/model.py").write_text("layers = 2\n")
    changed = checkout_state(checkout)
    assert changed != clean and changed.split()[0] == clean.split()[0]
    git(checkout, "checkout", "-q", "--detach")
    assert checkout_state(checkout) == changed


def test_a_directory_without_git_is_its_files(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".git").rename(tmp_path / "git")
    assert checkout_state(checkout).startswith("files ")


def test_packages_are_named_as_installers_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Foo_Bar-1.2.dist-info", "egg-3.0-py3.11.egg-info", "hpctrain-9.dist-info", "x"):
        (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "late" / "foo_bar-7.dist-info").mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("site", "late", "missing")]
    monkeypatch.setattr(sys, "path", paths)
    assert installed_packages() == {"egg": "3.0", "foo-bar": "1.2"}


def test_everything_has_a_name(checkout: Path) -> None:
    facts = GOOD.model_copy(update={"code": "0123456789ab"})
    found = found_software(facts, 3, str(checkout), {"HPCTRAIN_IMAGE": "train.sif (1a2b)"})
    assert found.epoch == 3 and found.parts["hpctrain"] == "0.1.0 (0123456789ab)"
    assert found.parts["image"] == "train.sif (1a2b)" and found.parts["driver"] == "580.65.06"
    assert found.parts["NCCL"] == "2.28.3" and found.parts["checkout"] == checkout_state(checkout)
    assert "Apex" not in found.parts, "it is not installed"


def test_changes_are_listed_and_counted() -> None:
    old = SoftwareLock(epoch=1, parts={"torch": "2.13.0", "driver": "580"}, packages={"a": "1"})
    new = SoftwareLock(epoch=2, parts={"torch": "2.14.0", "Apex": "1"}, packages={"a": "1"})
    assert changes(old, old) == ()
    assert changes(old, new) == (
        "torch 2.13.0 -> 2.14.0",
        "driver 580 -> none",
        "Apex none -> 1",
    )
    many = new.model_copy(update={"packages": {f"p{n:02}": "1" for n in range(20)}})
    assert changes(new, many)[-1] == "13 more packages", "8 of 20 new ones and one lost are told"


def test_an_image_is_its_size_its_head_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "train.sif"
    image.write_bytes(b"head" + bytes(3 * 2**20) + b"tail")
    monkeypatch.setenv("IMAGES", str(tmp_path))
    found = image_identity("$IMAGES/train.sif")
    assert found == image_identity(str(image)) and found.startswith("train.sif (")
    image.write_bytes(b"head" + bytes(3 * 2**20) + b"tai1")
    assert image_identity(str(image)) != found
    reference = "docker://nvcr.io/nvidia/pytorch:25.01-py3"
    assert image_identity(reference) == reference and image_identity(str(tmp_path)) == str(tmp_path)
