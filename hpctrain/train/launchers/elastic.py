"""torchelastic's agent as a supervised run needs it: no restarts, signals handed on, deaths told.

Rendezvous is the static one. The dynamic one (c10d) numbers nodes by host name, which breaks the
order of axes over nodes and links, and starts ranks again, in the same epoch and from the same old
checkpoint, when a node comes late. How many nodes a launch has is the supervisor's choice.
Belongs here: what torch's agent is told, and what it is made to do besides. Does not belong here:
who this node is (see `agent_place`), or what a signal means to a rank.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpctrain.store.run_records import AgentRecord, RankEnd, TrainerExit, write_agent_record
from hpctrain.train.launchers.agent_place import Place
from hpctrain.train.launchers.below_agent import LOG_VARIABLE
from hpctrain.train.launchers.signal_forwarding import Passing

# The supervisor ends launches that do not come up (`supervise.setup_stall`); this is for others.
_RENDEZVOUS_SECONDS = 3600
_MONITOR_SECONDS = 0.1
# What torchelastic itself may handle, from torch 2.9 on; others are handed on. What it handles ends
# the ranks after a wait, and a second signal ends the agent at once.
_SIGNALS_OF_TORCH = "SIGINT,SIGHUP"
# What ranks have without an agent (ProcessGroupNCCL.hpp); agents set 1 where nothing is set.
_NCCL_ERROR_HANDLING = "3"
_ENDS_WELL = (0, TrainerExit.YIELDED)


def run(place: Place, passing: Passing) -> int:
    """Start the ranks of this node and wait for them. Returns the exit code that speaks for them:
    that of the first one that failed, 128 and the signal's number where one was killed."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_OF_TORCH
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _NCCL_ERROR_HANDLING)
    agent = SupervisedAgent(place, passing)
    try:
        result = agent.run()
    except SignalException as error:
        return 128 + int(error.sigval)
    later = [failure.exitcode for failure in result.failures.values()]
    code = next((code for code in (*agent.first_codes, *later) if code not in _ENDS_WELL), None)
    if code is None:
        return TrainerExit.YIELDED if later else TrainerExit.DONE
    return code if code >= 0 else 128 - code


class SupervisedAgent(LocalElasticAgent):
    """The agent of one node of one launch.

    `first_codes` are the exit codes seen when the first rank here had failed.
    """

    def __init__(self, place: Place, passing: Passing) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=place.ranks_per_node,
            entrypoint=sys.executable,
            args=("-m", "hpctrain.train", place.train_config),
            rdzv_handler=_rendezvous(place),
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
        )
        super().__init__(spec, RankLogs(place))
        self.first_codes: tuple[int, ...] = ()
        self._place = place
        self._passing = passing

    def _start_workers(self, worker_group: Any) -> Any:
        ids = super()._start_workers(worker_group)
        # torch before 2.9 has just taken over some of these signals
        self._passing.install()
        return ids

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Called all the time. The parent ends the other ranks once one has failed, and waits up
        to 30 s for them, so what happened is told before."""
        self._passing.hand_on(list(self._pcontext.pids().values()))
        self._tell_deaths(worker_group)
        return super()._monitor_workers(worker_group)

    def _tell_deaths(self, worker_group: Any) -> None:
        if self.first_codes:
            return
        handlers = self._pcontext.subprocess_handlers
        ended = [
            RankEnd(rank=worker.global_rank, code=code)
            for worker in worker_group.workers
            if (code := handlers[worker.local_rank].proc.poll()) is not None
            and code not in _ENDS_WELL
        ]
        if ended:
            self.first_codes = tuple(end.code for end in ended)
            _write(self._place, tuple(ended))


class RankLogs(LogsSpecs):
    """Names each rank's log to the rank; torchelastic itself redirects nothing.

    It would open one file for stdout and one for stderr, in directories of its own.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        for variables in envs.values():
            variables[LOG_VARIABLE] = str(self._place.log_of(int(variables["RANK"])))
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=inherited)

    @property
    def root_log_dir(self) -> str:
        return str(self._place.run.logs)


def _rendezvous(place: Place) -> Any:
    return StaticTCPRendezvous(
        master_addr=place.address,
        master_port=place.port,
        rank=place.node_rank,
        world_size=place.nodes,
        run_id=f"{place.run.run_id}.{place.epoch}",
        timeout=_RENDEZVOUS_SECONDS,
    )


def _write(place: Place, ended: tuple[RankEnd, ...]) -> None:
    record = AgentRecord(epoch=place.epoch, node=place.node, time=time.time(), ended=ended)
    try:
        write_agent_record(place.run, place.node_rank, record)
    except OSError as error:
        print(f"the record of this node could not be written: {error}", file=sys.stderr)
