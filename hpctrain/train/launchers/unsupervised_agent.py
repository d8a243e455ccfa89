"""Run torchelastic's agent of one node without a supervisor: the nodes agree on the launch first.

The store of the rendezvous carries what node 0 has chosen. Does not belong here: the choice (see
`agreed_launch`), the agent itself (see `torchelastic_agent`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hpctrain.base.errors import CheckpointError, InvalidInputError, Problem, StorageError
from hpctrain.train.launchers import torchelastic_agent
from hpctrain.train.launchers.agreed_launch import AgreedLaunch, choose_launch, open_run_directory
from hpctrain.train.launchers.labelled_output import LabelledOutput
from hpctrain.train.launchers.signal_forwarding import SignalForwarder
from hpctrain.train.launchers.unsupervised_environment import UnsupervisedNode

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
