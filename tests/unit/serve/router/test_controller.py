"""One controller steers: what it does, writes before it does it, and when it gives up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from serving_documents import SETTINGS, endpoint_of
from virtual_clock import ShiftedClock
from waiting import wait_until

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import (
    RestartRequest,
    ScaleRequest,
    ServiceEventKind,
    ServiceLedger,
    ServiceSettings,
    ServiceState,
    Traffic,
)
from hpctrain.serve.jobs import JobView
from hpctrain.serve.router import controller as module
from hpctrain.serve.router.controller import Controller
from hpctrain.serve.router.programs import Counts
from hpctrain.serve.router.traffic import Engines, TrafficWatch


class CountingRouter:
    """A router that counts as a test wants it to."""

    counted = Counts(0, 0, 0, 0, 0, None)

    def counts(self) -> Counts:
        return self.counted


class PlayedJobs:
    """Jobs of replicas as a test has them."""

    def __init__(self, service: ServiceLayout) -> None:
        self.service = service
        self.views: dict[ReplicaName, JobView] = {}
        self.answers = True
        self.refuses = False
        self.announced: list[str | None] = []
        self.at_look: Callable[[], object] = lambda: None

    def look(self) -> tuple[JobView, ...] | None:
        self.at_look()
        return tuple(self.views[name] for name in sorted(self.views)) if self.answers else None

    def start(self, name: ReplicaName) -> int:
        last = ServiceLedger(self.service.ledger).events()[-1]
        assert last.event is ServiceEventKind.START_REPLICA
        self.announced.append(last.replica)
        if self.refuses:
            raise SlurmRefusedError("Job violates accounting/QOS policy")
        assert name not in self.views
        self.views[name] = JobView(name, "pending", time.time(), job_id=len(self.views) + 1)
        return len(self.views)

    def drain(self, name: ReplicaName) -> None:
        self.views[name] = replace(self.views[name], drain_asked=True)

    def run(self, name: ReplicaName, **changes: object) -> None:
        now = time.time()
        view = replace(self.views[name], state="running", started_at=now, node="n1")
        self.views[name] = replace(view, **changes)  # type: ignore[arg-type]

    def end(self, name: ReplicaName, problem: str = "") -> None:
        self.views[name] = replace(self.views[name], state="over", problem=problem)


class Steered:
    """A service that a controller steers, with everything around it played."""

    def __init__(self, directory: Path, settings: ServiceSettings = SETTINGS) -> None:
        self.layout = ServiceLayout(directory / "s")
        self.layout.create()
        self.settings = settings
        self.jobs, self.router = PlayedJobs(self.layout), CountingRouter()
        self.asked: dict[ReplicaName, str] = {}
        self.controller = self.another()

    def another(self) -> Controller:
        epoch = claim_epoch(self.layout.epochs, claimant := f"c{time.time_ns()}")
        traffic = TrafficWatch(self.layout, self.router, Engines(None))  # type: ignore[arg-type]
        return Controller(
            self.layout, self.settings, self.jobs, traffic, lambda: self.asked, epoch, claimant
        )

    def passes(self, count: int = 2) -> None:
        for _ in range(count):
            self.controller.make_pass()

    def ready(self, *names: ReplicaName) -> None:
        for name in names:
            self.jobs.run(name)
            url = f"http://127.0.0.1:{name.number}{name.generation:02d}"
            endpoint = endpoint_of(name, url=url)
            write_record(self.layout.endpoint(name), endpoint)
            self.asked[name] = endpoint.url

    @property
    def state(self) -> ServiceState:
        found = read_record(self.layout.state, ServiceState)
        assert found is not None
        return found

    @property
    def phases(self) -> dict[str, str]:
        return {one.name: one.phase for one in self.state.replicas}

    def events(self, kind: ServiceEventKind) -> list[str]:
        events = ServiceLedger(self.layout.ledger).events()
        return [event.replica or event.reason or "" for event in events if event.event is kind]


@pytest.fixture
def service(tmp_path: Path) -> Steered:
    return Steered(tmp_path)


A, B, C = ReplicaName(1, 1), ReplicaName(2, 1), ReplicaName(3, 1)


def test_a_service_is_started(service: Steered) -> None:
    service.passes()
    assert sorted(service.jobs.views) == [A, B]
    assert service.jobs.announced == ["r001-g001", "r002-g001"], "before each was submitted"
    assert service.phases == {"r001-g001": "queued", "r002-g001": "queued"}
    service.ready(A)
    service.jobs.run(B)
    service.passes()
    assert service.phases == {"r001-g001": "ready", "r002-g001": "loading"}
    assert service.events(ServiceEventKind.REPLICA_READY) == ["r001-g001"]
    assert service.state.load_seconds == 33.0, "as measured"
    service.passes(5)
    assert len(service.jobs.views) == 2


def test_a_person_changes_the_number(service: Steered) -> None:
    service.passes()
    service.ready(A, B)
    write_record(service.layout.scale_request, ScaleRequest(replicas=3, user="u", time=1.0))
    service.passes()
    assert sorted(service.jobs.views) == [A, B, C]
    write_record(service.layout.scale_request, ScaleRequest(replicas=1, user="u", time=2.0))
    service.passes()
    left = [name for name, view in service.jobs.views.items() if not view.drain_asked]
    assert left == [A]
    assert service.state.reason == "as a person has asked"
    write_record(service.layout.scale_request, ScaleRequest(replicas=None, user="u", time=3.0))
    service.passes()
    assert service.state.wanted == 2


def test_while_slurm_does_not_answer_nothing_is_done(service: Steered) -> None:
    service.jobs.answers = False
    service.passes()
    assert not service.jobs.views
    assert service.state.waits == ("Slurm does not answer",)


def test_a_refused_start_is_noted_and_tried_again(service: Steered) -> None:
    service.jobs.refuses = True
    service.passes(1)
    assert "QOS policy" in ServiceLedger(service.layout.ledger).events()[-1].reason  # type: ignore[operator]
    service.passes(5)
    failed = service.events(ServiceEventKind.START_FAILED)
    assert failed == ["r001-g001", "r002-g001"], "not again at once: it would fill the ledger"
    service.jobs.refuses = False
    service.controller._not_before.clear()
    service.passes()
    assert sorted(service.jobs.views) == [A, B]


def test_a_replica_that_fails_is_replaced_later(
    service: Steered, shifted_clock: ShiftedClock
) -> None:
    service.passes()
    service.ready(A, B)
    service.passes()
    service.jobs.end(B, "weights: cannot be read")
    del service.asked[B]
    service.layout.endpoint(B).unlink()
    service.passes()
    assert sorted(service.jobs.views) == [A, B]
    assert "r002-g001 has failed" in service.state.waits[0]
    assert service.events(ServiceEventKind.REPLICA_FAILED) == ["r002-g001"]
    shifted_clock.ahead_seconds = 20.0
    service.passes()
    assert sorted(service.jobs.views) == [A, B, B.next_generation]


def test_one_controller_gives_up_when_another_begins(service: Steered) -> None:
    service.passes()
    second = service.another()
    write_record(service.layout.scale_request, ScaleRequest(replicas=4, user="u", time=1.0))
    service.passes(3)
    assert service.controller.superseded
    assert len(service.jobs.views) == 2, "the first one does nothing any more"
    assert service.events(ServiceEventKind.WANTED) == ["the plan's number"]
    second.make_pass()
    assert len(service.jobs.views) == 4
    assert not second.superseded


def test_another_one_may_begin_while_this_one_decides(service: Steered) -> None:
    def begin() -> None:
        claim_epoch(service.layout.epochs, "another")

    service.jobs.at_look = begin
    service.passes(1)
    assert service.controller.superseded
    assert not service.jobs.views
    assert not service.layout.state.exists(), "the other one writes it"


def test_a_new_controller_goes_on_where_the_last_one_was(service: Steered) -> None:
    service.passes()
    service.ready(A, B)
    service.passes()
    before = {one.name: one.since for one in service.state.replicas}
    service.controller = service.another()
    service.passes()
    assert {one.name: one.since for one in service.state.replicas} == before
    assert len(service.jobs.views) == 2
    assert service.events(ServiceEventKind.REPLICA_READY) == ["r001-g001", "r002-g001"]


def test_between_ledger_and_action_a_controller_may_end(service: Steered) -> None:
    ledger = ServiceLedger(service.layout.ledger)
    ledger.append(ServiceEventKind.START_REPLICA, epoch=1, replica="r001-g001")
    service.passes()
    assert sorted(service.jobs.views) == [A, B]
    ledger.append(ServiceEventKind.DRAIN_REPLICA, epoch=1, replica="r001-g001")
    write_record(service.layout.scale_request, ScaleRequest(replicas=0, user="u", time=1.0))
    service.controller = service.another()
    service.passes()
    assert all(view.drain_asked for view in service.jobs.views.values())


def test_down(service: Steered) -> None:
    service.passes()
    service.ready(A, B)
    service.layout.down_request.touch()
    service.passes()
    assert all(view.drain_asked for view in service.jobs.views.values())
    assert not service.controller.is_over
    for name in (A, B):
        service.jobs.end(name)
    service.passes()
    assert service.controller.is_over
    assert service.phases == {"r001-g001": "ended", "r002-g001": "ended"}


class TestRollingRestart:
    """Two replicas, and a person who wants them restarted."""

    @pytest.fixture(autouse=True)
    def _answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compared: list[tuple[str, str, str]] = []
        self.difference = ""

        def difference_of(old: str, new: str, model: str) -> str:
            self.compared.append((old, new, model))
            return self.difference

        monkeypatch.setattr(module, "difference_of", difference_of)

    def begin(self, service: Steered, *, compare: bool = True) -> None:
        service.passes()
        service.ready(A, B)
        service.passes()
        request = RestartRequest(user="u", time=time.time(), compare=compare)
        write_record(service.layout.restart_request, request)
        service.passes()

    def until(self, service: Steered, reached: Callable[[], bool]) -> None:
        def reached_after_a_pass() -> bool:
            service.passes(1)
            return reached()

        wait_until(lambda: reached() or reached_after_a_pass())

    def test_one_after_the_other(self, service: Steered) -> None:
        self.begin(service)
        new = A.next_generation
        assert sorted(service.jobs.views) == [A, new, B]
        assert not service.jobs.views[A].drain_asked
        service.ready(new)
        self.until(service, lambda: service.jobs.views[A].drain_asked)
        assert self.compared == [("http://127.0.0.1:101", "http://127.0.0.1:102", "tiny")]
        self.until(service, lambda: B.next_generation in service.jobs.views)
        assert service.state.restart == "1 of 2 replaced"
        service.jobs.end(A)
        service.ready(B.next_generation)
        self.until(service, lambda: service.jobs.views[B].drain_asked)
        self.until(service, lambda: not service.layout.restart_request.exists())
        assert service.state.restart == "done"
        service.jobs.end(B)
        service.passes(4)
        assert len(service.jobs.views) == 4

    def test_it_stops_at_the_first_bad_one(self, service: Steered) -> None:
        self.difference = "`1 2 3` was continued by '4', now by 'x'"
        self.begin(service)
        service.ready(A.next_generation)
        self.until(service, lambda: not service.layout.restart_request.exists())
        assert service.jobs.views[A.next_generation].drain_asked
        assert not service.jobs.views[A].drain_asked
        assert "answers otherwise" in (service.state.restart or "")
        service.passes(4)
        assert B.next_generation not in service.jobs.views

    def test_other_weights_are_not_compared(self, service: Steered) -> None:
        self.begin(service, compare=False)
        service.ready(A.next_generation)
        self.until(service, lambda: service.jobs.views[A].drain_asked)
        assert self.compared == []

    def test_a_service_that_is_to_end_stops_it(self, service: Steered) -> None:
        self.begin(service)
        service.layout.down_request.touch()
        service.passes(3)
        assert not service.layout.restart_request.exists()
        assert service.state.restart == "stopped: the service is to end"
        kinds = [event.event for event in ServiceLedger(service.layout.ledger).events()]
        assert ServiceEventKind.RESTART_STOPPED in kinds
        assert ServiceEventKind.RESTART_DONE not in kinds


def test_to_zero_and_back(tmp_path: Path, shifted_clock: ShiftedClock) -> None:
    scaling = SETTINGS.scaling.model_copy(update={"least": 0, "idle_seconds": 30.0})
    service = Steered(tmp_path, SETTINGS.model_copy(update={"scaling": scaling}))
    service.router.counted = Counts(5, 0, 0, 0, 0, time.time())
    service.passes()
    service.ready(A, B)
    shifted_clock.ahead_seconds = 31.0
    service.passes()
    assert all(view.drain_asked for view in service.jobs.views.values())
    for name in (A, B):
        service.jobs.end(name)
        service.layout.endpoint(name).unlink()
    service.passes()
    # a router that was started anew remembers when the last request was
    service.router.counted = Counts(0, 0, 0, 0, 0, None)
    service.controller = service.another()
    shifted_clock.ahead_seconds = 40.0
    service.passes()
    assert len(service.jobs.views) == 2
    service.router.counted = Counts(1, 0, 1, 0, 0, time.time() + 41)
    service.passes()
    assert len(service.jobs.views) == 4
    traffic = read_record(service.layout.traffic, Traffic)
    assert traffic is not None
