"""What is done to the service in the night: one function for each event, which waits for its end.

Belongs here: the deeds, and when they are over. Does not belong here: requests (`load`), what is
concluded (`account`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench.rehearsals import ServiceRehearsal
from bench.serving_night.account import Event, Moment
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import DrainRecord, Endpoint
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.runs.service_status import ReplicaStatus
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.faults import crash_node, job_processes
from hpctrain.serve.control import request_restart, request_scale
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.replica.engine_process import EngineAnswers

_ENGINES = ("vllm", "hpctrain.serve.stand_in")
_URGENT_SECONDS = 5
_BUSY_SECONDS = 60.0
_PATIENCE_SECONDS = 1800.0
# Slurm's warning may come a minute early, and the controller counts on it (`serve_jobs`).
_EARLY_SECONDS = 60.0


def preempt(night: ServiceRehearsal) -> Event:
    """A job of a higher tier takes the node of a replica, whose grace holds a drain."""
    hit = victim(night)
    epoch, began = endpoint(night, hit.name).epoch, time.time()
    options = f"-J urgent -p urgent -N1 -w {hit.node} --exclusive -t 20 -o /dev/null"
    night.slurm.submit(f"#!/bin/sh\n#SBATCH {options}\nsleep {_URGENT_SECONDS}\n")
    _wait(night, lambda: drained(night, hit.name, began) is not None, f"a drain of {hit.name}")
    record = drained(night, hit.name, began)
    assert record is not None
    await_again(night, hit.name, epoch)
    return Event("preemption", True, began, time.time(), (moment(hit.name, record),), record.reason)


def kill_engine(night: ServiceRehearsal) -> Event:
    """SIGKILL to the largest process of an engine, as the kernel's out-of-memory killer chooses."""
    largest = {
        one.name: max(engine_processes(night, one), key=lambda process: resident_bytes(process.pid))
        for one in by_age(night)
    }
    epochs = {name: endpoint(night, name).epoch for name in largest}
    hit = busy_victim(night)
    process, began = largest[hit.name], time.time()
    os.kill(process.pid, signal.SIGKILL)
    await_again(night, hit.name, epochs[hit.name])
    return Event("engine killed", False, began, time.time(), (Moment(hit.name, began),))


def lose_node(night: ServiceRehearsal) -> Event:
    """All processes of a replica's node are gone at once, slurmd too; it stays away."""
    epochs = {one.name: endpoint(night, one.name).epoch for one in by_age(night)}
    hit = busy_victim(night)
    assert hit.node is not None
    began = time.time()
    crash_node(night.sandbox, hit.node)
    await_again(night, hit.name, epochs[hit.name])
    return Event("node lost", False, began, time.time(), (Moment(hit.name, began),), hit.node)


def scale_up(night: ServiceRehearsal) -> Event:
    """One replica more, as `serve scale` asks for."""
    before, began = night.ready, time.time()
    request_scale(night.service, len(before) + 1)
    _wait(night, lambda: len(night.ready) == len(before) + 1, "one replica more")
    new = next(iter(set(night.ready) - set(before)))
    return Event("scale up", True, began, time.time(), (), new)


def scale_down(night: ServiceRehearsal) -> Event:
    """One replica less."""
    before, began = night.ready, time.time()
    request_scale(night.service, len(before) - 1)
    _wait(night, lambda: len(night.ready) == len(before) - 1, "one replica less")
    gone = set(before) - set(night.ready)
    moments = tuple(_drained(night, gone, began))
    return Event("scale down", True, began, time.time(), moments)


def restart(night: ServiceRehearsal) -> Event:
    """A rolling restart of all replicas."""
    before, began = night.ready, time.time()
    request_restart(night.service, "the night")
    _wait(night, lambda: night.status.restart == "done", "the end of the restart")
    moments = tuple(_drained(night, before, began))
    _wait(night, lambda: len(night.ready) == len(before), "as many replicas as before")
    return Event("rolling restart", True, began, time.time(), moments)


def succeed(night: ServiceRehearsal) -> Event:
    """The time limit of a replica's job comes near: its successor answers before it leaves.

    An administrator shortens the limit, so that the night need not be as long as a walltime.
    """
    hit, before = victim(night), night.ready
    assert hit.job_id is not None
    job, status = night.slurm.show_job(hit.job_id), night.status
    assert job is not None and job.start_time is not None
    # Not sooner than a successor can be there, as the controller itself reckons.
    lead_seconds = 2.0 * (status.load_seconds or 0.0) + _EARLY_SECONDS
    began = time.time()
    limit_seconds = began - job.start_time + warning_seconds(night, hit.name) + lead_seconds
    command = ("scontrol", "update", f"JobId={hit.job_id}", f"TimeLimit={limit_seconds / 60:.0f}")
    environment = {**os.environ, **night.sandbox.environment()}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    new = str(parsed(hit.name).next_generation)
    expected = sorted({*before, new} - {hit.name})
    _wait(night, lambda: night.ready == expected, f"{new} in place of {hit.name}")
    moments = tuple(_drained(night, [hit.name], began))
    return Event("walltime successor", True, began, time.time(), moments, new)


