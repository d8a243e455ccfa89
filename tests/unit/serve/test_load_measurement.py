"""Streams as engines send them, records, order statistics, and promise beside measurement."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.serve.load.measurement import (
    ClientUse,
    LoadPlan,
    LoadResult,
    LoadTarget,
    Measurement,
    RequestRecord,
    compare,
)
from hpctrain.serve.load.sending import AnswerError, PromptStyle, StreamedAnswer, request_body
from hpctrain.serve.load.summary import RankInterval, rank_interval, sample_quantile, summarize
from hpctrain.serve.load.trace_file import read_trace
from hpctrain.serve.plan.documents import Promise
from hpctrain.serve.plan.traffic import Traffic

TARGET = LoadTarget("http://127.0.0.1:1", "tiny")
IDLE = ClientUse(cpu_share=0.1, lag_seconds=(0.001,), most_outstanding=3)


@pytest.mark.parametrize(
    ("samples", "share", "ranks"),
    [
        # the tables of textbooks: ranks 40 and 61 of 100 for the median, 1 and 6 of 6
        (100, 0.5, RankInterval(40, 61)),
        (6, 0.5, RankInterval(1, 6)),
        (5, 0.5, RankInterval(None, None)),
        # 0.99 ** 368 is the first power below 2.5 %
        (368, 0.99, RankInterval(360, 368)),
        (367, 0.99, RankInterval(359, None)),
        (10_000, 0.99, RankInterval(9880, 9920)),
        (0, 0.5, RankInterval(None, None)),
    ],
)
def test_ranks(samples: int, share: float, ranks: RankInterval) -> None:
    assert rank_interval(samples, share) == ranks


def test_the_interval_covers_the_quantile_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3)
    true_p90 = math.log(10)  # of the exponential distribution
    ranks = rank_interval(200, 0.9)
    assert ranks.low is not None and ranks.high is not None
    covered = 0
    for _ in range(2000):
        ordered = np.sort(draws.exponential(size=200))
        covered += ordered[ranks.low - 1] <= true_p90 <= ordered[ranks.high - 1]
    assert 0.945 <= covered / 2000 <= 0.98


def test_requests_of_one_queue_say_less_than_independent_ones() -> None:
    draws = np.random.default_rng(5)
    independent = draws.exponential(size=4000)
    queued = np.repeat(draws.exponential(size=40), 100)  # 100 neighbours wait equally long
    alone, together = sample_quantile(independent, 0.9), sample_quantile(queued, 0.9)
    assert alone.independent > 2000
    assert together.independent < 200
    assert together.high - together.low > 3 * (alone.high - alone.low)


def record(number: int, ttft: float = 0.1, **changes: object) -> RequestRecord:
    planned = number * 0.1
    plain = RequestRecord(
        request_id=f"load-{number}",
        planned_seconds=planned,
        sent_seconds=planned + 0.001,
        prompt_tokens=8,
        asked_tokens=3,
        first_token_seconds=planned + ttft,
        last_token_seconds=planned + ttft + 0.04,
        answered_tokens=3,
        gap_seconds=(0.02, 0.02),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def measured(
    records: list[RequestRecord], use: ClientUse = IDLE, warm_up: float = 0.0
) -> Measurement:
    plan = LoadPlan(Traffic(), 10.0, warm_up_seconds=warm_up)
    return summarize(TARGET, plan, LoadResult(tuple(records), use, 0.0))


def test_latencies_count_from_the_planned_time() -> None:
    late = record(0, sent_seconds=0.5, first_token_seconds=0.6, last_token_seconds=0.8)
    assert late.ttft_seconds == pytest.approx(0.6)
    assert late.e2e_seconds == pytest.approx(0.8)
    assert late.tpot_seconds == pytest.approx(0.1)


def test_a_record_survives_its_line() -> None:
    failed = record(5, failure="timeout", detail="no end", first_token_seconds=None)
    for one in (record(5), failed):
        assert RequestRecord.from_line(one.to_line()) == one


def test_a_failed_request_never_ends() -> None:
    """P99 with 2 of 100 failed is not the P99 of those that came back."""
    failed = [
        record(n, first_token_seconds=None, failure="http 5xx", detail="500") for n in (3, 60)
    ]
    good = [record(n) for n in range(100) if n not in (3, 60)]
    found = measured([*failed, *good])
    p50, p99 = found.quantile("ttft", "p50"), found.quantile("ttft", "p99")
    assert p50 is not None and p50.seconds == pytest.approx(0.1)
    assert p99 is not None and p99.seconds is None and p99.high_seconds is None
    assert found.failed == 2
    (group,) = found.failures
    assert (group.kind, group.request_ids) == ("http 5xx", ("load-3", "load-60"))
    assert group.planned_seconds == pytest.approx((0.3, 6.0))


def test_the_warm_up_is_cut_by_planned_time() -> None:
    found = measured([record(n, ttft=9.0 if n < 10 else 0.1) for n in range(100)], warm_up=1.0)
    assert (found.requests, found.counted) == (100, 90)
    p99 = found.quantile("ttft", "p99")
    assert p99 is not None and p99.seconds == pytest.approx(0.1)
    # 90 requests, the last of which ends 0.14 s after 9.9 s
    assert found.answered_rate == pytest.approx(90 / (9.9 + 0.14 - 1.0))
    assert found.output_tokens_rate == pytest.approx(3 * found.answered_rate)


def test_answers_of_one_token_have_no_time_per_further_token() -> None:
    one = record(0, answered_tokens=1, gap_seconds=())
    found = measured([one, record(1)])
    tpot = found.quantile("tpot", "p50")
    assert tpot is not None and tpot.samples == 1


@pytest.mark.parametrize(
    ("use", "lateness", "reason"),
    [
        (IDLE, 0.001, None),
        (replace(IDLE, cpu_share=0.95), 0.001, "95% of a core"),
        (IDLE, 0.009, None),
        (IDLE, 0.011, "left 11.0 ms late"),  # a tenth of the median time to the first token
    ],
)
def test_a_client_that_measures_itself_is_refused(
    use: ClientUse, lateness: float, reason: str | None
) -> None:
    records = [record(n, sent_seconds=n * 0.1 + lateness) for n in range(50)]
    refused = measured(records, use).refused
    assert [reason in line for line in refused if reason] == ([] if reason is None else [True])
    assert bool(refused) == (reason is not None)


def test_nothing_after_the_warm_up_is_no_measurement() -> None:
    assert measured([record(0)], warm_up=5.0).refused == (
        "no request was planned after the warm-up",
    )


def promise(limit: float, predicted: float = 0.1) -> Promise:
    return Promise(
        latency="ttft",
        percentile="p99",
        limit_seconds=limit,
        predicted_seconds=predicted,
        low_seconds=predicted * 0.9,
        high_seconds=predicted * 1.1,
        holds=True,
    )


def spread_records(count: int) -> list[RequestRecord]:
    order = np.random.default_rng(1).permutation(count)
    return [record(n, ttft=0.1 + 0.1 * float(order[n]) / count) for n in range(count)]


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(0.3, "met"), (0.1985, "cannot tell"), (0.15, "not met")],
)
def test_an_objective_is_met_when_the_whole_interval_is(limit: float, verdict: str) -> None:
    found = compare([promise(limit)], measured(spread_records(2000)))
    assert [one.verdict for one in found.objectives] == [verdict] == [found.verdict]
    (one,) = found.objectives
    assert one.measured is not None and one.measured.low_seconds < 0.199
    assert one.as_promised is False  # 0.199 s were measured, 0.11 s were promised at most


def test_too_few_requests_cannot_tell_a_p99() -> None:
    found = compare([promise(9.0)], measured([record(n) for n in range(300)]))
    assert found.verdict == "cannot tell"
    assert "too few" in found.objectives[0].reason
    assert found.objectives[0].as_promised


def test_many_failures_break_an_objective_whatever_its_limit() -> None:
    failing = [
        record(n, failure="reset", first_token_seconds=None) if n % 20 == 0 else record(n)
        for n in range(1000)
    ]
    found = compare([promise(99.0)], measured(failing))
    assert found.objectives[0].verdict == "not met"
    assert found.objectives[0].reason == "50 of 1000 requests failed"


def test_a_refused_measurement_decides_nothing() -> None:
    busy = measured(spread_records(2000), replace(IDLE, cpu_share=1.0))
    found = compare([promise(0.01)], busy)
    assert found.verdict == "cannot tell" and found.objectives[0].measured is None


def test_one_broken_objective_is_the_verdict_of_the_test() -> None:
    found = compare([promise(0.3), promise(0.15)], measured(spread_records(2000)))
    assert found.verdict == "not met"
    assert compare([], measured(spread_records(10))).verdict == "cannot tell"


def completion(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def usage(tokens: int) -> bytes:
    return f'data: {{"choices":[],"usage":{{"completion_tokens":{tokens}}}}}\n\n'.encode()


def chat(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def read(*events: bytes) -> StreamedAnswer:
    answer = StreamedAnswer()
    for seconds, event in enumerate(events):
        answer.feed(event, float(seconds))
    return answer


def test_vllm_sends_tokens_without_visible_text() -> None:
    """Seen with 0.32.0: half a character has the text "", and so may the last token."""
    answer = read(completion(""), completion("é"), completion("", "length"), usage(3), DONE)
    assert answer.piece_seconds == [0.0, 1.0, 2.0]
    assert answer.tokens == 3 and answer.complete


def test_transformers_ends_with_an_event_that_is_no_token() -> None:
    end = completion("", "length").replace(b"]}", b'],"usage":{"completion_tokens":2}}')
    answer = read(completion("a"), completion("b"), end)
    assert answer.piece_seconds == [0.0, 1.0]
    assert answer.tokens == 2 and answer.complete


def test_chat_begins_before_its_first_token() -> None:
    answer = read(
        chat({"role": "assistant", "content": ""}),
        chat({"content": "a"}),
        chat({}, "stop"),
        usage(1),
    )
    assert answer.piece_seconds == [1.0]
    assert answer.complete


def test_events_may_be_cut_anywhere() -> None:
    stream = completion("a") + completion("b", "stop") + usage(2) + DONE
    whole, cut = read(stream), read(*(stream[n : n + 7] for n in range(0, len(stream), 7)))
    assert whole.tokens == cut.tokens == len(cut.piece_seconds) == 2
    assert cut.piece_seconds[0] < cut.piece_seconds[1]


@pytest.mark.parametrize("reason", [None, "abort", "error"])
def test_an_answer_that_does_not_say_that_it_ended_is_not_whole(reason: str | None) -> None:
    assert not read(completion("a"), completion("b", reason)).complete


@pytest.mark.parametrize(
    "event", [b'data: {"error": {"message": "EngineCore", "code": 500}}\n\n', b"data: {\n\n"]
)
def test_an_error_event_fails_the_request(event: bytes) -> None:
    with pytest.raises(AnswerError):
        read(event)


def test_exact_lengths_are_token_ids() -> None:
    style = PromptStyle(lowest_id=5, highest_id=9, seed=1, shared_prefix_tokens=4)
    first, again, other = (
        json.loads(request_body(style, "tiny", number, 10, 3)) for number in (0, 0, 1)
    )
    assert first == again
    assert first["prompt"][:4] == other["prompt"][:4] and first["prompt"] != other["prompt"]
    assert len(first["prompt"]) == 10 and set(first["prompt"]) <= set(range(5, 10))
    assert (first["max_tokens"], first["min_tokens"], first["ignore_eos"]) == (3, 3, True)


def test_a_prompt_shorter_than_the_shared_beginning_is_part_of_it() -> None:
    style = PromptStyle(shared_prefix_tokens=100)
    long, short = (json.loads(request_body(style, "t", 0, n, 1))["prompt"] for n in (120, 7))
    assert short == long[:7]


def test_words_for_engines_that_take_no_ids() -> None:
    plain = json.loads(request_body(PromptStyle(exact=False), "tiny", 0, 6, 3))
    assert len(plain["prompt"].split()) == 6 and "ignore_eos" not in plain
    style = PromptStyle(interface="chat")
    (message,) = json.loads(request_body(style, "tiny", 0, 6, 3))["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 6
    assert not style.exact_lengths and style.path == "/v1/chat/completions"


def test_a_trace_is_gaps_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("output_tokens,arrival_seconds,prompt_tokens\n3,10,100\n4,10.5,200\n5,12,300\n")
    trace = read_trace(path)
    assert trace.gap_seconds == (1.0, 0.5, 1.5)
    assert trace.prompt_tokens == (100, 200, 300)
    assert trace.output_tokens == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "t.csv:1: the first line must name the columns"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1,1\nx,1,1\n", "t.csv:3: is not three"),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1,1\n1,0,1\n", "t.csv:3: needs lengths"),
        ("arrival_seconds,prompt_tokens,output_tokens\n2,1,1\n1,1,1\n", "t.csv:3: comes before"),
        ("arrival_seconds,prompt_tokens,output_tokens\n2,1,1\n", "needs two requests"),
        ("", "t.csv:1: the first line"),
    ],
)
def test_a_wrong_trace_is_named_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        read_trace(Path("t.csv"))
    assert message in str(caught.value)


def test_a_trace_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
