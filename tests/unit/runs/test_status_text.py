"""The table of runs on a terminal: long names, runs of others, prepared runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hpctrain.records.requests import user_name
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus
from hpctrain.runs.status_text import people_lines

LONG = "a-name-that-somebody-took-great-pains-to-make-complete-1a2b"


def row(run_id: str, state: RunState = RunState.RUNNING, **more: Any) -> RunStatus:
    facts: dict[str, Any] = dict(
        job_id=4711, attempts=2, step=1200, target_step=100_000, loss=2.5, step_seconds=1.25,
        tokens_per_second=12_345.0, updated_seconds_ago=12.0, eta_seconds=90_000.0,
        owner=user_name(), reason="",
    )  # fmt: skip
    return RunStatus(run_id=run_id, state=state, **{**facts, **more})


def test_one_long_name_takes_no_columns_from_the_others() -> None:
    without = list(people_lines([row("gpt-1a2b")], 80))
    lines = list(people_lines([row("gpt-1a2b"), row(LONG), row("bert-77aa")], 80))
    assert lines[0].split() == without[0].split()
    own = lines.index(LONG)
    assert lines[own + 1].split()[0] == "RUNNING", "its cells are below it"
    assert [line for line in lines if line.startswith("bert-77aa")]
    assert max(map(len, lines)) <= 80


def test_a_long_name_stays_in_its_row_where_there_is_room() -> None:
    lines = list(people_lines([row("gpt-1a2b"), row(LONG)], 160))
    assert any(line.startswith(f"{LONG}  RUNNING") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_and_states_are_whole_at_every_width(width: int) -> None:
    names = ["x" * length for length in (5, 20, 32, 33, 50)]
    text = "\n".join(people_lines([row(name) for name in names], width))
    assert all(any(line.split()[:1] == [name] for line in text.splitlines()) for name in names)
    assert text.count("RUNNING") == len(names)


def test_runs_of_others_show_whose_they_are() -> None:
    (head, *_) = people_lines([row("gpt-1a2b"), row("hers-0001", owner="ada")], 120)
    assert head.split()[:3] == ["RUN", "STATE", "USER"]
    (head, *_) = people_lines([row("gpt-1a2b"), row("unknown-0001", owner=None)], 120)
    assert "USER" not in head


def test_times_are_aligned_on_the_right() -> None:
    rows = [row("a", updated_seconds_ago=0.024), row("b", updated_seconds_ago=754.0)]
    ends = []
    for line in itertools.islice(people_lines(rows, 140), 0, 5):
        if line.startswith(("a ", "b ")):
            cells = line.split("  ")
            ends.append(len(line.rstrip()) if cells else 0)
    assert len(set(ends)) == 1


def test_a_prepared_run_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [row("prepared-0001", RunState.PREPARED), row("refused-0002", RunState.NOT_SUBMITTED)]
    prepared, refused = (
        line for line in people_lines(rows, 120) if "PREPARED" in line or "NOT SUB" in line
    )
    assert "\x1b[33m" in prepared and "\x1b[31m" in refused
