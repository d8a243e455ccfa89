"""A node that computes slowly is found before training: replaced, or reported, as the spec says."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage

from hpctrain.diagnose.command import diagnosis_lines
from hpctrain.diagnose.of_run import diagnose
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.node_record import EvidenceKind, NodeLedger
from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks
from hpctrain.runs.describe import describe, story_lines

pytestmark = pytest.mark.nightly("all ranks measure themselves with torch, several launches")

# Ranks share two cores with other tests, where one may get a tenth of another's time. The
# products of the slow one begin late, which makes them a thousand times slower.
CHECK = ("supervise.speed_check.slow_gpu=0.05", "supervise.speed_check.slow_link=0.001")


def on_slow_node(stage: Stage, mode: str, *overrides: str) -> tuple[Rehearsal, str]:
    """A job with a slow node: the second one, which Slurm gives to the first job on idle nodes."""
    slow = stage.sandbox.shape.node_names[1]
    planned = [PlannedFault(epoch=0, rank=-1, do="compute_slowly", text=slow)]
    options = (f"supervise.speed_check.mode={mode}", *CHECK, *overrides)
    return stage.start(f"name=slow-{mode}-{len(overrides)}", *options, planned=planned), slow


def checks(rehearsal: Rehearsal) -> list[SpeedCheck]:
    return read_speed_checks(rehearsal.run.layout)


def launches(rehearsal: Rehearsal) -> list[tuple[str | None, Any]]:
    events = rehearsal.events(EventKind.SPEED_CHECKED)
    return [(event.action, event.nodes) for event in events]


def test_a_spare_takes_the_place_of_a_slow_node(stage: Stage, reference: RunFiles) -> None:
    rehearsal, slow = on_slow_node(stage, "exclude", "resources.spare_nodes=1")
    rehearsal.assert_done_exactly(reference)
    assert slow in rehearsal.nodes(), "the test needs this node"
    assert rehearsal.attempts == 1, "no queue for a node that has a spare"
    assert rehearsal.causes == ["node_failure", "done"], rehearsal.logs()
    first, second = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert slow in str(first.nodes) and slow not in str(second.nodes), rehearsal.logs()
    end = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert end.node == slow and "slow before training: rank 1" in (end.reason or ""), end
    assert launches(rehearsal) == [("leave", slow), ("report", None)], rehearsal.logs()
    assert [check.leaves for check in checks(rehearsal)] == [True, False]
    assert min(row.step for row in rehearsal.rows(2)) == 1 and not rehearsal.rows(1)
    evidence = NodeLedger(rehearsal.run.layout.directory.parent / "nodes.jsonl").read()
    own = {(one.node, one.kind) for one in evidence if one.run_id == rehearsal.run.run_id}
    assert own == {(slow, EvidenceKind.SLOW_CHECKED)}


@pytest.mark.variant("test_a_spare_takes_the_place_of_a_slow_node")
def test_a_slow_node_is_reported_and_training_goes_on(stage: Stage, reference: RunFiles) -> None:
    rehearsal, slow = on_slow_node(stage, "report")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["done"], rehearsal.logs()
    assert launches(rehearsal) == [("report", slow)]
    (check,) = checks(rehearsal)
    assert [part.nodes for part in check.slow if part.certain] == [(slow,)] and not check.leaves
    lines = [
        *story_lines(describe(rehearsal.run)),
        *diagnosis_lines(diagnose(rehearsal.run, price=False)),
    ]
    text = "\n".join(lines)
    assert f"slow              rank 1 on {slow}: matrix products at" in text, text
    assert "Was a GPU or a link slow before training? Yes: 1 part was slow" in text, text


@pytest.mark.variant("test_a_spare_takes_the_place_of_a_slow_node")
@pytest.mark.parametrize("mode", ["exclude"])
def test_without_a_spare_the_job_is_requeued_away_from_it(
    stage: Stage, reference: RunFiles, mode: str
) -> None:
    rehearsal, slow = on_slow_node(stage, mode)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 2, rehearsal.logs()
    assert slow in rehearsal.nodes(0) and slow not in rehearsal.nodes(1)
    assert rehearsal.causes == ["node_failure", "done"], rehearsal.logs()
    assert launches(rehearsal) == [("leave", slow), ("report", None)]
