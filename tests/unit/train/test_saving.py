"""Checks of a checkpoint while it is loaded, problems of saving, and what retention leaves."""

from __future__ import annotations

import errno
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fabricated_runs import SUBMITTED, fabricate, published

from hpctrain.base.errors import CheckpointError, HpctrainError, StorageError
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.records.evaluations import EvaluationJob, EvaluationSettings, read_settings
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import FileDigest, digest_file
from hpctrain.train.faults import BadCheckpointError, UnreadableCheckpointError
from hpctrain.train.saving import digest_check
from hpctrain.train.saving.digest_check import DigestCheck, start_digest_check
from hpctrain.train.saving.publication import steps_to_evaluate
from hpctrain.train.saving.saver import save_error
from hpctrain.train.storage import NoSpaceError

# -- Comparing digests while loading: what one rank finds, and that all of them say it -----------


class Ranks:
    """Stands in for the agreement of this rank with others, which say what they are given."""

    def __init__(self, *others: str, polls: int = 0) -> None:
        self.others, self.polls = others, polls

    def total(self, number: float) -> float:
        self.polls -= 1
        return number + (self.polls >= 0)

    def everywhere(self, text: str) -> list[str]:
        return [text, *self.others]


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, list[FileDigest]]:
    directory = tmp_path / "iter_0000004"
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).write_bytes(name.encode() * 5000)
    return directory, [digest_file(directory, name) for name in ("a", "b")]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4000] ^= 1
    path.write_bytes(raw)


def test_files_as_they_were_written(shards: tuple[Path, list[FileDigest]]) -> None:
    check = DigestCheck(*shards, "rank 0 on n0")
    asked: list[int] = []
    check.agree(Ranks("", polls=3), waiting=lambda: asked.append(1))
    check.wait()
    assert check.read_bytes == 10000
    assert len(asked) >= 3  # as long as another rank reads


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut])
def test_changed_content_is_named(
    shards: tuple[Path, list[FileDigest]], damage: Callable[[Path], None]
) -> None:
    directory, files = shards
    damage(directory / "b")
    check = DigestCheck(directory, files, "rank 3 on n1")
    with pytest.raises(BadCheckpointError) as caught:
        check.agree(Ranks())
    words = str(caught.value)
    assert "iter_0000004: b has other content than was written, as rank 3 on n1 reads it" in words
    assert digest_file(directory, "b").sha256 in words and files[1].sha256 in words
    with pytest.raises(BadCheckpointError):
        check.explain()


def test_what_another_rank_finds_counts_for_all(shards: tuple[Path, list[FileDigest]]) -> None:
    with pytest.raises(BadCheckpointError, match="c differs"):
        DigestCheck(*shards, "rank 0 on n0").agree(Ranks("", "c differs"))


def test_a_file_that_this_rank_cannot_read_is_no_proof(
    shards: tuple[Path, list[FileDigest]],
) -> None:
    directory, files = shards
    (directory / "b").unlink()
    check = DigestCheck(directory, files, "rank 3 on n1")
    with pytest.raises(UnreadableCheckpointError, match=r"rank 3 on n1 cannot read .*/b: No such"):
        check.agree(Ranks())


def test_content_that_differs_only_once_is_the_nodes_fault(
    shards: tuple[Path, list[FileDigest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reading comes from the disk and is right: what this node has loaded may not be."""
    real, wrong = digest_check.digest_file, FileDigest(name="a", size_bytes=5000, sha256="f" * 64)
    answers = iter([wrong])
    monkeypatch.setattr(
        digest_check, "digest_file", lambda *what: next(answers, None) or real(*what)
    )
    check = DigestCheck(*shards, "rank 3 on n1")
    with pytest.raises(UnreadableCheckpointError, match="changed between two readings"):
        check.wait()


def test_a_thread_that_fails_is_no_good_checkpoint(
    shards: tuple[Path, list[FileDigest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> FileDigest:
        raise RuntimeError("no memory for threads")

    monkeypatch.setattr(digest_check, "digest_file", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        DigestCheck(*shards, "rank 0 on n0").agree(Ranks())


def test_a_rank_that_waits_says_so_until_its_own_share_is_read(
    shards: tuple[Path, list[FileDigest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), digest_check.digest_file

    def slow(directory: Path, name: str) -> FileDigest:
        gate.wait(300)
        return real(directory, name)

    monkeypatch.setattr(digest_check, "digest_file", slow)
    check = DigestCheck(*shards, "rank 0 on n0")
    check.agree(Ranks(), waiting=gate.set)
    assert check.read_bytes == 10000


def test_without_a_checkpoint_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert start_digest_check(None, 0, 1, "n0") is None
    with pytest.raises(UnreadableCheckpointError, match="no readable manifest"):
        start_digest_check(tmp_path, 0, 1, "n0")


# -- A problem of rank 0 as a value that all ranks can raise -------------------------------------


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StaleEpochError("epoch 3 owns the run"), StaleEpochError),
        (StorageError("full: away"), StorageError),
        (FULL, NoSpaceError),
        (CheckpointError("retry: a digest is missing"), CheckpointError),
        (ValueError("stale: no"), CheckpointError),
    ],
)
def test_what_all_ranks_raise_follows_from_the_error_and_not_from_its_text(
    error: Exception, raised: type[HpctrainError]
) -> None:
    sent = pickle.loads(pickle.dumps(save_error(error)))
    assert type(sent) is raised and str(sent) == str(error)


def test_an_error_of_the_program_is_shown_with_its_type() -> None:
    assert str(save_error(KeyError("x"))) == "KeyError('x')"


# ------------------------------------------------------------------------------------------------
# Which checkpoints retention leaves for evaluation jobs where the file system answers errors.


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    found = fabricate(tmp_path, "gpt-1234", SUBMITTED)
    for step in (4, 8, 10):
        published(found, step)
    return found.layout


@pytest.mark.parametrize("method", ["stat", "read_bytes"])
@pytest.mark.parametrize("name", ["evaluation.json", "evaluations.jsonl"])
def test_an_error_that_passes_deletes_nothing(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    assert steps_to_evaluate(run) == set(), "a run without evaluation jobs"
    jobs = (EvaluationJob(name="score", every_steps=4),)
    settings = EvaluationSettings(jobs=jobs, last_step=100)
    run.evaluation_config.write_text(settings.model_dump_json())
    run.evaluations.touch()
    assert steps_to_evaluate(run) == {4, 8}
    whole = getattr(Path, method)

    def fails(path: Path, **options: object) -> object:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return whole(path, **options)

    monkeypatch.setattr(Path, method, fails)
    kept = steps_to_evaluate(run)
    assert {4, 8} <= kept
    if (name, method) == ("evaluation.json", "read_bytes"):
        assert kept == {4, 8, 10}
        with pytest.raises(OSError, match="Input/output"):
            read_settings(run)


def test_a_manifest_that_cannot_be_read_keeps_its_checkpoint(run: RunLayout) -> None:
    jobs = (EvaluationJob(name="score", every_steps=100),)
    settings = EvaluationSettings(jobs=jobs, last_step=100)
    run.evaluation_config.write_text(settings.model_dump_json())
    assert steps_to_evaluate(run) == set()
    for path in (run.checkpoints / "iter_0000008").glob("*manifest*"):
        path.unlink()
    assert steps_to_evaluate(run) == {8}
