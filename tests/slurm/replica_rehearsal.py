"""A replica of a service on the sandbox, with an engine that computes nothing, and its clients.

Belongs here: starting one, asking it, hurting it. Does not belong here: what is asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rehearsal import Rehearsal, patient_client, profile_text
from serving_documents import SERVED_NAME, service_plan, service_spec_text, write_service

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import DrainRecord, Endpoint, Rotation
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.serve.replicas import start_replica
from hpctrain.serve.stand_in import write_engine_interpreter

NAME = ReplicaName(1, 1)


@dataclass
class ReplicaRehearsal(Rehearsal):
    """The job of one replica: `run` is its run directory."""

    service: ServiceLayout = field(kw_only=True)

    @property
    def endpoint(self) -> Endpoint | None:
        return read_record(self.service.endpoint(NAME), Endpoint)

    @property
    def drain(self) -> DrainRecord | None:
        return read_record(self.run.layout.drain, DrainRecord)

    def await_endpoint(self, after_epoch: int = 0) -> Endpoint:
        """Wait until a launch after that one answers."""

        def answers() -> bool:
            return self.endpoint is not None and self.endpoint.epoch > after_epoch

        self.wait(answers, "a replica that answers")
        assert self.endpoint is not None
        return self.endpoint

    def await_event(self, kind: EventKind, cause: str | None = None) -> Event:
        """Wait for an event in the replica's ledger; returns the newest."""

        def found() -> list[Event]:
            return [one for one in self.events(kind) if cause in (None, one.cause)]

        self.wait(lambda: bool(found()), f"{kind} {cause or ''}")
        return found()[-1]

    def route(self) -> Router:
        return Router(self)


class Router:
    """What the router does for the replica: it looks at the endpoint and says whom it asks."""

    def __init__(self, replica: ReplicaRehearsal) -> None:
        self._replica = replica
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Router:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.3):
            names = (str(NAME),) if self._replica.endpoint is not None else ()
            rotation = Rotation(epoch=1, time=time.time(), replicas=names)
            with contextlib.suppress(OSError):
                write_record(self._replica.service.rotation, rotation, durable=False)


class Clients(threading.Thread):
    """Clients that ask the replica again and again while the router names it.

    `codes` are the answers, 0 for a connection that was broken off.
    """

    def __init__(self, replica: ReplicaRehearsal, tokens: int = 60, width: int = 3) -> None:
        super().__init__(daemon=True)
        self._replica, self._tokens, self._width = replica, tokens, width
        self.codes: list[int] = []
        self._ended = threading.Event()

    def run(self) -> None:
        threads = [threading.Thread(target=self._ask) for _ in range(self._width)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def end(self) -> list[int]:
        self._ended.set()
        self.join()
        return self.codes

    def _ask(self) -> None:
        """Ask as a router does: by what it has written, not by what has happened since."""
        url = ""
        while not self._ended.is_set():
            rotation = read_record(self._replica.service.rotation, Rotation)
            endpoint = self._replica.endpoint
            url = endpoint.url if endpoint is not None else url
            if rotation is None or str(NAME) not in rotation.replicas or not url:
                time.sleep(0.05)
                continue
            body = {"model": SERVED_NAME, "prompt": "a b", "max_tokens": self._tokens}
            self.codes.append(answer_code(f"{url}/v1/completions", body))


def answer_code(url: str, body: dict[str, Any]) -> int:
    """The status of an answer; 0 where the connection was refused or broken off."""
    data = json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
        ) as response:
            response.read()
            code: int = response.status
            return code
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def engine_of(replica: ReplicaRehearsal) -> list[JobProcess]:
    """The processes of the engine in the replica's job."""
    found = [one for one in replica.processes() if "hpctrain.serve.stand_in" in one.command_line]
    assert found, replica.logs()
    return found


@contextlib.contextmanager
def replica_on(
    sandbox: Sandbox, place: Path, *, told: dict[str, Any] | None = None, **spec: str
) -> Iterator[ReplicaRehearsal]:
    """Start a replica with a stand-in of these settings; `spec` as of `service_spec_text`."""
    (place / "weights").mkdir()
    (place / "weights" / "config.json").write_text("{}")
    (place / "stand-in.json").write_text(json.dumps({"token_seconds": 0.02, **(told or {})}))
    write_engine_interpreter(place / "engine-python")
    (place / "service.yaml").write_text(service_spec_text(place, **spec))
    profile = profile_text(sandbox.shape, sys.executable) + "metrics: {address: 127.0.0.1}\n"
    (place / "profile.yaml").write_text(profile)
    service = write_service(
        place / "runs" / "chat-7f3a",
        place / "service.yaml",
        place / "profile.yaml",
        service_plan(),
        sys.executable,
    )
    slurm = patient_client({**os.environ, **sandbox.environment()})
    job_id = start_replica(service, NAME, slurm)
    run = RunFiles(service.replica(NAME))
    replica = ReplicaRehearsal(sandbox, slurm, run, job_id, place, service=service)
    try:
        yield replica
    finally:
        with contextlib.suppress(Exception):
            slurm.cancel(job_id)
