"""Step ids of lost attempts are used up before a step is started that matters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
from launch_evidence import config
from supervise_stage import Stage, StageSlurm

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.supervise_config import GroupSettings, TopologySettings
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.supervise.context import AttemptContext, JobAttempt
from hpctrain.supervise.evidence import slurm_facts
from hpctrain.supervise.evidence.probe import STEP_NAME
from hpctrain.supervise.evidence.slurm_facts import use_up_step_ids
from hpctrain.supervise.srun_process import Signals

# Gives each step the next id, as Slurm does.
ACTOR = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
[ -e refuses ] && exit 1
wc -l < calls | { read number; echo $((number - 1)); }
"""


class Theatre:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = RunLayout(directory / "r1")
        self.layout.create()
        self.srun = directory / "srun"
        self.srun.write_text(ACTOR)
        self.srun.chmod(0o755)
        self.context = AttemptContext(
            run_layout=self.layout,
            config=config(),
            attempt=JobAttempt(5, 2, "n[0-1]", "n0"),
            ledger=Ledger(self.layout.ledger),
            slurm=cast(SlurmClient, FakeSlurm()),
            signals=Signals(),
        )

    def lost(self, restart_count: int, newest_step: int, job_id: int = 5) -> None:
        """An attempt that left no word, and logs of its ranks up to this step."""
        logs = self.layout.attempt_logs(job_id, restart_count)
        logs.mkdir(parents=True)
        for step in range(newest_step + 1):
            (logs / f"step{step}-rank0000.log").touch()
        self.context.ledger.append(
            EventKind.ATTEMPT_LOST, job_id=job_id, restart_count=restart_count
        )

    def use_up(self) -> list[str]:
        environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "64"}
        use_up_step_ids(self.context, environment, [str(self.srun)])
        calls = self.directory / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def theatre(tmp_path: Path) -> Theatre:
    return Theatre(tmp_path)


def test_without_lost_attempts_nothing_is_run(theatre: Theatre) -> None:
    assert theatre.use_up() == []
    theatre.lost(0, newest_step=3, job_id=4)  # steps of another job have ids of their own
    theatre.lost(1, newest_step=-1)  # it never started a rank
    assert theatre.use_up() == []


def test_the_ids_of_all_lost_attempts_and_of_a_probe_behind_them(theatre: Theatre) -> None:
    theatre.lost(0, newest_step=2)
    theatre.lost(1, newest_step=0)
    calls = theatre.use_up()
    assert len(calls) == 4, "0, 1, 2, and 3 for a probe"
    for word in ("--jobid=5", f"--job-name={STEP_NAME}", "--overlap", "--nodelist=n0"):
        assert word in calls[0].split()


def test_a_slurm_that_starts_no_step_does_not_hold_up_the_run(
    theatre: Theatre, capsys: pytest.CaptureFixture[str]
) -> None:
    theatre.lost(0, newest_step=0)
    (theatre.directory / "refuses").touch()
    assert len(theatre.use_up()) == 1
    assert "could not be used up" in capsys.readouterr().err


def test_it_takes_a_minute_at_most(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_facts, "_SECONDS", 0.0)
    theatre.lost(0, newest_step=9)
    assert theatre.use_up() == []


# Where the nodes of a job are: asked once, only where something depends on it, and recorded.


TOPOLOGY = TopologySettings(
    plugin="tree",
    gpus_per_node=1,
    groups=(GroupSettings(axis="dp", stride=1, ranks=2),),
    step_seconds=1.0,
    scattered_step_seconds=1.5,
)


class Counting(StageSlurm):
    """Counts how often it is asked where nodes are; does not answer where `silent`."""

    asked, silent = 0, False

    def leaves(self) -> dict[str, str]:
        self.asked += 1
        if self.silent:
            raise SlurmUnreachableError("Unable to contact slurm controller")
        return super().leaves()


@pytest.fixture
def two_nodes(stage: Stage) -> Stage:
    """A run on n0 and n1, which are under different leaves."""
    stage.slurm = Counting(stage.layout)
    stage.slurm.leaf_of = {"n0": "a", "n1": "b", "n2": "b"}
    stage.environment = {"SLURM_JOB_NODELIST": "n[0-1]"}
    stage.configure(config().model_copy(update={"topology": TOPOLOGY}))
    return stage


def asked(stage: Stage) -> int:
    assert isinstance(stage.slurm, Counting)
    return stage.slurm.asked


def test_groups_that_leave_their_leaf_are_recorded_once(two_nodes: Stage) -> None:
    assert two_nodes.play("save:20 crash", "done") == 0
    assert two_nodes.causes == ["crash", "done"]
    (event,) = two_nodes.events(EventKind.PLACED)
    assert event.groups_outside == 1
    assert event.reason is not None
    assert "1 of 1 groups of dp 2 leave their leaf switch" in event.reason
    assert "up to 1.5 s instead of 1 s" in event.reason
    assert event.evidence[0] == "nodes per leaf switch: a: 1, b: 1"
    assert asked(two_nodes) == 1, "one question for all launches of an attempt"


def test_a_controller_that_does_not_answer_delays_no_launch(two_nodes: Stage) -> None:
    assert isinstance(two_nodes.slurm, Counting)
    two_nodes.slurm.silent = True
    assert two_nodes.play("save:20 crash", "done") == 0
    assert (asked(two_nodes), two_nodes.events(EventKind.PLACED)) == (1, [])


@pytest.mark.parametrize(
    ("pattern", "questions"), [("node", 0), ("switch.switch.node", 1), ("block.node", 1)]
)
def test_nothing_is_asked_where_no_topology_is_in_force(
    two_nodes: Stage, pattern: str, questions: int
) -> None:
    two_nodes.environment["SLURM_TOPOLOGY_ADDR_PATTERN"] = pattern
    assert two_nodes.play("done") == 0
    assert asked(two_nodes) == len(two_nodes.events(EventKind.PLACED)) == questions


def test_nothing_is_asked_for_one_node(two_nodes: Stage) -> None:
    two_nodes.environment["SLURM_JOB_NODELIST"] = "n0"
    assert two_nodes.play("done") == 0
    assert asked(two_nodes) == 0


def test_nothing_is_asked_where_the_profile_has_no_plugin(two_nodes: Stage) -> None:
    two_nodes.configure(config())
    assert two_nodes.play("done") == 0
    assert asked(two_nodes) == 0
