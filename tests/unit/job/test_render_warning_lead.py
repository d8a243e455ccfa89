"""How early Slurm warns: the longest that a stop may take, and never more than half of the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_job import planned_job
from specimen_scripts import PROFILE, ROOT, SPEC, render, spec_with

from hpctrain.base.units import Bandwidth, Duration
from hpctrain.job.prepare import load_knowledge
from hpctrain.job.render.warning_lead import WarningLead, short_grace, warning_lead
from hpctrain.plan.forecast.documents import RunFacts
from hpctrain.plan.forecast.rates import checkpoint_cost
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.profile.slurm import PreemptionProfile
from hpctrain.spec.run import RunSpec

PLAN = make_plan(SPEC, PROFILE)
DAY = Duration(86400)
SLOWEST_BYTES_PER_SECOND = min(float(one.write_bandwidth) for one in PROFILE.filesystems)


def lead(spec: RunSpec = SPEC, limit: Duration = DAY, **changes: object) -> WarningLead:
    resources = spec.resources.model_copy(update={"walltime": limit})
    limited = spec.model_copy(update={"resources": resources})
    return warning_lead(TrainingJob(limited, PROFILE, PLAN.model_copy(update=changes)))


@pytest.mark.parametrize(
    ("step_seconds", "running_seconds"),
    [(None, 60), (0.1, 60), (30.0, 60), (35.0, 70), (400.0, 800)],
)
def test_a_long_step_has_its_time_twice(step_seconds: float | None, running_seconds: float) -> None:
    """175B takes 35 s, long contexts minutes; the plan may be too fast by half."""
    found = lead(step_seconds=step_seconds)
    assert found.running_seconds == running_seconds
    assert found.seconds == round((60 + running_seconds) / 10) * 10
    assert not found.cut


def test_fewer_nodes_take_longer_for_a_step() -> None:
    nodes = PLAN.nodes.model_copy(update={"nodes": 8})
    fewer = lead(spec_with(resources={"min_nodes": 2}), step_seconds=50.0, nodes=nodes)
    assert fewer.running_seconds == 400


def test_a_save_under_way_and_the_last_one() -> None:
    """In fp32 16 bytes per parameter that learns; 2 s and the copy, then the slowest disk."""
    parameters = round(100 * SLOWEST_BYTES_PER_SECOND / 16)
    copy_seconds = 100 * SLOWEST_BYTES_PER_SECOND / PLAN.layout.world_size / 10e9
    found = lead(parameters=parameters, step_seconds=None)
    assert found.saving_seconds == pytest.approx(2 * (2 + copy_seconds + 100), rel=1e-6)
    assert found.seconds == 330


def test_fewer_nodes_save_through_fewer_cards() -> None:
    """A shared file system of 100 GB/s is not what two nodes with 1.25 GB/s each write with."""
    shared = PROFILE.filesystems[0].model_copy(
        update={"kind": "nfs", "write_bandwidth": Bandwidth(100e9)}
    )
    profile = PROFILE.model_copy(update={"filesystems": (shared,)})
    cards = profile.network.nics_per_node * float(profile.network.nic_bandwidth)
    plan = PLAN.model_copy(update={"parameters": round(100 * 2 * cards / 16), "step_seconds": None})
    assert plan.nodes.nodes == 2
    fewer = spec_with(resources={"min_nodes": 1})
    both, one = (
        warning_lead(TrainingJob(spec, profile, plan)).saving_seconds for spec in (SPEC, fewer)
    )
    assert both == pytest.approx(2 * 100, rel=0.1)  # and the copy
    assert one == pytest.approx(2 * 200, rel=0.1)


def test_the_forecast_and_the_script_have_one_time_for_a_save() -> None:
    facts = RunFacts(
        step_seconds=1.0,
        gpus=PLAN.layout.world_size,
        nodes=PLAN.nodes.nodes,
        parameters=PLAN.learned,
        tokens_per_step=1,
        train_steps=1,
    )
    once = checkpoint_cost(SPEC, PROFILE, facts).last_save_seconds
    assert lead().saving_seconds == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("limit", "seconds", "cut"), [(86400, 8120, False), (3600, 1800, True), (1, 1, True)]
)
def test_half_of_the_time_is_for_training(limit: int, seconds: int, cut: bool) -> None:
    found = lead(limit=Duration(limit), step_seconds=4030.0)
    assert (found.seconds, found.cut) == (seconds, cut)
    assert found.sentence.endswith("; cut to half of the limit") is cut


def test_a_large_model() -> None:
    """174.6e9 parameters x 14 bytes at 100 GB/s are 24.4 s each, and 2.5 s for the copy; a step
    takes 37 s as planned, and there is room for two."""
    spec = load_run_spec(ROOT / "examples/gpt175b.yaml").document
    profile = load_profile(find_profile("a100x64"))
    job = planned_job(spec, profile.document, load_knowledge(profile))
    assert job.plan.step_seconds == pytest.approx(37, abs=1)
    found = warning_lead(job)
    assert found.running_seconds == pytest.approx(2 * job.plan.step_seconds)
    assert found.seconds == 190


def test_slurm_takes_no_more_than_65535_seconds() -> None:
    assert lead(limit=Duration(10**7), step_seconds=1e6).seconds == 65535


def test_the_script_says_what_it_is_made_of() -> None:
    script = render()
    assert "#SBATCH --signal=B:USR1@120\n" in script
    (words,) = (part for part in script.split("\n\n") if "USR1 comes" in part)
    assert "USR1 comes 120 s before the time limit: 60 s for Slurm, 60 s for" in words
    assert "trap '' USR1" in words


@pytest.mark.parametrize(
    ("mode", "grace", "words"),
    [
        ("requeue", 30, "gives preempted jobs 30 s, and a step (20 s) with a save (100 s) takes"),
        ("cancel", 119, "gives preempted jobs 119 s"),
        ("requeue", 0, "gives preempted jobs no grace"),
        ("requeue", 121, None),
        ("off", 0, None),
    ],
)
def test_a_grace_that_holds_no_step_and_save_is_named(
    mode: str, grace: int, words: str | None
) -> None:
    parameters = round(97 * SLOWEST_BYTES_PER_SECOND / 16)
    plan = PLAN.model_copy(update=dict(parameters=parameters, step_seconds=20.0))
    partition = planned_job(SPEC, PROFILE).partition
    preemption = PreemptionProfile.model_validate({"mode": mode, "grace": f"{grace}s"})
    partition = partition.model_copy(update={"preemption": preemption})
    slurm = PROFILE.slurm.model_copy(update={"partitions": (partition,)})
    job = TrainingJob(SPEC, PROFILE.model_copy(update={"slurm": slurm}), plan)
    found = short_grace(job)
    assert (found is None) if words is None else (words in str(found))
    untimed = plan.model_copy(update={"step_seconds": None})
    assert short_grace(replace(job, plan=untimed)) is None
