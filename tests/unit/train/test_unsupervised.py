"""A node without Slurm and supervisor: what it is told, and which launch its first node chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.base.errors import CheckpointError, InvalidInputError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.launchers.agent_environment import read_unsupervised_environment
from hpctrain.train.launchers.torchelastic_agent import (
    AgreedLaunch,
    choose_launch,
    open_run_directory,
)
from hpctrain.train.rank_environment import read_launch

WORDS = ["--nnodes=2", "--nproc-per-node=8", "--run-directory=/runs/a", "/etc/hpctrain/train.json"]
# As Kubeflow's trainer sets them.
TOLD = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "a-node-0-0.a",
    "PET_MASTER_PORT": "29400",
}


def test_options_come_before_variables() -> None:
    node = read_unsupervised_environment(WORDS, TOLD)
    place = node.place
    assert (place.nodes, place.ranks_per_node, place.node_rank) == (2, 8, 1)
    assert (place.address, place.port) == ("a-node-0-0.a", 29400)
    assert str(node.train_config) == "/etc/hpctrain/train.json"
    assert place.train_config == "/runs/a/train.json"
    only = read_unsupervised_environment(["/runs/a/train.json"], TOLD).place
    assert (only.nodes, only.ranks_per_node, only.run.directory) == (4, 2, Path("/runs/a"))


def test_open_mpi_numbers_nodes_too() -> None:
    told = {"OMPI_COMM_WORLD_RANK": "1", "PET_MASTER_ADDR": "h1"}
    place = read_unsupervised_environment(WORDS, told).place
    assert (place.node_rank, place.port) == (1, 29500)


def test_a_single_node_knows_its_place() -> None:
    place = read_unsupervised_environment(["--nnodes=1", "--nproc-per-node=1", "t.json"], {}).place
    assert (place.node_rank, place.address) == (0, "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_NODE_RANK", "", "neither --node-rank nor PET_NODE_RANK is set"),
        ("PET_NODE_RANK", "2", "node rank 2 of 2 nodes"),
        ("PET_NODE_RANK", "one", "not a number: 'one'"),
        ("PET_MASTER_ADDR", "", "neither --master-addr"),
    ],
)
def test_what_is_missing(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_unsupervised_environment(WORDS, {**TOLD, name: value})


def test_without_its_place_a_node_ends_as_wrongly_configured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train.unsupervised", str(tmp_path / "train.json")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert "neither --nnodes nor PET_NNODES is set" in done.stderr


def test_the_node_of_a_rank_is_known_without_slurm() -> None:
    """Exit records are kept by node: two nodes may not write into one file."""
    ranks = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert read_launch(ranks).node_rank == 1
    assert read_launch({**ranks, "SLURM_NODEID": "3"}).node_rank == 3


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "settings" / "train.json"
    file.parent.mkdir()
    file.write_text('{"engine": "ddp"}')
    return file


def test_launches_are_numbered_in_a_directory_that_is_made(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "volume" / "run")
    open_run_directory(run, settings)
    assert run.train_config.read_text() == settings.read_text()
    first = choose_launch(run, "node-a")
    partial = run.checkpoints / "iter_0000002.partial-e000001"
    partial.mkdir()
    open_run_directory(run, settings)
    second = choose_launch(run, "node-b")
    assert (first.epoch, second.epoch, current_epoch(run.epochs)) == (1, 2, 2)
    assert first.variables["HPCTRAIN_EPOCH"] == "1" and first.resume == second.resume == ""
    assert not partial.exists(), "what the older launch was saving is fenced off"


def test_a_directory_without_its_parts_is_completed(tmp_path: Path, settings: Path) -> None:
    """A volume may have been made with the directory in it."""
    run = RunLayout(tmp_path / "run")
    run.directory.mkdir()
    open_run_directory(run, settings)
    assert all(directory.is_dir() for directory in run.fixed_directories)


def test_the_directory_of_another_run_is_refused(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "run")
    open_run_directory(run, settings)
    settings.write_text('{"engine": "fsdp"}')
    with pytest.raises(InvalidInputError, match="another run has begun there"):
        open_run_directory(run, settings)
    run.train_config.unlink()
    run.ledger.write_text("")
    with pytest.raises(InvalidInputError, match="its supervisor starts its launches"):
        open_run_directory(run, settings)


def test_lost_checkpoints_are_no_fresh_start(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "run")
    open_run_directory(run, settings)
    (run.checkpoints / "iter_0000004").mkdir()
    with pytest.raises(CheckpointError, match="a start from step 0 would lose work"):
        choose_launch(run, "node-a")


def test_the_first_node_tells_the_others_by_json() -> None:
    told = AgreedLaunch(epoch=3, resume="iter_0000004")
    assert AgreedLaunch.model_validate_json(told.model_dump_json()) == told
