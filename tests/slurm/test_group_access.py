"""`run_access: group`: a run that everybody in the group of the directory of runs may read."""

from __future__ import annotations

import os
import stat

import pytest
from another_user import AnotherUser
from rehearsal import Stage

from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in


def test_the_group_reads_everything_and_nobody_else(
    public_stage: Stage, another_user: AnotherUser
) -> None:
    """From the first file to the last checkpoint, the log that Slurm makes included."""
    public_stage.runs.mkdir()
    os.chown(public_stage.runs, -1, another_user.account.pw_gid)
    public_stage.runs.chmod(0o755)
    words = ("name=grouped", "budget.steps=12", "checkpoint.every_steps=4")
    private = public_stage.start(*words[1:], "name=private")
    assert private.wait_till_over().state is RunState.DONE
    shared = public_stage.start(*words, profile={"run_access": "group"})
    assert shared.wait_till_over().state is RunState.DONE, shared.logs()

    ada = another_user.client_of(public_stage.sandbox)
    directory = shared.run.layout.directory
    everything = [directory, *directory.rglob("*")]
    closed = [path for path in everything if not another_user.call(os.access, path, os.R_OK)]
    assert not closed, "a member of the group cannot read it"
    writable = [path for path in everything if another_user.call(os.access, path, os.W_OK)]
    assert not writable, "reading is all that a member may do"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2750, "others see nothing"
    assert {path.stat().st_gid for path in everything} == {another_user.account.pw_gid}
    runs = str(public_stage.runs)
    for verb in ("status", "describe", "why", "logs", "goodput", "checkpoints"):
        told = ada.hpctrain(verb, shared.run.run_id, "--runs", runs)
        assert told.exit_code == 0, told.transcript()
    refused = ada.hpctrain("describe", private.run.run_id, "--runs", runs)
    assert refused.exit_code == 2 and "Permission denied" in refused.stderr
