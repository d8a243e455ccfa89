"""Cleaning, archiving and removing runs: what goes, what stays, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published

from hpctrain.base.disk_usage import DiskUsage, usage_of
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.records.find import RunFiles, all_runs, find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import user_name
from hpctrain.runs import archive as archives
from hpctrain.runs.archive import ArchiveListing, archive
from hpctrain.runs.clean import clean, plan_cleaning, refuse_to_remove, remove
from hpctrain.runs.describe import describe
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

HISTORY = [*SUBMITTED, STARTED, LAUNCHED, *ended("crash", "boom", "stop")]


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


def live(slurm: FakeSlurm, run: RunFiles, state: JobState = JobState.RUNNING) -> None:
    """Give the run a job."""
    job_id = slurm.submit(f"#SBATCH --job-name={run.run_id}\n").job_id
    slurm.records[job_id] = replace(slurm.records[job_id], state=state)
    assert job_id == 1, "the job of the ledger"


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A run that has launched three times and left everything that runs can leave."""
    run = fabricate(tmp_path / "runs", entries=HISTORY, steps=30)
    layout = run.layout
    for step in (10, 20, 30):
        directory = published(run, step)
        (directory / "digests").mkdir()
        (directory / "digests" / "rank-000000.json").write_text("{}")
    for name in ("iter_0000025.partial-e000002", "iter_0000035.partial-e000003"):
        (layout.checkpoints / name / "digests").mkdir(parents=True)
        (layout.checkpoints / name / "shard.distcp").write_bytes(b"x" * 100)
    (layout.checkpoints / ".discarded-iter_0000005").mkdir()
    quarantined = layout.checkpoints / "quarantine" / "iter_0000008"
    quarantined.mkdir(parents=True)
    (quarantined / "shard.distcp").write_bytes(b"bad")
    (quarantined.parent / "iter_0000008.reason").write_text("its content differs\n")
    (layout.logs / "1.0").mkdir()
    (layout.logs / "slurm-1.out").write_text("job\n")
    for epoch in (1, 2, 3):
        (layout.epochs / f"{epoch:06d}.json").write_text("x")
        (layout.logs / "1.0" / f"step{epoch}-rank0000.log").write_text("log\n")
        layout.exits_of(epoch).mkdir()
        layout.exit_records(epoch, 0).write_text("{}\n")
        layout.stack_dump(epoch, 0).parent.mkdir()
        layout.stack_dump(epoch, 0).write_text("stack\n")
    layout.log_archive(1).write_bytes(b"packed")
    layout.traces.mkdir()
    (layout.traces / "trace.json.gz").write_bytes(b"t" * 50)
    layout.data_cache.mkdir()
    (layout.data_cache / "order.npy").write_bytes(b"o" * 70)
    for name, seconds_ago in ((".a.json.n0.1.2.tmp", 7200), (".b.json.n0.1.2.tmp", 5)):
        path = layout.directory / name
        path.write_text("half")
        os.utime(path, (time.time() - seconds_ago,) * 2)
    return run


def left(run: RunFiles) -> set[str]:
    root = run.layout.directory
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file()}


# -- clean -----------------------------------------------------------------------------------


def test_what_a_run_without_jobs_does_not_need(run: RunFiles, slurm: FakeSlurm) -> None:
    before = left(run)
    plan = plan_cleaning(run, slurm, keep_launches=1, traces=True)  # type: ignore[arg-type]
    assert left(run) == before, "planning removes nothing"
    assert {waste.kind: waste.usage.files for waste in plan.waste} == {
        "unfinished checkpoints": 2,
        "digests of ranks": 3,
        "logs": 3,
        "exit records": 2,
        "stacks": 2,
        "traces": 1,
        "cache of the sample order": 1,
        "temporary files": 1,
    }
    assert plan.in_use is None
    clean(run, plan)
    gone = before - left(run)
    assert len(gone) == plan.usage.files == 15
    assert left(run) >= {
        "ledger.jsonl",
        "metrics.jsonl",
        "logs/slurm-1.out",
        "logs/1.0/step3-rank0000.log",
        "exits/e000003/node-000000.jsonl",
        "stacks/e000003/rank-000000.txt",
        ".b.json.n0.1.2.tmp",
        "checkpoints/quarantine/iter_0000008/shard.distcp",
        "checkpoints/quarantine/iter_0000008.reason",
        *(f"checkpoints/iter_00000{step}/shard.distcp" for step in (10, 20, 30)),
        *(f"checkpoints/iter_00000{step}/manifest.json" for step in (10, 20, 30)),
    }
    assert not list(run.layout.checkpoints.glob("*partial*"))
    again = plan_cleaning(run, slurm, keep_launches=1)  # type: ignore[arg-type]
    assert again.waste == ()
    clean(run, again)
    (told,) = [one for one in describe(run).asked if one.action == "clean"]
    assert told.user == user_name() and told.answer is not None, told
    assert told.answer.split("; ")[:2] == [
        "unfinished checkpoints: 2 files, 200 B",
        "digests of ranks: 3 files, 6 B",
    ]


