"""Run torchelastic's agent: no restarts, signals forwarded, deaths recorded.

Rendezvous is static. The dynamic one (c10d) numbers nodes by host name, which breaks the order of
axes over nodes and links. It also restarts ranks, in the same epoch and from the same old
checkpoint, when a node joins late. The number of nodes is the supervisor's choice. Does not belong
here: the identity of this node (see `agent_environment`), the meaning of signals to a rank.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpctrain.base.durable import make_private_directory, replace_bytes
from hpctrain.base.errors import CheckpointError, InvalidInputError, Problem, StorageError
from hpctrain.checkpoints.discover import select_for_resume
from hpctrain.checkpoints.publish import fence_off
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.exit_records import write_agent_record
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import AgentRecord, RankEnd, Record, TrainerExit
from hpctrain.train.launchers.agent_environment import AgentEnvironment
from hpctrain.train.launchers.agent_ranks import LOG_VARIABLE, SignalForwarder
from hpctrain.version import __version__

# -- Put the rank before each line that ranks below an agent write, into the agent's own log -----
# srun labels what its own tasks write (`--label`), and the agent is the only one on its node. Each
# rank writes into a named pipe that the agent reads (fifo(7)), so the log of the node looks as it
# does without an agent.


_READ_BYTES = 1 << 16
# A line that is still longer, such as a progress bar without an end, is written in pieces.
_LONGEST_LINE_BYTES = 1 << 16
_WAIT_SECONDS = 0.2


class LabelledOutput:
    """Named pipes of the ranks of this node, and the thread that reads them."""

    def __init__(self, output: int = 1) -> None:
        self._output = output
        self._directory = Path(tempfile.mkdtemp(prefix="hpctrain-logs-"))
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, bytes] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True, name="rank output")
        self._thread.start()

    def pipe_of(self, rank: int) -> Path:
        """Make the pipe that a rank opens as its log; it may be opened and closed several times."""
        path = self._directory / str(rank)
        os.mkfifo(path, 0o600)
        # Opened for writing too, so that it neither ends nor keeps a rank waiting for its reader.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lines[rank] = b""
        self._selector.register(descriptor, selectors.EVENT_READ, rank)
        return path

    def close(self) -> None:
        """Write what the ranks have written until now, and remove the pipes."""
        self._stopping.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _relay(self) -> None:
        while True:
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping else _WAIT_SECONDS)
            for key, _ in ready:
                with contextlib.suppress(BlockingIOError):
                    self._write(key.data, os.read(key.fd, _READ_BYTES))
            if stopping and not ready:
                break
        for rank, rest in self._lines.items():
            if rest:
                self._write(rank, b"\n")

    def _write(self, rank: int, data: bytes) -> None:
        *whole, rest = (self._lines[rank] + data).split(b"\n")
        if len(rest) >= _LONGEST_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        self._lines[rank] = rest
        if whole:
            text = memoryview(b"".join(b"%d: %s\n" % (rank, line) for line in whole))
            with contextlib.suppress(OSError):  # a full disk must not end the ranks
                while text:
                    text = text[os.write(self._output, text) :]


# The supervisor ends launches that do not start (`supervise.setup_stall`); this covers the rest.
_RENDEZVOUS_SECONDS = 3600
_MONITOR_SECONDS = 0.1
# Signals that torchelastic itself handles, since torch 2.9; others are forwarded. A handled signal
# ends the ranks after a wait, and a second one ends the agent at once.
_SIGNALS_OF_TORCH = "SIGINT,SIGHUP"
# The default of ranks without an agent (ProcessGroupNCCL.hpp); agents set 1 where nothing is set.
_NCCL_ERROR_HANDLING = "3"
_CLEAN_CODES = (0, TrainerExit.YIELDED)


def run(place: AgentEnvironment, forwarder: SignalForwarder) -> int:
    """Start the ranks of this node and wait for them.

    Returns the exit code of the first rank that failed, or 128 + signal number if it was killed.
    Where there can be no launch without a supervisor, raises InvalidInputError, CheckpointError or,
    if that may pass, OSError.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS_OF_TORCH
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", _NCCL_ERROR_HANDLING)
    output = LabelledOutput() if place.logs_by_node else None
    kind = SupervisedAgent if place.settings is None else UnsupervisedAgent
    agent = kind(place, forwarder, output)
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


# ------------------------------------------------------------------------------------------------
# Run torchelastic's agent of one node without a supervisor: the nodes agree on the launch first.
# The store of the rendezvous carries what node 0 has chosen.


_LAUNCH, _REFUSAL_READ = "hpctrain/launch", "hpctrain/refusal-read"
# The first node verifies up to 1 GiB of a checkpoint, on a file system that may fail over.
_CHOICE_SECONDS = 1800.0
# How long the first node's store lives on for others to read why there is no launch.
_REFUSAL_SECONDS = 30.0


class UnsupervisedAgent(SupervisedAgent):
    """The agent of one node; its first node takes the place of the supervisor."""

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
            assert self._place.settings is not None
            open_run_directory(run, self._place.settings)
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
