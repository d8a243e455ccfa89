"""Run torchelastic's agent under supervision: no restarts, signals forwarded, deaths recorded.

Rendezvous is static. The dynamic one (c10d) numbers nodes by host name, which breaks the order of
axes over nodes and links. It also restarts ranks, in the same epoch and from the same old
checkpoint, when a node joins late. The number of nodes is the supervisor's choice. Does not belong
here: the identity of this node (see `agent_environment`), the meaning of signals to a rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpctrain.records.exit_records import write_agent_record
from hpctrain.records.run_records import AgentRecord, RankEnd, TrainerExit
from hpctrain.train.launchers.agent_environment import AgentEnvironment
from hpctrain.train.launchers.agent_rank_setup import LOG_VARIABLE
from hpctrain.train.launchers.labelled_output import LabelledOutput
from hpctrain.train.launchers.signal_forwarding import SignalForwarder

# The supervisor ends launches that do not start (`supervise.setup_stall`); this covers the rest.
_RENDEZVOUS_SECONDS = 3600
_MONITOR_SECONDS = 0.1
# Signals that torchelastic itself handles, since torch 2.9; others are forwarded. A handled signal
# ends the ranks after a wait, and a second one ends the agent at once.
_SIGNALS_OF_TORCH = "SIGINT,SIGHUP"
# The default of ranks without an agent (ProcessGroupNCCL.hpp); agents set 1 where nothing is set.
_NCCL_ERROR_HANDLING = "3"
_CLEAN_CODES = (0, TrainerExit.YIELDED)
MakeAgent = Callable[[AgentEnvironment, SignalForwarder, LabelledOutput | None], "SupervisedAgent"]


def run(
    place: AgentEnvironment, forwarder: SignalForwarder, make_agent: MakeAgent | None = None
) -> int:
    """Start the ranks of this node and wait for them; `make_agent`: by an agent of another kind.

    Returns the exit code of the first rank that failed, or 128 + signal number if it was killed.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_OF_TORCH
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _NCCL_ERROR_HANDLING)
    output = LabelledOutput() if place.logs_by_node else None
    agent = (make_agent or SupervisedAgent)(place, forwarder, output)
    try:
        result = agent.run()
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        if output is not None:
            output.close()
    later = [failure.exitcode for failure in result.failures.values()]
    code = next((code for code in (*agent.first_codes, *later) if code not in _CLEAN_CODES), None)
    if code is None:
        return TrainerExit.YIELDED if later else TrainerExit.DONE
    return code if code >= 0 else 128 - code


class SupervisedAgent(LocalElasticAgent):
    """The agent of one node of one launch.

    `first_codes` are the exit codes observed when the first rank of this node had failed.
    """

    def __init__(
        self,
        place: AgentEnvironment,
        forwarder: SignalForwarder,
        output: LabelledOutput | None = None,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=place.ranks_per_node,
            entrypoint=sys.executable,
            args=("-m", "hpctrain.train", place.train_config),
            rdzv_handler=StaticTCPRendezvous(
                master_addr=place.address,
                master_port=place.port,
                rank=place.node_rank,
                world_size=place.nodes,
                run_id=f"{place.run.run_id}.{place.epoch}",
                timeout=_RENDEZVOUS_SECONDS,
            ),
            max_restarts=0,
            monitor_interval=_MONITOR_SECONDS,
        )
        super().__init__(spec, RankLogs(place, output))
        self.first_codes: tuple[int, ...] = ()
        self._place = place
        self._forwarder = forwarder

    def _start_workers(self, worker_group: Any) -> Any:
        ids = super()._start_workers(worker_group)
        # torch before 2.9 has just installed its own handlers for some of these signals
        self._forwarder.install()
        return ids

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Forward signals and record the first deaths; torch calls this periodically.

        Once a rank has failed, the parent class ends the others and waits up to 30 s for them.
        Deaths are therefore recorded before.
        """
        self._forwarder.forward(list(self._pcontext.pids().values()))
        if not self.first_codes:
            self._record_deaths(worker_group)
        return super()._monitor_workers(worker_group)

    def _record_deaths(self, worker_group: Any) -> None:
        handlers, place = self._pcontext.subprocess_handlers, self._place
        ended = tuple(
            RankEnd(rank=worker.global_rank, code=code)
            for worker in worker_group.workers
            if (code := handlers[worker.local_rank].proc.poll()) is not None
            and code not in _CLEAN_CODES
        )
        if not ended:
            return
        self.first_codes = tuple(end.code for end in ended)
        record = AgentRecord(epoch=place.epoch, node=place.node, time=time.time(), ended=ended)
        try:
            write_agent_record(place.run, place.node_rank, record)
        except OSError as error:
            print(f"the record of this node could not be written: {error}", file=sys.stderr)


class RankLogs(LogsSpecs):
    """Passes the path of its log to each rank; torchelastic itself redirects nothing.

    It would open one file for stdout and one for stderr, in directories of its own. With `output`
    the path is that of a pipe, and the log is the node's.
    """

    def __init__(self, place: AgentEnvironment, output: LabelledOutput | None) -> None:
        super().__init__()
        self._place, self._output = place, output

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        for variables in envs.values():
            rank = int(variables["RANK"])
            log = self._place.log_of(rank) if self._output is None else self._output.pipe_of(rank)
            variables[LOG_VARIABLE] = str(log)
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=inherited)

    @property
    def root_log_dir(self) -> str:
        return str(self._place.run.logs)
