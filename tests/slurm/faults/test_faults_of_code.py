"""What no machine is to blame for: code, memory, numbers, ports."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import PlannedFault, Stage
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.stand_in

# torch 2.x, CUDACachingAllocator.cpp
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.20 GiB is free."
)


def test_a_mistake_of_the_user_stops_at_once(stage: Stage, survival: Survival) -> None:
    planned = (PlannedFault(epoch=0, rank=-1, do="import_nothing"),)
    rehearsal = stage.start("name=import", planned=planned)
    fault = Fault(23, "ModuleNotFoundError on all ranks at the start")
    survival.ended(
        rehearsal, fault, cause="user_error", action="stop", why="a_module_that_nobody_has"
    )
    assert len(rehearsal.causes) == 1, rehearsal.logs()


@pytest.mark.stand_in(False)  # the stand-in has no settings that a machine could lack
def test_a_wrong_setting_stops_at_once(stage: Stage, survival: Survival) -> None:
    """Found by the trainer itself, and no retry helps."""
    rehearsal = stage.start("name=mistake", "engine.implementation=transformer_engine")
    fault = Fault(23, "a setting that the machine cannot do")
    survival.ended(rehearsal, fault, cause="config_error", action="stop", why="transformer")
    assert len(rehearsal.causes) == 1, rehearsal.logs()


def test_the_same_failure_again_and_again_stops_with_the_reason(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    text = "index 50304 is out of bounds for dimension 0 with size 50304"
    planned = (PlannedFault(epoch=0, rank=1, step=5, do="fail", text=text),)
    rehearsal = stage.start("name=same", "supervise.failures_without_progress=2", planned=planned)
    fault = Fault(24, "rank 1 raises the same error at step 5 in each launch")
    survival.ended(rehearsal, fault, cause="crash", action="stop", why="2 failed launches")
    assert len(rehearsal.causes) == 2 and rehearsal.attempts == 1, rehearsal.logs()
    assert "out of bounds" in rehearsal.status().reason, rehearsal.logs()
    rehearsal.assert_same_so_far(reference)


@pytest.mark.variant("test_the_same_failure_again_and_again_stops_with_the_reason")
def test_out_of_memory_late_is_tried_once_more(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """Launch 1 had made progress, so launch 2 is free; launch 3 is the one retry."""
    planned = (
        PlannedFault(epoch=0, rank=-1, step=15, do="settle"),
        PlannedFault(epoch=0, rank=1, step=15, do="fail", text=OUT_OF_MEMORY),
    )
    rehearsal = stage.start("name=memory", planned=planned)
    fault = Fault(28, "CUDA out of memory at step 15, after a checkpoint of step 10")
    survival.recovered(rehearsal, fault, cause="gpu_oom", action="relaunch", epoch=1)
    fault = Fault(28, "the same at the same step, without a new checkpoint")
    survival.ended(rehearsal, fault, cause="gpu_oom", action="stop", why="without a new checkpoint")
    rehearsal.assert_same_so_far(reference)


def test_out_of_memory_at_once_is_not_tried_again(stage: Stage, survival: Survival) -> None:
    planned = (PlannedFault(epoch=0, rank=1, step=1, do="fail", text=OUT_OF_MEMORY),)
    rehearsal = stage.start("name=neverfits", planned=planned)
    fault = Fault(28, "CUDA out of memory in the first step")
    survival.ended(rehearsal, fault, cause="gpu_oom", action="stop", why="never fitted")
    assert len(rehearsal.causes) == 1, rehearsal.logs()


@pytest.mark.variant("test_the_same_failure_again_and_again_stops_with_the_reason")
def test_numbers_that_are_wrong_are_gone_around(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    """The batch of step 15 gives NaN wherever it is computed; the spec allows to leave it out."""
    planned = (PlannedFault(epoch=0, rank=-1, do="poison", samples=14 * 8),)
    own = Stage(stage.sandbox, tmp_path)  # with a ledger of nodes of its own
    rehearsal = own.start(
        "name=poison",
        "supervise.rollback.mode=act",
        "supervise.exclude_nodes=act",
        planned=planned,
    )
    fault = Fault(33, "the loss of the batch of step 15 is NaN")
    first = survival.recovered(rehearsal, fault, cause="diverged", action="requeue", epoch=1)
    fault = Fault(33, "it is NaN again on other nodes; going back and leaving out is allowed")
    again = survival.recovered(rehearsal, fault, cause="diverged", action="relaunch", epoch=2)
    assert (first.end.failed_step, again.end.failed_step) == (15, 15), rehearsal.logs()
    back = rehearsal.events(EventKind.ROLLED_BACK)
    assert len(back) == 1 and back[0].checkpoint_step == 10, rehearsal.logs()
    rehearsal.wait_till_over()
    assert rehearsal.causes[-1] == "done", rehearsal.logs()
    assert rehearsal.rows(3)[4].consumed_samples == 16 * 8, "step 15 took another batch"
