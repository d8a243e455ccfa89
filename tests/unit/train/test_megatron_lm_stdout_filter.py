"""Lines on standard output: each is handled once as a whole, and some are dropped."""

from __future__ import annotations

import io
import sys

import pytest

from hpctrain.train.engines.megatron_lm.program import LineFilter, filter_stdout


def drop_secrets(lines: list[str]) -> LineFilter:
    def handle(line: str) -> bool:
        lines.append(line)
        return "secret" not in line

    return LineFilter(io.StringIO(), handle)


def test_lines_are_handled_and_written() -> None:
    lines: list[str] = []
    stream = drop_secrets(lines)
    print("one", "two", file=stream, flush=True)
    stream.write("secret\nthr")
    assert stream.getvalue() == "one two\n", "a line is written when it is complete"
    stream.write("ee\n\n")
    assert lines == ["one two", "secret", "three", ""]
    assert stream.getvalue() == "one two\nthree\n\n"


def test_a_flush_in_the_middle_of_a_line() -> None:
    """By another thread, or by a progress bar: the line is still handled as a whole, and the part
    that was written gets its end."""
    lines: list[str] = []
    stream = drop_secrets(lines)
    for part in ("a sec", "ret", "\n", "fine"):
        stream.write(part)
        stream.flush()
    assert stream.getvalue() == "a secret\nfine"
    stream.write("\nsecret\n")
    assert lines == ["a secret", "fine", "secret"]
    assert stream.getvalue() == "a secret\nfine\n"


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    lines: list[str] = []
    stream = drop_secrets(lines)
    for _ in range(200):
        stream.write("x" * 1000)
    assert len(stream.getvalue()) > 100_000
    stream.write("\n")
    assert stream.getvalue() == "x" * 200_000 + "\n"


def test_standard_output_is_as_before_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with filter_stdout(lambda line: False):
        print("handled only")
        print("no end", end="")
    assert sys.stdout is before
    assert capsys.readouterr().out == "no end"