EVENTS: dict[str, Callable[[ServiceRehearsal], Event]] = {
    "preempt": preempt,
    "kill": kill_engine,
    "node": lose_node,
    "up": scale_up,
    "down": scale_down,
    "restart": restart,
    "successor": succeed,
}


def victim(night: ServiceRehearsal) -> ReplicaStatus:
    """A replica in rotation: the one that was hit the longest time ago, or never."""
    return by_age(night)[0]


def by_age(night: ServiceRehearsal) -> list[ReplicaStatus]:
    """The replicas in rotation, that which has been ready for the longest first."""
    ready = [one for one in night.status.replicas if one.in_rotation and one.phase == "ready"]
    return sorted(ready, key=lambda one: endpoint(night, one.name).ready_since)


def endpoint(night: ServiceRehearsal, name: str) -> Endpoint:
    found = read_record(night.service.endpoint(parsed(name)), Endpoint)
    assert found is not None, f"{name} is not published"
    return found


def parsed(name: str) -> ReplicaName:
    found = ReplicaName.parse(name)
    assert found is not None, name
    return found


def await_again(night: ServiceRehearsal, name: str, epoch: int) -> None:
    """Wait until a launch after `epoch` is asked, and with it all replicas that are wanted."""

    def is_back() -> bool:
        status = night.status
        ready = {one.name for one in status.replicas if one.in_rotation and one.phase == "ready"}
        found = read_record(night.service.endpoint(parsed(name)), Endpoint)
        # Its endpoint is gone before the router's names are.
        is_old = name in ready and (found is None or found.epoch <= epoch)
        return len(ready) >= status.wanted and not is_old

    _wait(night, is_back, f"as many replicas as wanted after {name} was hit")


def busy_victim(night: ServiceRehearsal) -> ReplicaStatus:
    """A replica that computes a request at this moment, which then is in danger.

    Of several, the one that was hit the longest time ago.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    ready = by_age(night)
    answers = [_answers(endpoint(night, one.name)) for one in ready]
    while time.monotonic() < deadline:
        for one, asked in zip(ready, answers, strict=True):
            load = asked.load()
            if load is not None and load.in_flight > 0:
                return one
        time.sleep(0.01)
    raise AssertionError("no replica computes anything")


def _answers(where: Endpoint) -> EngineAnswers:
    address = urlsplit(where.url)
    assert address.hostname is not None and address.port is not None
    engine = SERVING_ENGINES["vllm"]
    host, port, name = address.hostname, address.port, where.served_name
    return EngineAnswers(engine, host, port, name, _BUSY_SECONDS)


def drained(night: ServiceRehearsal, name: str, since: float) -> DrainRecord | None:
    """The record of a drain that has ended."""
    record = read_record(night.service.replica(parsed(name)).drain, DrainRecord)
    if record is None or record.withdrawn_at < since or record.ended_at is None:
        return None
    return record


def moment(name: str, record: DrainRecord) -> Moment:
    return Moment(name, record.withdrawn_at, record.broken_off)


def _wait(night: ServiceRehearsal, reached: Callable[[], bool], what: str) -> None:
    """Wait for as long as replicas may load one after the other on a busy machine."""
    night.wait(reached, what, _PATIENCE_SECONDS)


def _drained(night: ServiceRehearsal, names: Iterable[str], since: float) -> Iterator[Moment]:
    for name in sorted(names):

        def has_left(name: str = name) -> bool:
            return drained(night, name, since) is not None

        _wait(night, has_left, f"{name} drained")
        record = drained(night, name, since)
        assert record is not None
        yield moment(name, record)


def engine_processes(night: ServiceRehearsal, hit: ReplicaStatus) -> list[JobProcess]:
    """The processes of a replica's engine."""
    found = [
        one
        for one in job_processes(night.sandbox, str(hit.job_id))
        if any(word in " ".join(one.command_line).lower() for word in _ENGINES)
        and "hpctrain.serve.replica" not in one.command_line
    ]
    assert found, f"no engine in job {hit.job_id}"
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def warning_seconds(night: ServiceRehearsal, name: str) -> float:
    """How long before its time limit Slurm warns the job of a replica."""
    config = known_supervise_config(night.service.replica(parsed(name)).supervise_config)
    assert config is not None
    return config.warning_seconds
