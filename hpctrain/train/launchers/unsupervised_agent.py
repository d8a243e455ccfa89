"""Run torchelastic's agent of one node without a supervisor: the nodes agree on the launch first.

The store of the rendezvous carries what node 0 has chosen. Does not belong here: the choice (see
`unsupervised_agent`), the agent itself (see `torchelastic_agent`).
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
from hpctrain.train.launchers import torchelastic_agent
from hpctrain.train.launchers.labelled_output import LabelledOutput
from hpctrain.train.launchers.signal_forwarding import SignalForwarder
from hpctrain.train.launchers.unsupervised_environment import UnsupervisedNode
from hpctrain.version import __version__

_LAUNCH, _REFUSAL_READ = "hpctrain/launch", "hpctrain/refusal-read"
# The first node verifies up to 1 GiB of a checkpoint, on a file system that may fail over.
_CHOICE_SECONDS = 1800.0
# How long the first node's store lives on for others to read why there is no launch.
_REFUSAL_SECONDS = 30.0


def run(node: UnsupervisedNode, forwarder: SignalForwarder) -> int:
    """Agree on the launch, start the ranks of this node, and wait for them.

    Returns the exit code of the first rank that failed. Where there can be no launch, raises
    InvalidInputError, CheckpointError or, if that may pass, OSError.
    """
    return torchelastic_agent.run(
        node.place,
        forwarder,
        lambda place, signals, output: UnsupervisedAgent(node, signals, output),
    )


class UnsupervisedAgent(torchelastic_agent.SupervisedAgent):
    """The agent of one node; its first node takes the place of the supervisor."""

    def __init__(
        self,
        node: UnsupervisedNode,
        forwarder: SignalForwarder,
        output: LabelledOutput | None = None,
    ) -> None:
        super().__init__(node.place, forwarder, output)
        self._node = node

    def _start_workers(self, worker_group: Any) -> Any:
        leads = self._place.node_rank == 0
        launch = self._offer(worker_group.store) if leads else self._learn(worker_group.store)
        self._place = replace(self._place, epoch=launch.epoch)
        os.environ.update(launch.variables)  # which the ranks inherit
        if leads:
            begin = launch.resume or "the beginning"
            print(f"launch {launch.epoch} of {self._place.run.run_id}, from {begin}", flush=True)
        return super()._start_workers(worker_group)

    def _offer(self, store: Any) -> AgreedLaunch:
        """Choose the launch and publish it, or the reason why there is none."""
        run = self._place.run
        try:
            open_run_directory(run, self._node.train_config)
            launch = choose_launch(run, f"{self._place.node}.{os.getpid()}.{time.time_ns()}")
        except (InvalidInputError, CheckpointError, OSError) as error:
            refusal = AgreedLaunch(refused=str(error), passing=isinstance(error, OSError))
            store.set(_LAUNCH, refusal.model_dump_json())
            end = time.monotonic() + _REFUSAL_SECONDS
            while store.add(_REFUSAL_READ, 0) < self._place.nodes - 1 and time.monotonic() < end:
                time.sleep(0.1)
            raise
        store.set(_LAUNCH, launch.model_dump_json())
        return launch

    def _learn(self, store: Any) -> AgreedLaunch:
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


# -- Choose epoch and checkpoint of a launch that no supervisor starts, on its first node -------
# What `hpctrain.supervise` does before a launch, without its records: the run directory, the next
# epoch, unfinished saves of older epochs, the newest verified checkpoint.


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
