"""Metrics of runs: which value comes from which file, and what a pass over all runs asks."""

from __future__ import annotations

import math
import shutil
import stat
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, ended, fabricate

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError
from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.observe import exporter as module
from hpctrain.observe import run_metrics
from hpctrain.observe.attempt_exporter import AttemptExporter
from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.metrics_outlets import (
    MetricsServer,
    Textfile,
    parse_address,
    published_endpoint,
)
from hpctrain.observe.samples import Sample, own_sample
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.run_records import (
    AxisMessages,
    CommunicationRecord,
    Progress,
    RankTimes,
    SaveRecord,
    append_metrics,
    append_save,
    read_metrics,
    write_record,
)
from hpctrain.records.watch_heartbeat import WatchHeartbeat, heartbeat_path
from hpctrain.runs.goodput import goodput
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Values = dict[tuple[str, ...], float]


class CountedFake(FakeSlurm):
    """Counts queries as the exporter's own client does."""

    def __init__(self, *jobs: JobRecord) -> None:
        super().__init__()
        self.records = {job.job_id: job for job in jobs}
        self.queries = 0

    def jobs_of_users(self, user_ids: Any) -> dict[int, JobRecord]:
        self.queries += 1
        return super().jobs_of_users(user_ids)


def exporter_of(runs: Path, *jobs: JobRecord) -> tuple[Exporter, CountedFake]:
    fake = CountedFake(*jobs)
    return Exporter((runs,), cast(ExporterSlurm, fake), 86400.0), fake


def values(samples: list[Sample]) -> Values:
    """Values by name and the values of labels, without the run's."""
    return {
        (sample.family.name, *(text for name, text in sample.labels if name != "run")): sample.value
        for sample in samples
    }


