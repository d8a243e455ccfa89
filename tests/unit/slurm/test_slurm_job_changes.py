"""What a script asks of Slurm beside what its job is."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from hpctrain.slurm import JobRecord
from hpctrain.slurm.job_changes import job_changes, requested_job
from hpctrain.slurm.records import JobTerms

SCRIPT = """#!/bin/bash
# a comment
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=Mine --qos=normal  # two on one line
#SBATCH --comment="hpctrain:run 1"
#SBATCH --job-name=run-1
#SBATCH --requeue

true
#SBATCH --nodes=99
"""
ASKED = requested_job(SCRIPT)
MADE = replace(
    ASKED, job_id=7, account="mine", terms=replace(ASKED.terms, cpu_count=1024), source="squeue"
)
TERMS = {field.name for field in fields(JobTerms)}


def made(**changes: object) -> JobRecord:
    """The job with changes, of its terms as well."""
    terms = {name: value for name, value in changes.items() if name in TERMS}
    others = {name: value for name, value in changes.items() if name not in TERMS}
    return replace(MADE, terms=replace(MADE.terms, **terms), **others)  # type: ignore[arg-type]


def test_what_a_script_asks_for() -> None:
    asked = requested_job(SCRIPT, ["--chdir=/runs/1", "--partition=other"])
    assert (asked.partition, asked.account, asked.node_count) == ("other", "Mine", 4)
    assert asked.terms == JobTerms("normal", None, 512, 8)
    assert (asked.time_limit_seconds, asked.requeue) == (86400.0, True)
    assert (asked.comment, asked.name) == ("hpctrain:run 1", "run-1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),
        ("90:30", 5430.0),
        ("1:30:00", 5400.0),
        ("2-0", 172800.0),
        ("1-12:30", 131400.0),
        ("UNLIMITED", math.inf),
        ("soon", None),
    ],
)
def test_times_as_sbatch_reads_them(text: str, seconds: float | None) -> None:
    assert requested_job(f"#SBATCH --time={text}\n").time_limit_seconds == seconds


def test_a_job_as_it_was_asked_for() -> None:
    asked = replace(requested_job(SCRIPT), comment="hpctrain:run-1")
    assert job_changes(asked, replace(MADE, comment="site hpctrain:run-1")) == ()
    listed = replace(asked, partition="gpu,long", time_limit_seconds=86399.0)
    assert job_changes(listed, replace(MADE, comment=asked.comment)) == ()


@pytest.mark.parametrize("unknown", ["qos", "account", "gpus_per_node", "cpu_count", "requeue"])
def test_what_slurm_does_not_report_is_not_compared(unknown: str) -> None:
    assert job_changes(requested_job(SCRIPT), made(**{unknown: None})) == ()


def test_what_was_not_asked_for_is_the_sites_to_choose() -> None:
    asked = JobRecord(0)
    assert job_changes(asked, MADE) == ()
    (bound,) = job_changes(asked, made(reservation="maint"))
    assert str(bound) == "Slurm changed the reservation: asked none, is maint"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"partition": "gpu-long"}, "partition: asked gpu, is gpu-long"),
        ({"qos": "low"}, "QOS: asked normal, is low"),
        ({"account": "other"}, "account: asked mine, is other"),
        ({"time_limit_seconds": 14400.0}, "time limit: asked 24 h, is 4 h"),
        ({"time_limit_seconds": math.inf}, "time limit: asked 24 h, is none"),
        ({"node_count": 2}, "number of nodes: asked 4, is 2"),
        ({"gpus_per_node": 0}, "GPUs per node: asked 8, is 0"),
        ({"cpu_count": 256}, "CPUs: asked 512, is 256"),
        ({"comment": None}, "comment: asked hpctrain:run 1, is none"),
        ({"name": "other"}, "job name: asked run-1, is other"),
        ({"requeue": False}, "requeue flag: asked on, is off"),
    ],
)
def test_each_change_is_a_sentence(changes: dict[str, object], sentence: str) -> None:
    found = job_changes(requested_job(SCRIPT), made(**changes))
    assert [str(one) for one in found] == [f"Slurm changed the {sentence}"]


def test_options_that_count_cores_otherwise() -> None:
    """Neither CPUs nor a range of nodes are compared then."""
    for line in ("#SBATCH --hint=nomultithread", "#SBATCH --threads-per-core=1"):
        assert requested_job(f"{line}\n{SCRIPT}").terms.cpu_count is None
    assert requested_job("#SBATCH --nodes=2-4 --ntasks-per-node=2\n").node_count is None
