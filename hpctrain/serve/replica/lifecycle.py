"""Run one task of a replica: load, become ready, serve, and leave.

The first task of a replica answers requests; those of further nodes (pipeline stages, large tensor
parallel groups) run their part of the engine and follow it. Belongs here: this order, the weights
that the engine loads and the port that it takes. Does not belong here: the engine and whether it is
well (`engine_process`), the endpoint and leaving (`drain`), records (`life`), copying weights
(`hpctrain.train.node_copies`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock, reserved_ports
from hpctrain.base.errors import InvalidInputError
from hpctrain.records.exit_records import rank_0_has_exited
from hpctrain.records.requests import ask_trainer_to_leave, is_requested
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Endpoint
from hpctrain.serve.engines.contract import NodeOfReplica
from hpctrain.serve.engines.registry import SERVING_ENGINES, command_of
from hpctrain.serve.plan.leaving import ENGINE_END_SECONDS
from hpctrain.serve.replica.config import ReplicaConfig
from hpctrain.serve.replica.drain import Drain, Lease
from hpctrain.serve.replica.engine_process import EngineAnswers, EngineProcess, HealthWatch
from hpctrain.serve.replica.life import (
    EngineCrashedError,
    EngineHungError,
    Life,
    PortTakenError,
    ReplicaError,
    WeightsError,
    say,
)
from hpctrain.spec.job_text import expanded_text
from hpctrain.train.node_copies import CopyWords, SourceFile, copied_once, only_process
from hpctrain.train.stop import StopSignals

_POLL_SECONDS = 0.2
_READY_PAUSE_SECONDS = 0.5
_PORT_TRIES, _TRIES_OF_KERNEL = 4, 20
# The first token of an engine may compile kernels.
_FIRST_CANARY_SECONDS = 120.0
# Slurm's own end comes a moment before its time is over.
_SLACK_SECONDS = 1.0
_EVERYWHERE = ("", "0.0.0.0", "::")
# Not $TMPDIR, which may be a directory of one job: the locks of ports are between jobs.
_LOCKS_OF_NODE = Path("/tmp")
_WORDS = CopyWords("the weights", "`weights: {stage: false}` reads them where they are")
_STAGED_NAME = "hpctrain-weights"


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
        """Start the engine until it answers, serve, and leave when somebody asks."""
        for _ in range(_PORT_TRIES):
            port, lock = hold_port(self._config.start.host, self._config.ports)
            engine, answers = self._start(weights, port), self._answers(port)
            try:
                if not self._await_ready(answers):
                    return self._leave_startup()
                break
            except EngineCrashedError as error:
                os.close(lock)
                if not engine.lacks_its_port:
                    raise
                say(f"port {port} was taken by another program: {error}")
        else:
            raise PortTakenError(f"{_PORT_TRIES} ports in a row were taken", node_dependent=True)
        lease = self._lease(port, weights)
        self._life.enter("serving")
        lease.renew()
        say(f"ready after {lease.endpoint.load_seconds:.1f} s: {lease.endpoint.url}")
        try:
            reason = self._serve(lease, answers)
        except BaseException:
            lease.withdraw()
            raise
        config = self._config
        whole_seconds = config.notice_seconds + config.drain_seconds + ENGINE_END_SECONDS
        if self._stop.name == "SIGTERM":  # Slurm waits no longer than this
            whole_seconds = min(whole_seconds, max(_SLACK_SECONDS, config.term_seconds))
            whole_seconds -= _SLACK_SECONDS
        record = Drain(
            config.notice_seconds,
            config.drain_seconds,
            whole_seconds,
            self._life,
            lease,
            engine,
            answers,
        ).run(reason)
        if record.broken_off is None:
            message = "left the router and ended; the engine does not show what was in flight"
        else:
            message = f"drained: {record.broken_off} requests were broken off"
        return self._life.left(message, self._stop.name)

    def _await_ready(self, answers: EngineAnswers) -> bool:
        """Wait for the engine's own check and one token; False if a stop was asked for."""
        limit_seconds = self._config.load_limit_seconds
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
        engine, told = self._start(weights, self._config.start.port), False
        while not rank_0_has_exited(run, launch.epoch):
            self._require_engine()
            if self._stop.requested and not told:
                told = True
                ask_trainer_to_leave(run, f"task {launch.rank} got {self._stop.name}")
            self._pause(_READY_PAUSE_SECONDS)
        engine.end(ENGINE_END_SECONDS)
        return self._life.left(f"task {launch.rank} followed the first one", self._stop.name)

    # -- parts -------------------------------------------------------------------------------

    def _start(self, weights: Weights, port: int) -> EngineProcess:
        """Start this node's engine process."""
        launch, config, run = self._life.launch, self._config, self._life.run
        node = None
        if config.nodes > 1:
            leader = self._environment.get("MASTER_ADDR", "")
            leader_port = int(self._environment.get("MASTER_PORT", "0"))
            node = NodeOfReplica(config.nodes, launch.node_rank, leader, leader_port)
        settings = run.directory / f"engine-{launch.node_rank}.yaml"
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
        place = None
        if command.model_link is not None:
            # An engine that knows its weights by a link runs in a directory with that link.
            place = run.directory / f"engine-{launch.node_rank}"
            place.mkdir(mode=0o700, exist_ok=True)
            link = place / command.model_link
            link.unlink(missing_ok=True)
            os.symlink(start.model_path, link)
        environment = dict(command.environment)
        for name, path in command.secret_files.items():
            text = Path(path).read_text()
            environment[name] = text.splitlines()[0].strip() if text else ""
        if self._engine is not None:
            self._engine.end(0.0)
        say(f"starts {' '.join(command.words)}")
        self._engine = EngineProcess(command.words, environment, place)
        return self._engine

    def _expanded(self, text: str) -> str:
        """Put variables of the job, whose script has checked them, into a word of the spec."""
        return expanded_text(text, self._environment)

    def _answers(self, port: int) -> EngineAnswers:
        start = self._config.start
        return EngineAnswers(
            SERVING_ENGINES[self._config.engine],
            "127.0.0.1" if start.host in _EVERYWHERE else start.host,
            port,
            start.served_name,
            self._config.health_timeout_seconds,
            start.api_key_path,
        )

    def _lease(self, port: int, weights: Weights) -> Lease:
        config, launch = self._config, self._life.launch
        ends = self._environment.get("SLURM_JOB_END_TIME", "")
        endpoint = Endpoint(
            replica=config.name,
            epoch=launch.epoch,
            job_id=int(self._environment.get("SLURM_JOB_ID", "0")),
            node=launch.node,
            url=f"http://{config.url_host or launch.node}:{port}",
            served_name=config.start.served_name,
            engine=config.engine,
            weights_digest=weights.digest,
            ready_since=clock.now(),
            load_seconds=clock.monotonic() - self._began_at,
            lease_until=0.0,
            walltime_ends=float(ends) if ends.isdigit() else None,
        )
        return Lease(self._service, self._life.run, endpoint, config.lease_seconds)

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


