"""What an agent is told, and what it says when something of it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.launchers.agent_environment import read_agent_environment

WORDS = ["--nnodes=2", "--nproc-per-node=8", "train-n000002.json"]
TOLD = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n7",
    "HPCTRAIN_EPOCH": "5",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "20001",
}


def test_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = read_agent_environment(WORDS, TOLD)
    assert (place.nodes, place.ranks_per_node, place.node_rank) == (2, 8, 1)
    assert (place.address, place.port, place.epoch) == ("10.0.0.1", 20001, 5)
    assert place.train_config == "train-n000002.json"
    assert place.log_of(11) == tmp_path / "logs/4711.0/step2-rank0011.log"
    again = read_agent_environment(WORDS, {**TOLD, "SLURM_RESTART_COUNT": "3"})
    assert again.log_of(11) == tmp_path / "logs/4711.3/step2-rank0011.log"
    assert not place.logs_by_node
    assert read_agent_environment(["--logs=node", *WORDS], TOLD).logs_by_node


@pytest.mark.parametrize("name", TOLD)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is not set: start this with srun"):
        read_agent_environment(WORDS, {key: value for key, value in TOLD.items() if key != name})


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(InvalidInputError, match="MASTER_PORT is not a number: '-1'"):
        read_agent_environment(WORDS, {**TOLD, "MASTER_PORT": "-1"})


def test_started_by_hand_it_says_what_is_missing() -> None:
    bare = {name: text for name, text in os.environ.items() if name not in TOLD}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train.agent", *WORDS],
        env=bare,
        capture_output=True,
        text=True,
    )
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert "is not set: start this with srun, below hpctrain's supervisor" in done.stderr
    assert "Traceback" not in done.stderr
