"""Run one task of a replica: load, become ready, serve, and leave.

The first task of a replica answers requests; those of further nodes (pipeline stages, large tensor
parallel groups) run their part of the engine and follow it. Belongs here: this order. Does not
belong here: each part (`staging`, `engine_process`, `answers`, `lease`, `drain`, `life`).
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.records.exit_records import rank_0_has_exited
from hpctrain.records.requests import ask_trainer_to_leave, is_requested
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Endpoint
from hpctrain.serve.engines.contract import EngineCommand, EngineStart, NodeOfReplica
from hpctrain.serve.engines.registry import SERVING_ENGINES, command_of
from hpctrain.serve.plan.leaving import ENGINE_END_SECONDS
from hpctrain.serve.replica.answers import EngineAnswers
from hpctrain.serve.replica.config import ReplicaConfig
from hpctrain.serve.replica.drain import Drain, DrainTimes
from hpctrain.serve.replica.engine_process import EngineProcess
from hpctrain.serve.replica.failures import (
    EngineCrashedError,
    EngineHungError,
    PortTakenError,
    ReplicaError,
)
from hpctrain.serve.replica.health import HealthWatch
from hpctrain.serve.replica.lease import Lease
from hpctrain.serve.replica.life import Life
from hpctrain.serve.replica.log import say
from hpctrain.serve.replica.ports import HeldPort, hold_port
from hpctrain.serve.replica.staging import Weights, weights_of
from hpctrain.train.stop import StopSignals

_POLL_SECONDS = 0.2
_READY_PAUSE_SECONDS = 0.5
_PORT_TRIES = 4
# The first token of an engine may compile kernels.
_FIRST_CANARY_SECONDS = 120.0
# Slurm's own end comes a moment before its time is over.
_SLACK_SECONDS = 1.0
_EVERYWHERE = ("", "0.0.0.0", "::")


class Replica:
    """One task of one launch of a replica."""

    def __init__(
        self, config: ReplicaConfig, life: Life, stop: StopSignals, environment: Mapping[str, str]
    ) -> None:
        self._config, self._life, self._stop = config, life, stop
        self._environment = environment
        self._service = ServiceLayout(Path(config.service))
        self._began_at = clock.monotonic()
        self._engine: EngineProcess | None = None

    def run(self) -> int:
        """Return the exit code of the task, whose end is recorded by then."""
        try:
            self._life.enter("loading")
            source, place = self._config.start.model_path, self._config.stage_directory
            weights = weights_of(source, place, self._environment, self._life.beat)
            if self._asked() is not None:
                return self._leave_startup()
            if self._life.launch.leads:
                return self._lead(weights)
            return self._follow(weights)
        except ReplicaError as error:
            return self._life.failed(error, self._stop.name)
        except OSError as error:
            return self._life.failed(ReplicaError(str(error)), self._stop.name)
        finally:
            if self._engine is not None:
                self._engine.end(0.0)

    # -- the first task ----------------------------------------------------------------------

    def _lead(self, weights: Weights) -> int:
        port = self._loaded(weights)
        if port is None:
            return self._leave_startup()
        lease = self._lease(port, weights)
        answers = self._answers(port)
        self._life.enter("serving")
        lease.renew()
        say(f"ready after {lease.endpoint.load_seconds:.1f} s: {lease.endpoint.url}")
        try:
            reason = self._serve(lease, answers)
        except BaseException:
            lease.withdraw()
            raise
        assert self._engine is not None
        record = Drain(self._times(), self._life, lease, self._engine, answers).run(reason)
        if record.broken_off is None:
            message = "left the router and ended; the engine does not show what was in flight"
        else:
            message = f"drained: {record.broken_off} requests were broken off"
        return self._life.left(message, self._stop.name)

    def _loaded(self, weights: Weights) -> HeldPort | None:
        """Start the engine until it answers, on another port if one is taken; None if stopped."""
        for _ in range(_PORT_TRIES):
            port = hold_port(self._config.start.host, self._config.ports)
            self._start(weights, port.port)
            try:
                return port if self._await_ready(port) else None
            except EngineCrashedError as error:
                port.release()
                assert self._engine is not None
                if not self._engine.lacks_its_port:
                    raise
                say(f"port {port.port} was taken by another program: {error}")
        raise PortTakenError(f"{_PORT_TRIES} ports in a row were taken", node_dependent=True)

    def _await_ready(self, port: HeldPort) -> bool:
        """Wait for the engine's own check and one token; False if a stop was asked for."""
        answers, limit_seconds = self._answers(port), self._config.load_limit_seconds
        deadline = clock.monotonic() + limit_seconds
        while not answers.is_ready():
            self._require_engine()
            if self._asked() is not None:
                return False
            if clock.monotonic() > deadline:
                raise EngineHungError(
                    f"the engine was not ready {limit_seconds:.0f} s after its start", self._tail
                )
            self._pause(_READY_PAUSE_SECONDS)
        problem = answers.canary(min(_FIRST_CANARY_SECONDS, limit_seconds))
        if problem is not None:
            self._require_engine()
            raise EngineHungError(f"the engine says that it is ready, and {problem}", self._tail)
        return True

    def _serve(self, lease: Lease, answers: EngineAnswers) -> str:
        """Renew the lease while the engine is healthy; return why the replica is to leave."""
        watch = HealthWatch(answers, self._config.health_seconds, self._config.canary_seconds)
        renewed_at = clock.monotonic()
        while True:
            self._require_engine()
            reason = self._asked()
            if reason is not None:
                return reason
            problem = watch.problem(clock.monotonic())
            if problem is not None:
                raise EngineHungError(problem, self._tail)
            if not watch.doubtful and clock.monotonic() - renewed_at > lease.lease_seconds / 3:
                lease.renew()
                renewed_at = clock.monotonic()
            self._pause(_POLL_SECONDS)

    # -- tasks of further nodes ----------------------------------------------------------------

    def _follow(self, weights: Weights) -> int:
        """Run this node's part of the engine until the first task has left."""
        launch, run = self._life.launch, self._life.run
        self._start(weights, self._config.start.port)
        told = False
        while not rank_0_has_exited(run, launch.epoch):
            self._require_engine()
            if self._stop.requested and not told:
                told = True
                ask_trainer_to_leave(run, f"task {launch.rank} got {self._stop.name}")
            self._pause(_READY_PAUSE_SECONDS)
        assert self._engine is not None
        self._engine.end(ENGINE_END_SECONDS)
        return self._life.left(f"task {launch.rank} followed the first one", self._stop.name)

    # -- parts -------------------------------------------------------------------------------

    def _start(self, weights: Weights, port: int) -> None:
        """Start this node's engine process."""
        launch, config = self._life.launch, self._config
        node = None
        if config.nodes > 1:
            leader = self._environment.get("MASTER_ADDR", "")
            leader_port = int(self._environment.get("MASTER_PORT", "0"))
            node = NodeOfReplica(config.nodes, launch.node_rank, leader, leader_port)
        settings = self._life.run.directory / f"engine-{launch.node_rank}.yaml"
        start = replace(
            config.start,
            python=self._expanded(config.start.python),
            extra_arguments=tuple(map(self._expanded, config.start.extra_arguments)),
            model_path=str(weights.directory),
            port=port,
            node=node,
            settings_path=str(settings),
        )
        command = command_of(config.engine, start)
        if command.settings is not None:
            settings.write_text(command.settings)
        place = _working_directory(command, start, self._life.run.directory, launch.node_rank)
        secrets = {name: _secret(path) for name, path in command.secret_files.items()}
        if self._engine is not None:
            self._engine.end(0.0)
        say(f"starts {' '.join(command.words)}")
        self._engine = EngineProcess(command.words, {**command.environment, **secrets}, place)

    def _expanded(self, text: str) -> str:
        """Put variables of the job into a word of the spec; `$$` is a dollar sign."""
        return string.Template(text).safe_substitute(self._environment)

    def _answers(self, port: HeldPort) -> EngineAnswers:
        start = self._config.start
        return EngineAnswers(
            SERVING_ENGINES[self._config.engine],
            "127.0.0.1" if start.host in _EVERYWHERE else start.host,
            port.port,
            start.served_name,
            self._config.health_timeout_seconds,
            start.api_key_path,
        )

    def _lease(self, port: HeldPort, weights: Weights) -> Lease:
        config, launch = self._config, self._life.launch
        ends = self._environment.get("SLURM_JOB_END_TIME", "")
        endpoint = Endpoint(
            replica=config.name,
            epoch=launch.epoch,
            job_id=int(self._environment.get("SLURM_JOB_ID", "0")),
            node=launch.node,
            url=f"http://{config.url_host or launch.node}:{port.port}",
            served_name=config.start.served_name,
            engine=config.engine,
            weights_digest=weights.digest,
            ready_since=clock.now(),
            load_seconds=clock.monotonic() - self._began_at,
            lease_until=0.0,
            walltime_ends=float(ends) if ends.isdigit() else None,
        )
        return Lease(self._service, self._life.run, endpoint, config.lease_seconds)

    def _times(self) -> DrainTimes:
        """How long this drain may take: after Slurm's SIGTERM no longer than Slurm waits."""
        config = self._config
        whole_seconds = config.notice_seconds + config.drain_seconds + ENGINE_END_SECONDS
        if self._stop.name == "SIGTERM":
            whole_seconds = min(whole_seconds, max(_SLACK_SECONDS, config.term_seconds))
            whole_seconds -= _SLACK_SECONDS
        return DrainTimes(config.notice_seconds, config.drain_seconds, whole_seconds)

    def _asked(self) -> str | None:
        """Why the replica is to leave; None if nobody has asked."""
        if self._stop.name is not None:
            return f"signal {self._stop.name}"
        return "control/stop" if is_requested(self._life.run, "stop") else None

    def _leave_startup(self) -> int:
        return self._life.left("asked to stop before it was ready", self._stop.name)

    def _require_engine(self) -> None:
        """Raise how the engine has ended, if it has."""
        failure = self._engine.failure() if self._engine is not None else None
        if failure is not None:
            raise failure

    @property
    def _tail(self) -> str:
        return self._engine.tail if self._engine is not None else ""

    def _pause(self, seconds: float) -> None:
        self._life.beat()
        clock.sleep(seconds)


def _working_directory(
    command: EngineCommand, start: EngineStart, run_directory: Path, node_rank: int
) -> Path | None:
    """Make the directory in which an engine runs that knows its weights by a link; else None."""
    if command.model_link is None:
        return None
    place = run_directory / f"engine-{node_rank}"
    place.mkdir(mode=0o700, exist_ok=True)
    link = place / command.model_link
    link.unlink(missing_ok=True)
    os.symlink(start.model_path, link)
    return place


def _secret(path: str) -> str:
    """Read the first line of a file with a secret. Raises OSError."""
    text = Path(path).read_text()
    return text.splitlines()[0].strip() if text else ""
