"""docs/reliability.md says what the tests show: no row without a test, no test without a row."""

from __future__ import annotations

import re
import sys

import reliability_report as report

sys.path.insert(0, str(report.FAULTS))

from fault_table import ROWS, UNRECORDED

DOCUMENT = report.DOCUMENT.read_text()


def test_the_document_lists_exactly_the_tests_that_exist() -> None:
    listed = {report.test_of(row) for row in report.known_rows()}
    assert listed == report.declared_tests(), "run `make reliability` and commit the table"


def test_every_fault_of_the_table_is_shown_or_named_as_shown_elsewhere() -> None:
    shown = {int(row[0]) for row in report.known_rows()}
    after = DOCUMENT.partition(report.END)[2].partition("##")[0]
    named = re.findall(r"\(([\d, ]+),", after)
    elsewhere = {int(number) for words in named for number in words.split(",")}
    assert not shown & elsewhere, "shown here after all"
    assert shown | elsewhere == {*ROWS, *UNRECORDED}
