"""How long a replica may take to leave, counted by hand."""

from __future__ import annotations

from hpctrain.base.units import Duration
from hpctrain.serve.plan.leaving import LeaveTimes, term_seconds
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile.slurm import PartitionProfile, PreemptionProfile

TIMES = LeaveTimes(notice_seconds=5.0, drain_seconds=40.0)


def partition(mode: str = "requeue", grace: float = 0.0) -> PartitionProfile:
    preemption = PreemptionProfile.model_validate({"mode": mode, "grace": f"{grace:g}s"})
    return PartitionProfile(name="train", preemption=preemption)


def test_the_warning_is_the_sum_of_the_parts_and_at_most_half_of_the_limit() -> None:
    assert TIMES.whole_seconds == 60.0
    assert TIMES.warning_seconds(3600.0) == 120
    assert "120 s before the time limit: 60 s for Slurm, 5 s until" in TIMES.warning_sentence(3600)
    assert TIMES.warning_seconds(100.0) == 50
    assert TIMES.warning_sentence(100.0).endswith("cut to half of the limit")


def test_a_job_takes_the_longer_of_grace_and_kill_wait() -> None:
    profile = load_profile(find_profile("sandbox")).document
    assert profile.slurm.kill_wait == Duration(5)
    assert term_seconds(profile, partition(grace=20.0)) == 20.0
    assert term_seconds(profile, partition(grace=2.0)) == 5.0
    assert term_seconds(profile, partition("off", 20.0)) == 5.0