@pytest.mark.parametrize("away", [False, True])
def test_what_the_newest_launch_of_a_live_run_may_use_stays(
    run: RunFiles, slurm: FakeSlurm, away: bool
) -> None:
    """Also where Slurm does not answer: then nobody knows."""
    live(slurm, run)
    slurm.away = away
    plan = plan_cleaning(run, slurm, keep_launches=0, traces=True)  # type: ignore[arg-type]
    assert plan.in_use == ("Slurm does not answer" if away else "job 1 is running")
    clean(run, plan)
    assert left(run) >= {
        "checkpoints/iter_0000035.partial-e000003/shard.distcp",
        "logs/1.0/step3-rank0000.log",
        "exits/e000003/node-000000.jsonl",
        "stacks/e000003/rank-000000.txt",
        "traces/trace.json.gz",
        "data-cache/order.npy",
    }
    assert not (run.layout.checkpoints / "iter_0000025.partial-e000002").exists()
    assert not (run.layout.logs / "1.0" / "step2-rank0000.log").exists()


def test_without_words_it_keeps_as_many_launches_as_the_spec(
    run: RunFiles, slurm: FakeSlurm
) -> None:
    def kinds() -> set[str]:
        plan = plan_cleaning(run, slurm)  # type: ignore[arg-type]
        return {waste.kind for waste in plan.waste}

    assert "exit records" not in kinds(), "a run of an earlier version keeps ten"
    config = json.loads(run.layout.supervise_config.read_text())
    run.layout.supervise_config.write_text(json.dumps({**config, "keep_launches": 2}))
    assert "exit records" in kinds()


def test_cleaning_does_not_follow_links(run: RunFiles, slurm: FakeSlurm, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "iter_0000099.partial-e000001"
    outside.mkdir(parents=True)
    (outside / "weights").write_text("somebody's")
    (run.layout.checkpoints / outside.name).symlink_to(outside)
    shutil.rmtree(run.layout.stacks)
    run.layout.stacks.symlink_to(outside.parent)
    (outside.parent / "e000001").mkdir()
    (outside.parent / "e000001" / "rank-000000.txt").write_text("somebody's")
    cache = run.layout.data_cache / "link"
    cache.symlink_to(outside)
    clean(run, plan_cleaning(run, slurm, keep_launches=0))  # type: ignore[arg-type]
    assert (outside / "weights").read_text() == "somebody's"
    assert not cache.is_symlink(), "the cache is gone, and what its link points to is not"


def test_files_are_counted_without_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "five").write_text("12345")
    (tmp_path / "big").write_bytes(b"x" * 1000)
    (tmp_path / "a" / "link").symlink_to("../big")
    (tmp_path / "a" / "up").symlink_to("..")
    assert usage_of(tmp_path / "a") == DiskUsage(3, 5 + len("../big") + len(".."))
    assert usage_of(tmp_path / "a" / "five") == DiskUsage(1, 5)
    assert usage_of(tmp_path / "none") == DiskUsage()


# -- archive ---------------------------------------------------------------------------------


def unpack(path: Path, runs: Path) -> RunFiles:
    with tarfile.open(path) as tar:
        tar.extractall(runs)
    return find_run(runs, "gpt-tiny-7f3a")


