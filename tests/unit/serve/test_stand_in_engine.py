"""The engine that computes nothing: vLLM's routes, its drain, its metrics, and failures."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from router_programs import SERVED_NAME, request, stand_in
from waiting import wait_until

PROMPT = {"model": SERVED_NAME, "prompt": "a b c", "max_tokens": 4}


def test_it_answers_as_openai_does(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        assert request(f"{engine.url}/health") == (200, "")
        models = json.loads(request(f"{engine.url}/v1/models")[1])["data"]
        assert [one["id"] for one in models] == [SERVED_NAME]
        first = json.loads(request(f"{engine.url}/v1/completions", PROMPT)[1])
        assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        code, text = request(f"{engine.url}/v1/completions", {**PROMPT, "stream": True})
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert code == 200 and events[-1] == "[DONE]" and len(events) == 5
        words = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons == [None, None, None, "length"]
        assert words.split() == first["choices"][0]["text"].split()
        assert request(f"{engine.url}/v1/completions", {"model": "other", "prompt": "x"})[0] == 404
        assert request(f"{engine.url}/v1/completions", {"model": SERVED_NAME})[0] == 400
        metrics = request(f"{engine.url}/metrics")[1]
    labels = f'engine="0",finished_reason="length",model_name="{SERVED_NAME}"'
    assert f"vllm:request_success_total{{{labels}}} 2.0" in metrics
    assert f'vllm:num_requests_running{{engine="0",model_name="{SERVED_NAME}"}} 0.0' in metrics


def test_other_weights_give_other_answers(tmp_path: Path) -> None:
    texts = []
    for content in ("{}", "{ }", "{}"):
        (tmp_path / "config.json").write_text(content)
        with stand_in(tmp_path) as engine:
            answer = request(f"{engine.url}/v1/completions", {**PROMPT, "max_tokens": 20})[1]
            texts.append(json.loads(answer)["choices"][0]["text"])
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.variant)]
)
def test_a_drain_finishes_what_has_begun_and_refuses_the_rest(
    tmp_path: Path, number: signal.Signals
) -> None:
    ends: list[int] = []
    with stand_in(tmp_path, "--shutdown-timeout", "90", token_seconds=0.05) as engine:
        long = {**PROMPT, "max_tokens": 100}
        client = threading.Thread(
            target=lambda: ends.append(request(f"{engine.url}/v1/completions", long)[0])
        )
        client.start()
        running = f'running{{engine="0",model_name="{SERVED_NAME}"}} 1.0'

        def is_seen() -> bool:
            assert client.is_alive(), "the answer was over before it was seen"
            return running in request(f"{engine.url}/metrics")[1]

        wait_until(is_seen)
        engine.process.send_signal(number)
        while (code := request(f"{engine.url}/v1/completions", PROMPT)[0]) == 200:
            assert client.is_alive(), "the answer was over before anything was refused"
        assert (code, request(f"{engine.url}/health")[0]) == (500, 200)
        client.join()
        assert engine.process.wait(timeout=90) == 0
    assert ends == [200]


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("crash", 1, "Engine core initialization failed"),
        ("out_of_memory", 1, "CUDA out of memory"),
        pytest.param("no_weights", 1, "Cannot find any model weights", marks=pytest.mark.variant),
        pytest.param("gpu_fault", 1, "uncorrectable ECC error", marks=pytest.mark.variant),
        ("exit", 0, "code 0, as told"),
    ],
)
def test_it_fails_as_it_is_told(tmp_path: Path, failure: str, code: int, words: str) -> None:
    with stand_in(tmp_path, answers=False, fails=failure) as engine:
        assert engine.process.wait(timeout=10) == code
        assert words in engine.log.read_text()


def test_a_failure_with_a_ticket_happens_once(tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.touch()
    told: dict[str, Any] = {"fails": "crash", "tickets": [str(ticket)], "after_requests": 1}
    with stand_in(tmp_path, **told) as engine:
        assert request(f"{engine.url}/v1/completions", PROMPT)[0] == 0
        assert engine.process.wait(timeout=10) == 1
    with stand_in(tmp_path, **told) as engine:
        assert request(f"{engine.url}/v1/completions", PROMPT)[0] == 200
