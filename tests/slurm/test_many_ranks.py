"""64 ranks on 8 nodes below the script of the 175B example; one node is lost. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import KILL_WAIT_SECONDS, own_sandbox
from stand_in_runs import shape_of, start_stand_in, wrong_losses
from trainer_contract import assert_done

from hpctrain.records.ledger import EventKind
from hpctrain.runs.state import RunState
from hpctrain.sandbox.faults import crash_node, has_rebooted, restart_node
from hpctrain.sandbox.repair import return_nodes

pytestmark = pytest.mark.nightly("64 ranks on 8 nodes")

STEPS, EVERY = 300, 50


# tests/unit/train/test_stand_in.py has the stand-in in every run.
@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_64_ranks_lose_a_node_and_no_step(tmp_path: Path) -> None:
    shape = replace(shape_of(8), kill_wait_seconds=KILL_WAIT_SECONDS, slurmd_timeout_seconds=20)
    overrides = (
        "resources.gpus=64",
        "budget.tokens=null",
        f"budget.steps={STEPS}",
        f"checkpoint.every_steps={EVERY}",
        "checkpoint.keep=20",
    )
    with own_sandbox(shape) as box:
        rehearsal, _ = start_stand_in(box, tmp_path, "gpt175b", overrides, step_seconds=0.1)
        rehearsal.wait_for_checkpoint(EVERY)
        crash_node(box, "gpu5")
        rehearsal.wait(lambda: bool(rehearsal.causes), "judged")
        restart_node(box, "gpu5", rebooted=True)
        rehearsal.wait(lambda: has_rebooted(box, "gpu5"), "back")
        return_nodes(box, ("gpu5",))
        row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    ended, _ = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert (ended.cause, ended.node) == ("node_failure", "gpu5")
    assert_done(rehearsal.run.layout, STEPS, epoch=2)
    assert wrong_losses(rehearsal) == (STEPS, [])
