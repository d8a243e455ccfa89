"""What tests and demos serve: the engine that computes nothing, and the tiny model."""

from __future__ import annotations

import json
import signal
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from router_programs import SERVED_NAME, request, stand_in
from waiting import wait_until

from hpctrain.serve.tiny_llama import TinyShape, main, write_tiny_llama

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
        assert engine.process.wait(timeout=60) == code
        assert words in engine.log.read_text()


def test_a_failure_with_a_ticket_happens_once(tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"
    ticket.touch()
    told: dict[str, Any] = {"fails": "crash", "tickets": [str(ticket)], "after_requests": 1}
    with stand_in(tmp_path, **told) as engine:
        assert request(f"{engine.url}/v1/completions", PROMPT)[0] == 0
        assert engine.process.wait(timeout=60) == 1
    with stand_in(tmp_path, **told) as engine:
        assert request(f"{engine.url}/v1/completions", PROMPT)[0] == 200


def digests(directory: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_same_shape_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_tiny_llama(tmp_path / name, seed=seed)
    first, again, other = (digests(tmp_path / name) for name in ("one", "again", "other"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_every_id_that_the_model_may_sample_is_a_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tiny_llama(tmp_path, TinyShape(vocab_size=300))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 300
    text = "héllo, wörld 7"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


def test_the_weights_are_those_of_the_config(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    shape = TinyShape(hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    write_tiny_llama(tmp_path, shape)
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(name.endswith("q_proj.weight") for name in weights) == 3
    assert weights["model.layers.2.self_attn.k_proj.weight"].shape == (8, 32)
    assert weights["lm_head.weight"].shape == (shape.vocab_size, 32)


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="below the bytes"):
        TinyShape(vocab_size=100)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o077 == 0o044
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
