"""A task of a replica as a process of a test, below a service directory, without Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router_programs import SERVED_NAME
from waiting import PATIENCE_SECONDS, wait_until

from hpctrain.records.epochs import claim_epoch
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import ExitRecord, Progress, read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import DrainRecord, Endpoint, Rotation
from hpctrain.serve.engines.contract import EngineStart
from hpctrain.serve.replica.config import ReplicaConfig
from hpctrain.serve.stand_in import write_engine_interpreter

NAME = ReplicaName(1, 1)


@dataclass
class Task:
    """One task of a replica, and what it has written."""

    service: ServiceLayout
    run: RunLayout
    process: subprocess.Popen[str]
    epoch: int

    @property
    def endpoint(self) -> Endpoint | None:
        return read_record(self.service.endpoint(NAME), Endpoint)

    @property
    def progress(self) -> Progress | None:
        found = read_record(self.run.progress, Progress)
        return found if found is not None and found.epoch == self.epoch else None

    @property
    def drain(self) -> DrainRecord | None:
        return read_record(self.run.drain, DrainRecord)

    @property
    def exit(self) -> ExitRecord:
        (record,) = read_exit_records(self.run, self.epoch)
        return record

    @property
    def engine_pid(self) -> int:
        """The process of the engine: the child of the task."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(text.split()[0])

    @property
    def log(self) -> str:
        return (self.run.logs / "task.log").read_text()

    def await_endpoint(self) -> Endpoint:
        self.wait(lambda: self.endpoint is not None, "an endpoint")
        endpoint = self.endpoint
        assert endpoint is not None
        return endpoint

    def await_exit(self) -> int:
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        def reached_by_a_living_one() -> bool:
            assert self.process.poll() is None, f"ended before {what}\n{self.log}"
            return reached()

        wait_until(reached_by_a_living_one, lambda: f"{what}\n{self.log}")

    def rotate(self, *names: str) -> None:
        """What the router writes after a pass."""
        write_record(self.service.rotation, Rotation(epoch=1, time=time.time(), replicas=names))


def make_service(directory: Path) -> ServiceLayout:
    service = ServiceLayout(directory / "chat-7f3a")
    service.create()
    run = service.replica(NAME)
    run.create()
    run.supervise_config.write_text("{}")
    weights = directory / "weights"
    weights.mkdir(exist_ok=True)
    (weights / "config.json").write_text("{}")
    return service


def config_of(service: ServiceLayout, **changes: Any) -> ReplicaConfig:
    """Settings with short times; `start` in `changes` changes the engine's."""
    python = service.directory.parent / "python"
    write_engine_interpreter(python)
    start = EngineStart(
        python=str(python),
        model_path=str(service.directory.parent / "weights"),
        served_name=SERVED_NAME,
        host="127.0.0.1",
        port=0,
        drain_seconds=20,
    )
    wanted: dict[str, Any] = {
        "service": str(service.directory),
        "name": str(NAME),
        "engine": "vllm",
        "start": replace(start, **changes.pop("start", {})),
        "url_host": "127.0.0.1",
        "load_limit_seconds": 40.0,
        "lease_seconds": 3.0,
        "notice_seconds": 0.5,
        "drain_seconds": 20.0,
        "term_seconds": 30.0,
        "health_seconds": 0.2,
        "health_timeout_seconds": 1.0,
    }
    return ReplicaConfig(**wanted | changes)


@contextlib.contextmanager
def task_of(
    service: ServiceLayout, config: ReplicaConfig, rank: int = 0, **settings: Any
) -> Iterator[Task]:
    """Start a task of a new launch, with a stand-in of these settings for an engine."""
    run = service.replica(NAME)
    run.replica_config.write_text(config.model_dump_json())
    told = service.directory.parent / "stand-in.json"
    told.write_text(json.dumps(settings))
    epoch = claim_epoch(run.epochs, "a test") if rank == 0 else 1
    environment = {
        **os.environ,
        "STAND_IN_ENGINE": str(told),
        "HPCTRAIN_EPOCH": str(epoch),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_NTASKS": str(config.nodes),
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": f"n{rank + 1}",
        "SLURM_JOB_ID": "7",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    }
    log = run.logs / ("task.log" if rank == 0 else f"task-{rank}.log")
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpctrain.serve.replica", str(run.replica_config)],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=run.directory,
        )
    try:
        yield Task(service, run, process, epoch)
    finally:
        process.kill()
        process.wait()
