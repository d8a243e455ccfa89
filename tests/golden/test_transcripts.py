"""What people see: plans, tables, histories, and one message of every class of error."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Outcome, hpctrain, on_terminal
from fabricated_runs import (
    LAUNCHED,
    NOW,
    STARTED,
    SUBMITTED,
    Said,
    ended,
    fabricate,
    published,
    said,
)
from golden_files import Golden
from judged_runs import GIB, has_saved, has_trained, has_window, submitted
from virtual_clock import VirtualClock

import hpctrain as package
from hpctrain.base.disk_usage import Directory
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import user_name
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock) -> Path:
    """A directory with the examples and without runs, at a fixed time."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    virtual_clock.begins_at = NOW
    return tmp_path


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    return fake


def without_place(outcome: Outcome, here: Path) -> str:
    return outcome.transcript().replace(str(here), "HERE")


@pytest.mark.parametrize(
    ("profile", "example"),
    [("a100x64", "gpt175b"), ("a100x1", "llama7b"), ("sandbox", "gpt-tiny")],
)
def test_plan(golden: Golden, profile: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Directory("/runs", True, free_bytes=100 << 40, free_inodes=10**9, inodes=10**9)
    monkeypatch.setattr("hpctrain.job.preflight.directory_facts", lambda path: left)
    outcome = hpctrain("plan", "--profile", profile, f"examples/{example}.yaml")
    golden(f"transcripts/plan-{example}.txt", outcome.transcript())


LIMITS = """
limits: {max_inodes: 10000, max_bytes: 20TiB, max_rpc_per_hour: 100}
"""


def test_footprint(golden: Golden, here: Path) -> None:
    """The largest example, its rows, and what exceeds the limits of a site."""
    example = ["examples/gpt175b.yaml", "--profile"]
    outcome = hpctrain("footprint", *example, "a100x64")
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    golden("transcripts/footprint-gpt175b.txt", outcome.transcript())
    rows = hpctrain("footprint", *example, "a100x64", "--rows")
    golden("transcripts/footprint-rows.txt", rows.transcript())
    profile = here / "strict.yaml"
    profile.write_text((ROOT / "cluster_profiles" / "a100x64.yaml").read_text() + LIMITS)
    strict = hpctrain("footprint", *example, str(profile))
    assert strict.exit_code == 4
    submitted = hpctrain("submit", *example, str(profile), "--dry-run")
    assert submitted.exit_code == 3, "its data is not here"
    assert submitted.stdout.startswith("#!/bin/bash"), "warnings do not belong into the script"
    warnings = [line for line in submitted.stderr.splitlines() if line.startswith("warning: ")]
    texts = [strict.stderr, *warnings]
    golden("transcripts/footprint-limits.txt", "\n".join(texts).replace(str(here), "HERE") + "\n")


def test_profiles(golden: Golden) -> None:
    golden("transcripts/profiles.txt", hpctrain("profiles").transcript())


WRONG = """\
name: wrong
model: {layers: 4, hiden: 128, heads: 4, vocab: 1024, seq: 128}
batch: {global: eight}
budget: {steps: 60, tokens: 1B}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 10}
resources: {gpus: 4, walltime: 24h00}
"""


def test_all_problems_of_a_file_at_once(golden: Golden, here: Path) -> None:
    (here / "wrong.yaml").write_text(WRONG)
    outcome = hpctrain("validate", "wrong.yaml")
    assert outcome.exit_code == 3
    golden("transcripts/validate-wrong.txt", outcome.transcript())


def test_each_class_of_error(golden: Golden, here: Path, slurm: FakeSlurm) -> None:
    """Exit codes 2 to 7 in the words of the command line."""
    fabricate(here / "runs", "failed-0001", [*SUBMITTED, STARTED, *ended("crash", "boom", "stop")])
    fabricate(here / "runs", "failed-0002")
    slurm.away = True
    limit = ["--set", "resources.walltime=9-00:00:00"]
    too_big = ["--set", "parallel.pp=1", "--set", "parallel.vpp=1"]
    expected = [
        (2, "sumbit"),
        (2, "submit", "--profil", "sandbox", "examples/gpt-tiny.yaml"),
        (2, "status", "--json", "--watch"),
        (2, "cancel", "failed", "-y"),
        (2, "cancel", "failed-0001"),
        (3, "plan", "--profile", "a100x46", "examples/gpt-tini.yaml"),
        (3, "submit", "--profile", "sandbox", "examples/gpt-tiny.yaml", "-y"),
        (4, "plan", "--profile", "a100x64", "examples/gpt175b.yaml", *limit),
        (4, "plan", "--profile", "a100x64", "examples/gpt175b.yaml", *too_big),
        (4, "plan", "--profile", "sandbox", "examples/gpt175b.yaml"),
        (5, "cancel", "failed-0001", "-y"),
        (6, "describe", "faild-0001"),
        (7, "status", "--wait", "failed-0001"),
    ]
    texts = []
    for code, *arguments in expected:
        outcome = hpctrain(*arguments)
        texts.append(without_place(outcome, here))
        assert outcome.exit_code == code, outcome.transcript()
        assert outcome.stdout == "" or code == 7 or "--json" in arguments, "stdout is for data"
    golden("transcripts/errors.txt", "\n".join(texts))


def test_diagnose(golden: Golden, here: Path) -> None:
    """A run with much to say, one that is well, one that has not begun."""
    runs = here / "runs"
    slow, ranks = submitted(runs, "gpt1300m", "a100x64")
    has_trained(slow.layout, [30.0] + [7.2] * 60)
    has_saved(slow.layout, [9.0] * 4)
    has_window(
        slow.layout,
        ranks,
        4,
        compute_seconds=[1.6] * (ranks - 1) + [2.0],
        backward_seconds=[4.5] * (ranks - 1) + [4.1],
        data_seconds=0.6,
        step_seconds=7.2,
        reserved_memory_bytes=78 * GIB,
    )
    good, ranks = submitted(runs, "gpt1300m", "a100x64", ["name=good"])
    has_trained(good.layout, [6.0] * 60)
    has_saved(good.layout, [0.2] * 4)
    well = dict(compute_seconds=1.9, backward_seconds=3.9, step_seconds=6.0)
    has_window(good.layout, ranks, 4, **well, reserved_memory_bytes=65 * GIB)
    young, _ = submitted(runs, "gpt1300m", "a100x64", ["name=young"])
    texts = [hpctrain("diagnose", run.run_id) for run in (slow, good, young)]
    assert [text.exit_code for text in texts] == [0, 0, 2]
    for line in texts[0].stdout.splitlines():
        assert len(line) <= 80, line
    golden("transcripts/diagnose.txt", "\n".join(without_place(text, here) for text in texts))


def test_a_bug_is_told_without_traceback(
    golden: Golden, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("hpctrain.records.find.all_runs", broken)
    golden("transcripts/bug.txt", hpctrain("status").transcript())


def fabricate_all(runs: Path, slurm: FakeSlurm) -> None:
    """One run in every state."""
    started = [STARTED, LAUNCHED]
    lost = ended("preempted", "an urgent job took the nodes", "requeue")
    numbered = iter(range(1, 100))

    def make(run_id: str, entries: list[Said], **more: object) -> int:
        job_id = next(numbered)
        renamed = [(k, {**f, "job_id": job_id} if "job_id" in f else f) for k, f in entries]
        run = fabricate(runs, run_id, renamed, **more)  # type: ignore[arg-type]
        saved = int(more.get("steps", 0)) // 10 * 10  # type: ignore[call-overload]
        if saved:
            published(run, saved)
        return job_id

    base = slurm.submit("#!/bin/sh\n").job_id
    record = slurm.records.pop(base)
    waiting = make("waiting-0001", [*SUBMITTED])
    slurm.records[waiting] = replace(record, job_id=waiting, reason="Priority")
    running = make("running-0002", [*SUBMITTED, *started], steps=23)
    slurm.records[running] = replace(record, job_id=running, state=JobState.RUNNING)
    requeued = make("requeued-0003", [*SUBMITTED, *started, *lost], steps=30)
    slurm.records[requeued] = replace(record, job_id=requeued, reason="BeginTime")
    make("failed-0004", [*SUBMITTED, *started, *ended("crash", "rank 1: boom", "stop")], steps=12)
    cancel = said(EventKind.CANCELLED, user="somebody")
    make("cancelled-0005", [*SUBMITTED, *started, cancel], steps=5)
    refused = said(EventKind.SUBMIT_FAILED, reason="sbatch: error: Batch job submission failed")
    make("refused-0006", [*SUBMITTED[:2], refused])
    make("gone-0007", [*SUBMITTED, *started], steps=3, last_loss=None)
    make("done-0008", [*SUBMITTED, *started], steps=60, done=True)


def test_status(golden: Golden, here: Path, slurm: FakeSlurm) -> None:
    fabricate_all(here / "runs", slurm)
    golden("transcripts/status.txt", hpctrain("status", "-a").transcript())
    owned = f'"owner": "{user_name()}"'
    told = hpctrain("status", "-a", "--json").transcript()
    assert owned in told
    golden("transcripts/status-json.txt", told.replace(owned, '"owner": "OWNER"'))
    slurm.away = True
    golden("transcripts/status-away.txt", hpctrain("status", "-a").transcript())


@pytest.mark.parametrize("columns", [80, 120])
def test_status_on_a_terminal(
    golden: Golden,
    here: Path,
    slurm: FakeSlurm,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names and states are whole, reasons have lines of their own, states have colours."""
    fabricate_all(here / "runs", slurm)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    names = sorted(path.name for path in (here / "runs").iterdir())
    shown = on_terminal(columns, "status", "-a")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= columns
    lines = plain.splitlines()[1:-1]  # between headings and exit code
    assert sorted(line.split()[0] for line in lines if line[0] != " ") == names
    assert "\x1b[32mRUNNING" in shown and "\x1b[31mFAILED" in shown
    golden(f"transcripts/status-terminal-{columns}.txt", plain)
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(columns, "status", "-a") == plain
    assert "\x1b" not in on_terminal(columns, "status", "nobody")


def test_pages_of_runs(golden: Golden, here: Path, slurm: FakeSlurm) -> None:
    """The first page about a run in each state."""
    fabricate_all(here / "runs", slurm)
    pages = [
        hpctrain("status", name).transcript()
        for name in sorted(path.name for path in (here / "runs").iterdir())
    ]
    text = "\n".join(pages)
    assert max(map(len, text.splitlines())) <= 80
    golden("transcripts/status-pages.txt", text.replace(str(here), "HERE"))


def test_status_without_runs(golden: Golden) -> None:
    golden("transcripts/status-empty.txt", hpctrain("status").transcript())


def test_describe(golden: Golden, here: Path) -> None:
    again = said(
        EventKind.ATTEMPT_STARTED, job_id=1, restart_count=1, nodes="n[2-3]", time=NOW - 300
    )
    relaunch = said(EventKind.LAUNCH_STARTED, epoch=2, resume_step=30, time=NOW - 290)
    signal = said(EventKind.SIGNAL, signal="USR1")
    preempted = ended("preempted", "an urgent job took the nodes", "requeue")
    entries = [*SUBMITTED, STARTED, LAUNCHED, signal, *preempted, again, relaunch]
    fabricate(here / "runs", entries=entries, steps=42)
    told = hpctrain("describe", "gpt-tiny")
    golden("transcripts/describe.txt", without_place(told, here))
    machine = hpctrain("describe", "gpt-tiny", "--json")
    golden("transcripts/describe-json.txt", without_place(machine, here))


def test_getting_rid_of_files(
    golden: Golden, here: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clean, archive and rm: of a run that is over, and of one that trains."""
    # The ledger, whose size is told, has the name: so long that no digit of a time changes a size.
    monkeypatch.setattr("hpctrain.runs.clean.user_name", lambda: "a" * 53)
    fabricate_all(here / "runs", slurm)
    over, live = (find_run(here / "runs", name).layout for name in ("done", "running"))
    for layout in (over, live):
        (layout.logs / "2.0").mkdir()
        for epoch in (1, 2, 3):
            (layout.epochs / f"{epoch:06d}.json").write_text("")
            (layout.logs / f"2.0/step{epoch}-node0000.log").write_text("0: one line\n" * 300)
            layout.exits_of(epoch).mkdir()
            layout.exit_records(epoch, 0).write_text("{}\n")
            partial = layout.checkpoints / f"iter_0000070.partial-e{epoch:06d}"
            partial.mkdir()
            (partial / "shard.distcp").write_bytes(bytes(2000))
        layout.data_cache.mkdir()
        (layout.data_cache / "order.npy").write_bytes(bytes(5000))
    keep = ("--keep-launches", "1")
    outcomes = [
        hpctrain("clean", "done", "running", "failed", *keep, "--dry-run"),
        hpctrain("clean", "done", *keep),
        hpctrain("clean", "done", *keep, "-y"),
        hpctrain("clean", "done", *keep, "-y"),
        hpctrain("archive", "done"),
        hpctrain("archive", "done", "--with-checkpoints", "last"),
        hpctrain("archive", "done"),
        hpctrain("archive", "running"),
        hpctrain("rm", "done"),
        hpctrain("rm", "done", "-y"),
        hpctrain("rm", "running", "-y"),
    ]
    assert [outcome.exit_code for outcome in outcomes] == [0, 2, 0, 0, 0, 0, 2, 2, 2, 0, 2]
    text = "\n".join(without_place(outcome, here) for outcome in outcomes)
    # other files of a run say what later settings are
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)
    golden("transcripts/files.txt", re.sub(r"(files?), \d\S*B", r"\1, SIZE", text))


def test_public_surface(golden: Golden) -> None:
    """What `import hpctrain` promises to people who write Python."""
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(set(package.__all__) - {"__version__"})
    lines = []
    for name in sorted(package.__all__):
        item = getattr(package, name)
        signature = str(inspect.signature(item)) if inspect.isfunction(item) else ""
        lines.append(f"hpctrain.{name}{signature}\n")
    golden("transcripts/public-surface.txt", "".join(lines))
