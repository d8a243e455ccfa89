"""Every command on a run whose trainer is no engine of hpctrain, in every state and at every level.

Nothing is shown that the trainer has not reported: no tokens, no learning rate, no memory, no MFU,
and no steps or productive time below level 3.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, hpctrain, on_terminal
from trainer_runs import STATES, TARGET_STEP, TrainerRun, trainer_run
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.slurm.fake import FakeSlurm

# At which level, and whether the run ends with a file.
KINDS = ((0, False), (0, True), (1, False), (3, False), (3, True))
READING = {
    "status": ("status",),
    "status of it": ("status", "{run}"),
    "status for programs": ("status", "{run}", "--json"),
    "why": ("why", "{run}"),
    "why for programs": ("why", "{run}", "--json"),
    "describe": ("describe", "{run}"),
    "describe for programs": ("describe", "{run}", "--json"),
    "logs": ("logs", "{run}"),
    "errors": ("logs", "{run}", "--errors"),
    "log of a rank": ("logs", "{run}", "--rank", "9"),
    "goodput": ("goodput", "{run}"),
    "goodput for programs": ("goodput", "{run}", "--json"),
    "diagnose": ("diagnose", "{run}"),
    "diagnose for programs": ("diagnose", "{run}", "--json"),
    "checkpoints": ("checkpoints", "{run}", "--verify"),
    "checkpoints for programs": ("checkpoints", "{run}", "--json"),
    "report": ("report", "{run}", "-o", "-"),
    "report of several": ("report", "{run}", "{run}", "-o", "-"),
    "week": ("report", "--since", "2027-01-14", "--until", "2027-01-16"),
    "week as a page": ("report", "--since", "2027-01-14", "--until", "2027-01-16", "-o", "-"),
    "exporter": ("exporter", "--once"),
    "export": ("export", "{run}", "--csv"),
    "nodes": ("nodes",),
    "notify": ("notify", "{run}"),
    "watch": ("watch",),
    "clean": ("clean", "{run}", "--dry-run"),
    "archive": ("archive", "{run}", "-o", "{place}/run.tar", "--with-checkpoints", "last"),
    "calibrate": ("calibrate", "{directory}", "-p", "h100x16"),
}
ACTING = {
    "save": ("save", "{run}"),
    "stop": ("stop", "{run}"),
    "hold": ("hold", "{run}"),
    "resume": ("resume", "{run}"),
    "upgrade": ("upgrade", "{run}", "-y"),
    "cancel": ("cancel", "{run}", "-y"),
    "rm": ("rm", "{run}", "-y"),
}
# Names of values in documents that nobody has reported.
_UNREPORTED = {
    *("tokens_per_second", "tokens_per_second_per_gpu", "learning_rate", "mfu", "memory_bytes"),
    *("consumed_samples", "parameters", "grad_norm", "peak_bytes", "stall_seconds"),
}
_INVENTED = re.compile(r"\d\S* (?:tokens|parameters)\b|tokens/s\b|\bMFU\b|[Ll]earning rate")
_OWN_PHRASES = ("tokens per",)  # what a column of a table of all runs is named


@pytest.fixture
def chosen(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TrainerRun]:
    state, level, by_file = request.param
    made = trainer_run(tmp_path, state, level, by_file=by_file)

    class Slurm(FakeSlurm):
        """The one that knows the job of the run."""

        def __init__(self, *_: object, **__: object) -> None:
            vars(self).update(vars(made.slurm))

    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", Slurm)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    with clock.replaced(VirtualClock(made.now)):
        yield made


ALL = [(state, level, by_file) for state in STATES for level, by_file in KINDS]


def over(cases: list[Any]) -> pytest.MarkDecorator:
    names = [f"{state}-{level}-{'file' * by_file or 'step'}" for state, level, by_file in ALL]
    return pytest.mark.parametrize("chosen", cases, indirect=True, ids=names)


over_all = over(ALL)


def run_command(chosen: TrainerRun, words: tuple[str, ...]) -> Outcome:
    directory = chosen.run.layout.directory
    places = {"run": chosen.run.run_id, "directory": directory, "place": directory.parents[1]}
    return hpctrain(*(word.format(**places) for word in words))


def expected_codes(name: str, chosen: TrainerRun) -> set[int]:
    """Exit codes besides 0 that a command has for a good reason."""
    is_live = chosen.state in ("waiting", "running", "preempted", "resumed")
    return {
        "archive": {2} if is_live or not chosen.level else set(),
        "status of it": {7} if chosen.state == "failed" else set(),
        "status for programs": {7} if chosen.state == "failed" else set(),
        "status": {7} if chosen.state == "failed" else set(),
        "logs": {2} if chosen.state == "waiting" else set(),
        "errors": {2} if chosen.state == "waiting" else set(),
        "log of a rank": {2} if chosen.state == "waiting" else set(),
        "diagnose": {2} if chosen.state == "waiting" or chosen.level < 3 else set(),
        "diagnose for programs": {2} if chosen.state == "waiting" or chosen.level < 3 else set(),
        "notify": {2},
        "calibrate": {3},
    }.get(name, set())


def values_of(document: Any) -> Iterator[tuple[str, Any]]:
    """List all keys of a document with what they have."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key, value
            yield from values_of(value)
    elif isinstance(document, list):
        for one in document:
            yield from values_of(one)


