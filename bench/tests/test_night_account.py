"""What a night of a service is accused of, and what nothing could prevent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.serving_night.account import (
    Asked,
    Event,
    Moment,
    NightRequest,
    account,
    latencies,
    least_asked,
)

DRAINED = Event("preemption", True, 100.0, 130.0, (Moment("r001-g001", 101.0, 0),))
KILLED = Event("engine killed", False, 200.0, 230.0, (Moment("r002-g001", 200.0),))
ANSWERED = NightRequest("night-1", 50.0, 50.5, 0.1, 0.5, replicas=("r003-g001",))


def failed(planned: float, ended: float, *replicas: str) -> NightRequest:
    return NightRequest("night-2", planned, ended, None, None, "reset", "gone", replicas)


@pytest.mark.parametrize(
    ("request_", "objection"),
    [
        (failed(199.8, 200.1, "r002-g001"), None),
        (failed(199.8, 200.1, "r001-g001", "r002-g001"), None),
        (failed(199.8, 200.1), None),
        (failed(199.8, 200.1, "r001-g001"), "not on the replica that died"),
        (failed(210.0, 210.5, "r002-g001"), "not on the replica that died"),
        (failed(100.5, 102.0, "r001-g001"), "where a drain was possible"),
        (failed(150.0, 150.5, "r001-g001"), "outside of all events"),
    ],
)
def test_only_what_was_on_a_dead_replica_may_fail(
    request_: NightRequest, objection: str | None
) -> None:
    found = account([DRAINED, KILLED], [ANSWERED, request_], [], sent=2)
    assert [one.request_id for one in found.failed] == ["night-2"]
    if objection is None:
        assert not found.objections
        assert found.events[1].failed == (request_,)
    else:
        assert len(found.objections) == 1 and objection in found.objections[0]


def test_a_drain_that_breaks_off_and_a_request_without_end_are_objected_to() -> None:
    broken = replace(DRAINED, moments=(Moment("r001-g001", 101.0, 2),))
    found = account([broken], [ANSWERED], [], sent=2)
    assert found.objections == (
        "preemption: r001-g001 counts 2 requests as broken off",
        "1 requests have no end at all",
    )


def test_requests_in_flight_are_those_of_the_hit_replica_at_its_moment() -> None:
    on_it = NightRequest("night-3", 100.8, 101.4, 0.1, 0.6, replicas=("r001-g001",))
    elsewhere = replace(on_it, request_id="night-4", replicas=("r002-g001",))
    before = replace(on_it, request_id="night-5", planned=99.0, ended=99.9)
    (found,) = account([DRAINED], [on_it, elsewhere, before], [], sent=3).events
    assert found.in_flight == (on_it,)
    assert found.requests == 2


def test_the_least_number_counts_what_was_asked_before_the_event_began() -> None:
    asked = [Asked(10.0, ("a", "b")), Asked(50.0, ("a",)), Asked(60.0, ("a", "b", "c"))]
    assert least_asked(asked, 20.0, 40.0) == 2
    assert least_asked(asked, 20.0, 55.0) == 1
    assert least_asked(asked, 70.0, 80.0) == 3


def test_percentiles_are_values_that_occurred() -> None:
    requests = [
        NightRequest(f"night-{n}", float(n), n + 1.0, n / 100, n / 10) for n in range(1, 101)
    ]
    found = latencies([*requests, failed(0.0, 1.0)])
    assert found.answered == 100
    assert (found.ttft_p50, found.ttft_p99, found.e2e_p99) == (0.5, 0.99, 9.9)


def test_what_began_while_the_replica_died_was_in_flight_there() -> None:
    late = failed(200.3, 200.9, "r002-g001")
    (found,) = account([KILLED], [ANSWERED, late], [], sent=2).events
    assert found.in_flight == found.failed == (late,)


def test_of_two_events_in_a_row_the_one_that_hit_the_request_counts() -> None:
    lost = Event("node lost", False, 230.0, 260.0, (Moment("r003-g001", 230.2),))
    request = failed(229.9, 230.4, "r003-g001")
    found = account([KILLED, lost], [request], [], sent=1)
    assert not found.objections
    assert [one.failed for one in found.events] == [(), (request,)]
