"""Steps and losses of other trainers: from lines and files to rows, and nothing made up."""

from __future__ import annotations

import errno
import json
import math
import random
import sys
from pathlib import Path

import pytest
from agent_runs import AgentRun

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Progress, read_metrics, read_record
from hpctrain.spec.trainer import ProgressSource
from hpctrain.train import report
from hpctrain.trainer.progress import FileReader, OutputReader, Recorder, Values, wrong_start

STEP_LOSS = r"step (?P<step>\S+)(?: loss (?P<loss>\S+))?"


def source(**given: object) -> ProgressSource:
    return ProgressSource.model_validate(given)


def heard(pattern: str, line: str, target: int | None = None) -> list[Values]:
    return list(OutputReader((source(output=pattern),), target).read(line))


# -- Lines of output -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 5 loss 2.5", [{"step": 5.0, "loss": 2.5}]),
        ("step 1,200 loss 1e-3", [{"step": 1200.0, "loss": 1e-3}]),
        ("step 5", [{"step": 5.0}]),  # a group that takes no part
        ("step 5 loss tiny", [{"step": 5.0}]),
        ("step five loss 2.5", []),
        ("step nan loss 2.5", []),
        ("step inf", []),
        ("step 1e400", []),
        ("step 1 loss 2 step 2 loss 3", [{"step": 1.0, "loss": 2.0}, {"step": 2.0, "loss": 3.0}]),
        ("nothing", []),
    ],
)
def test_a_line_has_what_its_groups_say(line: str, found: list[Values]) -> None:
    assert heard(STEP_LOSS, line) == found


def test_a_loss_that_is_no_number_is_a_loss() -> None:
    [values] = heard(STEP_LOSS, "step 5 loss nan")
    assert math.isnan(values["loss"])


def test_the_target_tells_the_bar_of_training_from_others() -> None:
    bar = r"(?P<step>\d+)/{done} \["
    assert heard(bar, " 10%|# | 20/200 [00:01<", 200) == [{"step": 20.0}]
    assert heard(bar, " 40%|# | 20/50 [00:01<", 200) == []
    assert heard(bar, " 40%|# | 20/50 [00:01<") == [{"step": 20.0}]


# -- Files -----------------------------------------------------------------------------------------


def rows(reader: FileReader) -> list[Values]:
    return list(reader.read())


def test_each_row_of_a_csv_is_read_once_when_its_line_is_whole(tmp_path: Path) -> None:
    reader = FileReader(source(csv="*/m.csv", step="n", loss="train_loss"), tmp_path)
    assert rows(reader) == []
    path = tmp_path / "v0" / "m.csv"
    path.parent.mkdir()
    path.write_text("epoch,train_loss,n\n0,2.5,1\n0,,2\n0,1.")
    assert rows(reader) == [{"step": 1.0, "loss": 2.5}, {"step": 2.0}]
    with path.open("a") as stream:
        stream.write("5,3\n")
    assert rows(reader) == [{"step": 3.0, "loss": 1.5}]
    assert rows(reader) == []


def test_a_csv_that_is_written_anew_with_more_columns_is_read_anew(tmp_path: Path) -> None:
    """As loggers do when the first evaluation brings a new name."""
    reader = FileReader(source(csv="m.csv", loss="loss"), tmp_path)
    path = tmp_path / "m.csv"
    path.write_text("step,loss\n1,4\n2,3\n")
    assert len(rows(reader)) == 2
    path.write_text("accuracy,step,loss\n,1,4\n,2,3\n7,3,2\n")
    assert rows(reader)[-1] == {"step": 3.0, "loss": 2.0}
    path.write_text("step,loss\n4,1\n")  # shorter than what was read
    assert rows(reader) == [{"step": 4.0, "loss": 1.0}]


def test_lines_of_json_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    reader = FileReader(source(jsonl="log.jsonl", loss="loss"), tmp_path)
    lines = ('{"step": 1, "loss": 2}', "[1]", "{", '{"loss": 3}', '{"step": 1%s}' % ("0" * 400))
    (tmp_path / "log.jsonl").write_text("\n".join((*lines, '{"step": "7", "loss": null}', "")))
    assert rows(reader) == [{"step": 1.0, "loss": 2.0}, {"step": 7.0}]


