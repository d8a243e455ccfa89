"""What a rehearsal takes for a proof, by launches made up for it, and what `submit` says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import rehearsal_note
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.rehearsals import Proof, RehearsalRecord, read_rehearsals, record_rehearsal
from hpctrain.records.run_records import Progress, StepMetrics
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.spec.loader import load_any_run_spec
from hpctrain.spec.trainer import TrainerRunSpec
from hpctrain.trials.rehearsal import RehearsalRequest, rehearse
from hpctrain.trials.rehearsal_proofs import (
    CHECKPOINT,
    DAMAGED,
    LOSSES,
    RESUME,
    SAVE,
    TriedLaunch,
    launches_of,
    passed_over,
    restarted,
    resumed,
    same_losses,
    saved_on_signal,
    unpromised,
)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def row(epoch: int, step: int, loss: float) -> StepMetrics:
    return StepMetrics(
        epoch=epoch,
        step=step,
        time=float(step),
        loss=loss,
        loss_hex=loss.hex(),
        grad_norm=None,
        learning_rate=None,
        step_seconds=None,
        tokens_per_second=None,
        mfu=None,
        memory_bytes=None,
        consumed_samples=None,
    )


def launch(epoch: int, resume_step: int, last_step: int, shift: float = 0.0) -> TriedLaunch:
    """A launch that has trained to `last_step`, whose losses are off by `shift`."""
    rows = tuple(row(epoch, n, 1 / n + shift) for n in range(resume_step + 1, last_step + 1))
    end = Event(event=EventKind.LAUNCH_ENDED, time=0.0, epoch=epoch, cause="crash", reason="killed")
    return TriedLaunch(start(epoch, resume_step), end, rows)


def start(epoch: int, resume_step: int) -> Event:
    return Event(
        event=EventKind.LAUNCH_STARTED, time=0.0, epoch=epoch, resume_step=resume_step or None
    )


def test_losses_are_compared_with_a_launch_that_went_through_the_checkpoint() -> None:
    """In whatever order the two were: a fallback trains through the checkpoint of a signal."""
    found = same_losses([[launch(1, 0, 14), launch(2, 10, 13)]], 1e-4, exact=True)
    assert found.verdict == "yes" and "step 11" in found.fact
    assert "bit for bit" in found.fact and "3 steps behind step 10" in found.fact
    back = same_losses(
        [[launch(1, 0, 14), launch(2, 14, 17), launch(3, 10, 16)]], 1e-4, exact=False
    )
    assert "6 steps behind step 14, 10" in back.fact and "digits" in back.fact
    differs = same_losses([[launch(1, 0, 14), launch(2, 10, 13, 0.1)]], 1e-4, exact=True)
    assert differs.verdict == "no" and "more than rounding" in differs.fact
    rounded = same_losses([[launch(1, 0, 14), launch(2, 10, 13, 1e-9)]], 1e-4, exact=True)
    assert rounded.verdict == "yes" and "as rounding explains" in rounded.fact


def test_losses_of_launches_that_share_no_step_prove_nothing() -> None:
    alone = [launch(1, 0, 14), launch(2, 14, 20)]
    assert same_losses([alone], 1e-4, exact=True).verdict == "not tried"
    other_run = [launch(2, 10, 13)]
    assert same_losses([[launch(1, 0, 14)], other_run], 1e-4, exact=True).verdict == "not tried"


@pytest.mark.parametrize(
    ("before", "newest", "verdict", "words"),
    [
        (10, 14, "yes", "step 14 saved in 2 s; left 3 s after the signal, exit 75"),
        (10, 10, "no", "the 4 since 10 would be lost"),
        (10, 12, "no", "the 2 since 12 would be lost"),
        (14, 14, "no", "no new checkpoint after step 14"),
    ],
)
def test_a_save_on_the_signal_is_one_of_the_last_step(
    before: int, newest: int, verdict: str, words: str
) -> None:
    found = saved_on_signal(
        launch(1, 0, 14), before, newest, save_seconds=2.0, leave_seconds=3.0, exit_codes=(75,)
    )
    assert (found.verdict, words in found.fact) == (verdict, True), found


def test_a_resume_begins_behind_the_newest_good_checkpoint() -> None:
    assert resumed(launch(2, 10, 12), 10, "so").verdict == "yes"
    assert "newest good checkpoint is step 20" in resumed(launch(2, 10, 12), 20, "so").fact
    assert resumed(launch(2, 10, 12), 5, "so").verdict == "yes", "published after the end"
    over = TriedLaunch(start(2, 10), rows=(row(2, 1, 1.0),))
    assert "its first step was 1" in resumed(over, 10, "so").fact
    assert resumed(launch(2, 0, 3), 0, "so").verdict == "no", "there was nothing to resume from"


def test_a_killed_rank_costs_the_steps_since_the_checkpoint() -> None:
    found = restarted(launch(1, 0, 14), launch(2, 10, 12), 10, "rank 7", 4.0)
    assert found.verdict == "yes"
    assert "rank 7" in found.fact and "from step 10, 4 steps lost" in found.fact
    behind = restarted(launch(1, 0, 14), launch(2, 0, 12), 10, "rank 7", 4.0)
    assert behind.verdict == "no" and behind.fact.endswith("newest good checkpoint is step 10")
    left = restarted(launch(1, 0, 14), launch(2, 14, 16), 10, "rank 7", 4.0)
    assert left.verdict == "yes", "published after the end of the launch that had saved it"


def test_a_truncated_checkpoint_has_to_be_rejected() -> None:
    event = Event(
        event=EventKind.CHECKPOINT_REJECTED, time=0.0, checkpoint_step=20, reason="half of it"
    )
    good = passed_over(launch(3, 10, 12), [event], 20, 10)
    assert good.verdict == "yes" and "half of it" in good.fact
    assert passed_over(launch(3, 20, 22), [], 20, 10).verdict == "no"
    assert passed_over(launch(3, 30, 32), [], 20, 10).verdict == "not tried", "nobody looked at it"
    assert passed_over(launch(3, 0, 22), [event], 20, 10).verdict == "no", "not the one before"


def test_launches_have_their_rows_their_end_and_the_sign_of_life_of_the_last() -> None:
    events = [
        Event(event=EventKind.LAUNCH_STARTED, time=1.0, epoch=1, resume_step=0),
        Event(event=EventKind.LAUNCH_ENDED, time=2.0, epoch=1, cause="ended_early", reason="at 3"),
        Event(event=EventKind.LAUNCH_STARTED, time=3.0, epoch=2, resume_step=5),
    ]
    sign = Progress(epoch=2, phase="training", step=8, target_step=None, time=9.0)
    first, second = launches_of(events, [row(1, 1, 1.0), row(1, 2, 0.5)], sign)
    assert (first.last_step, first.end_words, first.progress) == (2, "ended early: at 3", None)
    assert (second.first_step, second.last_step, second.seen_seconds) == (None, 8, 6.0)


# -- What is promised, and the level that is proved ----------------------------------------------

OWN = """
name: own
trainer:
  command: [python, own.py, "{output}"RESUME]
  done: {step: 10}
