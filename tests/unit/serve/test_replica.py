"""One task of a replica with a stand-in for an engine: ready, leased, drained, fenced, failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from replica_process import NAME, Task, config_of, make_service, task_of
from router_programs import SERVED_NAME, request
from variants import varied
from waiting import wait_until

from bench.free_ports import free_port
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import TrainerExit, write_record
from hpctrain.records.service_records import Endpoint

LONG = {"model": SERVED_NAME, "prompt": "a b", "max_tokens": 150}


class Client(threading.Thread):
    """A client with one long request; `code` is its answer, None if it was broken off."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.code: int | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        code, text = request(f"{self._url}/v1/completions", LONG)
        assert code != 200 or json.loads(text)["usage"]["completion_tokens"] == 150
        self.code = code or None
        self.ended_at = time.time()


def in_flight(url: str) -> bool:
    text = request(f"{url}/metrics")[1]
    return f'running{{engine="0",model_name="{SERVED_NAME}"}} 1.0' in text


def asked(task: Task) -> tuple[Client, str]:
    """A replica that computes one long request."""
    url = task.await_endpoint().url
    client = Client(url)
    client.start()
    task.wait(lambda: in_flight(url), "a request in flight")
    return client, url


def test_it_says_that_it_answers_once_it_has_answered(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service), load_seconds=0.5) as task:
        task.wait(lambda: task.progress is not None, "a sign of life")
        assert task.endpoint is None and task.progress and task.progress.phase == "loading"
        endpoint = task.await_endpoint()
        tokens = f'vllm:generation_tokens_total{{engine="0",model_name="{SERVED_NAME}"}} 1.0'
        assert tokens in request(f"{endpoint.url}/metrics")[1], "no canary before the endpoint"
        assert (endpoint.replica, endpoint.epoch, endpoint.job_id) == (str(NAME), 1, 7)
        assert endpoint.load_seconds >= 0.5 and len(endpoint.weights_digest) == 64
        task.wait(lambda: (task.endpoint or endpoint).lease_until > endpoint.lease_until, "renewal")
        assert task.progress.phase == "serving" if task.progress else False
        assert request(f"{endpoint.url}/v1/completions", LONG)[0] == 200


@pytest.mark.parametrize(
    "how", varied(["SIGTERM to all", "SIGUSR2 to all", "control/stop"], "SIGTERM to all")
)
def test_it_leaves_the_router_before_the_engine_hears_of_it(tmp_path: Path, how: str) -> None:
    """Slurm's signals come to all processes at once, those of the engine too."""
    service = make_service(tmp_path)
    config = config_of(service, notice_seconds=15.0)
    with task_of(service, config, token_seconds=0.01) as task:
        client, url = asked(task)
        task.rotate(str(NAME))
        if how == "control/stop":
            task.run.stop_request.write_text("somebody\n")
        else:
            number = signal.Signals[how.split()[0]]
            os.kill(task.engine_pid, number)
            task.process.send_signal(number)
        task.wait(lambda: task.endpoint is None, "an endpoint that is removed")
        # The router has not looked yet: what it sends is still answered.
        assert request(f"{url}/v1/completions", {**LONG, "max_tokens": 1})[0] == 200
        task.rotate()
        client.join()
        assert task.await_exit() == TrainerExit.YIELDED
        record = task.drain
        assert client.code == 200 and record is not None, task.log
        assert record.broken_off == 0 and record.router_left_at and record.ended_at
        assert record.withdrawn_at <= record.router_left_at <= record.ended_at
        assert client.ended_at <= record.ended_at
    assert (task.exit.outcome, task.exit.message) == (
        "yielded",
        "drained: 0 requests were broken off",
    )


@pytest.mark.variant("test_it_leaves_the_router_before_the_engine_hears_of_it")
def test_without_a_router_it_waits_as_long_as_the_router_may_take(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service, notice_seconds=1.5)) as task:
        task.await_endpoint()
        task.process.send_signal(signal.SIGUSR2)
        assert task.await_exit() == TrainerExit.YIELDED
        assert task.drain is not None and task.drain.router_left_at is None
        assert task.drain.ended_at and task.drain.ended_at - task.drain.withdrawn_at >= 1.5


def test_requests_that_take_too_long_are_broken_off_and_counted(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    config = config_of(service, drain_seconds=0.5, start={"drain_seconds": 0})
    with task_of(service, config, token_seconds=0.2) as task:
        client, _ = asked(task)
        task.rotate()
        task.process.send_signal(signal.SIGUSR2)
        assert task.await_exit() == TrainerExit.YIELDED
        client.join()
    assert client.code is None
    assert task.drain is not None and task.drain.broken_off == 1
    assert task.exit.message == "drained: 1 requests were broken off"


def test_a_stop_while_it_loads_ends_it_at_once(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service), load_seconds=30.0) as task:
        task.wait(lambda: "starts " in task.log, "an engine")
        task.process.send_signal(signal.SIGTERM)
        assert task.await_exit() == TrainerExit.YIELDED
    assert task.endpoint is None and "before it was ready" in (task.exit.message or "")


