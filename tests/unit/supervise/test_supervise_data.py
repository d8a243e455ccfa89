"""Data that changed under a run: refused once it has trained on them, told before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from supervise_stage import Stage

from hpctrain.records.data_identity import (
    DataIdentity,
    compare,
    identify_file,
    read_identity,
    write_identity,
)
from hpctrain.records.ledger import EventKind, Ledger


@pytest.fixture
def tokens(stage: Stage, tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"a" * 1000)
    write_identity(stage.layout.data_identity, DataIdentity(files=(identify_file(path),)))
    return path


def trained(stage: Stage) -> None:
    """As if an earlier attempt had got to a checkpoint."""
    ledger = Ledger(stage.layout.ledger)
    ledger.append(EventKind.LAUNCH_ENDED, cause="preempted", resume_step=0)
    row = (
        '{"step": 7, "epoch": 1, "time": 1, "loss": 1, "loss_hex": "0x1p+0", "grad_norm": null, '
        '"learning_rate": 1, "step_seconds": 1, "tokens_per_second": 1, "mfu": null, '
        '"memory_bytes": 0, "consumed_samples": 7}'
    )
    stage.layout.metrics.write_text(row + "\n")


def test_the_same_data_are_trained_on(stage: Stage, tokens: Path) -> None:
    trained(stage)
    assert stage.play("done") == 0


def test_changed_data_are_refused_before_anything_is_launched(stage: Stage, tokens: Path) -> None:
    trained(stage)
    tokens.write_bytes(b"b" * 1000)
    assert stage.play("done") == 1
    assert (stage.causes[-1], stage.actions) == ("data_changed", ["stop"])
    reason = str(stage.events(EventKind.ACTION)[-1].reason)
    assert f"{tokens} has the same size and other content" in reason
    assert "hpctrain resume r1 --accept-data" in reason
    assert not (stage.layout.directory / "srun.pid").exists()


def test_a_copy_of_the_data_is_the_same_data(stage: Stage, tokens: Path) -> None:
    trained(stage)
    os.utime(tokens, ns=(1, 1))
    assert stage.play("done") == 0
    identity = read_identity(stage.layout.data_identity)
    assert identity is not None and identity.files[0].mtime_ns == 1


def test_before_the_first_step_a_change_is_recorded_and_told(stage: Stage, tokens: Path) -> None:
    tokens.write_bytes(b"b" * 1000)
    assert stage.play("done") == 0
    assert "recorded anew" in str(stage.events(EventKind.OBSERVED)[0].reason)
    identity = read_identity(stage.layout.data_identity)
    assert identity is not None and not compare(identity).changed


def test_a_file_that_is_not_there_is_left_to_the_ranks(stage: Stage, tokens: Path) -> None:
    """They know whether it is missing on one node or on all."""
    trained(stage)
    tokens.unlink()
    assert stage.play("done") == 0


def test_a_damaged_record_is_no_consent(stage: Stage, tokens: Path) -> None:
    trained(stage)
    stage.layout.data_identity.write_text("{")
    assert stage.play("done") == 1
    assert "data.json is damaged" in str(stage.events(EventKind.ACTION)[-1].reason)
