"""Publishing what a program has saved in its own directory: two processes, one manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpctrain.checkpoints.publish import StaleEpochError, published_steps
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    DIGESTS_DIRECTORY,
    FileDigest,
    checkpoint_name,
    digest_file,
    read_manifest,
)
from hpctrain.records.run_records import read_saves
from hpctrain.spec.trainer import CompleteSpec, ForeignCheckpointSpec
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving import program_saves
from hpctrain.trainer.publishing import Publisher

SPEC = ForeignCheckpointSpec(
    path="checkpoint-{step}", complete=CompleteSpec(files=("whole",)), keep=2
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    layout.train_config.touch()
    claim_epoch(layout.epochs, "this one")
    layout.launch_output(1).mkdir(parents=True)
    return layout


@pytest.fixture
def publishers(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Publisher]]:
    monkeypatch.setattr(program_saves, "_SHORTEST_POLL_SECONDS", 0.02)
    found = [
        Publisher(
            run,
            Launch(rank, 2, 0, f"n{rank}", 1, ""),
            SPEC,
            ranks=2,
            layout="two ranks",
            samples=lambda: None,
        )
        for rank in (0, 1)
    ]
    yield found
    for one in found:
        one._stopping.set()


def save(run: RunLayout, step: int, *names: str) -> Path:
    directory = run.launch_output(1) / f"checkpoint-{step}"
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text(f"{name} of {step}")
    return directory


def test_all_processes_digest_a_share_and_old_ones_go(
    run: RunLayout, publishers: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: dict[str, list[str]] = {"first": [], "others": []}
    write = program_saves.write_rank_digests

    def noted(directory: Path, rank: int, names: list[str]) -> None:
        digested["others"] += names
        write(directory, rank, names)

    monkeypatch.setattr(program_saves, "write_rank_digests", noted)

    def digest(directory: Path, name: str) -> FileDigest:
        digested["first"].append(name)
        return digest_file(directory, name)

    monkeypatch.setattr(program_saves, "digest_file", digest)
    for one in publishers:
        one.start()
    for step in (5, 10, 15):
        save(run, step, "a", "b", "c", "whole")
        wait_until(lambda: step in published_steps(run.checkpoints))  # noqa: B023
    assert publishers[0].finish(60)
    assert published_steps(run.checkpoints) == [10, 15]
    directory = run.checkpoints / checkpoint_name(15)
    manifest = read_manifest(directory)
    assert manifest is not None and manifest.consumed_samples is None
    names = [f"checkpoint-15/{name}" for name in ("a", "b", "c", "whole")]
    assert [file.name for file in manifest.files] == names
    assert list(manifest.files) == [digest_file(directory, name) for name in names]
    assert names[1] in digested["others"] and names[3] in digested["others"]
    assert not set(digested["first"]) & {names[1], names[3]}
    assert not (directory / DIGESTS_DIRECTORY).exists()
    assert [(row.step, row.stall_seconds) for row in read_saves(run)] == [
        (5, None),
        (10, None),
        (15, None),
    ]


def test_what_still_changes_or_is_not_complete_waits(
    run: RunLayout, publishers: list[Publisher]
) -> None:
    first = publishers[0]
    first._digest_timeout_seconds = 0.0  # the other process is not there
    directory = save(run, 5, "a")
    first._work()
    assert first.is_saving and first.missing == "checkpoint-5 is not complete: whole is not there"
    save(run, 5, "whole")
    first._work()
    (directory / "a").write_text("longer than before")
    first._work()
    assert first.is_saving and first.newest is None, "its files have not stood still"
    first._work()
    assert (first.newest, first.is_saving, first.problem) == (5, False, None)


def test_a_newer_launch_ends_the_thread_with_an_alarm(
    run: RunLayout, publishers: list[Publisher]
) -> None:
    called: list[bool] = []
    first = publishers[0]
    first._alarm = lambda: called.append(True)
    first._digest_timeout_seconds = 0.0
    claim_epoch(run.epochs, "a newer one")
    first.start()
    save(run, 5, "whole")
    wait_until(lambda: bool(called))
    assert isinstance(first.problem, StaleEpochError)
    with pytest.raises(StaleEpochError):
        first.finish(60)
    first.abandon()  # says nothing: how the program has failed is what counts
    assert published_steps(run.checkpoints) == []


def test_the_first_does_not_wait_for_a_process_that_is_gone(
    run: RunLayout, publishers: list[Publisher]
) -> None:
    first = publishers[0]
    first._digest_timeout_seconds = 0.1
    first.start()
    own = save(run, 5, "a", "b", "whole")
    assert first.finish(60)
    manifest = read_manifest(run.checkpoints / checkpoint_name(5))
    assert manifest is not None and len(manifest.files) == 3
    assert own.is_dir(), "the trainer's own stays"
