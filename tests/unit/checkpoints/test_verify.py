"""Reading all checkpoints on demand: each bad byte is found, nothing is touched."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hpctrain.checkpoints import discover
from hpctrain.checkpoints.discover import Verified, verify_all
from hpctrain.records.manifest import MANIFEST_NAME


@pytest.mark.parametrize("workers", [1, 4])
def test_every_problem_is_found_and_nothing_moves(shelf: Any, workers: int) -> None:
    shelf.save(2, 4, 6, 8, 10)
    flipped = shelf.root / "iter_0000004" / "__1_0.distcp"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    shorter = shelf.root / "iter_0000006" / "__0_0.distcp"
    shorter.write_bytes(shorter.read_bytes()[:-1])
    (shelf.root / "iter_0000008" / MANIFEST_NAME).unlink()
    (shelf.root / "iter_0000010" / "__0_0.distcp").unlink()
    before = {path: path.stat().st_mtime_ns for path in shelf.root.rglob("*")}
    found = verify_all(shelf.root, workers=workers)
    assert [(one.step, one.good) for one in found] == [
        (10, False),
        (8, False),
        (6, False),
        (4, False),
        (2, True),
    ]
    problems = {one.step: one.problem or "" for one in found}
    assert "__0_0.distcp cannot be read" in problems[10]
    assert "did not finish" in problems[8]
    assert "1499 bytes instead of 1500" in problems[6]
    assert "__1_0.distcp has other content" in problems[4]
    assert {path: path.stat().st_mtime_ns for path in shelf.root.rglob("*")} == before


def test_progress_is_told_by_one_thread_at_a_time(shelf: Any) -> None:
    shelf.save(2, 4, 6)
    told: list[Verified] = []
    inside = threading.Lock()

    def progress(verified: Verified) -> None:
        assert inside.acquire(blocking=False), "two at once"
        told.append(verified)
        time.sleep(0.01)  # lets the other threads come here, if they may
        inside.release()

    assert all(one.good and one.deep for one in verify_all(shelf.root, "sha256", 4, progress))
    assert [one.files for one in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1].read_bytes == told[-1].total_bytes == 6 * 1500
    assert {one.step for one in told} == {2, 4, 6}


def test_levels(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves out the content of large checkpoints, `size` that of all."""
    shelf.save(2)
    flipped = shelf.root / "iter_0000002" / "__1_0.distcp"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    assert verify_all(shelf.root, "size")[0].good
    assert not verify_all(shelf.root, "auto")[0].good
    monkeypatch.setattr(discover, "AUTO_DEEP_LIMIT_BYTES", 100)
    assert verify_all(shelf.root, "auto")[0].good
    assert not verify_all(shelf.root, "sha256")[0].good
    assert verify_all(shelf.root / "absent") == []
