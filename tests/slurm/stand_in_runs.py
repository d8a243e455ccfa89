"""Runs of the stand-in: hundreds of ranks that compute nothing, below the script of a real run.

Belongs here: a sandbox in the shape of a profile, starting a run on it, and the losses that it must
have. Does not belong here: what is done to it, and what is asserted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from rehearsal import Rehearsal, patient_client
from token_files import write_tokens

from hpctrain.base.disk_usage import Directory, directory_facts
from hpctrain.engines.train_json import train_config_of
from hpctrain.job import preflight
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import find_run
from hpctrain.records.run_records import StepMetrics, read_metrics
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape, shape_from_profile
from hpctrain.spec.loader import find_profile, load_profile
from tests.rig.stand_in.interpreter import write_stand_in_interpreter
from tests.rig.stand_in.rank import advance, initial_state, loss_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROFILE = "a100x64"
# The data that examples/gpt175b.yaml and others name; no rank of the stand-in reads them.
_DATA = ("web", "books")


def shape_of(nodes: int, grace_seconds: int = 60) -> SandboxShape:
    """The first nodes of the profile. Its jobs can be preempted, unlike the profile's own.

    A busy machine holds up hundreds of processes for longer than 10 s, which is no node failure.
    """
    shape = shape_from_profile(load_profile(find_profile(PROFILE)).document)
    partitions = tuple(
        replace(one, preempt_mode="REQUEUE", grace_seconds=grace_seconds) if one.default else one
        for one in shape.partitions
    )
    return replace(
        shape,
        nodes=nodes,
        partitions=partitions,
        switches=shape.switches if nodes == shape.nodes else (),
        slurmd_timeout_seconds=60,
    )


def start_stand_in(
    sandbox: Sandbox,
    place: Path,
    example: str,
    overrides: Sequence[str] = (),
    *,
    step_seconds: float,
    path: str | None = None,
) -> tuple[Rehearsal, Prepared]:
    """Submit the script of an example whose Python starts the stand-in where the trainer stands.

    Its checkpoints are a few bytes, whatever room the example's own would need. `path`: the PATH of
    the submission, which the job inherits.
    """
    (place / "data").mkdir()
    for name in _DATA:
        write_tokens(place / "data" / name)
    (place / "data" / "tokenizer.json").write_text("{}")
    python = write_stand_in_interpreter(place / "python", step_seconds)
    environment = {**os.environ, **sandbox.environment()}
    slurm = patient_client(environment | ({"PATH": path} if path else {}))
    runs = place / "runs"
    with contextlib.chdir(place):
        prepared = prepare(
            EXAMPLES / f"{example}.yaml", PROFILE, overrides, runs=runs, python=str(python)
        )
        with patch.object(preflight, "directory_facts", _roomy):
            submitted = submit(prepared, runs, slurm)
    run = find_run(runs, submitted.run_id)
    return Rehearsal(sandbox, slurm, run, submitted.job_id, place), prepared


def _roomy(path: Path) -> Directory:
    return replace(directory_facts(path), free_bytes=2**60)


def undisturbed_losses(rehearsal: Rehearsal) -> Iterator[tuple[int, str]]:
    """Yield step and loss (float.hex) of a run that nothing happens to, step by step."""
    path = rehearsal.run.layout.train_config
    config = train_config_of(path, path.read_bytes())
    states = [initial_state(config.seed, rank) for rank in range(config.world_size)]
    for step in range(1, config.train_steps + 1):
        states = [advance(state, step) for state in states]
        yield step, loss_of(step, sum(states)).hex()


def wrong_losses(rehearsal: Rehearsal) -> tuple[int, list[StepMetrics]]:
    """Compare all rows with those of an undisturbed run; returns (steps compared, wrong rows)."""
    rows = read_metrics(rehearsal.run.layout)
    last = max(row.step for row in rows)
    expected: dict[int, str] = {}
    for step, loss_hex in undisturbed_losses(rehearsal):
        expected[step] = loss_hex
        if step == last:
            break
    assert {row.step for row in rows} == set(expected), "a step is missing"
    return last, [row for row in rows if row.loss_hex != expected[row.step]]
