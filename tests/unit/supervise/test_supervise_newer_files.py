"""A supervisor that meets files of a newer hpctrain stops or makes way, and moves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from supervise_stage import Stage

from hpctrain.base.errors import StorageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.ledger import EventKind, Ledger
from hpctrain.records.manifest import MANIFEST_NAME, checkpoint_name
from hpctrain.supervise.evidence.run_dir_snapshot import BackgroundReader, RunDirSnapshot


def test_a_newer_checkpoint_is_not_put_aside(stage: Stage) -> None:
    assert stage.play("save:20 progress:25 crash", "exit:0", "exit:0", "exit:0") == 1
    newest = published_steps(stage.layout.checkpoints)[-1]
    path = stage.layout.checkpoints / checkpoint_name(newest) / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 2}))
    Ledger(stage.layout.ledger).append(EventKind.CONTROL, action="resume")
    assert stage.play("done") == 1
    stop = stage.events(EventKind.ACTION)[-1]
    assert (stage.causes[-1], stop.action) == ("bad_checkpoint", "stop")
    assert f"{path}: has format version 2" in str(stop.reason)
    assert published_steps(stage.layout.checkpoints)[-1] == newest


def test_a_newer_sign_of_life_is_a_fault_of_the_directory() -> None:
    """Whoever reads in a thread is not left without an answer."""

    def read(*_: bool) -> RunDirSnapshot:
        raise NewerFormatError(Path("progress.json"), 2, 1)

    background = BackgroundReader(read)
    background.request(find_saves=False, rank_times=False)
    assert background.result(wait_seconds=60) is None
    assert isinstance(background.fault, StorageError) and "format version 2" in str(
        background.fault
    )
    background.close()


def test_newer_settings_end_the_job_with_the_reason(stage: Stage) -> None:
    text = stage.layout.supervise_config.read_text()
    document = {**json.loads(text), "schema_version": 2}
    stage.layout.supervise_config.write_text(json.dumps(document))
    with pytest.raises(NewerFormatError, match=r"supervise\.json: has format version 2"):
        stage.supervisor()
