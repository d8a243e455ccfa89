"""The clock of the process, and the one that tests put in its place."""

from __future__ import annotations

import threading
import time

import pytest
from virtual_clock import ShiftedClock, VirtualClock

from hpctrain.base import clock


def patient(seconds: float, *, checks: bool = True) -> None:
    deadline = clock.monotonic() + seconds
    while not checks or clock.monotonic() < deadline:
        clock.sleep(1.0)


def test_the_clock_of_a_process_is_the_operating_systems() -> None:
    before = time.time(), time.monotonic()
    clock.sleep(0.0)
    assert before <= (clock.now(), clock.monotonic()) <= (time.time(), time.monotonic())
    event = threading.Event()
    assert not clock.wait(event, 0.0)
    event.set()
    assert clock.wait(event, None)


def test_time_passes_in_pauses_and_at_once(virtual_clock: VirtualClock) -> None:
    began, really = clock.now(), time.monotonic()
    patient(86400.0)
    assert clock.now() - began == virtual_clock.passed_seconds == 86400.0
    assert time.monotonic() - really < 600


def test_what_is_planned_happens_in_order(virtual_clock: VirtualClock) -> None:
    seen: list[tuple[str, float]] = []
    for word, seconds in (("late", 7.0), ("early", 2.0), ("with it", 2.0), ("never", 9.5)):
        virtual_clock.at(seconds, lambda word=word: seen.append((word, clock.monotonic())))  # type: ignore[misc]
    patient(9.0)
    assert seen == [("early", 2.0), ("with it", 2.0), ("late", 7.0)]


def test_a_wait_ends_with_its_event(virtual_clock: VirtualClock) -> None:
    event = threading.Event()
    assert not clock.wait(event, 5.0) and virtual_clock.passed_seconds == 5.0
    virtual_clock.at(30.0, event.set)
    assert clock.wait(event, None) and virtual_clock.passed_seconds == 30.0


def test_who_never_checks_his_deadline_fails(virtual_clock: VirtualClock) -> None:
    with pytest.raises(pytest.fail.Exception, match="pauses, the last at"):
        patient(5.0, checks=False)
    with pytest.raises(pytest.fail.Exception), clock.replaced(VirtualClock()):
        while True:
            clock.sleep(0.0)
    with pytest.raises(pytest.fail.Exception), clock.replaced(VirtualClock()):
        clock.wait(threading.Event(), None)


def test_another_thread_takes_real_time(virtual_clock: VirtualClock) -> None:
    thread = threading.Thread(target=clock.sleep, args=(0.001,))
    thread.start()
    thread.join()
    assert not virtual_clock.pauses and virtual_clock.passed_seconds == 0.0


def test_a_clock_can_be_ahead(shifted_clock: ShiftedClock) -> None:
    shifted_clock.ahead_seconds, shifted_clock.monotonic_ahead_seconds = 1e6, 2e6
    assert 1e6 <= clock.now() - time.time() + 1 < 1e6 + 600
    assert 2e6 <= clock.monotonic() - time.monotonic() + 1 < 2e6 + 600
