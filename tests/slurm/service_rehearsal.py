"""A whole service on the sandbox: replicas that compute nothing, the router, and its clients.

Belongs here: starting one, asking it, looking at it. Does not belong here: what is asserted, one
replica by itself (`replica_rehearsal`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rehearsal import PATIENCE_SECONDS, patient_client, profile_text
from router_programs import Reply, ask
from serving_documents import SERVED_NAME, service_plan, service_spec_text, write_service

from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Address, ServiceEvent, ServiceEventKind, ServiceLedger
from hpctrain.runs.service_status import ServiceStatus, service_status
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.faults import job_processes
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.serve.service_job import ServiceInputs, write_router
from hpctrain.serve.stand_in import write_engine_interpreter
from hpctrain.serve.start_router import start_router
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import load_profile, load_service_spec, partition_profile


@dataclass
class ServiceRehearsal:
    """A service that runs."""

    sandbox: Sandbox
    slurm: SlurmClient
    service: ServiceLayout
    router_job: int

    @property
    def status(self) -> ServiceStatus:
        return service_status(self.service)

    @property
    def ready(self) -> list[str]:
        """The replicas that the router asks."""
        return sorted(one.name for one in self.status.replicas if one.in_rotation)

    @property
    def address(self) -> Address | None:
        return read_record(self.service.address, Address)

    def phases(self) -> dict[str, str]:
        return {one.name: one.phase for one in self.status.replicas}

    def events(self, kind: ServiceEventKind) -> list[ServiceEvent]:
        events = ServiceLedger(self.service.ledger).events()
        return [event for event in events if event.event is kind]

    def clients(self, **more: Any) -> Clients:
        return Clients(self, **more)

    def wait(
        self, reached: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"never {what}\n{self.story()}"
            time.sleep(0.5)

    def wait_ready(self, *names: str) -> None:
        """Until the router asks exactly these replicas."""
        self.wait(lambda: self.ready == sorted(names), f"serving by {names}")

    def router_processes(self) -> list[JobProcess]:
        """All processes of the router's first job, supervisor and srun included."""
        return list(job_processes(self.sandbox, str(self.router_job)))

    def kill_router(self) -> None:
        """Kill the task of the router's job; what it has started ends with it."""
        for process in self.router_processes():
            if tuple(process.command_line[1:3]) == ("-m", "hpctrain.serve.router"):
                os.kill(process.pid, signal.SIGKILL)
                return
        raise AssertionError(f"no router to kill\n{self.story()}")

    def story(self) -> str:
        """Everything that was written, for the message of a failed assertion."""
        texts = [self.status.model_dump_json(indent=1)]
        for path in sorted(self.service.directory.rglob("*")):
            if path.suffix in (".log", ".out", ".jsonl") and path.is_file():
                texts.append(f"--- {path}\n{path.read_text(errors='replace')[-2500:]}")
        return "\n".join(texts)


@dataclass
class Clients:
    """Clients that ask the service one after the other; each reads the address file anew.

    `replies` are all answers, with the time at which each request was sent.
    """

    rehearsal: ServiceRehearsal
    per_second: float = 4.0
    tokens: int = 20
    replies: list[tuple[float, Reply]] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self._stopping = threading.Event()
        self._sent: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        for thread in self._sent:
            thread.join(PATIENCE_SECONDS)

    def _send(self) -> None:
        while not self._stopping.wait(1 / self.per_second):
            thread = threading.Thread(target=self._one, daemon=True)
            thread.start()
            self._sent.append(thread)

    def _one(self) -> None:
        sent_at, address = time.time(), self.rehearsal.address
        if address is None:
            self.replies.append((sent_at, Reply(0, {}, b"no address")))
            return
        port = int(address.url.rpartition(":")[2])
        number = len(self.replies)
        asked = {"model": SERVED_NAME, "prompt": f"request {number}", "max_tokens": self.tokens}
        body = json.dumps({**asked, "stream": number % 2 == 0}).encode()
        reply = ask(port, "POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if reply.status == 200 and number % 2 == 0 and not reply.body.endswith(b"[DONE]\n\n"):
            reply = Reply(0, {}, b"a stream that broke off")
        self.replies.append((sent_at, reply))

    @property
    def failed(self) -> list[str]:
        """What went wrong, by its status."""
        return [
            f"{sent_at:.1f}: {reply.status} {reply.body[:120]!r}"
            for sent_at, reply in self.replies
            if reply.status != 200
        ]


@contextlib.contextmanager
def service_on(
    sandbox: Sandbox,
    place: Path,
    router: str,
    *,
    replicas: str = "{count: 2}",
    told: dict[str, Any] | None = None,
    walltime: str = "00:30:00",
    load_time: str = "30s",
) -> Iterator[ServiceRehearsal]:
    """Start a service whose router is this YAML; ended afterwards, whatever happens."""
    (place / "weights").mkdir()
    (place / "weights" / "config.json").write_text("{}")
    (place / "stand-in.json").write_text(json.dumps({"token_seconds": 0.01, **(told or {})}))
    write_engine_interpreter(place / "engine-python")
    text = service_spec_text(place, walltime=walltime).replace("30s\n", f"{load_time}\n")
    text += f"router: {router}\nreplicas: {replicas}\n"
    (place / "service.yaml").write_text(text)
    profile = profile_text(sandbox.shape, sys.executable) + "metrics: {address: 127.0.0.1}\n"
    (place / "profile.yaml").write_text(profile)
    plan = service_plan()
    service = write_service(
        place / "runs" / "chat-7f3a",
        place / "service.yaml",
        place / "profile.yaml",
        plan,
        sys.executable,
    )
    loaded = load_service_spec(place / "service.yaml")
    site = partition_profile(load_profile(place / "profile.yaml"), "train")
    write_router(service, ServiceInputs(loaded, site, plan, place / "weights", sys.executable))
    slurm = patient_client({**os.environ, **sandbox.environment()})
    rehearsal = ServiceRehearsal(sandbox, slurm, service, start_router(service, slurm))
    try:
        yield rehearsal
    finally:
        with contextlib.suppress(Exception):
            service.down_request.touch()
            slurm.cancel_all(slurm.jobs_of_users([os.getuid()]))
