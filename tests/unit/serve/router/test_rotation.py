"""Endpoints of replicas become the router's replicas, and only as long as they count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving_documents import endpoint_of
from waiting import wait_until

from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import Rotation
from hpctrain.serve.router import rotation as module
from hpctrain.serve.router.programs import Counts
from hpctrain.serve.router.rotation import EndpointReader, RotationLoop

ONE, TWO = ReplicaName(1, 1), ReplicaName(2, 1)


class FakeRouter:
    """A router that does as it is told, or not."""

    port = 1

    def __init__(self) -> None:
        self.urls: set[str] = set()
        self.obeys = True
        self.told: list[str] = []

    def start(self) -> None: ...

    def problem(self) -> str | None:
        return None

    def restart(self) -> None: ...

    def add(self, url: str) -> bool:
        self.told.append(f"+{url}")
        if self.obeys:
            self.urls.add(url)
        return self.obeys

    def remove(self, url: str) -> bool:
        self.told.append(f"-{url}")
        if self.obeys:
            self.urls.discard(url)
        return self.obeys

    def replicas(self) -> frozenset[str] | None:
        return frozenset(self.urls) if self.obeys else None

    def counts(self) -> Counts:
        return Counts(0, 0, 0, 0, 0, None)

    def stop(self, seconds: float) -> None: ...


class Service:
    """A service directory whose replicas are files, and the loop that reads it."""

    def __init__(self, directory: Path, router: FakeRouter) -> None:
        self.layout = ServiceLayout(directory / "s")
        self.layout.create()
        self.router = router
        self.newest = True
        self.well: dict[str, bool] = {}
        self.loop = RotationLoop(self.layout, router, 7, lambda: self.newest)

    def publish(self, name: ReplicaName, **changes: object) -> None:
        write_record(self.layout.endpoint(name), endpoint_of(name, **changes))

    def withdraw(self, name: ReplicaName) -> None:
        self.layout.endpoint(name).unlink()

    @property
    def rotation(self) -> tuple[str, ...]:
        found = read_record(self.layout.rotation, Rotation)
        assert found is not None
        assert found.epoch == 7
        return found.replicas

    def passes_until(self, reached: Callable[[], bool]) -> None:
        def reached_after_a_pass() -> bool:
            self.loop.make_pass()
            return reached()

        wait_until(lambda: reached() or reached_after_a_pass())

    def settle(self) -> None:
        """Passes until what was begun has ended."""
        self.loop.make_pass()
        self.passes_until(lambda: not self.loop._adding)
        self.loop.make_pass()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service(tmp_path, FakeRouter())
    monkeypatch.setattr(module, "is_well", lambda url, path: made.well.get(url, True))
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(module, "_COMPARE_SECONDS", 0.0)
    yield made
    made.loop._pool.shutdown()


def test_a_replica_comes_and_goes(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    assert service.router.urls == {"http://n1:8001"}
    assert service.rotation == ("r001-g001",)
    service.withdraw(ONE)
    service.loop.make_pass()
    assert service.router.urls == set()
    assert not service.rotation


def test_the_rotation_is_written_after_the_router_was_told(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    service.router.obeys = False
    service.withdraw(ONE)
    service.loop.make_pass()
    assert service.rotation == ("r001-g001",), "the router still asks it"
    service.router.obeys = True
    service.loop.make_pass()
    assert not service.rotation


def test_a_lease_that_is_over(service: Service) -> None:
    service.publish(ONE, lease_until=time.time() - 0.1)
    service.settle()
    assert service.router.told == []


def test_an_older_launch_does_not_come_back(service: Service) -> None:
    service.publish(ONE, epoch=3, url="http://n2:1")
    service.settle()
    service.publish(ONE, epoch=2, url="http://n1:1")
    service.settle()
    assert service.router.urls == set()
    service.publish(ONE, epoch=4, url="http://n3:1")
    service.settle()
    assert service.router.urls == {"http://n3:1"}


def test_the_next_launch_at_another_address(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    service.publish(ONE, epoch=2, url="http://n5:1")
    service.settle()
    assert service.router.urls == {"http://n5:1"}
    assert service.rotation == ("r001-g001",)


def test_of_two_replicas_with_one_address_the_newer_counts(service: Service) -> None:
    url, now = "http://n1:9", time.time()
    service.publish(ONE, url=url, ready_since=now - 9)
    service.publish(TWO, url=url, ready_since=now)
    service.settle()
    assert service.rotation == ("r002-g001",)
    assert service.router.urls == {url}
    # the other one, whose lease runs on, is withdrawn: the address stays
    service.withdraw(ONE)
    service.settle()
    assert service.router.urls == {url}


def test_a_replica_that_does_not_answer_is_withdrawn_until_it_does(service: Service) -> None:
    service.publish(ONE)
    service.publish(TWO)
    service.settle()
    service.well["http://n1:8001"] = False
    service.passes_until(lambda: service.router.urls == {"http://n1:8002"})
    assert service.rotation == ("r002-g001",)
    service.well["http://n1:8001"] = True
    service.passes_until(lambda: len(service.router.urls) == 2)


def test_a_router_that_was_started_anew_is_told_again(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    service.router.urls.clear()
    service.settle()
    assert service.router.urls == {"http://n1:8001"}


def test_it_is_settled_when_the_router_asks_all_that_answer(service: Service) -> None:
    service.publish(ONE)
    service.router.obeys = False
    service.loop.make_pass()
    assert not service.loop._settled.is_set()
    service.router.obeys = True
    service.passes_until(lambda: service.loop._settled.is_set())
    assert service.router.urls == {"http://n1:8001"}


def test_what_nobody_knows_leaves_the_router(service: Service) -> None:
    service.router.urls.add("http://stranger:1")
    service.settle()
    assert service.router.urls == set()


def test_a_service_directory_that_is_away_changes_nothing(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    away = service.layout.endpoints.with_name("away")
    service.layout.endpoints.rename(away)
    with pytest.raises(OSError):
        service.loop.make_pass()
    assert service.router.urls == {"http://n1:8001"}
    away.rename(service.layout.endpoints)
    service.settle()
    assert service.router.told == ["+http://n1:8001"]


def test_only_the_newest_router_writes_the_rotation(service: Service) -> None:
    service.publish(ONE)
    service.settle()
    service.newest = False
    service.publish(TWO)
    service.settle()
    assert len(service.router.urls) == 2
    assert service.rotation == ("r001-g001",)


def test_a_change_reaches_the_router_within_half_a_second(service: Service) -> None:
    service.loop.start()
    try:
        deadline = time.monotonic() + 60  # a busy machine may take its time again and again
        while time.monotonic() < deadline:
            service.publish(ONE)
            began = time.monotonic()
            wait_until(lambda: service.router.urls)
            added_after = time.monotonic() - began
            # The router is told before the record is written.
            wait_until(lambda: service.layout.rotation.exists() and service.rotation)
            service.withdraw(ONE)
            began = time.monotonic()
            wait_until(lambda: not service.rotation)
            if added_after < 0.5 and time.monotonic() - began < 0.5:
                return
        pytest.fail("always later than half a second")
    finally:
        service.loop.stop()


def test_garbage_between_endpoints_is_left_alone(service: Service) -> None:
    (service.layout.endpoints / "r009-g001.json").write_text("{")
    (service.layout.endpoints / "notes.json").write_text("{}")
    (service.layout.endpoints / ".r001-g001.json.n1.tmp").write_text("")
    service.publish(ONE)
    assert list(EndpointReader(service.layout.endpoints).valid(time.time())) == [ONE]
