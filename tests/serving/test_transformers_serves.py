"""`transformers serve` for real: the same contract without an engine's kernels."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from serving_environment import RunningEngine, running_engine, serving_python, tiny_start

from hpctrain.serve.load.measurement import LoadResult, LoadTarget
from hpctrain.serve.load.sending import Interface, PromptStyle, send_requests
from hpctrain.serve.plan.traffic import Lengths, Traffic, draw_requests

pytest.importorskip("aiohttp", reason="NOT TRIED with real engines: load tests need aiohttp")


def ask(engine: RunningEngine, tokens: int, interface: Interface = "completions") -> LoadResult:
    assert not engine.engine.exact_lengths
    requests = draw_requests(Traffic(Lengths(6, 6), Lengths(tokens, tokens)), 1, seed=1)
    style = PromptStyle(interface=interface, exact=False, lowest_id=3, highest_id=99)
    return send_requests(LoadTarget(engine.url, "tiny"), style, requests, np.zeros(1))


@pytest.mark.variant("test_vllm_from_its_start_to_its_drain")
def test_transformers_from_its_start_to_its_drain(tmp_path: Path) -> None:
    start = tiny_start(serving_python(), tmp_path / "model")
    with running_engine("transformers", start, tmp_path) as engine:
        for interface in ("completions", "chat"):
            (record,) = ask(engine, 4, interface).records
            assert record.failure is None and record.answered_tokens == 4, record
        assert engine.status("/metrics") == 404, "it has metrics now: name them in the contract"
        what_has_begun_ends_and_nothing_new_begins(engine)


def what_has_begun_ends_and_nothing_new_begins(engine: RunningEngine) -> None:
    results: list[LoadResult] = []
    thread = threading.Thread(target=lambda: results.append(ask(engine, 1500)))
    thread.start()
    time.sleep(1.0)
    engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert thread.is_alive(), "the answer was over before anything could be seen"
    assert engine.engine.drain.health_fails and engine.status(engine.engine.ready_path) == 0
    (late,) = ask(engine, 2).records
    assert engine.engine.drain.refuses_new and late.failure == "refused"
    thread.join(180)
    (begun,) = results[0].records
    assert begun.failure is None and begun.answered_tokens == 1500
    # uvicorn raises the signal again once it has drained
    assert engine.process.wait(60) in (0, -signal.SIGTERM)
