"""A sweep on the real Slurm: two lanes, a requeue in one, a crash while it is submitted."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, SPEC, Rehearsal, Stage, profile_text

from hpctrain.base.errors import RefusedPlanError
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.runs.state import RunState
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import SubmittedJob
from hpctrain.trials.sweep import submit_sweep
from hpctrain.trials.sweep_plans import SweepRequest, plan_sweep
from hpctrain.trials.sweep_table import SweepTable, sweep_table
from tests.rig.stand_in.interpreter import write_stand_in_interpreter

GRID = ("batch.global=8,7", "environment.variables.TRIAL=good,late,bad,last")
SHORT = ("budget.steps=12", "checkpoint.every_steps=4", "supervise.budgets.crash=0")
# Ranks of `good` wait for a word before they train, those of `bad` cannot start.
_TRAINER = """\
#!/bin/sh
if [ "$2" = hpctrain.train ]; then
    [ "$TRIAL" != bad ] || {{ echo "no such data" >&2; exit 3; }}
    [ "$TRIAL" != good ] || until [ -e {go} ]; do sleep 0.1; done
fi
exec {stand_in} "$@"
"""


class DiesAfterSbatch(SlurmClient):
    """The client of a person whose session ends when the second job was just accepted."""

    calls = 0

    def submit(
        self,
        script: Path | str,
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        job = super().submit(script, extra_args, variables=variables)
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return job


@pytest.fixture
def request_(stage: Stage) -> SweepRequest:
    stand_in = write_stand_in_interpreter(stage.directory / "stand-in", step_seconds=0.05)
    trainer = stage.directory / "trainer"
    words = {"go": stage.directory / "go", "stand_in": stand_in}
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    trainer.write_text(_TRAINER.format(**quoted))
    trainer.chmod(0o755)
    spec, site = stage.directory / "rehearsal.yaml", stage.directory / "profile.yaml"
    spec.write_text(SPEC)
    site.write_text(profile_text(stage.sandbox.shape, str(trainer)))
    return SweepRequest(spec, str(site), GRID, (*SHORT, "name=gpt"), at_a_time=2)


def runs_of(stage: Stage) -> Path:
    """A directory of its own: other tests share the stage."""
    return stage.directory / "swept"


def wait_for(reached: Callable[[], bool], told: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, told()
        time.sleep(0.3)


def test_two_lanes_a_requeue_a_crash_of_the_client(stage: Stage, request_: SweepRequest) -> None:
    with pytest.raises(RefusedPlanError, match="global batch 7"):
        plan_sweep(request_, runs_of(stage))
    assert not runs_of(stage).exists(), "nothing is written while a point is refused"
    wanted = SweepRequest(**{**vars(request_), "skip_refused": True})
    dying = DiesAfterSbatch({**os.environ, **stage.sandbox.environment()}, PATIENCE_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        submit_sweep(plan_sweep(wanted, runs_of(stage)), dying, 2)
    done = submit_sweep(plan_sweep(wanted, runs_of(stage)), stage.slurm)
    assert (done.submitted, done.new) == (4, 2)
    runs = {
        point.values[1]: Rehearsal(stage.sandbox, stage.slurm, find_run(runs_of(stage), run_id), 0)
        for point in done.record.points
        if (run_id := point.run_id) is not None
    }
    names = [job.name for job in stage.slurm.jobs_of_users({os.getuid()}).values()]
    assert all(names.count(one.run.run_id) == 1 for one in runs.values()), names

    def table() -> SweepTable:
        return sweep_table(done.layout, stage.slurm)

    # The first lane: `good`, then `bad`. A preemption of `good` lets `bad` in no sooner.
    good, bad = runs["good"], runs["bad"]
    good.wait(lambda: bool(good.events(EventKind.LAUNCH_STARTED)), "launched")
    row = bad.status()
    assert row.state is RunState.PENDING and "ependency" in row.reason
    good.urgent_job(nodes=good.nodes())
    good.wait(lambda: good.attempts == 2, "started again")
    assert not bad.events(EventKind.ATTEMPT_STARTED)
    (stage.directory / "go").touch()
    wait_for(lambda: all(row.state in OVER for row in table().rows), table)
    ended = [event.time for event in good.events(EventKind.LAUNCH_ENDED)][-1]
    assert bad.events(EventKind.ATTEMPT_STARTED)[0].time > ended
    late, last = runs["late"], runs["last"]
    ended = [event.time for event in late.events(EventKind.LAUNCH_ENDED)][-1]
    assert last.events(EventKind.ATTEMPT_STARTED)[0].time > ended, "the second lane"

    found = table()
    states = {row.values: row.state for row in found.rows}
    assert states == {
        ("8", "good"): "DONE",
        ("8", "late"): "DONE",
        ("8", "bad"): "FAILED",
        ("8", "last"): "DONE",
        **{("7", word): "REFUSED" for word in ("good", "late", "bad", "last")},
    }, "\n".join(one.logs() for one in runs.values())
    losses = [row.loss for row in found.rows]
    assert losses[:3] == sorted(one for one in losses if one is not None)
    assert found.gpu_hours > 0
    again = submit_sweep(plan_sweep(wanted, runs_of(stage)), stage.slurm)
    assert again.new == 0, "what is over is not submitted again"


OVER = ("DONE", "FAILED", "REFUSED")
