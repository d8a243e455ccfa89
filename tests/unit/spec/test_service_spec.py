"""The spec of a service: what a small one means, and the message for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.units import Latency
from hpctrain.spec.loader import load_run_spec, load_service_spec

VALID = """\
kind: service
name: chat
weights: {path: /models/chat}
model: llama-3-70b
traffic: {rate: 100, prompt_tokens: {p50: 400, p99: 3000}, output_tokens: 128}
objectives: {ttft: {p99: 450ms}, tpot: {p99: 0.04s}}
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    return file


def test_a_small_one(tmp_path: Path) -> None:
    spec = load_service_spec(written(tmp_path, VALID)).document
    limits = {name: one.limits for name, one in spec.objectives.named.items()}
    assert limits == {"ttft": {"p99": 0.45}, "tpot": {"p99": 0.04}}
    assert spec.model is not None and spec.model.layers == 80, "the preset"
    assert spec.served_name == "chat"
    assert spec.resources.of_replica(4).gpus == 4


def test_options_of_the_command_line_win(tmp_path: Path) -> None:
    file = written(tmp_path, VALID)
    spec = load_service_spec(file, ("traffic.rate=7", "weights.name=other")).document
    assert (spec.traffic.rate, spec.served_name) == (7, "other")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("path: /models/chat", "path: a, run: b", "give exactly one of `path` and `run`"),
        ("{path: /models/chat}", "{}", "give exactly one of `path` and `run`"),
        ("rate: 100, ", "rate: 100, trace: t.csv, ", "a `trace` has the lengths"),
        ("rate: 100, prompt_tokens: {p50: 400, p99: 3000},", "rate: 1,", "or a `trace`"),
        ("p50: 400, p99: 3000", "p50: 400, p99: 300", "p99 300 is below p50 400"),
        ("rate: 100", "rate: 0", "must be above 0"),
        ("{ttft: {p99: 450ms}, tpot: {p99: 0.04s}}", "{}", "at least one of ttft, tpot and e2e"),
        ("{p99: 450ms}", "{}", "at least one of p50, p90, p95 and p99"),
        ("450ms", "450", "a latency such as `450ms` or `2s`"),
        ("450ms", "450us", "a latency such as `450ms` or `2s`"),
        ("name: chat", "name: chat\nreplicas: {min: 3, max: 2}", "max 2 is below min 3"),
        ("name: chat", "name: chat\nreplicas: {idle: 30min}", "idle needs min 0"),
        ("name: chat", "name: chat\nreplicas: {count: 0}", "must be at least 1"),
        (
            "name: chat",
            "name: chat\nreplicas: {hours: {'8:00': 1}}",
            "no time of day such as 08:00",
        ),
        ("name: chat", "name: chat\nreplicas: {hours: {'08:00': 2}}", "must be from 0 to 1"),
        ("name: chat", "name: chat\nengine: {tp: 0}", "must be at least 1"),
        (
            "name: chat",
            "name: chat\nrouter: {name: haproxy, policy: cache_aware}",
            "haproxy reads no prompts",
        ),
        ("kind: service", "kind: servce", "expected `service`"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in VALID
    file = written(tmp_path, VALID.replace(old, new))
    with pytest.raises(InvalidInputError) as refused:
        load_service_spec(file)
    assert any(problem in str(one) for one in refused.value.problems), refused.value.problems
    assert all(one.line for one in refused.value.problems)


def test_each_reader_names_the_command_for_the_other_kind(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as refused:
        load_run_spec(written(tmp_path, VALID))
    assert str(refused.value.problems[0].hint) == "`hpctrain serve plan FILE`"
    with pytest.raises(InvalidInputError) as refused:
        load_service_spec(written(tmp_path, "name: gpt\nmodel: gpt2\n"))
    assert "`hpctrain submit`" in str(refused.value.problems[0].hint)


@pytest.mark.parametrize("text", ["450ms", "2s", "0.5ms", "1.25s", "999ms"])
def test_a_latency_is_written_so_that_it_can_be_read_again(text: str) -> None:
    assert Latency.parse(str(Latency.parse(text))) == Latency.parse(text)
    assert str(Latency.parse("0.45s")) == "450ms"