def text_of(page: str) -> str:
    """Take the words out of a page."""
    page = re.sub(r"<style.*?</style>|<(svg|details).*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


@over(
    # each state with two of the kinds, by turns: 28 commands a case
    [
        one
        if sum(divmod(n, len(KINDS))) % len(KINDS) < 2
        else pytest.param(one, marks=pytest.mark.variant)
        for n, one in enumerate(ALL)
    ]
)
def test_no_command_fails_or_invents_a_figure(chosen: TrainerRun) -> None:
    for name, words in READING.items():
        found = run_command(chosen, words)
        assert found.exit_code in {0, *expected_codes(name, chosen)}, found.transcript()
        said = re.sub(r"^# HELP.*", "", found.stdout + found.stderr, flags=re.M)
        assert "unexpected" not in said and "Traceback" not in said, found.transcript()
        assert "newer hpctrain" not in said and "cannot be read" not in text_of(said), name
        if name.startswith("export"):
            continue  # their values are looked at below
        shown = text_of(said)
        for found_text in _INVENTED.finditer(shown):
            around = shown[max(0, found_text.start() - 60) : found_text.end() + 60]
            raise AssertionError(f"{name}: ... {around} ...")
        if "--json" in words and found.stdout:
            invented = {
                key: value
                for key, value in values_of(json.loads(found.stdout))
                if key in _UNREPORTED and value is not None
            }
            assert not invented, name


@over_all
def test_steps_are_shown_as_far_as_they_are_known(chosen: TrainerRun) -> None:
    row = json.loads(run_command(chosen, READING["status for programs"]).stdout)["runs"][0]
    spent = json.loads(run_command(chosen, READING["goodput for programs"]).stdout)["goodput"]
    steps = {"waiting": None, "resumed": 50, "preempted": 40, "done": TARGET_STEP}
    step = steps.get(chosen.state, 40)
    if chosen.level < 3 and step == 50:
        step = 40  # the newest one that was saved
    assert row["step"] == (step if chosen.level else None)
    by_file = chosen.target_step is None
    assert row["target_step"] == (None if by_file else TARGET_STEP)
    assert row["step_seconds"] == (2.0 if chosen.level == 3 and step is not None else None)
    runs = chosen.state in ("running", "resumed")
    left = runs and chosen.level == 3 and not by_file
    assert row["eta_seconds"] == (2.0 * (TARGET_STEP - row["step"]) if left else None)
    table = on_terminal(80, "status")
    if chosen.level and step is not None:
        assert f" {step} " in table if by_file else f" {step}/60 " in table
    else:
        assert "/60" not in table
    assert max(map(len, table.splitlines())) <= 80
    # Time: below level 3 nobody knows which part of it was productive.
    assert spent["gpus"] == 16
    has_begun = chosen.state != "waiting"
    assert (spent["gpu_hours"] > 0) == has_begun
    if chosen.level == 3:
        assert spent["kept_steps"] == (step or 0)
        assert spent["seconds"]["productive"] == pytest.approx(2.0 * (step or 0))
        assert spent["seconds"]["unreported"] == 0
    elif has_begun:
        assert (spent["ettr"], spent["kept_steps"], spent["lost_steps"]) == (None, None, None)
        assert spent["seconds"]["productive"] == spent["seconds"]["redone"] == 0
        assert spent["seconds"]["unreported"] > 100


@over_all
def test_metrics_of_a_trainer_are_what_it_has_reported(chosen: TrainerRun) -> None:
    exported = run_command(chosen, READING["exporter"]).stdout
    families = {line.split("{")[0] for line in exported.splitlines() if line[:1] != "#"}
    never = ("tokens_per_second", "learning_rate", "gradient_norm", "mfu_ratio", "planned_")
    assert not [name for name in families if any(word in name for word in never)]
    reports = chosen.level == 3 and chosen.state != "waiting"
    assert ("hpctrain_run_loss" in families) == reports
    assert ("hpctrain_run_step" in families) == (bool(chosen.level) and chosen.state != "waiting")
    assert ("hpctrain_run_goodput_ratio" in families) == (reports or chosen.state == "waiting")
    assert "hpctrain_run_cost_total" in families
    rows = list(csv.DictReader(io.StringIO(run_command(chosen, READING["export"]).stdout)))
    assert bool(rows) == reports
    unknown = _UNREPORTED & set(rows[0]) if rows else set()
    assert not [row for row in rows if any(row[name] for name in unknown)]


@pytest.mark.parametrize("chosen", [("done", 3, False)], indirect=True)
def test_its_curves_for_other_programs(chosen: TrainerRun) -> None:
    curves = run_command(chosen, ("export", "{run}", "--tensorboard", "-o", "{place}/curves"))
    assert curves.exit_code == 0, curves.transcript()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(chosen.run.layout.directory.parents[1].rglob("events.*"))))
    tags = set(events.Reload().Tags()["scalars"])
    assert tags == {"train/loss", "run/launch"}


