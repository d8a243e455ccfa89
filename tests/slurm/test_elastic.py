"""A run that may shrink goes on with the nodes that are left, at once and in the same job."""

from __future__ import annotations

import math

import pytest
from rehearsal import STEPS, Stage, held

from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics
from hpctrain.runs.state import RunState
from hpctrain.sandbox import faults


@pytest.mark.stand_in
def test_a_run_goes_on_with_fewer_nodes(stage: Stage) -> None:
    shrinking = ("parallel.pp=1", "resources.min_nodes=1")
    rehearsal = stage.start("name=elastic", *shrinking, planned=held(1, 14))
    rehearsal.wait_for_checkpoint(10)
    batch_node, other = rehearsal.nodes()
    faults.crash_node(stage.sandbox, other)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    assert rehearsal.attempts == 1, "no queue for a run that may shrink"
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [start.launch_nodes for start in starts] == [2, 1], rehearsal.logs()
    assert starts[1].nodes == batch_node
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "node_failure", rehearsal.logs()
    assert starts[1].resume_step == ended.checkpoint_step >= 10
    rows = lineage(read_metrics(rehearsal.run.layout))
    assert [row.step for row in rows] == [*range(1, STEPS + 1)]
    # the same samples for each step, whatever the number of nodes: the batch is kept
    batch = rows[0].consumed_samples
    assert [row.consumed_samples for row in rows] == [batch * row.step for row in rows]
    assert all(row.loss is not None and math.isfinite(row.loss) for row in rows)