MORE
resources: {gpus: 1}
"""
SAVES = '  checkpoint: {path: "state-{step}"}\n'


@pytest.mark.parametrize(
    ("more", "topics"),
    [
        ("", {CHECKPOINT, RESUME, DAMAGED, SAVE, LOSSES}),
        (SAVES, {SAVE, LOSSES}),
        (SAVES + "  signal: {save: TERM}\n", {LOSSES}),
        (SAVES + "  metrics: [{output: 'step (?P<step>\\d+)'}]\n", {SAVE, LOSSES}),
        (SAVES + "  metrics: [{output: '(?P<step>\\d+) (?P<loss>\\d+)'}]\n", {SAVE}),
    ],
)
def test_a_trainer_promises_what_its_spec_has_fields_for(
    more: str, topics: set[str], tmp_path: Path
) -> None:
    spec = tmp_path / "own.yaml"
    resume = ', "{resume}"' if more else ""
    spec.write_text(OWN.replace("RESUME", resume).replace("MORE\n", more))
    document = load_any_run_spec(spec).document
    assert isinstance(document, TrainerRunSpec)
    assert {topic for topic, _ in unpromised(document.trainer)} == topics


def test_a_trainer_that_saves_where_the_real_run_saves_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "own.yaml"
    text = OWN.replace("RESUME", ', "{resume}"').replace("MORE\n", SAVES)
    spec.write_text(text.replace("state-{step}", "/real/state-{step}"))
    with pytest.raises(UsageError, match="where the run itself saves"):
        rehearse(RehearsalRequest(spec, "sandbox"), tmp_path, FakeSlurm())  # type: ignore[arg-type]


def proof(topic: str, level: int, verdict: str, *, promised: bool = True) -> Proof:
    values = {"topic": topic, "level": level, "verdict": verdict, "fact": "", "promised": promised}
    return Proof.model_validate(values)


def record(*proofs: Proof, spec_digest: str = "s", profile_digest: str = "p") -> RehearsalRecord:
    return RehearsalRecord(
        event="rehearsed",
        spec_name="gpt1300m",
        spec_digest=spec_digest,
        profile="a100x1",
        profile_digest=profile_digest,
        event_time=0.0,
        proofs=proofs,
    )


def test_the_level_is_the_highest_of_which_all_is_proved() -> None:
    start, resume = proof("start", 0, "yes"), proof("resume", 1, "yes")
    save, losses = proof("save", 2, "no"), proof("losses", 3, "yes")
    assert record(start, resume, losses).proved_level == 3
    found = record(start, resume, save, losses)
    assert (found.proved_level, found.promised_level) == (1, 3)
    assert found.level_words == "level 1 (resumes) of 3; failed: save"
    assert record(proof("start", 0, "no"), resume).proved_level is None
    target = proof("target", 0, "not tried", promised=False)
    assert record(start, target).proved_level == 0 and not record(start, target).missing


def test_submit_says_what_was_rehearsed_and_once_that_nothing_was(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    prepared = prepare(EXAMPLES / "gpt1300m.yaml", "a100x1", runs=runs)
    assert rehearsal_note(prepared, runs) == ("This run has not been rehearsed", False)
    assert rehearsal_note(prepared, runs) is None, "it is told once"
    done = record(
        proof("start", 0, "yes"),
        spec_digest=prepared.spec.digest,
        profile_digest=prepared.profile.digest,
    )
    record_rehearsal(runs, done)
    note = rehearsal_note(prepared, runs)
    assert note is not None and note[1]
    assert note[0].startswith("Rehearsed on 1970-01-01: level 0")
    assert [one.event for one in read_rehearsals(runs)] == ["told", "rehearsed"]
    other = prepare(EXAMPLES / "gpt1300m.yaml", "a100x1", ["seed=5"], runs=runs)
    assert rehearsal_note(other, runs) is None, "another text is not that run"
