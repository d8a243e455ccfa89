"""Runs whose jobs other clusters have: each is asked once, by its name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import SUBMITTED, fabricate, said

from hpctrain.base.errors import UsageError
from hpctrain.job.job_queries import find_jobs
from hpctrain.records.find import all_runs
from hpctrain.records.ledger import EventKind
from hpctrain.runs.control import cancel, hold
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

FAR = (
    said(EventKind.RENDERED, script_sha256="00", slurm_cluster="far"),
    said(EventKind.SUBMITTING, cluster="far", slurm_cluster="far"),
    said(EventKind.SUBMITTED, job_id=1, cluster="far", slurm_cluster="far"),
)


class Counted(FakeSlurm):
    """A Slurm of a cluster; counts queries for jobs, and fails without an answer if `away`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.settings = {**self.settings, "ClusterName": name}
        self.asked = 0

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        self.asked += 1
        return super().jobs_of_users(user_ids)

    def have(self, job_id: int, name: str) -> None:
        place = dict(name=name, comment=f"hpctrain:{name}", cluster=self.cluster_name())
        self.records[job_id] = JobRecord(job_id, state=JobState.PENDING, **place)  # type: ignore[arg-type]


@pytest.fixture
def clusters(tmp_path: Path) -> tuple[Counted, Counted]:
    """`near`, where commands are typed, has job 1 of one run, and `far` job 1 of two others."""
    near, far = Counted("near"), Counted("far")
    near.clusters["far"] = far
    fabricate(tmp_path, "here-1", SUBMITTED)
    near.have(1, "here-1")
    for number, name in enumerate(("far-1", "far-2"), 1):
        entries = [(kind, dict(fields)) for kind, fields in FAR]
        entries[-1][1]["job_id"] = number
        fabricate(tmp_path, name, entries)
        far.have(number, name)
    return near, far


def client(slurm: FakeSlurm) -> SlurmClient:
    return cast(SlurmClient, slurm)


def test_one_query_for_each_cluster(clusters: tuple[Counted, Counted], tmp_path: Path) -> None:
    near, far = clusters
    rows = {row.run_id: row for row in statuses(all_runs(tmp_path), client(near))}
    assert {row.state for row in rows.values()} == {RunState.PENDING}
    assert [rows[name].job_id for name in ("here-1", "far-1", "far-2")] == [1, 1, 2]
    assert (near.asked, far.asked) == (1, 1)
    seen = watch(tmp_path, client(near))
    assert (seen.complete, seen.elsewhere, seen.open_runs) == (True, 0, 3)


def test_a_cluster_that_does_not_answer_hides_its_own_runs_only(
    clusters: tuple[Counted, Counted], tmp_path: Path
) -> None:
    near, far = clusters
    far.away = True
    found = find_jobs(all_runs(tmp_path), client(near))
    assert {name: jobs.answered for name, jobs in found.items()} == {
        "here-1": True,
        "far-1": False,
        "far-2": False,
    }


def test_commands_act_on_the_cluster_that_has_the_job(
    clusters: tuple[Counted, Counted], tmp_path: Path
) -> None:
    near, far = clusters
    runs = {run.run_id: run for run in all_runs(tmp_path)}
    assert hold(runs["far-2"], client(near)).changed
    assert far.records[2].reason == "JobHeldUser"
    cancel(runs["far-1"], client(near))
    assert far.records[1].state is JobState.CANCELLED, "the job 1 of that cluster"
    assert near.records[1].state is JobState.PENDING, "and no other one"


def test_without_a_name_commands_are_refused_elsewhere(tmp_path: Path) -> None:
    near = Counted("near")
    entries = [(kind, {**fields, "slurm_cluster": None}) for kind, fields in FAR]
    run = fabricate(tmp_path, "far-1", entries)
    near.have(1, "other")
    with pytest.raises(UsageError, match="on cluster `far`") as refused:
        cancel(run, client(near))
    assert "slurm.cluster" in str(refused.value.hint)
    assert replace(near.records[1]).state is JobState.PENDING