# -- what an engine needs: a port and weights ---------------------------------------------------


def hold_port(host: str, ports: tuple[int, int] | None) -> tuple[int, int]:
    """Choose a free port, one of `ports` if the site allows only these, and lock it.

    No other replica of this user on the node takes it until the lock, a file descriptor, is closed.
    Others begin at another port, so that replicas of one node seldom try the same. Raises
    PortTakenError, OSError.
    """
    place = _LOCKS_OF_NODE / f"hpctrain-ports-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PortTakenError(f"{place} is another user's", node_dependent=True)
    if ports is not None:
        numbers = list(range(ports[0], ports[1] + 1))
        start = random.randrange(len(numbers))
        candidates = numbers[start:] + numbers[:start]
    else:
        candidates = []
        for _ in range(_TRIES_OF_KERNEL):
            with socket.socket() as probe:
                probe.bind((host, 0))
                candidates.append(int(probe.getsockname()[1]))
    for port in candidates:
        options = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(place / f"{port}.lock", options, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if reserved_ports.is_free(host, port):
            return port, lock
        os.close(lock)
    where = "of this node" if ports is None else f"between {ports[0]} and {ports[1]}"
    raise PortTakenError(f"no port {where} is free on {host}", node_dependent=True)


@dataclass(frozen=True)
class Weights:
    """A directory that an engine can load; `digest` is of the names and sizes of its files."""

    directory: Path
    digest: str


def weights_of(
    source: str,
    stage_directory: str | None,
    environment: Mapping[str, str],
    working: Callable[[], None],
) -> Weights:
    """Check the weights in `source`, and copy them to `stage_directory` unless that is None.

    Whoever else needs them on this node waits for the copy and uses it. `working` is called several
    times a second meanwhile. Raises WeightsError.
    """
    try:
        files = _files_of(Path(source))
    except OSError as error:
        message = f"the weights cannot be read: {error.filename or source}: {error.strerror}"
        raise WeightsError(message, node_dependent=True) from error
    if not any(file.name == "config.json" for file in files):
        raise WeightsError(f"{source} is no Hugging Face directory: it has no config.json")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.size_bytes} {file.name}\n".encode(errors="surrogateescape"))
    if stage_directory is None:
        return Weights(Path(source), digest.hexdigest())
    try:
        place = Path(expanded_text(stage_directory, environment)) / _STAGED_NAME
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_process(place / "lock", working):
            return Weights(copied_once(files, place, {}, working, _WORDS), digest.hexdigest())
    except (InvalidInputError, ValueError) as error:
        raise WeightsError(str(error), node_dependent=True) from error
    except OSError as error:
        where = error.filename or stage_directory
        message = f"the weights cannot be copied to {where}: {error.strerror or error}"
        raise WeightsError(message, node_dependent=True) from error


def _files_of(directory: Path) -> list[SourceFile]:
    """List all files below a directory, in a fixed order. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for parent, directories, names in os.walk(directory, onerror=fail):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            status = path.stat()
            inside = path.relative_to(directory).as_posix()
            found.append(SourceFile(path, inside, status.st_size, status.st_mtime_ns))
    return found