def test_a_json_document_gives_the_rows_that_it_did_not_have_before(tmp_path: Path) -> None:
    given = source(json="checkpoint-*/state.json", rows="log_history", loss="loss")
    reader = FileReader(given, tmp_path)
    for last in (20, 30):
        path = tmp_path / f"checkpoint-{last}" / "state.json"
        path.parent.mkdir()
        history = [{"step": step, "loss": 1 / step} for step in range(10, last + 1, 10)]
        path.write_text(json.dumps({"log_history": [*history, {"step": last, "eval_loss": 1}]}))
        assert rows(reader)[-1] == {"step": last, "loss": 1 / last}
    assert rows(reader) == []


@pytest.mark.parametrize("text", ["[1, 2]", "7", "{", '{"log_history": 3}', '{"log_history": [4]}'])
def test_a_document_of_another_form_has_no_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert rows(FileReader(source(json="state.json", rows="log_history"), tmp_path)) == []


def test_what_is_there_before_the_trainer_starts_is_not_of_this_launch(tmp_path: Path) -> None:
    """A checkpoint that was put back, or a log to which every launch adds."""
    (tmp_path / "log.csv").write_text("step,loss\n1,4\n2,3\n")
    (tmp_path / "state.json").write_text('{"log_history": [{"step": 2, "loss": 3}]}')
    readers = [
        FileReader(source(csv=str(tmp_path / "log.csv"), loss="loss"), tmp_path),
        FileReader(source(json="state.json", rows="log_history", loss="loss"), tmp_path),
    ]
    for reader in readers:
        reader.pass_over()
    assert [rows(reader) for reader in readers] == [[], []]
    with (tmp_path / "log.csv").open("a") as stream:
        stream.write("3,2\n")
    assert rows(readers[0]) == [{"step": 3.0, "loss": 2.0}]


def test_the_history_before_the_resume_is_no_new_row(tmp_path: Path) -> None:
    reader = FileReader(source(json="state.json", rows="h", loss="loss"), tmp_path, after_step=20)
    history = [{"step": step, "loss": 1.0} for step in (10, 20, 30)]
    (tmp_path / "state.json").write_text(json.dumps({"h": history}))
    assert [one["step"] for one in rows(reader)] == [30.0]


def test_scalars_of_event_files_are_rows(tmp_path: Path) -> None:
    writer_of = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    with writer_of(tmp_path / "tb") as writer:
        for step in (1, 2):
            writer.add_scalar("train/loss", 1 / step, step)
            writer.add_scalar("train/grad_norm", 2.0, step)  # an event of its own
    given = source(tensorboard="tb/events*", loss="train/loss", grad_norm="train/grad_norm")
    reader = FileReader(given, tmp_path)
    assert rows(reader) == [
        {"step": 1.0, "loss": 1.0, "grad_norm": 2.0},
        {"step": 2.0, "loss": 0.5, "grad_norm": 2.0},
    ]
    assert rows(reader) == []


# -- What is recorded ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.json").write_text("{}")
    return RunLayout(tmp_path / "run")


def recorder(run: RunLayout, resume_step: int = 0, **more: bool) -> Recorder:
    tells = more.get("tells", True)
    return Recorder(run, 1, resume_step, 100, tells=tells, beats=not tells)


def test_what_was_not_reported_stays_unknown(run: RunLayout) -> None:
    one = recorder(run)
    one.report({"step": 3.0, "loss": 0.1})
    one.close()
    [row] = read_metrics(run)
    assert (row.step, row.loss, row.loss_hex) == (3, 0.1, (0.1).hex())
    known = {"schema_version", "step", "epoch", "time", "loss", "loss_hex", "fields"}
    others = {name: value for name, value in row.model_dump().items() if name not in known}
    assert not any(others.values()), others


def test_a_loss_that_is_no_number_is_told_by_its_bits(run: RunLayout) -> None:
    one = recorder(run)
    one.report({"step": 3.0, "loss": math.nan, "grad_norm": math.inf})
    one.close()
    [row] = read_metrics(run)
    assert (row.loss, row.loss_hex, row.grad_norm) == (None, "nan", None)


def test_step_0_and_a_step_alone_make_no_row(run: RunLayout) -> None:
    one = recorder(run)
    one.report({"step": 0.0, "loss": 9.0})
    assert not one.has_stepped
    one.report({"step": 1.0})
    assert one.has_stepped and one.step == 1
    one.close()
    assert read_metrics(run) == []


