"""Files that are whole or absent, with real processes and real system calls."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from virtual_clock import ShiftedClock, VirtualClock

from hpctrain.base import clock, reserved_ports
from hpctrain.base.durable import append_line, create_exclusive, replace_text

# A barrier that one process never reaches breaks after its time-out, so no test can hang.
FORK = multiprocessing.get_context("fork")


def replace_many(path: Path, letter: str, rounds: int, start: Barrier) -> None:
    start.wait(300)
    for _ in range(rounds):
        replace_text(path, letter * 100_000, durable=False)


def test_a_reader_sees_one_whole_content_while_two_processes_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "a" * 100_000)
    start = FORK.Barrier(3)
    writers = [
        FORK.Process(target=replace_many, args=(path, letter, 150, start)) for letter in "ab"
    ]
    for writer in writers:
        writer.start()
    start.wait(300)
    seen = {path.read_text()}
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_text())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {"a" * 100_000, "b" * 100_000}
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_replacement_keeps_the_old_content_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "taken"
    directory.mkdir()
    with pytest.raises(OSError):
        replace_text(directory, "a directory cannot be replaced by a file")
    assert os.listdir(tmp_path) == ["taken"]
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "absent" / "file", "text")
    path = tmp_path / "file"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\ud800")
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_mode_bits_are_those_asked_for(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        replace_text(tmp_path / "replaced", "x", mode=mode)
        append_line(tmp_path / "appended", "x", mode=mode)
        create_exclusive(tmp_path / "created", "x", mode=mode)
    finally:
        os.umask(before)
    for name in ("replaced", "appended", "created"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode, name


def test_replacing_a_private_file_does_not_open_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    replace_text(path, "old", mode=0o644)
    replace_text(path, "new", mode=0o600)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_a_torn_last_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_line(path, '{"event": 1}')
    with path.open("a") as stream:
        stream.write('{"event": 2, "te')  # the writer died here
    append_line(path, '{"event": 3}')
    append_line(path, '{"event": 4}')
    assert path.read_text().splitlines() == [
        '{"event": 1}', '{"event": 2, "te', '{"event": 3}', '{"event": 4}'
    ]  # fmt: skip


def append_many(path: Path, name: int, start: Barrier) -> None:
    start.wait(300)
    for number in range(300):
        append_line(path, f"{name}:{number}:" + "x" * 200, durable=False)


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start = FORK.Barrier(2)
    writers = [FORK.Process(target=append_many, args=(path, name, start)) for name in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    assert [writer.exitcode for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    expected = {f"{name}:{number}:" + "x" * 200 for name in range(2) for number in range(300)}
    assert set(filter(None, lines)) == expected
    assert len([line for line in lines if line]) == 600


def create_many(directory: Path, name: str, start: Barrier) -> None:
    for number in range(60):
        start.wait(300)
        created = create_exclusive(directory / f"{number}", f"{name} won {number}")
        if created:
            (directory / f"{number}.{name}").touch()


def test_of_two_processes_exactly_one_creates_the_file(tmp_path: Path) -> None:
    start = FORK.Barrier(2)
    racers = [FORK.Process(target=create_many, args=(tmp_path, name, start)) for name in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(600)
    assert [racer.exitcode for racer in racers] == [0, 0]
    for number in range(60):
        winners = [name for name in "ab" if (tmp_path / f"{number}.{name}").exists()]
        assert len(winners) == 1, number
        assert (tmp_path / str(number)).read_text() == f"{winners[0]} won {number}"
    assert len(os.listdir(tmp_path)) == 120  # no temporary files


def test_exclusive_creation_never_changes_what_is_there(tmp_path: Path) -> None:
    assert create_exclusive(tmp_path / "epoch", "first")
    assert not create_exclusive(tmp_path / "epoch", "second")
    assert (tmp_path / "epoch").read_text() == "first"
    assert os.listdir(tmp_path) == ["epoch"]


# -- Ports that are reserved for a program which listens on them later ---------------------------


def test_a_reserved_port_is_left_to_its_program() -> None:
    with reserved_ports.reserve_any() as first:
        number = reserved_ports.number_of(first)
        assert reserved_ports.reserve("127.0.0.1", [number]) is None
        with socket.create_server(("127.0.0.1", number)):
            assert not reserved_ports.is_free("127.0.0.1", number)
        assert reserved_ports.is_free("127.0.0.1", number)
    with reserved_ports.reserve("127.0.0.1", [number]) or pytest.fail("it was released"):
        pass


def test_a_port_in_use_is_passed_over() -> None:
    with reserved_ports.reserve_any() as reserved:
        taken = reserved_ports.number_of(reserved)
    with socket.create_server(("127.0.0.1", taken)):
        assert reserved_ports.reserve("127.0.0.1", [taken]) is None


def test_no_outgoing_connection_has_such_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    starts = iter([0, reserved_ports.COUNT - 1])
    monkeypatch.setattr(reserved_ports.random, "randrange", lambda _: next(starts))
    for _ in range(2):
        with reserved_ports.reserve_any() as reserved:
            assert reserved_ports.FIRST <= reserved_ports.number_of(reserved) < min(low, 32768)


def test_without_a_free_port_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports.reserve_any() as reserved:
        monkeypatch.setattr(reserved_ports, "FIRST", reserved_ports.number_of(reserved))
        monkeypatch.setattr(reserved_ports, "COUNT", 1)
        with pytest.raises(OSError, match="no free port between"):
            reserved_ports.reserve_any()


# -- The clock of the process, and the one that tests put in its place ---------------------------


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
