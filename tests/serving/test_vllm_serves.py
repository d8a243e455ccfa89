"""A real vLLM, by the commands of our contract: ready, measured, cross-checked and drained.

One test has one vLLM, because it takes the better part of a minute to start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serving_environment import RunningEngine, running_engine, serving_python, tiny_start

from hpctrain.serve.engines.contract import EngineStart, LoraAdapter, NodeOfReplica, TlsFiles
from hpctrain.serve.engines.registry import command_of
from hpctrain.serve.load.measurement import LoadResult, LoadTarget, RequestRecord
from hpctrain.serve.load.sending import PromptStyle, send_requests
from hpctrain.serve.load.summary import SampleQuantile, sample_quantile
from hpctrain.serve.plan.traffic import Lengths, Traffic, draw_requests

pytest.importorskip("aiohttp", reason="NOT TRIED with real engines: load tests need aiohttp")
KEY = "a-key-of-this-test"
STYLE = PromptStyle(lowest_id=3, highest_id=511)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8
LONG = 900  # tokens of an answer that a signal finds under way


def ask(engine: RunningEngine, seconds: list[float], tokens: int, name: str) -> LoadResult:
    lengths = Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(tokens, tokens)
    requests = draw_requests(Traffic(*lengths), len(seconds), seed=1)
    target = LoadTarget(engine.url, "tiny", KEY, timeout_seconds=120)
    return send_requests(target, STYLE, requests, np.asarray(seconds), name=name)


def test_vllm_from_its_start_to_its_drain(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    start = tiny_start(
        serving_python(),
        tmp_path / "model",
        max_model_tokens=1024,
        max_sequences=64,
        drain_seconds=60,
        api_key_path=str(tmp_path / "key"),
    )
    with running_engine("vllm", start, tmp_path) as engine:
        the_key_is_needed_and_hidden(engine)
        the_metrics_have_the_names_of_the_contract(engine)
        lengths_are_exact(engine)
        latencies_are_those_of_vllm_bench(engine, tmp_path)
        what_has_begun_ends_and_nothing_new_begins(engine)


def the_key_is_needed_and_hidden(engine: RunningEngine) -> None:
    assert engine.status("/v1/models") == 401
    assert engine.status("/v1/models", {"Authorization": f"Bearer {KEY}"}) == 200
    # ps, and so every user of the node, sees this
    assert KEY.encode() not in Path(f"/proc/{engine.process.pid}/cmdline").read_bytes()


def the_metrics_have_the_names_of_the_contract(engine: RunningEngine) -> None:
    ask(engine, [0.0], 2, "first")
    metrics = engine.engine.metrics
    assert metrics is not None
    shown = {line.split("{")[0].split(" ")[0] for line in engine.text(metrics.path).splitlines()}
    for field, name in vars(metrics).items():
        if field != "path":
            assert {name, f"{name}_bucket"} & shown, f"{field}: vLLM does not show {name}"


def lengths_are_exact(engine: RunningEngine) -> None:
    records = ask(engine, [0.01 * number for number in range(40)], OUTPUT_TOKENS, "exact").records
    assert [record.failure for record in records] == [None] * 40
    assert {record.answered_tokens for record in records} == {OUTPUT_TOKENS}
    # one piece per token, unless the front end was too busy to send each by itself
    assert all(len(record.gap_seconds) < OUTPUT_TOKENS for record in records)


def latencies_are_those_of_vllm_bench(engine: RunningEngine, directory: Path) -> None:
    """Both ask the same engine at the same time, so both see the same queue.

    vLLM's client counts from when it sends, so ours does here as well: how late a client is says
    nothing about the engine.
    """
    rate, count = 4, 120
    served = _served(engine)
    words = (
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--host", engine.start.host, "--port", str(engine.start.port), "--model", "tiny"),
        *("--tokenizer", engine.start.model_path, "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--request-rate", str(rate), "--num-prompts", str(count), "--seed", "2"),
        *("--save-result", "--save-detailed", "--result-dir", str(directory)),
        *("--result-filename", "bench.json", "--disable-tqdm", "--temperature", "0"),
    )
    vllm = str(Path(engine.start.python).with_name("vllm"))
    environment = {"PATH": "/usr/bin:/bin", "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    log = directory / "bench.log"
    with log.open("wb") as output:
        bench = subprocess.Popen(
            [vllm, *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while _served(engine) == served:  # it imports for a while, and then tries one request
            assert bench.poll() is None, log.read_text()
            time.sleep(0.1)
        gaps = np.random.default_rng(7).exponential(1 / rate, count)
        ours = ask(engine, np.cumsum(gaps).tolist(), OUTPUT_TOKENS, "beside").records
        assert bench.wait(180) == 0, log.read_text()
    finally:
        bench.kill()
        bench.wait()
    theirs = json.loads((directory / "bench.json").read_text())
    # its client meets a connection that is being closed now and then, ours never: see `sending`
    assert theirs["completed"] > 0.9 * count
    for latency, our_seconds, their_seconds in (
        ("ttft", [_from_sending(one) for one in ours], theirs["ttfts"]),
        ("tpot", [one.tpot_seconds or 0.0 for one in ours], [_tpot(one) for one in theirs["itls"]]),
    ):
        median, other = sample_quantile(our_seconds, 0.5), sample_quantile(their_seconds, 0.5)
        assert _overlap(median, other), f"{latency}: {median} and vLLM's own {other}"


def _served(engine: RunningEngine) -> float:
    metrics = engine.engine.metrics
    assert metrics is not None
    count = f"{metrics.e2e_seconds}_count"
    lines = engine.text(metrics.path).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(count))


def _from_sending(record: RequestRecord) -> float:
    assert record.failure is None and record.first_token_seconds is not None
    return record.first_token_seconds - record.sent_seconds


def _tpot(gaps: list[float]) -> float:
    """From the first token to the last, of which a busy machine may send several at once."""
    return sum(gaps) / (OUTPUT_TOKENS - 1)


def _overlap(one: SampleQuantile, other: SampleQuantile) -> bool:
    """Intervals, widened by half: beside other tests two clients get unequal shares of two cores.

    A client that counts the time to connect, or waits for earlier answers, is off by more.
    """
    return one.low / 1.5 <= other.high * 1.5 and other.low / 1.5 <= one.high * 1.5


def what_has_begun_ends_and_nothing_new_begins(engine: RunningEngine) -> None:
    """The facts that the order of a drain rests on; see EngineDrain of vLLM.

    Its engine ends some seconds after it has computed its last token, and a front end that a busy
    machine has left behind by more breaks the rest off: replicas are idle before they are asked.
    """
    drain = engine.engine.drain
    results: list[LoadResult] = []
    thread = threading.Thread(target=lambda: results.append(ask(engine, [0.0], LONG, "long")))
    thread.start()
    metrics = engine.engine.metrics
    assert metrics is not None
    while f'{metrics.requests_running}{{engine="0",model_name="tiny"}} 1.0' not in engine.text(
        metrics.path
    ):
        assert thread.is_alive()
        time.sleep(0.05)
    engine.process.send_signal(signal.SIGTERM)
    assert drain.refuses_new
    while ask(engine, [0.0], 2, "late").records[0].failure is None:  # it hears of it in a moment
        assert thread.is_alive(), "the answer was over before anything was refused"
    assert (engine.status(engine.engine.ready_path) == 200) is not drain.health_fails
    thread.join(120)
    (begun,) = results[0].records
    assert begun.answered_tokens > LONG / 2, "the signal came as soon as it had begun"
    code = engine.process.wait(60)
    if begun.failure is None:
        assert (begun.answered_tokens, code) == (LONG, 0)


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

for words in json.load(sys.stdin):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(json.dumps([parsed.tensor_parallel_size, parsed.headless, parsed.shutdown_timeout]))
"""


@pytest.mark.variant("test_vllm_from_its_start_to_its_drain")
def test_vllm_takes_the_options_of_every_command() -> None:
    """Also of what this machine cannot run: several nodes, FP8, adapters, TLS.

    Changes with vLLM's version only, and imports all of it.
    """
    python = serving_python()
    start = EngineStart(
        python=str(python),
        model_path="/weights",
        served_name="llama",
        host="10.0.0.7",
        port=8000,
        tensor_parallel=4,
        precision="fp8",
        kv_precision="fp8",
        max_model_tokens=4096,
        max_sequences=256,
        max_batched_tokens=8192,
        memory_fraction=0.9,
        adapters=(LoraAdapter("law", "/lora/law", 20),),
        drain_seconds=120,
        tls=TlsFiles("/c.pem", "/k.pem"),
    )
    second = replace(start, pipeline_parallel=2, node=NodeOfReplica(2, 1, "n1", 29600))
    # python -m vllm.entrypoints.cli.main serve ...
    words = [command_of("vllm", one).words[4:] for one in (start, second)]
    done = subprocess.run(
        [str(python), "-c", PARSE],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=300,
    )
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert parsed == [[4, False, 120], [4, True, 120]], done.stderr[-3000:]