@pytest.mark.nightly("a process that imports torch, for one sentence")
@pytest.mark.parametrize("chosen", [("done", 3, False)], indirect=True)
def test_its_weights_are_not_converted(chosen: TrainerRun) -> None:
    words = ("convert", "{directory}/checkpoints/iter_0000060", "{place}/converted")
    refused = run_command(chosen, words)
    assert refused.exit_code == 3
    assert "is of a trainer of its own" in refused.stderr
    assert "iter_0000060/checkpoint-60" in refused.stderr


@pytest.mark.parametrize("name", ACTING)
@pytest.mark.parametrize(
    "chosen",
    [
        (state, level, False)
        for state in ("waiting", "running", "preempted", "failed", "done")
        for level in (0, 1, 3)
    ],
    indirect=True,
    ids=lambda one: f"{one[0]}-{one[1]}",
)
def test_a_run_can_be_steered(chosen: TrainerRun, name: str) -> None:
    found = run_command(chosen, ACTING[name])
    said = found.stdout + found.stderr
    assert found.exit_code in (0, 2), found.transcript()
    assert "unexpected" not in said and "Traceback" not in said, found.transcript()
    if chosen.state != "running":
        return
    if name == "save":
        assert found.exit_code == 2
        assert "saves when its trainer does" in said
    if name in ("stop", "hold"):
        assert found.exit_code == 0
        assert ("work since the newest checkpoint is lost" in said) == (chosen.level < 2), said