def test_rows_ascend_whatever_is_reported(run: RunLayout) -> None:
    dice, one = random.Random(3), recorder(run, resume_step=10)
    for _ in range(300):
        step, at = dice.randint(11, 90), dice.choice((None, 5.0))
        one.report({"step": float(step), "loss": dice.random()}, read_at=at)
    one.close()
    steps = [row.step for row in read_metrics(run)]
    assert steps == sorted(set(steps)) and steps[0] > 10 and one.step == steps[-1]


def test_rows_that_come_late_have_no_seconds_of_now(run: RunLayout) -> None:
    one = recorder(run)
    for step in (10.0, 20.0, 30.0):
        one.report({"step": step, "loss": 1.0}, read_at=5.0)
    one.report({"step": 40.0, "loss": 1.0, "seconds": 0.25, "tokens": 100.0}, read_at=5.0)
    one.close()
    found = [(row.step_seconds, row.tokens_per_second) for row in read_metrics(run)]
    assert found == [(None, None)] * 3 + [(0.25, 400.0)]


def test_silence_means_something_only_of_who_tells(run: RunLayout) -> None:
    """Of one who does not, too, if its output is waited for; its first line ends the start."""
    for tells, beats, phase, heard in (
        (True, False, "starting", "starting"),
        (False, True, "training", "training"),
        (False, False, "starting", "training"),
    ):
        one = Recorder(run, 1, 0, 100, tells=tells, beats=beats)
        phases = []
        for _ in range(2):
            one._written_at = -math.inf
            one.write()
            progress = read_record(run.progress, Progress)
            assert progress is not None
            phases.append(progress.phase)
            one.sign()
        assert phases == [phase, heard]
    assert recorder(run, 7)._phase == "loading"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_progress_that_cannot_be_written_is_written_with_the_next_look(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither a full disk nor one that is away ends the trainer, which has said nothing since."""
    one = recorder(run)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as broken:
        broken.setattr(report, "write_record", refuse)
        one.phase("saving")
        assert not run.progress.exists()
    one.write()
    progress = read_record(run.progress, Progress)
    assert progress is not None and progress.phase == "saving"


# -- Where a launch begins -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "steps", "resume", "words"),
    [
        (None, [], 100, None),  # nobody knows yet
        (101, [110, 120], 100, None),
        (101, [110, 120, 130], 100, None),
        (1, [], 0, None),  # a fresh start begins at the beginning
        (10, [10, 20, 30], 0, None),
        (1, [], 100, "starts over"),
        (100, [], 100, "starts over"),  # it would train step 100 again
        (151, [160, 170, 180], 100, "another checkpoint"),
        (101, [101, 110, 120], 100, None),  # the first step is logged, too
        (105, [105, 110, 115], 100, None),
        (120, [120, 140, 160], 100, None),
    ],
)
def test_a_wrong_start_is_seen_in_the_first_reports(
    first: int | None, steps: list[int], resume: int, words: str | None
) -> None:
    found = wrong_start(first, steps, resume)
    assert (found is None) if words is None else (found is not None and words in found)


def test_no_right_start_is_taken_for_a_wrong_one() -> None:
    """Any interval of reports, and any number of steps that begin in between."""
    for resume in (1, 7, 100, 101, 199):
        for interval in (1, 2, 5, 10, 50):
            told = [step for step in range(resume + 1, resume + 4 * interval + 1)]
            told = [step for step in told if step % interval == 0][:3]
            assert wrong_start(told[0], told, resume) is None, (resume, interval)


# Rank 1 alone prints, and its last line comes when rank 0 has ended.
LAST_RANK_PRINTS = """
import os, time
for step in range(1, 21):
    if os.environ["RANK"] == "1":
        time.sleep(0.1)
        print(f"step {step} loss {1 / step!r}", flush=True)
"""


@pytest.mark.parametrize(
    ("launch", "node"), [("srun", "n1"), pytest.param("torchrun", "n2", marks=pytest.mark.variant)]
)
def test_what_another_agent_hears_counts(tmp_path: Path, launch: str, node: str) -> None:
    run = AgentRun.made(tmp_path / "run")
    first = run.start(
        environment={"WORLD_SIZE": "2"},
        command=[sys.executable, "-c", LAST_RANK_PRINTS],
        ranks=2 if launch == "srun" else 1,
        launch=launch,
        checkpoint=None,
    )
    other = run.beside(first, node)
    assert (first.wait(), other.wait()) == (0, 0), first.printed
    assert [row.step for row in first.rows] == list(range(1, 21))
    assert run.done() is not None
