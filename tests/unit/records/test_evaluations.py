"""What the lines about an evaluation say together, what a command may write, what must stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.evaluations import (
    Evaluation,
    EvaluationEvent,
    EvaluationJob,
    EvaluationSettings,
    append_event,
    needed_steps,
    newest_of_each_step,
    parse_metrics,
    read_evaluations_of,
    submission_lock,
)
from hpctrain.records.layout import RunLayout

KEY = ("score", 8, 1)
JOBS = (("score", 4), ("other", 20))


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def note(
    run: RunLayout, kind: str, attempt: int = 1, by: str = "supervisor", **more: object
) -> None:
    fields = {"kind": kind, "name": "score", "step": 8, "epoch": 1, "attempt": attempt, "time": 5.0}
    append_event(run, EvaluationEvent.model_validate({**fields, "by": by, **more}))


def now(run: RunLayout) -> Evaluation:
    return read_evaluations_of(run)[KEY]


def test_from_the_announcement_to_the_result(run: RunLayout) -> None:
    assert read_evaluations_of(run) == {}
    note(run, "submitting")
    assert now(run).state == "submitting" and now(run).open
    note(run, "submitted", job_id=7)
    assert (now(run).state, now(run).job_id) == ("submitted", 7)
    note(run, "started", job_id=7, by="job")
    assert now(run).state == "running" and not now(run).settled
    note(run, "ended", job_id=7, by="job", exit_code=0, metrics={"loss": 2.5})
    assert now(run).state == "done" and now(run).metrics == {"loss": 2.5} and now(run).settled
    note(run, "lost", job_id=7, reason="late")
    assert now(run).state == "done", "results stay"


def test_a_job_may_end_before_its_client_has_recorded_it(run: RunLayout) -> None:
    note(run, "submitting")
    note(run, "started", job_id=7, by="job")
    note(run, "submitted", job_id=7)
    assert now(run).state == "running"
    note(run, "ended", job_id=7, by="job", reason="exit code 1")
    note(run, "submitted", job_id=7)
    assert now(run).state == "failed" and not now(run).settled


def test_a_failure_is_tried_once_more(run: RunLayout) -> None:
    for attempt in (1, 2):
        note(run, "submitting", attempt)
        assert now(run).open
        note(run, "submitted", attempt, job_id=attempt)
        note(run, "ended", attempt, by="job", job_id=attempt, reason="boom")
        assert now(run).settled == (attempt == 2)
    note(run, "ended", 1, by="job", job_id=1, metrics={"loss": 1.0})
    assert now(run).state == "failed", "an earlier attempt no longer counts"


def test_refusals_end_it_only_from_a_login_node(run: RunLayout) -> None:
    hours = [float(hour) for hour in range(26)]
    for hour in hours:
        note(run, "submitting", time=hour * 3600)
        note(run, "refused", reason="no", time=hour * 3600)
        assert now(run).state == "refused" and not now(run).settled
    for hour in hours:
        assert not now(run).settled, f"after {hour} hours"
        note(run, "refused", by="watch", reason="no", time=hour * 3600)
        if hour >= 24:
            break
    assert now(run).settled
    note(run, "refused", by="watch", reason="no", time=25 * 3600.0, step=12)
    assert read_evaluations_of(run)["score", 12, 1].settled, "it is the job that is refused"


def test_a_day_between_few_refusals_proves_nothing(run: RunLayout) -> None:
    for day in range(9):
        note(run, "refused", by="watch", reason="no", time=day * 86400.0)
    assert not now(run).settled
    note(run, "submitted", job_id=1, step=12)
    note(run, "refused", by="watch", reason="no", time=10 * 86400.0)
    assert not now(run).settled, "another one of that job was taken meanwhile"


def test_few_checkpoints_are_kept_for_a_job_that_is_refused(run: RunLayout) -> None:
    epochs: dict[int, int | None] = dict.fromkeys(range(4, 44, 4), 1)
    jobs = tuple(EvaluationJob(name=name, every_steps=every) for name, every in JOBS)
    settings = EvaluationSettings(jobs=jobs, last_step=100)
    run.evaluation_config.write_text(settings.model_dump_json())
    note(run, "submitting", step=4)
    note(run, "submitted", step=4, job_id=1)
    assert needed_steps(run, epochs) == set(epochs)
    note(run, "submitting")
    note(run, "refused", reason="no")
    assert needed_steps(run, epochs) == {4, 20, 28, 32, 36, 40}, "a job, another job, the newest"
    note(run, "submitting")
    note(run, "submitted", job_id=2)
    assert needed_steps(run, epochs) == set(epochs)


def test_a_line_that_was_cut_off_is_left_out(run: RunLayout) -> None:
    note(run, "submitting")
    with run.evaluations.open("a") as stream:
        stream.write('{"kind": "ended", "na')
    note(run, "submitted", job_id=3)
    assert now(run).state == "submitted"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it wrote no {output}"),
        ("{", "cannot be read"),
        ("[1]", "is no JSON object"),
        ("{}", "is no JSON object"),
        ('{"loss": "2"}', "has no number for 'loss'"),
        ('{"ok": true}', "has no number for 'ok'"),
        ('{"loss": NaN}', "has nan for 'loss'"),
        ('{"loss": 2, "accuracy": 0.5}', ""),
    ],
)
def test_what_a_command_may_write(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "output.json"
    if text is not None:
        path.write_text(text)
    metrics, found = parse_metrics(path)
    assert reason in found and (metrics is None) == bool(reason)
    if not reason:
        assert metrics == {"loss": 2.0, "accuracy": 0.5}


def test_checkpoints_stay_until_their_evaluations_are_settled(run: RunLayout) -> None:
    epochs: dict[int, int | None] = {4: 1, 8: 1, 10: 1, 12: None}
    assert needed_steps(run, epochs) == set(), "a run without evaluation jobs"
    job = EvaluationJob(name="score", every_steps=4)
    settings = EvaluationSettings(jobs=(job,), last_step=10)
    run.evaluation_config.write_text(settings.model_dump_json())
    assert needed_steps(run, epochs) == {4, 8, 10}, "12 is no checkpoint that anybody can read"
    note(run, "submitting")
    note(run, "submitted", job_id=1)
    assert needed_steps(run, epochs) == {4, 8, 10}
    note(run, "ended", by="job", job_id=1, metrics={"loss": 1.0})
    assert needed_steps(run, epochs) == {4, 10}
    assert needed_steps(run, {8: 2}) == {8}, "another launch has saved that step again"
    run.evaluation_config.write_text(settings.model_dump_json().replace(":1,", ":9,", 1))
    with pytest.raises(InvalidInputError, match="format version 9"):
        needed_steps(run, epochs)


def test_the_newest_save_of_a_step_counts() -> None:
    rows = newest_of_each_step(
        [
            Evaluation(name=name, step=step, epoch=epoch)
            for name, step, epoch in [("b", 8, 1), ("b", 8, 2), ("a", 8, 1), ("b", 4, 1)]
        ]
    )
    assert [(one.name, one.step, one.epoch) for one in rows] == [
        ("b", 4, 1),
        ("a", 8, 1),
        ("b", 8, 2),
    ]


def test_one_process_submits(run: RunLayout) -> None:
    with submission_lock(run) as first, submission_lock(run) as second:
        assert first and not second
    with submission_lock(run) as again:
        assert again