def test_a_newer_launch_takes_the_replica_over(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service)) as task:
        endpoint = task.await_endpoint()
        newer = endpoint.model_copy(update={"epoch": 2, "url": "http://other"})
        claim_epoch(task.run.epochs, "a newer launch")
        write_record(service.endpoint(NAME), newer)
        assert task.await_exit() == TrainerExit.CRASH
        assert task.endpoint == newer, "the endpoint of the newer launch was touched"
    assert (task.exit.outcome, task.exit.cause) == ("crash", "superseded")


@pytest.mark.parametrize(
    ("told", "cause", "words"),
    [
        ({"fails": "crash"}, None, "exit code 1: RuntimeError: Engine core init"),
        pytest.param(
            {"fails": "out_of_memory"},
            None,
            "torch.OutOfMemoryError: CUDA out of memory",
            marks=pytest.mark.variant,
        ),
        pytest.param(
            {"fails": "exit"}, "engine_exit", "exit code 0, unasked", marks=pytest.mark.variant
        ),
        pytest.param(
            {"fails": "hang"},
            "hang",
            "was not ready 6 s after its start",
            marks=pytest.mark.variant,
        ),
    ],
)
def test_an_engine_that_does_not_start(
    tmp_path: Path, told: dict[str, Any], cause: str | None, words: str
) -> None:
    service = make_service(tmp_path)
    # time for a busy machine to start Python, whose words are the traceback
    limit = 6.0 if cause == "hang" else 40.0
    with task_of(service, config_of(service, load_limit_seconds=limit), **told) as task:
        assert task.await_exit() == TrainerExit.CRASH
        assert task.endpoint is None
    assert (task.exit.outcome, task.exit.cause) == ("crash", cause)
    assert words in (task.exit.message or "") and task.exit.traceback, task.log


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [
        pytest.param(signal.SIGKILL, None, "ended with signal SIGKILL", marks=pytest.mark.variant),
        pytest.param(
            signal.SIGINT, "engine_exit", "exit code 0, unasked", marks=pytest.mark.variant
        ),
        (signal.SIGSTOP, "hang", "3 health checks in a row have failed"),
    ],
)
def test_an_engine_that_stops_answering(
    tmp_path: Path, number: signal.Signals, cause: str | None, words: str
) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service)) as task:
        task.await_endpoint()
        engine = task.engine_pid
        os.kill(engine, number)
        assert task.await_exit() == TrainerExit.CRASH
        assert task.endpoint is None
        assert not Path(f"/proc/{engine}").exists(), "the engine was left behind"
    assert task.exit.cause == cause and words in (task.exit.message or ""), task.log


def test_the_engine_does_not_outlive_its_task(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with task_of(service, config_of(service)) as task:
        url, engine = task.await_endpoint().url, task.engine_pid
        task.process.kill()
        task.process.wait()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "ended")
        assert request(f"{url}/health")[0] == 0


@pytest.mark.parametrize(
    ("spoil", "words", "node_dependent"),
    [
        (lambda weights: (weights / "config.json").unlink(), "has no config.json", False),
        (lambda weights: weights.rename(weights.parent / "away"), "cannot be read", True),
    ],
)
def test_weights_that_are_not_there(
    tmp_path: Path, spoil: Any, words: str, node_dependent: bool
) -> None:
    service = make_service(tmp_path)
    config = config_of(service)
    spoil(tmp_path / "weights")
    with task_of(service, config) as task:
        assert task.await_exit() == TrainerExit.CRASH
    assert task.exit.cause == "weights" and words in (task.exit.message or "")
    assert task.exit.node_dependent is node_dependent, "another node may have them"


def test_weights_are_copied_to_the_node_once(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"w" * 5000)
    config = config_of(service, stage_directory="$STAGE_HERE")
    os.environ["STAGE_HERE"] = str(tmp_path / "local")
    times = []
    try:
        for _ in range(2):
            with task_of(service, config) as task:
                task.await_endpoint()
                (copy,) = (tmp_path / "local").rglob("model.safetensors")
                times.append(copy.stat().st_ctime_ns)
                assert str(copy.parent) in Path(f"/proc/{task.engine_pid}/cmdline").read_text()
            service.endpoint(NAME).unlink()
    finally:
        del os.environ["STAGE_HERE"]
    assert times[0] == times[1], "it was copied again"


def test_a_taken_port_is_not_the_end(tmp_path: Path) -> None:
    """Of three ports another program has one, and takes the next while the engine loads."""
    service = make_service(tmp_path)
    with socket.socket() as first:
        first.bind(("127.0.0.1", free_port()))
        first.listen()
        port = first.getsockname()[1]
        config = config_of(service, ports=(port, port + 2))
        with task_of(service, config) as task:
            endpoint: Endpoint = task.await_endpoint()
            assert port < int(endpoint.url.rpartition(":")[2]) <= port + 2


def test_the_other_nodes_of_a_replica_follow_the_first(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    config = config_of(service, nodes=2)
    with task_of(service, config) as task, task_of(service, config, rank=1) as other:
        task.await_endpoint()
        other.process.send_signal(signal.SIGTERM)  # tells the first, and waits for it
        assert task.await_exit() == TrainerExit.YIELDED, task.log
        assert other.await_exit() == TrainerExit.YIELDED
    assert task.exit.outcome == "yielded" and task.drain and task.drain.broken_off == 0
