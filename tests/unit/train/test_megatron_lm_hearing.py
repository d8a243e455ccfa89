"""Standard output is read along: whole lines are heard, and those not wanted stay away."""

from __future__ import annotations

import io
import sys

import pytest

from hpctrain.train.engines.megatron_lm.hearing import Hearing, hearing


def unless_secret(heard: list[str]) -> Hearing:
    def hear(line: str) -> bool:
        heard.append(line)
        return "secret" not in line

    return Hearing(io.StringIO(), hear)


def test_lines_are_heard_and_go_on() -> None:
    heard: list[str] = []
    stream = unless_secret(heard)
    print("one", "two", file=stream, flush=True)
    stream.write("secret\nthr")
    assert stream.getvalue() == "one two\n", "a line goes on when it is known what it says"
    stream.write("ee\n\n")
    assert heard == ["one two", "secret", "three", ""]
    assert stream.getvalue() == "one two\nthree\n\n"


def test_a_flush_in_the_middle_of_a_line() -> None:
    """Of another thread, or of a bar that shows progress: the line is heard as a whole all the
    same, and what has been shown of it gets its end."""
    heard: list[str] = []
    stream = unless_secret(heard)
    for part in ("a sec", "ret", "\n", "fine"):
        stream.write(part)
        stream.flush()
    assert stream.getvalue() == "a secret\nfine"
    stream.write("\nsecret\n")
    assert heard == ["a secret", "fine", "secret"]
    assert stream.getvalue() == "a secret\nfine\n"


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    heard: list[str] = []
    stream = unless_secret(heard)
    for _ in range(200):
        stream.write("x" * 1000)
    assert len(stream.getvalue()) > 100_000
    stream.write("\n")
    assert stream.getvalue() == "x" * 200_000 + "\n"


def test_standard_output_is_as_before_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with hearing(lambda line: False):
        print("heard only")
        print("no end", end="")
    assert sys.stdout is before
    assert capsys.readouterr().out == "no end"
