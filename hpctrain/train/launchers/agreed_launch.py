"""Have the nodes of a launch without a supervisor agree on it: its epoch and its checkpoint.

Belongs here: what `hpctrain.supervise` does before a launch, without its records: the run
directory, the next epoch, unfinished saves of older epochs, the newest verified checkpoint. Does
not belong here: the ranks of a node (see `rank_processes`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpctrain.base.durable import make_private_directory, replace_bytes
from hpctrain.base.errors import CheckpointError, InvalidInputError, Problem, StorageError
from hpctrain.checkpoints.discover import select_for_resume
from hpctrain.checkpoints.publish import fence_off
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record
from hpctrain.train.launchers.agent_environment import AgentEnvironment
from hpctrain.train.launchers.agent_ranks import SignalForwarder
from hpctrain.train.launchers.rank_processes import run_ranks
from hpctrain.version import __version__

_LAUNCH, _REFUSAL_READ = "hpctrain/launch", "hpctrain/refusal-read"
# How long the nodes may take to come.
_RENDEZVOUS_SECONDS = 3600.0
# The first node verifies up to 1 GiB of a checkpoint, on a file system that may fail over.
_CHOICE_SECONDS = 1800.0
# How long the first node's store lives on for others to read why there is no launch.
_REFUSAL_SECONDS = 30.0


def run_agreed(agent: AgentEnvironment, forwarder: SignalForwarder) -> int:
    """Agree with the other nodes on the launch, and run the ranks of this one to their end.

    Returns their exit code. Raises InvalidInputError, CheckpointError or, if that may pass,
    OSError where there can be no launch.
    """
    from torch.distributed import TCPStore

    place, leads = agent.place, agent.place.node_rank == 0
    patience = timedelta(seconds=_RENDEZVOUS_SECONDS)
    store = TCPStore(place.address, place.port, place.nodes, leads, patience, multi_tenant=True)
    launch = _offer(agent, store) if leads else _learn(store)
    if leads:
        begin = launch.resume or "the beginning"
        print(f"launch {launch.epoch} of {agent.run.run_id}, from {begin}", flush=True)
    # the ranks meet at this store (torch/distributed/rendezvous.py)
    variables = {**launch.variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return run_ranks(replace(agent, epoch=launch.epoch), forwarder, variables)


def _offer(agent: AgentEnvironment, store: Any) -> AgreedLaunch:
    """Choose the launch and publish it, or the reason why there is none."""
    try:
        assert agent.settings is not None
        open_run_directory(agent.run, agent.settings)
        launch = choose_launch(agent.run, f"{agent.node}.{os.getpid()}.{time.time_ns()}")
    except (InvalidInputError, CheckpointError, OSError) as error:
        refusal = AgreedLaunch(refused=str(error), passing=isinstance(error, OSError))
        store.set(_LAUNCH, refusal.model_dump_json())
        end = time.monotonic() + _REFUSAL_SECONDS
        while store.add(_REFUSAL_READ, 0) < agent.place.nodes - 1 and time.monotonic() < end:
            time.sleep(0.1)
        raise
    store.set(_LAUNCH, launch.model_dump_json())
    return launch


def _learn(store: Any) -> AgreedLaunch:
    """Wait for the choice of the first node.

    Raises InvalidInputError for its refusal, StorageError for one that may pass.
    """
    store.wait([_LAUNCH], timedelta(seconds=_CHOICE_SECONDS))
    launch = AgreedLaunch.model_validate_json(store.get(_LAUNCH))
    if launch.refused is not None:
        store.add(_REFUSAL_READ, 1)
        message = f"the first node starts no launch: {launch.refused}"
        raise StorageError(message) if launch.passing else InvalidInputError([Problem(message)])
    return launch


class AgreedLaunch(Record):
    """The launch that all nodes start: its epoch and the checkpoint, empty for a fresh start.

    `version`: hpctrain of the first node. `refused`: why there is no launch; None: there is one.
    `passing`: the reason may be gone when the launch is tried again.
    """

    epoch: int = 0
    resume: str = ""
    version: str = __version__
    refused: str | None = None
    passing: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Return what the supervisor would set for the ranks."""
        return {
            "HPCTRAIN_EPOCH": str(self.epoch),
            "HPCTRAIN_RESUME": self.resume,
            "HPCTRAIN_VERSION": self.version,
        }


def open_run_directory(run: RunLayout, train_config: Path) -> None:
    """Make what is missing of the run directory, with `train_config` as its `train.json`.

    Raises InvalidInputError for the directory of another run, and of one that a supervisor owns.
    """
    try:
        settings = train_config.read_bytes()
    except OSError as error:
        raise InvalidInputError([Problem(f"{error.strerror}", str(train_config))]) from error
    if run.ledger.exists():
        message = f"a run of Slurm lives in {run.directory}, and its supervisor starts its launches"
        hint = "continue it by `hpctrain resume`, or name another directory"
        raise InvalidInputError([Problem(message, hint=hint)])
    if not run.directory.exists():
        run.create()
    for directory in run.fixed_directories:
        make_private_directory(directory)
    if not run.train_config.exists():
        replace_bytes(run.train_config, settings, mode=0o600)
    elif run.train_config.read_bytes() != settings:
        message = f"{run.train_config} is not {train_config}: another run has begun there"
        raise InvalidInputError([Problem(message, hint="give the changed run another name")])


def choose_launch(run: RunLayout, claimant: str) -> AgreedLaunch:
    """Take the next epoch, fence off what older ones were saving, and select the checkpoint.

    Raises CheckpointError where no good one is left, OSError where the directory is away.
    """
    epoch = claim_epoch(run.epochs, claimant)
    fence_off(run.checkpoints, epoch)
    checkpoint = select_for_resume(run.checkpoints, "auto").checkpoint
    return AgreedLaunch(epoch=epoch, resume="" if checkpoint is None else checkpoint.directory.name)
