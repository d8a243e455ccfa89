"""Which sample comes next when data is left out, and copies of data on a node's own disk."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from test_train_preflight import job

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.data_identity import DataIdentity, identify_file, write_identity
from hpctrain.records.datasets import bin_path, idx_path, sidecar_path
from hpctrain.records.run_records import SkipList, SkippedData
from hpctrain.train import node_copies
from hpctrain.train.datasets.skipped_samples import Skips, parse_skips, read_skips
from hpctrain.train.job import Job
from hpctrain.train.startup import staged_copies

# -- Which sample comes next when data is left out -----------------------------------------------


def _skips(*ranges: tuple[int, int]) -> Skips:
    listed = [
        SkippedData(from_samples=first, to_samples=end, reason="", time=0.0)
        for first, end in ranges
    ]
    return parse_skips(SkipList(skips=tuple(listed)).model_dump_json(), Path("skips.json"))


@pytest.mark.parametrize(
    ("consumed", "expected"),
    [(0, 0), (15, 15), (16, 32), (31, 32), (32, 32), (40, 64), (48, 64), (63, 64), (64, 64)],
)
def test_next_sample(consumed: int, expected: int) -> None:
    """Two ranges that overlap are left out as one, in whatever order they were written."""
    assert _skips((48, 64), (16, 32), (40, 56)).next_sample(consumed) == expected


def test_the_last_checkpoint_before_each_range_is_pinned() -> None:
    steps = {1: 8, 2: 16, 3: 40, 4: 48}
    assert _skips((16, 32)).pinned(steps) == {2}
    assert _skips((16, 32), (47, 56)).pinned(steps) == {2, 3}
    assert _skips((7, 32)).pinned(steps) == set()
    assert Skips().pinned(steps) == set()


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "skips.json"
    assert read_skips(path) is None
    assert parse_skips(None, path).next_sample(5) == 5
    for text in ("", "[]", '{"skips": [{"from_samples": 9}]}'):
        with pytest.raises(InvalidInputError, match=r"skips\.json: is no list of skipped data"):
            parse_skips(text, path)
    with pytest.raises(InvalidInputError, match="skips from sample 8 to 4"):
        _skips((8, 4))
    path.mkdir()
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_skips(path)


# -- Copies of data on a node's own disk: complete or absent, and made once per node -------------


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def staging_job(directory: Path, *, stage_data: bool = True, sha256: str | None = None) -> Job:
    """A run with one dataset of two files; `sha256` is what was recorded of its tokens."""
    prefix = directory / "data" / "pile.v1"
    if not bin_path(prefix).exists():
        prefix.parent.mkdir()
        bin_path(prefix).write_bytes(b"tokens" * 1000)
        idx_path(prefix).write_bytes(b"index")
    made = job(directory, data_blend=((1.0, str(prefix)),), stage_data=stage_data)
    recorded = identify_file(bin_path(prefix), sha256)
    write_identity(made.run.data_identity, DataIdentity(files=(recorded,)))
    return made


def copies(made: Job, reads: bool = True) -> dict[str, str]:
    return staged_copies(made, reads, lambda: None)


def test_files_are_copied_once_with_their_sidecar(tmp_path: Path, scratch: Path) -> None:
    made = staging_job(tmp_path)
    source = Path(made.config.data_blend[0][1])
    sidecar_path(source).write_text("{}")
    copy = Path(copies(made)[str(source)])
    assert copy.is_relative_to(scratch) and copy.name == source.name
    for path in (bin_path, idx_path, sidecar_path):
        assert path(copy).read_bytes() == path(source).read_bytes()
    before = bin_path(copy).stat()
    assert copies(made) == {str(source): str(copy)}
    after = bin_path(copy).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert oct((scratch / "hpctrain-data").stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize("stage_data, reads", [(False, True), (True, False)])
def test_nothing_is_copied_unasked_or_for_ranks_that_read_nothing(
    stage_data: bool, reads: bool, tmp_path: Path, scratch: Path
) -> None:
    assert copies(staging_job(tmp_path, stage_data=stage_data), reads) == {}
    assert not scratch.exists()


def test_a_changed_source_is_copied_again(tmp_path: Path) -> None:
    made = staging_job(tmp_path)
    source = made.config.data_blend[0][1]
    old = copies(made)[source]
    bin_path(Path(source)).write_bytes(b"others" * 1000)
    os.utime(bin_path(Path(source)), ns=(1, 1))
    new = copies(made)[source]
    assert new != old
    assert bin_path(Path(new)).read_bytes() == b"others" * 1000


def test_a_copy_that_was_not_finished_is_made_anew(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = staging_job(tmp_path)

    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(node_copies.shutil, "rmtree", lambda *_, **__: None)  # as SIGKILL would
        with pytest.raises(KilledError):
            staged_copies(made, True, killed)  # type: ignore[arg-type]
    left = [entry.name for entry in (scratch / "hpctrain-data").iterdir()]
    assert any(name.endswith(".part") for name in left)
    (copy,) = copies(made).values()
    assert bin_path(Path(copy)).read_bytes() == b"tokens" * 1000
    assert not list((scratch / "hpctrain-data").glob("*.part"))


def test_a_copy_with_another_digest_is_refused_and_removed(tmp_path: Path, scratch: Path) -> None:
    right = hashlib.sha256(b"tokens" * 1000).hexdigest()
    with pytest.raises(InvalidInputError, match="another SHA-256") as caught:
        copies(staging_job(tmp_path, sha256="0" * 64))
    assert caught.value.problems[0].node_dependent
    assert [one.name for one in (scratch / "hpctrain-data").iterdir()] == ["lock"]
    assert copies(staging_job(tmp_path, sha256=right))


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = node_copies._SPARE_BYTES + 6004
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(node_copies.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidInputError, match="GB free") as caught:
        copies(staging_job(tmp_path))
    assert caught.value.problems[0].node_dependent
    usage.free += 1  # type: ignore[attr-defined]
    assert copies(staging_job(tmp_path))


def test_without_tmpdir_nothing_is_copied_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR")
    with pytest.raises(InvalidInputError, match="TMPDIR is not set"):
        copies(staging_job(tmp_path))


def test_a_source_that_is_gone_is_named(tmp_path: Path) -> None:
    made = staging_job(tmp_path)
    gone = idx_path(Path(made.config.data_blend[0][1]))
    gone.unlink()
    with pytest.raises(InvalidInputError, match=f"{gone}.*cannot be copied"):
        copies(made)


def test_one_process_of_a_node_copies_and_the_others_report_that_they_wait(tmp_path: Path) -> None:
    made = staging_job(tmp_path)
    copying, go_on, waited = threading.Event(), threading.Event(), threading.Event()
    results: list[dict[str, str]] = []

    def slowly() -> None:
        copying.set()
        assert go_on.wait(60)

    first = threading.Thread(target=lambda: results.append(staged_copies(made, True, slowly)))
    second = threading.Thread(target=lambda: results.append(staged_copies(made, True, waited.set)))
    first.start()
    assert copying.wait(60)
    second.start()
    assert waited.wait(60) and not results
    go_on.set()
    first.join(60)
    second.join(60)
    assert len(results) == 2 and results[0] == results[1]
