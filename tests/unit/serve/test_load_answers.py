"""Streams as engines really send them, what is asked of engines, and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.serve.load.sending import AnswerError, PromptStyle, StreamedAnswer, request_body
from hpctrain.serve.load.trace_file import read_trace


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