@pytest.mark.parametrize(
    ("which", "name", "weights"),
    [("none", "a.tar.gz", set()), ("last", "a.tar", {30}), ("all", "a.tgz", {10, 20, 30})],
)
def test_an_archive_brings_a_run_back(
    run: RunFiles, slurm: FakeSlurm, tmp_path: Path, which: str, name: str, weights: set[int]
) -> None:
    before, output = left(run), tmp_path / name
    made = archive(run, slurm, output, which)  # type: ignore[arg-type]
    assert left(run) == before
    assert made.archive_bytes == output.stat().st_size
    assert stat.S_IMODE(output.stat().st_mode) == 0o600, "as private as the run"
    again = unpack(output, tmp_path / "elsewhere")
    restored = left(again) - {"archive.json"}
    missing = before - restored
    assert all(one.startswith("checkpoints/") for one in missing)
    assert len(missing) == made.listing.left_out_files
    names = {step: f"checkpoints/iter_00000{step}" for step in (10, 20, 30)}
    kept = {step for step, name in names.items() if f"{name}/shard.distcp" in restored}
    assert kept == weights
    assert {f"{name}/manifest.json" for name in names.values()} <= restored
    places = {"directory", "script", "checkpoints"}
    assert describe(again).model_dump(exclude=places) == describe(run).model_dump(exclude=places)
    assert {one.step for one in describe(again).checkpoints if one.problem is None} == weights
    old, new = statuses([run, again], slurm)  # type: ignore[arg-type]
    assert (new.state, new.step, new.attempts) == (old.state, old.step, old.attempts)
    assert old.state is RunState.FAILED
    for file in made.listing.files:
        content = (again.layout.directory / file.name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file.sha256, file.name
    listing = ArchiveListing.model_validate_json(
        (again.layout.directory / "archive.json").read_bytes()
    )
    assert listing == made.listing
    second = archive(again, slurm, tmp_path / "second.tar", which)  # type: ignore[arg-type]
    assert second.listing.content_sha256 == listing.content_sha256, "of the content, not of times"


def test_what_is_no_file_and_links(run: RunFiles, slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not of the run")
    (run.layout.directory / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(run.layout.directory / "pipe")
    made = archive(run, slurm, tmp_path / "a.tar.gz")  # type: ignore[arg-type]
    assert made.listing.special_files == ("pipe",)
    with tarfile.open(made.path) as tar:
        member = tar.getmember("gpt-tiny-7f3a/link")
        assert member.issym() and member.linkname == str(tmp_path / "secret")
        streams = [tar.extractfile(member) for member in tar if member.isreg()]
        assert all(b"not of the run" not in stream.read() for stream in streams if stream)


def test_an_archive_that_is_not_what_was_read_is_refused(
    run: RunFiles, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, output = archives._compare, tmp_path / "a.tar"

    def flip_a_byte(path: Path, listing: ArchiveListing) -> None:
        data = path.read_bytes()
        at = data.index(b'"event"')
        path.write_bytes(data[:at] + b"'" + data[at + 1 :])
        real(path, listing)

    monkeypatch.setattr(archives, "_compare", flip_a_byte)
    with pytest.raises(UsageError, match=r"ledger\.jsonl is not in .*a\.tar as it was read"):
        archive(run, slurm, output)  # type: ignore[arg-type]
    assert not output.exists()


def test_what_cannot_be_archived(run: RunFiles, slurm: FakeSlurm, tmp_path: Path) -> None:
    inside = run.layout.directory / "a.tar"
    (tmp_path / "there.tar").write_text("somebody's")
    for output, words in ((inside, "lies in the run"), (tmp_path / "there.tar", "exists already")):
        with pytest.raises(UsageError, match=words):
            archive(run, slurm, output)  # type: ignore[arg-type]
    assert (tmp_path / "there.tar").read_text() == "somebody's"
    for shard in run.layout.checkpoints.rglob("shard.distcp"):
        shard.unlink()
    with pytest.raises(UsageError, match="no good checkpoint to archive"):
        archive(run, slurm, tmp_path / "b.tar", "last")  # type: ignore[arg-type]
    live(slurm, run, JobState.PENDING)
    with pytest.raises(UsageError, match="job 1 is pending, and its files change"):
        archive(run, slurm, tmp_path / "b.tar")  # type: ignore[arg-type]
    slurm.away = True
    with pytest.raises(SlurmUnreachableError, match="nobody knows whether"):
        archive(run, slurm, tmp_path / "b.tar")  # type: ignore[arg-type]
    assert not (tmp_path / "b.tar").exists()


def test_a_run_that_is_done_needs_no_slurm(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.away = True
    run = fabricate(tmp_path / "runs", entries=HISTORY, steps=3, done=True)
    assert archive(run, slurm, tmp_path / "a.tar.gz").listing.files  # type: ignore[arg-type]


# -- rm --------------------------------------------------------------------------------------


def test_a_removed_run_is_gone_and_nothing_else(
    run: RunFiles, slurm: FakeSlurm, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    (run.layout.directory / "directory").symlink_to(outside)
    (run.layout.checkpoints / "file").symlink_to(outside / "precious")
    neighbour = fabricate(tmp_path / "runs", "gpt-tiny-7f3b")
    remove(run, slurm)  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "runs") == [neighbour.run_id]
    assert (outside / "precious").read_text() == "data"


def test_a_run_that_may_still_train_is_not_removed(run: RunFiles, slurm: FakeSlurm) -> None:
    run.layout.hold_request.write_text("alice\n")
    with pytest.raises(UsageError, match="holds it"):
        refuse_to_remove(run, slurm)  # type: ignore[arg-type]
    run.layout.hold_request.unlink()
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        remove(run, slurm)  # type: ignore[arg-type]
    slurm.away = False
    live(slurm, run, JobState.PENDING)
    with pytest.raises(UsageError, match="cannot be removed: job 1 is pending"):
        remove(run, slurm)  # type: ignore[arg-type]
    assert run.layout.ledger.exists()
    slurm.records.clear()
    run.ledger.append(EventKind.SUBMITTING)
    with pytest.raises(UsageError, match="somebody is submitting it"):
        remove(run, slurm)  # type: ignore[arg-type]


def test_a_run_behind_a_link_is_not_removed(
    run: RunFiles, slurm: FakeSlurm, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / run.run_id).symlink_to(run.layout.directory)
    linked = find_run(other, run.run_id)
    for refused in (
        lambda: remove(linked, slurm),  # type: ignore[arg-type]
        lambda: plan_cleaning(linked, slurm),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="is a link to"):
            refused()
    assert run.layout.ledger.exists()


def test_half_of_a_removed_run_is_no_run(
    run: RunFiles, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("hpctrain.runs.clean.remove_tree", fail)
        with pytest.raises(UsageError, match="cannot be removed completely"):
            remove(run, slurm)  # type: ignore[arg-type]
    assert all_runs(tmp_path / "runs") == []
    again = fabricate(tmp_path / "runs", run.run_id)
    remove(again, slurm)  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "runs") == [], "the next removal takes the rest with it"
