"""Where the nodes of a job are: asked once, only where something depends on it, and recorded."""

from __future__ import annotations

import pytest
from supervise_facts import config
from supervise_stage import Stage, StageSlurm

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.records.ledger import EventKind
from hpctrain.records.supervise_config import GroupSettings, TopologySettings

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
