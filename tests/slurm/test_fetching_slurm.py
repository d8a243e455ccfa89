"""Fetching a Slurm with the real apt: what it does without a network, and the second time."""

from __future__ import annotations

from pathlib import Path

import pytest
from newer_slurm import CACHE, NEWER, fetched

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.sandbox.debian import fetch_slurm, is_complete

pytestmark = pytest.mark.nightly("apt fetches a release of Slurm")


def without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """apt asks a proxy that nobody has started (apt-transport-http(1))."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_without_a_network_nothing_is_left_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_network(monkeypatch)
    with pytest.raises(SlurmUnreachableError, match="cannot be reached") as caught:
        fetch_slurm(NEWER[0], tmp_path)
    assert "network" in (caught.value.hint or "")
    assert not is_complete(tmp_path / NEWER[0])


def test_what_was_fetched_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetched(NEWER[0])
    before = (directory / "complete").stat().st_mtime
    without_a_network(monkeypatch)
    assert fetch_slurm(NEWER[0], CACHE) == directory
    assert (directory / "complete").stat().st_mtime == before
