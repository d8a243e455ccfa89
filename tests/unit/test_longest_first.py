"""In which order several processes run the tests."""

from __future__ import annotations

from longest_first import deal, durations_text, shares


def test_shares_are_those_of_xdist() -> None:
    assert shares(10, 3) == [3, 3, 4]
    assert shares(2, 4) == [0, 0, 1, 1]


def test_every_share_begins_with_long_files() -> None:
    tests = ["a1", "a2", "b1", "b2", "b3", "c1", "c2", "d1", "e1", "f1", "f2", "f3"]
    seconds = {"c": 9.0, "d": 8.0, "e": 7.0, "f": 6.0}
    dealt = deal(tests, lambda test: test[0], seconds, 3)
    assert [dealt[:4], dealt[4:8], dealt[8:]] == [
        ["c1", "c2", "a1", "a2"],
        ["d1", "b1", "b2", "b3"],
        ["e1", "f1", "f2", "f3"],
    ]
    assert deal(tests, lambda test: test[0], {}, 3) == tests
    assert deal([], str, seconds, 3) == []


def test_a_file_larger_than_a_share_stays_where_it_is() -> None:
    tests = ["a1", "b1", "b2", "b3"]
    assert deal(tests, lambda test: test[0], {"b": 9.0}, 2) == tests


def test_only_long_files_are_written_down() -> None:
    assert durations_text({"a": 4.9, "b": 5.4, "c": 30.0}) == '{\n "c": 30,\n "b": 5\n}\n'
