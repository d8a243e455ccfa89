"""What follows from the three documents of a job together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned_job import planned_job
from specimens import cluster, run_spec

from hpctrain.base.errors import LimitError
from hpctrain.base.units import Duration
from hpctrain.plan.job import Job

JOB = planned_job(run_spec(gpus=8, batch=32), cluster())


def asking(**resources: object) -> Job:
    own = JOB.spec.resources.model_copy(update=resources)
    return replace(JOB, spec=JOB.spec.model_copy(update={"resources": own}))


def test_a_partition_that_is_not_there_is_refused() -> None:
    assert asking(partition=JOB.partition.name).partition == JOB.partition
    with pytest.raises(LimitError, match="has no partition nowhere") as caught:
        _ = asking(partition="nowhere").partition
    assert [one.field for one in caught.value.refusals] == ["resources.partition"]


@pytest.mark.parametrize(
    ("spec", "partition", "site", "hours"),
    [(1, 2, 3, 1), (None, 2, 3, 2), (None, 3, 2, 2), (None, None, 3, 3), (None, None, None, 24)],
)
def test_the_time_limit_is_the_spec_s_or_the_tightest(
    spec: int | None, partition: int | None, site: int | None, hours: int
) -> None:
    def limit(count: int | None) -> Duration | None:
        return None if count is None else Duration(count * 3600)

    profile, own = JOB.profile, JOB.partition
    own = own.model_copy(update={"max_walltime": limit(partition)})
    slurm = profile.slurm.model_copy(update={"partitions": (own,)})
    limits = profile.limits.model_copy(update={"max_walltime": limit(site)})
    changed = profile.model_copy(update={"slurm": slurm, "limits": limits})
    assert replace(asking(walltime=limit(spec)), profile=changed).walltime == hours * 3600