def job_of(run: RunFiles, **changes: Any) -> JobRecord:
    return JobRecord(
        **{
            "job_id": 1,
            "name": run.run_id,
            "state": JobState.RUNNING,
            "node_list": "gpu[01-02]",
            "account": "llm",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def planned_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 175B as `submit` writes it: with a plan, a price, and a budget."""
    runs = tmp_path_factory.mktemp("planned")
    prepared = prepare(EXAMPLES / "gpt175b.yaml", "a100x64", ("budget.gpu_hours=200",), runs=runs)
    return write_run_directory(prepared, runs).directory


@pytest.fixture
def planned(planned_directory: Path, tmp_path: Path) -> RunFiles:
    """A copy of it that has trained five steps, saved one of them, and was hung once."""
    run = fabricate(
        tmp_path / "runs",
        planned_directory.name,
        (*SUBMITTED, STARTED, LAUNCHED, *ended("hang", "silent", "relaunch")),
        steps=5,
    )
    for name in ("spec.yaml", "profile.yaml", "plan.json", "train.json", "supervise.json"):
        shutil.copy(planned_directory / name, run.layout.directory / name)
    Ledger(run.layout.ledger).append(
        EventKind.LAUNCH_STARTED, job_id=1, restart_count=0, epoch=2, resume_step=4
    )
    append_save(
        run.layout,
        SaveRecord(
            step=4, epoch=1, time=NOW - 60, stall_seconds=3.0, publish_seconds=9.0, size_bytes=77
        ),
    )
    return run


def test_progress_learning_and_identity(planned: RunFiles) -> None:
    exporter, fake = exporter_of(planned.layout.directory.parent, job_of(planned))
    found = values(exporter.samples(NOW))
    assert fake.queries == 1
    state = [key[1] for key, value in found.items() if key[0] == "hpctrain_run_state" and value]
    assert state == ["RUNNING"]
    (info,) = (key for key in found if key[0] == "hpctrain_run")
    assert info[2:5] == ("llm", "a100x64", "megatron") and "tp" in info[6] and info[7] == "a100"
    nodes = {key[1:] for key in found if key[0] == "hpctrain_run_node"}
    assert nodes == {("1", "gpu01"), ("1", "gpu02")}
    assert found["hpctrain_run_step",] == 5
    assert found["hpctrain_run_last_step_timestamp_seconds",] == NOW - 595
    assert found["hpctrain_run_loss",] == 2.5
    assert found["hpctrain_run_gradient_norm",] == 1.0
    assert found["hpctrain_run_checkpoint_timestamp_seconds",] == NOW - 60
    assert found["hpctrain_run_checkpoint_stall_seconds",] == 3.0
    assert found["hpctrain_run_checkpoints",] == 1
    assert found["hpctrain_run_launch_ends", "hang"] == 1
    assert found["hpctrain_run_last_end_timestamp_seconds", "hang"] < NOW
    assert found["hpctrain_run_retries_left", "hang"] >= 1
    assert found["hpctrain_run_launches",] == 2


def test_time_money_and_plan(planned: RunFiles) -> None:
    exporter, _ = exporter_of(planned.layout.directory.parent, job_of(planned))
    found = values(exporter.samples(NOW))
    account = goodput(planned, NOW)
    assert account.gpu_hours
    for category, seconds in account.seconds.items():
        assert found["hpctrain_run_time_seconds", category] == seconds
    assert found["hpctrain_run_gpu_seconds",] == account.gpu_hours * 3600
    assert found["hpctrain_run_budget_used_ratio",] == account.gpu_hours / 200
    (cost,) = (value for key, value in found.items() if key[0] == "hpctrain_run_cost")
    assert cost > account.gpu_hours, "an A100 costs more than one unit of money per hour"
    assert 0.4 < found["hpctrain_run_planned_mfu_ratio",] < 0.7
    axes = {key[1] for key in found if key[0] == "hpctrain_run_planned_message_seconds"}
    assert {"tp", "pp"} <= axes
    lost = found["hpctrain_run_lost_seconds", "hang"]
    assert lost == next(one.lost_seconds for one in account.causes if one.cause == "hang")


def test_ranks_become_nodes_and_stages(planned: RunFiles) -> None:
    """64 nodes of 8 ranks; the ranks of one node compute 1.5 times as long."""
    nodes = tuple(f"gpu{rank // 8:02}" for rank in range(512))
    seconds = tuple(1.5 if node == "gpu07" else 1.0 for node in nodes)
    same = (0.25,) * 512
    times = RankTimes(
        epoch=2,
        first_step=1,
        last_step=5,
        time=NOW,
        compute_seconds=seconds,
        nodes=nodes,
        backward_seconds=(0.0,) * 512,
        data_seconds=same,
        optimizer_seconds=same,
        step_seconds=(2.0,) * 512,
        peak_memory_bytes=tuple(range(512)),
        reserved_memory_bytes=tuple(range(512)),
    )
    write_record(planned.layout.rank_times, times)
    message = AxisMessages(
        axis="tp",
        ranks_per_group=2,
        groups=(0, 0),
        calls=(3, 3),
        bytes=(100, 300),
        seconds=(0.1, 0.3),
    )
    record = CommunicationRecord(
        epoch=2, step=4, time=NOW, step_seconds=2.0, nodes=("a", "a"), axes=(message,)
    )
    write_record(planned.layout.communication, record)
    exporter, _ = exporter_of(planned.layout.directory.parent, job_of(planned))
    samples = exporter.samples(NOW)
    found = values(samples)
    slow = {key[1]: value for key, value in found.items() if "node_slowdown" in key[0]}
    assert len(slow) == 64, "one series per node, not per rank"
    assert slow["gpu07"] == 1.5 and slow["gpu08"] == 1.0
    assert found["hpctrain_run_step_part_seconds", "data"] == 0.25
    assert found["hpctrain_run_step_part_seconds", "passes"] == pytest.approx(1 + 0.5 / 64)
    stages = {key[1]: value for key, value in found.items() if "peak_memory" in key[0]}
    planned_stages = {key[1] for key in found if "planned_memory" in key[0]}
    assert set(stages) == planned_stages and max(stages.values()) == 511
    assert found["hpctrain_run_message_bytes", "tp"] == 200
    assert found["hpctrain_run_message_seconds", "tp"] == pytest.approx(0.2)
    most = max(
        sum(s.family.name == name for s in samples) for name in {s.family.name for s in samples}
    )
    assert most <= 64


def test_a_loss_that_is_not_finite_is_nan(planned: RunFiles) -> None:
    row = read_metrics(planned.layout)[-1]
    append_metrics(planned.layout, row.model_copy(update={"step": 6, "loss": None}))
    exporter, _ = exporter_of(planned.layout.directory.parent, job_of(planned))
    assert math.isnan(values(exporter.samples(NOW))["hpctrain_run_loss",])


def test_silence_has_the_limit_of_its_phase(planned: RunFiles) -> None:
    exporter, _ = exporter_of(planned.layout.directory.parent, job_of(planned))
    limits = []
    for phase in ("starting", "training"):
        progress = Progress(epoch=2, phase=phase, step=5, target_step=9, time=NOW - 7)  # type: ignore[arg-type]
        write_record(planned.layout.progress, progress)
        found = values(exporter.samples(NOW))
        assert found["hpctrain_run_sign_of_life_timestamp_seconds",] == NOW - 7
        limits.append(found["hpctrain_run_stall_limit_seconds",])
    assert limits[0] > limits[1]


def test_a_waiting_run_has_its_wait_and_no_speed(planned: RunFiles) -> None:
    job = job_of(planned, state=JobState.PENDING, node_list="", submit_time=NOW - 90)
    exporter, _ = exporter_of(planned.layout.directory.parent, job)
    found = values(exporter.samples(NOW))
    assert found["hpctrain_run_pending_seconds",] == 90
    gone = ("step_seconds", "mfu_ratio", "sign_of_life_timestamp_seconds", "nodes", "gpus")
    assert not [name for name in gone if (f"hpctrain_run_{name}",) in found]


# -- many runs -----------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Forty runs of one user, one of which cannot be read."""
    runs = tmp_path / "runs"
    for number in range(40):
        entries = (*SUBMITTED, STARTED, LAUNCHED) if number % 2 else SUBMITTED
        fabricate(runs, f"gpt-{number:04x}", entries, steps=number % 3, done=number == 3)
    fabricate(runs, "broken").layout.ledger.write_text('{"event": "watch", "schema_version": 99}\n')
    return runs


def test_one_query_for_all_runs(fleet: Path) -> None:
    exporter, fake = exporter_of(fleet)
    found = values(exporter.samples(NOW))
    assert fake.queries == 1
    assert found["hpctrain_exporter_runs",] == 41
    assert found["hpctrain_exporter_unreadable_runs",] == 1
    assert found["hpctrain_exporter_slurm_up",] == 1
    exporter.samples(NOW)
    assert fake.queries == 2


def test_slurm_away_is_said_and_hides_no_run(fleet: Path) -> None:
    exporter, fake = exporter_of(fleet)
    fake.away = True
    samples = exporter.samples(NOW)
    assert values(samples)["hpctrain_exporter_slurm_up",] == 0
    steps = [sample for sample in samples if sample.family.name == "hpctrain_run_step"]
    assert len(steps) > 20


def test_a_run_that_is_over_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fabricate(tmp_path / "runs", "over", (*SUBMITTED, STARTED, LAUNCHED), steps=3, done=True)
    exporter, fake = exporter_of(run.layout.directory.parent)
    first = exporter.samples(NOW)
    reads: list[object] = []
    real = run_metrics._collected
    monkeypatch.setattr(
        run_metrics, "_collected", lambda *given: reads.append(given) or real(*given)
    )
    again = exporter.samples(NOW + 30)
    assert not reads and fake.queries == 0
    assert [one for one in again if one.family.subject == "run"] == [
        one for one in first if one.family.subject == "run"
    ]
    Ledger(run.layout.ledger).append(EventKind.CONTROL, action="resume")
    exporter.samples(time.time())
    assert len(reads) == 1


def test_runs_that_were_done_long_ago_are_left_out(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    fabricate(runs, "old", (*SUBMITTED, STARTED), done=True)
    fabricate(runs, "waits", SUBMITTED)
    exporter, _ = exporter_of(runs)
    found = values(exporter.samples(NOW + 10 * 86400))
    assert found["hpctrain_exporter_runs",] == 1


def test_accounting_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[int]] = []
    monkeypatch.setattr(
        module.SlurmClient, "past_jobs", lambda _self, ids: asked.append(frozenset(ids)) or {}
    )
    slurm = ExporterSlurm({})
    for ids in ({1, 2}, {2, 1}, {1, 2, 3}):
        slurm.past_jobs(ids)
    assert asked == [{1, 2}, {1, 2, 3}]


def test_the_watcher_and_nodes_beside_the_runs(fleet: Path) -> None:
    beat = WatchHeartbeat(
        pass_time=NOW - 40, host="login1", act=True, runs=1, open_runs=1, sightings=0
    )
    heartbeat_path(fleet).parent.mkdir()
    replace_text(heartbeat_path(fleet), beat.model_dump_json())
    exporter, _ = exporter_of(fleet)
    found = values(exporter.samples(NOW))
    assert found["hpctrain_watch_timestamp_seconds",] == NOW - 40
    assert found["hpctrain_suspect_nodes",] == 0


# -- from inside a job -----------------------------------------------------------------------------


def test_a_job_knows_its_own_state_without_slurm(
    planned: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    environment = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "gpu[01-02]",
        "SLURM_JOB_ACCOUNT": "llm",
    }
    inside = AttemptExporter(planned, environment).samples(NOW)
    outside, _ = exporter_of(planned.layout.directory.parent, job_of(planned))
    both = [one for one in outside.samples(NOW) if one.family.subject == "run"]
    # the disk is everybody's
    from_job, from_outside = (
        [str(one) for one in samples if one.family.name != "hpctrain_run_disk_free_bytes"]
        for samples in (inside, both)
    )
    assert from_job == from_outside, "one collector"


def test_a_job_whose_directory_is_away_has_no_samples(planned: RunFiles) -> None:
    source = AttemptExporter(planned, {"SLURM_JOB_ID": "1"})
    shutil.rmtree(planned.layout.directory)
    assert source.samples(NOW) == []


# -- outlets -------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    opened = MetricsServer("127.0.0.1", 0)
    yield opened
    opened.close()


def scraped(server: MetricsServer, accept: str) -> tuple[str, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accept}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_scrape_gets_the_last_pass(server: MetricsServer) -> None:
    for count in (1, 2):
        server.replace([own_sample("hpctrain_exporter_runs", count)])
        kind, text = scraped(server, "application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert f"hpctrain_exporter_runs {count}.0\n" in text and text.endswith("# EOF\n")
    kind, text = scraped(server, "text/plain")
    assert kind.startswith("text/plain") and "# EOF" not in text


def test_a_taken_port_is_one_error(server: MetricsServer) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        MetricsServer("127.0.0.1", server.port)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9") == ("127.0.0.1", 9)
    assert parse_address(":9847") == ("", 9847)
    assert parse_address("[::1]:9847") == ("::1", 9847)
    for text in ("", "9847", "host:", "host:http", "host:70000"):
        with pytest.raises(UsageError, match="is no address"):
            parse_address(text)


def test_the_text_file_is_readable_by_others_and_goes_away(tmp_path: Path) -> None:
    abandoned, foreign = tmp_path / "hpctrain-old-1a2b.prom", tmp_path / "other.prom"
    for path in (abandoned, foreign):
        path.write_text("")
    file = Textfile(tmp_path, "gpt-1a2b")
    file.replace([own_sample("hpctrain_exporter_runs", 1)])
    assert file.path.name == "hpctrain-gpt-1a2b.prom"
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o644
    assert "hpctrain_exporter_runs 1.0" in file.path.read_text()
    file.remove_abandoned(now=file.path.stat().st_mtime + 3600)
    assert sorted(tmp_path.iterdir()) == [file.path, foreign]
    file.remove()
    assert sorted(tmp_path.iterdir()) == [foreign]


def test_an_endpoint_is_found_as_long_as_it_is_open(planned: RunFiles) -> None:
    run = planned.layout
    shared = run.directory.parent / ".file_sd" / f"{run.run_id}.json"
    with published_endpoint(run, "gpu01:9400"):
        for path in (run.metrics_endpoint, shared):
            assert path.read_text() == '[{"targets": ["gpu01:9400"], "labels": {}}]'
    assert not run.metrics_endpoint.exists() and not shared.exists()


# -- the command ---------------------------------------------------------------------------------


def test_once_prints_all_runs(fleet: Path) -> None:
    outcome = hpctrain("exporter", "--runs", str(fleet), "--once")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.endswith("# EOF\n")
    assert 'hpctrain_run_step{run="gpt-0005"} 2.0' in outcome.stdout


def test_asking_more_often_than_the_site_allows_is_refused(fleet: Path) -> None:
    outcome = hpctrain("exporter", "--runs", str(fleet), "--once", "--every", "2s")
    assert outcome.exit_code == 2 and "too often for this site" in outcome.stderr
