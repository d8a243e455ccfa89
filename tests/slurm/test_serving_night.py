"""A night of a service in short: replicas leave in every way while clients ask, and what is lost.

The engines compute nothing and are otherwise real; with vLLM it is `python -m bench.serving_night`.
What each part does by itself is in `test_replicas` and `test_services`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.serving_night.account import EventAccount, NightAccount, account
from bench.serving_night.cluster import REPLICAS, night_sandbox, night_service, served_address
from bench.serving_night.events import EVENTS
from bench.serving_night.load import NightLoad, RotationWatch
from hpctrain.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.nightly("a night of a service takes minutes")

pytest.importorskip("aiohttp", reason="NOT TRIED: the clients of a night need aiohttp")
# 2 s for an answer: with so many requests each replica computes four at any moment, so that one
# which leaves seldom has none.
REQUESTS_PER_SECOND, OUTPUT_TOKENS, TOKEN_SECONDS = 6.0, 40, 0.05


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A cluster in which the router has a node of its own."""
    with night_sandbox() as box:
        yield box


def spent(sandbox: Sandbox, place: Path, events: Sequence[str]) -> NightAccount:
    """Do these things to a service under load, and add up."""
    with night_service(sandbox, place, token_seconds=TOKEN_SECONDS) as service:
        url = served_address(service)
        with (
            RotationWatch(service.service) as watch,
            NightLoad(
                url, "tiny", REQUESTS_PER_SECOND, prompt_tokens=4, output_tokens=OUTPUT_TOKENS
            ) as load,
        ):
            service.wait(lambda: load.answers > 20, "answers")
            done = [EVENTS[name](service) for name in events]
        requests = load.requests(service.service)
        found = account(done, requests, watch.asked, sent=load.sent)
        assert not found.objections, "\n".join((*found.objections, service.story()))
        assert all(one.replicas for one in requests if one.failure is None)
        return found


def assert_lost_on_the_dead_replica_only(found: EventAccount) -> None:
    """What was in flight there has failed, or was answered elsewhere; it is named either way."""
    assert found.in_flight, "nothing was in danger"
    in_danger = {one.request_id for one in found.in_flight}
    for one in found.failed:
        assert one.request_id in in_danger, one
        assert found.event.replicas[0] in one.replicas, one
    for one in found.in_flight:
        assert one.failure is not None or len(one.replicas) > 1 or one.ended < found.event.ended
    assert found.least == REPLICAS - 1


def test_a_night_loses_only_what_died_with_its_replica(sandbox: Sandbox, tmp_path: Path) -> None:
    """One service for all of it, because its start takes as long as an event."""
    found = spent(sandbox, tmp_path, ["preempt", "kill", "node"])
    preempted, killed, lost = found.events
    assert preempted.event.moments[0].broken_off == 0 and not preempted.failed
    assert preempted.in_flight, "the drain had something to wait for"
    assert preempted.event.story == "signal SIGTERM", "Slurm's, not a request of the controller"
    assert_lost_on_the_dead_replica_only(killed)
    assert killed.failed, "streams that had begun cannot be answered by another replica"
    assert_lost_on_the_dead_replica_only(lost)
    assert {one.request_id for one in found.failed} == {
        one.request_id for event in (killed, lost) for one in event.failed
    }


@pytest.mark.variant("test_a_night_loses_only_what_died_with_its_replica")
def test_a_night_of_drains_loses_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    found = spent(sandbox, tmp_path, ["up", "down", "restart", "successor"])
    assert not found.failed
    up, down, restarted, succeeded = found.events
    assert (up.least, down.least) == (REPLICAS, REPLICAS)
    assert restarted.least == succeeded.least == REPLICAS, "never one less than wanted"
    assert len(restarted.event.moments) == REPLICAS
    assert all(one.in_flight for one in (down, restarted)), "drains had something to wait for"
