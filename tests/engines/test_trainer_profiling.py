"""`profile:`: traces of chosen steps and ranks, which change nothing of the training."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trial_runs import DDP2, FSDP2, GPT, MODULE_GPT, ZERO, Trial, trained
from variants import varied

from hpctrain.records.run_records import RankTimes, read_record
from hpctrain.train.launchers.nsight import nsight_command
from hpctrain.train.launchers.nsight_task import UNDER_NSIGHT

TWO_STEPS = dict(steps=(3, 4, 6), ranks=(1,))


def _names(path: Path) -> set[str]:
    with gzip.open(path) as stream:
        return {event.get("name", "") for event in json.load(stream)["traceEvents"]}


ENGINES: dict[str, dict[str, Any]] = {
    "megatron": dict(GPT, data_parallel_size=2),
    "ddp": DDP2,
    "fsdp": FSDP2,
    "zero": ZERO,
}


@pytest.mark.variant("test_a_trace_that_is_too_large_is_not_kept")
@pytest.mark.parametrize("engine", varied(ENGINES, "megatron"))
def test_chosen_steps_are_traced_and_nothing_changes(
    engine: str, trial: Callable[..., Trial]
) -> None:
    plain = trained(ENGINES[engine])
    traced = trial(ENGINES[engine], rank_times_interval_steps=1, profile=TWO_STEPS)
    assert traced.train() == [0, 0]
    assert traced.exact == plain.exact
    found = sorted(path.name for path in traced.run.traces.iterdir())
    prefix = "e000000-rank-000001-steps"
    assert found == [f"{prefix}-3-4.json.gz", f"{prefix}-6-6.json.gz"]
    names = _names(traced.run.trace(0, 1, 3, 4))
    assert {"hpctrain: step 3", "hpctrain: step 4", "hpctrain: data"} <= names
    assert {"hpctrain: compute", "hpctrain: optimizer"} <= names
    assert any(name.startswith("gloo:") for name in names), "what is sent shows"
    assert [row.step for row in traced.rows if row.profiled] == [2, 3, 4, 5, 6]
    assert read_record(traced.run.rank_times, RankTimes) is None, "no usual step was left"


def test_a_trace_that_is_too_large_is_not_kept(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.train.profiling._MOST_TRACE_BYTES", 100)
    small = trial(MODULE_GPT, train_steps=3, profile=dict(steps=(2,)))
    assert small.train() == [0]
    assert list(small.run.traces.iterdir()) == []
    said = small.said
    assert "bytes not kept: 100 are the most" in said


@pytest.mark.variant("test_a_trace_that_is_too_large_is_not_kept")
def test_what_fails_ends_the_profile_and_not_the_run(trial: Callable[..., Trial]) -> None:
    """Here: a file lies where the directory of traces would be."""
    broken = trial(MODULE_GPT, train_steps=3, profile=dict(steps=(2,)))
    broken.run.traces.write_text("")
    assert broken.train() == [0]
    said = broken.said
    assert "event=profile rank=0 profiling given up" in said and "FileExistsError" in said


# -- Nsight Systems, of which there is none here: the command, and that it is what is started ----

NSIGHT = dict(tool="nsys", steps=(2, 3), ranks=(1,))
PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" > "$NSIGHT_ARGUMENTS"
while [ "$1" != -m ]; do last=$1; shift; done
exec "$last" "$@"
"""


def fewer_nodes(made: Trial) -> Path:
    """The file of a launch that is not the planned one."""
    path = made.run.directory / "train-n1.json"
    path.write_text(made.run.train_config.read_text())
    return path


def _start(made: Trial, rank: int, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "1",
        "SLURMD_NODENAME": "n7",
        "HPCTRAIN_EPOCH": "0",
    }
    command = [sys.executable, "-m", "hpctrain.train", str(fewer_nodes(made))]
    return subprocess.run(
        command, env=environment | changes, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.variant("test_without_nsight_the_run_does_not_begin")
def test_a_chosen_rank_takes_its_place_below_nsight(
    trial: Callable[..., Trial], tmp_path: Path
) -> None:
    made = trial(MODULE_GPT, data_parallel_size=2, profile=NSIGHT)
    program, arguments = tmp_path / "bin" / "nsys", tmp_path / "arguments"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    assert _start(made, 1, PATH=path, NSIGHT_ARGUMENTS=str(arguments)).returncode == 78
    (record,) = [one for one in made.exits() if one.rank == 1]
    assert record is not None, "the trainer has begun below nsys"
    assert "needs 2 processes, but 1 were started" in str(record.message)
    words = arguments.read_text().splitlines()
    assert words == [
        "profile",
        f"--output={made.run.traces}/e000000-rank-000001-steps-2-3",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,cublas,cudnn",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        sys.executable,
        "-m",
        "hpctrain.train",
        str(fewer_nodes(made)),
    ]
    arguments.unlink()
    _start(made, 0, PATH=path, NSIGHT_ARGUMENTS=str(arguments))
    assert not arguments.exists(), "rank 0 was not chosen"


def test_without_nsight_the_run_does_not_begin(trial: Callable[..., Trial]) -> None:
    made = trial(MODULE_GPT, data_parallel_size=2, profile=NSIGHT)
    ended = _start(made, 1, PATH="/nowhere")
    assert ended.returncode == 78
    (record,) = [one for one in made.exits() if one.rank == 1]
    assert record is not None and "finds no `nsys` on its PATH" in str(record.message)


def test_no_rank_is_wrapped_for_torch(trial: Callable[..., Trial]) -> None:
    from hpctrain.train.rank_environment import Launch

    made = trial(MODULE_GPT, profile=dict(steps=(2,)))
    launch = Launch(rank=0, world_size=1, local_rank=0, node="n0", epoch=0, resume="")
    assert nsight_command(made.config, launch, made.run, ["train"]) is None
    assert UNDER_NSIGHT not in os.environ
